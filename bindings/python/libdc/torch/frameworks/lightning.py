"""A Lightning strategy for sharded models. Tested with pytorch_lightning 2.6."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from datetime import timedelta
from typing import Any, Dict, Iterator, List, Mapping, Optional

import torch

from ..checkpoint.state_dict import load_full_state_dict
from ..sharding.model import no_sync
from ..sharding.shard import shard
from . import states

# Lightning is two independent packages with their own classes. This module uses the one that the program has imported.
if "lightning.pytorch" in sys.modules or ("pytorch_lightning" not in sys.modules
                                          and importlib.util.find_spec("lightning") is not None):
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
else:
    from pytorch_lightning.strategies import DDPStrategy
    from pytorch_lightning.trainer.states import TrainerFn

_METADATA = "meta.pt"  # a checkpoint's file for all but tensors of the model and its optimizers
_DISTRIBUTED_TIMEOUT = timedelta(minutes=30)


class LibdcStrategy(DDPStrategy):  # type: ignore[misc]
    """Trains a LightningModule, to which it applies shard(): `Trainer(strategy=LibdcStrategy(stage=3), devices=2)`. A
    module that is sharded already, or has sharded modules from configure_model(), stays as it is.

    stage                  of shard()
    process_group_backend  of PyTorch's process group; None: libdc, with NCCL for tensors on cards
    timeout                of that group's collectives
    options                the further options of shard()

    A checkpoint is a folder with a safetensors file for the weights, one for each optimizer's state, and a file for the
    rest. Any number of ranks can read it. Lightning's own checkpoints, files with whole weights, can be read too."""

    def __init__(self, stage: int = 3, *, process_group_backend: Optional[str] = None,
                 timeout: timedelta = _DISTRIBUTED_TIMEOUT, **options: Any) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._stage, self._options = stage, options

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or "libdc"

    # Setup

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        model = self.lightning_module
        if not states.is_sharded(model):
            if self._layer_sync:
                self._layer_sync.apply(model)
            self.precision_plugin.convert_module(model)
            if not any(param.is_meta for param in model.parameters()):
                model.to(self.root_device)
            shard(model, self._stage, comm=torch.distributed.group.WORLD, device=self.root_device, **self._options)
        states.check_all_sharded(model)
        states.check_ranks(model, "Lightning", self.world_size, self.global_rank)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with no_sync(self.lightning_module):
            yield

    def teardown(self) -> None:
        """Leaves the model where it is, even on cards: a sharded model cannot be moved."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Truncates means of integers, as Lightning does over Gloo, since libdc's process group has no such mean."""
        is_mean = str(reduce_op).lower() in ("mean", "avg")
        if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or not is_mean:
            return super().reduce(tensor, group, reduce_op)
        return super().reduce(tensor, group, "sum").div_(self.world_size, rounding_mode="trunc")

    # Checkpoints

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    def lightning_module_state_dict(self) -> Dict[str, Any]:
        return {}  # save_checkpoint() writes it

    def optimizer_state(self, optimizer: Any) -> Dict[str, Any]:
        return {}  # save_checkpoint() writes this too

    def save_checkpoint(self, checkpoint: Dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(f"LibdcStrategy: storage_options = {storage_options!r}, must be None: all ranks write the "
                            "files of a checkpoint themselves")
        self._refuse_states_of_hooks(checkpoint)
        folder = self.broadcast(os.fspath(filepath))
        metadata = os.path.join(folder, _METADATA)
        if self.is_global_zero:
            os.makedirs(folder, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(metadata)  # until the last file is written, the folder is no checkpoint
        self.barrier()
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        rest["optimizer_count"] = len(self.optimizers) if "optimizer_states" in checkpoint else 0
        states.save(folder, [self.lightning_module], self.optimizers[: rest["optimizer_count"]])
        if self.is_global_zero:
            torch.save(rest, metadata + ".part")
            os.replace(metadata + ".part", metadata)
        self.barrier()

    def _refuse_states_of_hooks(self, checkpoint: Dict[str, Any]) -> None:
        """Raises if on_save_checkpoint() of the module or of a callback filled a state that this class leaves empty.
        Such values, averaged weights for instance, would not get into the files. Collective, since a hook may do so on
        one rank only."""
        found = bool(checkpoint.get("state_dict")) or any(checkpoint.get("optimizer_states", ()))
        if self.reduce_boolean_decision(found, all=False):
            raise RuntimeError("LibdcStrategy: on_save_checkpoint() of the module or of a callback has put states into "
                               "checkpoint['state_dict'] or ['optimizer_states'], must leave them empty: the model's "
                               "own are written from its parameters. Put others under a key of their own")

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Optional[bool] = None) -> Dict[str, Any]:
        path = self.broadcast(os.fspath(checkpoint_path))
        strict = self.lightning_module.strict_loading
        if not os.path.isdir(path):
            return self._load_file(path, strict, weights_only)
        metadata = os.path.join(path, _METADATA)
        if not os.path.isfile(metadata):
            raise FileNotFoundError(f"{path} is no checkpoint of LibdcStrategy, or was not written to its end: it has "
                                    f"no {_METADATA}")
        checkpoint: Dict[str, Any] = torch.load(metadata, map_location="cpu", weights_only=weights_only)
        count, optimizers = checkpoint.pop("optimizer_count"), self._trained_optimizers()
        if optimizers and count != len(optimizers):
            raise ValueError(f"{path} has the states of {count} optimizers, must have those of {len(optimizers)}")
        states.load(path, [self.lightning_module], optimizers, strict)
        return checkpoint

    def _load_file(self, path: str, strict: bool, weights_only: Optional[bool]) -> Dict[str, Any]:
        """Loads a checkpoint of another strategy, which is a file."""
        checkpoint: Dict[str, Any] = super().load_checkpoint(path, weights_only)
        load_full_state_dict(self.lightning_module, checkpoint.pop("state_dict"), strict)
        for optimizer, packed in zip(self._trained_optimizers(), checkpoint.pop("optimizer_states", [])):
            states.load_packed_optimizer(self.lightning_module, optimizer, packed)
        return checkpoint

    def _trained_optimizers(self) -> List[Any]:
        """The optimizers whose states a checkpoint restores: none for validation or a test."""
        return self.optimizers if self.lightning_module.trainer.state.fn == TrainerFn.FITTING else []

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing: load_checkpoint() has loaded the weights."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Does nothing: load_checkpoint() has loaded the states."""
