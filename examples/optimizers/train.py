#!/usr/bin/env python3
"""Trains the same models with SGD, AdamW, Muon, Shampoo, SOAP and K-FAC, in turns at each step, under ZeRO-3 on the
ranks that run it. It draws the loss against steps and against seconds. Muon trains the matrices of hidden layers, and
AdamW the other parameters.

    python -m libdc.run -n 2 examples/optimizers/train.py     what `make optimizers` does
    python examples/optimizers/train.py --only adamw shampoo  as one rank

The digits autoencoder comes first, then the byte GPT of examples/gpt. All optimizers begin with the same weights and
see the same batches. A run's folder has digits.json and gpt.json, and for each a picture by steps and one by seconds.
bench/optim/gates.py counts the steps to a target, over seeds and grids of settings.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "gpt"))

import libdc.torch as dct  # noqa: E402
import torch  # noqa: E402
from board import Board, Course  # noqa: E402
from data import Text  # noqa: E402
from digits import Autoencoder, pictures  # noqa: E402
from model import CONFIGS, GPT  # noqa: E402
from plot import Series, line_chart  # noqa: E402
from progress import columns  # noqa: E402
from rules import DIGITS, GPT as GPT_RULES, Rule, digits_step, text_step  # noqa: E402

BATCH = 256


class Task(NamedTuple):
    """A model, its optimizers and its batches."""

    name: str
    title: str
    unit: str
    steps: int
    rules: Dict[str, Rule]
    model: Callable[[], torch.nn.Module]
    step: Callable[..., float]
    batches: Callable[[], Iterator[Any]]


def digits_task(a: argparse.Namespace, group: Any) -> Task:
    data = pictures()
    size = -(-BATCH // group.size) * group.size  # equal parts, so that the mean over ranks is the batch's

    def batches() -> Iterator[torch.Tensor]:
        rng = torch.Generator().manual_seed(a.seed)
        while True:
            yield data[torch.randint(len(data), (size,), generator=rng).chunk(group.size)[group.rank]]

    return Task("digits", "digits autoencoder", "mean squared error", a.digits_steps, DIGITS,
                lambda: Autoencoder(a.seed), digits_step, batches)


def gpt_task(a: argparse.Namespace, group: Any) -> Task:
    config = CONFIGS[a.model]
    text = Text.load(config.seq, a.seed)
    size = -(-config.batch // group.size) * group.size

    def model() -> torch.nn.Module:
        torch.manual_seed(a.seed)
        return GPT(config)

    def batches() -> Iterator[Any]:
        return (text.batch(step, size, group.rank, group.size) for step in range(a.gpt_steps))

    return Task("gpt", f"{a.model} byte GPT", "nats a byte", a.gpt_steps, GPT_RULES, model, text_step, batches)


def race(task: Task, a: argparse.Namespace, group: Any, board: Board) -> Dict[str, Course]:
    """Trains with all optimizers, which take turns at each step, so that changes of the machine's speed affect all
    alike."""
    rules = {name: rule for name, rule in task.rules.items() if name in a.only}
    courses = {name: Course() for name in rules}
    models, optimizers, batches = {}, {}, {}
    for name, rule in rules.items():
        models[name] = task.model()
        dct.shard(models[name], stage=3)
        optimizers[name], batches[name] = rule.optimizer(models[name]), task.batches()
    draws = {name: torch.Generator().manual_seed(a.seed + group.rank) for name in rules}
    board.print(f"\n{task.title}: {sum(p.numel() for p in task.model().parameters()):,} parameters, ZeRO-3, "
              f"{group.size} rank{'s' if group.size > 1 else ''}, {task.steps} steps")
    for _ in range(task.steps):
        for name, course in courses.items():
            begin = time.monotonic()
            loss = task.step(models[name], optimizers[name], next(batches[name]), draws[name])
            seconds = time.monotonic() - begin
            total = group.all_reduce(torch.tensor([loss], dtype=torch.float64)).item()
            course.add(total / group.size, seconds)
        board.show(rules, courses)
    board.close()
    return courses


def draw(task: Task, courses: Dict[str, Course], folder: str, ranks: int) -> List[str]:
    """Writes the two pictures and the numbers. Returns the files' names."""
    def path(suffix: str) -> str:
        return os.path.join(folder, f"{task.name}{suffix}")

    title = f"{task.title}, ZeRO-3, {ranks} rank{'s' if ranks > 1 else ''}"
    for suffix, label, x in (("-steps.png", "step", None), ("-seconds.png", "seconds", "clock")):
        series = [Series(task.rules[name].name, course.clock if x else list(range(1, len(course.losses) + 1)),
                         course.smooth(), task.rules[name].color) for name, course in courses.items()]
        with open(path(suffix), "wb") as f:
            f.write(line_chart(title, label, f"loss ({task.unit})", series))
    with open(path(".json"), "w") as f:
        json.dump({name: {"loss": course.losses, "seconds": course.seconds} for name, course in courses.items()}, f)
    return [f"{task.name}-steps.png", f"{task.name}-seconds.png", f"{task.name}.json"]


def summary(task: Task, courses: Dict[str, Course], board: Board) -> None:
    """Prints the steps and seconds in which each optimizer reaches the last loss of the first one, which is SGD by
    default."""
    first = next(iter(courses))
    goal = courses[first].smooth()[-1]
    board.print(f"steps and seconds to {task.rules[first].name}'s last loss, {goal:.4f}:")
    for name, course in courses.items():
        step = next((i for i, loss in enumerate(course.smooth()) if loss <= goal), None)
        reached = "not reached" if step is None else f"{step + 1:>5} steps {course.clock[step]:>7.1f} s"
        board.print(f"  {task.rules[name].name:<8} {reached}; last {course.smooth()[-1]:.4f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=list(DIGITS), default=list(DIGITS), help="these optimizers")
    add("--tasks", nargs="+", choices=("digits", "gpt"), default=["digits", "gpt"], help="these models")
    add("--digits-steps", type=int, default=400)
    add("--gpt-steps", type=int, default=120)
    add("--model", choices=CONFIGS, default="tiny", help="of the GPT")
    add("--seed", type=int, default=0)
    add("--out", default=os.path.join("runs", "optimizers"), help="folder of the results")
    add("--plain", action="store_true", help="lines instead of a live display")
    add("--quiet", action="store_true", help="no display")
    return parser.parse_args()


def main() -> int:
    a = parse()
    group = dct.init()
    mode = "quiet" if a.quiet or group.rank else "live" if columns() and not a.plain else "lines"
    os.makedirs(a.out, exist_ok=True)
    for make in (digits_task, gpt_task):
        if make.__name__[:-5] not in a.tasks:
            continue
        task = make(a, group)
        board = Board(mode, task.steps)
        courses = race(task, a, group, board)
        summary(task, courses, board)
        if group.rank == 0:
            board.print(f"results in {a.out}: " + ", ".join(draw(task, courses, a.out, group.size)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
