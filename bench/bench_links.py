"""Collectives and training steps over limited links: libdc beside Gloo.

    python bench/bench_links.py [--rate 100] [--rounds 5] [--save]

Four machines, which are network namespaces (bench/network.py), send at most `rate` Mbit/s each. With one rank a machine
torch.distributed's collectives run over the backend libdc and over Gloo. With two ranks a machine they do the same, and
a model trains by ZeRO-3 and FSDP2, and by hybrid sharding: parts inside a machine, and replicas across machines.

All take turns, one call each a round, each after a barrier, and a call's time is that of the slowest rank. The share of
the link is the least that a machine must receive, over the time, over the limit. Heads of packets are 4.4 % of a link.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch import nn

import machine
import network
from bench_process_group import BACKENDS, collectives, mlp

MACHINES, PORT, KIB, WIDTH = 4, 29877, (64, 1024, 8192), 256
# The least share of a tensor that a machine receives, with m machines of e ranks.
LEAST: Dict[str, Callable[[int, int], float]] = {
    "all_reduce": lambda m, e: 2 * (m - 1) / m,
    "all_gather": lambda m, e: (m - 1) / m,
    "reduce_scatter": lambda m, e: (m - 1) / m,
    "broadcast": lambda m, e: 1,
    "all_to_all": lambda m, e: e * (m - 1) / m,
}
Calls = Dict[str, Callable[[], Any]]


def received() -> int:
    """Bytes that this machine's link has brought."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("veth0"))


def measure(calls: Calls, rounds: int, group: Any) -> Dict[str, Tuple[List[float], float]]:
    """Of each call: the rounds' seconds of the slowest rank, and the bytes of one that the busiest link brought."""
    seconds = torch.zeros(len(calls), rounds, dtype=torch.float64)
    brought = torch.zeros(len(calls), dtype=torch.float64)
    for i in range(-1, rounds):
        for place, call in list(enumerate(calls.values()))[:: 1 if i % 2 == 0 else -1]:
            dist.barrier(group)
            before, begin = received(), time.perf_counter()
            call()
            end = time.perf_counter()
            dist.barrier(group)
            if i >= 0:
                seconds[place, i] = end - begin
                brought[place] += (received() - before) / rounds
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
    dist.all_reduce(brought, dist.ReduceOp.MAX, group)
    return {name: (seconds[place].tolist(), brought[place].item()) for place, name in enumerate(calls)}


