#!/usr/bin/env python3
"""The transformer layer, forward and backward, against what PyTorch users run today, interleaved in one process:

    python bench/bench_layer.py --save                       every row
    python bench/bench_layer.py --save --quick               every row, three rounds without `compiled`
    python bench/bench_layer.py --models bert-large --shapes 8x128 --dtypes float32 --dropout 0.1 --threads 1

Peers: `eager`, BertLayer as Hugging Face writes it; `sdpa`, the same around scaled_dot_product_attention; `compiled`,
torch.compile of that; `encoder`, nn.TransformerEncoderLayer. "GEMM" are the layer's matrix products alone, forward and
backward, by the fastest library that PyTorch has for each of them (torch.mm, torch.bmm, oneDNN by its own name). They
are no limit where libdc's own products are faster. A round runs the products, the layer without dropout and the layer,
then each peer, then the first three again in reverse. Before each, a pause lets the threads of the one before stop
spinning. So comparisons are between times that lie close together: "of GEMM", "p cost" and "fastest peer" are medians
over the rounds of ratios within a round. "p cost" is the layer's time over that of the same layer without dropout;
times and rates are the least of all. On a machine that others use, take the ratios of one thread, and with --cpu of its
processor time. "kept" is what stays in memory between forward and backward, weights not counted; for libdc also with
the flags normalize_invertible and gelu_checkpoint, and not for `compiled`."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
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
PAUSE = 0.01  # seconds; libgomp's threads spin for a few thousandths after their last work


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


def step_of(model: nn.Module, x: Tensor, mask: Tensor, dy: Tensor, clock: Callable[[], float]) -> Callable[[], float]:
    parameters = list(model.parameters())

    def step() -> float:
        start = clock()
        model(x, mask).backward(dy)
        for parameter in parameters:
            parameter.grad = None
        x.grad = None
        return clock() - start

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


class Products:
    """The layer's matrix products, each by every library at hand."""

    def __init__(self, batch: int, seq: int, sizes: tuple, dtype: torch.dtype) -> None:
        hidden, heads, intermediate = sizes
        tokens, d = batch * seq, hidden // heads
        self.jobs: List[List[Callable[[], Any]]] = []
        one_dnn = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None

        def add(a: Tensor, b: Tensor) -> None:
            c = a.new_empty(*a.shape[:-1], b.shape[-1])
            self.jobs.append([lambda: (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out=c)])
            if one_dnn is not None and a.dim() == 2:
                self.jobs[-1].append(lambda: one_dnn(a, b.t(), None, "none", [], ""))

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype)

        for n, k in ((3 * hidden, hidden), (hidden, hidden), (intermediate, hidden), (hidden, intermediate)):
            add(random(tokens, k), random(n, k).t())
            add(random(tokens, n), random(n, k))
            add(random(tokens, n).t(), random(tokens, k))
        for _ in range(3):
            add(random(batch * heads, seq, d), random(batch * heads, d, seq))
            add(random(batch * heads, seq, seq), random(batch * heads, seq, d))
        self.best = [[math.inf] * len(job) for job in self.jobs]

    def run(self, clock: Callable[[], float]) -> float:
        """Seconds of all products, each by the library that has been the fastest for it so far."""
        total = 0.0
        for job, best in zip(self.jobs, self.best):
            times = []
            for i, function in enumerate(job):
                start = clock()
                function()
                times.append(clock() - start)
                best[i] = min(best[i], times[i])
            total += times[best.index(min(best))]
        return total


