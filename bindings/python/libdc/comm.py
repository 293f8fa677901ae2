"""Communicators: groups of ranks that call the same collectives in the same order."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from ._handle import OwnedHandle
from ._lib import InCallback, Registry, callback, ffi, gc_handle, lib, new_struct
from .arguments import c_string, check_size, counted, handle_arg, int64_array, timeout_ns
from .device import Device, Stream, handle_of, place_of
from .errors import check
from .tensors import View
from .types import DType, ReduceOp, Status


class Collectives:
    """A transport of the caller's; subclass it for Comm.external. Every method blocks until done, on whatever thread
    it is called, and returns None or raises. Buffers are writable memoryviews of bytes; their sizes give the counts."""

    def all_gather(self, send: memoryview, recv: memoryview, dtype: DType) -> None:
        """recv = every rank's send, in rank order."""
        raise NotImplementedError

    def reduce_scatter(self, send: memoryview, recv: memoryview, dtype: DType) -> None:
        """recv = sum over ranks of block `rank` of send."""
        raise NotImplementedError

    def broadcast(self, data: memoryview, root: int) -> None:
        raise NotImplementedError

    def barrier(self) -> None:
        raise NotImplementedError

    def all_to_all(self, send: memoryview, send_counts: Sequence[int], recv: memoryview, recv_counts: Sequence[int],
                   dtype: DType) -> None:
        """Rank r gets send_counts[r] elements. With it libdc adds itself, in the order of every other transport, and
        pads nothing; a subclass may leave it out."""
        raise NotImplementedError

    def split(self, ranks: Sequence[int]) -> "Collectives":
        """A group of these ranks of this one, in this order. All ranks call at once, each with its group's ranks;
        one in no group with none, and returns itself. Comm.split needs it."""
        raise NotImplementedError

    def dup(self) -> Optional["Collectives"]:
        """An independent group of the same ranks; None: there is none, and all work shares this one."""
        return None

    def abort(self) -> None:
        """Makes blocked calls raise, on other ranks too if it can, and also one that has just begun and blocks later.
        Called at the deadline and by Comm.abort, on another thread, and when this rank alone cannot go on. The deadline
        cannot end a method that blocks and is not ended here."""

    def close(self) -> None:
        """Called once, when the communicator is gone."""


class _External:
    """Collectives in use, their world size, and the exceptions of the whole family of duplicates."""

    def __init__(self, collectives: Collectives, world: int, errors: List[BaseException]) -> None:
        self.collectives = collectives
        self.world = world
        self.errors = errors


_externals = Registry()
_TABLE = dict(ffi.typeof("dc_comm_callbacks").fields)
_CALLBACK_FAILED = 1


def _bytes(pointer: Any, count: int) -> memoryview:
    return memoryview(ffi.buffer(ffi.cast("char *", pointer), count)) if count else memoryview(bytearray())


def _guarded(user: Any, call: Any) -> int:
    """Runs a method of the caller's. An exception or a result, as of unfinished work, becomes an error number."""
    with InCallback():
        external = None
        try:
            external = _externals.get(user)
            result = call(external)
            if result is not None:
                raise TypeError(f"{type(external.collectives).__name__}'s method returned {result!r}, must return None")
            return 0
        except BaseException as error:
            if external is not None:
                external.errors.append(error)
            return _CALLBACK_FAILED


@callback(_TABLE["all_gather"].type, error=_CALLBACK_FAILED)
def _all_gather(send: Any, recv: Any, count: int, dtype: int, user: Any) -> int:
    size = count * lib.dc_dtype_size(dtype)
    return _guarded(user, lambda external: external.collectives.all_gather(
        _bytes(send, size), _bytes(recv, size * external.world), DType(dtype)))


@callback(_TABLE["reduce_scatter"].type, error=_CALLBACK_FAILED)
def _reduce_scatter(send: Any, recv: Any, count: int, dtype: int, user: Any) -> int:
    size = count * lib.dc_dtype_size(dtype)
    return _guarded(user, lambda external: external.collectives.reduce_scatter(
        _bytes(send, size * external.world), _bytes(recv, size), DType(dtype)))


@callback(_TABLE["broadcast"].type, error=_CALLBACK_FAILED)
def _broadcast(data: Any, size: int, root: int, user: Any) -> int:
    return _guarded(user, lambda external: external.collectives.broadcast(_bytes(data, size), root))


@callback(_TABLE["barrier"].type, error=_CALLBACK_FAILED)
def _barrier(user: Any) -> int:
    return _guarded(user, lambda external: external.collectives.barrier())


@callback(_TABLE["dup"].type, error=_CALLBACK_FAILED)
def _dup(user: Any, new_user: Any) -> int:
    def dup(external: _External) -> None:
        copy = external.collectives.dup()
        if copy is None:
            raise RuntimeError(f"{type(external.collectives).__name__}.dup() returned None after it had been used")
        new_user[0] = _externals.put(_External(copy, external.world, external.errors))

    return _guarded(user, dup)


