"""Generated handwritten digits, which need no download, and the autoencoder with a narrow waist that learns them.
Digits are strokes with random slant, size, position and pen width, in 8 x 8 pixels of 17 greys from 0 to 1."""
from __future__ import annotations

import math
from typing import List, Tuple

import torch

COUNT, SIDE, GREYS = 1792, 8, 16
WIDTHS = (64, 64, 32, 16, 8, 16, 32, 64, 64)

Point = Tuple[float, float]


def _arc(x: float, y: float, rx: float, ry: float, begin: float, end: float, parts: int = 10) -> List[Point]:
    """Points of an elliptic arc; angles in turns, clockwise from the right."""
    angles = [2 * math.pi * (begin + (end - begin) * i / parts) for i in range(parts + 1)]
    return [(x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles]


# For each digit, lines through points in a square from (0, 0), at the top left, to (1, 1).
_STROKES: List[List[List[Point]]] = [
    [_arc(0.5, 0.5, 0.32, 0.5, 0, 1, 16)],
    [[(0.3, 0.2), (0.55, 0), (0.55, 1)]],
    [[*_arc(0.5, 0.28, 0.34, 0.28, -0.5, 0.08), (0.15, 1), (0.9, 1)]],
    [_arc(0.45, 0.26, 0.34, 0.26, -0.45, 0.25), _arc(0.45, 0.74, 0.36, 0.26, -0.25, 0.45)],
    [[(0.65, 1), (0.65, 0), (0.1, 0.68), (0.92, 0.68)]],
    [[(0.85, 0), (0.25, 0), (0.2, 0.42)], _arc(0.45, 0.69, 0.38, 0.31, -0.38, 0.42)],
    [[(0.7, 0), (0.3, 0.45)], _arc(0.5, 0.72, 0.32, 0.28, 0, 1, 14)],
    [[(0.1, 0), (0.9, 0), (0.4, 1)]],
    [_arc(0.5, 0.25, 0.27, 0.25, 0, 1, 14), _arc(0.5, 0.75, 0.33, 0.25, 0, 1, 14)],
    [_arc(0.5, 0.28, 0.32, 0.28, 0, 1, 14), [(0.82, 0.28), (0.65, 1)]],
]


def _segments(digit: int) -> torch.Tensor:
    """The digit's segments: [segments, 2 ends, x and y]."""
    return torch.tensor([[a, b] for line in _STROKES[digit] for a, b in zip(line, line[1:])])


def _written(digit: int, count: int, rng: torch.Generator) -> torch.Tensor:
    """`count` pictures of a digit, each with its own random variations: [count, pixels]."""
    def between(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=rng)

    ends = _segments(digit)[None].expand(count, -1, -1, -1) - 0.5
    ends = ends + 0.035 * torch.randn(ends.shape, generator=rng)
    x, y = ends[..., 0], ends[..., 1]
    turn, slant = between(-0.22, 0.22), between(-0.25, 0.35)
    x, y = x * between(0.55, 1.0), y * between(0.75, 1.0)
    x = x - slant * y
    x, y = x * turn.cos() - y * turn.sin(), x * turn.sin() + y * turn.cos()
    x, y = 6.2 * x + 3.5 + between(-0.6, 0.6), 6.6 * y + 3.5 + between(-0.5, 0.5)
    ends = torch.stack([x, y], -1)
    grid = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="xy"), -1).view(-1, 1, 2)
    begin, along = ends[:, None, :, 0], (ends[..., 1, :] - ends[..., 0, :])[:, None]
    share = ((grid - begin) * along).sum(-1) / along.square().sum(-1).clamp_min(1e-6)
    distance = (grid - begin - share.clamp(0, 1)[..., None] * along).norm(dim=-1).amin(-1)
    return ((between(0.55, 1.15)[..., 0] - distance) / 0.8 + 0.5).clamp(0, 1)


def pictures(count: int = COUNT, seed: int = 0) -> torch.Tensor:
    """The data set [count, 64], in random order; the same for equal arguments."""
    rng = torch.Generator().manual_seed(seed)
    written = torch.cat([_written(d, -(-count // 10), rng) for d in range(10)])
    return written[torch.randperm(len(written), generator=rng)[:count]].mul(GREYS).round() / GREYS


class Autoencoder(torch.nn.Sequential):
    """Linear layers with tanh between them. The loss is the mean squared error of a pixel: 0.0975 for the mean picture,
    0.035 for the best linear code of 8 numbers."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers: List[torch.nn.Module] = []
        for a, b in zip(WIDTHS, WIDTHS[1:]):
            layers += [torch.nn.Linear(a, b), torch.nn.Tanh()]
        super().__init__(*layers[:-1])
