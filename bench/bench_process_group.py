"""torch.distributed over the backend libdc beside Gloo: collectives of 1 KiB to 64 MiB, and steps of DDP and FSDP2.

    python bench/bench_process_group.py [--ranks 2] [--rounds 7] [--kib 1 1024] [--tcp] [--calls 20]

Both backends have a group of the same processes, one thread each. The calls take turns, one of each a round, each after
a barrier. The backend that is first changes from round to round, and a call's time is that of the slowest rank. So each
call comes after others, as in a training step; with --calls a turn is so many of one in a row, and no steps are taken.
Its processor time is that of all ranks, with the threads of the backends, up to the end of the barrier behind it. A
size is that of the whole tensor of a rank. The ratio is the median of the rounds' ratios, so a machine that is slow for
a while slows both. With --tcp libdc takes each process for a machine of its own.
"""
from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
import warnings
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist
from torch import nn

import machine

HERE = os.path.dirname(os.path.abspath(__file__))
KIB = [1, 16, 256, 1024, 4096, 16384, 65536]
BACKENDS = ("libdc", "gloo")


def collectives(kib: int, rank: int, ranks: int) -> Dict[str, Callable[[Any], Any]]:
    n = kib * 256
    whole, other = torch.randn(n), torch.empty(n)
    part = torch.randn(n // ranks)
    every = torch.empty(n // ranks * ranks)
    # PyTorch 2.13 has new names for these.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    message: Callable[[Any], Any] = lambda g: None
    if rank < 2:
        message = (lambda g: dist.send(whole, group=g, group_dst=1), lambda g: dist.recv(other, group=g, group_src=0)
                   )[rank]
    return {
        "all_reduce": lambda g: dist.all_reduce(whole, group=g),
        "all_reduce, async": lambda g: dist.all_reduce(whole, group=g, async_op=True).wait(),
        "all_gather": lambda g: gather(every, part, group=g),
        "reduce_scatter": lambda g: scatter(part, every, group=g),
        "broadcast": lambda g: dist.broadcast(whole, 0, group=g),
        "all_to_all": lambda g: dist.all_to_all_single(other[: every.numel()], every, group=g),
        "send, recv": message,
    }


def mlp(width: int = 512) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                           for _ in range(6)])


def steps(rank: int) -> Dict[str, Callable[[Any], Any]]:
    """One training step of a model of 12.6 million parameters, a model for each backend."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def ddp(group: Any) -> nn.Module:
        return DistributedDataParallel(mlp(), process_group=group)

    def fsdp2(group: Any) -> nn.Module:
        net, mesh = mlp(), DeviceMesh.from_group(group, "cpu")
        for block in net:
            fully_shard(block, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    def stepper(wrap: Callable[[Any], nn.Module]) -> Callable[[Any], Any]:
        made: Dict[Any, Any] = {}

        def step(group: Any) -> float:
            if group not in made:
                net = wrap(group)
                made[group] = net, torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True)
            net, optimizer = made[group]
            x = torch.randn(32, 512, generator=torch.Generator().manual_seed(rank))
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    return {"DDP step": stepper(ddp), "FSDP2 step": stepper(fsdp2)}


def measure(calls: Dict[str, Callable[[Any], Any]], groups: Dict[str, Any], rounds: int, in_a_row: int = 1
            ) -> Dict[str, Any]:
    """Of each call and backend: the rounds' times of the slowest rank, and the processor times of all, in us."""
    shape = (len(calls), len(BACKENDS), rounds)
    wall, processor = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for i in range(-2, rounds):
        for place, call in enumerate(calls.values()):
            for which, backend in list(enumerate(BACKENDS))[:: 1 if i % 2 == 0 else -1]:
                dist.barrier(groups["libdc"])
                used, begin = time.process_time(), time.perf_counter()
                for _ in range(in_a_row):
                    call(groups[backend])
                end = time.perf_counter()
                dist.barrier(groups["libdc"])
                if i >= 0:
                    wall[place, which, i] = (end - begin) / in_a_row * 1e6
                    processor[place, which, i] = (time.process_time() - used) / in_a_row * 1e6
    dist.all_reduce(wall, dist.ReduceOp.MAX, groups["libdc"])
    dist.all_reduce(processor, group=groups["libdc"])
    return {name: row(wall[place].tolist(), processor[place].tolist()) for place, name in enumerate(calls)}


def row(wall: List[List[float]], processor: List[List[float]]) -> Dict[str, Any]:
    out: Dict[str, Any] = {"rounds": len(wall[0])}
    for backend, times, used in zip(BACKENDS, wall, processor):
        out[backend], out[f"{backend}_min"], out[f"{backend}_cpu"] = (machine.spread(times)[0], min(times),
                                                                      machine.spread(used)[0])
    out["ratio"], out["cpu_ratio"] = (machine.spread([b / a for a, b in zip(*each)]) for each in (wall, processor))
    return out