@callback(_TABLE["split"].type, error=_CALLBACK_FAILED)
def _split(ranks: Any, count: int, user: Any, new_user: Any) -> int:
    def split(external: _External) -> None:
        part = external.collectives.split(ffi.unpack(ranks, count) if count else [])
        if count:
            new_user[0] = _externals.put(_External(part, count, external.errors))

    return _guarded(user, split)


@callback(_TABLE["all_to_all"].type, error=_CALLBACK_FAILED)
def _all_to_all(send: Any, send_counts: Any, recv: Any, recv_counts: Any, dtype: int, user: Any) -> int:
    def all_to_all(external: _External) -> None:
        counts = [ffi.unpack(each, external.world) for each in (send_counts, recv_counts)]
        sent, received = (_bytes(data, sum(each) * lib.dc_dtype_size(dtype))
                          for data, each in zip((send, recv), counts))
        external.collectives.all_to_all(sent, counts[0], received, counts[1], DType(dtype))

    return _guarded(user, all_to_all)


@callback(_TABLE["abort"].type)
def _abort(user: Any) -> None:
    _guarded(user, lambda external: external.collectives.abort())


@callback(_TABLE["destroy_user"].type)
def _destroy_user(user: Any) -> None:
    with InCallback():
        external = _externals.pop(user)
        try:
            external.collectives.close()
        except Exception as error:
            sys.unraisablehook(_Unraisable(error, external.collectives))
        del external


class _Unraisable:
    def __init__(self, error: BaseException, where: Any) -> None:
        self.exc_type, self.exc_traceback, self.object = type(error), error.__traceback__, where
        self.exc_value: Optional[BaseException] = error
        self.err_msg: Optional[str] = None


def _options(timeout: Optional[float], heap_bytes: int) -> Any:
    options = new_struct("dc_comm_options")
    options.timeout_ns, options.heap_bytes = timeout_ns(timeout), check_size("heap_bytes", heap_bytes)
    return options