def row(name: str, batch: int, seq: int, dtype_name: str, dropout: float, threads: int, options: argparse.Namespace
        ) -> dict:
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes, dtype = MODELS[name], getattr(torch, dtype_name)
    clock = time.process_time if options.cpu else time.perf_counter
    x = torch.randn(batch, seq, sizes[0], dtype=dtype, requires_grad=True)
    dy, mask = torch.randn(batch, seq, sizes[0], dtype=dtype), torch.zeros(batch, 1, 1, seq, dtype=dtype)
    config = LayerConfig(*sizes, attn_dropout_ratio=dropout, hidden_dropout_ratio=dropout, gelu="erf", dtype=dtype_name,
                         pre_layer_norm=False, threads=threads)
    lean = LayerConfig(**{**config.__dict__, "normalize_invertible": True, "gelu_checkpoint": True})
    dry = LayerConfig(**{**config.__dict__, "attn_dropout_ratio": 0.0, "hidden_dropout_ratio": 0.0})
    models: Dict[str, nn.Module] = {
        "libdc": dct.TransformerLayer(config), "libdc, p=0": dct.TransformerLayer(dry),
        "eager": Bert(*sizes, dropout, "eager"), "sdpa": Bert(*sizes, dropout, "sdpa"),
        "compiled": Bert(*sizes, dropout, "sdpa"),
        "encoder": Encoder(sizes[0], sizes[1], sizes[2], dropout, "gelu", layer_norm_eps=1e-12, batch_first=True),
    }  # fmt: skip
    unwanted = {"eager", "sdpa", "compiled", "encoder"} - set(options.peers) | (set() if dropout else {"libdc, p=0"})
    models = {key: model.to(dtype) for key, model in models.items() if key not in unwanted}
    kept = {key: kept_bytes(model, x, mask) for key, model in models.items() if key != "compiled"}
    kept["libdc, flags"] = kept_bytes(dct.TransformerLayer(lean).to(dtype), x, mask)
    if "compiled" in models:
        models["compiled"].compile()
    products = Products(batch, seq, sizes, dtype)
    runs = {key: step_of(model, x, mask, dy, clock) for key, model in models.items()}
    near = {"GEMM": lambda: products.run(clock),
            **{key: runs.pop(key) for key in ("libdc, p=0", "libdc") if key in runs}}
    times: Dict[str, List[List[float]]] = {key: [] for key in (*near, *runs)}
    for run in (*near.values(), *runs.values()):
        run()
    quiet, cpu = machine.Quiet(), time.process_time()
    end = time.monotonic() + options.seconds
    quiet.begin()
    while len(times["libdc"]) < options.rounds or time.monotonic() < end:
        for found in times.values():
            found.append([])
        for key, run in (*near.items(), *runs.items(), *reversed(near.items())):
            time.sleep(PAUSE)
            times[key][-1].append(run())
    quiet.end()

    def ratio(over: str, under: str) -> float:
        return statistics.median(statistics.mean(a) / statistics.mean(b) for a, b in zip(times[over], times[under]))

    cost = Layer(config).cost(batch, seq)
    best = {key: min(map(min, found)) for key, found in times.items()}
    best["GEMM"] = sum(map(min, products.best))
    return {"model": name, "batch": batch, "seq": seq, "dtype": dtype_name, "dropout": dropout, "threads": threads,
            "flops": cost.forward_flops + cost.backward_flops, "seconds": best, "rounds": len(times["libdc"]),
            "kept": kept, "foreign": quiet.foreign(time.process_time() - cpu), "of_gemm": ratio("GEMM", "libdc"),
            "dropout_cost": ratio("libdc", "libdc, p=0") - 1 if dropout else 0.0,
            "faster": min((ratio(key, "libdc") for key in options.peers), default=0.0)}


