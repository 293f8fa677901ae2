"""The bindings as DeepSpeed's Python code calls them: those of libdc.torch.dc, plus work that DeepSpeed leaves to its
own library. Here init() replaces an earlier context, an optimizer's step announces changed weights, and gradient
buffers may come late."""

from __future__ import annotations

import contextlib
import inspect
import socket
import uuid
from typing import Any, Callable, Iterator, List, Optional, Sequence

import libdc
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import dc, ops
from ..dc import (clear_all_gathered_params, enable_profiling, end_forward, invalidate_gathered_param, is_profiling,
                  register_graph_z2, register_graph_z3, register_param, register_z3_param, reset, set_persistent,
                  start_backward, start_forward, update_param_grad_buffer)
from ..ops import registrations
from ..process_group import comm_from_process_group

__all__ = [
    "cleanup", "clear_all_gathered_params", "enable_profiling", "end_forward", "init", "invalidate_gathered_param",
    "is_profiling", "register_graph_z1", "register_graph_z2", "register_graph_z3", "register_param",
    "register_z3_param", "reset", "set_persistent", "start_backward", "start_forward", "update_param_grad_buffer",
]  # fmt: skip

communicator = "auto"  # the argument of enable()
_comm: Optional[libdc.Comm] = None
_step_hook: Any = None
_library: Optional[torch.library.Library] = None


# Life


def init(process_group: Any, config: Any, initial_reduce_bucket_size: Any) -> None:
    """As dc.init(), but drops registrations of an earlier engine."""
    global _comm, _step_hook
    cleanup()
    _drop_backward_hooks()
    _comm = _make_comm(process_group)
    try:
        dc.init(_comm, config, initial_reduce_bucket_size)
    except BaseException:
        cleanup()
        raise
    # Gathered weights stay valid until they change. DeepSpeed never announces changes, so every optimizer's step counts
    # as one.
    _step_hook = register_optimizer_step_post_hook(lambda *_: dc.params_updated())


def _drop_backward_hooks() -> None:
    """Drops the hooks of all engines that DeepSpeed has compiled. Those of an earlier engine would bind its gradient
    buffers to the new engine's parameters with the same numbers. A new engine registers its hooks after init()."""
    import deepspeed.compile.util as util

    util.pre_backward_hooks.clear()
    getattr(util, "post_backward_hooks", []).clear()  # not in 0.18


def cleanup() -> None:
    """As dc.cleanup()."""
    global _comm, _step_hook
    if _step_hook is not None:
        _step_hook.remove()
        _step_hook = None
    dc.cleanup()
    if _comm is not None:
        _comm.close()
        _comm = None


def _make_comm(group: "dist.ProcessGroup") -> libdc.Comm:
    name = _common_name(group)
    if name is None:
        return comm_from_process_group(group)
    return libdc.Comm.processes(name, dist.get_rank(group), dist.get_world_size(group))


def _common_name(group: "dist.ProcessGroup") -> Optional[str]:
    """A name that the ranks share, for libdc's own communicator; None: use the group's collectives."""
    if communicator == "torch":
        return None
    mine = (_machine(), f"libdc-{uuid.uuid4().hex}")
    everyone: List[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    machines = sorted({machine for machine, _ in everyone})
    if len(machines) == 1:
        return str(everyone[0][1])
    if communicator == "libdc":
        raise RuntimeError(f"libdc.torch.deepspeed: communicator = 'libdc', but the ranks are on {len(machines)} "
                           "machines; use 'auto' or 'torch'")
    return None


def _machine() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{socket.gethostname()} {file.read().strip()}"


# Stage 1


def register_graph_z1(graph_id: int, ds_ids: Sequence[int]) -> None:
    """As dc.register_graph_z1(). With the current signatures DeepSpeed registers stage 1's parameters without gradient
    buffers, and binds these before a backward that precedes a step. But registering a graph fixes each rank's part, so
    DeepSpeed's hooks bind the buffers here temporarily."""
    with unset_fake_temporarily(), _bound_grad_buffers():
        dc.register_graph_z1(graph_id, ds_ids)


@contextlib.contextmanager
def _bound_grad_buffers() -> Iterator[None]:
    from deepspeed.compile.util import pre_backward_hooks

    # With legacy signatures the hooks have no argument, and the buffers are bound from the start.
    hooks: List[Callable[[bool], None]] = [hook for hook in pre_backward_hooks if inspect.signature(hook).parameters]
    for hook in hooks:
        hook(True)
    try:
        yield
    finally:
        for hook in hooks:
            hook(False)


# Operators whose signatures differ between versions of DeepSpeed. Each signature is an overload of libdc's operator.
# DeepSpeed's passes name the operator as `.default`, which is replaced by that overload. Calls without `.default` still
# select libdc's own overload by their arguments.


def define_current_overloads() -> None:
    """Defines an end_backward that takes the reductions that must precede it, so that no compiler moves it before them.
    It also takes whether to free the buckets' memory."""
    library = _fragment()
    library.define("end_backward.deps(Any deps, int graph_id, bool release_reduce_buckets = False) -> ()")
    library.impl("end_backward.deps", _end_backward, "CompositeExplicitAutograd")
    torch.library.register_fake("dc::end_backward.deps", lambda *_: None, lib=library)
    _set_default_overload("end_backward", torch.ops.dc.end_backward.deps)


def define_legacy_overloads() -> None:
    """Defines a reduce_grad whose result, an output of the backward graph, is an undefined tensor: no gradient."""
    library = _fragment()
    library.define("reduce_grad.undefined(Tensor a, int graph_id, int id) -> Tensor")
    library.impl("reduce_grad.undefined", _reduce_grad(torch.ops.dc.reduce_grad.default), "CompositeExplicitAutograd")
    torch.library.register_fake("dc::reduce_grad.undefined", lambda a, graph_id, id: a.new_empty(0), lib=library)
    _set_default_overload("reduce_grad", torch.ops.dc.reduce_grad.undefined)


def _fragment() -> torch.library.Library:
    global _library
    _library = torch.library.Library("dc", "FRAGMENT")
    return _library


def _set_default_overload(name: str, overload: Any) -> None:
    registrations.keep_side_effects(overload)
    getattr(torch.ops.dc, name).default = overload


def _end_backward(deps: Any, graph_id: int, release_reduce_buckets: bool = False) -> None:
    context = ops.context(graph_id)
    if context is None:
        raise RuntimeError("dc::end_backward: no default context: DeepSpeed's engine has ended")
    try:
        context.end_backward(graph_id, release_reduce_buckets)
    except libdc.Error as error:
        raise RuntimeError(error.text) from error


def _reduce_grad(reduce_grad: Any) -> Callable[[torch.Tensor, int, int], None]:
    def kernel(a: torch.Tensor, graph_id: int, id: int) -> None:
        reduce_grad(a, graph_id, id)

    return kernel
