"""Shims for features of CUDA that DeepSpeed's Python takes for granted and that a CPU does not have. Nothing else of
DeepSpeed is changed; each shim is listed in docs/deepspeed.md."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import time
from typing import Any, Iterator, List, Tuple

import torch

# Log2 of the bytes that the communication profile gathers at most: 2 for each of 2^23 bfloat16 elements.
_PROFILE_MAX_LOG2 = 24


_SEPARATED = "libdc_separate_gradient"  # in the meta of a node that stands for one gradient of a backward graph alone

# The first version of DeepSpeed whose gather waits for all that it has launched.
_GATHERS_ARE_AWAITED = 0, 19, 8


def apply(version: Tuple[int, ...]) -> None:
    """Applies all that this version of DeepSpeed needs, once."""
    _replace_accelerator()
    _profile_without_python_dispatcher()
    _limit_communication_profile()
    _separate_gradient_nodes()
    _register_frozen_parameters()
    _let_inductor_free_gradients()
    if version < _GATHERS_ARE_AWAITED:
        _await_gathers()


def apply_to_legacy() -> None:
    """Applies the shims of versions with the operators' legacy signatures, which are older than PyTorch 2.9."""
    _let_inductor_compile()


# The accelerator


class _Event:
    """A CUDA event's clock, where work is done when its call returns."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        return (end.time - self.time) * 1000.0

    def synchronize(self) -> None:
        """Nothing is under way."""

    wait = synchronize

    def query(self) -> bool:
        return True


class _Random:
    """torch.random, whose fork_rng() takes its devices for CUDA's unless told otherwise."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.random, name)

    @staticmethod
    @contextlib.contextmanager
    def fork_rng(devices: Any = None, enabled: bool = True) -> Iterator[None]:
        with torch.random.fork_rng(devices=[], enabled=enabled):
            yield


def _replace_accelerator() -> None:
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Accelerator(CPU_Accelerator):  # type: ignore[misc]
        """DeepSpeed's own for CPUs, with the three answers that its compile package cannot do without."""

        def current_device(self) -> str:
            return "cpu"  # DeepSpeed's is the local rank, as a string, which torch.device() refuses

        @property
        def Event(self) -> Any:
            return _Event

        def random(self) -> Any:
            return _Random()

    if type(get_accelerator()) is CPU_Accelerator:
        set_accelerator(Accelerator())


# Profiling


