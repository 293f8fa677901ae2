"""A backward takes the values that autograd saved in a sharded model's forward."""

from __future__ import annotations

import copy
import functools
from typing import Any, Callable, List, Optional, Sequence

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from models import Plain, bits, make
from sharded import grads, one_thread  # noqa: F401
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class Changed(nn.Module):
    """Changes what a backward needs, while `changes`."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.changes = make(Plain), True

    def forward(self, x: torch.Tensor, out: bool) -> torch.Tensor:
        hidden = torch.sigmoid(self.net.layers[0](x))
        used = hidden.square() if out else self.net.layers[1](hidden)
        if self.changes:
            hidden.add_(1)
        return used.sum()


@pytest.mark.parametrize("out", [True, False], ids=["an output", "an input"])
def test_changing_what_a_backward_needs(out: bool) -> None:
    """PyTorch compares versions of saved tensors, unless hooks save them."""

    def rank(comm: Any, stage: int) -> Any:
        x, model = torch.ones(2, 16), Changed()
        dct.shard(model, stage, comm=comm)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x, out).backward()
        assert dct.stats(model).gathered_bytes == 0 or stage < 3
        model.zero_grad()
        model.changes = False
        model(x, out).backward()
        return bits({name: grad for name, grad in grads(model).items() if grad is not None})

    expected = libdc.run.threads(1, rank, 0, timeout=60)
    for stage in (1, 3):
        assert libdc.run.threads(1, rank, stage, timeout=60) == expected


class Reads(nn.Module):
    """Multiplies with views of its weights that are of another type, or conjugated or negated when they are read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.layer = nn.Parameter(torch.randn(4, 2)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, filtered = self.layer(x), torch.view_as_complex(self.w)
        y = x * filtered * filtered[1:].conj().sum()
        y = y + x * filtered[:2].conj().resolve_conj().sum() + y[:, :3] @ filtered[1:, None].conj()
        return y.abs().square().sum() + (x * filtered.conj().imag).square().sum() + (x[:, 1:] * filtered.real[1:]).sum()


@pytest.mark.parametrize("persistent", [False, True])
def test_views_of_other_types(persistent: bool) -> None:
    """As models with Fourier filters have them. Gradients were those of other numbers."""

    reads = Reads()  # made once: ranks that are threads have one generator of random numbers

    def rank(comm: Any) -> None:
        plain, model = copy.deepcopy(reads), copy.deepcopy(reads)
        policy = {"w": dct.Policy(reshard_after_forward=False)} if persistent else None
        dct.shard(model, 3, comm=comm, policy=policy)
        x, y = (torch.ones(2, 4, requires_grad=True) for _ in range(2))
        for _ in range(2):
            plain(x).backward(), model(y).backward()
        torch.testing.assert_close(y.grad, x.grad)
        for p, q in zip(plain.parameters(), model.parameters()):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)
        assert persistent or dct.stats(model).gathered_bytes == 0
        for net, z in ((plain, x), (model, y)):
            z.grad = None
            grad, = torch.autograd.grad(net(z), z, create_graph=True)
            grad.square().sum().backward()
        torch.testing.assert_close(y.grad, x.grad)

    libdc.run.threads(2, rank, timeout=60)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_tensors(layout: str) -> None:
    """They have no storage, of which a sharded model at stage 3 asks whose it is."""

    def rank(comm: Any) -> None:
        class Neighbours(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (adjacent @ super().forward(x)).square().sum()

        adjacent = torch.eye(4).to_sparse() if layout == "coo" else torch.eye(4).to_sparse_csr()
        plain = Neighbours(4, 4)
        model = copy.deepcopy(plain)
        dct.shard(model, 3, comm=comm)
        for net in (plain, model):
            net(torch.ones(4, 4)).backward()
        torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)

    libdc.run.threads(1, rank, timeout=60)


def _freeze_and_write(model: nn.Module, x: torch.Tensor) -> None:
    model[1].requires_grad_(False)
    loss = model(x).square().sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    loss.backward()


