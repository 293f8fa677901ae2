"""A sharded model's next forward reads what an optimizer has stepped, whenever `.grad` is set to None."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any, Callable, Dict, List

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from sharded import one_thread  # noqa: F401


class ClearsInStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad()
        return loss


def _in_step(model: nn.Module) -> torch.optim.Optimizer:
    return ClearsInStep(model.parameters(), lr=0.1, fused=True)


def _nested(model: nn.Module) -> torch.optim.Optimizer:
    torch.optim.AdamW(model.parameters())  # from now on AdamW's own step() calls the hooks too
    return _in_step(model)


def _in_a_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer.register_step_post_hook(lambda self, *_: self.zero_grad())
    return optimizer


class Around(torch.optim.Optimizer):
    """As timm's Lookahead, which does not call PyTorch's constructor: it has no hooks of states."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> Dict[str, Any]:
        return self.inner.state_dict()


def _around(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = Around(_in_step(model))
    optimizer.zero_grad()  # from now on its step() calls hooks
    return optimizer


@pytest.mark.parametrize("make", [_in_step, _nested, _in_a_hook, _around])
@pytest.mark.parametrize("closure", [None, "args", "kwargs"])
def test_steps_that_leave_no_gradient(make: Callable[[nn.Module], torch.optim.Optimizer], closure: Any) -> None:
    """Fused ones change no version. At stages 1 and 2 the model was trained with its first weights for ever."""
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    plain[1].weight.requires_grad_(False)

    def train(model: nn.Module) -> List[float]:
        optimizer = make(model)
        losses = []

        def backward() -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(4):
            if closure is None:
                backward()
                optimizer.step()
            elif closure == "args":
                optimizer.step(backward)
            else:
                optimizer.step(closure=backward)
        return losses

    expected = train(copy.deepcopy(plain))
    assert len(set(expected)) == 4

    def rank(comm: Any) -> None:
        for stage in (0, 1, 2, 3):
            model = copy.deepcopy(plain)
            dct.shard(model, stage, comm=comm, policy={"0": dct.Policy(reshard_after_forward=False)})
            torch.testing.assert_close(train(model), expected)

    libdc.run.threads(2, rank, timeout=60)


def test_a_step_that_raised_is_over() -> None:
    """The next one looks at the gradients anew."""
    model = nn.Linear(4, 4, bias=False)
    dct.shard(model, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()

    def raises() -> Any:
        raise KeyError("closure")

    with pytest.raises(KeyError):
        optimizer.step(raises)
    optimizer.zero_grad()
    loss = model(torch.ones(1, 4)).sum()
    optimizer.step()  # changes nothing, since there is no gradient
    loss.backward()


HOOKS_OF_STEPS = """
import torch, libdc.torch as dct, libdc.run

def rank(comm):
    model = dct.shard(torch.nn.Linear(4, 3, bias=False), 3, comm=comm)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    seen = []
    optimizer.register_step_pre_hook(lambda self, *_: seen.append(float(model.weight.norm())))
    optimizer.register_step_post_hook(lambda self, *_: seen.append(tuple(model.weight.shape)))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert abs(seen[0] - 12 ** 0.5) < 1e-6 and seen[1] == (3, 4), seen  # were 6 ** 0.5 and (6,)

if EARLY:
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # PyTorch makes AdamW.step() call hooks from now on
libdc.run.threads(2, rank, timeout=60)
"""


@pytest.mark.parametrize("early", [False, True])
def test_hooks_of_steps_see_parts(early: bool) -> None:
    program = HOOKS_OF_STEPS.replace("EARLY", str(early))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
