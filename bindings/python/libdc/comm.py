"""Communicators: groups of ranks that call the same collectives in the same order."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from ._handle import OwnedHandle
from ._lib import ffi, gc_handle, lib, new_struct
from .arguments import c_string, check_size, counted, handle_arg, int64_array, timeout_ns
from .device import Device, Stream, handle_of, place_of
from .errors import check
from .external import Collectives, External, drop_table, make_table
from .tensors import View
from .types import ReduceOp, Status


def _options(timeout: Optional[float], heap_bytes: int) -> Any:
    options = new_struct("dc_comm_options")
    options.timeout_ns, options.heap_bytes = timeout_ns(timeout), check_size("heap_bytes", heap_bytes)
    return options


def _network_options(timeout: Optional[float], secret: Optional[str], network: Optional[str], ports: Tuple[int, int],
                     heartbeat: Optional[float], node: Optional[str], tls: bool = False) -> Tuple[Any, List[Any]]:
    """The options, and the strings that must live as long."""
    options = _options(timeout, 0)
    texts = [None if text is None else c_string(what, text) for what, text in (("secret", secret),
                                                                               ("network", network), ("node", node))]
    pins = [ffi.NULL if text is None else ffi.from_buffer("char[]", text + b"\0") for text in texts]
    options.secret, options.network, options.node = pins
    options.first_port, options.last_port = ports
    options.heartbeat_ns = timeout_ns(heartbeat, "heartbeat")
    options.tls = bool(tls)
    return options, pins


class Comm(OwnedHandle):
    """A rank's end of a communicator. Made by threads(), processes(), tcp(), mpi(), single() or external()."""

    _kind = "communicator"

    def __init__(self, pointer: Any, external: Optional[External] = None, takes_devices: bool = False,
                 shares_memory: bool = True) -> None:
        self._owned = gc_handle(pointer, lib.dc_comm_destroy)
        self._external = external
        self.shares_memory = shares_memory and external is None  # whether ranks can read each other's memory
        self.takes_devices = takes_devices  # whether collectives take tensors on a CUDA device; else use nccl()
        self._group: Optional[List[Any]] = None

    @classmethod
    def threads(cls, n: int, timeout: Optional[float] = None, heap_bytes: int = 0) -> List["Comm"]:
        """Ranks as threads of this process: returns one communicator for each. timeout in seconds; None: 300."""
        n = check_size("n", n, (1 << 31) - 1)
        out = ffi.new("dc_comm *[]", min(max(n, 1), 64))  # the library refuses more than 64
        check(lib.dc_comm_create_threads(n, _options(timeout, heap_bytes), out))
        return [cls(out[rank], takes_devices=True) for rank in range(n)]

    @classmethod
    def single(cls) -> "Comm":
        """A world of one rank."""
        return cls.threads(1)[0]

    @classmethod
    def processes(cls, name: str, rank: int, world: int, timeout: Optional[float] = None,
                  heap_bytes: int = 0) -> "Comm":
        """Ranks as processes of this machine; blocks until all have joined."""
        out = ffi.new("dc_comm **")
        check(lib.dc_comm_create_processes(c_string("name", name), rank, world, _options(timeout, heap_bytes), out))
        return cls(out[0])

    @classmethod
    def tcp(cls, address: str, name: str, rank: int, world: int, timeout: Optional[float] = None,
            secret: Optional[str] = None, network: Optional[str] = None, ports: Tuple[int, int] = (0, 0),
            heartbeat: Optional[float] = None, node: Optional[str] = None, tls: bool = False) -> "Comm":
        """Ranks on any machines, over TCP; blocks until all have joined. address: "HOST:PORT" of rank 0; name: the
        group's; secret: at least 16 bytes that only the group's ranks know, None: all ranks are on this machine;
        network: the interface (its name, or a CIDR) to listen on, None: all; ports: the first and last port that ranks
        other than 0 listen on; heartbeat in seconds, None: 1; node: a text that the ranks of one machine have in
        common, "": no ranks share memory, None: the machine's own; tls: TLS 1.3 between the ranks, which needs a secret
        and OpenSSL 3."""
        out = ffi.new("dc_comm **")
        options, _pins = _network_options(timeout, secret, network, ports, heartbeat, node, tls)
        check(lib.dc_comm_create_tcp(c_string("address", address), c_string("name", name), rank, world, options, out))
        return cls(out[0], shares_memory=False)

    @classmethod
    def mpi(cls, timeout: Optional[float] = None, network: Optional[str] = None, ports: Tuple[int, int] = (0, 0),
            heartbeat: Optional[float] = None, node: Optional[str] = None) -> "Comm":
        """The ranks of MPI_COMM_WORLD, whose data MPI moves; blocks until all have joined. Start the processes by
        mpirun or a similar launcher. The parameters, as in tcp(), are for the TCP connections over which ranks compare
        their calls."""
        out = ffi.new("dc_comm **")
        options, _pins = _network_options(timeout, None, network, ports, heartbeat, node)
        check(lib.dc_comm_create_mpi(options, out))
        return cls(out[0], shares_memory=False)

    @classmethod
    def external(cls, collectives: Collectives, rank: int, world: int, timeout: Optional[float] = None) -> "Comm":
        """A communicator over the caller's transport. An exception that the transport raises is the cause of the
        resulting Error."""
        table, state = make_table(collectives, world)
        out = ffi.new("dc_comm **")
        status = lib.dc_comm_create_external(table, rank, world, _options(timeout, 0), out)
        if status != Status.OK:
            drop_table(table)
        check(status)
        return cls(out[0], state)

    def nccl(self, device: Any) -> "Comm":
        """A communicator of the same ranks, each with its own card, that moves a libdc.Device's memory through NVIDIA's
        NCCL. Blocks until all have joined. Context.init makes one where its device needs it."""
        out = ffi.new("dc_comm **")
        c_device = handle_arg("nccl: device", device, Device, optional=False)
        self._check(lib.dc_comm_create_nccl(self._handle, c_device, out))
        return Comm(out[0], self._external, True)

    @property
    def handle(self) -> int:
        """Address of the dc_comm, for other bindings."""
        return int(ffi.cast("uintptr_t", self._handle))

    @property
    def rank(self) -> int:
        return int(lib.dc_comm_rank(self._handle))

    @property
    def size(self) -> int:
        return int(lib.dc_comm_size(self._handle))

    def _check(self, status: int) -> None:
        check(status, cause_of(self))

    def _view(self, name: str, array: Any, stream: Optional[Stream], writable: bool = False) -> View:
        """A view for a collective. Tensors on a CUDA device need a stream of that device."""
        return View(array, writable, name, (place_of(stream),))

    def dup(self) -> "Comm":
        """Another communicator of the same ranks, whose collectives can overlap this one's."""
        out = ffi.new("dc_comm **")
        self._check(lib.dc_comm_dup(self._handle, out))
        return Comm(out[0], self._external, self.takes_devices, self.shares_memory)

    def split(self, color: Optional[int], key: int = 0) -> Optional["Comm"]:
        """A communicator of the ranks that give the same color, ordered by key, then by rank in this one. All ranks
        must call. A rank with color None is in no part, and gets None."""
        out = ffi.new("dc_comm **")
        self._check(lib.dc_comm_split(self._handle, -1 if color is None else check_size("color", color, (1 << 31) - 1),
                                      key, out))
        if out[0] == ffi.NULL:
            return None
        return Comm(out[0], self._external, self.takes_devices, self.shares_memory)

    def all_gather(self, send: Any, recv: Any, counts: Optional[Sequence[int]] = None,
                   stream: Optional[Stream] = None) -> Any:
        """recv = the ranks' send tensors, concatenated in rank order. Returns recv."""
        views = self._view("all_gather: send", send, stream), self._view("all_gather: recv", recv, stream, True)
        self._check(lib.dc_comm_all_gather(self._handle, views[0].c, views[1].c, self._counts(counts),
                                           handle_of(stream)))
        self._pin(stream, views)
        return recv

    def reduce_scatter(self, send: Any, recv: Any, counts: Optional[Sequence[int]] = None, op: int = ReduceOp.SUM,
                       stream: Optional[Stream] = None) -> Any:
        """recv = this rank's block of the sum (or mean) over ranks of send. Returns recv."""
        views = self._view("reduce_scatter: send", send, stream), self._view("reduce_scatter: recv", recv, stream, True)
        self._check(lib.dc_comm_reduce_scatter(self._handle, views[0].c, views[1].c, self._counts(counts), op,
                                               handle_of(stream)))
        self._pin(stream, views)
        return recv

    def all_reduce(self, data: Any, op: int = ReduceOp.SUM, stream: Optional[Stream] = None) -> Any:
        """data = the sum (or mean) over ranks, in place. Returns data."""
        view = self._view("all_reduce: data", data, stream, True)
        self._check(lib.dc_comm_all_reduce(self._handle, view.c, op, handle_of(stream)))
        self._pin(stream, view)
        return data

    def broadcast(self, data: Any, root: int = 0, stream: Optional[Stream] = None) -> Any:
        """Copies data of rank root to every rank, in place. Returns data."""
        view = self._view("broadcast: data", data, stream, True)
        self._check(lib.dc_comm_broadcast(self._handle, view.c, root, handle_of(stream)))
        self._pin(stream, view)
        return data

    def all_to_all(self, send: Any, recv: Any, send_counts: Optional[Sequence[int]] = None,
                   recv_counts: Optional[Sequence[int]] = None, stream: Optional[Stream] = None) -> Any:
        """recv = part `rank` of each rank's send, in rank order. Parts are of equal size, or have counts. Returns
        recv."""
        views = self._view("all_to_all: send", send, stream), self._view("all_to_all: recv", recv, stream, True)
        self._check(lib.dc_comm_all_to_all(self._handle, views[0].c, self._counts(send_counts, "send_counts"),
                                           views[1].c, self._counts(recv_counts, "recv_counts"), handle_of(stream)))
        self._pin(stream, views)
        return recv

    def gather(self, send: Any, recv: Any = None, counts: Optional[Sequence[int]] = None, root: int = 0,
               stream: Optional[Stream] = None) -> Any:
        """On rank root, recv = the ranks' send tensors, concatenated in rank order. Other ranks need no recv. Returns
        recv."""
        views = self._view("gather: send", send, stream), self._root_view("gather: recv", recv, root, stream, True)
        self._check(lib.dc_comm_gather(self._handle, views[0].c, views[1].c, self._root_counts(counts, root), root,
                                       handle_of(stream)))
        self._pin(stream, views)
        return recv

    def scatter(self, send: Any, recv: Any, counts: Optional[Sequence[int]] = None, root: int = 0,
                stream: Optional[Stream] = None) -> Any:
        """recv = this rank's part of rank root's send. Other ranks need no send. Returns recv."""
        views = self._root_view("scatter: send", send, root, stream), self._view("scatter: recv", recv, stream, True)
        self._check(lib.dc_comm_scatter(self._handle, views[0].c, self._root_counts(counts, root), views[1].c, root,
                                        handle_of(stream)))
        self._pin(stream, views)
        return recv

    def barrier(self) -> None:
        self._check(lib.dc_comm_barrier(self._handle))

    @contextlib.contextmanager
    def group(self, stream: Optional[Stream] = None) -> Iterator["Comm"]:
        """Collectives queued inside start as one, on `stream`. Each of them must be given that stream too."""
        self._check(lib.dc_comm_group_begin(self._handle))
        pins: List[Any] = []
        self._group = pins
        try:
            yield self
        finally:
            self._group = None
            status = lib.dc_comm_group_end(self._handle, handle_of(stream))
            self._pin(stream, pins)
        self._check(status)

    def abort(self, reason: Optional[str] = None) -> None:
        """Makes every present and future collective of the group fail, on every rank."""
        lib.dc_comm_abort(self._handle, ffi.NULL if reason is None else c_string("reason", reason))

    def set_checksums(self, enable: bool = True) -> None:
        """Makes ranks compare checksums of all data that they read from each other, for debugging. Every rank must set
        it."""
        self._check(lib.dc_comm_set_checksums(self._handle, int(enable)))

    def check(self) -> None:
        """Raises the first failure of this communicator's group, if there was one."""
        self._check(lib.dc_comm_check(self._handle))

    def _root_view(self, name: str, array: Any, root: int, stream: Optional[Stream], writable: bool = False) -> View:
        return self._view(name, array if self.rank == root else None, stream, writable)

    def _root_counts(self, counts: Optional[Sequence[int]], root: int) -> Any:
        return self._counts(counts) if self.rank == root else ffi.NULL

    def _counts(self, counts: Optional[Sequence[int]], name: str = "counts") -> Any:
        if counts is None:
            return ffi.NULL
        if len(counts) != self.size:
            raise ValueError(f"{name} has {counted(len(counts), 'entry', 'entries')}, must have one for each of "
                             f"{counted(self.size, 'rank')}")
        return int64_array(name, counts)[0]

    def _pin(self, stream: Optional[Stream], views: Any) -> None:
        if self._group is not None:
            self._group.append(views)
        elif stream is not None:
            stream.pin(views)

    def close(self) -> None:
        """Releases the handle. Contexts that use the communicator keep the communicator alive."""
        super().close()


def cause_of(comm: Optional[Comm]) -> Optional[BaseException]:
    """The first exception that an external communicator's transport raised, if there was one."""
    external = comm._external if comm is not None else None
    return external.errors[0] if external is not None and external.errors else None
