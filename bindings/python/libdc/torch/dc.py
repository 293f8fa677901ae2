"""The bindings of DeepSpeed's `deepspeed.ops.dc`, with the same names and arguments, for one default context.

    from libdc.torch import dc
    dc.init(process_group, config, initial_reduce_bucket_size=100_000_000)
    dc.register_z3_param(ds_id=0, ds_shape=[1024, 768], ds_tensor=shard, grad_buffer=grad, persistent=False)
    dc.register_graph_z3(graph_id=0, ds_ids=[0])

The operators torch.ops.dc.* work on what is registered here. The library's errors are RuntimeError; these functions
raise TypeError or ValueError too. Registered tensors are used in place, and kept alive until cleanup()."""

from __future__ import annotations

import operator
from typing import Any, List, Mapping, Optional, Sequence, Tuple

import libdc
import torch
import torch.distributed as dist

from . import devices, ops
from .dtypes import DTYPES
from .process_group import comm_from_process_group

ops.load()

_KEYS = tuple(key for key in libdc.Config._fields if key not in ("check_finite", "replicas"))  # DeepSpeed's, all needed
_comm: Optional[libdc.Comm] = None  # that init() made from a process group


# Life


def init(process_group: Any, config: Any, initial_reduce_bucket_size: int) -> None:
    """Starts the default context.

    process_group  a libdc.Comm, a torch.distributed.ProcessGroup, or None: a world of one rank
    config  a mapping or an object with symmetric_memory, double_buffer, free_activation_threshold, sync_before_reduce,
            sync_after_reduce, sync_before_allgather, sync_after_allgather, and check_finite, which may be missing;
            others are ignored
    initial_reduce_bucket_size  elements

    Registered tensors are on PyTorch's default device: the CPU, or the device of torch.set_default_device() or of a
    surrounding `with torch.device("cuda:1"):`."""
    global _comm
    current = ops.context()
    if current is not None and current in _active:
        raise RuntimeError("dc.init: initialised already; call dc.cleanup() first")
    table = _read_config(config)
    size = _integer("init", "initial_reduce_bucket_size", initial_reduce_bucket_size)
    comm, made = _communicator(process_group)
    try:
        context = libdc.Context(devices.open_device("dc.init", torch.get_default_device()))
    except BaseException:
        if made:
            comm.close()
        raise
    try:
        context.init(comm, table, size)
    except BaseException:
        context.close()
        if made:
            comm.close()
        raise
    _comm = comm if made else None
    _active[:] = [context]
    ops.set_context(context)


def cleanup() -> None:
    """Ends the default context: operators and bindings then fail until init(). Does nothing without a context."""
    global _comm
    if _active:
        context, comm = _active.pop(), _comm
        _comm = None
        context.cleanup()
        if comm is not None:
            comm.close()


def reset() -> None:
    """Drops all graphs; parameters and gathered weights stay."""
    _context("reset").reset()


# Parameters


def register_param(ds_id: int, ds_shape: Sequence[int], ds_tensor: Optional[torch.Tensor],
                   grad_buffer: Optional[torch.Tensor], offset: int) -> None:
    """Registers a parameter of stages 1 and 2. ds_tensor is the whole parameter. grad_buffer is the part of its
    flattened gradient that this rank owns, which begins at offset and may be empty."""
    call = "register_param"
    _context(call).register_param(_integer(call, "ds_id", ds_id), _integers(call, "ds_shape", ds_shape),
                                  _tensor(call, "ds_tensor", ds_tensor, pinned=True), _buffer(call, grad_buffer),
                                  _integer(call, "offset", offset))


def register_z3_param(ds_id: int, ds_shape: Sequence[int], ds_tensor: torch.Tensor, grad_buffer: Optional[torch.Tensor],
                      persistent: bool, expected_grad_dtype: Optional[torch.dtype] = None) -> None:
    """Registers a parameter of stage 3. ds_tensor is this rank's shard, and grad_buffer has its length (empty or None:
    frozen)."""
    call = "register_z3_param"
    if ds_tensor is None:
        raise TypeError("dc.register_z3_param: ds_tensor is None, must be a tensor")
    shard = _flat(_tensor(call, "ds_tensor", ds_tensor, pinned=True))
    _context(call).register_z3_param(_integer(call, "ds_id", ds_id), _integers(call, "ds_shape", ds_shape), shard,
                                     _buffer(call, grad_buffer), bool(persistent),
                                     _dtype(call, "expected_grad_dtype", expected_grad_dtype))


def update_param_grad_buffer(ds_id: int, grad_buffer: Optional[torch.Tensor], offset: int) -> None:
    """Gives a parameter another gradient buffer."""
    call = "update_param_grad_buffer"
    _context(call).update_param_grad_buffer(_integer(call, "ds_id", ds_id), _buffer(call, grad_buffer),
                                            _integer(call, "offset", offset))


def set_persistent(ds_id: int) -> None:
    """Keeps a stage-3 parameter gathered from now on, and gathers it now. Every rank must call it."""
    _context("set_persistent").set_persistent(_integer("set_persistent", "ds_id", ds_id))


def invalidate_gathered_param(ds_id: int) -> None:
    """Drops a parameter's gathered weights, unless it is persistent."""
    _context("invalidate_gathered_param").invalidate_gathered_param(
        _integer("invalidate_gathered_param", "ds_id", ds_id))


def clear_all_gathered_params() -> None:
    """Drops the gathered weights of all parameters that are not persistent."""
    _context("clear_all_gathered_params").clear_all_gathered_params()


