"""The optimizers, with the settings that bench/optim/gates.py found best for the digits, and what a step is."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Tuple

import torch
import torch.nn.functional as F
from libdc.optim import KFAC, SGD, SOAP, AdamW, Shampoo
from libdc.optim.kfac import sampled_cross_entropy, sampled_mse_loss

Color = Tuple[int, int, int]


@dataclass(frozen=True)
class Rule:
    """An optimizer and its arguments; `sampled` are K-FAC's factors of labels that the model draws itself."""

    name: str
    color: Color
    make: Callable[..., torch.optim.Optimizer]
    options: Dict[str, Any] = field(default_factory=dict)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        if self.make is KFAC:
            return KFAC(model, fisher="sampled", **self.options)
        return self.make(model.parameters(), **self.options)

    def having(self, **options: Any) -> "Rule":
        return Rule(self.name, self.color, self.make, {**self.options, **options})


_SGD = dict(momentum=0.9)
_ADAMW = dict(betas=(0.9, 0.99), weight_decay=0.0)
_SHAMPOO = dict(betas=(0.9, 0.99), graft_beta2=0.99, precondition_frequency=10)
_SOAP = dict(betas=(0.95, 0.95), weight_decay=0.0, precondition_frequency=10)
_KFAC = dict(momentum=0.9, nesterov=True, refresh_frequency=10)

DIGITS = {
    "sgd": Rule("SGD", (150, 150, 150), SGD, dict(_SGD, lr=2.0)),
    "adamw": Rule("AdamW", (38, 98, 190), AdamW, dict(_ADAMW, lr=0.01)),
    "shampoo": Rule("Shampoo", (214, 92, 43), Shampoo, dict(_SHAMPOO, lr=0.01)),
    "soap": Rule("SOAP", (142, 84, 180), SOAP, dict(_SOAP, lr=0.01)),
    "kfac": Rule("K-FAC", (46, 140, 87), KFAC, dict(_KFAC, lr=0.3, damping=0.01, inverse="factored")),
}
GPT = {
    "sgd": Rule("SGD", (150, 150, 150), SGD, dict(_SGD, lr=0.1)),
    "adamw": Rule("AdamW", (38, 98, 190), AdamW, dict(betas=(0.9, 0.95), weight_decay=0.1, lr=3e-3)),
    "shampoo": Rule("Shampoo", (214, 92, 43), Shampoo, dict(betas=(0.9, 0.95), graft_beta2=0.95, weight_decay=0.1,
                                                             precondition_frequency=10, lr=3e-3)),
    "soap": Rule("SOAP", (142, 84, 180), SOAP, dict(_SOAP, weight_decay=0.1, lr=3e-3)),
    "kfac": Rule("K-FAC", (46, 140, 87), KFAC, dict(_KFAC, lr=0.03, damping=0.03, loss_terms="positions")),
}


def digits_step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, rng: torch.Generator) -> float:
    """One step on a batch of pictures; its loss before."""
    optimizer.zero_grad()
    output = model(x)
    if isinstance(optimizer, KFAC):
        optimizer.accumulate(sampled_mse_loss(output, rng), retain_graph=True)
    loss = F.mse_loss(output, x)
    loss.backward()
    optimizer.step()
    return loss.item()


def text_step(model: Any, optimizer: torch.optim.Optimizer, batch: Tuple[torch.Tensor, torch.Tensor],
              rng: torch.Generator) -> float:
    """One step on a batch of text; its loss before."""
    optimizer.zero_grad()
    logits = model(batch[0]).flatten(0, 1)
    if isinstance(optimizer, KFAC):
        optimizer.accumulate(sampled_cross_entropy(logits, rng), retain_graph=True)
    loss = F.cross_entropy(logits, batch[1].flatten())
    loss.backward()
    optimizer.step()
    return loss.item()
