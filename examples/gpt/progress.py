"""The display of a run: a block that is drawn over itself on a terminal, plain lines elsewhere, or nothing."""
from __future__ import annotations

import os
import sys
import time
from typing import Any, Dict, List


def size(count: float, unit: str = "B") -> str:
    for prefix in ("", "k", "M", "G"):
        if abs(count) < 1000 or prefix == "G":
            return f"{count:.0f} {unit}" if not prefix else f"{count:.1f} {prefix}{unit}"
        count /= 1000
    raise AssertionError


def clock(seconds: float) -> str:
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def columns() -> int:
    """The width of the terminal that shows our lines, 0 if there is none. It is this process's terminal, or that of
    libdc's launcher, which forwards lines."""
    launcher = [f"/proc/{os.getppid()}/fd/1"] if "LIBDC_GROUP" in os.environ else []
    for path in ["/proc/self/fd/1", *launcher]:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        except OSError:
            continue
        try:
            return os.get_terminal_size(fd).columns
        except OSError:
            continue
        finally:
            os.close(fd)
    return 0


def _blocks() -> str:
    try:
        "▁█".encode(sys.stdout.encoding or "ascii")
        return "▁▂▃▄▅▆▇█"
    except UnicodeEncodeError:
        return "_.-=*%#"


def sparkline(values: List[float], width: int) -> str:
    """A chart of the values in `width` characters."""
    marks, width = _blocks(), min(width, len(values))
    cuts = [values[i * len(values) // width:(i + 1) * len(values) // width] for i in range(width)]
    means = [sum(c) / len(c) for c in cuts]
    low, high = min(means), max(means)
    return "".join(marks[int((m - low) / ((high - low) or 1) * (len(marks) - 1) + 0.5)] for m in means)


class Screen:
    """mode: "live", a block that is drawn over itself; "lines" or "quiet"."""

    def __init__(self, mode: str) -> None:
        self.mode, self.drawn = mode, 0

    def print(self, text: str = "") -> None:
        """Prints a line above the live block."""
        if self.mode != "quiet":
            self._erase()
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def _erase(self) -> None:
        if self.drawn:
            sys.stdout.write(f"\x1b[{self.drawn}F\x1b[J")
            self.drawn = 0

    def draw(self, lines: List[str], width: int) -> None:
        """Draws the live block over the previous one."""
        self._erase()
        sys.stdout.write("".join(line[:width - 1] + "\n" for line in lines))
        sys.stdout.flush()
        self.drawn = len(lines)

    def close(self) -> None:
        """Keeps the last block on the terminal."""
        self.drawn = 0


class Progress(Screen):
    def __init__(self, mode: str, first: int, last: int) -> None:
        super().__init__(mode)
        self.first, self.last = first, last
        self.begin = time.monotonic()
        self.losses: List[float] = []
        self.seconds: List[float] = []
        self.every = max(1, (last - first) // 20)

    def step(self, row: Dict[str, Any]) -> None:
        """Shows one step; row is its line of metrics.jsonl."""
        self.losses.append(row["loss"])
        self.seconds.append(row["seconds"])
        if self.mode == "quiet":
            return
        recent = sorted(self.seconds[-20:])[len(self.seconds[-20:]) // 2]
        left = clock(recent * (self.last - row["step"]))
        moved = row["gather_wire_bytes"] + row["reduce_wire_bytes"]
        if self.mode == "lines":
            if row["step"] % self.every == 0 or row["step"] in (self.first + 1, self.last):
                print(f"step {row['step']:>5}/{self.last}  loss {row['loss']:.4f}  "
                      f"{row['tokens_per_s']:>6.0f} tokens/s  gathered {size(row['gathered_bytes'])} now, "
                      f"{size(row['gathered_peak_bytes'])} peak  wire {size(moved)} a step  {left} left", flush=True)
            return
        width = columns() or 80
        bar = min(40, width - 44)
        full = bar * row["step"] // max(self.last, 1)
        dash, rest = ("━", "─") if len(_blocks()) == 8 else ("#", ".")
        lines = [
            f"step {row['step']}/{self.last}  {dash * full}{rest * (bar - full)}  {left} left, "
            f"{clock(time.monotonic() - self.begin)} so far",
            f"loss {row['loss']:.4f}  {sparkline(self.losses, max(8, min(40, width - 60)))}  "
            f"{row['tokens_per_s']:.0f} tokens/s, {row['seconds'] * 1e3:.0f} ms a step",
            f"gathered {size(row['gathered_bytes'])} now, {size(row['gathered_peak_bytes'])} at peak; "
            f"wire {size(moved)} a step; gradient norm {row['grad_norm']:.2f}",
        ]
        self.draw(lines, width)
