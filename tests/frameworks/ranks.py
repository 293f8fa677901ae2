"""Frameworks that count other processes than libdc has ranks: of two, each prints a line for what it has tried.
ranks.py srun: libdc knows the ranks, and the variables that the frameworks read are not there, as under srun.
ranks.py parts: they are there, and models have a part of the ranks, or all in another order."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any, Callable, List

import torch
from models import Texts, llama, network, numbers

import libdc.torch as dct

RANKS = dct.init()
if sys.argv[1] == "srun":
    for _name in [name for name in os.environ if name.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))]:
        del os.environ[_name]


def by_accelerate(comm: Any = None) -> None:
    from libdc.torch.frameworks.accelerate import Accelerator

    Accelerator(cpu=True).prepare(dct.shard(network(), 3, comm=comm))


def by_trainer() -> None:
    import transformers

    from libdc.torch.frameworks.trainer import Trainer

    arguments = transformers.TrainingArguments(tempfile.mkdtemp(), max_steps=1, use_cpu=True, report_to=[],
                                               disable_tqdm=True)
    Trainer(model=dct.shard(llama(), 3), args=arguments, train_dataset=Texts()).train()


def by_lightning() -> None:
    import pytorch_lightning
    from torch.utils.data import DataLoader

    from libdc.torch.frameworks.lightning import LibdcStrategy

    class Model(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.network(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pytorch_lightning.Trainer(max_steps=1, accelerator="cpu", devices=1, strategy=LibdcStrategy(3),
                                        logger=False, enable_progress_bar=False, enable_checkpointing=False)
    trainer.fit(dct.shard(Model(), 3), DataLoader(numbers()))


PROGRAMS: List[Callable[[], None]] = [by_accelerate, by_trainer, by_lightning]
if sys.argv[1] == "parts":
    PROGRAMS = [lambda: by_accelerate(RANKS.split(RANKS.rank)), lambda: by_accelerate(RANKS.split(0, -RANKS.rank))]
for program in PROGRAMS:
    try:
        program()
        print(RANKS.rank, "no error", flush=True)
    except RuntimeError as error:
        print(RANKS.rank, str(error).split(", so")[0], flush=True)
