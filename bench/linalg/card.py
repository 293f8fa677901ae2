#!/usr/bin/env python3
"""Inverse fourth roots on a card: libdc's, by products alone, beside those of torch.linalg.eigh. card.py [ROWS
[BATCH]] prints a line of JSON. It has milliseconds, the median of rounds in which both take turns, and errors against
float64. It also has the ratio of the other's time to libdc's (the goal is 5 for one float32 matrix of 1024 rows).
LIBDC_TEST_DEVICE=cpu: on the CPU, where it shows only that the script works."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any, Callable, Dict, List

import torch

import libdc
from libdc.linalg import Handle, inverse_root_newton

DEVICE = torch.device(os.environ.get("LIBDC_TEST_DEVICE") or "cuda")
ROUNDS, EPSILON = 7, 1e-4


def matrices(rows: int, batch: int) -> torch.Tensor:
    """Symmetric, with the eigenvalues of a power law, as Shampoo's are."""
    random = torch.Generator().manual_seed(3)
    q, _ = torch.linalg.qr(torch.randn(batch, rows, rows, dtype=torch.float64, generator=random))
    a = q * torch.arange(1, rows + 1, dtype=torch.float64) ** -2 @ q.mT
    return ((a + a.mT) / 2).to(DEVICE)


def by_eigh(a: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(a)
    return vectors * (values.clamp(min=0) + epsilon).pow(-0.25).unsqueeze(-2) @ vectors.mT


def milliseconds(way: Callable[[], Any]) -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    way()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3


def main() -> None:
    given = [int(argument) for argument in sys.argv[1:]]
    rows, batch = given + [1024, 1][len(given):]
    torch.backends.cuda.matmul.allow_tf32 = False
    handle = Handle(device=libdc.Device(DEVICE.type))
    wide = matrices(rows, batch)
    a, out = wide.float(), torch.empty_like(wide, dtype=torch.float32)
    epsilon = EPSILON * a.double().abs().sum(-1).amax(-1, keepdim=True)  # inverse_root_newton()'s
    infos: List[Any] = []
    ways: Dict[str, Callable[[], Any]] = {
        "newton": lambda: inverse_root_newton(a, 4, eps_rel=EPSILON, out=out, info=infos, handle=handle),
        "eigh": lambda: by_eigh(a, epsilon.float()),
    }
    times: Dict[str, List[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            spent = milliseconds(way)
            if number > 0:  # the first is a warm-up
                times[name].append(spent)
    right = by_eigh(wide, epsilon)
    found = {"newton": out.double(), "eigh": by_eigh(a, epsilon.float()).double()}
    figures: Dict[str, Any] = {"rows": rows, "batch": batch}
    for name in ways:
        figures[f"{name}_ms"] = statistics.median(times[name])
        figures[f"{name}_error"] = float((found[name] - right).norm() / right.norm())
    figures["times_as_fast"] = statistics.median(e / n for e, n in zip(times["eigh"], times["newton"]))
    figures["iterations"] = max(info.iterations for info in infos)
    assert all(info.ok for info in infos) and figures["newton_error"] < 2e-3, figures
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
