"""Memory that the layer's large tensors leave behind: it is used again, and never while anybody reads it."""

from __future__ import annotations

import gc
import mmap
import threading
from typing import Iterator, List

import pytest
import torch
from libdc.torch import TransformerLayer, set_cache_limit
from libdc.torch.transformer import caching_allocator
from libdc.transformer import LayerConfig
from torch import Tensor

MIB = torch.Size([1 << 20])


def empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return caching_allocator.empty(shape, dtype, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _nothing_free() -> Iterator[None]:
    gc.collect()
    most = set_cache_limit(0)
    set_cache_limit(most)
    yield
    set_cache_limit(0)
    set_cache_limit(most)


def test_comes_back_with_the_last_view() -> None:
    first = empty(torch.Size([512, 1025]), torch.bfloat16)
    assert first.shape == (512, 1025) and first.is_contiguous() and first.untyped_storage().nbytes() == 512 * 1025 * 2
    address, view = first.data_ptr(), first[3:]
    del first
    assert not caching_allocator._free
    other = empty(torch.Size([512, 1025]), torch.bfloat16)
    assert other.data_ptr() != address
    del view
    again = empty(torch.Size([1025, 256]), torch.float32)
    assert again.data_ptr() == address and not caching_allocator._free
    assert len(empty(torch.Size([1000]), torch.uint8)) == 1000 and not caching_allocator._free  # small: not of these


def test_only_so_much_waits() -> None:
    assert set_cache_limit(3 << 20) == 1 << 30
    tensors = [empty(MIB, torch.uint8) for _ in range(5)]
    newest = {tensor.data_ptr() for tensor in tensors[2:]}
    while tensors:
        del tensors[0]
    assert len(caching_allocator._free) == 3
    assert {tensor.data_ptr() for tensor in [empty(MIB, torch.uint8) for _ in range(3)]} == newest


def test_the_limit_holds_at_once() -> None:
    """Waiting memory goes back to the system; a tensor's memory stays, and goes when the tensor does."""
    tensors = [empty(MIB, torch.uint8) for _ in range(4)]
    last = tensors[-1].fill_(7)
    del tensors
    assert len(caching_allocator._free) == 3
    assert set_cache_limit(2 << 20) == 1 << 30 and len(caching_allocator._free) == 2
    assert set_cache_limit(0) == 2 << 20 and not caching_allocator._free
    assert int(last.sum()) == 7 << 20
    del last
    assert not caching_allocator._free
    assert set_cache_limit(1 << 30) == 0
    for bad in (-1, 1.5, True, None, "1G"):
        with pytest.raises(ValueError, match="nbytes = .* must be a number of bytes, 0 or more"):
            set_cache_limit(bad)  # type: ignore[arg-type]
    assert set_cache_limit(1 << 30) == 1 << 30


def test_threads() -> None:
    """A block has one tensor at a time, whichever thread takes and drops."""
    wrong: List[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            tensor = empty(MIB, torch.uint8)
            tensor[::4096] = number
            wrong.extend([number] * bool((tensor[::4096] != number).any()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong and len(set(map(id, caching_allocator._free))) == len(caching_allocator._free) > 0


def test_steps_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second step takes no memory anew, and its predecessor's gradients, forwards that wait for their backward and
    one that is run twice keep theirs."""
    torch.manual_seed(0)
    layer = TransformerLayer(LayerConfig(256, 4, attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1))
    inputs = [torch.randn(4, 256, 256, requires_grad=True) for _ in range(2)]

    def backward(y: Tensor, x: Tensor) -> List[Tensor]:
        return list(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], retain_graph=True))

    expected = [backward(layer(x, offset=i), x) for i, x in enumerate(inputs)]
    copies = [[g.clone() for g in gradients] for gradients in expected]
    outputs = [layer(x, offset=i) for i, x in enumerate(inputs)]
    for i in (0, 1, 0):
        assert all(map(torch.equal, backward(outputs[i], inputs[i]), copies[i]))
    assert all(map(torch.equal, sum(expected, []), sum(copies, [])))
    del expected, outputs

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("memory was taken anew")

    monkeypatch.setattr(mmap, "mmap", fail)
    assert all(map(torch.equal, backward(layer(inputs[0], offset=0), inputs[0]), copies[0]))
