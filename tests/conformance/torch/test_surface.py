"""A and B: the operators as PyTorch sees them, and what they say of tensors without data. Also F 54, L 97 and 98."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any, Callable, Dict, List, Tuple

import libdc
import pytest
import torch
from conftest import ROOT
from libdc.torch import dc, ops
from operators import CONFIG, FROZEN, GRAPH, GRAPH_Z2, KEPT, PLAIN, SHAPE, WHOLE, D, Run, raises

# The original's schemas, at the state of its first description; it calls the graph of some operators id as well.
ORIGINAL = {
    "allgather_param": "(Tensor a, int graph_id, int id, ScalarType? dtype=None) -> Tensor",
    "prefetch_params_fused": "(int graph_id, Tensor[] params, int[] ids, ScalarType[]? dtypes=None) -> ()",
    "wait_allgather": "(Tensor(a) a, int graph_id, int id) -> Tensor(a)",
    "release_param": "(Tensor(a) a, int graph_id, int id, int n_users) -> Tensor(a)",
    "reduce_grad": "(Tensor a, int graph_id, int id) -> Tensor",
    "free_tensors": "(Tensor[] a) -> ()",
    "offload_tensor": "(Tensor a, int id, int id) -> Tensor",
    "reload_tensor": "(Tensor a, int id, int id) -> Tensor",
    "wait_offload": "(Tensor a, int id, int id) -> Tensor",
    "wait_reload": "(Tensor a, int id, int id) -> Tensor",
    "offload_parameter": "(Tensor a, int id, int id) -> ()",
    "reload_parameter": "(Tensor a, int id, int id) -> ()",
    "end_backward": "(int graph_id) -> ()",
}

BINDINGS = {
    "init": 3, "cleanup": 0, "register_param": 5, "register_graph_z1": 2, "register_graph_z2": 2,
    "register_graph_z3": 2, "register_z3_param": 6, "set_persistent": 1, "start_forward": 0, "end_forward": 0,
    "start_backward": 1, "enable_profiling": 1, "is_profiling": 0, "reset": 0, "invalidate_gathered_param": 1,
    "clear_all_gathered_params": 0,
}  # fmt: skip

card = pytest.mark.skipif(not (libdc.has_feature("cuda") and torch.cuda.is_available()),
                          reason="needs a card, and libdc's device for it")


def every_operator(run: Run, x: torch.Tensor, token: torch.Tensor) -> Dict[str, Any]:
    """Calls each once, in an order that is legal, and returns what they return."""
    def call(name: str, *args: Any) -> Any:
        return getattr(D, name)(*args)

    calls: List[Tuple[Any, ...]] = [
        ("prefetch_params_fused", GRAPH, [token], [PLAIN], None), ("allgather_param", token, GRAPH, PLAIN),
        ("wait_allgather", token, GRAPH, PLAIN), ("release_param", token, GRAPH, PLAIN, 1),
        ("reduce_grad", x, GRAPH, PLAIN), ("end_backward", GRAPH), ("free_tensors", [torch.empty_like(token)]),
        ("offload_tensor", x, GRAPH, 3), ("wait_offload", x, GRAPH, 3), ("reload_tensor", x, GRAPH, 3),
        ("wait_reload", x, GRAPH, 3), ("reload_parameter", token, GRAPH, FROZEN),
        ("offload_parameter", token, GRAPH, FROZEN)]
    results = {name: call(name, *args) for name, *args in calls}
    assert set(results) == set(ORIGINAL)
    return results


# A. Surface


def arguments(schema: str) -> List[str]:
    """The types in order, each with its name, but for the two that the original calls id."""
    inside = schema[schema.index("(") + 1:schema.rindex(") ->")]
    return [argument.replace(" graph_id", " id") for argument in inside.split(", ")]


def test_check_1_names_and_arguments() -> None:
    for name, schema in ORIGINAL.items():
        ours = str(getattr(D, name).default._schema)
        assert arguments(ours) == arguments(schema), name
        assert ours.split(" -> ")[1] == schema.split(" -> ")[1], name


def test_check_2_memory_of_the_argument(run: Run) -> None:
    gathered = D.allgather_param(run.token, GRAPH, PLAIN)
    assert D.wait_allgather(gathered, GRAPH, PLAIN).data_ptr() == gathered.data_ptr()
    other = torch.ones(4)
    assert D.wait_allgather(other, GRAPH, PLAIN).data_ptr() == other.data_ptr()
    assert D.release_param(other, GRAPH, PLAIN, 1).data_ptr() == other.data_ptr()


# The newest form is DeepSpeed's: it takes the place of the old one, so in a process of its own.
BOTH_FORMS = """
import torch
from libdc.torch import dc
from libdc.torch.deepspeed import handle
from operators import GRAPH, PLAIN, SHAPE, D, Run
handle.define_current_overloads()
run = Run()
for name, end in (("old", lambda grad: D.end_backward(GRAPH)),
                  ("new", lambda grad: D.end_backward([grad, None], GRAPH, False)),
                  ("in a graph", lambda grad: D.end_backward.default([grad], GRAPH, False)),
                  ("releasing", lambda grad: D.end_backward([grad], GRAPH, True))):
    dc.start_backward(True)
    grad = D.reduce_grad(torch.full(SHAPE, 3.0), GRAPH, PLAIN)
    flushes = run.stats().flushes
    assert end(grad) is None and run.grads[PLAIN].tolist() == [3.0] * 15
    print(name, run.stats().flushes - flushes, run.stats().bucket_bytes > 0)
    run.grads[PLAIN].zero_()