def step_of(net: nn.Module, rank: int) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True)

    def step() -> float:
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(rank))
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def steps(rank: int, each: int, groups: Dict[str, Any]) -> Calls:
    """A training step of each way to train, each with a model of 3.1 million parameters of its own."""
    import libdc.torch as dct
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def fsdp2(mesh: DeviceMesh) -> nn.Module:
        net = mlp(WIDTH)
        for block in net:
            fully_shard(block, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    def hybrid(backend: str) -> DeviceMesh:
        ranks = torch.arange(MACHINES * each).view(MACHINES, each)
        pair = [[dist.new_group(row.tolist(), backend=backend) for row in rows] for rows in (ranks.T, ranks)]
        return DeviceMesh.from_group([pair[0][rank % each], pair[1][rank // each]], "cpu", mesh=ranks,
                                     mesh_dim_names=("replicas", "shards"))

    nets = {"ZeRO-3, libdc.torch.shard": dct.shard(mlp(WIDTH), stage=3)}
    for backend in BACKENDS:
        nets[f"FSDP2, {backend}"] = fsdp2(DeviceMesh.from_group(groups[backend], "cpu"))
    nets["hybrid, libdc.torch.shard"] = dct.shard(mlp(WIDTH), stage=3, mesh=(MACHINES, each))
    for backend in BACKENDS:
        nets[f"hybrid FSDP2, {backend}"] = fsdp2(hybrid(backend))
    return {name: step_of(net, rank) for name, net in nets.items()}


def rank_main(rounds: int) -> None:
    import libdc.torch  # noqa: F401  registers the backend libdc

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = {"libdc": dist.new_group(backend="libdc"), "gloo": dist.group.WORLD}
    result: Dict[str, Any] = {}
    for kib in KIB:
        every = collectives(kib, rank, ranks)
        calls = {f"{name}, {backend}": lambda call=every[name], group=groups[backend]: call(group)
                 for name in LEAST for backend in BACKENDS}
        result[str(kib)] = measure(calls, rounds, groups["libdc"])
    if ranks > MACHINES:
        result["steps"] = measure(steps(rank, ranks // MACHINES, groups), rounds, groups["libdc"])
    dist.barrier()
    if rank == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


def run_ranks(each: int) -> Dict[str, Any]:
    def start(rank: int) -> "subprocess.Popen[str]":
        environment = {**machine.environment(rank, MACHINES * each, PORT, "links"), "MASTER_ADDR": network.address(0),
                       "LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each), "GLOO_SOCKET_IFNAME": "veth0",
                       "LIBDC_SECRET": "a secret of the links"}
        return subprocess.Popen([*network.of_machine(rank // each), sys.executable, *sys.argv], text=True,
                                env=environment, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL)

    running = [start(rank) for rank in range(MACHINES * each)]
    answer = running[0].communicate()[0]
    if any([process.wait() for process in running]):
        raise SystemExit(f"bench_links: {MACHINES} machines of {each} ranks failed")
    return dict(json.loads(answer.splitlines()[-1]))


def collective_rows(each: int, rate: int, kib: str, calls: Dict[str, Any]) -> List[str]:
    lines = []
    for name, least in LEAST.items():
        (own, own_bytes), (other, other_bytes) = (calls[f"{name}, {backend}"] for backend in BACKENDS)
        ratio = machine.spread([b / a for a, b in zip(own, other)])
        must = least(MACHINES, each) * int(kib) * 1024
        share = [must / machine.spread(seconds)[0] / (rate * 125000) for seconds in (own, other)]
        lines.append(f"| {each} | {kib} | {name} | {machine.spread(own)[0] * 1e3:.1f} | "
                     f"{machine.spread(other)[0] * 1e3:.1f} | {ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f}) | "
                     f"{share[0]:.0%} | {share[1]:.0%} | {own_bytes / 1024:.0f} | {other_bytes / 1024:.0f} |")
    return lines


def step_rows(calls: Dict[str, Any]) -> List[str]:
    lines = []
    for name, (seconds, brought) in calls.items():
        floor = calls["hybrid, libdc.torch.shard" if name.startswith("hybrid") else "ZeRO-3, libdc.torch.shard"][0]
        ratio = machine.spread([b / a for a, b in zip(floor, seconds)])
        lines.append(f"| {name} | {machine.spread(seconds)[0] * 1e3:.0f} | {ratio[0]:.2f} ({ratio[1]:.2f} to "
                     f"{ratio[2]:.2f}) | {brought / 2**20:.2f} |")
    return lines


def page(results: Dict[int, Any], rate: int, about: Dict[str, Any], foreign: float) -> str:
    packages = ", ".join(f"{k} {v}" for k, v in about["packages"].items())
    where = f"{about['date']}, {about['cpu']}, {about['cores']} cores, {packages}, commit {about['commit']}"
    lines = [f"# Collectives and steps over links of {rate} Mbit/s", "",
             f"{where}; others used {foreign:.0%} of the machine.", "", f"    {about['command']}", "",
             *__doc__.splitlines()[4:], "",
             "KiB received are those of the busiest link in one call, with heads and acknowledgements.", "",
             "| ranks a machine | KiB | call | libdc ms | gloo ms | gloo / libdc | share of the link: libdc | gloo "
             "| KiB received: libdc | gloo |", "|" + "---|" * 10]
    for each, result in results.items():
        for kib in map(str, KIB):
            lines += collective_rows(each, rate, kib, result[kib])
    lines += ["", "A step of two ranks a machine. The ratio is to libdc.torch.shard's of the same kind.", "",
              "| step | ms | ratio | MiB received |", "|---|---|---|---|", *step_rows(results[2]["steps"])]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=100, help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="a page in bench/results")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(arguments.rounds)
        return 0
    network.enter()
    about = {**machine.describe(), "command": machine.command("python bench/bench_links.py")}
    machine.wait_quiet()
    network.connect(MACHINES)
    network.limit(MACHINES, arguments.rate)
    quiet, before = machine.Quiet(), os.times()
    quiet.begin()
    results = {each: run_ranks(each) for each in (1, 2)}
    quiet.end()
    after = os.times()
    foreign = quiet.foreign(after.children_user + after.children_system - before.children_user - before.children_system)
    text = page(results, arguments.rate, about, foreign)
    print(text)
    if arguments.save:
        machine.save(f"links-{arguments.rate}", text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
