"""Hugging Face's Accelerate for sharded models. Tested with accelerate 1.15."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Dict, Iterator, List, Optional, Tuple

import accelerate
import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from ..checkpoint.state_dict import full_state_dict
from ..sharding.model import no_sync, roots_of
from . import states

_MODEL = "sharded_model"  # prefix of file names; Accelerate uses model.safetensors for other models


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator, but prepare() leaves models as they are if shard() was applied to them. Their states are
    saved and loaded by parts, for any number of ranks. Accelerate itself prepares other models."""

    def prepare_model(self, model: nn.Module, device_placement: Optional[bool] = None,
                      evaluation_mode: bool = False) -> nn.Module:
        if not states.is_sharded(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        states.check_all_sharded(model)
        states.check_ranks(model, "Accelerate", self.num_processes, self.process_index)
        _enter_forward_when_called(model)
        _let_ranks_generate_together(model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)  # adds no wrapper

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with no_sync(model) if states.is_sharded(model) else super().no_sync(model):
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """For a sharded model, the whole weights in host memory on rank 0, and {} on other ranks."""
        if not states.is_sharded(model):
            return super().get_state_dict(model, unwrap)
        return full_state_dict(self.unwrap_model(model, keep_torch_compile=False), rank0_only=True, cpu_offload=True)

    def save_state(self, output_dir: Optional[str] = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        with self._without_shards() as (models, optimizers):
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        states.save(os.fspath(folder), models, optimizers, _MODEL)
        return folder

    def load_state(self, input_dir: Optional[str] = None, load_kwargs: Optional[Dict[str, Any]] = None,
                   **kwargs: Any) -> None:
        folders: List[str] = []
        hook = self.register_load_state_pre_hook(lambda _, folder: folders.append(folder))
        try:
            with self._without_shards() as (models, optimizers):
                super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            hook.remove()
        states.load(folders[0], models, optimizers, kind=_MODEL)
        if models and self.num_processes > 1:  # a rank that the saved run did not have has no step
            self.step = broadcast_object_list([self.step])[0]

    @contextlib.contextmanager
    def _without_shards(self) -> Iterator[Tuple[List[nn.Module], List[Any]]]:
        """Inside, Accelerate has only the models and optimizers that it may write and read itself. Yields the sharded
        ones."""
        models, optimizers = self._models, self._optimizers
        sharded = [model for model in models if states.is_sharded(model)]
        stepping = [optimizer for optimizer in optimizers if states.has_shards(optimizer)]
        self._models = [model for model in models if model not in sharded]
        self._optimizers = [optimizer for optimizer in optimizers if optimizer not in stepping]
        try:
            yield sharded, stepping
        finally:
            self._models, self._optimizers = models, optimizers


def _enter_forward_when_called(model: nn.Module) -> None:
    """Makes the model's call itself gather weights, as it does for modules with hooks, if the program replaced its
    forward. TRL does so, and the new function may read weights too."""
    if "forward" in model.__dict__:
        model.register_forward_pre_hook(lambda *_: None).remove()


def _let_ranks_generate_together(model: nn.Module) -> None:
    """Tells Transformers that all ranks must call each forward. Then generate() continues until the last rank's text
    ends, and layers are dropped by value."""
    if any(root.group.stage == 3 and root.group.comm.size > 1 for root in roots_of(model)):
        for module in model.modules():
            module._is_fsdp_managed_module = True  # type: ignore[assignment]
            module._fsdp_use_orig_params = True  # type: ignore[assignment]  # otherwise Dynamo compiles none of them


def adopt(accelerator: accelerate.Accelerator) -> None:
    """Turns an accelerate.Accelerator that a program made into one of this module."""
    if type(accelerator) not in (accelerate.Accelerator, Accelerator):
        raise TypeError(f"the accelerator is a {type(accelerator).__name__}, must be an accelerate.Accelerator")
    accelerator.__class__ = Accelerator
