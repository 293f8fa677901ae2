"""Hyperparameters that libdc.optim refuses: those that torch.optim refuses, in its words; its own; and numbers that
mean something in C, where 0 is a default and -1 stands for a zero."""

from __future__ import annotations

import copy
import math
import re
from typing import Any, Dict, List, Tuple

import pytest
import torch
from libdc import optim

NAN = float("nan")
# Each as torch.optim's namesake has it, whose exception and text ours are.
REFUSED_ALIKE: List[Tuple[str, Dict[str, Any]]] = [
    *[("AdamW", options) for options in (
        {"lr": -1.0}, {"lr": NAN}, {"lr": torch.ones(2)}, {"betas": (1.0, 0.9)}, {"betas": (-1.0, 0.9)},
        {"betas": (0.9, -0.5)}, {"betas": (0.9, -1.0)}, {"betas": (0.9, NAN)}, {"eps": -1.0}, {"eps": -1e-8},
        {"eps": NAN}, {"weight_decay": -1.0}, {"weight_decay": NAN})],
    *[("SGD", options) for options in (
        {"lr": -1.0}, {"lr": torch.ones(2)}, {"momentum": -1.0}, {"weight_decay": -0.1},
        {"nesterov": True, "momentum": 0.0},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1})],
    *[("Muon", options) for options in (
        {"lr": -1.0}, {"lr": NAN}, {"momentum": -1.0}, {"momentum": NAN}, {"weight_decay": -1.0})],
]  # fmt: skip
# Those that are libdc's own, and what C would take for a default or for a zero.
REFUSED: List[Tuple[str, Dict[str, Any], str]] = [
    ("SGD", {"momentum": NAN}, "momentum"), ("SGD", {"dampening": -1.0}, "dampening"),
    ("SGD", {"dampening": NAN}, "dampening"), ("SGD", {"weight_decay": NAN}, "weight_decay"),
    ("Muon", {"eps": -1.0}, "eps = -1.0, must be > 0"), ("Muon", {"eps": 0.0}, "eps = 0.0, must be > 0"),
    ("Muon", {"ns_steps": 0}, "steps = 0, must be > 0"), ("Muon", {"ns_steps": -1}, "steps = -1, must be > 0"),
    ("Muon", {"num_splits": 0}, "num_splits = 0, must be > 0"), ("Muon", {"nesterov": -1}, "nesterov = -1"),
    ("Shampoo", {"lr": -1.0}, "Invalid learning rate: -1"), ("Shampoo", {"betas": (-1.0, 1.0)}, "at index 0: -1"),
    ("Shampoo", {"betas": (0.9, -1.0)}, "at index 1: -1"), ("Shampoo", {"betas": (0.9, 0.0)}, "beta2 = 0.0"),
    ("Shampoo", {"eps_abs": -1.0}, "eps_abs = -1.0, must be >= 0"), ("Shampoo", {"eps_rel": -1.0}, "eps_rel = -1.0"),
    ("Shampoo", {"eps_rel": NAN}, "eps_rel = nan"), ("Shampoo", {"graft_beta2": 0.0}, "graft_beta2 = 0.0"),
    ("Shampoo", {"graft_eps": 0.0}, "graft_eps = 0.0"), ("Shampoo", {"max_block": 0}, "max_block = 0"),
    ("Shampoo", {"merge_below": -1}, "merge_below = -1"), ("Shampoo", {"momentum": -1.0}, "Invalid momentum value"),
    ("Shampoo", {"precondition_frequency": 0}, "precondition_frequency = 0"),
    ("Shampoo", {"tolerated_failures": -1}, "tolerated_failures = -1"), ("Shampoo", {"tolerance": -1.0}, "tolerance"),
    ("SOAP", {"eps": -1.0}, "Invalid epsilon value: -1"), ("SOAP", {"betas": (-1.0, -1.0)}, "at index 0: -1"),
    ("SOAP", {"shampoo_beta": -1.0}, "shampoo_beta = -1.0"), ("SOAP", {"max_precond_dim": -1}, "max_precond_dim"),
    ("SOAP", {"precondition_frequency": 0}, "precondition_frequency = 0"), ("SOAP", {"merge_below": -1}, "merge_below"),
    ("SOAP", {"tolerated_failures": -1}, "tolerated_failures = -1"), ("SOAP", {"weight_decay": NAN}, "weight_decay"),
]  # fmt: skip


def refused(kind: str, options: Dict[str, Any], text: str) -> None:
    """In the constructor, in a new group, by a step after the group was changed, and in a state that is loaded."""
    make = getattr(optim, kind)
    matrices = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    with pytest.raises(ValueError, match=text):
        make([matrices[0]], **options)
    optimizer = make([matrices[0]], **({"momentum": 0.9} if kind == "SGD" else {}))
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": [matrices[1]], **options})
    assert len(optimizer.param_groups) == 1
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0].update(options)
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(state)
    optimizer.param_groups[0].update(options)
    matrices[0].grad = torch.ones(2, 2)
    with pytest.raises(ValueError, match=text):
        optimizer.step()
    assert torch.equal(matrices[0].detach(), torch.ones(2, 2))


@pytest.mark.parametrize("kind, options", REFUSED_ALIKE)
def test_43_what_torch_refuses_is_refused_in_its_words(kind: str, options: Dict[str, Any]) -> None:
    with pytest.raises(ValueError) as theirs:
        getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(2, 2))], **options)
    refused(kind, options, re.escape(str(theirs.value)))


@pytest.mark.parametrize("kind, options, text", REFUSED)
def test_43_defaults_and_zeros_of_c_are_refused(kind: str, options: Dict[str, Any], text: str) -> None:
    refused(kind, options, text)


@pytest.mark.parametrize("kind, name", [
    ("AdamW", "lr"), ("AdamW", "eps"), ("SGD", "momentum"), ("SGD", "dampening"), ("Muon", "weight_decay"),
    ("SOAP", "shampoo_beta")])  # fmt: skip
@pytest.mark.parametrize("value", ["much", (1, 2)])
def test_what_is_no_number_is_refused_by_name(kind: str, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{kind}: {name} = {value!r}, must be a number")):
        getattr(optim, kind)([torch.nn.Parameter(torch.ones(2, 2))], **{name: value})


@pytest.mark.parametrize("kind, name", [
    ("AdamW", "amsgrad"), ("AdamW", "maximize"), ("AdamW", "check_finite"), ("SGD", "nesterov"), ("SGD", "maximize"),
    ("SGD", "check_finite")])  # fmt: skip
@pytest.mark.parametrize("value", ["False", None, 2, 0.0])
def test_what_is_no_switch_is_refused_by_name(kind: str, name: str, value: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    momentum: Dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    text = re.escape(f"{kind}: {name} = {value!r}, must be True or False")
    with pytest.raises(TypeError, match=text):
        getattr(optim, kind)([weight], **{**momentum, name: value})
    for allowed in (True, 1, torch.tensor(True)):
        getattr(optim, kind)([weight], **{**momentum, name: allowed})


@pytest.mark.parametrize("step", [math.nan, -1.0, 0.5, 1e20])
def test_impossible_steps_are_refused(step: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"] = torch.tensor(step)
    before = parameter.detach().clone()
    with pytest.raises(ValueError, match="AdamW: step of parameter 0 = .*, must be a whole number from 0 to 2.53"):
        optimizer.load_state_dict(state)
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 2 and not torch.equal(parameter, before)