def _profile_without_python_dispatcher() -> None:
    """While AOTAutograd compiles, the Python dispatcher is on and holds the GIL around c10d's operators, for which
    Gloo's threads wait in turn: a deadlock. DeepSpeed's passes communicate while they profile."""
    import deepspeed.compile.backend as backend

    run_opt_passes = backend.run_opt_passes

    def run_passes(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisablePythonDispatcher():
            return run_opt_passes(*args, **kwargs)

    backend.run_opt_passes = run_passes


def _limit_communication_profile() -> None:
    """DeepSpeed times gathers of up to 2 GB, 15 times each, which takes minutes and 6 GB a rank by Gloo. Times of
    larger ones are extrapolated."""
    import deepspeed.compile.profilers.comm_profile as profile

    run_all_gather = profile.run_all_gather

    def run(device: Any, dtype: Any, maxsize: int, *args: Any, **kwargs: Any) -> Any:
        return run_all_gather(device, dtype, min(maxsize, _PROFILE_MAX_LOG2), *args, **kwargs)

    profile.run_all_gather = run


def _let_inductor_compile() -> None:
    """While such a version compiles a graph, its patch of AOTAutograd meets those that PyTorch's other backends make
    when they are imported, and fails; so they are imported before. And Inductor's code has come to look at the
    alignment of each operator's result, which fails for reduce_grad's, an undefined tensor."""
    import torch._inductor.config

    torch.compiler.list_backends()
    torch._inductor.config.alignment_asserts = False


# Backward graphs


def _separate_gradient_nodes() -> None:
    """DeepSpeed puts a reduction behind a gradient's node, and its empty result in the place of the gradient for every
    user of that node. A user is another parameter with the same gradient, an operator of the graph that reads it, or
    the release of a weight. So each parameter's gradient becomes a node that nothing but the graph's output uses."""
    from deepspeed.compile.fx import get_output_node
    from deepspeed.compile.graph_param import DSGraphParamManager

    get_bwd_mapping = DSGraphParamManager.get_bwd_mapping

    def mapping(self: Any, graph: Any) -> Any:
        output = get_output_node(graph)
        results = list(output.args[0])
        for index in self._param_indices:
            grad = results[index]
            if not isinstance(grad, torch.fx.Node) or _SEPARATED in grad.meta or str(grad.target).startswith("dc."):
                continue
            with graph.inserting_before(output):
                results[index] = graph.call_function(torch.ops.aten.alias.default, (grad,))
            results[index].meta.update({key: grad.meta[key] for key in ("val", "tensor_meta") if key in grad.meta})
            results[index].meta[_SEPARATED] = True
        output.args = (type(output.args[0])(results),)
        return get_bwd_mapping(self, graph)

    DSGraphParamManager.get_bwd_mapping = mapping


def _register_frozen_parameters() -> None:
    """Stages 1 and 2 know the optimizer's parameters alone, and want a gradient of every one that a graph reads."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    from . import handle

    compile_engine = DeepSpeedEngine.compile

    def compile_all(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = compile_engine(self, *args, **kwargs)
        if self.is_deepcompile_enabled() and self.zero_optimization_stage() in (1, 2):
            params = list(self.module.parameters())
            next_id = 1 + max((param.param_id for param in params if hasattr(param, "param_id")), default=-1)
            for param in params:
                if not param.requires_grad and not hasattr(param, "param_id"):
                    param.param_id, next_id = next_id, next_id + 1
                    handle.register_param(param.param_id, param.shape, param, param.new_empty(0), 0)
        return result

    DeepSpeedEngine.compile = compile_all
    passes = _import_first("deepspeed.compile.passes.zero_1_and_2_compile", "deepspeed.compile.passes.zero1_compile")
    reduce_all = passes.add_z1_reduce_bw

    def reduce_some(gm: Any, graph_id: int, *rest: Any) -> Any:
        *order, managers = rest
        manager = copy.copy(managers[graph_id])
        _, grads = manager.get_bwd_mapping(gm.graph)
        kept = [(name, index) for name, index in zip(manager._param_names, manager._param_indices)
                if grads[name] is not None]
        manager._param_names, manager._param_indices = [name for name, _ in kept], [index for _, index in kept]
        return reduce_all(gm, graph_id, *order, {graph_id: manager})

    passes.add_z1_reduce_bw = reduce_some


def _let_inductor_free_gradients() -> None:
    """DeepSpeed's lowering of reduce_grad drops its input's buffer behind the call, also where a kernel or another
    reduction reads it later. That is so for BatchNorm's gradient of its bias, or one that two parameters share.
    Inductor knows the last use, and the operator has read its input when it returns, so the plain lowering does."""
    import deepspeed.compile.backend as backend
    from torch._inductor.lowering import fallback_handler, lowerings
    from torch._inductor.virtualized import V

    register_custom_ops = backend.register_custom_ops

    def register_all() -> None:
        register_custom_ops()
        operator = torch.ops.dc.reduce_grad.default
        lower = fallback_handler(operator, add_to_fallback_set=False)

        def lower_reduce_grad(*args: Any) -> Any:
            result = lower(*args)
            V.graph.never_reuse_buffers.add(result.get_name())  # it is undefined, and has no memory
            return result

        lowerings[operator] = lower_reduce_grad

    backend.register_custom_ops = register_all


def _import_first(*names: str) -> Any:
    """The first module of these that this version has."""
    found = next(name for name in names if importlib.util.find_spec(name) is not None)
    return importlib.import_module(found)


# Gathers


def _await_gathers() -> None:
    """DeepSpeed gathers a list of parameters by one asynchronous collective each, and waits for the last alone. A CUDA
    stream keeps their order; Gloo's threads do not, and a weight is read while it still arrives. Its own gather for
    `stage3_allgather_sequential` waits for each."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import Init

    def gather(self: Any, params: List[Any], hierarchy: int = 0, quantize: bool = False) -> None:
        self._allgather_params_sequential(params, hierarchy)

    if get_accelerator().device_name() == "cpu":
        Init._allgather_params_coalesced = gather
