"""The Trainer of Hugging Face's Transformers for sharded models. Tested with transformers 5.23."""

from __future__ import annotations

import os
from typing import Any, Dict, Optional

import torch
import transformers
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..checkpoint.safetensors_file import find_in_folder
from ..checkpoint.save_load import load_checkpoint
from . import states
from .accelerate import adopt


class TrainerMixin:
    """A base to put before a Trainer's class, so that it trains sharded models: `class MyTrainer(TrainerMixin,
    SFTTrainer)`. Its checkpoints have whole weights, as from_pretrained() reads them, and the optimizer's state in a
    file that any number of ranks can read."""

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        adopt(self.accelerator)

    def _save(self, output_dir: Optional[str] = None, state_dict: Optional[Dict[str, Any]] = None) -> None:
        if state_dict is None and states.is_sharded(self.model):
            state_dict = self.accelerator.get_state_dict(self.model)
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not states.is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        states.save_optimizer(states.file_name(output_dir, states.OPTIMIZER, 0), self.model,
                              states.inner_optimizer(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._load_weights(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        if not self._load_weights(self.state.best_model_checkpoint):  # type: ignore[attr-defined]
            super()._load_best_model()  # type: ignore[misc]

    def _load_weights(self, folder: str) -> bool:
        """Loads each rank's part of the weights. False if the folder has no whole weights, as for an adapter alone."""
        path = find_in_folder(folder)
        if path is None or not states.is_sharded(self.model):
            return False
        load_checkpoint(self.model, path, strict=not getattr(self.model, "_keys_to_ignore_on_save", None))
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: Optional[str]) -> None:
        if checkpoint is None or not states.is_sharded(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        path, optimizer = states.file_name(checkpoint, states.OPTIMIZER, 0), states.inner_optimizer(self.optimizer)
        unsharded, scheduler = (os.path.join(checkpoint, name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
        if os.path.isfile(path):
            load_checkpoint(self.model, path, optimizer)
        elif os.path.isfile(unsharded):  # from a run without shard()
            packed = torch.load(unsharded, map_location="cpu", weights_only=True)
            states.load_packed_optimizer(self.model, optimizer, packed)
        else:
            return  # loads nothing, as Transformers does after save_only_model
        self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers.Trainer for models to which shard() was applied before."""


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer for models to which shard() was applied before."""
