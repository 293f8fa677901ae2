#!/usr/bin/env python3
"""Bounded products on a card, of matrices in files that the system holds in memory, beside one plain product of the
same matrices in the card's. card_bounded.py [ROWS] prints a line of JSON. It has milliseconds, the median of rounds in
which all take turns, with a twentieth, a fifth and all of the matrices' bytes as a budget. It also has the ratio of
each to the plain product's time, and the least gigabytes per second that are read and written. LIBDC_TEST_DEVICE=cpu:
on the CPU, where it shows only that the script works."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List

import torch

import libdc
from libdc.linalg import FileMatrix, Handle, matmul, matmul_bounded

DEVICE = torch.device(os.environ.get("LIBDC_TEST_DEVICE") or "cuda")
ROUNDS = 5


def milliseconds(way: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    way()  # calls block until done
    return (time.perf_counter() - begun) * 1e3


def main() -> None:
    rows = int((sys.argv[1:] or ["8192"])[0])
    device, figures = libdc.Device(DEVICE.type), {"rows": rows}
    nbytes = 3 * 4 * rows**2
    with tempfile.TemporaryDirectory() as folder:
        a, b = (torch.randn(rows, rows, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
        files: List[Any] = [FileMatrix(os.path.join(folder, name), (rows, rows)) for name in "abc"]
        for matrix, file in zip((a, b, a), files):
            matrix.numpy().tofile(file.file)
        here = [matrix.to(DEVICE) for matrix in (a, b)]
        out = torch.empty_like(here[0])
        plain = Handle(device=device)
        ways: Dict[str, Callable[[], Any]] = {"plain": lambda: matmul(*here, out=out, handle=plain)}
        for part in (20, 5, 1):  # each with a handle of its own, which keeps what it took
            ways[f"files_{100 // part}"] = lambda part=part, handle=Handle(device=device): matmul_bounded(
                files[0], files[1], nbytes // part, out=files[2], handle=handle)
        times: Dict[str, List[float]] = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            for name, way in ways.items():
                spent = milliseconds(way)
                if number > 0:  # the first is a warm-up
                    times[name].append(spent)
        found = torch.from_file(files[2].file, size=rows**2).reshape(rows, rows)
        want = a[:64].double() @ b.double()
        figures["error"] = float((found[:64].double() - want).norm() / want.norm())
    for name, spent in times.items():
        figures[f"{name}_ms"] = statistics.median(spent)
        if name != "plain":
            figures[f"{name}_as_plain"] = statistics.median(n / p for n, p in zip(spent, times["plain"]))
            figures[f"{name}_gb_s"] = nbytes * 1e-6 / figures[f"{name}_ms"]
    assert figures["error"] < 1e-5, figures
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