def rank_main(rounds: int, kibs: List[int], tcp: bool, in_a_row: int) -> None:
    import libdc.torch  # the backend
    from libdc.torch.distributed import rendezvous

    if tcp:  # without shared memory below TCP, too
        rendezvous._machine = lambda: f"machine{os.environ['RANK']}"
        libdc.Comm.tcp = functools.partial(libdc.Comm.tcp, node="")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = {"gloo": dist.group.WORLD, "libdc": dist.new_group(backend="libdc")}
    rows: Dict[str, Any] = {}
    for kib in kibs:
        count = rounds * (10 if kib <= 256 else 3 if kib <= 4096 else 1)
        rows[str(kib)] = measure(collectives(kib, rank, ranks), groups, count, in_a_row)
    if in_a_row == 1:
        rows["steps"] = measure(steps(rank), groups, 3 * rounds)
    dist.barrier()
    if rank == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def markdown(rows: Dict[str, Any], about: Dict[str, Any], foreign: float, ranks: int, tcp: bool) -> str:
    packages = ", ".join(f"{k} {v}" for k, v in about["packages"].items())
    out = [f"# torch.distributed over libdc and over Gloo, {ranks} processes of one machine"
           + (", libdc over TCP" if tcp else ""), "",
           f"{about['date']}, {about['cpu']}, {about['cores']} cores, {packages}, commit {about['commit']}; others "
           f"used {foreign:.0%} of the machine.", "", f"    {about['command']}", "",
           "Microseconds, median (minimum). The ratio is Gloo's time to libdc's: the median of the rounds, and its "
           "quartiles. Processor time is that of all ranks with a barrier.", "",
           "| KiB | call | libdc | gloo | gloo / libdc | processor: libdc | gloo | gloo / libdc |", "|" + "---|" * 8]
    for kib, calls in rows.items():
        for name, r in calls.items():
            ratios = ["{:.1f} ({:.1f} to {:.1f})".format(*r[key]) for key in ("ratio", "cpu_ratio")]
            out.append(f"| {kib} | {name} | {r['libdc']:.0f} ({r['libdc_min']:.0f}) | {r['gloo']:.0f} "
                       f"({r['gloo_min']:.0f}) | {ratios[0]} | {r['libdc_cpu']:.0f} | {r['gloo_cpu']:.0f} | "
                       f"{ratios[1]} |")
    return "\n".join(out) + "\n"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--rounds", type=int, default=7, help="calls of each at the largest sizes, more at smaller ones")
    p.add_argument("--kib", type=int, nargs="+", default=KIB, help="sizes")
    p.add_argument("--tcp", action="store_true", help="libdc over TCP too, as between machines")
    p.add_argument("--calls", type=int, default=1, help="of one kind in a row")
    p.add_argument("--out", default=os.path.join(HERE, "results"))
    a = p.parse_args()
    if "RANK" in os.environ:
        rank_main(a.rounds, a.kib, a.tcp, a.calls)
        return 0
    about = {**machine.describe(), "command": machine.command("python bench/bench_process_group.py")}
    machine.wait_quiet()
    quiet, before = machine.Quiet(), os.times()
    quiet.begin()
    port = machine.free_port()
    ranks = [subprocess.Popen([sys.executable, os.path.abspath(__file__), *sys.argv[1:]], text=True,
                              env=machine.environment(r, a.ranks, port, f"bench-{os.getpid()}"),
                              stdout=subprocess.PIPE if r == 0 else subprocess.DEVNULL) for r in range(a.ranks)]
    answer = ranks[0].communicate()[0]
    if any([r.wait() for r in ranks]):
        return 1
    quiet.end()
    after = os.times()
    foreign = quiet.foreign(after.children_user + after.children_system - before.children_user - before.children_system)
    rows = json.loads(answer.splitlines()[-1])
    text = markdown(rows, about, foreign, a.ranks, a.tcp)
    os.makedirs(a.out, exist_ok=True)
    stem = os.path.join(a.out, f"process-group-{'tcp-' if a.tcp else ''}{a.ranks}"
                        f"{'-in-a-row' if a.calls > 1 else ''}-{about['date'][:10]}")
    with open(stem + ".json", "w") as f:
        json.dump({"about": about, "foreign": foreign, "rows": rows}, f, indent=1)
    with open(stem + ".md", "w") as f:
        f.write(text)
    print(text + f"\nwritten: {stem}.json, {stem}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
