#!/usr/bin/env python3
"""Trains a byte-level GPT with libdc, ZeRO stage 0 to 3, on any number of ranks of this machine.

    python -m libdc.run -n 2 examples/gpt/train.py       2 ranks, ZeRO-3, the defaults of `make train`
    python examples/gpt/train.py --ranks 2 --compare     the same steps in stages 0 to 3, side by side
    python examples/gpt/train.py --ranks 2 --resume      goes on with the newest run, bit for bit

The folder of a run: config.json, metrics.jsonl (one line a step), loss.png, sample.txt, trace.json (open it in
https://ui.perfetto.dev) and step-N.safetensors, the checkpoints. Ctrl-C finishes the step, saves and ends with status
130.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from typing import Any, Dict, List, Optional

import libdc.torch as dct
import torch

import checkpoint
import options
import timeline
from compare import compare
from data import Text
from model import generate
from plot import Series, line_chart
from progress import Progress, columns, size
from trainer import Trainer, formula

INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


class Stop:
    """Records Ctrl-C (or a launcher's SIGTERM), which the loop checks at the end of each step. A second Ctrl-C ends at
    once."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def read_metrics(folder: str, steps: int) -> List[Dict[str, Any]]:
    """The lines of the first `steps` steps. Later ones belong to work that was not saved."""
    try:
        with open(os.path.join(folder, "metrics.jsonl")) as f:
            rows = [json.loads(line) for line in f if line.endswith("\n")]
    except FileNotFoundError:
        return []
    return [r for r in rows if r["step"] <= steps]


def smooth(values: List[float], keep: float = 0.9) -> List[float]:
    out: List[float] = []
    total = weight = 0.0
    for v in values:
        total, weight = keep * total + (1 - keep) * v, keep * weight + (1 - keep)
        out.append(total / weight)
    return out


class Run:
    """One training run and its folder."""

    def __init__(self, a: argparse.Namespace, group: Any) -> None:
        self.a, self.group = a, group
        self.config = options.model_config(a)
        now = torch.tensor([time.time() if group.rank == 0 else 0.0], dtype=torch.float64)
        self.folder = a.out or options.run_name(a, group.all_reduce(now).item())
        start = checkpoint.latest(self.folder) if a.resume else None
        if a.resume and start is None:
            raise options.fail(group.rank, f"--resume {self.folder}: there is no checkpoint in it")
        if not a.resume and checkpoint.latest(self.folder):
            raise options.fail(group.rank, f"--out {self.folder}: holds a run already; go on with it by --resume")
        self.text = Text.load(self.config.seq, a.seed)
        self.trainer = Trainer(a, self.config, group, a.stage, start)
        self.first = self.trainer.done
        self.rows = read_metrics(self.folder, self.first)
        self.saved = self.first if start else -1
        if group.rank == 0:
            self._open_folder()
        group.barrier()
        mode = "quiet" if a.quiet or group.rank else "live" if columns() and not a.plain else "lines"
        self.show = Progress(mode, self.first, a.steps)

    def _open_folder(self) -> None:
        os.makedirs(self.folder, exist_ok=True)
        with open(os.path.join(self.folder, "config.json"), "w") as f:
            json.dump({**vars(self.a), "out": None, "resume": None, "ranks": self.group.size}, f, indent=1)
        with open(os.path.join(self.folder, "metrics.jsonl"), "w") as f:
            f.writelines(json.dumps(r) + "\n" for r in self.rows)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def save(self, step: int) -> None:
        if step == self.saved:
            return
        checkpoint.save(self.folder, step, self.trainer.model, self.trainer.optimizer, self.group)
        self.saved = step

    def train(self) -> int:
        """Trains to the end, or until any rank was told to stop. Returns the total number of steps done."""
        stop, step = Stop(), self.first
        dct.trace_start(self.trainer.model, 8192)
        metrics = open(self.path("metrics.jsonl"), "a", buffering=1) if self.group.rank == 0 else None
        while step < self.a.steps:
            row = self.trainer.step(self.text, step, stop.asked)
            step += 1
            told = row.pop("stop")
            self.rows.append(row)
            if metrics:
                metrics.write(json.dumps(row) + "\n")
            self.show.step(row)
            if told:
                break
            if self.a.save_every and step % self.a.save_every == 0:
                self.save(step)
        self.show.close()
        if metrics:
            metrics.close()
        self.save(step)
        return step

    def write_trace(self) -> None:
        t = self.trainer
        timeline.write(self.path("trace.json"), self.group, t.spans, dct.trace_read(t.model), list(t.sizes))

    def write_chart(self, held_out: Optional[float]) -> None:
        steps, losses = [r["step"] for r in self.rows], [r["loss"] for r in self.rows]
        series = [Series("each step", steps, losses, (170, 196, 235), 1.2),
                  Series("smooth", steps, smooth(losses), (38, 98, 190), 2.5)]
        if held_out is not None:
            series.append(Series("held-out text", steps[-1:], [held_out], (214, 92, 43)))
        title = f"{self.a.model} GPT, ZeRO-{self.a.stage}, {self.group.size} ranks"
        with open(self.path("loss.png"), "wb") as f:
            f.write(line_chart(title, "step", "loss (nats a byte)", series))

    def sample(self) -> str:
        """Text that the model generates, on all ranks together, without characters that would control a terminal."""
        prompt = b"def "
        out = bytearray(prompt)
        for piece in generate(self.trainer.model, prompt, self.a.sample, seed=self.a.seed):
            out += piece
        return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in out.decode("utf-8", "replace"))

    def report(self, held_out: float) -> None:
        """Prints the bytes that the run moved and that each rank holds, beside the formulas."""
        t, out, ranks = self.trainer, self.show.print, self.group.size
        last, whole = self.rows[-1], sum(t.sizes.values())
        unit = whole * (ranks - 1) / ranks
        moved = (last["gather_wire_bytes"] + last["reduce_wire_bytes"]) / 4
        out()
        out(f"loss {last['loss']:.4f} in the last step, {held_out:.4f} on held-out text "
            f"({held_out / 0.6931471805599453:.2f} bits a byte; 8 is knowing nothing)")
        if ranks > 1:
            times = formula(self.a.stage, self.a.accumulate)
            out(f"wire  {moved:,.0f} elements a step and rank = {moved / unit:.4f} * parameters * (ranks - 1) / ranks; "
                + (f"the formula says {times}" if self.a.stage < 3 else
                   f"at most {times}, less biases and embeddings, which a backward does not gather again"))
        held = t.held()
        out(f"held  {size(sum(held.values()))} a rank between steps: "
            + ", ".join(f"{k} {size(v)}" for k, v in held.items())
            + f"; without sharding {size(16 * whole)}")
        out(f"      gathered weights at peak {size(last['gathered_peak_bytes'])} of {size(4 * whole)}; "
            f"allocations by libdc in the last step: {last['allocations']}")

    def finish(self) -> None:
        held_out = self.trainer.validate(self.text)
        self.report(held_out)
        text = self.sample()
        if self.group.rank == 0:
            with open(self.path("sample.txt"), "w", encoding="utf-8") as f:
                f.write(text)
            self.write_chart(held_out)
        self.show.print("\na sample of its writing:\n" + "\n".join("    " + line for line in text.splitlines()))
        self.show.print(f"\nresults in {self.folder}: metrics.jsonl, loss.png, sample.txt, trace.json, "
                      f"step-{self.saved:06d}.safetensors")


def main() -> int:
    a = options.parse()
    sys.stdout.reconfigure(errors="replace")  # the sample may have characters that the terminal lacks
    group = dct.init()
    if a.compare:
        show = Progress("quiet" if a.quiet or group.rank else "lines", 0, a.steps)
        return 0 if compare(a, group, show) else 1
    run = Run(a, group)
    t, show = run.trainer, run.show
    show.print(f"{a.model} GPT: {sum(t.sizes.values()):,} parameters, ZeRO-{a.stage}, {group.size} "
             f"rank{'s' if group.size > 1 else ''}, {'compiled by ' + a.compile if a.compile else 'eager'}; "
             f"{size(run.text.train.numel())} of text; {a.batch} sequences of {a.seq} bytes a step"
             + (f"; goes on after step {run.first}" if run.first else ""))
    done = run.train()
    run.write_trace()
    if done < a.steps:
        if group.rank == 0:
            run.write_chart(None)
        show.print(f"\nstopped after step {done} of {a.steps} and saved; go on with: --resume {run.folder}")
        return INTERRUPTED
    run.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
