"""The operators torch.ops.dc.*: schemas, results and errors. test_ops_python.py runs this file and test_ops_fakes.py
once more over the Python kernels."""

from __future__ import annotations

import gc
import resource
import threading
import time
from typing import Any, List

import pytest

import torch
import libdc

from libdc.torch import dc, ops  # noqa: E402
from libdc.torch.ops import registrations  # noqa: E402
from operators import FROZEN, GRAPH, GRAPH_Z2, KEPT, PLAIN, SHAPE, WHOLE, D, RT, Run, raises, run  # noqa: E402

SCHEMAS = """
allgather_param(Tensor a, int graph_id, int id, ScalarType? dtype=None) -> Tensor
prefetch_params_fused(int graph_id, Tensor[] params, int[] ids, ScalarType[]? dtypes=None) -> ()
wait_allgather(Tensor(a) a, int graph_id, int id) -> Tensor(a)
release_param(Tensor(a) a, int graph_id, int id, int n_users) -> Tensor(a)
reduce_grad(Tensor a, int graph_id, int id) -> Tensor
free_tensors(Tensor[] a) -> ()
offload_tensor(Tensor a, int graph_id, int id) -> Tensor
reload_tensor(Tensor a, int graph_id, int id) -> Tensor
wait_offload(Tensor a, int graph_id, int id) -> Tensor
wait_reload(Tensor a, int graph_id, int id) -> Tensor
offload_parameter(Tensor a, int graph_id, int id) -> ()
reload_parameter(Tensor a, int graph_id, int id) -> ()
end_backward(int graph_id) -> ()
""".split("\n")[1:-1]


# Surface


def test_schemas_are_the_agreed_ones() -> None:
    schemas = [str(getattr(D, name).default._schema) for name in registrations.OPERATORS]
    assert schemas == ["dc::" + text for text in SCHEMAS]


def test_loading_twice_is_harmless() -> None:
    kind = ops.load()
    assert kind in ("compiled", "python") and ops.load() == kind


def test_no_context_and_cleaned_up(run: Run) -> None:
    x = torch.ones(3)
    shape = "cleaned up"
    dc.cleanup()
    raises(shape, D.allgather_param, x, GRAPH, PLAIN)
    raises(shape, D.end_backward, GRAPH)
    raises(shape, D.free_tensors, [x])
    ops.set_context(None)
    raises("dc::reduce_grad: no default context: call libdc.torch.dc.init", D.reduce_grad, x, GRAPH, PLAIN)
    raises("dc::free_tensors: no default context", D.free_tensors, [])


# Real kernels


def test_gather_wait_release(run: Run) -> None:
    gathered = D.allgather_param(run.token, GRAPH, PLAIN)
    waited = D.wait_allgather(gathered, GRAPH, PLAIN)
    assert waited.data_ptr() == gathered.data_ptr() and waited is not gathered
    assert waited.shape == SHAPE and waited.is_contiguous() and not waited.requires_grad
    assert torch.equal(waited, run.full(PLAIN))
    assert run.stats().gathered_bytes > 0
    released = D.release_param(run.token, GRAPH, PLAIN, 1)
    assert released.shape == (0,)
    assert D.allgather_param(run.token, GRAPH, PLAIN).shape == SHAPE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gather_in_another_type(run: Run, dtype: Any) -> None:
    assert torch.equal(run.gather(PLAIN, dtype), run.full(PLAIN).to(dtype))


def test_result_outlives_the_context(run: Run) -> None:
    kept = run.gather(KEPT)
    taken = RT.take(run.token, GRAPH, PLAIN)
    expected = run.full(PLAIN).clone()
    dc.cleanup()
    ops.set_context(None)
    gc.collect()
    assert torch.equal(taken, expected)
    del kept, taken
    gc.collect()


