#!/usr/bin/env python3
"""A step of the optimizers beside others': bench.py [--elements N] [--threads N] [--rounds N] [--shampoo FOLDER]
[--first-order] [--muon] [--quick].

AdamW: one step of a model of N weights (a GPT's mixture of large and small parameters), in all three types. Another is
of 200 parameters of 1000 weights each, where the work around the elements counts most. The ways take turns, round by
round, after a pause each. "At least" is the fastest round, and the ratio that of a round, in the median. An element
costs libdc 28 bytes of memory in every type, in float32 16 read and 12 written. That gives the bandwidth. PyTorch keeps
moments of the weights' type and no float32 copy, so for 16 bits it costs half of that. "copy" is PyTorch's copy of one
float32 array into another on as many threads, 8 bytes an element. It is no limit: ordinary stores first read the line
that they write, which a copy's 8 bytes leave out, and AdamW has read its lines already.

Muon: one step on 12 matrices [W, W] and [W, 4 W], W = 512 and 1024, of float32 weights. All products are
bfloat16, but where it says float32.

Second order: a step on matrices [W, W] and [W, 4 W], W = 512, with a refresh of roots or bases every 10 steps. Its time
is that of ten steps over ten. FOLDER is a checkout of github.com/facebookresearch/optimizers. Its Distributed Shampoo
takes part with the same blocks, frequency and graft, and its SOAP. --quick: fewer elements, layers and rounds."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Tuple

import torch
from libdc import optim

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import machine  # noqa: E402

BYTES = 28  # an element's
WIDTH, PERIOD = 512, 10
PAUSE = 0.02  # seconds: PyTorch's threads look for work for some milliseconds, on the cores that the next one needs


Shapes = List[Tuple[int, ...]]
SMALL: Shapes = [(1000,)] * 200


def model(elements: int) -> Shapes:
    """Square matrices, each with a bias and two vectors of a normalisation."""
    width = 768
    count = max(1, elements // (width * width + 3 * width))
    return [(width, width), (width,), (width,), (width,)] * count


def parameters(shapes: Shapes, dtype: torch.dtype) -> List[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for p in made:
        p.grad = torch.randn(p.shape).to(dtype)
    return made


def ways(shapes: Shapes, dtype: torch.dtype) -> Dict[str, Callable[[], Any]]:
    own = {name: parameters(shapes, dtype) for name in ("libdc", "fused", "foreach")}
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
            time.sleep(PAUSE)
            begin = time.perf_counter()
            way()
            if number >= 2:
                times[name].append(time.perf_counter() - begin)
    return times


def first_order(a: argparse.Namespace) -> None:
    for title, shapes in (("a model", model(a.elements)), ("small ones", SMALL)):
        elements = sum(math.prod(shape) for shape in shapes)
        print(f"\nAdamW, {title}: {len(shapes)} parameters, {elements / 1e6:.1f} million weights")
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            times = measure(ways(shapes, dtype), a.rounds)
            for name, own in times.items():
                rate = elements * (8 if name == "copy" else BYTES) / min(own) / 1e9
                known = dtype == torch.float32 or name in ("libdc", "copy")
                ratio = statistics.median(base / t for base, t in zip(times["torch fused"], own))
                print(f"{str(dtype)[6:]:9} {name:14} {statistics.median(own) * 1e3:8.2f} ms, at least "
                      f"{min(own) * 1e3:8.2f} {f'{rate:6.1f} GB/s' if known else '':11} {ratio:6.2f} times torch fused")


def muon(a: argparse.Namespace) -> None:
    for width in (512, 1024):
        shapes: Shapes = [(width, 4 * width if number % 3 == 2 else width) for number in range(12)]
        kinds = {"libdc": lambda params: optim.Muon(params, lr=0.02),
                 "libdc, float32": lambda params: optim.Muon(params, lr=0.02, precision="float32"),
                 "torch": lambda params: torch.optim.Muon(params, lr=0.02)}
        times = measure({name: make(parameters(shapes, torch.float32)).step for name, make in kinds.items()}, a.rounds)
        elements = sum(map(math.prod, shapes))
        print(f"\nMuon: {len(shapes)} matrices of {width} rows, {elements / 1e6:.1f} million weights")
        for name, own in times.items():
            ratio = statistics.median(base / t for base, t in zip(times["torch"], own))
            print(f"{name:20} {statistics.median(own) * 1e3:8.2f} ms, at least {min(own) * 1e3:8.2f} {ratio:6.2f} "
                  "times torch")


# ---- second order ----


def layers(count: int) -> List[torch.nn.Parameter]:
    """Weights whose gradients have spectra that decay."""
    made = []
    for number in range(count):
        shape = (WIDTH, 4 * WIDTH if number % 3 == 2 else WIDTH)
        made.append(torch.nn.Parameter(torch.randn(shape) / shape[1] ** 0.5))
        made[-1].grad = torch.empty(shape)
    return made


def fill(params: List[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        scale = torch.arange(1, WIDTH + 1) ** -1.0
        assert p.grad is not None
        p.grad.copy_(scale[:, None] * torch.randn(p.shape, generator=generator))


def facebook(folder: str) -> Dict[str, Callable[[List[torch.nn.Parameter]], torch.optim.Optimizer]]:
    if not folder:
        return {}
    sys.path.insert(0, folder)
    try:
        from distributed_shampoo import (  # type: ignore[import-not-found]
            AdamPreconditionerConfig, DefaultShampooConfig, DefaultSOAPConfig, DistributedShampoo)
    except Exception as error:
        print(f"Distributed Shampoo is left out: {error}")
        return {}
    same: Dict[str, Any] = dict(lr=1e-3, max_preconditioner_dim=1024, precondition_frequency=PERIOD, weight_decay=0.01)
    graft = AdamPreconditionerConfig(beta2=0.99, epsilon=1e-8)
    return {
        "Facebook Shampoo": lambda params: DistributedShampoo(
            params, betas=(0.9, 0.99), epsilon=1e-8, grafting_config=graft, start_preconditioning_step=PERIOD,
            preconditioner_config=DefaultShampooConfig, **same),
        "Facebook SOAP": lambda params: DistributedShampoo(
            params, betas=(0.95, 0.95), epsilon=1e-8, preconditioner_config=DefaultSOAPConfig, **same),
    }


def second_order(a: argparse.Namespace) -> None:
    same: Dict[str, Any] = dict(lr=1e-3, weight_decay=0.01, precondition_frequency=PERIOD, max_block=1024)
    shampoo: Dict[str, Any] = dict(betas=(0.9, 0.99), graft_beta2=0.99, **same)
    kinds: Dict[str, Callable[[List[torch.nn.Parameter]], torch.optim.Optimizer]] = {
        "libdc Shampoo": lambda params: optim.Shampoo(params, **shampoo),
        "libdc Shampoo, warm": lambda params: optim.Shampoo(params, tolerance=1e-2, **shampoo),
        "libdc SOAP": lambda params: optim.SOAP(params, **same),
        "libdc AdamW": lambda params: optim.AdamW(params),
        "torch AdamW": lambda params: torch.optim.AdamW(params, fused=True),
        **facebook(a.shampoo),
    }
    params = {name: layers(a.layers) for name in kinds}
    made = {name: make(params[name]) for name, make in kinds.items()}
    times: Dict[str, List[float]] = {name: [] for name in kinds}
    for number in range(a.periods + 1):
        for name, optimizer in made.items():
            spent = 0.0
            for step in range(PERIOD):
                fill(params[name], number * PERIOD + step)
                time.sleep(PAUSE)
                begin = time.perf_counter()
                optimizer.step()
                spent += time.perf_counter() - begin
            if number > 0:  # state is made in the first, and the first bases
                times[name].append(spent / PERIOD)
    base = "Facebook Shampoo" if "Facebook Shampoo" in times else "libdc Shampoo"
    elements = sum(p.numel() for p in params["libdc AdamW"])
    print(f"\nsecond order: {elements / 1e6:.1f} million weights, a refresh every {PERIOD} steps")
    for name, own in times.items():
        ratio = statistics.median(b / t for b, t in zip(times[base], own))
        print(f"{name:20} {statistics.median(own) * 1e3:8.2f} ms a step, at least {min(own) * 1e3:8.2f}; {ratio:6.2f} "
              f"times {base}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=40_000_000)
    parser.add_argument("--threads", type=int, default=machine.CORES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shampoo", default="", help="a checkout of facebookresearch/optimizers")
    parser.add_argument("--layers", type=int, default=12, help="matrices of the second-order part")
    parser.add_argument("--periods", type=int, default=7, help="refreshes of the second-order part")
    parser.add_argument("--first-order", action="store_true", help="AdamW alone")
    parser.add_argument("--muon", action="store_true", help="Muon alone")
    parser.add_argument("--quick", action="store_true")
    a = parser.parse_args()
    if a.quick:
        a.elements, a.rounds, a.layers, a.periods = 8_000_000, 7, 3, 3
    torch.set_num_threads(a.threads)
    print(f"{a.threads} threads, PyTorch {torch.__version__}")
    if not a.muon:
        first_order(a)
    if not a.first_order:
        muon(a)
    if not a.first_order and not a.muon:
        second_order(a)


if __name__ == "__main__":
    main()