def _network_options(timeout: Optional[float], secret: Optional[str], network: Optional[str], ports: Tuple[int, int],
                     heartbeat: Optional[float], node: Optional[str], tls: bool = False) -> Tuple[Any, List[Any]]:
    """The options, and what must live as long."""
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

    def __init__(self, pointer: Any, external: Optional[_External] = None, takes_devices: bool = False,
                 shares_memory: bool = True) -> None:
        self._owned = gc_handle(pointer, lib.dc_comm_destroy)
        self._external = external
        self.shares_memory = shares_memory and external is None  # whether ranks can read each other's
        self.takes_devices = takes_devices  # whether collectives may have tensors on a CUDA device; else: nccl()
        self._group: Optional[List[Any]] = None

    @classmethod
    def threads(cls, n: int, timeout: Optional[float] = None, heap_bytes: int = 0) -> List["Comm"]:
        """Ranks as threads of this process: one communicator for each. timeout in seconds, None: 300."""
        n = check_size("n", n, (1 << 31) - 1)
        out = ffi.new("dc_comm *[]", min(max(n, 1), 64))  # more are refused
        check(lib.dc_comm_create_threads(n, _options(timeout, heap_bytes), out))
        return [cls(out[rank], takes_devices=True) for rank in range(n)]

    @classmethod
    def single(cls) -> "Comm":
        """A world of one rank."""
        return cls.threads(1)[0]

    @classmethod
    def processes(cls, name: str, rank: int, world: int, timeout: Optional[float] = None,
                  heap_bytes: int = 0) -> "Comm":
        """Ranks as processes of this machine; blocks until all have come."""
        out = ffi.new("dc_comm **")
        check(lib.dc_comm_create_processes(c_string("name", name), rank, world, _options(timeout, heap_bytes), out))
        return cls(out[0])

    @classmethod
    def tcp(cls, address: str, name: str, rank: int, world: int, timeout: Optional[float] = None,
            secret: Optional[str] = None, network: Optional[str] = None, ports: Tuple[int, int] = (0, 0),
            heartbeat: Optional[float] = None, node: Optional[str] = None, tls: bool = False) -> "Comm":
        """Ranks on any machines, over TCP; blocks until all have come. address: "HOST:PORT", where rank 0 is; name: the
        group's; secret: at least 16 bytes that its ranks alone have, None: only for ranks of this machine; network: the
        interface (its name, or a CIDR) to listen at, None: all; ports: the first and last one to listen at, but for
        rank 0; heartbeat in seconds, None: 1; node: a text that the ranks of one machine have in common, "": none share
        memory, None: the machine's own; tls: TLS 1.3 between the ranks, which needs a secret and OpenSSL 3."""
        out = ffi.new("dc_comm **")
        options, _pins = _network_options(timeout, secret, network, ports, heartbeat, node, tls)
        check(lib.dc_comm_create_tcp(c_string("address", address), c_string("name", name), rank, world, options, out))
        return cls(out[0], shares_memory=False)

    @classmethod
    def mpi(cls, timeout: Optional[float] = None, network: Optional[str] = None, ports: Tuple[int, int] = (0, 0),
            heartbeat: Optional[float] = None, node: Optional[str] = None) -> "Comm":
        """The ranks of MPI_COMM_WORLD, whose data MPI moves; blocks until all have come. Start the processes by mpirun
        or its like. The parameters are for the TCP connections over which ranks compare their calls, as in tcp()."""
        out = ffi.new("dc_comm **")
        options, _pins = _network_options(timeout, None, network, ports, heartbeat, node)
        check(lib.dc_comm_create_mpi(options, out))
        return cls(out[0], shares_memory=False)

    @classmethod
    def external(cls, collectives: Collectives, rank: int, world: int, timeout: Optional[float] = None) -> "Comm":
        """A communicator over the caller's transport. An exception in it is the cause of the Error that follows."""
        table = new_struct("dc_comm_callbacks")
        table.all_gather, table.reduce_scatter = _all_gather, _reduce_scatter
        table.broadcast, table.barrier = _broadcast, _barrier
        if type(collectives).dup is not Collectives.dup:
            table.dup = _dup
        if type(collectives).split is not Collectives.split:
            table.split = _split
        if type(collectives).all_to_all is not Collectives.all_to_all:
            table.all_to_all = _all_to_all
        table.abort, table.destroy_user = _abort, _destroy_user
        state = _External(collectives, world, [])
        table.user = user = _externals.put(state)
        out = ffi.new("dc_comm **")
        status = lib.dc_comm_create_external(table, rank, world, _options(timeout, 0), out)
        if status != Status.OK:
            _externals.pop(user)
        check(status)
        return cls(out[0], state)

    def nccl(self, device: Any) -> "Comm":
        """The same ranks, each on a card of its own, moving a libdc.Device's memory through NVIDIA's NCCL; blocks until
        all have come. Context.init makes one where its device wants it."""
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
        """Tensors on a CUDA device are for a stream of that device."""
        return View(array, writable, name, (place_of(stream),))

    def dup(self) -> "Comm":
        """Another communicator of the same ranks, whose collectives overlap this one's."""
        out = ffi.new("dc_comm **")
        self._check(lib.dc_comm_dup(self._handle, out))
        return Comm(out[0], self._external, self.takes_devices, self.shares_memory)

    def split(self, color: Optional[int], key: int = 0) -> Optional["Comm"]:
        """A communicator of the ranks that give one color, ordered by key, then by rank here. All ranks must call;
        color None: this one is in none, and gets None."""
        out = ffi.new("dc_comm **")
        self._check(lib.dc_comm_split(self._handle, -1 if color is None else check_size("color", color, (1 << 31) - 1),
                                      key, out))
        if out[0] == ffi.NULL:
            return None
        return Comm(out[0], self._external, self.takes_devices, self.shares_memory)

    def all_gather(self, send: Any, recv: Any, counts: Optional[Sequence[int]] = None,
                   stream: Optional[Stream] = None) -> Any:
        """recv = the ranks' send tensors one after the other. Returns recv."""
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
        """data of rank root to every rank, in place. Returns data."""
        view = self._view("broadcast: data", data, stream, True)
        self._check(lib.dc_comm_broadcast(self._handle, view.c, root, handle_of(stream)))
        self._pin(stream, view)
        return data

    def barrier(self) -> None:
        self._check(lib.dc_comm_barrier(self._handle))

    @contextlib.contextmanager
    def group(self, stream: Optional[Stream] = None) -> Iterator["Comm"]:
        """Collectives queued inside start as one, on `stream`, which each of them must be given too."""
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
        """Compares checksums of all that ranks read from each other, for debugging; to be set on every rank."""
        self._check(lib.dc_comm_set_checksums(self._handle, int(enable)))

    def check(self) -> None:
        """Raises the first failure of this communicator's group, if there was one."""
        self._check(lib.dc_comm_check(self._handle))

    def _counts(self, counts: Optional[Sequence[int]]) -> Any:
        if counts is None:
            return ffi.NULL
        if len(counts) != self.size:
            raise ValueError(f"counts has {counted(len(counts), 'entry', 'entries')}, must have one for each of "
                             f"{counted(self.size, 'rank')}")
        return int64_array("counts", counts)[0]

    def _pin(self, stream: Optional[Stream], views: Any) -> None:
        if self._group is not None:
            self._group.append(views)
        elif stream is not None:
            stream.pin(views)

    def close(self) -> None:
        """Gives the handle back; contexts that use the communicator keep it alive."""
        super().close()


def cause_of(comm: Optional[Comm]) -> Optional[BaseException]:
    """The exception of an external communicator's own code, if there was one."""
    external = comm._external if comm is not None else None
    return external.errors[0] if external is not None and external.errors else None