def table(rows: List[dict]) -> str:
    names = [key for key in rows[0]["seconds"] if key not in ("GEMM", "libdc, p=0")]
    keepers = [*(n for n in names if n != "compiled"), "libdc, flags"]
    lines = ["| row | GEMM GF/s | " + " | ".join(f"{n} ms (GF/s)" for n in names) +
             " | of GEMM | p cost | fastest peer / libdc | kept MB: " + ", ".join(keepers) + " | others |",
             "|---" * (len(names) + 7) + "|"]
    for r in rows:
        cells = [f"{1e3 * r['seconds'][n]:.1f} ({r['flops'] / r['seconds'][n] / 1e9:.0f})" for n in names]
        kept = ", ".join(f"{r['kept'][n] / 1e6:.1f}" for n in keepers)
        label = f"{r['model']} {r['batch']}x{r['seq']} {r['dtype']} p={r['dropout']} t={r['threads']}"
        cost = f"{100 * r['dropout_cost']:.1f} %" if r["dropout"] else ""
        lines.append(f"| {label} | {r['flops'] / r['seconds']['GEMM'] / 1e9:.0f} | " + " | ".join(cells) +
                     f" | {100 * r['of_gemm']:.0f} % | {cost} | {r['faster']:.2f} | {kept} | "
                     f"{100 * r['foreign']:.0f} % |")
    return "\n".join(lines)


def summary(rows: List[dict]) -> str:
    """The goals, and how many rows reach them."""
    lines = []
    ratios = [r["faster"] for r in rows]
    lines.append(f"- faster than the fastest peer: {sum(x > 1 for x in ratios)} of {len(rows)} rows; median "
                 f"{statistics.median(ratios):.2f}, least {min(ratios):.2f} (goal: every row, median 1.15)")
    long = [r["faster"] for r in rows if r["seq"] >= 512 and r["dropout"]]
    if long:
        lines.append(f"- S = 512 with dropout: median {statistics.median(long):.2f}, least {min(long):.2f} (goal: 1.4)")
    for dtype, goal in (("float32", 0.85), ("bfloat16", 0.8)):
        parts = [r["of_gemm"] for r in rows if r["dtype"] == dtype]
        if parts:
            lines.append(f"- of the fastest library's products, {dtype}: {sum(x >= goal for x in parts)} of "
                         f"{len(parts)} rows reach {goal:.0%}; median {statistics.median(parts):.1%}, least "
                         f"{min(parts):.1%}")
    costs = [r["dropout_cost"] for r in rows if r["dropout"]]
    if costs:
        lines.append(f"- dropout costs {statistics.median(costs):.1%} in the median row, at most {max(costs):.1%} "
                     "(goal: 5 %)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--shapes", nargs="*", default=["8x128", "4x512"])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--dropout", nargs="*", type=float, default=[0.0, 0.1])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--peers", nargs="*", default=["eager", "sdpa", "compiled", "encoder"])
    parser.add_argument("--seconds", type=float, default=20, help="for a row, at least")
    parser.add_argument("--rounds", type=int, default=3, help="for a row, at least")
    parser.add_argument("--quick", action="store_true", help="three rounds for each row and no compiled peer")
    parser.add_argument("--cpu", action="store_true", help="processor time; for one thread, on a machine in use")
    parser.add_argument("--save", action="store_true", help="write bench/results/layer-DATE")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rounds = 0, 3
        options.peers = [peer for peer in options.peers if peer != "compiled"]
    rows: List[dict] = []
    for threads in options.threads:
        for name in options.models:
            for shape in options.shapes:
                for dtype in options.dtypes:
                    for ratio in options.dropout:
                        batch, seq = map(int, shape.split("x"))
                        rows.append(row(name, batch, seq, dtype, ratio, threads, options))
                        print(table(rows[-1:]).splitlines()[2], flush=True)
    about = machine.describe()
    text = f"{table(rows)}\n\n{summary(rows)}\n"
    print("\n" + text)
    if options.save:
        stem = RESULTS / f"layer-{about['date'][:10]}"
        stem.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
        stem.with_suffix(".md").write_text(f"{__doc__}\n\n`{shlex.join(['python', *sys.argv])}`, {about['cpu']}, "
                                           f"{about['cores']} cores, {about['date']}, {about['commit']}, "
                                           f"{about['packages']}\n\n{text}")


if __name__ == "__main__":
    main()
