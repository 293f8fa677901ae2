"""Changes that users make to an optimizer's groups and state, and to parameters and gradients, between steps: as
torch.optim's, or an error."""

from __future__ import annotations

import collections
from typing import Any, Callable, List

import libdc
import numpy as np
import pytest
import torch
from libdc import linalg, optim


def filled(value: float, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape or (2,), value))


def step(optimizer: Any, *params: torch.nn.Parameter) -> List[float]:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return [param.flatten()[0].item() for param in params]


def replace(groups: Any) -> None:
    groups[0]["params"][0] = filled(5.0)


def append(groups: Any) -> None:
    groups[0]["params"].append(filled(5.0))


def exchange(groups: Any) -> None:
    groups[0]["params"][0], groups[1]["params"][0] = groups[1]["params"][0], groups[0]["params"][0]


@pytest.mark.parametrize("change, text", [
    (replace, "parameter 0 of group 0 is not"), (append, "parameter 2 of group 0 is not"),
    (exchange, "parameter 0 of group 0 is not"), (list.reverse, "parameter 0 of group 0 is not"),
    (lambda groups: groups.pop(0), "parameter 0 of group 0 is not"),
    (lambda groups: groups.pop(1), "a parameter of group 1 is gone"),
    (lambda groups: groups[0]["params"].pop(), "parameter 0 of group 1 is not")])  # fmt: skip
def test_groups_with_other_parameters_are_refused(change: Callable[[Any], Any], text: str) -> None:
    a, b, c = (filled(0.0) for _ in range(3))
    optimizer = optim.SGD([{"params": [a, b]}, {"params": [c], "lr": 10.0}], lr=1.0)
    change(optimizer.param_groups)
    with pytest.raises(RuntimeError, match=f"SGD: {text}"):
        step(optimizer, a, b, c)
    assert a[0] == 0 and b[0] == 0 and c[0] == 0


def number_of(kind: type, value: float) -> Any:
    return torch.tensor(value) if kind is torch.Tensor else np.array(value) if kind is np.ndarray else value


@pytest.mark.parametrize("name, option", [
    ("AdamW", "weight_decay"), ("SGD", "momentum"), ("Muon", "weight_decay"), ("Shampoo", "weight_decay"),
    ("SOAP", "eps"), ("KFAC", "weight_decay")])  # fmt: skip
def test_numbers_that_change_in_place_count(name: str, option: str) -> None:
    moved = []
    for kind in (float, torch.Tensor, np.ndarray):
        param, number = filled(1.0, 2, 3), number_of(kind, 0.5)
        model = torch.nn.ParameterList([param])
        optimizer = getattr(optim, name)(model if name == "KFAC" else [param], lr=0.25, **{option: number})
        step(optimizer, param)
        if kind is float:
            optimizer.param_groups[0][option] = 0.0625
        else:
            number[...] = 0.0625
        step(optimizer, param)
        moved.append(step(optimizer, param))
    assert moved[0] == moved[1] == moved[2]
    optimizer.param_groups[0][option] = torch.ones(2)
    with pytest.raises(ValueError, match=rf"{name}: {option} = tensor\(\[1., 1.\]\), must be one number"):
        optimizer.step()


def no_state(optimizer: Any, param: torch.nn.Parameter) -> None:
    optimizer.state = collections.defaultdict(dict)


def delete_entry(optimizer: Any, param: torch.nn.Parameter) -> None:
    del optimizer.state[param]


def assign_zeros(optimizer: Any, param: torch.nn.Parameter) -> None:
    for name in ("momentum_buffer", "exp_avg"):
        if name in optimizer.state[param]:
            optimizer.state[param][name] = torch.zeros(2)


def copy_entry(optimizer: Any, param: torch.nn.Parameter) -> None:
    optimizer.state[param] = {name: value.clone() * 3 for name, value in optimizer.state[param].items()
                              if value is not None}


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("change", [no_state, delete_entry, assign_zeros, copy_entry])
def test_changes_of_state_count(name: str, change: Callable[[Any, torch.nn.Parameter], None]) -> None:
    options = {"momentum": 0.9} if name == "SGD" else {"betas": (0.5, 0.9)}
    moved = []
    for library in (torch.optim, optim):
        param = filled(1.0)
        optimizer = getattr(library, name)([param], lr=0.25, **options)
        step(optimizer, param)
        step(optimizer, param)
        change(optimizer, param)
        moved.append([step(optimizer, param)[0], step(optimizer, param)[0]])
    assert moved[1] == pytest.approx(moved[0], rel=1e-6)
    shown = optimizer.state[param]
    before = {key: value.clone() for key, value in shown.items()}
    step(optimizer, param)
    assert all(not torch.equal(before[key], shown[key]) for key in before), "state shows the library's memory"


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Muon", "Shampoo", "SOAP"])
@pytest.mark.parametrize("change", [no_state, delete_entry])
def test_state_that_is_dropped_after_its_first_step_begins_anew(
        name: str, change: Callable[[Any, torch.nn.Parameter], None]) -> None:
    """As after later steps: in the first one the state was not yet there to be compared."""
    options = {"momentum": 0.9} if name == "SGD" else {}
    moved = []
    for drops in (True, False):
        torch.manual_seed(1)
        param = filled(1.0, 2, 3)
        optimizer = getattr(optim, name)([param], lr=0.25, **options)
        for _ in range(3):
            param.grad = torch.randn(2, 3)
            optimizer.step()
            if drops:
                change(optimizer, param)
            else:
                optimizer = getattr(optim, name)([param], lr=0.25, **options)
        moved.append(param.detach())
    assert torch.equal(*moved)


