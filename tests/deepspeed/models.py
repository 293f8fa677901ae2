"""A GPT and a BERT-like model of a few million parameters, and their batches. Plain PyTorch."""

from __future__ import annotations

from typing import Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB = {"gpt": 509, "bert": 1021}  # sizes that two ranks cannot halve
LENGTH = {"gpt": 32, "bert": 48}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        if self.causal:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~mask, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A GPT's block normalises before each half, a BERT's after."""

    def __init__(self, width: int, heads: int, gpt: bool, gelu: str) -> None:
        super().__init__()
        self.gpt, self.gelu = gpt, gelu
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=gpt)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gpt:
            x = x + self.attention(self.norm1(x))
            return x + self.down(self._activate(self.norm2(x)))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(self._activate(x)))

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.up(x), approximate=self.gelu)

    def as_deepspeed_layer(self) -> nn.Module:
        """DeepSpeed's transformer layer with these weights; its GELU is "tanh"."""
        from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

        config = DeepSpeedTransformerConfig(hidden_size=self.up.in_features, intermediate_size=self.up.out_features,
                                            heads=self.attention.heads, attn_dropout_ratio=0.0,
                                            hidden_dropout_ratio=0.0, layer_norm_eps=1e-5, initializer_range=0.02,
                                            pre_layer_norm=self.gpt)
        parts = self.attention.out, self.norm1, self.up, self.down, self.norm2
        return DeepSpeedTransformerLayer(config, [*self.attention.qkv.weight.chunk(3), *(p.weight for p in parts)],
                                         [*self.attention.qkv.bias.chunk(3), *(p.bias for p in parts)])


class Model(nn.Module):
    """kind "gpt" predicts the next token; "bert" predicts masked ones, through a head tied to its embedding. broken:
    with a graph break half way, so that Dynamo makes two graphs of it. kernel: the blocks are DeepSpeed's layers."""

    def __init__(self, kind: str, width: int = 384, layers: int = 2, heads: int = 4, broken: bool = False,
                 gelu: str = "none", kernel: bool = False) -> None:
        super().__init__()
        self.kind, self.broken = kind, broken
        self.tokens = nn.Embedding(VOCAB[kind], width)
        self.positions = nn.Embedding(LENGTH[kind], width)
        half = layers // 2
        blocks = [Block(width, heads, kind == "gpt", gelu) for _ in range(layers)]
        # Not one list and a break inside its loop: Dynamo gives up on such a frame.
        self.lower, self.upper = nn.Sequential(*blocks[:half]), nn.Sequential(*blocks[half:])
        self.norm = nn.LayerNorm(width)
        if kind == "bert":
            self.types = nn.Embedding(2, width)
            self.transform = nn.Linear(width, width)
            self.bias = nn.Parameter(torch.zeros(VOCAB[kind]))
        else:
            self.head = nn.Linear(width, VOCAB[kind], bias=False)
        self.apply(self._initialise)
        if kernel:
            self.lower, self.upper = (nn.Sequential(*(block.as_deepspeed_layer() for block in part))
                                      for part in (self.lower, self.upper))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        """As GPT-2 and BERT begin. PyTorch's own embedding, tied to the head, makes losses of 23 and gradients in which
        Adam's first step turns a rounding into 1e-4."""
        if isinstance(module, (nn.Embedding, nn.Linear)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        if self.kind == "bert":
            x = self.norm(x + self.types((torch.arange(tokens.shape[1], device=tokens.device) * 2) // tokens.shape[1]))
        x = self.lower(x)
        if self.broken:
            torch._dynamo.graph_break()
        x = self.upper(x)
        if self.kind == "bert":
            logits = F.linear(F.gelu(self.transform(x)), self.tokens.weight, self.bias)
        else:
            logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch(kind: str, step: int, rank: int, size: int = 4) -> Tuple[torch.Tensor, torch.Tensor]:
    """Tokens that follow a rule, so that there is something to learn, and labels."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(0, VOCAB[kind], (size, 1), generator=generator)
    stride = torch.randint(1, 8, (size, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH[kind] + 1)) % VOCAB[kind]
    if kind == "gpt":
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    tokens = tokens[:, :-1].contiguous()
    masked = torch.rand(tokens.shape, generator=generator) < 0.15
    return tokens.masked_fill(masked, 0), tokens.masked_fill(~masked, -100)
