"""The same training by Transformers' Trainer, Accelerate and Lightning: train.py WHAT FOLDER FROM.

WHAT is "alone", one process without libdc, or "shard", which trains from the beginning on any number of ranks. With
"resume" it goes on from the checkpoints below FROM at another stage. Each rank's losses go to FOLDER/RANK.json. A step
has 24 samples on any number of ranks, in two accumulated batches of 12."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict, List

import adapters
import pytorch_lightning
import torch
import transformers
from models import SAVED_AT, STEPS, Texts, llama, network, numbers
from torch.utils.data import DataLoader, DistributedSampler

import accelerate
import libdc.torch as dct

WHAT, FOLDER, *FROM = sys.argv[1:]
STAGE = 1 if WHAT == "resume" else 3
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
BATCH = 12 // RANKS


def checkpoint(name: str, folder: str) -> str:
    return os.path.join(folder, name)


def train_by_trainer(resume: bool, steps: int = STEPS) -> Dict[str, List[float]]:
    from libdc.torch.frameworks.trainer import Trainer

    arguments = transformers.TrainingArguments(
        checkpoint("trainer", FOLDER), per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=2, max_steps=steps, logging_steps=1, save_steps=SAVED_AT, eval_strategy="steps",
        eval_steps=10, max_grad_norm=0.7, learning_rate=1e-2, use_cpu=True, report_to=[], disable_tqdm=True, seed=0)
    model, kind = llama(), transformers.Trainer
    if WHAT != "alone":
        dct.shard(model, STAGE)
        kind = Trainer
    trainer = kind(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts())
    saved = f"{checkpoint('trainer', FROM[0])}/checkpoint-{SAVED_AT}" if resume else None
    trainer.train(resume_from_checkpoint=saved)
    trainer.save_model(checkpoint("trained", FOLDER))
    history = trainer.state.log_history
    return {key: [entry[key] for entry in history if key in entry] for key in ("loss", "eval_loss", "grad_norm")}


def train_by_accelerate(resume: bool) -> Dict[str, List[float]]:
    from libdc.torch.frameworks.accelerate import Accelerator

    model = network()
    if WHAT != "alone":
        dct.shard(model, STAGE)
    accelerator = (accelerate.Accelerator if WHAT == "alone" else Accelerator)(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(numbers(), batch_size=BATCH))
    done = 0
    if resume:
        accelerator.load_state(checkpoint("accelerate", FROM[0]))
        done = SAVED_AT
    losses: List[float] = [0.0] * done
    norms: List[float] = [0.0] * done
    while done < STEPS:
        total = 0.0
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
            total += float(accelerator.gather(loss.detach()).mean()) / 2
            if accelerator.sync_gradients:
                losses.append(total)
                total, done = 0.0, done + 1
                if done == SAVED_AT and not resume:
                    accelerator.save_state(checkpoint("accelerate", FOLDER))
                if done == STEPS:
                    break
    accelerator.save_model(model, checkpoint("accelerated", FOLDER))
    return {"loss": losses, "grad_norm": norms}


class Lit(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.losses: List[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = (self.network(batch[0]) - batch[1]).square().mean()
        self.losses.append(float(self.all_gather(loss.detach()).mean()) / 2)
        return loss

    def train_dataloader(self) -> Any:
        """In the order of the data: Lightning's own sampler shuffles, and otherwise after a checkpoint."""
        ranks = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return DataLoader(numbers(), batch_size=BATCH, sampler=DistributedSampler(numbers(), shuffle=False, **ranks))

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation", (self.network(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train_by_lightning(resume: bool, steps: int = STEPS) -> Dict[str, List[float]]:
    from libdc.torch.frameworks.lightning import LibdcStrategy

    save = pytorch_lightning.callbacks.ModelCheckpoint(checkpoint("lightning", FOLDER), "{epoch}", save_top_k=-1,
                                                       every_n_epochs=SAVED_AT // 4, save_on_train_epoch_end=True)
    module = Lit()
    trainer = pytorch_lightning.Trainer(
        max_steps=steps, accelerator="cpu", devices=RANKS, strategy="auto" if WHAT == "alone" else LibdcStrategy(STAGE),
        accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=[save], logger=False, enable_progress_bar=False)
    saved = f"{checkpoint('lightning', FROM[0])}/epoch={SAVED_AT // 4 - 1}.ckpt" if resume else None
    trainer.fit(module, val_dataloaders=DataLoader(numbers(), batch_size=BATCH), ckpt_path=saved)
    losses = [0.0] * (SAVED_AT if resume else 0) + [a + b for a, b in zip(module.losses[::2], module.losses[1::2])]
    return {"loss": losses, "validation": [float(value) for value in trainer.callback_metrics.values()]}


def main() -> None:
    torch.set_num_threads(1)
    if WHAT != "alone":
        torch.distributed.init_process_group("libdc")
    programs = [train_by_trainer, train_by_accelerate, train_by_lightning]
    result: Dict[str, Any] = {}
    if WHAT == "shard":
        result.update(lora=adapters.lora(checkpoint("adapter", FOLDER)), generate=adapters.generate(),
                      replaced_forward=adapters.replaced_forward(), prepare_a_part=adapters.prepare_a_part(),
                      load_on_meta=adapters.load_on_meta(checkpoint("pretrained", FOLDER)),
                      compile_prepared=adapters.compile_prepared(),
                      save_beside_plain=[adapters.save_beside_plain(checkpoint(f"beside-{safe}", FOLDER), safe)
                                         for safe in (True, False)])
    result.update({program.__name__: program(WHAT == "resume") for program in programs})
    if WHAT == "shard":  # and from the checkpoints of one process that knows nothing of libdc
        result.update(trainer_goes_on=train_by_trainer(True, SAVED_AT + 2)["loss"],
                      lightning_goes_on=train_by_lightning(True, SAVED_AT + 2)["loss"],
                      save_with_hooks=adapters.save_with_hooks(checkpoint("hooks", FOLDER)))
    with open(os.path.join(FOLDER, f"{os.environ.get('RANK', '0')}.json"), "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
