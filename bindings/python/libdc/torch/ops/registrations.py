"""Registrations of the operators besides their kernels: fake tensors, autograd, functionalisation, Inductor's
lowerings, and protection from the elimination of dead code and common subexpressions. They are the same for compiled
and Python kernels."""

from __future__ import annotations

import sys
from typing import Any, Callable, List, Optional, Sequence

import torch
from libdc import MemoryKind
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

OPERATORS = (
    "allgather_param", "prefetch_params_fused", "wait_allgather", "release_param", "reduce_grad", "free_tensors",
    "offload_tensor", "reload_tensor", "wait_offload", "wait_reload", "offload_parameter", "reload_parameter",
    "end_backward",
)  # fmt: skip
RUNTIME_OPERATORS = ("take", "take_params", "reduce_grads", "alloc")

# Their gradient is passed on unchanged, to the argument's device.
_IDENTITY = ("wait_allgather", "release_param", "offload_tensor", "reload_tensor", "wait_offload", "wait_reload")
# Their results have no gradient: a parameter's gradient goes through reduce_grad, not autograd.
_NON_DIFFERENTIABLE = ("allgather_param", "reduce_grad", "dc_rt::take")
# Their results may be in memory that the library still uses, so they must not be written to.
_ALIASES_LIBRARY_MEMORY = ("allgather_param", "wait_allgather", "offload_tensor", "reload_tensor", "wait_offload",
                           "wait_reload", "take")

# Registrations live as long as their Library objects.
_libraries: List[torch.library.Library] = []
_overloads: List[Any] = []
trace_callbacks: List[Callable[[], None]] = []  # called when an operator is traced, before compilers change the graph
_device: Callable[[Optional[int]], torch.device] = lambda graph_id: torch.device("cpu")


def overloads() -> List[Any]:
    """Every operator, as graphs name it."""
    return list(_overloads)


def register(device: Callable[[Optional[int]], torch.device]) -> None:
    """Registers everything except the lowerings. device(graph) is the device of the graph's context, device(None) that
    of the default context."""
    global _device
    _device = device
    library = torch.library.Library("dc", "FRAGMENT")
    _libraries.append(library)
    _register_fakes(library)
    _register_autograd(library)
    for namespace, names in ((torch.ops.dc, OPERATORS), (torch.ops.dc_rt, RUNTIME_OPERATORS)):
        for name in names:
            keep_side_effects(getattr(namespace, name).default)
    # Selective checkpointing compares a forward's operators with the recomputation's. They may differ in these, if
    # weights are still gathered.
    checkpoint.SAC_IGNORED_OPS.update(getattr(torch.ops.dc_rt, name).default for name in RUNTIME_OPERATORS)


def keep_side_effects(op: Any) -> None:
    """Keeps compilers from dropping, merging or moving calls of the operator."""
    _overloads.append(op)
    torch.fx.node.has_side_effect(op)
    _functionalize(op)


# Fake kernels. Operators whose results stay on their argument's device have Meta kernels instead.


def _register_fakes(library: torch.library.Library) -> None:
    def no_result(*_args: Any, **_kwargs: Any) -> None:
        return None

    def on_host(a: torch.Tensor, graph_id: int, id: int) -> torch.Tensor:
        return torch.empty(a.shape, dtype=a.dtype, device="cpu")

    def on_device(a: torch.Tensor, graph_id: int, id: int) -> torch.Tensor:
        return torch.empty(a.shape, dtype=a.dtype, device=_device(graph_id) if a.device.type == "cpu" else a.device)

    def alloc(shape: Sequence[int], dtype: torch.dtype, kind: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu" if kind == MemoryKind.HOST else _device(None))

    def take_params(graph_id: int, ids: Sequence[int], dtypes: Optional[Sequence[Any]] = None) -> List[torch.Tensor]:
        shard = torch.empty(0, device=_device(graph_id))
        weights = [torch.ops.dc_rt.take(shard, graph_id, max(id, ~id), dtype)
                   for id, dtype in zip(ids, dtypes or [None] * len(ids))]
        return [whole.t() if id < 0 else whole for id, whole in zip(ids, weights)]

    # Without a tensor argument, the real kernel would run, several times, during tracing.
    fakes = {
        "dc::prefetch_params_fused": no_result, "dc::free_tensors": no_result, "dc::end_backward": no_result,
        "dc::offload_tensor": on_host, "dc::wait_offload": on_host,
        "dc::reload_tensor": on_device, "dc::wait_reload": on_device,
        "dc_rt::take_params": take_params, "dc_rt::reduce_grads": no_result, "dc_rt::alloc": alloc,
    }  # fmt: skip
    for name, fake in fakes.items():
        torch.library.register_fake(name, fake, lib=library if name.startswith("dc::") else None, allow_override=True)


# Autograd


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, op: Any, args: Sequence[Any]) -> torch.Tensor:
        ctx.device = a.device
        with torch._C._AutoDispatchBelowAutograd():
            return op(a, *args)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.to(ctx.device), None, None


