"""The operators inside torch.compile: as many real calls as in eager mode, none while tracing, in the program's order.

Compiled artefacts do not know which semantics were registered, so the caches stay off."""

from __future__ import annotations

import os
from typing import Any, Callable, Iterator, List, Tuple

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import pytest

import torch
import libdc

from libdc.torch import dc, ops  # noqa: E402
from libdc.torch.ops import registrations  # noqa: E402
from operators import CONFIG, FROZEN, GRAPH, KEPT, PLAIN, SHAPE, D, Run  # noqa: E402

BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture
def run() -> Iterator[Run]:
    torch._dynamo.reset()
    run = Run()
    yield run
    dc.cleanup()


def counted(run: Run, call: Callable[[], Any]) -> Tuple[Any, Tuple[int, ...]]:
    """The call's result, and what the library did in it."""
    before = run.stats()
    result = call()
    after = run.stats()
    names = ("gathers", "gather_hits", "reductions", "flushes", "copied_d2h_bytes", "copied_h2d_bytes")
    return result, tuple(getattr(after, name) - getattr(before, name) for name in names)


def every_operator(x: Any, token: Any) -> Any:
    D.prefetch_params_fused(GRAPH, [token], [PLAIN], None)
    D.prefetch_params_fused(GRAPH, [token], [PLAIN], [torch.float16])
    D.reload_parameter(token, GRAPH, FROZEN)
    w = D.wait_allgather(D.allgather_param(token, GRAPH, PLAIN), GRAPH, PLAIN)
    k = D.wait_allgather(D.allgather_param(token, GRAPH, KEPT, dtype=torch.float32), GRAPH, KEPT)
    y = D.release_param(x * w + k, GRAPH, PLAIN, 1)
    dropped = torch.empty(0)
    dropped = D.release_param(dropped, GRAPH, KEPT, 1)  # as the original's example does it: the result is not used
    D.offload_parameter(token, GRAPH, FROZEN)
    host = D.wait_offload(D.offload_tensor(y, GRAPH, 3), GRAPH, 3)
    D.free_tensors([y])
    D.free_tensors([])
    z = D.wait_reload(D.reload_tensor(host, GRAPH, 3), GRAPH, 3)
    for factor in range(1, 5):
        D.reduce_grad(z * factor, GRAPH, PLAIN)
    D.reduce_grad(z * 9, GRAPH, KEPT)
    D.end_backward(GRAPH)
    D.end_backward(GRAPH)
    return z + 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_operator(run: Run, backend: str) -> None:
    x = torch.randn(SHAPE)
    run.gather(KEPT)
    dc.start_backward(True)
    expected, eager = counted(run, lambda: every_operator(x, run.token))
    grads = {id: run.grads[id].clone() for id in (PLAIN, KEPT)}
    compiled = torch.compile(every_operator, backend=backend, fullgraph=True)
    for i in range(3):  # the first one compiles too
        dc.start_backward(True)
        result, calls = counted(run, lambda: compiled(x, run.token))
        assert calls == eager, f"run {i}"
        assert torch.equal(result, expected)
        for id, grad in grads.items():
            assert torch.equal(run.grads[id], grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_calls_are_not_merged(run: Run, backend: str) -> None:
    """A gather after a release is another one; nor may its result be written into, or taken for the first one's."""

    def twice(x: Any, token: Any) -> Any:
        w = D.wait_allgather(D.allgather_param(token, GRAPH, PLAIN), GRAPH, PLAIN)
        y = torch.relu(x * w)
        y = D.release_param(y, GRAPH, PLAIN, 1)
        v = D.wait_allgather(D.allgather_param(token, GRAPH, PLAIN), GRAPH, PLAIN)
        z = D.release_param(y + v.sin(), GRAPH, PLAIN, 1)
        return z.sum()

    x = torch.randn(SHAPE, requires_grad=True)
    expected, eager = counted(run, lambda: twice(x, run.token))
    assert eager[0] == 2
    (grad,) = torch.autograd.grad(expected, x)
    compiled = torch.compile(twice, backend=backend, fullgraph=True)
    for _ in range(2):
        result, calls = counted(run, lambda: compiled(x, run.token))
        assert calls == eager
        assert torch.allclose(result, expected)
        assert torch.allclose(torch.autograd.grad(result, x)[0], grad)


def test_library_memory_is_not_written(run: Run) -> None:
    """A persistent parameter's memory stays the library's, though a compiler sees a new tensor that dies at once."""

    def consume(token: Any) -> Any:
        return torch.ops.dc.allgather_param(token, GRAPH, KEPT) * 2 + 1

    kept = run.gather(KEPT)
    compiled = torch.compile(consume, backend="inductor", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(run.token), run.full(KEPT) * 2 + 1)
    assert torch.equal(kept, run.full(KEPT))


def latest_first(nodes: List[Any]) -> List[Any]:
    """An order of Inductor's scheduler nodes that respects dependencies, and nothing else."""
    left, ordered = list(nodes), []
    while left:
        missing = {name for node in left for name in node.get_buffer_names()}
        ready = [node for node in left
                 if not any(dep.name in missing - set(node.get_buffer_names()) for dep in node.unmet_dependencies)]
        ordered.append(ready[-1])
        left.remove(ready[-1])
    return ordered


def test_order_after_autograd(run: Run) -> None:
    """Operators put into a backward graph after AOTAutograd, as a compiler for ZeRO does it, run in the graph's order
    under Inductor. Nothing but registrations.py says that they are ordered."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    ids = list(range(200, 212))
    grads = [torch.zeros(16, 16) for _ in ids]
    for id, grad in zip(ids, grads):
        dc.register_z3_param(id, (16, 16), torch.randn(256), grad.view(-1), False)
    dc.register_graph_z3(300, ids)
    registrations.prepare_inductor()

    def backward(module: Any, inputs: List[Any]) -> Any:
        graph = module.graph
        output = next(node for node in graph.nodes if node.op == "output")
        results = [result for result in output.args[0] if result is not None]
        for id, result in zip(ids, results):
            with graph.inserting_after(result):
                token = graph.call_function(D.reduce_grad.default, (result, 300, id))
            token.meta["val"] = D.reduce_grad(result.meta["val"], 300, id)
        with graph.inserting_before(output):
            graph.call_function(D.end_backward.default, (300,))
        module.recompile()
        # The last first, of all orders that dependencies allow: what keeps its place is bound to it.
        with torch._inductor.config.patch(_post_fusion_custom_pass=latest_first, reorder_for_peak_memory=False):
            return compile_fx_inner(module, inputs)

    weights = [torch.randn(16, 16, requires_grad=True) for _ in ids]

    def model(x: Any, weights: List[Any]) -> Any:
        for weight in weights:
            x = x @ weight
        return x.sum()

    compiled = torch.compile(model, backend=aot_autograd(
        fw_compiler=compile_fx_inner, bw_compiler=backward, decompositions=select_decomp_table()))
    x = torch.randn(64, 16)
    for _ in range(2):
        dc.start_backward(True)
        for weight in weights:
            weight.grad = None
        compiled(x, weights).backward()
        # end_backward came last, or some of these would still be in the buckets.
        assert all(torch.equal(weight.grad, grad) for weight, grad in zip(weights, grads))


def test_dynamic_shapes_compile_once(run: Run) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    def user(x: Any, token: Any) -> Any:
        w = D.wait_allgather(D.allgather_param(token, GRAPH, PLAIN), GRAPH, PLAIN)
        D.reduce_grad(x.sum(0), GRAPH, PLAIN)
        return D.release_param(x * w, GRAPH, PLAIN, 1)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(user, backend=counter, dynamic=True, fullgraph=True)
    for n in (2, 3, 5, 7):
        x = torch.randn(n, *SHAPE)
        assert torch.equal(compiled(x, run.token), x * run.full(PLAIN))
    assert counter.frame_count == 1


def test_an_unknown_parameter_is_named_while_tracing(run: Run) -> None:
    compiled = torch.compile(lambda token: D.allgather_param(token, GRAPH, 77) + 1, backend="aot_eager")
    with pytest.raises(Exception, match="id = 77 is not a registered parameter"):
        compiled(run.token)


def test_inductor_without_its_hooks_is_refused(run: Run, monkeypatch: Any) -> None:
    from torch._inductor import graph

    registrations.prepare_inductor()
    original = graph.GraphLowering.__init__

    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        del self.additional_buffer_deps

    monkeypatch.setattr(graph.GraphLowering, "__init__", without)
    compiled = torch.compile(lambda token: D.allgather_param(token, GRAPH, KEPT) + 1, backend="inductor")
    with pytest.raises(Exception, match="has no GraphLowering.additional_buffer_deps"):
        compiled(run.token)


def test_export(run: Run) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any, token: Any) -> Any:
            w = D.wait_allgather(D.allgather_param(token, GRAPH, PLAIN), GRAPH, PLAIN)
            return D.release_param(x * w, GRAPH, PLAIN, 1)

    x = torch.randn(4, *SHAPE)
    for strict in (True, False):
        program = torch.export.export(Model(), (x, run.token), strict=strict,
                                      dynamic_shapes={"x": {0: torch.export.Dim("n")}, "token": None})
        y = torch.randn(6, *SHAPE)
        assert torch.equal(program.module()(y, run.token), y * run.full(PLAIN))
