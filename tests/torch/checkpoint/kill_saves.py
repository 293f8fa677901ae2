"""Ranks that are killed at a random moment of a save. The old or the new checkpoint loads. The next save leaves nothing
else in the folder, in shared memory or among the sockets.

    python tests/torch/checkpoint/kill_saves.py [KILLS [SEED]]"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, List, Set

import libdc
import libdc.torch as dct
import torch
from torch import nn

RANKS = 2
WIDTH = 300


def made(comm: Any, value: float) -> nn.Module:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        for param in net.parameters():
            param.fill_(value)
    dct.shard(net, 3, comm=comm)
    return net


def child(work: Callable[[], None]) -> int:
    """Starts a process that does the work and ends with 0, or 1 after an error."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except Exception as error:
            if not isinstance(error, (RuntimeError, libdc.Error)):  # else a peer is dead
                print(type(error).__name__, error, file=sys.stderr)
        finally:
            os._exit(status)
    return pid


def left_behind(name: str) -> Set[str]:
    """Shared memory, and sockets of libdc's groups of this name."""
    sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if name in line}
    return sockets | {str(file) for file in Path("/dev/shm").iterdir() if name in file.name}


def save(name: str, rank: int, path: Path, ready: int, first: int) -> None:
    """Saves for ever, each time another value."""
    comm = libdc.Comm.processes(name, rank, RANKS, 20)
    net = made(comm, first)
    for value in range(first, first + 1000):
        with torch.no_grad():
            for param in net.parameters():
                param.fill_(value)
        dct.save_checkpoint(net, path)
        os.write(ready, b"x")


def look(path: Path) -> None:
    """Loads, and saves again."""
    comm = libdc.Comm.single()
    net = made(comm, -1)
    dct.load_checkpoint(net, path)
    values = {value for param in net.parameters() for value in param.to_local().unique().tolist()}
    assert len(values) == 1 and -1 not in values, f"a mixture was loaded: {sorted(values)}"
    dct.save_checkpoint(net, path)
    assert os.listdir(path.parent) == [path.name], f"left behind: {os.listdir(path.parent)}"


def kill_once(chance: random.Random, path: Path, number: int) -> bool:
    """Whether the kill left a part of a file, until the next save."""
    name = f"kill-{os.getpid()}-{number}"
    saved, ready = os.pipe()
    ranks = [child(lambda rank=rank: save(name, rank, path, ready, number * 1000)) for rank in range(RANKS)]
    os.close(ready)
    for _ in range(RANKS * chance.choice((1, 2))):
        assert os.read(saved, 1), "the ranks ended before they had saved"
    time.sleep(chance.random() * 0.02)
    victims: List[int] = chance.choice(([ranks[0]], [ranks[1]], ranks))
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    os.close(saved)
    for pid in ranks:
        os.waitpid(pid, 0)
    left = len(os.listdir(path.parent)) > 1
    looker = child(lambda: look(path))
    assert os.waitstatus_to_exitcode(os.waitpid(looker, 0)[1]) == 0, f"after kill {number} of {victims}, {ranks}"
    assert not left_behind(name), left_behind(name)
    return left


def main() -> int:
    torch.set_num_threads(1)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    chance = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    parts = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.safetensors"
        for number in range(kills):
            parts += kill_once(chance, path, number)
    print(f"{kills} kills, {parts} of which left a part: the old or the new checkpoint was loaded, and nothing stayed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
