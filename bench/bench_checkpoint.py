"""Checkpoints of a model and AdamW's state on 2 ranks: libdc's, gathered ones, FSDP2's by torch.distributed.checkpoint.

    python -m libdc.run -n 2 bench/bench_checkpoint.py [--save]

All ways write the same bytes, 12 a weight, to the same disk and wait for it (fsync); they take turns, one save and one
load of each a round. A way's time is that of the slower rank. `bytes alone` is the least that any can do: each rank
writes its half of as many bytes into one file, and reads it. The cost of verification is measured apart: loads of a
file with checksums and of one without take turns. The files are in the page cache or, in other rounds, on the disk
alone, as after a restart on another machine.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import tempfile
import time
from typing import Any, Callable, Dict, List, Tuple

import libdc.torch as dct
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

import machine

Costs = Dict[bool, List[Tuple[float, float]]]  # without and with checksums: processor and elapsed seconds
Way = Tuple[Callable[[str], Any], Callable[[str], Any]]  # save and load


def trained(shard: Callable[[nn.Module], Any]) -> Tuple[nn.Module, torch.optim.Optimizer]:
    """A model of 25 million weights after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 1024)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def of_libdc() -> Way:
    model, optimizer = trained(lambda model: dct.shard(model, 3))
    return (lambda path: dct.save_checkpoint(model, path, optimizer),
            lambda path: dct.load_checkpoint(model, path, optimizer))


def gathered() -> Way:
    """The way without libdc: rank 0 has all of it, and torch.save()."""
    model, optimizer = trained(lambda model: dct.shard(model, 3))

    def save(path: str) -> None:
        whole = dct.full_state_dict(model, True), dct.full_optimizer_state_dict(model, optimizer, True)
        if dist.get_rank() == 0:
            with open(path, "wb") as file:
                torch.save(whole, file)
                os.fsync(file.fileno())

    def load(path: str) -> None:
        weights, state = torch.load(path, weights_only=False)
        dct.load_full_state_dict(model, weights)
        dct.load_full_optimizer_state_dict(model, optimizer, state)

    return save, load


def of_fsdp() -> Way:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, optimizer = trained(lambda model: fully_shard(model, mesh=mesh))

    def state() -> Dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))

    def load(path: str) -> None:
        read = state()
        dcp.load(read, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])

    return lambda path: dcp.save(state(), checkpoint_id=path), load


def bytes_alone() -> Way:
    part = torch.ones(24 * 1025 * 1024 * 3 // 2)
    data = memoryview(part.numpy()).cast("B")  # type: ignore[arg-type]

    def save(path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        for begin in range(0, len(data), 1 << 30):
            os.pwrite(fd, data[begin:begin + (1 << 30)], dist.get_rank() * len(data) + begin)
        os.fsync(fd)
        os.close(fd)

    def load(path: str) -> None:
        fd = os.open(path, os.O_RDONLY)
        os.preadv(fd, [data], dist.get_rank() * len(data))
        os.close(fd)

    return save, load


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the slower rank."""
    dist.barrier()
    begin = time.monotonic()
    work()
    cost = torch.tensor([time.monotonic() - begin])
    dist.all_reduce(cost, dist.ReduceOp.MAX)
    return cost.item()


def measure(ways: Dict[str, Way], rounds: int, folder: str) -> Dict[Tuple[str, int], List[float]]:
    """The time of each way's save (0) and load (1), in the rounds after the first."""
    costs: Dict[Tuple[str, int], List[float]] = {(name, what): [] for name in ways for what in (0, 1)}
    for turn in range(rounds + 1):
        order = list(ways.items())
        for name, way in order[turn % len(order):] + order[:turn % len(order)]:
            path = os.path.join(folder, name.replace(" ", "-"))
            for what in (0, 1):
                cost = timed(lambda: way[what](path))
                if turn > 0:
                    costs[name, what].append(cost)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    return costs


def copy_with_and_without_checksums(path: str, with_them: str, without: str) -> None:
    """Both are written in one way, or the page cache would have one in larger pieces. The second is as libdc wrote it
    before it had checksums."""
    with open(path, "rb") as file:
        whole = file.read()
    with open(with_them, "wb") as file:
        file.write(whole)
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8:end])
    metadata = {key: text for key, text in header["__metadata__"].items() if "crc32c" not in key}
    metadata["libdc"] = json.dumps({**json.loads(metadata["libdc"]), "format": 1})
    packed = json.dumps({**header, "__metadata__": metadata}).encode()
    packed += b" " * (-len(packed) % 8)
    with open(without, "wb") as file:
        file.write(struct.pack("<Q", len(packed)) + packed + whole[end:])