def test_take_owns_its_memory(run: Run) -> None:
    taken = RT.take(run.token, GRAPH, PLAIN)
    again = RT.take(run.token, GRAPH, PLAIN, torch.bfloat16)
    assert torch.equal(taken, run.full(PLAIN)) and again.dtype is torch.bfloat16
    raises("is not gathered", D.wait_allgather, run.token, GRAPH, PLAIN)
    taken.zero_()
    assert torch.equal(RT.take(run.token, GRAPH, PLAIN), run.full(PLAIN))
    before = run.stats().gathered_bytes
    del taken, again
    assert run.stats().gathered_bytes <= before


def test_take_together(run: Run) -> None:
    D.prefetch_params_fused(GRAPH, [run.token] * 2, [PLAIN, KEPT], None)
    before = run.stats()
    whole, turned, kept = RT.take_params(GRAPH, [PLAIN, ~FROZEN, KEPT])
    assert run.stats().gathers == before.gathers + 1
    assert torch.equal(whole, run.full(PLAIN)) and torch.equal(kept, run.full(KEPT))
    assert torch.equal(turned, run.full(FROZEN).t()) and turned.t().is_contiguous() and turned._base is None
    narrow, = RT.take_params(GRAPH, [~PLAIN], [torch.bfloat16])
    assert torch.equal(narrow, run.full(PLAIN).bfloat16().t())
    assert RT.take_params(GRAPH, []) == []
    del whole, turned, narrow
    assert run.stats().gathered_bytes <= before.gathered_bytes
    wrong = "dc_rt::take_params: ids and dtypes must be of one length, have 2 and 1"
    raises(wrong, RT.take_params, GRAPH, [PLAIN, KEPT], [torch.float32])
    raises("id = 77 is not a registered parameter", RT.take_params, GRAPH, [PLAIN, 77])
    assert run.stats().gathered_bytes <= before.gathered_bytes


def test_persistent_parameters_stay(run: Run) -> None:
    address = run.gather(KEPT).data_ptr()
    for _ in range(3):
        D.release_param(run.token, GRAPH, KEPT, 1)
        assert run.gather(KEPT).data_ptr() == address
    run.shards[KEPT].fill_(7)
    dc.params_updated()
    assert torch.equal(run.gather(KEPT), torch.full(SHAPE, 7.0))


def test_prefetch(run: Run) -> None:
    before = run.stats().gathers
    D.prefetch_params_fused(GRAPH, [], [])
    assert run.stats().gathers == before
    D.prefetch_params_fused(GRAPH, [run.token, run.token], [PLAIN, FROZEN], [torch.bfloat16, torch.float32])
    assert run.stats().gathers == before + 2
    assert torch.equal(run.gather(PLAIN, torch.bfloat16), run.full(PLAIN).bfloat16())
    assert run.stats().gathers == before + 2
    D.prefetch_params_fused(GRAPH, [run.token], [FROZEN], None)
    wrong = "dc::prefetch_params_fused: params, ids and dtypes must be of one length, have "
    raises(wrong + "1, 2 and 2", D.prefetch_params_fused, GRAPH, [run.token], [PLAIN, FROZEN])
    raises(wrong + "1, 1 and 2", D.prefetch_params_fused, GRAPH, [run.token], [PLAIN], [torch.float32] * 2)
    raises(wrong + "1, 1 and 0", D.prefetch_params_fused, GRAPH, [run.token], [PLAIN], [])


@pytest.mark.parametrize("make", [lambda g: g, lambda g: g.t().contiguous().t(), lambda g: g.view(-1)],
                         ids=["contiguous", "transposed", "flat"])
def test_reduce(run: Run, make: Any) -> None:
    grad = torch.randn(SHAPE)
    dc.start_backward(True)
    result = D.reduce_grad(make(grad), GRAPH, PLAIN)
    D.reduce_grad(grad.expand(SHAPE) * 2, GRAPH_Z2, WHOLE)
    assert result.shape == (0,) and result.dtype is grad.dtype
    D.end_backward(GRAPH)
    assert torch.equal(run.grads[PLAIN], grad.view(-1))
    assert torch.equal(run.whole_grad, 2 * grad.view(-1))
    D.end_backward(GRAPH)


