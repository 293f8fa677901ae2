#!/usr/bin/env python3
"""AdamW beside PyTorch's: bench.py [--elements N] [--threads N] [--rounds N].

One step of a model of N float32 weights (a GPT's mixture of large and small parameters). The ways take turns, round by
round; a figure is the fastest round, and the ratio that of a round, in the median. An element costs 28 bytes of memory,
16 read and 12 written, which gives the bandwidth; "copy" is PyTorch's copy of one array into another on as many threads,
8 bytes an element, what the machine can do."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any, Callable, Dict, List

import torch
from libdc import optim

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import machine  # noqa: E402

BYTES = 28  # an element's


def parameters(elements: int) -> List[torch.nn.Parameter]:
    """Square matrices, each with a bias and two vectors of a normalisation."""
    width = 768
    count = max(1, elements // (width * width + 3 * width))
    shapes = [shape for _ in range(count) for shape in ((width, width), (width,), (width,), (width,))]
    made = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def ways(elements: int, dtype: torch.dtype) -> Dict[str, Callable[[], Any]]:
    own = {name: [torch.nn.Parameter(p.detach().to(dtype)) for p in parameters(elements)] for name in
           ("libdc", "fused", "foreach")}
    for params in own.values():
        for p in params:
            p.grad = torch.randn(p.shape).to(dtype)
    source = torch.randn(sum(p.numel() for p in own["libdc"]))
    target = torch.empty_like(source)
    return {
        "libdc": optim.AdamW(own["libdc"]).step,
        "torch fused": torch.optim.AdamW(own["fused"], fused=True).step,
        "torch foreach": torch.optim.AdamW(own["foreach"], foreach=True).step,
        "copy": lambda: target.copy_(source),
    }


def measure(made: Dict[str, Callable[[], Any]], rounds: int) -> Dict[str, List[float]]:
    times: Dict[str, List[float]] = {name: [] for name in made}
    for number in range(rounds + 2):
        for name, way in made.items():
            begin = time.perf_counter()
            way()
            if number >= 2:
                times[name].append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=40_000_000)
    parser.add_argument("--threads", type=int, default=machine.CORES)
    parser.add_argument("--rounds", type=int, default=15)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    print(f"{a.threads} threads, PyTorch {torch.__version__}")
    for dtype in (torch.float32, torch.bfloat16):
        made = ways(a.elements, dtype)
        times = measure(made, a.rounds)
        elements = sum(p.numel() for p in parameters(a.elements))
        for name, own in times.items():
            rate = elements * (8 if name == "copy" else BYTES) / min(own) / 1e9
            ratio = statistics.median(base / t for base, t in zip(times["torch fused"], own))
            rate_text = f"{rate:6.1f} GB/s" if dtype == torch.float32 or name == "copy" else " " * 11
            print(f"{str(dtype)[6:]:9} {name:14} {min(own) * 1e3:8.2f} ms {rate_text} {ratio:6.2f} times torch fused")


if __name__ == "__main__":
    main()
