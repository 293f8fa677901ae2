"""Training a GPT on 2 ranks with 1 thread each: libdc beside its peers, all in one run and in turns.

    python bench/gpt/bench.py                          libdc, DDP, FSDP2, DeepSpeed if it is installed
    python bench/gpt/bench.py --peers                  installs it first, as `make bench PEERS=1` does
    python bench/gpt/bench.py --impl local libdc3      only these; fsdp2-fake is FSDP2 over a backend that moves nothing

Every implementation has its own two processes, which sleep while others have their turn. `local` is the same work
without any communication: the floor of DDP. It updates all weights on each rank. Where ranks have parts of the
optimizer's state (ZeRO, FSDP2), each updates its part alone, so they may be below it by what that spares. In each round
all take `--turn` steps; the statistic that counts is the ratio to `local` within the round, so a slow moment of the
machine cancels. The order changes from round to round.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import statistics
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

HERE = os.path.dirname(os.path.abspath(__file__))
BENCH = os.path.dirname(HERE)
sys.path[:0] = [BENCH, os.path.join(HERE, "..", "..", "examples", "gpt")]

import machine  # noqa: E402

RANKS = 2
FLOOR = "local"
DEFAULT = [FLOOR, "libdc0", "libdc1", "libdc2", "libdc3", "libdc3+libdc", "ddp", "ddp-libdc", "fsdp2", "fsdp2-libdc"]
PEERS = ["zero1", "zero2", "zero3"]
LOSS_STEP = 23


def install_peers() -> None:
    """DeepSpeed, into the environment that runs this. Its sources build no operators here."""
    if importlib.util.find_spec("deepspeed"):
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "setuptools", "wheel"], check=True)
    subprocess.run([*pip, "--no-build-isolation", "deepspeed==0.19.8"], check=True,
                   env={**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"})
    importlib.invalidate_caches()


class Group:
    """The two processes of one implementation."""

    def __init__(self, name: str, a: argparse.Namespace, log: str) -> None:
        self.name, self.log = name, log
        port, tag = machine.free_port(), f"bench-{os.getpid()}-{name.replace('+', '-')}"
        command = [sys.executable, os.path.join(HERE, "worker.py"), name, "--model", a.model, "--batch", str(a.batch)]
        self.turns: List[List[Dict[str, Any]]] = []
        with open(log, "w") as f:
            self.ranks = [subprocess.Popen(command, env=machine.environment(r, RANKS, port, tag), stderr=f, text=True,
                                           bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                          for r in range(RANKS)]

    def answers(self, seconds: float) -> List[Dict[str, Any]]:
        end, out = time.monotonic() + seconds, []
        for process in self.ranks:
            assert process.stdout
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            line = process.stdout.readline() if ready else ""
            if not line:
                raise RuntimeError(f"{self.name}: no answer{'' if ready else f' in {seconds:.0f} s'}; see {self.log}")
            out.append(json.loads(line))
        return out

    def ask(self, command: str, seconds: float = 600) -> List[Dict[str, Any]]:
        for process in self.ranks:
            assert process.stdin
            process.stdin.write(command + "\n")
            process.stdin.flush()
        return self.answers(seconds)

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()

    def end(self) -> None:
        try:
            self.ask("end", 30)
        except (RuntimeError, BrokenPipeError):
            pass
        self.kill()

    def losses(self) -> List[float]:
        return [sum(pair) / RANKS for turn in self.turns for pair in zip(*(rank["losses"] for rank in turn))]

    def step_seconds(self, turn: int) -> float:
        """Median over the turn's steps of the slower rank's time."""
        return statistics.median(max(pair) for pair in zip(*(rank["seconds"] for rank in self.turns[turn])))


def start(names: List[str], a: argparse.Namespace, logs: str) -> List[Group]:
    """Starts and warms up one implementation after the other; one that fails is left out, and said so."""
    groups = []
    for name in names:
        group = Group(name, a, os.path.join(logs, f"{name}.log"))
        try:
            group.answers(300)
            begin = time.monotonic()
            group.turns.append(group.ask(f"steps {a.warmup}", 900))
            print(f"{name}: {a.warmup} steps to warm up in {time.monotonic() - begin:.1f} s", flush=True)
            group.ask("reset_peak")
            groups.append(group)
        except (RuntimeError, BrokenPipeError) as error:
            print(f"{name}: left out: {error}", flush=True)
            group.kill()
    return groups


def rounds(groups: List[Group], a: argparse.Namespace) -> List[float]:
    """The turns; returns the share of the machine that others used in each round."""
    foreign = []
    for number in range(a.rounds):
        turn = number % len(groups)
        quiet, own = machine.Quiet(), 0.0
        for group in groups[turn:] + groups[:turn]:
            time.sleep(a.pause)
            quiet.begin()
            group.turns.append(group.ask(f"steps {a.turn}"))
            quiet.end()
            own += sum(rank["cpu"] for rank in group.turns[-1])
        foreign.append(quiet.foreign(own))
        print(f"round {number + 1}/{a.rounds}: "
              + "  ".join(f"{g.name} {g.step_seconds(-1) * 1e3:.0f}" for g in groups)
              + f" ms; others used {foreign[-1]:.0%} of the machine", flush=True)
    return foreign


def used_rounds(foreign: List[float], a: argparse.Namespace) -> List[int]:
    clean = [i for i, f in enumerate(foreign) if f <= a.quiet]
    return clean if len(clean) >= 3 else list(range(len(foreign)))


def summary(groups: List[Group], used: List[int], a: argparse.Namespace) -> List[Dict[str, Any]]:
    floor = next((g for g in groups if g.name == FLOOR), None)
    rows = []
    for g in groups:
        seconds = [g.step_seconds(1 + i) for i in used]
        ratios = [s / floor.step_seconds(1 + i) for s, i in zip(seconds, used)] if floor else []
        last = g.turns[-1]
        losses = g.losses()
        rows.append({
            "name": g.name, "step_ms": statistics.median(seconds) * 1e3, "step_ms_min": min(seconds) * 1e3,
            "ratio": machine.spread(ratios) if ratios else None, "rounds_used": len(used),
            "peak_mib": max(r["peak_kib"] for r in last) / 1024, "wire_bytes": last[0]["wire_bytes"],
            "cpu_ms": statistics.median(sum(r["cpu"] for r in g.turns[1 + i]) / a.turn / RANKS for i in used) * 1e3,
            "loss": losses[:LOSS_STEP][-1], "losses": losses})
    return rows


def markdown(rows: List[Dict[str, Any]], about: Dict[str, Any], foreign: float, a: argparse.Namespace) -> str:
    """foreign: what others used of the machine, at most, in the rounds that count."""
    step = min(LOSS_STEP, len(rows[0]["losses"]))
    packages = ", ".join(f"{k} {v}" for k, v in about["packages"].items())
    bits: Dict[str, int] = {}
    floor_cpu = next((r["cpu_ms"] for r in rows if r["name"] == FLOOR), None)
    out = [f"# Training a GPT ({a.model}) on {RANKS} ranks with 1 thread each", "",
           f"{about['date']}, {about['cpu']}, {about['cores']} cores, Python {about['python']}, {packages}, commit "
           f"{about['commit']}.", "",
           f"    {about['command']}", "",
           f"Global batch {a.batch}; {a.rounds} rounds of {a.turn} steps in turns, {rows[0]['rounds_used']} of them "
           f"used. Others used at most {foreign:.0%} of the machine in those (all rounds count if fewer than 3 have "
           f"at most {a.quiet:.0%}). The ratio is the median over rounds of (step time / `{FLOOR}`'s step time in "
           "the same round), with quartiles. CPU time hardly depends on the load of others, but waiting is not in it. "
           f"Equal letters after the loss of step {step}: the same bits in every step.", "",
           "| implementation | ratio to floor | step ms, median (min) | CPU ms a rank (ratio) | peak memory over the "
           f"start, MiB | wire MB a step | loss, step {step} |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        letter = chr(ord("a") + bits.setdefault(json.dumps(r["losses"]), len(bits)))
        ratio = "{:.3f} ({:.3f} to {:.3f})".format(*r["ratio"]) if r["ratio"] else ""
        cpu = f"{r['cpu_ms']:.0f}" + (f" ({r['cpu_ms'] / floor_cpu:.3f})" if floor_cpu else "")
        wire = "" if r["wire_bytes"] is None else f"{r['wire_bytes'] / 1e6:.1f}"
        out.append(f"| {r['name']} | {ratio} | {r['step_ms']:.0f} ({r['step_ms_min']:.0f}) | {cpu} | "
                   f"{r['peak_mib']:.0f} | {wire} | {r['loss']:.6f} {letter} |")
    out += ["", f"`{FLOOR}` trains its ranks apart, so its loss differs by design, and updates all weights on each: "
            "ZeRO and FSDP2 update parts, and may be below it. `libdc3+libdc` is stage 3 through "
            "torch.compile(backend=\"libdc\"). `ddp` and `fsdp2` are over Gloo, `ddp-libdc` and `fsdp2-libdc` over "
            "torch.distributed's backend libdc. `fsdp2-fake` is FSDP2 over a backend that moves nothing."]
    return "\n".join(out) + "\n"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--impl", nargs="+", metavar="NAME", help=f"of {', '.join(DEFAULT + PEERS)}; NAME+BACKEND compiles")
    p.add_argument("--model", choices=("tiny", "small", "wide"), default="small")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--rounds", type=int, default=12)
    p.add_argument("--turn", type=int, default=4, help="steps of each implementation in a round (default 4)")
    p.add_argument("--warmup", type=int, default=4)
    p.add_argument("--pause", type=float, default=0.0, help="seconds between turns, to leave room for others")
    p.add_argument("--quiet", type=float, default=0.08, help="a round counts if others used less of the machine")
    p.add_argument("--peers", action="store_true", default=os.environ.get("PEERS") == "1",
                   help="install DeepSpeed into this environment if it is missing (or PEERS=1)")
    p.add_argument("--out", default=os.path.join(BENCH, "results"))
    a = p.parse_args()
    if min(a.rounds, a.turn, a.warmup) < 1 or a.batch < RANKS or a.batch % RANKS:
        p.error(f"--rounds, --turn and --warmup must be >= 1, --batch a multiple of {RANKS}")
    if a.peers:
        install_peers()
    names = a.impl or DEFAULT + (PEERS if importlib.util.find_spec("deepspeed") else [])
    logs = os.path.join(a.out, "logs")
    os.makedirs(logs, exist_ok=True)
    about = {**machine.describe(), "command": machine.command("python bench/gpt/bench.py")}
    machine.wait_quiet()
    groups: List[Group] = []
    try:
        groups = start(names, a, logs)
        if not groups:
            return 1
        foreign = rounds(groups, a)
    finally:
        for group in groups:
            group.end()
    used = used_rounds(foreign, a)
    rows = summary(groups, used, a)
    text = markdown(rows, about, max(foreign[i] for i in used), a)
    stem = os.path.join(a.out, f"gpt-{a.model}-{about['date'][:10]}")
    options = {key: value for key, value in vars(a).items() if key != "out"}
    with open(stem + ".json", "w") as f:
        json.dump({"about": about, "options": options, "foreign": foreign, "rows": rows}, f, indent=1)
    with open(stem + ".md", "w") as f:
        f.write(text)
    print("\n" + text + f"\nwritten: {stem}.json, {stem}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
