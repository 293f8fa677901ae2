"""The training itself: a sharded model, AdamW on this rank's part of it, and the costs of each step."""
from __future__ import annotations

import argparse
import contextlib
import math
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import libdc.torch as dct
import torch
from libdc.optim import AdamW

import checkpoint
from data import Text
from model import GPT, Config

_COUNTED = ("gather_wire_bytes", "reduce_wire_bytes", "allocations")
Span = Tuple[str, int, int]  # name, begin and end on the monotonic clock in nanoseconds


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """The learning rate: linear warm-up, then half a cosine down to a tenth of the peak. step counts from 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def formula(stage: int, accumulate: int) -> int:
    """Elements on the wire in a step, in units of (all parameters) * (ranks - 1) / ranks. At stage 3 this is an upper
    bound: a backward gathers only what it reads, which excludes linear layers' biases and embedding tables."""
    return 2 * accumulate + 1 if stage == 3 else 2


class Trainer:
    """One model at one stage. start: the checkpoint to continue from; None: new weights."""

    def __init__(self, a: argparse.Namespace, config: Config, group: Any, stage: int,
                 start: Optional[str] = None) -> None:
        self.a, self.config, self.group, self.stage = a, config, group, stage
        torch.manual_seed(a.seed)
        self.model = GPT(config)
        self.sizes = {n: p.numel() for n, p in self.model.named_parameters()}
        dct.shard(self.model, stage=stage)
        self.call: Callable[..., torch.Tensor] = self.model
        if a.compile:
            self.call = torch.compile(self.model, backend=a.compile)
        self.optimizer = AdamW(self.model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.done = checkpoint.load(start, self.model, self.optimizer, group) if start else 0
        self.spans: List[Span] = []

    @contextlib.contextmanager
    def _span(self, name: str) -> Any:
        begin = time.monotonic_ns()
        yield
        self.spans.append((name, begin, time.monotonic_ns()))

    def step(self, text: Text, step: int, stop: bool = False) -> Dict[str, Any]:
        """Makes step number `step`, from 0. stop: this rank asks to end after it. The row says whether any rank
        asked."""
        a, group = self.a, self.group
        before, begin = dct.stats(self.model), time.monotonic()
        for p in self.optimizer.param_groups:
            p["lr"] = learning_rate(step, a.steps, a.lr, a.warmup)
        x, y = text.batch(step, a.batch, group.rank, group.size)
        loss_sum = torch.zeros((), dtype=torch.float64)
        for i, (mx, my) in enumerate(zip(x.chunk(a.accumulate), y.chunk(a.accumulate))):
            with contextlib.nullcontext() if i == a.accumulate - 1 else dct.no_sync(self.model):
                with self._span("forward"):
                    loss = self.call(mx, my)
                with self._span("backward"):
                    (loss / a.accumulate).backward()
            loss_sum += loss.detach().double() / a.accumulate
        with self._span("clip, update"):
            norm = dct.clip_grad_norm_(self.model, a.clip or math.inf)
            self.optimizer.step()
            self.optimizer.zero_grad()
        del self.spans[:-256]
        told = group.all_reduce(torch.stack([loss_sum, torch.tensor(float(stop), dtype=torch.float64)]))
        seconds, after = time.monotonic() - begin, dct.stats(self.model)
        return {
            "step": step + 1, "loss": told[0].item() / group.size, "stop": told[1].item() > 0, "grad_norm": float(norm),
            "lr": self.optimizer.param_groups[0]["lr"], "seconds": seconds,
            "tokens_per_s": a.batch * self.config.seq / seconds, "gathered_bytes": after.gathered_bytes,
            "gathered_peak_bytes": after.gathered_peak_bytes,
            **{key: getattr(after, key) - getattr(before, key) for key in _COUNTED},
        }

    @torch.no_grad()
    def validate(self, text: Text, batches: int = 4) -> float:
        """Mean loss on the held-out text, over all ranks."""
        total = torch.zeros(1, dtype=torch.float64)
        for x, y in text.validation(batches, self.a.batch, self.group.rank, self.group.size):
            total += self.model(x, y).double()
        return self.group.all_reduce(total).item() / (batches * self.group.size)

    def held(self) -> Dict[str, int]:
        """Bytes that this rank keeps between steps."""
        params = list(self.model.parameters())
        state = [t for s in self.optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
        stats = dct.stats(self.model)
        size = sum(p.numel() * p.element_size() for p in params)
        return {"weights": size, "gradients": size, "optimizer": sum(t.numel() * t.element_size() for t in state),
                "gathered": stats.gathered_bytes, "buckets": stats.bucket_bytes}