def params_updated(ds_ids: Optional[Sequence[int]] = None) -> None:
    """Says that these weights changed (None: all), so that the next gather communicates. Call it after
    optimizer.step(), on every rank."""
    ids = None if ds_ids is None else _integers("params_updated", "ds_ids", ds_ids)
    _context("params_updated").params_updated(ids)


# Graphs


def register_graph_z1(graph_id: int, ds_ids: Sequence[int]) -> None:
    """Registers a graph of ZeRO stage 1."""
    call = "register_graph_z1"
    _context(call).register_graph_z1(_integer(call, "graph_id", graph_id), _integers(call, "ds_ids", ds_ids))


def register_graph_z2(graph_id: int, ds_ids: Sequence[int]) -> None:
    """Registers a graph of ZeRO stage 2."""
    call = "register_graph_z2"
    _context(call).register_graph_z2(_integer(call, "graph_id", graph_id), _integers(call, "ds_ids", ds_ids))


def register_graph_z3(graph_id: int, ds_ids: Sequence[int]) -> None:
    """Registers a graph of ZeRO stage 3."""
    call = "register_graph_z3"
    _context(call).register_graph_z3(_integer(call, "graph_id", graph_id), _integers(call, "ds_ids", ds_ids))


# The step


def start_forward() -> None:
    """Begins a forward pass."""
    _context("start_forward").start_forward()


def end_forward() -> None:
    """Ends a forward pass."""
    _context("end_forward").end_forward()


def start_backward(update: bool) -> None:
    """Begins a backward pass; update: the optimizer steps after it."""
    _context("start_backward").start_backward(bool(update))


def grads_finite() -> Tuple[bool, Optional[int]]:
    """Whether the last step's gradients are finite on every rank, and the first parameter whose gradient is not, or
    None. Call it on every rank, after the end_backward of a start_backward(True). Needs check_finite in the config."""
    return _context("grads_finite").grads_finite()


def enable_profiling(enable: bool) -> None:
    """Turns profiling on or off. While it is on, reductions and free_tensors do nothing."""
    _context("enable_profiling").enable_profiling(bool(enable))


def is_profiling() -> bool:
    """Whether profiling is on."""
    return _context("is_profiling").is_profiling()


# Arguments

_active: List[libdc.Context] = []  # the context of the last init(), until cleanup()


def _context(call: str) -> libdc.Context:
    if not _active:
        raise RuntimeError(f"dc.{call}: not initialised, or cleaned up: call dc.init() first")
    return ops.on_current_stream(_active[0])


def _read_config(config: Any) -> libdc.Config:
    """Reads a config. In the library's struct 0 means the default, which is True for double_buffer and 10485760 for the
    threshold."""
    values = {}
    for key in _KEYS:
        try:
            value = config[key] if isinstance(config, Mapping) else getattr(config, key)
        except (KeyError, AttributeError):
            raise ValueError(f"dc.init: config has no '{key}'; its keys are {', '.join(_KEYS)}") from None
        values[key] = _integer("init", f"config.{key}", value)
    values["double_buffer"] = 1 if values["double_buffer"] else -1
    values["free_activation_threshold"] = values["free_activation_threshold"] or -1
    check_finite = config.get("check_finite", 0) if isinstance(config, Mapping) else getattr(config, "check_finite", 0)
    return libdc.Config(**values, check_finite=_integer("init", "config.check_finite", check_finite))


def _integer(call: str, argument: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        if not isinstance(value, float) or not value.is_integer():
            raise TypeError(f"dc.{call}: {argument} = {value!r}, must be an integer") from None
        number = int(value)  # such as 5e8 in configuration files
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"dc.{call}: {argument} = {number}, must fit in 64 bits")
    return number


def _integers(call: str, argument: str, values: Any) -> List[int]:
    try:
        return [_integer(call, f"{argument}[{i}]", value) for i, value in enumerate(values)]
    except TypeError as error:
        if str(error).startswith("dc."):
            raise
        raise TypeError(f"dc.{call}: {argument} = {values!r}, must be a sequence of integers") from None


def _dtype(call: str, argument: str, dtype: Any) -> libdc.DType:
    if dtype is None:
        return libdc.DType.NONE
    if dtype not in DTYPES:
        allowed = ", ".join(str(known) for known in DTYPES)
        raise TypeError(f"dc.{call}: {argument} = {dtype!r}, must be None or one of {allowed}")
    return DTYPES[dtype]


def _tensor(call: str, argument: str, tensor: Any, pinned: bool = False) -> Optional[torch.Tensor]:
    """pinned: the tensor may also be in host memory that the context's device can read."""
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"dc.{call}: {argument} is a {type(tensor).__name__}, must be a torch.Tensor")
    where = devices.device_of(_active[0] if _active else None)
    here = tensor.device == where or (pinned and where.type == "cuda" and tensor.is_pinned())
    if tensor.layout is not torch.strided or not here:
        raise ValueError(f"dc.{call}: {argument} is on {tensor.device} with layout {tensor.layout}, must be a strided "
                         f"tensor on {where}")
    _dtype(call, f"{argument}.dtype", tensor.dtype)
    return tensor.detach()


def _flat(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    # A view if the tensor is contiguous. If not, the library refuses it.
    return tensor.view(-1) if tensor is not None and tensor.is_contiguous() else tensor


def _buffer(call: str, tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return _flat(_tensor(call, "grad_buffer", tensor))


# Communication by torch.distributed


def _communicator(group: Any) -> Tuple[Optional[libdc.Comm], bool]:
    """(communicator, whether it was made here)."""
    if group is None or isinstance(group, libdc.Comm):
        return group, False
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"dc.init: process_group is a {type(group).__name__}, must be a libdc.Comm, a "
                        "torch.distributed.ProcessGroup or None")
    return comm_from_process_group(group), True
