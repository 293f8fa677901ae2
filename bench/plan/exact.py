#!/usr/bin/env python3
"""Real runs beside the planner: every statistic of memory, and the wire bytes. The differences must be 0:

    python bench/plan/exact.py [--ranks 1,2,3,4,8] [--models gpt,bert,llama,gpt2,hf-bert] [--transports threads,tcp]
    mpirun -n 4 python bench/plan/exact.py --transports mpi

Each rank trains two steps and compares itself. "memory": all fields of libdc.torch.stats beside those of the counting
device behind the same calls. "bytes": of a step, beside libdc.torch.plan, which has never seen the run.

Hugging Face's models come from PyPI (tests/transformers/requirements.txt)."""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "gpt"), str(ROOT / "tests"), str(Path(__file__).parent)]

import libdc
import libdc.run
import libdc.torch
import torch
from schedule import Schedule, recorded, replay

SAMPLES, TOKENS, VOCABULARY = 2, 16, 64


def gpt() -> torch.nn.Module:
    from model import GPT, Config

    return GPT(Config(layers=2, hidden=48, heads=2, seq=TOKENS, batch=SAMPLES, vocab=VOCABULARY))


class Bert(torch.nn.Module):
    """Of libdc's transformer layers, as in examples/bert."""

    def __init__(self) -> None:
        super().__init__()
        from libdc.transformer import LayerConfig

        self.tokens, self.places = torch.nn.Embedding(VOCABULARY, 48), torch.nn.Embedding(TOKENS, 48)
        self.layers = torch.nn.ModuleList(
            libdc.torch.TransformerLayer(LayerConfig(48, 2, num_hidden_layers=2, layer_id=i)) for i in range(2))
        self.norm, self.head = torch.nn.LayerNorm(48), torch.nn.Linear(48, VOCABULARY)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return torch.nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class Labelled(torch.nn.Module):
    """A model of Hugging Face, which is called with names."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(input_ids=x, labels=y, use_cache=False).loss
        return loss


def hugging_face(kind: str) -> torch.nn.Module:
    import from_pypi

    sys.path.insert(0, from_pypi.install(ROOT / "tests" / "transformers" / "requirements.txt"))
    import transformers

    sizes: Dict[str, Any] = {"vocab_size": VOCABULARY}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=48, n_layer=2, n_head=2, n_positions=TOKENS, resid_pdrop=0.0,
                                         embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
        return Labelled(transformers.GPT2LMHeadModel(config))
    sizes.update(hidden_size=48, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96,
                 max_position_embeddings=TOKENS)
    if kind == "llama":
        return Labelled(transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **sizes)))
    return Labelled(transformers.BertForMaskedLM(transformers.BertConfig(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)))


MODELS: Dict[str, Callable[[], torch.nn.Module]] = {
    "gpt": gpt, "bert": Bert, "llama": lambda: hugging_face("llama"), "gpt2": lambda: hugging_face("gpt2"),
    "hf-bert": lambda: hugging_face("bert")}  # fmt: skip


class Case(NamedTuple):
    model: str
    stage: int
    replicas: int


class Row(NamedTuple):
    """Of one rank."""

    gathered_peak: int
    memory_difference: int
    wire_bytes: int


def measure(comm: Any, case: Case, model: torch.nn.Module, schedules: Any) -> Row:
    """Trains on this rank and compares."""
    schedules.now = Schedule()
    mesh = (case.replicas, comm.size // case.replicas) if case.replicas > 1 else None
    net = libdc.torch.shard(copy.deepcopy(model), case.stage, comm=comm, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS) % VOCABULARY
    before = 0
    for _ in range(2):
        stats = libdc.torch.stats(net)
        before = stats.gather_wire_bytes + stats.reduce_wire_bytes
        net(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    real = libdc.torch.stats(net)
    counted = replay(schedules.now, comm.size, comm.rank, comm.shares_memory)
    moved = real.gather_wire_bytes + real.reduce_wire_bytes - before
    difference = sum(abs(value - counted[name]) for name, value in real._asdict().items())
    return Row(real.gathered_peak_bytes, difference, moved)


def planned_bytes(case: Case, ranks: int, model: torch.nn.Module) -> int:
    """Of a step, on rank 0."""
    x = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64)
    plan = libdc.torch.plan(model, [x, x], ranks=ranks, stage=case.stage, replicas=case.replicas, dtype="float32")
    return plan.gather_wire_bytes + plan.reduce_wire_bytes


def on_threads(ranks: int, body: Callable[[Any], Row]) -> List[Row]:
    return libdc.run.threads(ranks, body)


def on_tcp(ranks: int, body: Callable[[Any], Row]) -> List[Row]:
    """Ranks that are threads and meet over TCP alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    rows: List[Any] = [None] * ranks

    def run(rank: int) -> None:
        rows[rank] = body(libdc.Comm.tcp(address, "exact", rank, ranks, node=""))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows


def numbers(text: str) -> List[int]:
    return [int(part) for part in text.split(",")]


def cases(models: List[str], ranks: int, stages: List[int]) -> List[Case]:
    replicas = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [Case(*each) for each in itertools.product(models, stages, replicas)]


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 3, 4, 8])
    parser.add_argument("--stages", type=numbers, default=[0, 1, 2, 3])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--transports", default="threads,tcp")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    names = arguments.models.split(",")
    models = {name: MODELS[name]() for name in names}
    groups: List[Tuple[str, int, Any]] = []
    if arguments.transports in ("mpi", "processes"):
        comm = libdc.Comm.mpi() if arguments.transports == "mpi" else libdc.init_comm()
        groups = [(arguments.transports, comm.size, lambda _, body: [body(comm)])]
    else:
        makers = {"threads": on_threads, "tcp": on_tcp}
        groups = [(name, ranks, makers[name]) for name in arguments.transports.split(",") for ranks in arguments.ranks]
    worst, count = 0, 0
    shows = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0"))) == "0"
    if shows:
        print("| model | transport | ranks | replicas | stage | gathered at most | differs | bytes of a step "
              "| differs |")
        print("|---|---|---|---|---|---|---|---|---|")
    with recorded() as schedules:
        for transport, ranks, group in groups:
            for case in cases(names, ranks, arguments.stages):
                rows = group(ranks, lambda comm: measure(comm, case, models[case.model], schedules))
                planned = planned_bytes(case, ranks, models[case.model]) if shows else rows[0].wire_bytes
                differs = [max(row.memory_difference for row in rows), abs(rows[0].wire_bytes - planned)]
                worst, count = max(worst, *differs), count + 1
                if shows:
                    print(f"| {case.model} | {transport} | {ranks} | {case.replicas} | {case.stage} "
                          f"| {rows[0].gathered_peak:,} | {differs[0]} | {rows[0].wire_bytes:,} | {differs[1]} |",
                          flush=True)
    if shows:
        print(f"\n{count} runs, the largest difference is {worst} bytes")
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main())
