"""States of sharded models and their optimizers in a framework's checkpoint, which is a folder."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, Mapping, Sequence

import torch
from torch import nn

from ..checkpoint.save_load import load_checkpoint, save_checkpoint
from ..checkpoint.state_dict import load_full_optimizer_state_dict, names_of
from ..default_comm import is_of_environment
from ..sharding.model import roots_of
from ..sharding.parameter import entry_of

MODEL, OPTIMIZER = "model", "optimizer"  # prefixes of file names


def is_sharded(model: Any) -> bool:
    """Whether shard() was applied to the model, or to a module in it."""
    try:
        return bool(roots_of(model))
    except (TypeError, ValueError):
        return False


def check_all_sharded(model: nn.Module) -> None:
    """Raises if shard() was applied to only a part of the trained parameters."""
    for name, param in model.named_parameters():
        if param.requires_grad and entry_of(param) is None:
            raise ValueError(f"{name} is not sharded, so that its gradient would not be averaged over the ranks: give "
                             "shard() the whole model, or freeze the parameter")


def check_ranks(model: nn.Module, framework: str, size: int, rank: int) -> None:
    """Raises if the framework's processes are not the model's ranks, as under srun where RANK is not set. The framework
    would then take each rank for the first one, and give all the same batches. Only a program may choose a part of the
    processes, by comm=."""
    for comm in (root.group.all_ranks for root in roots_of(model)):
        is_part = comm.size < size and not is_of_environment(comm)
        if (comm.size, comm.rank) != (size, rank) and not is_part:
            raise RuntimeError(f"{framework} takes this process for number {rank} of {size}, but it is rank "
                               f"{comm.rank} of the model's {comm.size}, so that batches would be shared out wrongly. "
                               "Start the program with `python -m libdc.run` or torchrun, or set RANK, WORLD_SIZE, "
                               "LOCAL_RANK, MASTER_ADDR and MASTER_PORT")


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's wrapper."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (param for group in optimizer.param_groups for param in group["params"])


def has_shards(optimizer: Any) -> bool:
    """Whether the optimizer has a sharded model's parameters."""
    return any(entry_of(param) is not None for param in _params_of(optimizer))


def file_name(folder: str, kind: str, number: int) -> str:
    return os.path.join(folder, f"{kind}_{number}.safetensors" if number else f"{kind}.safetensors")


def _model_of(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    ids = {id(param) for param in _params_of(optimizer)}
    for model in models:
        if any(id(param) in ids for param in model.parameters()):
            return model
    raise ValueError(f"{type(optimizer).__name__} has parameters of no model that the framework was given: give it the "
                     "sharded model, too")


def save(folder: str, models: Sequence[nn.Module], optimizers: Sequence[Any], kind: str = MODEL) -> None:
    """Writes each sharded model, and each optimizer's state, into its own file. Collective. kind: the prefix of the
    models' files, for frameworks that write other models into the folder."""
    for number, model in enumerate(models):
        save_checkpoint(model, file_name(folder, kind, number))
    for number, optimizer in enumerate(map(inner_optimizer, optimizers)):
        save_optimizer(file_name(folder, OPTIMIZER, number), _model_of(optimizer, models), optimizer)


def load(folder: str, models: Sequence[nn.Module], optimizers: Sequence[Any], strict: bool = True,
         kind: str = MODEL) -> None:
    """Reads the files of save(), on any number of ranks. Collective."""
    for number, model in enumerate(models):
        load_checkpoint(model, file_name(folder, kind, number), strict=strict)
    for number, optimizer in enumerate(map(inner_optimizer, optimizers)):
        load_checkpoint(_model_of(optimizer, models), file_name(folder, OPTIMIZER, number), optimizer)


def save_optimizer(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes the state of one optimizer, without the model's weights."""
    save_checkpoint(model, path, optimizer, weights=False)


def load_packed_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, packed: Mapping[str, Any]) -> None:
    """Loads a state_dict() of the same optimizer on the unsharded model, which has whole tensors, by number."""
    names = names_of(model)
    ours = [names[id(param)] for param in _params_of(optimizer)]
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    if len(numbers) != len(ours):
        raise ValueError(f"the saved optimizer has {len(numbers)} parameters, must have {len(ours)}")
    by_number: Dict[Any, str] = dict(zip(numbers, ours))
    groups: List[Dict[str, Any]] = [{**group, "params": [by_number[number] for number in group["params"]]}
                                    for group in packed["param_groups"]]
    state = {by_number[number]: values for number, values in packed["state"].items()}
    load_full_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups})
