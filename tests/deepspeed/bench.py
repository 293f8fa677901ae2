"""`run.py bench`: step time and peak memory of DeepSpeed's eager ZeRO-3, and beside it of DeepCompile on libdc. All
live at once and take turns of a few steps, so that whatever else the machine does meets all of them. Writes
bench/results/deepspeed-zero3-DATE.md."""

from __future__ import annotations

import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

from launch import BENCH, BUILD, NEWEST, finish, largest_difference, start
import machine  # isort: skip, launch knows where

OUT = BUILD / "bench"
COMMUNICATORS = {"libdc": "libdc's communicator", "torch": "Gloo"}
KINDS: Dict[str, Dict[str, Any]] = {"DeepSpeed's eager ZeRO-3": {}}
for _backend in ("eager", "inductor"):
    for _communicator, _name in COMMUNICATORS.items():
        KINDS[f"libdc, {_backend}, {_name}"] = {"backend": _backend, "communicator": _communicator}
WIDTH, BATCH = 768, 4
TURN, TURNS = 8, 8  # steps of a turn, as train.Turns has it, and turns; the first compiles


def measure() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    quiet = machine.Quiet()
    quiet.begin()
    results = train_in_turns()
    quiet.end()
    path = BENCH / "results" / f"deepspeed-zero3-{time.strftime('%Y-%m-%d')}.md"
    path.write_text("\n".join(report(results, quiet.foreign(sum(r["cpu"] for one in results for r in one["ranks"])))))
    print(path.read_text())


def train_in_turns() -> List[Dict[str, Any]]:
    """Each kind's result."""
    turns = OUT / "turns"
    turns.write_text("")
    paths = [OUT / f"{place}.json" for place in range(len(KINDS))]
    runs: "List[subprocess.Popen[bytes]]" = []
    try:
        for place, options in enumerate(KINDS.values()):
            runs.append(start(NEWEST, paths[place], stage=3, width=WIDTH, batch=BATCH, steps=TURN * TURNS,
                              turns=f"{turns}:{place}:{len(KINDS)}", **options))
        # All wait for each other: the first that fails ends it.
        while not any(run.poll() for run in runs) and any(run.returncode is None for run in runs):
            time.sleep(0.1)
        for run, path in sorted(zip(runs, paths), key=lambda pair: not pair[0].returncode):
            finish(run, path, timeout=60)
        return [finish(run, path, timeout=60) for run, path in zip(runs, paths)]
    finally:
        for run in runs:
            run.terminate()


def report(results: List[Dict[str, Any]], foreign: float) -> Iterator[str]:
    about = machine.describe()
    base = results[0]
    yield from ("# DeepSpeed's eager ZeRO-3, and DeepCompile on libdc", "",
                f"`tests/deepspeed/run.py bench`, {about['date']}, commit {about['commit']}; {about['cpu']}, "
                f"{about['cores']} cores; PyTorch {base['torch']}, DeepSpeed {base['deepspeed']}. Others used "
                f"{foreign:.0%} of the machine.", "",
                f"Two ranks with one thread each; a GPT of {base['parameters'] / 1e6:.1f} million float32 parameters, "
                f"{BATCH} sequences a rank. {TURNS - 1} rounds of {TURN} steps of each; the ratio is the median of the "
                "rounds' ratios. Memory is a rank's resident size: when the model is made, at most in steady "
                "steps, and at most before, while it compiles.", "",
                "| | step, median ms | fastest ms | of ZeRO-3 | before MB | steady peak MB | compiling MB | "
                "largest difference of losses |",
                "|---|---|---|---|---|---|---|---|")
    for name, one in zip(KINDS, results):
        seconds = [s for turn in steps(one) for s in turn]
        ratio = statistics.median(statistics.median(ours) / statistics.median(theirs)
                                  for ours, theirs in zip(steps(one), steps(base)))
        memory = [max(rank[key] for rank in one["ranks"]) * 1024 / 1e6
                  for key in ("before_kib", "steady_peak_kib", "compile_peak_kib")]
        yield (f"| {name} | {statistics.median(seconds) * 1e3:.1f} | {min(seconds) * 1e3:.1f} | {ratio:.2f} | "
               f"{' | '.join(f'{m:.0f}' for m in memory)} | {largest_difference(one, base):.1e} |")
    yield ""


def steps(one: Dict[str, Any]) -> List[List[float]]:
    """Rank 0's seconds of each step, turn by turn, after the first turn."""
    seconds = one["ranks"][0]["seconds"]
    return [seconds[i : i + TURN] for i in range(TURN, TURN * TURNS, TURN)]
