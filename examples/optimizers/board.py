"""The live display: a line an optimizer, drawn over itself on a terminal; plain lines elsewhere."""
from __future__ import annotations

import sys
from typing import Dict, List

from progress import columns, sparkline
from rules import Rule


class Course:
    """What one optimizer did so far."""

    def __init__(self) -> None:
        self.losses: List[float] = []
        self.seconds: List[float] = []

    def add(self, loss: float, seconds: float) -> None:
        self.losses.append(loss)
        self.seconds.append(seconds)

    @property
    def clock(self) -> List[float]:
        """Seconds at the end of each step."""
        total, out = 0.0, []
        for seconds in self.seconds:
            total += seconds
            out.append(total)
        return out

    def smooth(self, keep: float = 0.8) -> List[float]:
        out: List[float] = []
        total = weight = 0.0
        for loss in self.losses:
            total, weight = keep * total + (1 - keep) * loss, keep * weight + (1 - keep)
            out.append(total / weight)
        return out


class Board:
    """mode: "live", "lines" or "quiet"."""

    def __init__(self, mode: str, steps: int) -> None:
        self.mode, self.steps, self.drawn = mode, steps, 0

    def say(self, text: str = "") -> None:
        """A line that stays."""
        if self.mode != "quiet":
            self._erase()
            print(text, flush=True)

    def _erase(self) -> None:
        if self.drawn:
            sys.stdout.write(f"\x1b[{self.drawn}F\x1b[J")
            self.drawn = 0

    def show(self, rules: Dict[str, Rule], courses: Dict[str, Course]) -> None:
        """After a step of all."""
        step = max(len(course.losses) for course in courses.values())
        if self.mode == "live":
            lines = [self._line(rules[name], course, columns() or 80) for name, course in courses.items()]
            self._erase()
            sys.stdout.write("".join(line + "\n" for line in [f"step {step}/{self.steps}", *lines]))
            sys.stdout.flush()
            self.drawn = len(lines) + 1
        elif self.mode == "lines" and (step == self.steps or step % max(1, self.steps // 10) == 0):
            print(f"step {step:>5}/{self.steps}  " + "  ".join(
                f"{rules[name].name} {course.smooth()[-1]:.4f}" for name, course in courses.items()), flush=True)

    @staticmethod
    def _line(rule: Rule, course: Course, width: int) -> str:
        recent = sorted(course.seconds[-20:])
        return (f"{rule.name:<8} loss {course.smooth()[-1]:<8.4f} {recent[len(recent) // 2] * 1e3:>6.1f} ms a step  "
                + sparkline(course.losses, max(8, min(40, width - 42))))[:width - 1]

    def close(self) -> None:
        """Leaves the last block standing."""
        self.drawn = 0
