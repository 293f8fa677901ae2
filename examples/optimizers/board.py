"""The live display: a line for each optimizer, redrawn in place on a terminal; plain lines elsewhere."""
from __future__ import annotations

from typing import Dict, List

from progress import Screen, columns, sparkline
from rules import Rule


class Course:
    """One optimizer's results so far."""

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


class Board(Screen):
    def __init__(self, mode: str, steps: int) -> None:
        super().__init__(mode)
        self.steps = steps

    def show(self, rules: Dict[str, Rule], courses: Dict[str, Course]) -> None:
        """Shows the results after all optimizers have made a step."""
        step = max(len(course.losses) for course in courses.values())
        if self.mode == "live":
            width = columns() or 80
            lines = [self._line(rules[name], course, width) for name, course in courses.items()]
            self.draw([f"step {step}/{self.steps}", *lines], width)
        elif self.mode == "lines" and (step == self.steps or step % max(1, self.steps // 10) == 0):
            print(f"step {step:>5}/{self.steps}  " + "  ".join(
                f"{rules[name].name} {course.smooth()[-1]:.4f}" for name, course in courses.items()), flush=True)

    @staticmethod
    def _line(rule: Rule, course: Course, width: int) -> str:
        recent = sorted(course.seconds[-20:])
        return (f"{rule.name:<8} loss {course.smooth()[-1]:<8.4f} {recent[len(recent) // 2] * 1e3:>6.1f} ms a step  "
                + sparkline(course.losses, max(8, min(40, width - 42))))
