#!/usr/bin/env python3
"""The transformer layer, forward and backward, against what PyTorch users run today, interleaved in one process:

    python bench/bench_layer.py                              every row, and a table under bench/results
    python bench/bench_layer.py --models bert-large --shapes 8x128 --dtypes float32 --dropout 0.1 --threads 1

Peers: `eager`, BertLayer as Hugging Face writes it; `sdpa`, the same around scaled_dot_product_attention; `compiled`,
torch.compile of that; `encoder`, nn.TransformerEncoderLayer. `products` are the layer's matrix products alone, forward and
backward, by torch.mm and torch.bmm: the rate of the best library on these shapes, and the floor. A time is the least of
the rounds, each of which runs every variant once; on a machine that others use, compare variants only within a row.
"kept" is what stays in memory between forward and backward, weights not counted."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import machine
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import libdc.torch as dct
from libdc.transformer import Layer, LayerConfig

MODELS = {"bert-base": (768, 12, 3072), "bert-large": (1024, 16, 4096)}
RESULTS = Path(__file__).parent / "results"


class Bert(nn.Module):
    """Post-LN; attention "eager" materialises S x S."""

    def __init__(self, hidden: int, heads: int, intermediate: int, ratio: float, attention: str) -> None:
        super().__init__()
        self.heads, self.ratio, self.attention = heads, ratio, attention
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.ln1, self.ln2 = nn.LayerNorm(hidden, eps=1e-12), nn.LayerNorm(hidden, eps=1e-12)
        self.fc1, self.fc2 = nn.Linear(hidden, intermediate), nn.Linear(intermediate, hidden)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (part(x).view(b, s, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.attention == "eager":
            p = F.softmax(q @ k.transpose(-1, -2) / math.sqrt(h // self.heads) + mask, -1)
            c = F.dropout(p, self.ratio) @ v
        else:
            c = F.scaled_dot_product_attention(q, k, v, dropout_p=self.ratio)
        x = self.ln1(x + F.dropout(self.o(c.transpose(1, 2).reshape(b, s, h)), self.ratio))
        return self.ln2(x + F.dropout(self.fc2(F.gelu(self.fc1(x))), self.ratio))


class Encoder(nn.TransformerEncoderLayer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def step_of(model: nn.Module, x: Tensor, mask: Tensor, dy: Tensor) -> Callable[[], None]:
    parameters = list(model.parameters())

    def step() -> None:
        model(x, mask).backward(dy)
        for parameter in parameters:
            parameter.grad = None
        x.grad = None

    return step


def kept_bytes(model: nn.Module, x: Tensor, mask: Tensor) -> int:
    """Bytes of the storages that autograd keeps, the input included, the weights and the mask not."""
    skip = {t.untyped_storage().data_ptr() for t in (*model.parameters(), mask)}
    seen: Dict[int, int] = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}

    def note(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in skip:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        model(x, mask)
    return sum(seen.values())


def products(batch: int, seq: int, sizes: tuple, dtype: torch.dtype) -> Callable[[], None]:
    hidden, heads, intermediate = sizes
    tokens, jobs = batch * seq, []

    def add(function: Any, *shapes: tuple) -> None:
        a, b, c = (torch.randn(shape, dtype=dtype) for shape in shapes)
        jobs.append((function, a, b, c))

    for n, k in ((3 * hidden, hidden), (hidden, hidden), (intermediate, hidden), (hidden, intermediate)):
        add(torch.mm, (tokens, k), (k, n), (tokens, n))
        add(torch.mm, (tokens, n), (n, k), (tokens, k))
        add(torch.mm, (n, tokens), (tokens, k), (n, k))
    d = hidden // heads
    for _ in range(3):
        add(torch.bmm, (batch * heads, seq, d), (batch * heads, d, seq), (batch * heads, seq, seq))
        add(torch.bmm, (batch * heads, seq, seq), (batch * heads, seq, d), (batch * heads, seq, d))

    def run() -> None:
        for function, a, b, c in jobs:
            function(a, b, out=c)

    return run


def row(name: str, batch: int, seq: int, dtype_name: str, ratio: float, threads: int, seconds: float,
        peers: List[str]) -> dict:
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes, dtype = MODELS[name], getattr(torch, dtype_name)
    x = torch.randn(batch, seq, sizes[0], dtype=dtype, requires_grad=True)
    dy, mask = torch.randn(batch, seq, sizes[0], dtype=dtype), torch.zeros(batch, 1, 1, seq, dtype=dtype)
    config = LayerConfig(*sizes, attn_dropout_ratio=ratio, hidden_dropout_ratio=ratio, gelu="erf", dtype=dtype_name,
                         pre_layer_norm=False, threads=threads)
    lean = LayerConfig(**{**config.__dict__, "normalize_invertible": True, "gelu_checkpoint": True})
    models: Dict[str, nn.Module] = {
        "libdc": dct.TransformerLayer(config), "libdc, all flags": dct.TransformerLayer(lean),
        "eager": Bert(*sizes, ratio, "eager"), "sdpa": Bert(*sizes, ratio, "sdpa"),
        "compiled": Bert(*sizes, ratio, "sdpa"),
        "encoder": Encoder(sizes[0], sizes[1], sizes[2], ratio, "gelu", layer_norm_eps=1e-12, batch_first=True),
    }  # fmt: skip
    models = {key: model.to(dtype) for key, model in models.items() if key.startswith("libdc") or key in peers}
    kept = {key: kept_bytes(model, x, mask) for key, model in models.items()}
    if "compiled" in models:
        models["compiled"].compile()
    runs = {key: step_of(model, x, mask, dy) for key, model in models.items()}
    runs["products"] = products(batch, seq, sizes, dtype)
    times: Dict[str, List[float]] = {key: [] for key in runs}
    for run in runs.values():
        run()
    quiet, cpu = machine.Quiet(), time.process_time()
    end = time.monotonic() + seconds
    quiet.begin()
    while len(times["libdc"]) < 3 or time.monotonic() < end:
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            times[key].append(time.perf_counter() - start)
    quiet.end()
    cost = Layer(config).cost(batch, seq)
    flops = cost.forward_flops + cost.backward_flops
    best = {key: min(values) for key, values in times.items()}
    return {"model": name, "batch": batch, "seq": seq, "dtype": dtype_name, "dropout": ratio, "threads": threads,
            "flops": flops, "seconds": best, "rounds": len(times["libdc"]), "kept": kept,
            "foreign": quiet.foreign(time.process_time() - cpu),
            "of_products": best["products"] / best["libdc"],
            "faster": min((best[key] for key in peers), default=0) / best["libdc"]}


def table(rows: List[dict]) -> str:
    names = [key for key in rows[0]["seconds"] if key != "products"]
    lines = ["| row | products GF/s | " + " | ".join(f"{n} ms (GF/s)" for n in names) +
             " | of products | fastest peer / libdc | kept MB: " + ", ".join(names) + " | others |",
             "|---" * (len(names) + 6) + "|"]
    for r in rows:
        cells = [f"{1e3 * r['seconds'][n]:.1f} ({r['flops'] / r['seconds'][n] / 1e9:.0f})" for n in names]
        kept = ", ".join(f"{r['kept'][n] / 1e6:.1f}" for n in names)
        label = f"{r['model']} {r['batch']}x{r['seq']} {r['dtype']} p={r['dropout']} t={r['threads']}"
        lines.append(f"| {label} | {r['flops'] / r['seconds']['products'] / 1e9:.0f} | " + " | ".join(cells) +
                     f" | {100 * r['of_products']:.0f} % | {r['faster']:.2f} | {kept} | {100 * r['foreign']:.0f} % |")
    ratios = sorted(r["faster"] for r in rows)
    lines += ["", f"Faster than the fastest peer in {sum(x > 1 for x in ratios)} of {len(ratios)} rows; the median row "
              f"{ratios[len(ratios) // 2]:.2f} times."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--shapes", nargs="*", default=["8x128", "4x512"])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--dropout", nargs="*", type=float, default=[0.0, 0.1])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--peers", nargs="*", default=["eager", "sdpa", "compiled", "encoder"])
    parser.add_argument("--seconds", type=float, default=12, help="for a row")
    parser.add_argument("--save", action="store_true", help="write bench/results/layer-DATE")
    options = parser.parse_args()
    rows = []
    for threads in options.threads:
        for name in options.models:
            for shape in options.shapes:
                for dtype in options.dtypes:
                    for ratio in options.dropout:
                        batch, seq = map(int, shape.split("x"))
                        rows.append(row(name, batch, seq, dtype, ratio, threads, options.seconds, options.peers))
                        print(table(rows[-1:]).splitlines()[2], flush=True)
    text = table(rows)
    print(text)
    if options.save:
        stem = RESULTS / f"layer-{datetime.date.today()}"
        stem.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        stem.with_suffix(".md").write_text(f"{__doc__}\n\n{text}\n")


if __name__ == "__main__":
    main()