def test_reduce_expanded(run: Run) -> None:
    D.reduce_grad(torch.ones(()).expand(SHAPE), GRAPH, PLAIN)
    D.reduce_grad(torch.ones(SHAPE), GRAPH, FROZEN)
    D.end_backward(GRAPH)
    assert torch.equal(run.grads[PLAIN], torch.ones(15))


def test_reduce_together(run: Run) -> None:
    grad = torch.randn(SHAPE)
    dc.start_backward(True)
    RT.reduce_grads([grad.t().contiguous().t(), torch.ones(()).expand(SHAPE), grad], GRAPH, [PLAIN, KEPT, PLAIN])
    RT.reduce_grads([], GRAPH, [])
    D.end_backward(GRAPH)
    assert torch.equal(run.grads[PLAIN], 2 * grad.view(-1))
    assert torch.equal(run.grads[KEPT], torch.ones(15))
    raises("dc_rt::reduce_grads: grads and ids must be of one length, have 1 and 2", RT.reduce_grads, [grad], GRAPH,
           [PLAIN, KEPT])
    raises("elements", RT.reduce_grads, [grad, torch.ones(14)], GRAPH, [KEPT, PLAIN])
    raises("graph_id = 77", RT.reduce_grads, [grad], 77, [PLAIN])


def test_free_tensors(run: Run) -> None:
    small, large, view = torch.ones(16), torch.ones(17), None
    view = large[:5]
    dc.enable_profiling(True)
    D.free_tensors([large])
    assert dc.is_profiling() and large.untyped_storage().nbytes() == 68
    dc.enable_profiling(False)
    D.free_tensors([])
    D.free_tensors([small, large])
    assert small.untyped_storage().nbytes() == 64
    assert large.untyped_storage().nbytes() == 0 and view.untyped_storage().nbytes() == 0 and large.shape == (17,)
    D.free_tensors([large, torch.ones(64, dtype=torch.complex64)])
    foreign = torch.frombuffer(bytearray(256), dtype=torch.uint8)
    D.free_tensors([foreign])
    assert foreign.count_nonzero() == 0, "memory that is not PyTorch's stays"
    large.untyped_storage().resize_(68)
    large.fill_(3)
    assert view.tolist() == [3] * 5


def test_free_tensors_gives_back_reloaded_memory(run: Run) -> None:
    x = torch.randn(40)
    D.wait_offload(D.offload_tensor(x, GRAPH, 1), GRAPH, 1)
    y = D.wait_reload(D.reload_tensor(x, GRAPH, 1), GRAPH, 1)
    assert torch.equal(x, y) and run.stats().reload_bytes == 160
    D.free_tensors([y])
    assert run.stats().reload_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_offload_and_reload(run: Run, dtype: Any) -> None:
    x = torch.randn(4, 6).to(dtype)
    host = D.wait_offload(D.offload_tensor(x.t(), GRAPH, 5), GRAPH, 5)
    assert torch.equal(host, x.t()) and host.device.type == "cpu"
    back = D.wait_reload(D.reload_tensor(host, GRAPH, 5), GRAPH, 5)
    assert torch.equal(back, x.t()) and back.data_ptr() != host.data_ptr()
    D.end_backward(GRAPH)
    assert torch.equal(back, x.t()), "the tensor keeps the memory that end_backward gave up"
    assert run.stats().reload_bytes == 0


def test_wait_reload_while_profiling(run: Run) -> None:
    dc.enable_profiling(True)
    x = torch.randn(3, 2)
    assert torch.equal(D.wait_reload(x.t(), GRAPH, 99), x.t())