def leave_page_cache(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def verification(rounds: int, folder: str, from_disk: bool) -> Costs:
    """Of each load the processor time of both ranks, and the slower one's elapsed time."""
    save, load = of_libdc()
    paths = {way: os.path.join(folder, f"verified-{way}") for way in (False, True)}
    saved = os.path.join(folder, "saved")
    save(saved)
    if dist.get_rank() == 0:
        copy_with_and_without_checksums(saved, paths[True], paths[False])
    costs: Costs = {False: [], True: []}
    for turn in range(2 * rounds + 2):
        way = turn % 2 == 1
        if from_disk and dist.get_rank() == 0:
            leave_page_cache(paths[way])
        dist.barrier()
        processor, elapsed = time.process_time(), time.monotonic()
        load(paths[way])
        both = torch.tensor([time.process_time() - processor])
        slower = torch.tensor([time.monotonic() - elapsed])
        dist.all_reduce(both)
        dist.all_reduce(slower, dist.ReduceOp.MAX)
        if turn > 1:
            costs[way].append((both.item(), slower.item()))
    return costs


def verification_lines(places: Dict[str, Costs]) -> List[str]:
    lines = ["", "Loads with and without checksums in turns, medians (least) of "
             f"{', '.join(str(len(costs[True])) for costs in places.values())}. The last columns are medians of what a "
             "load with them takes more than the one before it.", "",
             "| the file is in | checksums | processor time of both ranks, ms | elapsed, ms | more, ms | of it, % |",
             "|---|---|---|---|---|---|"]
    for place, costs in places.items():
        for way, name in ((False, "off"), (True, "on")):
            cells = [f"{statistics.median(c[i] for c in costs[way]) * 1e3:.1f} "
                     f"({min(c[i] for c in costs[way]) * 1e3:.1f})" for i in (0, 1)]
            more = [statistics.median(b[i] - a[i] for a, b in zip(costs[False], costs[True])) for i in (0, 1)]
            share = [100 * more[i] / statistics.median(c[i] for c in costs[False]) for i in (0, 1)]
            cells += [" and ".join(f"{m * 1e3:.1f}" for m in more), " and ".join(f"{s:.0f}" for s in share)] if way \
                else ["", ""]
            lines.append(f"| {place} | {name} | " + " | ".join(cells) + " |")
    return lines


def page(costs: Dict[Tuple[str, int], List[float]], verified: Dict[str, Costs], nbytes: int, foreign: float) -> str:
    told = machine.describe()
    versions = ", ".join(f"{name} {version}" for name, version in told["packages"].items())
    lines = ["# Checkpoints on 2 ranks", "", f"{told['date']}, {told['cpu']}, {told['cores']} cores, Python "
             f"{told['python']}, {versions}, commit {told['commit']}; others used {foreign:.0%} of the machine.", "",
             f"    {machine.command('python -m libdc.run -n 2 bench/bench_checkpoint.py')}", "",
             f"{nbytes / 1e6:.0f} MB, weights and AdamW's state, to one disk, fsync included. Medians of "
             f"{len(next(iter(costs.values())))} rounds (least); the rate is the median's.", "",
             "| way | save, ms | MB/s | load, ms | MB/s |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(name for name, _ in costs):
        cells = []
        for what in (0, 1):
            middle, least = statistics.median(costs[name, what]), min(costs[name, what])
            cells += [f"{middle * 1e3:.0f} ({least * 1e3:.0f})", f"{nbytes / middle / 1e6:.0f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines + verification_lines(verified)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="on the disk that is meant; else where temporary files lie")
    parser.add_argument("--save", action="store_true", help="keep the page in bench/results")
    a = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ways = {"libdc": of_libdc(), "libdc, gathered, torch.save": gathered(), "FSDP2, DCP": of_fsdp(),
            "bytes alone": bytes_alone()}
    folder = [tempfile.mkdtemp(dir=a.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    quiet, own = machine.Quiet(), time.process_time()
    quiet.begin()
    try:
        costs = measure(ways, a.rounds, folder[0])
        verified = {"the page cache": verification(4 * a.rounds, folder[0], False),
                    "the disk": verification(2 * a.rounds, folder[0], True)}
    finally:  # without a barrier, which would wait for a rank that failed
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    quiet.end()
    used = torch.tensor([time.process_time() - own])
    dist.all_reduce(used)
    if dist.get_rank() == 0:
        text = page(costs, verified, 24 * 1025 * 1024 * 12, quiet.foreign(used.item()))
        print(text)
        if a.save:
            name = time.strftime("checkpoint-%Y-%m-%d.md", time.gmtime())
            with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "results", name), "w") as file:
                file.write(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
