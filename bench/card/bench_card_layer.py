#!/usr/bin/env python3
"""A BERT layer on a card, forward and backward, beside PyTorch's own under torch.compile, in one interleaved run:

    python bench/card/bench_card_layer.py                      BERT-large, 8192 tokens, bfloat16; prints a line of JSON
    python bench/card/bench_card_layer.py --device cpu --hidden 64 --heads 2 --seq 16 --tokens 32 --rounds 2

"share" is of the card's dense peak: three times the forward's operations (docs/transformer.md; what is computed again
is not counted) over the median round's time. "ratio" is the median over the rounds of PyTorch's time over libdc's in
the same round: more than 1, and libdc is faster. "kept" is what stays in memory between forward and backward, by
autograd's account, beside the formula of dc_layer_cost; of PyTorch's layer before it is compiled. scripts/gpu-check
runs it."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench_layer import Bert, kept_bytes
from torch import nn

import libdc.torch as dct
from libdc.transformer import LayerConfig

# Dense peaks of NVIDIA's data sheets, in 10^12 operations in a second of 16-bit types with float32 sums.
PEAKS = {"H200 NVL": 835.0, "H200": 989.4, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.4, "A100": 312.0}


def peak_of(card: str) -> Optional[float]:
    """None: a card that is not known here."""
    return next((peak for name, peak in PEAKS.items() if re.search(name.replace(" ", ".*"), card)), None)


def timer(device: torch.device) -> Callable[[Callable[[], None], int], float]:
    """From work and a number to the seconds of one of as many, by the card's own clock where there is a card."""

    def on_card(work: Callable[[], None], count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    def here(work: Callable[[], None], count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - begin) / count

    return on_card if device.type == "cuda" else here


def measure(options: argparse.Namespace) -> Dict[str, Any]:
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    batch, seq, inner = options.tokens // options.seq, options.seq, 4 * options.hidden
    config = LayerConfig(options.hidden, options.heads, gelu="erf", dtype=options.dtype, pre_layer_norm=False)
    ours = dct.TransformerLayer(config, device=device)
    theirs = Bert(options.hidden, options.heads, inner, 0.0, "sdpa").to(device, dtype)
    x = torch.randn(batch, seq, options.hidden, device=device, dtype=dtype, requires_grad=True)
    dy, mask = torch.randn_like(x), torch.zeros(batch, 1, 1, seq, device=device, dtype=dtype)
    kept = {"libdc": kept_bytes(ours, x, mask), "compiled": kept_bytes(theirs, x, mask)}
    formula = ours.kept_bytes(batch, seq)
    theirs.compile()

    def step(model: nn.Module) -> Callable[[], None]:
        tensors = [x, *model.parameters()]

        def run() -> None:
            model(x, mask).backward(dy)
            for tensor in tensors:
                tensor.grad = None

        return run

    steps, seconds = {"libdc": step(ours), "compiled": step(theirs)}, timer(device)
    times: Dict[str, List[float]] = {name: [] for name in steps}
    for run in steps.values():  # cuBLASLt's choices, the compiler, the allocators
        seconds(run, 3)
    for number in range(options.rounds):
        for name in sorted(steps, reverse=number % 2 == 1):
            times[name].append(seconds(steps[name], options.steps))
    tokens = batch * seq
    forward = (8 * options.hidden**2 + 4 * options.hidden * inner + 4 * options.hidden * seq) * tokens
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = options.peak or peak_of(card)

    def report(name: str) -> Dict[str, Any]:
        median = statistics.median(times[name])
        rate = 3 * forward / median / 1e12
        return {"ms": median * 1e3, "tflops": rate, "share": rate / peak if peak else None, "kept": kept[name]}

    return {"card": card, "peak_tflops": peak, "tokens": tokens, "seq": seq, "hidden": options.hidden,
            "heads": options.heads, "dtype": options.dtype, "rounds": options.rounds, "flops": 3 * forward,
            "kept_formula": formula, **{name: report(name) for name in times},
            "ratio": statistics.median(b / a for a, b in zip(times["libdc"], times["compiled"]))}


def parse(arguments: List[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--peak", type=float, help="of the card, in 10^12 operations in a second")
    for name, value in (("hidden", 1024), ("heads", 16), ("tokens", 8192), ("seq", 512), ("rounds", 9), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(arguments)
    if options.tokens % options.seq:
        parser.error(f"--tokens {options.tokens}: must be a multiple of --seq {options.seq}")
    return options


def main() -> None:
    print(json.dumps(measure(parse(sys.argv[1:]))))


if __name__ == "__main__":
    main()