def test_a_parameter_twice_in_a_group_is_refused() -> None:
    """It would have two states, where torch.optim's has one that steps twice."""
    a, b = filled(1.0), filled(1.0)
    with pytest.raises(ValueError, match="AdamW: parameters 0 and 2 are one tensor"):
        optim.AdamW([a, b, a])
    optimizer = optim.AdamW([a])
    with pytest.raises(ValueError, match="AdamW: parameters 1 and 2 are one tensor"):
        optimizer.add_param_group({"params": [b, b]})
    assert len(optimizer.param_groups) == 1


def test_parameters_in_the_same_memory_are_refused() -> None:
    """Tied by `.data`: threads would lose one's step. Neighbours in a buffer, and views between others', are apart."""
    flat = torch.arange(8.0)
    a, b, c = (torch.nn.Parameter(flat[begin:end]) for begin, end in ((4, 8), (0, 4), (3, 5)))
    odd, even = torch.nn.Parameter(flat.view(4, 2)[:, 1]), torch.nn.Parameter(flat.view(4, 2)[:, 0])
    for params in ([a, b], [odd, even]):
        optim.SGD(params)
    with pytest.raises(ValueError, match="SGD: parameters 1 and 2 overlap in memory: to tie modules, give them one"):
        optim.SGD([a, b, c])
    optimizer, twin = optim.AdamW([a]), torch.nn.Parameter(a.data)
    with pytest.raises(ValueError, match="AdamW: parameters 0 and 1 overlap in memory"):
        optimizer.add_param_group({"params": [twin]})
    assert len(optimizer.param_groups) == 1


def test_state_of_a_new_optimizer_counts() -> None:
    param = filled(1.0)
    optimizer = optim.AdamW([param], lr=0.25)
    step(optimizer, param)
    other = optim.AdamW([param], lr=0.25)
    other.state[param] = {name: value.clone() for name, value in optimizer.state[param].items()}
    twin = torch.nn.Parameter(param.detach().clone())
    third = torch.optim.AdamW([twin], lr=0.25)
    third.state[twin] = {"step": torch.tensor(1.0), "exp_avg": optimizer.state[param]["exp_avg"].clone(),
                         "exp_avg_sq": optimizer.state[param]["exp_avg_sq"].clone()}
    assert step(other, param) == pytest.approx(step(third, twin))


def test_state_that_does_not_fit_is_refused() -> None:
    param = filled(1.0)
    optimizer = optim.SGD([param], lr=0.25, momentum=0.9)
    step(optimizer, param)
    optimizer.state[param]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(ValueError, match="'momentum_buffer' of parameter 0 has shape .3,., must be .2,."):
        optimizer.step()


def test_a_refused_group_leaves_nothing_behind() -> None:
    first, second = filled(1.0, 4, 4), filled(1.0, 4, 4)
    optimizer = optim.Muon([first])
    with pytest.raises(libdc.Error, match="ndim = 1, must be at least 2"):
        optimizer.add_param_group({"params": [second, filled(1.0, 4)]})
    step(optimizer, first, second)
    assert second[0, 0] == 1 and len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [second]})
    assert step(optimizer, first, second)[1] != 1


def test_a_shortened_parameter_is_refused() -> None:
    memory = torch.zeros(6)
    param = filled(0.0, 6)
    optimizer = optim.SGD([param], lr=1.0)
    param.grad = torch.ones(6)
    param.data = memory[:2]
    with pytest.raises(RuntimeError, match="parameter 0 has 2 elements and its gradient 6, but it had 6"):
        optimizer.step()
    assert not memory.any()


def negative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Autograd gives b a gradient whose memory has the opposite sign."""
    return torch.view_as_real(torch.complex(a, b).conj() * (1 + 2j)).sum()


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_negative_views_of_gradients(name: str) -> None:
    moved = []
    for library in (torch.optim, optim):
        a, b = filled(0.0, 1), filled(0.0, 1)
        optimizer = getattr(library, name)([a, b], lr=0.5)
        negative(a, b).backward()
        assert b.grad is not None and b.grad.is_neg()
        optimizer.step()
        moved.append([a.item(), b.item()])
    assert moved[1] == pytest.approx(moved[0])


def test_a_negative_view_as_a_parameter_is_refused() -> None:
    param = torch.nn.Parameter(torch.tensor([1 + 2j, 3 + 4j]).conj().imag)
    assert param.is_neg()
    with pytest.raises(RuntimeError, match="SGD: parameter 0 is a lazy negative"):
        step(optim.SGD([param], lr=0.5), param)


def test_negative_views_in_operators() -> None:
    z = torch.tensor([[1 + 2j, 3 + 4j], [5 + 6j, 7 + 9j]])
    lazy, ones = z.conj().imag, torch.ones(2, 2)
    assert lazy.is_neg()
    torch.testing.assert_close(linalg.matmul(ones, lazy), ones @ lazy)
    with pytest.raises(TypeError, match="out is a lazy negative, must have its values in memory"):
        linalg.matmul(ones, ones, out=lazy)


def test_autograd_notices_results_that_overwrite() -> None:
    saved, weight = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    loss = (weight * saved).sum()
    linalg.matmul(torch.eye(2), torch.ones(2, 2), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    for name, arguments, named in (
            ("a", (weight, saved), {}), ("b", (saved, 2 * weight), {}), ("out", (saved, saved), {"out": weight})):
        with pytest.raises(RuntimeError, match=rf"{name} requires grad, .* no derivative: give it {name}\.detach\(\)"):
            linalg.matmul(*arguments, **named)
    with torch.no_grad():
        assert not linalg.matmul(weight, torch.eye(2)).requires_grad
    with torch.inference_mode():
        out = torch.empty(2, 2)
        assert torch.equal(linalg.matmul(torch.eye(2), torch.ones(2, 2), out=out), torch.ones(2, 2))
