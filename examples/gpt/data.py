"""Text that every machine has: the sources of the Python standard library, as bytes."""
from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Iterator, List, Tuple

import torch

# Installed packages differ between machines, and the tests would be half of the text.
_SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
_HELD_OUT = 20  # every twentieth file is never trained on

Batch = Tuple[torch.Tensor, torch.Tensor]


def _sources(root: str) -> List[str]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _SKIP)
        found += [os.path.join(folder, f) for f in files if f.endswith(".py")]
    return sorted(found, key=lambda path: os.path.relpath(path, root))


def _read(paths: List[str]) -> torch.Tensor:
    text = bytearray()
    for path in paths:
        with open(path, "rb") as f:
            text += f.read() + b"\n"
    return torch.frombuffer(text, dtype=torch.uint8)


@dataclass
class Text:
    """A training and a held-out part. Batches depend only on (seed, step), so any number of ranks sees the same
    sequences, and a resumed run continues where it stopped."""

    train: torch.Tensor
    held_out: torch.Tensor
    seq: int
    seed: int

    @classmethod
    def load(cls, seq: int, seed: int) -> "Text":
        files = _sources(os.path.dirname(os.__file__))
        train = _read([f for i, f in enumerate(files) if i % _HELD_OUT != 0])
        held_out = _read(files[::_HELD_OUT])
        if min(train.numel(), held_out.numel()) <= seq + 1:
            raise SystemExit(f"train.py: the sources under {os.path.dirname(os.__file__)} are too short to train on")
        return cls(train, held_out, seq, seed)

    def _rows(self, text: torch.Tensor, starts: torch.Tensor) -> Batch:
        rows = text[starts[:, None] + torch.arange(self.seq + 1)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def batch(self, step: int, size: int, rank: int, ranks: int) -> Batch:
        """This rank's size / ranks sequences of the step's global batch."""
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(self.train.numel() - self.seq, (size,), generator=rng)
        return self._rows(self.train, starts.chunk(ranks)[rank])

    def validation(self, count: int, size: int, rank: int, ranks: int) -> Iterator[Batch]:
        """`count` global batches spread evenly over the held-out text, always the same."""
        starts = torch.linspace(0, self.held_out.numel() - self.seq - 1, count * size).long()
        for part in starts.view(count, size):
            yield self._rows(self.held_out, part.chunk(ranks)[rank])
