"""The trainer's command line: its options, defaults and checks."""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from typing import Any, Dict, List, Optional

from model import CONFIGS, Config

RUNS = os.environ.get("LIBDC_TRAIN_RUNS") or "runs"
STEPS = {"tiny": 60, "small": 240, "wide": 100}

# Options that a resumed run takes from the run that it continues, unless the command line gives them.
_INHERITED = ("model", "stage", "steps", "batch", "seq", "accumulate", "lr", "warmup", "clip", "seed", "compile")


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="train.py", description="Trains a byte-level GPT on the sources of the Python standard library, sharded "
        "by libdc. Start it with `python -m libdc.run -n 2 train.py`, torchrun, --ranks, or alone as one rank.")
    add = p.add_argument
    add("--model", choices=CONFIGS, help="tiny, small (10.9 million parameters, the default) or wide (51 million)")
    add("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage: 0 shards nothing, 1 the optimizer's "
        "state, 2 gradients too, 3 weights too (default)")
    add("--ranks", type=int, help="start this many processes on this machine (when not started by a launcher)")
    add("--steps", type=int, help="optimizer steps in all (default 240 for small)")
    add("--batch", type=int, help="sequences in a step, over all ranks")
    add("--seq", type=int, help="bytes in a sequence")
    add("--accumulate", type=int, help="micro-batches in a step (default 1)")
    add("--lr", type=float, help="highest learning rate (default 0.001)")
    add("--warmup", type=int, help="steps until it is reached (default: a tenth, at most 20)")
    add("--clip", type=float, help="largest norm of the gradient (default 1.0; 0 = no clipping)")
    add("--seed", type=int, help="of the weights and the order of the text (default 0)")
    how = p.add_mutually_exclusive_group()
    how.add_argument("--eager", action="store_const", dest="compile", const="", help="run without a compiler (default)")
    how.add_argument("--compile", nargs="?", const="libdc", metavar="BACKEND",
                     help="run through torch.compile (default backend: libdc)")
    add("--compare", action="store_true", help="run the same steps in stages 0, 1, 2 and 3 side by side and print "
        "losses, bytes and times; writes no files")
    add("--resume", nargs="?", const="latest", metavar="FOLDER", help="go on with a run (default: the newest in runs/)")
    add("--out", metavar="FOLDER", help="where the results go (default: runs/MODEL-zeroSTAGE-TIME)")
    add("--save-every", type=int, default=100, metavar="N",
        help="write a checkpoint every N steps (default 100; 0 = never) as well as at the end")
    add("--sample", type=int, default=240, metavar="N", help="bytes of text to write at the end (default 240)")
    show = p.add_mutually_exclusive_group()
    show.add_argument("--quiet", action="store_true", help="print nothing but errors")
    show.add_argument("--plain", action="store_true", help="print lines, not the live display, on a terminal too")
    return p


def fail(rank: int, text: str) -> "SystemExit":
    """Rank 0 prints the error; all ranks end with the status of a wrong command line."""
    if rank == 0:
        print(f"train.py: {text}", file=sys.stderr)
    return SystemExit(2)


def _newest(rank: int) -> str:
    found = [os.path.join(RUNS, n) for n in os.listdir(RUNS)] if os.path.isdir(RUNS) else []
    found = [f for f in found if os.path.exists(os.path.join(f, "config.json"))]
    if not found:
        raise fail(rank, f"--resume: there is no run in {os.path.abspath(RUNS)}")
    return max(found, key=lambda f: os.path.getmtime(os.path.join(f, "config.json")))


def _inherit(a: argparse.Namespace, rank: int) -> None:
    a.out = _newest(rank) if a.resume == "latest" else a.resume
    try:
        with open(os.path.join(a.out, "config.json")) as f:
            config: Dict[str, Any] = json.load(f)
        old = {key: config[key] for key in _INHERITED}
    except (OSError, ValueError, KeyError) as error:
        raise fail(rank, f"--resume {a.out}: not a run's folder ({error})")
    for key, value in old.items():
        if getattr(a, key) is None:
            setattr(a, key, value)


def _defaults(a: argparse.Namespace) -> None:
    a.model = a.model or "small"
    preset = CONFIGS[a.model]
    steps = 12 if a.compare else STEPS[a.model]
    steps = int(os.environ.get("LIBDC_TRAIN_STEPS") or steps)
    for key, value in (("stage", 3), ("steps", steps), ("batch", preset.batch), ("seq", preset.seq), ("accumulate", 1),
                       ("lr", 1e-3), ("clip", 1.0), ("seed", 0), ("compile", "")):
        if getattr(a, key) is None:
            setattr(a, key, value)
    if a.warmup is None:
        a.warmup = min(20, max(1, a.steps // 10))


def _check(a: argparse.Namespace, rank: int, ranks: int) -> None:
    for key, low in (("steps", 1), ("batch", 1), ("seq", 2), ("accumulate", 1), ("warmup", 0), ("seed", 0), ("clip", 0),
                     ("save_every", 0), ("sample", 0)):
        if getattr(a, key) < low:
            raise fail(rank, f"--{key.replace('_', '-')} = {getattr(a, key)}, must be >= {low}")
    if a.lr <= 0:
        raise fail(rank, f"--lr = {a.lr}, must be > 0")
    if a.batch % (ranks * a.accumulate):
        raise fail(rank, f"--batch = {a.batch}, must be a multiple of ranks * accumulate = {ranks} * {a.accumulate}")


def launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def parse(argv: Optional[List[str]] = None) -> argparse.Namespace:
    """Reads and checks the command line. With --ranks and no launcher yet, becomes libdc's launcher."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank != 0:  # only rank 0 prints errors
        sys.stderr.flush()
        saved, sys.stderr = sys.stderr, open(os.devnull, "w")
        try:
            a = _parser().parse_args(argv)
        finally:
            sys.stderr = saved
    else:
        a = _parser().parse_args(argv)
    if a.ranks is not None and not 1 <= a.ranks <= 64:
        raise fail(rank, f"--ranks = {a.ranks}, must be 1 to 64")
    if launched() and a.ranks not in (None, ranks):
        raise fail(rank, f"--ranks = {a.ranks}, but the launcher started {ranks}")
    if a.compare and (a.resume or a.out):
        raise fail(rank, "--compare writes no folder: it takes neither --resume nor --out")
    if a.resume and a.out:
        raise fail(rank, "--resume goes on in the run's own folder: it does not take --out")
    if a.resume:
        _inherit(a, rank)
    _defaults(a)
    _check(a, rank, ranks if launched() else a.ranks or 1)
    if not launched() and (a.ranks or 1) > 1:
        sys.stdout.flush()
        arguments = sys.argv[1:] if argv is None else argv
        os.execv(sys.executable, [sys.executable, "-m", "libdc.run", "-n", str(a.ranks), "--grace", "60",
                                  os.path.abspath(sys.argv[0]), *arguments])
    return a


def model_config(a: argparse.Namespace) -> Config:
    return dataclasses.replace(CONFIGS[a.model], seq=a.seq, batch=a.batch)


def run_name(a: argparse.Namespace, when: float) -> str:
    return os.path.join(RUNS, f"{a.model}-zero{a.stage}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(when))}")
