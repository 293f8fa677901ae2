"""The parameters of a sharded model on this rank: their shards in the library's context, and collectives among the
ranks."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import libdc
import torch
from torch import Tensor, nn

from .. import devices
from ..ops import eager_calls
from . import input_backwards
from .local_shard import LocalShard
from .meta_init import Uninitialized
from .part import as_bytes, plain_tensor
from .sharded_param import ShardedParam


class Options(NamedTuple):
    """The arguments of shard()."""

    stage: int
    bucket_size: int
    prefetch: int
    group_size: int
    reduce_dtype: Optional[torch.dtype]
    param_dtype: Optional[torch.dtype]
    check_finite: bool
    replicas: int = 1  # number of groups of ranks that each have all parameters
    unused: Optional[str] = None  # "zero": ranks may take different paths


_graph_ids = itertools.count(1 << 48)  # far from numbers that users give their graphs
_lock = threading.Lock()
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # our class's property is slower


class ParamGroup:
    """All parameters of one call of shard(), registered as one graph of one context. The root (root.py) decides which
    of them a training step uses, and when."""

    def __init__(self, comm: libdc.Comm, options: Options, device: torch.device) -> None:
        self.all_ranks = comm
        self.replica, hybrid = comm.rank * options.replicas // comm.size, options.replicas > 1
        part = comm.split(self.replica) if hybrid else comm
        assert part is not None  # all ranks have a color
        self.comm = part  # the ranks over which parameters are split
        self.options = options
        self.stage = options.stage
        self.device = device  # of all parameters
        self.entries: List[ShardedParam] = []
        self.params: List[nn.Parameter] = []  # of the entries
        self.casts = False  # whether some are gathered in another type
        self.stale = True  # weights changed since the last forward: stages 1 and 2 gather again
        self.fills_unused = options.unused == "zero" and comm.size > 1
        if self.fills_unused:
            input_backwards.groups.add(self)
        self.taken: Dict[int, Tensor] = {}  # by take(), until they are read; ~id: a transpose
        self.loaded = False  # load_state_dict() was called on this rank since the last forward
        self.captured = False  # steps are in a CUDA graph, whose launches the host does not see
        self.uninitialized: Optional[Uninitialized] = None  # of a model that was on meta
        self._paddings: Dict[int, Tensor] = {}  # padding after this rank's elements of gradients
        self._comms: Dict[Tuple[torch.device, bool], libdc.Comm] = {}  # by device other than the CPU
        if comm.size > 1 and comm.takes_devices:
            devices.check_thread_ranks("shard", device)
        # Peers read each other's shards in place; on cards, by NCCL's windows.
        self.shared = part.size > 1 and (comm.shares_memory or (device.type == "cuda" and comm._external is None))
        self._context = libdc.Context(devices.open_device("shard", device))
        with _lock:  # compiled graphs have the number, which must differ between ranks that are threads
            self.graph_id = next(_graph_ids)

    @property
    def context(self) -> libdc.Context:
        """The library's context, for calls on PyTorch's current stream."""
        return eager_calls.on_current_stream(self._context)

    # Collectives

    def comm_for(self, where: torch.device, all_ranks: bool = False) -> libdc.Comm:
        """The communicator for collectives on tensors of a device. The first call, on every rank, sets NCCL up.
        all_ranks: all ranks, and not only those of this replica"""
        comm = self.all_ranks if all_ranks else self.comm
        if where.type == "cpu" or comm.takes_devices:
            return comm
        key = where, all_ranks and self.all_ranks is not self.comm
        if key not in self._comms:
            self._comms[key] = comm.nccl(devices.open_device("shard", where))
        return self._comms[key]

    def all_gather(self, part: Tensor, whole: Tensor) -> None:
        """whole = the ranks' parts, concatenated in rank order."""
        part, whole = part.view(torch.int8), whole.view(torch.int8)  # any type is sent as bytes
        self.comm_for(self.device).all_gather(part, whole, stream=devices.current_stream(self.device))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Sends one rank's values to every rank."""
        if self.all_ranks.size == 1 or tensor.numel() == 0:
            return
        with torch.no_grad():
            values = tensor.detach().contiguous()
            flat = as_bytes(values)  # any type is sent as bytes
            self.comm_for(flat.device, True).broadcast(flat, source, stream=devices.current_stream(flat.device))
            if values.data_ptr() != tensor.data_ptr():
                tensor.copy_(values)

    def all_gather_bytes(self, mine: bytes, all_ranks: bool = False) -> List[bytes]:
        """Every rank's text, in ASCII. Collective. all_ranks: as in comm_for()."""
        comm = self.all_ranks if all_ranks else self.comm
        size = comm.size
        if size == 1:
            return [mine]
        lengths = torch.empty(size, dtype=torch.int64)
        comm.all_gather(torch.tensor([len(mine)]), lengths)
        longest = max(1, int(lengths.max()))
        table = torch.empty(size * longest, dtype=torch.int8)
        comm.all_gather(torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.int8), table)
        texts = ctypes.string_at(table.data_ptr(), table.numel())
        return [texts[rank * longest : rank * longest + length] for rank, length in enumerate(lengths.tolist())]

    # Registration

    def register_params(self, entries: Sequence[ShardedParam], empty: Uninitialized) -> None:
        """Shards the parameters' memory and registers them with the library. empty: those without values to keep."""
        elements = sum(entry.numel for entry in entries if entry.param.requires_grad)
        self.context.init(self.all_ranks,
                          {"symmetric_memory": int(self.shared), "check_finite": int(self.options.check_finite),
                           "replicas": self.options.replicas},
                          min(self.options.bucket_size, max(elements, 1)))
        eager_calls.bind(self.graph_id, self.context)
        weakref.finalize(self, eager_calls.unbind, self.graph_id)
        self.entries = list(entries)
        self.params = [entry.param for entry in self.entries]
        with torch.no_grad():
            for entry in self.entries:
                self._shard(entry, entry.param not in empty)
        for entry in self.entries:
            self._register(entry)
        self._register_graph()
        empty.watch(self.entries)
        self.uninitialized = empty if empty.versions or empty.buffers else None

    def add_params(self, entries: Sequence[ShardedParam]) -> None:
        """Shards and registers more parameters. Their ids follow the existing ones."""
        self.context.unregister_graph(self.graph_id)
        self.context.clear_all_gathered_params()
        self.entries += entries
        self.params += [entry.param for entry in entries]
        with torch.no_grad():
            for entry in entries:
                self._shard(entry, True)
                self._register(entry)
        self._register_graph()
        self.stale = True

    def _shard(self, entry: ShardedParam, has_values: bool) -> None:
        param = entry.param
        if self.stage == 0:
            if not param.is_contiguous():
                param.data = param.data.contiguous()
            return
        assert entry.part is not None
        shard = eager_calls.alloc(self.context, entry.shard_numel, param.dtype, self.shared)
        if has_values:
            given = param.data.reshape(-1)[: entry.part.count] if entry.copied else entry.part.of(param.data)
            shard[: entry.part.count].copy_(given)
        param.data = shard

    def _register(self, entry: ShardedParam) -> None:
        param = entry.param
        entry.data = plain_tensor(param)
        entry.grad = torch.zeros_like(entry.data) if param.requires_grad else None
        if self.stage == 0:
            flat = None if entry.grad is None else entry.grad.view(-1)
            self.context.register_param(entry.id, entry.shape, entry.data, flat, 0)
        else:
            self.context.register_z3_param(entry.id, entry.shape, entry.data, entry.grad, entry.persistent,
                                           entry.reduce_dtype)
            if entry.grad is not None and entry.part is not None:
                entry.grad = LocalShard.of(entry.part, entry.grad)
            self._paddings.pop(entry.id, None)
            if entry.grad is not None and entry.part is not None and entry.part.count < len(entry.data):
                self._paddings[entry.id] = plain_tensor(entry.grad)[entry.part.count :]
        if entry.grad is not None:
            entry.grad_data = plain_tensor(entry.grad)
            entry.registered_grad_ptr = entry.grad_data.data_ptr()
            entry.grad.dc_grad_of = weakref.ref(entry)  # type: ignore[attr-defined]
        self.casts = self.casts or entry.param_dtype is not None
        self.context.set_param_name(entry.id, entry.names[0])
        entry.registered_ptr, entry.version, entry.kept = entry.data.data_ptr(), entry.data._version, None
        if self.stage == 3:
            one = torch.empty((), dtype=entry.param_dtype or entry.data.dtype, device=self.device)
            entry.placeholder = one.expand(entry.shape)

    def end_backward(self) -> None:
        """Ends a backward, when all gradients are complete. Zeroes the padding after this rank's elements, in which a
        user's operation, such as zero times infinity, may have left a NaN."""
        self.context.end_backward(self.graph_id)
        if self._paddings:
            with torch.no_grad():
                torch._foreach_zero_(list(self._paddings.values()))

    def _register_graph(self) -> None:
        register = self.context.register_graph_z0 if self.stage == 0 else self.context.register_graph_z3
        register(self.graph_id, [entry.id for entry in self.entries])

    def _register_again(self, entries: Sequence[ShardedParam]) -> None:
        """Registers unfrozen parameters again, since they need a gradient buffer, and with it the graph another
        split."""
        self.context.unregister_graph(self.graph_id)
        self.context.clear_all_gathered_params()
        for entry in entries:
            self.context.unregister_param(entry.id)
            self._register(entry)
            entry.take_direct_gradients()
        self._register_graph()
        self.stale = True

    # Prefetched gathers

    def prefetch(self, ids: Sequence[int]) -> None:
        """Calls the package, since passing two lists to an operator costs more than a small gather."""
        self.context.prefetch_params_fused(self.graph_id, ids, self._dtypes(ids))

    def take(self, ids: Sequence[int], saved: bool) -> None:
        """Takes prefetched weights in one call, for unshard() to return, since an operator call costs more than taking
        a small weight. Not on a card, where each must be taken while the stream that reads it is current, nor in
        inference mode, whose tensors a training forward cannot use. saved: transposes those that autograd has saved
        so."""
        if self.device.type == "cpu" and not torch.is_inference_mode_enabled():
            ids = list(dict.fromkeys(ids))
            dtypes = self._dtypes(ids)
            if saved:
                ids = [~id if entry.saved_transposed and not entry.keeps else id
                       for id, entry in zip(ids, map(self.entries.__getitem__, ids))]
            self.taken.update(zip(ids, eager_calls.take_params(self.graph_id, ids, dtypes)))

    def _dtypes(self, ids: Sequence[int]) -> Optional[List[torch.dtype]]:
        """The types in which parameters are gathered; None: each in its own type."""
        if not self.casts:
            return None
        return [entry.param_dtype or entry.data.dtype for entry in map(self.entries.__getitem__, ids)]

    def drop_prefetched(self, id: int) -> None:
        if self.taken.pop(id, self.taken.pop(~id, None)) is None:
            self.context.invalidate_gathered_param(id)

    # Changes of weights

    def params_updated(self, entries: Optional[Sequence[ShardedParam]] = None) -> None:
        """Says that these weights (None: all) changed, on every rank."""
        if self.stage == 0:
            return
        self.captured = self.captured or devices.captures(self.device)
        self.taken.clear()
        written = self.entries if entries is None else entries
        if self.stage < 3 and not self.captured:  # so that graphs that saved them notice
            torch.autograd.graph.increment_version([entry.kept for entry in written if entry.kept is not None])
        for entry in written:
            entry.version, entry.kept = entry.data._version, None
        self.context.params_updated(None if entries is None else [entry.id for entry in entries])
        self.stale = True

    def check_initialized(self) -> None:
        """Raises if the model was on meta and a part of it has no values yet."""
        if self.uninitialized is not None:
            self.uninitialized.check()
            self.uninitialized = None

    def compare_loads(self) -> None:
        """Raises if load_state_dict() was called only on some ranks, so that whole weights would mix new and old parts.
        The other ranks gather weights at this point, and libdc refuses the mismatch of calls. Stage 0 is left out,
        since its forwards wait for no other rank."""
        if not self.loaded or self.stage == 0:
            return
        self.loaded = False
        try:
            self.all_gather_bytes(b"", all_ranks=True)
        except libdc.Error as error:
            raise libdc.Error(error.status, f"{error.text}; load_state_dict() was called on this rank, which then "
                                            "compares with the others: every rank must call it, as each loads its part"
                              ) from None

    def detect_param_changes(self) -> None:
        """Finds changes that no call announces: shards that were written by hand or by load_state_dict(), moved, frozen
        or unfrozen, and launches of captured steps, which the host does not see."""
        self.check_initialized()
        self.compare_loads()
        if self.captured and not devices.captures(self.device):
            self.params_updated()
        edited, unfrozen = [], []
        with torch._C.DisableTorchFunctionSubclass():
            for entry, param in zip(self.entries, self.params):
                if entry.data._version != entry.version:
                    edited.append(entry)
                trained = _requires_grad(param)
                if trained is not entry.requires_grad:  # changed by Tensor.requires_grad_(param)
                    param.requires_grad = trained
                if entry.grad is None and trained:
                    unfrozen.append(entry)
                if param.data_ptr() != entry.registered_ptr:
                    raise RuntimeError(f"{entry.names[0]}: its memory was replaced after shard(); write into it "
                                       "instead (copy_), or move and cast the model before shard()")
        if edited:
            self.params_updated(edited)
        if unfrozen:
            self._register_again(unfrozen)