def _identity(op: Any) -> Callable[..., torch.Tensor]:
    def kernel(a: torch.Tensor, *args: Any) -> torch.Tensor:
        if a.requires_grad and torch.is_grad_enabled():
            return _Identity.apply(a, op, args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(a, *args)

    return kernel


def _register_autograd(library: torch.library.Library) -> None:
    for name in _IDENTITY:
        library.impl(name, _identity(getattr(torch.ops.dc, name).default), "Autograd")
    runtime = torch.library.Library("dc_rt", "FRAGMENT")
    _libraries.append(runtime)
    for name in _NON_DIFFERENTIABLE:
        (runtime if name.startswith("dc_rt::") else library).impl(
            name.split("::")[-1], torch.library.fallthrough_kernel, "Autograd")


# Compilers


def _functionalize(op: Any) -> None:
    """Registers a functionalisation rule. Without one, operators whose result aliases an argument are refused; libdc's
    results are never written, so they may count as new. The rule is also the one place that every traced operator
    passes before Inductor lowers the graph."""
    if not hasattr(op, "py_functionalize_impl"):
        raise RuntimeError(f"libdc: torch {torch.__version__} has no OpOverload.py_functionalize_impl, which "
                           "torch.compile needs for the dc operators; torch 2.11 or later is needed")

    def rule(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        _forbid_merging()
        if "torch._inductor.lowering" in sys.modules:
            prepare_inductor()
        for callback in trace_callbacks:
            callback()
        plain_args, plain_kwargs = ctx.unwrap_tensors(args), ctx.unwrap_tensors(kwargs)
        with ctx.redispatch_to_next():
            result = op(*plain_args, **plain_kwargs)
        return ctx.wrap_tensors(result)

    op.py_functionalize_impl(rule)


def _forbid_merging() -> None:
    """Keeps equal calls from being merged: a parameter that is gathered again after its release is a new result. The
    elimination of common subexpressions exempts only random operators, so libdc's are added to those. Its module is
    slow to import, so this runs when an operator is traced, which is before any elimination."""
    from torch._functorch import compile_utils

    unmergeable = getattr(compile_utils, "rand_ops", None)
    if not isinstance(unmergeable, list):
        raise RuntimeError(f"libdc: torch {torch.__version__} has no torch._functorch.compile_utils.rand_ops, without "
                           "which torch.compile would merge dc operators")
    unmergeable += [op.overloadpacket for op in _overloads if op.overloadpacket not in unmergeable]


_inductor_ready = False


def prepare_inductor() -> None:
    """Registers Inductor's lowerings, once. Importing Inductor is slow, so it is done at the first compilation. A
    compiler that puts dc operators into graphs after AOTAutograd calls this itself."""
    global _inductor_ready
    if _inductor_ready:
        return
    _forbid_merging()
    try:
        from torch._inductor.ir import FallbackKernel, IRNode, MutationOutput, NoneLayout, TensorBox
        from torch._inductor.lowering import add_needs_realized_inputs, fallbacks, register_lowering
        from torch._inductor.virtualized import V
    except ImportError as error:
        raise RuntimeError(f"libdc: Inductor of torch {torch.__version__} lacks names that the dc operators need "
                           f"({error}); use backend='aot_eager'") from error

    def lowering(op: Any, held: bool) -> Callable[..., Any]:
        def lower(*args: Any, **kwargs: Any) -> Any:
            graph = V.graph
            for hook in ("operations", "never_reuse_buffers", "additional_buffer_deps"):
                if not hasattr(graph, hook):
                    raise RuntimeError(f"libdc: Inductor of torch {torch.__version__} has no GraphLowering.{hook}, so "
                                       "the dc operators cannot be kept in order; use backend='aot_eager'")

            def wrap(node: Any) -> Any:
                if not isinstance(node, IRNode):
                    return node
                if held:
                    graph.never_reuse_buffers.add(node.get_name())
                return TensorBox.create(node)

            first = len(graph.operations)
            result = pytree.tree_map(wrap, FallbackKernel.create(op, *args, **kwargs))
            # Data flow alone does not order the operators: end_backward would run before the reductions. So each
            # depends weakly on the previous one, which sets the order only and keeps no memory alive.
            for operation in graph.operations[first:]:
                if isinstance(operation, FallbackKernel):
                    previous = getattr(graph, "_libdc_previous", None)
                    if previous is not None:
                        graph.additional_buffer_deps[operation.get_operation_name()].add(previous)
                    graph._libdc_previous = operation.get_name()
                    if op is torch.ops.dc.release_param.default:
                        # It frees its argument's memory. The scheduler treats that as a write, which all reads precede.
                        operation.mutation_outputs.append(
                            MutationOutput(NoneLayout(device=args[0].get_device()), args[0], operation))
            return result

        return lower

    for op in _overloads:
        fallbacks.add(op)
        add_needs_realized_inputs(op)
        held = op.overloadpacket.__name__ in _ALIASES_LIBRARY_MEMORY
        register_lowering(op, type_promotion_kind=None)(lowering(op, held))
    _inductor_ready = True
