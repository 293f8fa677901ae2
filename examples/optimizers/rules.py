"""The optimizers, with the settings that bench/optim/gates.py found best for the digits, and the training steps."""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Tuple, Union

import torch
import torch.nn.functional as F
from libdc.optim import KFAC, SGD, SOAP, AdamW, Muon, Shampoo
from libdc.optim.kfac import sampled_cross_entropy, sampled_mse_loss

Color = Tuple[int, int, int]


class MuonAndAdamW:
    """Muon for the matrices of hidden layers, and AdamW, with its own arguments, for all other parameters. hidden:
    patterns of the matrices' names, each with the number of matrices that are stacked in such a parameter."""

    def __init__(self, model: torch.nn.Module, hidden: Dict[str, int], adamw: Dict[str, Any], **options: Any) -> None:
        rest = dict(model.named_parameters())
        groups = [{"params": [rest.pop(name) for name in list(rest) if re.fullmatch(pattern, name)],
                   "num_splits": number} for pattern, number in hidden.items()]
        self._parts = Muon(groups, **options), AdamW(rest.values(), **adamw)

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self._parts:
            part.step()


Optimizer = Union[torch.optim.Optimizer, MuonAndAdamW]


@dataclass(frozen=True)
class Rule:
    """An optimizer and its arguments; `sampled` means K-FAC's factors from labels that the model draws itself."""

    name: str
    color: Color
    make: Callable[..., Optimizer]
    options: Dict[str, Any] = field(default_factory=dict)

    def optimizer(self, model: torch.nn.Module) -> Optimizer:
        if self.make is KFAC:
            return KFAC(model, fisher="sampled", **self.options)
        if self.make is MuonAndAdamW:
            return MuonAndAdamW(model, **self.options)
        return self.make(model.parameters(), **self.options)

    def having(self, **options: Any) -> "Rule":
        return Rule(self.name, self.color, self.make, {**self.options, **options})


_SGD = dict(momentum=0.9)
_ADAMW = dict(betas=(0.9, 0.99), weight_decay=0.0)
_MUON = dict(weight_decay=0.0, hidden={r"([02468]|10|12)\.weight": 1}, adamw=dict(_ADAMW, lr=0.01))
_SHAMPOO = dict(betas=(0.9, 0.99), graft_beta2=0.99, precondition_frequency=10)
_SOAP = dict(betas=(0.95, 0.95), weight_decay=0.0, precondition_frequency=10)
_KFAC = dict(momentum=0.9, nesterov=True, refresh_frequency=10)

DIGITS = {
    "sgd": Rule("SGD", (150, 150, 150), SGD, dict(_SGD, lr=2.0)),
    "adamw": Rule("AdamW", (38, 98, 190), AdamW, dict(_ADAMW, lr=0.01)),
    "muon": Rule("Muon", (196, 154, 20), MuonAndAdamW, dict(_MUON, lr=0.05)),
    "shampoo": Rule("Shampoo", (214, 92, 43), Shampoo, dict(_SHAMPOO, lr=0.01)),
    "soap": Rule("SOAP", (142, 84, 180), SOAP, dict(_SOAP, lr=0.01)),
    "kfac": Rule("K-FAC", (46, 140, 87), KFAC, dict(_KFAC, lr=0.3, damping=0.01, inverse="factored")),
}
_GPT_ADAMW = dict(betas=(0.9, 0.95), weight_decay=0.1, lr=3e-3)
_GPT_HIDDEN = {r"blocks\..*\.qkv\.weight": 3, r"blocks\..*\.(proj|up|down)\.weight": 1}
GPT = {
    "sgd": Rule("SGD", (150, 150, 150), SGD, dict(_SGD, lr=0.1)),
    "adamw": Rule("AdamW", (38, 98, 190), AdamW, _GPT_ADAMW),
    "muon": Rule("Muon", (196, 154, 20), MuonAndAdamW, dict(hidden=_GPT_HIDDEN, adamw=_GPT_ADAMW, weight_decay=0.1,
                                                            lr=0.01)),
    "shampoo": Rule("Shampoo", (214, 92, 43), Shampoo, dict(betas=(0.9, 0.95), graft_beta2=0.95, weight_decay=0.1,
                                                             precondition_frequency=10, lr=3e-3)),
    "soap": Rule("SOAP", (142, 84, 180), SOAP, dict(_SOAP, weight_decay=0.1, lr=3e-3)),
    "kfac": Rule("K-FAC", (46, 140, 87), KFAC, dict(_KFAC, lr=0.03, damping=0.03, loss_terms="positions")),
}


def digits_step(model: Any, optimizer: Optimizer, x: torch.Tensor, rng: torch.Generator) -> float:
    """Makes a step on a batch of pictures. Returns the loss before it."""
    optimizer.zero_grad()
    output = model(x)
    if isinstance(optimizer, KFAC):
        optimizer.accumulate(sampled_mse_loss(output, rng), retain_graph=True)
    loss = F.mse_loss(output, x)
    loss.backward()
    optimizer.step()
    return loss.item()


def text_step(model: Any, optimizer: Optimizer, batch: Tuple[torch.Tensor, torch.Tensor],
              rng: torch.Generator) -> float:
    """Makes a step on a batch of text. Returns the loss before it."""
    optimizer.zero_grad()
    logits = model(batch[0]).flatten(0, 1)
    if isinstance(optimizer, KFAC):
        optimizer.accumulate(sampled_cross_entropy(logits, rng), retain_graph=True)
    loss = F.cross_entropy(logits, batch[1].flatten())
    loss.backward()
    optimizer.step()
    return loss.item()
