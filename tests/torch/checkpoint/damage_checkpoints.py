"""Damaged checkpoints: none is loaded as something else than what was saved.

    python tests/torch/checkpoint/damage_checkpoints.py [COUNT [SEED]]"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import libdc.run
import libdc.torch as dct
import torch
from torch import nn

RANKS = 2
EXTRA = {"step": 3, "seen": torch.arange(5)}
Bytes = bytearray


def made(comm: Any, seed: int) -> Tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5))
    values = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=values))
    dct.shard(net, 3, comm=comm)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)
    return net, optimizer


def content(net: nn.Module, optimizer: torch.optim.Optimizer) -> List[Any]:
    tensors = [*(p.detach() for p in net.parameters())]
    states = [optimizer.state[param] for group in optimizer.param_groups for param in group["params"]]
    tensors += [state[key] for state in states for key in sorted(state)]
    return [tensor.clone().view(-1).tolist() for tensor in tensors] + [optimizer.param_groups[0]["lr"]]


def flip(chance: random.Random, data: Bytes, other: Bytes) -> None:
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def change(chance: random.Random, data: Bytes, other: Bytes) -> None:
    data[chance.randrange(len(data))] = chance.choice((0, 34, 48, 49, 57, 123, 255, chance.randrange(256)))


def zero(chance: random.Random, data: Bytes, other: Bytes) -> None:
    begin, count = chance.randrange(len(data)), chance.choice((1, 4, 64, 512))
    data[begin:begin + count] = bytes(len(data[begin:begin + count]))


def cut(chance: random.Random, data: Bytes, other: Bytes) -> None:
    del data[chance.randrange(len(data)):]


def lengthen(chance: random.Random, data: Bytes, other: Bytes) -> None:
    data += bytes(chance.randrange(256) for _ in range(chance.randrange(1, 20)))


def shift(chance: random.Random, data: Bytes, other: Bytes) -> None:
    at = chance.randrange(len(data))
    data[at:at] = bytes(chance.choice((1, 4, 8)))
    if chance.random() < 0.5:
        del data[-8:]


def swap(chance: random.Random, data: Bytes, other: Bytes) -> None:
    a, b = (chance.randrange(len(data) - 16) for _ in range(2))
    data[a:a + 16], data[b:b + 16] = data[b:b + 16], data[a:a + 16]


def mix(chance: random.Random, data: Bytes, other: Bytes) -> None:
    """As a copy that ended in the middle: the rest is another checkpoint's."""
    at = chance.randrange(64, len(data))  # both files begin with the same bytes; all of the other's is no damage
    data[at:] = other[at:]


WAYS: List[Callable[[random.Random, Bytes, Bytes], None]] = [flip, flip, change, zero, cut, lengthen, shift, swap, mix]


def run(count: int, folder: Path, seed: int = 0) -> Dict[str, int]:
    """How many were refused, were what was saved after all, or were loaded wrong."""
    path, bad = folder / "step.safetensors", folder / "bad.safetensors"
    found = {"refused": 0, "as saved": 0, "wrong": 0}

    def rank(comm: Any) -> None:
        files = []
        for number in (2, 1):
            net, optimizer = made(comm, number)
            net(torch.ones(3, 7)).square().mean().backward()
            optimizer.step()
            dct.save_checkpoint(net, path, optimizer, EXTRA)
            comm.barrier()
            files.append(path.read_bytes())
        good = content(net, optimizer)
        chance = random.Random(seed)
        net, optimizer = made(comm, 3)
        net(torch.ones(3, 7)).square().mean().backward()
        optimizer.step()
        before = content(net, optimizer)
        for number in range(count):
            data = bytearray(files[1])
            chance.choice(WAYS)(chance, data, bytearray(files[0]))
            comm.barrier()
            if comm.rank == 0:
                bad.write_bytes(data)
            comm.barrier()
            outcome = "wrong"
            try:
                extra = dct.load_checkpoint(net, bad, optimizer)
            except (ValueError, RuntimeError):
                if content(net, optimizer) == before:
                    outcome = "refused"
            else:
                if content(net, optimizer) == good and extra["step"] == 3 and torch.equal(extra["seen"], EXTRA["seen"]):
                    outcome = "as saved"
                    net, optimizer = made(comm, 3)
                    net(torch.ones(3, 7)).square().mean().backward()
                    optimizer.step()
            if outcome == "wrong" or comm.rank == 0:
                found[outcome] += 1
            if outcome == "wrong":
                bad.with_suffix(f".wrong{number}").write_bytes(data)

    libdc.run.threads(RANKS, rank, timeout=600)
    return found


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = run(int(sys.argv[1]) if len(sys.argv) > 1 else 300, Path(folder),
                    int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(", ".join(f"{count} {outcome}" for outcome, count in found.items()))
    return found["wrong"] > 0


if __name__ == "__main__":
    sys.exit(main())
