"""torch.compile(backend="libdc"), and the passes that Inductor runs for sharded models."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any, Callable, List, Sequence

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from ..ops import registrations
from .passes import gather_options, joint_pass, schedule_gathers


def _compile_graph(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    schedule_gathers(gm.graph)
    gm.graph.set_codegen(fx.graph._BoxedCodeGen())
    gm.recompile()
    _LazyGraphModule.force_recompile(gm)

    def run(values: List[Any]) -> Any:
        return gm.forward(values)

    run._boxed_call = True  # run() empties the list, so arguments are freed at their last use
    return run


def backend(gm: fx.GraphModule, inputs: Sequence[Any], **_options: Any) -> Callable[..., Any]:
    """torch.compile(backend="libdc"): runs graphs, with libdc's operators inserted, node by node on PyTorch's own
    kernels. Results have the bits of eager mode."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=_compile_graph, bw_compiler=_compile_graph, inference_compiler=_compile_graph,
                        partition_fn=min_cut_rematerialization_partition)(gm, inputs)


def _has_dc_ops(graph: fx.Graph) -> bool:
    return any(getattr(node.target, "namespace", "") in ("dc", "dc_rt") for node in graph.nodes
               if node.op == "call_function")


class _JointPass:
    """Runs the user's joint pass, then libdc's."""

    def __init__(self, user_pass: Any) -> None:
        self.user_pass = user_pass

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        gm = gm if self.user_pass is None else self.user_pass(gm, inputs)
        return joint_pass(gm, inputs) if _has_dc_ops(gm.graph) else gm


def _make_schedule_pass(user_pass: Any) -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class SchedulePass(CustomGraphPass):
        is_libdc_pass = True

        def __call__(self, graph: fx.Graph) -> None:
            if user_pass is not None:
                user_pass(graph)
            schedule_gathers(graph)

        def uuid(self) -> Any:
            # Part of the key of Inductor's cache. A graph names its model only by a number, so the models' options
            # belong to the key.
            return "libdc-schedule-2", gather_options(), None if user_pass is None else user_pass.uuid()

    return SchedulePass()


def _install_passes() -> None:
    """Adds libdc's passes to the compilers' configuration, after passes that are there already. Each thread has its own
    copy of the configuration, so this runs whenever one of the operators is traced."""
    import torch._functorch.config as functorch

    if not isinstance(functorch.joint_custom_pass, _JointPass):
        functorch.joint_custom_pass = _JointPass(functorch.joint_custom_pass)
    if "torch._inductor.config" in sys.modules:
        inductor = sys.modules["torch._inductor.config"]
        if not hasattr(inductor.post_grad_custom_post_pass, "is_libdc_pass"):
            inductor.post_grad_custom_post_pass = _make_schedule_pass(inductor.post_grad_custom_post_pass)


registrations.trace_callbacks.append(_install_passes)


def register_backend() -> None:
    """Registers torch.compile(backend="libdc"), unless the installed package does so by an entry point. PyTorch reads
    that at the name's first use, so programs that do not compile never import Dynamo, which takes a second."""
    if importlib.metadata.entry_points(group="torch_dynamo_backends", name="libdc"):
        return
    import torch._dynamo

    if "libdc" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(backend, name="libdc")
