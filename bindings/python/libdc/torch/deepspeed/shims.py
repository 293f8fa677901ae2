"""Shims for features of CUDA that DeepSpeed's Python code assumes and a CPU lacks. Nothing else in DeepSpeed is
changed; docs/deepspeed.md lists each shim."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import time
from typing import Any, Iterator, List, Tuple

import torch

# Log2 of the most bytes that the communication profile gathers: 2^23 bfloat16 elements of 2 bytes.
_PROFILE_MAX_LOG2 = 24


_SEPARATED = "libdc_separate_gradient"  # key in the meta of a node that only stands for one gradient

# The first version of DeepSpeed whose gather waits for all collectives that it has launched.
_GATHERS_ARE_AWAITED = 0, 19, 8


def apply(version: Tuple[int, ...]) -> None:
    """Applies the shims that this version of DeepSpeed needs. Call it once."""
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
    """A CUDA event's timer, for a device whose work is done when the call returns."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        return (end.time - self.time) * 1000.0

    def synchronize(self) -> None:
        """Does nothing: no work is queued."""

    wait = synchronize

    def query(self) -> bool:
        return True


class _Random:
    """torch.random with a fork_rng() for CPUs: PyTorch's takes its devices to be CUDA's by default."""

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
        """DeepSpeed's accelerator for CPUs, with the three methods that its compile package needs."""

        def current_device(self) -> str:
            return "cpu"  # DeepSpeed returns the local rank as a string, which torch.device() refuses

        @property
        def Event(self) -> Any:
            return _Event

        def random(self) -> Any:
            return _Random()

    if type(get_accelerator()) is CPU_Accelerator:
        set_accelerator(Accelerator())


# Profiling


def _profile_without_python_dispatcher() -> None:
    """Runs DeepSpeed's passes, which communicate while they profile, without the Python dispatcher. While AOTAutograd
    compiles, that dispatcher holds the GIL around c10d's operators, and Gloo's threads wait for the GIL: a deadlock."""
    import deepspeed.compile.backend as backend

    run_opt_passes = backend.run_opt_passes

    def run_passes(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisablePythonDispatcher():
            return run_opt_passes(*args, **kwargs)

    backend.run_opt_passes = run_passes


def _limit_communication_profile() -> None:
    """Limits the profile of communication. DeepSpeed times gathers of up to 2 GB, 15 times each, which takes minutes
    and 6 GB for each rank with Gloo. It extrapolates the times of larger ones."""
    import deepspeed.compile.profilers.comm_profile as profile

    run_all_gather = profile.run_all_gather

    def run(device: Any, dtype: Any, maxsize: int, *args: Any, **kwargs: Any) -> Any:
        return run_all_gather(device, dtype, min(maxsize, _PROFILE_MAX_LOG2), *args, **kwargs)

    profile.run_all_gather = run


def _let_inductor_compile() -> None:
    """Imports PyTorch's backends first. While such a version compiles a graph, its patch of AOTAutograd conflicts with
    those that backends make at import, and fails. Also turns off Inductor's newer check of results' alignment, which
    fails for reduce_grad's undefined tensor."""
    import torch._inductor.config

    torch.compiler.list_backends()
    torch._inductor.config.alignment_asserts = False


# Backward graphs


def _separate_gradient_nodes() -> None:
    """Gives each parameter's gradient a node that only the graph's output uses. DeepSpeed inserts a reduction after a
    gradient's node, and replaces the gradient by its empty result for every user of that node. Such users can be
    another parameter with the same gradient, an operator that reads it, or the release of a weight."""
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
    """Registers frozen parameters. In stages 1 and 2 DeepSpeed registers only the optimizer's parameters, and expects a
    gradient for every parameter that a graph reads."""
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
    """Uses the plain lowering of reduce_grad. DeepSpeed's frees the input's buffer after the call, even if a kernel or
    another reduction reads it later. Such are the gradient of BatchNorm's bias, and one that two parameters share.
    Inductor knows the last use, and the operator has read its input when it returns."""
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
            V.graph.never_reuse_buffers.add(result.get_name())  # the result is undefined and has no memory
            return result

        lowerings[operator] = lower_reduce_grad

    backend.register_custom_ops = register_all


def _import_first(*names: str) -> Any:
    """Imports the first of these modules that this version has."""
    found = next(name for name in names if importlib.util.find_spec(name) is not None)
    return importlib.import_module(found)


# Gathers


def _await_gathers() -> None:
    """Makes gathers wait for each collective, as DeepSpeed's own for `stage3_allgather_sequential` does. DeepSpeed
    gathers a list of parameters by one asynchronous collective each, and waits only for the last. A CUDA stream keeps
    their order. Gloo's threads do not, so a weight could be read before it has arrived."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import Init

    def gather(self: Any, params: List[Any], hierarchy: int = 0, quantize: bool = False) -> None:
        self._allgather_params_sequential(params, hierarchy)

    if get_accelerator().device_name() == "cpu":
        Init._allgather_params_coalesced = gather