def test_offload_parameter(run: Run) -> None:
    D.reload_parameter(run.token, GRAPH, PLAIN)
    assert torch.equal(run.gather(), run.full(PLAIN))
    D.offload_parameter(run.token, GRAPH, PLAIN)
    D.offload_parameter(run.token, GRAPH, PLAIN)


def test_alloc(run: Run) -> None:
    for kind in libdc.MemoryKind:
        x = RT.alloc([3, 0, 2], torch.float32, kind)
        assert x.shape == (3, 0, 2)
        x = RT.alloc([4, 2], torch.bfloat16, kind)
        assert x.dtype is torch.bfloat16 and x.count_nonzero() == 0 and x.is_contiguous()
        x.add_(1)
        assert RT.alloc([], torch.int64, kind).item() == 0
    raises(r"dc_rt::alloc: shape\[1\] = -1, must be >= 0", RT.alloc, [2, -1], torch.float32, 1)
    raises(r"dc_rt::alloc: shape\[1\] = 4611686018427387904", RT.alloc, [4, 1 << 62], torch.float32, 1)
    raises("kind = 9", RT.alloc, [2], torch.float32, 9)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 1, 3)])
def test_shapes(run: Run, shape: Any) -> None:
    numel = torch.Size(shape).numel()
    shard, grad = torch.randn(numel), torch.zeros(numel)
    dc.register_z3_param(50, shape, shard, grad, False)
    dc.register_graph_z3(51, [50])
    w = D.wait_allgather(D.allgather_param(run.token, 51, 50), 51, 50)
    assert w.shape == shape and torch.equal(w, shard.view(shape))
    D.reduce_grad(torch.ones(shape), 51, 50)
    D.end_backward(51)
    assert torch.equal(grad, torch.ones(numel))
    assert torch.equal(RT.take(run.token, 51, 50), shard.view(shape))


# Errors


def test_errors(run: Run) -> None:
    x = torch.ones(SHAPE)
    raises("graph_id = 77 is not a registered graph", D.allgather_param, x, 77, PLAIN)
    raises("id = 77 is not a registered parameter", D.allgather_param, x, GRAPH, 77)
    raises(f"parameter {WHOLE} is not in graph", D.allgather_param, x, GRAPH, WHOLE)
    raises("is of stage 2, must be of stage 3", D.allgather_param, x, GRAPH_Z2, WHOLE)
    raises("is of stage 2, must be of stage 3", D.wait_allgather, x, GRAPH_Z2, WHOLE)
    raises("is not gathered; call dc_allgather_param first", D.wait_allgather, x, GRAPH, PLAIN)
    raises("is not gathered", D.release_param, x, GRAPH, PLAIN, 1)
    raises("n_users = 0 .*must be >= 1", D.release_param, x, GRAPH, PLAIN, 0)
    raises("dtype", D.allgather_param, x, GRAPH, PLAIN, torch.uint8)
    raises("dc::allgather_param: dtype: .* is not one of libdc's", D.allgather_param, x, GRAPH, PLAIN, torch.complex64)
    raises("dc::prefetch_params_fused: dtype: .* is not one of libdc's", D.prefetch_params_fused, GRAPH, [x], [PLAIN],
           [torch.complex64])
    raises("elements", D.reduce_grad, torch.ones(14), GRAPH, PLAIN)
    raises("must be a floating-point type", D.reduce_grad, torch.ones(SHAPE, dtype=torch.int64), GRAPH, PLAIN)
    raises("is not one of libdc's", D.reduce_grad, torch.ones(SHAPE, dtype=torch.complex64), GRAPH, PLAIN)
    raises("graph_id = 77", D.reduce_grad, x, 77, PLAIN)
    raises("graph_id = 77", D.end_backward, 77)
    raises("was not offloaded in graph", D.reload_tensor, x, GRAPH, 3)
    raises("was never offloaded in graph", D.wait_offload, x, GRAPH, 3)
    raises("was never offloaded in graph", D.wait_reload, x, GRAPH, 3)
    D.offload_tensor(x, GRAPH, 3)
    raises("is not being reloaded", D.wait_reload, x, GRAPH, 3)
    raises("differs in shape or type", D.offload_tensor, torch.ones(4), GRAPH, 3)
    raises("is of stage 2", D.offload_parameter, x, GRAPH_Z2, WHOLE)


