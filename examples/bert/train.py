#!/usr/bin/env python3
"""Pre-trains a small BERT on masked bytes of real text (the sources of Python's standard library), with libdc's
transformer layer, sharded over the ranks by ZeRO-3:

    python -m libdc.run -n 2 examples/bert/train.py                       progress, a plot and metrics in runs/bert
    python -m libdc.run -n 2 examples/bert/train.py --flags --post-ln     with the memory flags; Post-LN
    python -m libdc.run -n 2 examples/bert/train.py --compare             without and with them, step by step in turn
    python examples/bert/train.py --steps 20                              one process

15 % of the bytes are hidden: of these 80 % become a mask byte, 10 % another byte, 10 % stay (Devlin et al.
2018)."""

from __future__ import annotations

import argparse
import json
import os
import statistics
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

MASK, VOCABULARY = 256, 257  # the mask token, and the number of tokens


class Bert(nn.Module):
    def __init__(self, options: argparse.Namespace, flags: bool) -> None:
        super().__init__()
        hidden = options.hidden
        self.tokens, self.places = nn.Embedding(VOCABULARY, hidden), nn.Embedding(options.seq, hidden)
        self.layers = nn.ModuleList(dct.TransformerLayer(LayerConfig(
            hidden, options.heads, attn_dropout_ratio=options.dropout, hidden_dropout_ratio=options.dropout,
            num_hidden_layers=options.layers, layer_id=i, seed=options.seed, pre_layer_norm=not options.post_ln,
            normalize_invertible=flags, gelu_checkpoint=flags, attn_dropout_checkpoint=flags,
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
    """(the model's input, a mask of the positions that it must predict). Both depend only on the tokens and the
    seed."""
    rng = torch.Generator().manual_seed(seed)
    draw, kind = (torch.rand(tokens.shape, generator=rng) for _ in range(2))
    chosen = draw < 0.15
    seen = torch.where(chosen & (kind < 0.8), MASK, tokens)
    other = torch.randint(256, tokens.shape, generator=rng)
    return torch.where(chosen & (kind >= 0.8) & (kind < 0.9), other, seen), chosen


def loss_of(model: nn.Module, tokens: Tensor, seed: int) -> Tensor:
    seen, chosen = hide(tokens, seed)
    # All ranks have equally many tokens, and so nearly as many hidden ones: averaging their means is about right.
    return F.cross_entropy(model(seen)[chosen], tokens[chosen])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("hidden", 256), ("heads", 4), ("seq", 128), ("batch", 16), ("steps", 300),
                          ("seed", 0), ("stage", 3), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--flags", action="store_true", help="the layer's memory flags")
    parser.add_argument("--compare", action="store_true", help="trains two, without and with the memory flags")
    parser.add_argument("--post-ln", action="store_true", help="BERT's own placement of the normalisations")
    parser.add_argument("--out", type=Path, default=Path("runs/bert"), help="folder of metrics.jsonl and loss.png")
    return parser.parse_args()


class Trainer:
    """One model with its optimizer and its results so far. Equal seeds give equal dropout in all models."""

    def __init__(self, options: argparse.Namespace, flags: bool, comm: Any) -> None:
        self.options, self.rank, self.ranks = options, comm.rank, comm.size
        self.name = "with the flags" if flags else "without flags"
        torch.manual_seed(options.seed)
        self.model = Bert(options, flags)
        self.kept = options.layers * self.model.layers[0].kept_bytes(options.batch // comm.size, options.seq)
        dct.shard(self.model, stage=options.stage)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01)
        warm = max(1, options.steps // 10)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / warm, max(0.0, 1 - step / options.steps) + 0.02))
        self.rows: List[Dict[str, Any]] = []
        self.held_out: List[Tuple[int, float]] = []

    def step(self, text: Text, step: int) -> None:
        options, begin = self.options, time.perf_counter()
        tokens, _ = text.batch(step, options.batch, self.rank, self.ranks)
        torch.manual_seed(options.seed + step * self.ranks + self.rank)  # ranks drop different elements
        loss = loss_of(self.model, tokens, step * self.ranks + self.rank)
        loss.backward()
        norm = dct.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        seconds, stats = time.perf_counter() - begin, dct.stats(self.model, reset=True)
        self.rows.append({"step": step, "loss": float(loss.detach()), "seconds": seconds, "grad_norm": float(norm),
                          "tokens_per_s": options.batch * options.seq / seconds, **stats._asdict()})

    def validate(self, text: Text, step: int) -> None:
        self.model.eval()
        with torch.no_grad():
            losses = [loss_of(self.model, part, -1 - i) for i, (part, _) in
                      enumerate(text.validation(4, self.options.batch, self.rank, self.ranks))]
        self.model.train()
        self.held_out.append((step, float(torch.stack(losses).mean())))


COLORS = [((150, 185, 235), (40, 90, 200)), ((250, 190, 120), (200, 60, 60))]


def report(options: argparse.Namespace, trainers: List[Trainer]) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    series = []
    for i, (trainer, (pale, strong)) in enumerate(zip(trainers, COLORS)):
        name = f"metrics-{i}.jsonl" if i else "metrics.jsonl"
        (options.out / name).write_text("".join(json.dumps(row) + "\n" for row in trainer.rows))
        # Different line widths, so that two equal curves are both visible.
        series += [Series(f"training {trainer.name}", [r["step"] for r in trainer.rows],
                          [r["loss"] for r in trainer.rows], pale, 4.0 - 2.5 * i),
                   Series(f"held out {trainer.name}", [s for s, _ in trainer.held_out],
                          [v for _, v in trainer.held_out], strong, 5.0 - 3.0 * i)]
    (options.out / "loss.png").write_bytes(line_chart(
        f"BERT of {options.layers} layers, masked bytes, ZeRO-{options.stage}", "step", "loss (nats a byte)", series))


def summary(options: argparse.Namespace, trainers: List[Trainer]) -> List[str]:
    lines = []
    for trainer in trainers:
        (first, before), (last, after) = trainer.held_out[0], trainer.held_out[-1]
        lines.append(f"{trainer.name}: the layers keep {size(trainer.kept)} a rank, "
                     f"{statistics.median(row['seconds'] for row in trainer.rows) * 1e3:.0f} ms a step; held out "
                     f"{before:.3f} after {first} steps, {after:.3f} after {last}")
    if len(trainers) > 1:
        a, b = ([row["loss"] for row in trainer.rows] for trainer in trainers)
        far = max(abs(x - y) / x for x, y in zip(a, b))
        lines.append("the losses of every step have the same bits" if a == b else
                     f"the losses differ by at most {far:.1e} of their size in any step")
    return [*lines, f"plot and metrics in {options.out}"]


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    comm = dct.init()
    if options.batch % comm.size:
        raise SystemExit(f"train.py: --batch = {options.batch}, must be a multiple of the {comm.size} ranks")
    text = Text.load(options.seq, options.seed)
    trainers = [Trainer(options, flags, comm) for flags in ([False, True] if options.compare else [options.flags])]
    mode = "quiet" if comm.rank else "live" if columns() and "NO_COLOR" not in os.environ else "lines"
    progress = Progress(mode, 0, options.steps)
    progress.print(f"{comm.size} ranks, ZeRO-{options.stage}, {'Post' if options.post_ln else 'Pre'}-LN")
    for step in range(1, options.steps + 1):
        for trainer in trainers:
            trainer.step(text, step)
            if step % max(1, options.steps // 5) == 0:
                trainer.validate(text, step)
        progress.step(trainers[0].rows[-1])
    progress.close()
    if comm.rank == 0:
        report(options, trainers)
        for line in summary(options, trainers):
            progress.print(line)


if __name__ == "__main__":
    main()
