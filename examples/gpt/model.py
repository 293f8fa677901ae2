"""A byte-level GPT: pre-norm blocks, learned positions, an untied head. It is plain PyTorch and knows nothing of
sharding."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, List, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int
    vocab: int = 256


# small is the model of the benchmarks (10.94 million parameters); wide has 51 million; tiny is for tests.
CONFIGS = {
    "tiny": Config(layers=2, hidden=64, heads=2, seq=64, batch=4),
    "small": Config(layers=6, hidden=384, heads=6, seq=256, batch=8),
    "wide": Config(layers=4, hidden=1024, heads=16, seq=128, batch=8),
}


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.ln1 = nn.LayerNorm(c.hidden)
        self.qkv = nn.Linear(c.hidden, 3 * c.hidden)
        self.proj = nn.Linear(c.hidden, c.hidden)
        self.ln2 = nn.LayerNorm(c.hidden)
        self.up = nn.Linear(c.hidden, 4 * c.hidden)
        self.down = nn.Linear(4 * c.hidden, c.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Returns the logits or, if targets are given, the mean cross entropy in nats a byte."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.tokens = nn.Embedding(c.vocab, c.hidden)
        self.positions = nn.Embedding(c.seq, c.hidden)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.hidden)
        self.head = nn.Linear(c.hidden, c.vocab)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)
            if isinstance(m, nn.Linear):
                nn.init.zeros_(m.bias)
        for block in self.blocks:  # the residual stream's variance must not grow with depth
            for m in (block.proj, block.down):
                nn.init.normal_(m.weight, std=0.02 / (2 * c.layers) ** 0.5)

    def forward(self, x: torch.Tensor, targets: Optional[torch.Tensor] = None) -> torch.Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


@torch.no_grad()
def generate(model: GPT, prompt: bytes, count: int, top_k: int = 20, temperature: float = 0.8,
             seed: int = 0) -> Iterator[bytes]:
    """Yields `count` bytes one by one. Every rank must run it, since a sharded model gathers its weights in each step.

    All ranks need the same seed, so that their texts, and so their collectives, are equal."""
    rng = torch.Generator().manual_seed(seed)
    text: List[int] = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([text[-model.config.seq:]]))[0, -1].float() / temperature
        best, index = logits.topk(min(top_k, logits.numel()))
        text.append(int(index[torch.multinomial(best.softmax(0), 1, generator=rng)]))
        yield bytes(text[-1:])