def test_released_once_too_often(run: Run) -> None:
    run.gather()
    D.release_param(run.token, GRAPH, PLAIN, 2)
    raises("the first of its users said 2", D.release_param, run.token, GRAPH, PLAIN, 3)
    D.release_param(run.token, GRAPH, PLAIN, 2)
    raises("released by its last user", D.release_param, run.token, GRAPH, PLAIN, 2)


def test_errors_do_not_leak(run: Run) -> None:
    x = torch.ones(SHAPE)

    def wrong() -> None:
        for call, args in ((D.allgather_param, (x, 77, PLAIN, torch.float16)),
                           (D.prefetch_params_fused, (GRAPH, [x, x], [PLAIN], [torch.float16])),
                           (D.reduce_grad, (x.t(), GRAPH, 77)), (D.free_tensors, ([x], ))):
            try:
                call(*args)
            except RuntimeError:
                pass

    for _ in range(500):
        wrong()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5000):
        wrong()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1024, f"{grown} KiB in 20000 calls"


def test_results_do_not_leak(run: Run) -> None:
    big = torch.randn(1 << 16)
    dc.register_z3_param(60, (1 << 16,), big, torch.zeros(1 << 16), False)
    dc.register_graph_z3(61, [60])

    def step(n: int) -> int:
        for _ in range(n):
            w = D.wait_allgather(D.allgather_param(run.token, 61, 60, dtype=torch.bfloat16), 61, 60)
            D.release_param(w, 61, 60, 1)
            RT.take(run.token, 61, 60)
            D.reduce_grad(big, 61, 60)
            D.end_backward(61)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = step(50)
    assert step(300) - before < 1024


def test_other_threads_run_during_an_operator(run: Run) -> None:
    if ops.backend == "python":
        pytest.skip("a Python kernel holds the GIL but for the library's part")
    ticks: List[int] = [0]
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    big = torch.randn(1 << 24)
    dc.register_z3_param(70, (1 << 24,), big, torch.empty(0), False)
    dc.register_graph_z3(71, [70])
    ticker = threading.Thread(target=tick)
    ticker.start()
    # Between two operators there is a tick at most, so what is more came while one ran, if not while all did.
    operators, before = 0, ticks[0]
    while ticks[0] - before <= 2 * operators + 5 and operators < 200:
        RT.take(run.token, 71, 70, torch.float64)  # casts 64 MiB, and waits for it
        operators += 1
    during = ticks[0] - before
    stop.set()
    ticker.join()
    assert during > 2 * operators + 5, f"{during} ticks during {operators} operators"


def test_graphs_bound_to_other_contexts() -> None:
    """Ranks as threads, each with a context of its own, on one set of operators."""

    def rank(comm: Any) -> None:
        context = libdc.Context()
        context.init(comm, {}, 64)
        graph = 100 + comm.rank
        ops.bind(graph, context)
        shard, grad = torch.full((3,), float(comm.rank)), torch.zeros(3)
        context.register_z3_param(1, (5,), shard, grad)
        context.register_graph_z3(graph, [1])
        w = RT.take(shard, graph, 1)
        assert w.tolist() == [0, 0, 0, 1, 1]
        D.reduce_grad(torch.arange(5.0) + 10 * comm.rank, graph, 1)
        D.end_backward(graph)
        assert grad.tolist() == ([5, 6, 7] if comm.rank == 0 else [8, 9, 0])
        ops.unbind(graph)
        raises("no default context|not a registered graph|cleaned up", D.end_backward, graph)
        ops.unbind(graph)
        context.close()

    ops.set_context(None)
    from libdc.run import threads

    threads(2, rank)