def _step_before_a_penalty(model: nn.Module, x: torch.Tensor, **inputs: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(x).square().sum()
    model(x.detach()).sum().backward()
    optimizer.step()
    loss.backward(**inputs) if inputs else torch.autograd.grad(loss, x)


def _step_before_inputs(model: nn.Module, x: torch.Tensor) -> None:
    _step_before_a_penalty(model, x, inputs=[x])


def _write_a_frozen_one(model: nn.Module, x: torch.Tensor) -> None:
    model[1].requires_grad_(False)
    loss = model(x).square().sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    model(x.detach())  # gathers again, at stages 1 and 2 over the weights that the graph has
    loss.backward()


def _step_and_go_on_before_a_penalty(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(x).square().sum()
    model(x.detach()).sum().backward()
    optimizer.step()
    model(x.detach())
    torch.autograd.grad(loss, x)


@pytest.mark.parametrize("change, stages", [
    (_freeze_and_write, (None, 0, 3)), (_step_before_a_penalty, (None, 0, 3)), (_step_before_inputs, (None, 0, 3)),
    (_write_a_frozen_one, (None, 0, 1, 2, 3)), (_step_and_go_on_before_a_penalty, (None, 0, 1, 2, 3))])
def test_changing_weights_that_get_no_gradient(change: Callable[[nn.Module, torch.Tensor], None],
                                               stages: Sequence[Optional[int]]) -> None:
    """At stage 3 the backward gathers weights again, and at stages 1 and 2 the next forward overwrites those that the
    graph has. Those that had changed gave wrong gradients in silence."""
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4, requires_grad=True)

    def rank(comm: Any) -> None:
        for stage in stages:
            model = copy.deepcopy(plain)
            if stage is not None:
                dct.shard(model, stage, comm=comm)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                change(model, x.detach().requires_grad_())
            model.requires_grad_(True).zero_grad()
            model(x.detach()).sum().backward()  # the error leaves nothing behind

    libdc.run.threads(2, rank, timeout=60)


@pytest.mark.parametrize("op", [torch.ops.aten.addmm.default, torch.ops.aten.relu.default], ids=["addmm", "relu"])
def test_selective_checkpointing(op: Any) -> None:
    """It compares a forward's operators with the recomputation's, in which the weights may be there already."""
    contexts = functools.partial(create_selective_checkpoint_contexts, [op])

    def losses(model: nn.Module) -> List[float]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            loss = checkpoint(model, torch.ones(2, 6) * step, use_reentrant=False, context_fn=contexts).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    wanted = losses(copy.deepcopy(plain))
    for stage in range(4):
        for found in libdc.run.threads(2, lambda comm: losses(dct.shard(copy.deepcopy(plain), stage, comm=comm)),
                                       timeout=60):
            assert found == pytest.approx(wanted), stage


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, lengths: List[int]) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.rnn(packed)
        return self.head(torch.cat([*hidden], -1)).square().mean()


def test_weights_of_many_uses_are_gathered_once() -> None:
    """An RNN's backward asks for weights at each step of a sequence, and sequences of other ranks have other lengths.
    """
    x, lengths = torch.linspace(-1, 1, 4 * 6 * 3).view(4, 6, 3), [6, 2, 3, 4]
    torch.manual_seed(0)
    plain = Recurrent()
    plain(x, lengths).backward()

    def rank(comm: Any) -> None:
        model = dct.shard(copy.deepcopy(plain), 3, comm=comm)
        mine = slice(2 * comm.rank, 2 * comm.rank + 2)
        for _ in range(3):
            model.zero_grad()
            dct.stats(model, reset=True)
            loss = model(x[mine], lengths[mine])
            loss.backward(retain_graph=True)
            assert dct.stats(model).gathers == 10 + 3  # the head and what multiplies hidden states
            assert dct.stats(model).gathered_bytes == 0
            for name, param in plain.named_parameters():
                torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)
        model.zero_grad()
        loss.backward()
        torch.testing.assert_close(model.head.weight.grad.full_tensor(), plain.head.weight.grad)

    libdc.run.threads(2, rank, timeout=60)


class Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        first = super().forward(x)
        return first, super().forward(first)


def test_weights_are_given_back_where_a_backward_needs_less_than_was_saved() -> None:
    model = dct.shard(Twice(4, 4), 3)
    first, second = model(torch.ones(2, 4, requires_grad=True))
    assert second.grad_fn._saved_mat2.shape == (4, 4)
    first.sum().backward(retain_graph=True)
    assert dct.stats(model).gathered_bytes == 0
    second.sum().backward()
    assert dct.stats(model).gathered_bytes == 0
