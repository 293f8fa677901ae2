"""The operators torch.ops.dc.* under autograd, without data, and under PyTorch's own tests of operators."""

from __future__ import annotations

import threading
from typing import Any, List

import pytest

import torch

from operators import GRAPH, KEPT, PLAIN, SAMPLES, SHAPE, D, RT, Run, opcheck, raises, run  # noqa: E402


# Autograd


def test_gradients_pass_through(run: Run) -> None:
    run.gather(KEPT)
    x = torch.randn(SHAPE, requires_grad=True)
    y = D.release_param(D.wait_allgather(x, GRAPH, KEPT), GRAPH, KEPT, 1)
    y = D.wait_reload(D.reload_tensor(D.wait_offload(D.offload_tensor(y, GRAPH, 8), GRAPH, 8), GRAPH, 8), GRAPH, 8)
    (y * 3).sum().backward()
    assert torch.equal(x.grad, torch.full(SHAPE, 3.0))
    shard = run.shards[PLAIN].requires_grad_()
    assert not D.allgather_param(shard, GRAPH, PLAIN).requires_grad
    assert not D.reduce_grad(x, GRAPH, PLAIN).requires_grad
    assert not RT.take(shard, GRAPH, PLAIN).requires_grad


def test_calls_from_autograd_threads(run: Run) -> None:
    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            D.reduce_grad(grad, GRAPH, PLAIN)
            return grad

    x = torch.ones(SHAPE, requires_grad=True)
    failures: List[BaseException] = []

    def backward() -> None:
        try:
            for _ in range(20):
                Reduce.apply(x).sum().backward()
                D.release_param(run.gather(), GRAPH, PLAIN, 1)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    D.end_backward(GRAPH)
    assert not failures
    assert torch.equal(run.grads[PLAIN], torch.full((15,), 20.0))


# Fakes


def test_meta(run: Run) -> None:
    meta, before = torch.empty(0, device="meta"), run.stats()
    w = D.allgather_param(meta, GRAPH, PLAIN)
    assert (w.shape, w.dtype, w.device.type) == (SHAPE, torch.float32, "meta")
    assert D.allgather_param(meta, GRAPH, PLAIN, dtype=torch.bfloat16).dtype is torch.bfloat16
    assert RT.take(meta, GRAPH, PLAIN, torch.float16).shape == SHAPE
    x = torch.empty(4, 3, dtype=torch.float16, device="meta").t()
    for out in (D.wait_allgather(x, GRAPH, PLAIN), D.release_param(x, GRAPH, PLAIN, 1)):
        assert (out.shape, out.stride(), out.dtype) == (x.shape, x.stride(), x.dtype)
    grad = D.reduce_grad(x, GRAPH, PLAIN)
    assert (grad.shape, grad.dtype, grad.device.type) == ((0,), torch.float16, "meta")
    for op in (D.offload_tensor, D.wait_offload):
        out = op(x, GRAPH, 4)
        assert (out.shape, out.dtype, out.device.type) == (x.shape, x.dtype, "cpu")
    for op in (D.reload_tensor, D.wait_reload):
        assert op(x, GRAPH, 4).shape == x.shape
    assert D.prefetch_params_fused(GRAPH, [meta], [PLAIN]) is None
    assert D.free_tensors([x]) is None
    assert D.offload_parameter(meta, GRAPH, PLAIN) is None and D.reload_parameter(meta, GRAPH, PLAIN) is None
    raises("id = 77 is not a registered parameter", D.allgather_param, meta, GRAPH, 77)
    assert run.stats() == before


def test_fake_tensors(run: Run) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = run.stats()
    with FakeTensorMode():
        token = torch.empty(0)
        w = D.wait_allgather(D.allgather_param(token, GRAPH, PLAIN), GRAPH, PLAIN)
        assert w.shape == SHAPE and w.device.type == "cpu"
        D.prefetch_params_fused(GRAPH, [], [])
        D.free_tensors([])
        D.end_backward(GRAPH)
        assert RT.alloc([2, 3], torch.float32, 1).shape == (2, 3)
        whole, turned = RT.take_params(GRAPH, [PLAIN, ~PLAIN])
        assert whole.shape == SHAPE and turned.shape == SHAPE[::-1] and turned.t().is_contiguous()
        assert D.reduce_grad(w, GRAPH, PLAIN).device.type == "cpu"
    assert run.stats() == before


# PyTorch's tests


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("name", list(SAMPLES))
def test_opcheck(run: Run, name: str, grad: bool) -> None:
    """free_tensors is checked only below its threshold: PyTorch's tests read what it frees."""
    run.gather(PLAIN)
    run.gather(KEPT)
    x = torch.randn(SHAPE)
    D.offload_tensor(x, GRAPH, 1)
    D.wait_reload(D.reload_tensor(x, GRAPH, 1), GRAPH, 1)
    for args in SAMPLES[name](run, x.requires_grad_(grad)):
        opcheck(name, args)