"""


def test_check_3_both_forms_of_end_backward() -> None:
    done = subprocess.run([sys.executable, "-c", BOTH_FORMS], cwd=ROOT / "tests" / "torch", capture_output=True,
                          text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["old 1 True", "new 1 True", "in a graph 1 True", "releasing 1 False"]


def test_check_4_kernels_for_cpu_and_meta(run: Run) -> None:
    every_operator(run, torch.randn(SHAPE), run.token)
    results = every_operator(run, torch.empty(SHAPE, device="meta"), torch.empty(0, device="meta"))
    assert results["allgather_param"].shape == SHAPE


@card
def test_check_4_kernels_for_a_card(run: Run) -> None:
    every_operator(run, torch.randn(SHAPE, device="cuda"), run.token.cuda())


def test_check_5_meta_changes_nothing(run: Run) -> None:
    def state() -> Any:
        dry = [ops.context().dry_run(op, GRAPH, id, libdc.DType.FLOAT32)
               for op in (libdc.Op.ALLGATHER_PARAM, libdc.Op.REDUCE_GRAD) for id in (PLAIN, KEPT, FROZEN)]
        return run.stats(), dry, dc.is_profiling(), [grad.clone().tolist() for grad in run.grads.values()]

    run.gather(KEPT)
    before = state()
    for _ in range(3):
        every_operator(run, torch.empty(SHAPE, device="meta"), torch.empty(0, device="meta"))
    assert state() == before
    raises("is not gathered", D.wait_allgather, run.token, GRAPH, PLAIN)
    raises("never offloaded", D.wait_offload, run.token, GRAPH, 3)


def test_check_6_bindings_and_their_arguments(run: Run) -> None:
    assert len(BINDINGS) == 16
    for name, count in BINDINGS.items():
        binding: Callable[..., Any] = getattr(dc, name)
        taken = [p for p in inspect.signature(binding).parameters.values()]
        assert len(taken) == count, name
        with pytest.raises(TypeError, match="argument"):
            binding(*range(count + 1))
        needed = sum(p.default is inspect.Parameter.empty for p in taken)
        if needed:
            with pytest.raises(TypeError, match="argument"):
                binding(*range(needed - 1))


def test_check_7_dead_code_stays(run: Run) -> None:
    effects = ["prefetch_params_fused", "free_tensors", "offload_parameter", "reload_parameter", "end_backward",
               "release_param", "reduce_grad"]
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for name, args in (("prefetch_params_fused", (GRAPH, [x], [PLAIN])), ("free_tensors", ([x],)),
                       ("reload_parameter", (x, GRAPH, FROZEN)), ("offload_parameter", (x, GRAPH, FROZEN)),
                       ("release_param", (x, GRAPH, PLAIN, 1)), ("reduce_grad", (x, GRAPH, PLAIN)),
                       ("end_backward", (GRAPH,))):
        graph.call_function(getattr(D, name).default, args)
    graph.call_function(torch.ops.aten.sin.default, (x,))  # this one is dead
    graph.output(x)
    graph.eliminate_dead_code()
    kept = [node.target for node in graph.nodes if node.op == "call_function"]
    assert len(kept) == len(effects) and set(kept) == {getattr(D, name).default for name in effects}

    def user(token: torch.Tensor) -> torch.Tensor:
        D.prefetch_params_fused(GRAPH, [token], [PLAIN])
        D.free_tensors([token + torch.ones(40)])
        D.reload_parameter(token, GRAPH, FROZEN)
        D.offload_parameter(token, GRAPH, FROZEN)
        D.release_param(token, GRAPH, PLAIN, 1)
        D.end_backward(GRAPH)
        return token * 2

    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(user, backend=backend, fullgraph=True)
        before = run.stats()
        compiled(torch.ones(1))
        after = run.stats()
        assert (after.gathers, after.copied_h2d_bytes, after.reload_bytes) == (
            before.gathers + 1, before.copied_h2d_bytes + 60, before.reload_bytes), backend
        raises("is not gathered", D.wait_allgather, run.token, GRAPH, PLAIN)


# B. Meta results


@pytest.fixture
def meta() -> torch.Tensor:
    return torch.empty(5, 3, dtype=torch.float16, device="meta").t()


def test_check_8_meta_gather_in_a_type(run: Run, meta: torch.Tensor) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        full = D.allgather_param(meta, GRAPH, PLAIN, dtype=dtype)
        assert (full.shape, full.dtype, full.device.type) == (SHAPE, dtype, "meta")


def test_check_9_meta_gather_in_the_shards_type(run: Run, meta: torch.Tensor) -> None:
    for id, dtype in ((90, torch.bfloat16), (91, torch.float64), (92, torch.int32)):
        dc.register_z3_param(id, (7,), torch.zeros(7, dtype=dtype), None, False)
        dc.register_graph_z3(id, [id])
        assert D.allgather_param(meta, id, id).dtype is dtype


def test_check_10_meta_reduction(run: Run, meta: torch.Tensor) -> None:
    result = D.reduce_grad(meta, GRAPH, PLAIN)
    assert (result.shape, result.dtype, result.device.type) == ((0,), torch.float16, "meta")
    result = D.reduce_grad(torch.ones(SHAPE, dtype=torch.float64), GRAPH, PLAIN)
    assert (result.shape, result.dtype, result.device.type) == ((0,), torch.float64, "cpu")


def test_check_11_meta_waits_and_releases(run: Run, meta: torch.Tensor) -> None:
    for out in (D.wait_allgather(meta, GRAPH, PLAIN), D.release_param(meta, GRAPH, PLAIN, 1),
                D.wait_offload(meta, GRAPH, 1), D.wait_reload(meta, GRAPH, 1)):
        assert (out.shape, out.dtype) == (meta.shape, meta.dtype)
    for out in (D.wait_allgather(meta, GRAPH, PLAIN), D.release_param(meta, GRAPH, PLAIN, 1)):
        assert out.stride() == meta.stride()


def test_check_12_meta_offload(run: Run, meta: torch.Tensor) -> None:
    for out in (D.offload_tensor(meta, GRAPH, 1), D.wait_offload(meta, GRAPH, 1)):
        assert (out.shape, out.dtype, out.device.type) == (meta.shape, meta.dtype, "cpu")


def test_check_13_meta_reload(run: Run, meta: torch.Tensor) -> None:
    for out in (D.reload_tensor(meta, GRAPH, 1), D.wait_reload(meta, GRAPH, 1)):
        assert (out.shape, out.dtype, out.device.type) == (meta.shape, meta.dtype, "meta")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        host = torch.empty(4, 3)
        assert D.reload_tensor(host, GRAPH, 1).device == ops.device()


def test_check_14_meta_without_a_result(run: Run, meta: torch.Tensor) -> None:
    assert D.prefetch_params_fused(GRAPH, [meta], [PLAIN]) is None
    assert D.free_tensors([meta]) is None
    assert D.offload_parameter(meta, GRAPH, PLAIN) is None
    assert D.reload_parameter(meta, GRAPH, PLAIN) is None
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert D.end_backward(GRAPH) is None


def test_check_15_meta_gather_of_nothing(run: Run, meta: torch.Tensor) -> None:
    raises("id = 77 is not a registered parameter", D.allgather_param, meta, GRAPH, 77)
    raises("graph_id = 77 is not a registered graph", D.allgather_param, meta, 77, PLAIN)
    raises("must be of stage 3", D.allgather_param, meta, GRAPH_Z2, WHOLE)


# Arguments and memory that only PyTorch has


def test_check_17_a_missing_field_is_named_and_no_communicator_stays() -> None:
    closed = []

    class Collectives(libdc.Collectives):
        def close(self) -> None:
            closed.append(self)

    for key in CONFIG:
        comm = libdc.Comm.external(Collectives(), 0, 1)
        with pytest.raises(ValueError, match=f"config has no '{key}'"):
            dc.init(comm, {name: value for name, value in CONFIG.items() if name != key}, 64)
        comm.close()
    assert len(closed) == len(CONFIG)


def test_check_54_lists_of_different_lengths(run: Run) -> None:
    before = run.stats()
    for params, ids, dtypes in ((1, 2, 2), (2, 1, 1), (2, 2, 1), (2, 2, 3), (1, 1, 0)):
        raises("must be of one length", D.prefetch_params_fused, GRAPH, [run.token] * params, [PLAIN, FROZEN][:ids],
               [torch.float32] * dtypes)
    assert run.stats() == before


@pytest.mark.parametrize("threshold", [16, 0])
def test_check_97_tensors_above_the_threshold(threshold: int) -> None:
    dc.init(None, {**CONFIG, "free_activation_threshold": threshold}, 64)
    tensors = [torch.ones(count) for count in (0, 1, threshold, threshold + 1, 100)]
    shapes = [tensor.shape for tensor in tensors]
    D.free_tensors(tensors)
    left = [tensor.untyped_storage().nbytes() // 4 for tensor in tensors]
    assert left == [0 if len(shape) and shape[0] > threshold else shape[0] for shape in shapes]
    assert [tensor.shape for tensor in tensors] == shapes
    dc.cleanup()


def test_check_98_cpu_tensors_on_the_cpu_device(run: Run) -> None:
    large = torch.ones(17)
    D.free_tensors([large])
    assert large.device == ops.device() and large.untyped_storage().nbytes() == 0


@card
def test_check_98_cpu_tensors_stay_on_a_card(run: Run) -> None:
    host, device = torch.ones(17), torch.ones(17, device="cuda")
    D.free_tensors([host, device])
    assert host.untyped_storage().nbytes() == 68 and device.untyped_storage().nbytes() == 0


def test_check_103_the_key_for_pinned_memory_is_not_read() -> None:
    for pin in (True, False):
        dc.init(None, {**CONFIG, "offload_activation_pin_memory": pin}, 64)
        dc.cleanup()
