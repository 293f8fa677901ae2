#!/usr/bin/env python3
"""Pre-trains a small BERT on masked bytes of real text (the sources of Python's standard library), with libdc's
transformer layer, sharded over the ranks by ZeRO-3:

    python -m libdc.run -n 2 examples/bert/train.py                       progress, a plot and metrics in runs/bert
    python -m libdc.run -n 2 examples/bert/train.py --flags --post-ln     with the memory flags; Post-LN
    python examples/bert/train.py --steps 20                              one process

15 % of the bytes are hidden: of these 80 % are a mask byte, 10 % another byte, 10 % as they were (Devlin et al. 2018)."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import libdc.torch as dct
from libdc.transformer import LayerConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "gpt"))
from data import Text  # noqa: E402
from plot import Series, line_chart  # noqa: E402
from progress import Progress, columns, size  # noqa: E402

MASK, VOCABULARY = 256, 257  # the bytes, and the one that hides


class Bert(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        hidden = options.hidden
        self.tokens, self.places = nn.Embedding(VOCABULARY, hidden), nn.Embedding(options.seq, hidden)
        self.layers = nn.ModuleList(dct.TransformerLayer(LayerConfig(
            hidden, options.heads, attn_dropout_ratio=options.dropout, hidden_dropout_ratio=options.dropout,
            num_hidden_layers=options.layers, layer_id=i, seed=options.seed, pre_layer_norm=not options.post_ln,
            normalize_invertible=options.flags, gelu_checkpoint=options.flags, attn_dropout_checkpoint=options.flags,
            threads=options.threads)) for i in range(options.layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def hide(tokens: Tensor, seed: int) -> Tuple[Tensor, Tensor]:
    """(what the model sees, which places it must guess); a function of the seed."""
    rng = torch.Generator().manual_seed(seed)
    draw, kind = (torch.rand(tokens.shape, generator=rng) for _ in range(2))
    chosen = draw < 0.15
    seen = torch.where(chosen & (kind < 0.8), MASK, tokens)
    other = torch.randint(256, tokens.shape, generator=rng)
    return torch.where(chosen & (kind >= 0.8) & (kind < 0.9), other, seen), chosen


def loss_of(model: nn.Module, tokens: Tensor, seed: int) -> Tensor:
    seen, chosen = hide(tokens, seed)
    # Ranks have as many tokens each, and so, nearly, as many hidden ones.
    return F.cross_entropy(model(seen)[chosen], tokens[chosen])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("hidden", 256), ("heads", 4), ("seq", 128), ("batch", 16), ("steps", 300),
                          ("seed", 0), ("stage", 3), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--flags", action="store_true", help="the layer's memory flags")
    parser.add_argument("--post-ln", action="store_true", help="BERT's own placement of the normalisations")
    parser.add_argument("--out", type=Path, default=Path("runs/bert"), help="folder of metrics.jsonl and loss.png")
    return parser.parse_args()


def report(options: argparse.Namespace, rows: List[Dict[str, Any]], held_out: List[Tuple[int, float]]) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chart = line_chart(
        f"BERT of {options.layers} layers, masked bytes, ZeRO-{options.stage}", "step", "loss (nats a byte)",
        [Series("training", [r["step"] for r in rows], [r["loss"] for r in rows], (120, 160, 220)),
         Series("held out", [s for s, _ in held_out], [v for _, v in held_out], (200, 60, 60), 3.0)])
    (options.out / "loss.png").write_bytes(chart)


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    comm = dct.init()
    rank, ranks = comm.rank, comm.size
    if options.batch % ranks:
        raise SystemExit(f"train.py: --batch = {options.batch}, must be a multiple of the {ranks} ranks")
    text = Text.load(options.seq, options.seed)
    model = Bert(options)
    kept = options.layers * model.layers[0].kept_bytes(options.batch // ranks, options.seq)
    dct.shard(model, stage=options.stage)
    torch.manual_seed(options.seed + 1000 * rank)  # ranks drop different elements
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, options.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, max(0.0, 1 - step / options.steps) + 0.02))
    mode = "quiet" if rank else "live" if columns() and "NO_COLOR" not in os.environ else "lines"
    progress = Progress(mode, 0, options.steps)
    progress.say(f"{ranks} ranks, ZeRO-{options.stage}; the layers keep {size(kept)} a rank for the backward")
    rows: List[Dict[str, Any]] = []
    held_out: List[Tuple[int, float]] = []
    for step in range(1, options.steps + 1):
        begin = time.perf_counter()
        tokens, _ = text.batch(step, options.batch, rank, ranks)
        loss = loss_of(model, tokens, step * ranks + rank)
        loss.backward()
        norm = dct.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        seconds, stats = time.perf_counter() - begin, dct.stats(model, reset=True)
        rows.append({"step": step, "loss": float(loss.detach()), "seconds": seconds, "grad_norm": float(norm),
                     "tokens_per_s": options.batch * options.seq / seconds, **stats._asdict()})
        progress.step(rows[-1])
        if step % max(1, options.steps // 5) == 0:
            model.eval()
            with torch.no_grad():
                losses = [loss_of(model, part, -1 - i) for i, (part, _) in
                          enumerate(text.validation(4, options.batch, rank, ranks))]
            model.train()
            held_out.append((step, float(torch.stack(losses).mean())))
    progress.close()
    if rank == 0:
        report(options, rows, held_out)
        progress.say(f"held out: {held_out[0][1]:.3f} after {held_out[0][0]} steps, {held_out[-1][1]:.3f} after "
                     f"{held_out[-1][0]}; plot and metrics in {options.out}")


if __name__ == "__main__":
    main()
