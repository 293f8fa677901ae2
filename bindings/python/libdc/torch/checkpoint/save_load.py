"""Checkpoints of a sharded model: one safetensors file, in which every rank writes and reads its own part.

A rank's part of a parameter is a range of the whole's elements, and so a range of the file's bytes. Nothing is
gathered, and the file does not depend on the number of ranks that wrote it, or on their stage. It has checksums, which
the ranks compare while they read (safetensors_file.py)."""

from __future__ import annotations

import functools
import json
import math
import os
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import torch
from libdc.arguments import flag
from torch import Tensor, nn

from ..sharding.buffers import check_buffer_rule, synced_buffers
from ..sharding.parameter import entry_of
from ..sharding.part import part_of, plain_tensor
from ..sharding.root import Root
from ..sharding.sharded_param import ShardedParam
from . import model_weights, safetensors_file, state_dict, writer
from .collective_errors import on_first_replica, roots_on_same_ranks, run_on_all_ranks
from .items import Target, WriteItem
from .json_keys import with_pairs, without_pairs
from .safetensors_file import TensorInfo, Layout

_FORMAT = 2  # 1 had no checksums
_KEY = "libdc"  # the metadata entry with all values that are not tensors, as JSON
_EXTRA = "extra/"  # prefix of the names of `extra` tensors
_OPTIMIZER = "optimizer/"  # prefix of NAME/KEY: a parameter, and a piece of its state
Path = Union[str, "os.PathLike[str]"]


def save_checkpoint(model: nn.Module, path: Path, optimizer: Optional[torch.optim.Optimizer] = None,
                    extra: Optional[Mapping[str, Any]] = None, buffers: str = "rank0", weights: bool = True) -> None:
    """Writes the whole weights, and the optimizer's state if one is given, into one safetensors file. Every rank must
    call it. Each writes its own part, so none needs memory for more, and `path` must be in a file system that all ranks
    share. An existing file is replaced only when the new one is complete and on the disk. A symbolic link is replaced
    itself; the file that it names stays.

    extra    further values of rank 0, by name, that load_checkpoint() returns: tensors, and values that JSON has
    buffers  "rank0": the model's buffers are rank 0's; "mean": floating-point ones are the ranks' mean
    weights  False: the file has the optimizer's state and `extra` alone, without weights and buffers

    The weights have the names that they had before shard(), so any reader of safetensors can read them. A tied weight
    has its first name, and the metadata has the others. The optimizer's tensors are `optimizer/NAME/KEY`, those of
    `extra` are `extra/NAME`."""
    roots = roots_on_same_ranks("save_checkpoint", model)
    root = roots[0]
    name = run_on_all_ranks(root, lambda: _path_text("save_checkpoint", path))
    run_on_all_ranks(root, lambda: _check_save(optimizer, extra or {}, buffers, weights))
    own: Optional[Dict[str, Any]] = None
    if weights:
        for each in roots:
            run_on_all_ranks(root, each.group.check_initialized)
            each.write_back()
        own = model.state_dict(keep_vars=True)
        own = {**own, **synced_buffers(root, own, buffers, everywhere=False)}
    on_first_replica(root, lambda: _save(model, root, name, optimizer, extra or {}, own))


def _path_text(call: str, path: Any) -> str:
    text = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"{call}: path = {path!r}, must be a str, or a path object of one such as pathlib.Path")
    return text


def _check_save(optimizer: Any, extra: Mapping[str, Any], buffers: str, weights: Any) -> None:
    _check_optimizer("save_checkpoint", optimizer)
    flag("save_checkpoint: weights", weights)
    check_buffer_rule("save_checkpoint", buffers)
    for name in extra:
        if not isinstance(name, str):  # JSON would convert it to str
            raise TypeError(f"save_checkpoint: extra has the name {name!r}, must be a str")
    for name, value in extra.items():
        part = part_of(value)
        if isinstance(value, Tensor) and (part is not None or value.is_meta or value.layout is not torch.strided):
            what = part or f"a tensor of {'the device meta' if value.is_meta else value.layout}"
            raise ValueError(f"save_checkpoint: extra[{name!r}] is {what}, must be a whole tensor in strided memory"
                             + (": take its full_tensor(), on every rank" if part is not None else ""))


def _check_load(optimizer: Any, strict: Any, prefix: Any) -> None:
    _check_optimizer("load_checkpoint", optimizer)
    flag("load_checkpoint: strict", strict)
    if not isinstance(prefix, str):
        raise TypeError(f"load_checkpoint: prefix = {prefix!r}, must be a str")


def _check_optimizer(call: str, optimizer: Any) -> None:
    """Frameworks' and others' wrappers are no torch.optim.Optimizer, but have its attributes."""
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise TypeError(f"{call}: optimizer = {optimizer!r}, must be a torch.optim.Optimizer or None")


def _save(model: nn.Module, root: Root, path: str, optimizer: Optional[torch.optim.Optimizer],
          extra: Mapping[str, Any], weights: Optional[Mapping[str, Any]]) -> None:
    """weights: the model's state, with the buffers' common values; None: weights are not written."""
    on_replica = functools.partial(run_on_all_ranks, in_replica=True)
    pieces: List[WriteItem] = []
    aliases: Dict[str, str] = {}
    if weights is not None:
        own = weights
        pieces, aliases = on_replica(root, lambda: _weight_items(root, own))
    values = {name: value for name, value in extra.items() if not isinstance(value, Tensor)}
    metadata: Dict[str, Any] = {"format": _FORMAT, "extra": values, "weights": weights is not None}
    for name, value in extra.items():
        if name not in values:
            pieces += on_replica(root, lambda: _full_items(root, _EXTRA + name, value))
    if optimizer is not None:
        more, metadata["optimizer"] = on_replica(root, lambda: _optimizer_items(model, root, optimizer))
        pieces += more
    listed = [[piece.name, piece.of, piece.begin, piece.end] for piece in pieces]
    mine = on_replica(root, lambda: json.dumps({"metadata": with_pairs(metadata), "pieces": listed}))
    lists = [json.loads(text) for text in root.group.all_gather_bytes(mine.encode())]
    tensors, writers = on_replica(root, lambda: _merge([list_["pieces"] for list_ in lists]))
    layout = Layout(tensors, {**aliases, _KEY: json.dumps(lists[0]["metadata"])})
    rank = root.group.comm.rank
    writer.write(root, path, layout, [p for p in pieces if writers[p.name, p.begin, p.end] == rank])


def load_checkpoint(model: nn.Module, path: Path, optimizer: Optional[torch.optim.Optimizer] = None,
                    strict: bool = True, prefix: str = "") -> Dict[str, Any]:
    """Reads a file of save_checkpoint(), on any number of ranks and at any stage, and returns its `extra`, {} if it had
    none. Each rank reads only its own part. Every rank must call it. If something does not fit, all ranks raise and
    nothing has changed, except after an error in a module's own code, which runs when all else is loaded.

    path    a safetensors file, which may have only weights from another program; the index of several files
            (`model.safetensors.index.json`); a Hugging Face folder with either; or a folder of
            torch.distributed.checkpoint. Types are converted. Ranks may read equal copies
    strict  False: weights that the file lacks stay as they are, and those that the model lacks are not read
    prefix  of the weights' names in the file, such as "model."; other names are not read

    Modules load their weights, as parts, by load_state_dict(), with their hooks and their extra state. A model that was
    on the meta device has no values to protect, so each rank reads into its part directly."""
    root = roots_on_same_ranks("load_checkpoint", model)[0]
    run_on_all_ranks(root, lambda: _check_load(optimizer, strict, prefix))
    files = run_on_all_ranks(root, lambda: _open(_path_text("load_checkpoint", path)))
    parts: Dict[str, safetensors_file.ReadRange] = {}

    def read() -> Tuple[model_weights.Weights, Any, Any]:
        tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        metadata = _read_metadata(files)
        weights = model_weights.Weights({}, {}, {}) if metadata.get("weights") is False \
            else model_weights.match(model, path, tensors, strict, prefix, (_EXTRA, _OPTIMIZER))
        targets = dict(weights.targets)
        states = None
        if optimizer is not None:
            if "optimizer" not in metadata:
                raise ValueError(f"{path} has no optimizer's state")
            states = _read_optimizer_state(path, metadata["optimizer"], tensors, optimizer)
            targets.update(_state_targets(model, optimizer, states))
        extra = {name: model_weights.new_target(tensor) for name, tensor in tensors.items() if name.startswith(_EXTRA)}
        targets.update(extra)
        for file in files:
            parts.update({name: _read(file, name, targets[name]) for name in file.tensors if name in targets})
        model_weights.check_aliases(path, weights)
        return weights, states, {**metadata.get("extra", {}),
                                 **{name[len(_EXTRA):]: target.memory for name, target in extra.items()}}

    try:
        _check_same(root, os.fspath(path), files)
        weights, states, extra = run_on_all_ranks(root, read)
        lists = [json.loads(text) for text in root.group.all_gather_bytes(json.dumps(parts).encode())]
        run_on_all_ranks(root, lambda: _check_sums(root, files, parts, lists))
    finally:
        for file in files:
            file.close()
    if optimizer is not None:
        run_on_all_ranks(root, lambda: state_dict.load_optimizer_shards(model, optimizer, states))
    run_on_all_ranks(root, lambda: model_weights.load(model, weights))
    return extra


def _check_same(root: Root, path: str, files: List[Any]) -> None:
    """Raises on all ranks if their files differ, as old copies on local disks may."""
    mine = json.dumps([file.identity for file in files]).encode()
    found = root.group.all_gather_bytes(mine, all_ranks=True)
    others = [rank for rank, identities in enumerate(found) if identities != found[0]]
    if others:
        ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        raise ValueError(f"load_checkpoint: {path} on {ranks} is not the file that rank 0 has: sizes or headers "
                         "differ. Give all ranks the same checkpoint")


def _check_sums(root: Root, files: List[Any], parts: Mapping[str, safetensors_file.ReadRange],
                lists: List[Dict[str, Any]]) -> None:
    """Compares checksums. Each rank checks the tensors that it has read whole, and its share of the others. lists: all
    ranks' parts."""
    rank, read_by_any = root.group.comm.rank, {name for part in lists for name in part}
    tensors = [(file, name) for file in files for name in file.tensors if name in read_by_any]
    for number, (file, name) in enumerate(tensors):
        if name in parts and parts[name].begin == 0 and parts[name].end == file.tensors[name].numel():
            file.check(name, [parts[name]])
        elif number % len(lists) == rank:
            file.check(name, [safetensors_file.ReadRange(*part[name]) for part in lists if name in part])


# Elements that this rank has


def _weight_items(root: Root, weights: Mapping[str, Any]) -> Tuple[List[WriteItem], Dict[str, str]]:
    """The model's weights, and for a tied weight's other names the name under which it is written."""
    pieces: List[WriteItem] = []
    first: Dict[int, str] = {}
    aliases: Dict[str, str] = {}
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"save_checkpoint: {name} of the model's state is a {type(value).__name__}, must be a "
                             "tensor")
        if first.setdefault(id(value), name) != name:
            aliases[name] = first[id(value)]
            continue
        entry = entry_of(value)
        pieces += _full_items(root, name, value) if entry is None else _shard_items(entry, name, value)
    return pieces, aliases


def _shard_items(entry: ShardedParam, name: str, value: Tensor) -> List[WriteItem]:
    """This rank's part of a tensor with the parameter's elements. If all ranks have all elements, each writes a
    share."""
    of = TensorInfo(safetensors_file.type_name(name, value.dtype), tuple(entry.shape))
    flat = plain_tensor(value).reshape(-1)
    begin, end = entry.shard_range
    if entry.group.stage == 0:
        begin, end = entry.cut.range_of(entry.group.comm.rank)
        flat = flat[begin:]
    return [WriteItem(name, of, begin, flat[: end - begin])]


def _full_items(root: Root, name: str, value: Tensor, owned: bool = False) -> List[WriteItem]:
    """A tensor to write whole: one that all ranks have and rank 0 writes, or one that only this rank owns."""
    if root.group.comm.rank > 0 and not owned:
        return []
    of = TensorInfo(safetensors_file.type_name(name, value.dtype), tuple(value.shape))
    return [WriteItem(name, of, 0, value.detach().reshape(-1))]


def _optimizer_items(model: nn.Module, root: Root,
                     optimizer: torch.optim.Optimizer) -> Tuple[List[WriteItem], Dict[str, Any]]:
    """The optimizer's tensors, and the rest of its state with names in place of the tensors."""
    names = state_dict.names_of(model)
    pieces: List[WriteItem] = []
    groups = []
    values: Dict[str, Dict[str, Any]] = {}
    for group, shown in zip(optimizer.param_groups, optimizer.state_dict()["param_groups"]):
        state_dict.check_params("save_checkpoint", names, group["params"])
        for param in group["params"]:
            name, entry = names[id(param)], entry_of(param)
            for key, value in optimizer.state.get(param, {}).items():
                if not isinstance(value, Tensor):
                    values.setdefault(name, {})[key] = value
                    continue
                tensor = f"{_OPTIMIZER}{name}/{key}"
                owned = state_dict.is_owned(optimizer, key)
                if entry is not None and not owned and state_dict.is_shard_like(optimizer, entry, key, value):
                    pieces += _shard_items(entry, tensor, value)
                else:
                    pieces += _full_items(root, tensor, value, owned)
        groups.append({**{key: _json_value(value) for key, value in shown.items()},
                       "params": [names[id(param)] for param in group["params"]]})
    return pieces, {"param_groups": groups, "values": values}


def _json_value(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _merge(lists: List[List[Any]]) -> Tuple[Dict[str, TensorInfo], Dict[Tuple[str, int, int], int]]:
    """All tensors, from those that each rank can write, and the rank that writes each piece: the first that has it."""
    tensors: Dict[str, TensorInfo] = {}
    writers: Dict[Tuple[str, int, int], int] = {}
    for rank, pieces in enumerate(lists):
        for name, (dtype, shape), begin, end in pieces:
            of = TensorInfo(dtype, tuple(shape))
            if tensors.setdefault(name, of) != of:
                raise ValueError(f"save_checkpoint: {name} is {dtype} {list(shape)} on rank {rank}, but "
                                 f"{tensors[name].dtype} {list(tensors[name].shape)} on a rank before it")
            writers.setdefault((name, begin, end), rank)
    ranges: Dict[str, List[Tuple[int, int]]] = {name: [] for name in tensors}
    for name, begin, end in writers:
        ranges[name].append((begin, end))
    for name, of in tensors.items():
        missing = safetensors_file.missing_ranges(ranges[name], math.prod(of.shape))
        if missing:
            raise ValueError(f"save_checkpoint: no rank has elements {missing[0][0]} to {missing[0][1]} of {name}")
    return tensors, writers


# Contents of a file


def _open(path: str) -> List[Any]:
    if not os.path.isdir(path):
        return list(safetensors_file.open_files(path))
    if os.path.isfile(os.path.join(path, ".metadata")):
        from .distributed_folder import Folder  # imported here to keep `import libdc.torch` quick

        return [Folder(path)]
    found = safetensors_file.find_in_folder(path)
    if found is None:
        raise ValueError(f"load_checkpoint: the folder {path} has no .metadata of torch.distributed.checkpoint, no "
                         "model.safetensors and no model.safetensors.index.json")
    return list(safetensors_file.open_files(found))


def _read(file: Any, name: str, target: Target) -> safetensors_file.ReadRange:
    into, dtype = target.elements, file.tensors[name].dtype
    if into.dtype == dtype and not into.is_cuda:
        return file.read(name, target.begin, into)  # type: ignore[no-any-return]
    elements = torch.empty(into.shape, dtype=dtype)
    part: safetensors_file.ReadRange = file.read(name, target.begin, elements)
    into.copy_(elements)
    return part


def _read_metadata(files: List[safetensors_file.File]) -> Dict[str, Any]:
    """The values that are not tensors, from the files' metadata."""
    every: Dict[str, Any] = {}
    for file in files:
        if _KEY not in file.metadata:
            continue
        try:
            metadata = json.loads(file.metadata[_KEY], object_hook=without_pairs)
            form, extra = metadata["format"], dict(metadata.get("extra", {}))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(f"load_checkpoint: {file.path} has metadata of libdc that cannot be read") from None
        if type(form) is not int or not 1 <= form <= _FORMAT:
            raise ValueError(f"load_checkpoint: {file.path} has format {form!r}, must be 1 to {_FORMAT}; a newer libdc "
                             "may read it")
        if form > 1 and file.sums is None:
            raise ValueError(f"load_checkpoint: {file.path} is damaged: it has format {form} and no checksums")
        every.update(metadata, extra={**every.get("extra", {}), **extra})
    return every


def _read_optimizer_state(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor],
            optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
    """The optimizer's whole state, in the form of full_optimizer_state_dict()."""
    try:
        names = [name for group in metadata["param_groups"] for name in group["params"]]
        states: Dict[str, Dict[str, Any]] = {name: dict(metadata["values"].get(name, {})) for name in names}
    except (TypeError, KeyError, AttributeError, ValueError):
        raise ValueError(f"load_checkpoint: {path} describes no optimizer's state that can be read") from None
    for tensor, value in tensors.items():
        if tensor.startswith(_OPTIMIZER):
            name, _, key = tensor[len(_OPTIMIZER):].rpartition("/")
            if name not in states:
                raise ValueError(f"load_checkpoint: {path} has {tensor}, but no parameter {name} in the optimizer's "
                                 "state")
            states[name][key] = value
    if len(optimizer.param_groups) != len(metadata["param_groups"]):
        ours = len(optimizer.param_groups)
        raise ValueError(f"load_checkpoint: the optimizer has {ours} parameter group{'s' if ours != 1 else ''}, the "
                         f"saved one {len(metadata['param_groups'])}")
    if type(optimizer).__module__.startswith("torch.optim"):  # libdc.optim's optimizers check it themselves
        for group in metadata["param_groups"]:
            keys = {key for name in group["params"] for key in states[name]}
            for name in group["params"]:
                if states[name] and states[name].keys() != keys:
                    lacking = ", ".join(f"{_OPTIMIZER}{name}/{key}" for key in sorted(keys - states[name].keys()))
                    raise ValueError(f"load_checkpoint: {path} lacks {lacking}, which other parameters of the group "
                                     "have")
    groups = [{key: _as_type_of(ours.get(key), value) for key, value in group.items()}
              for ours, group in zip(optimizer.param_groups, metadata["param_groups"])]
    return {"state": {name: values for name, values in states.items() if values}, "param_groups": groups}


def _state_targets(model: nn.Module, optimizer: torch.optim.Optimizer, states: Dict[str, Any]) -> Dict[str, Target]:
    """Replaces the states' meta tensors by memory for this rank's part, and drops pieces that other ranks own."""
    params = dict(model.named_parameters())
    targets: Dict[str, Target] = {}
    for name, values in states["state"].items():
        for key, value in list(values.items()):
            if name not in params or not state_dict.is_read(optimizer, params[name], key):
                del values[key]
            elif isinstance(value, Tensor):
                target = Target(*state_dict.new_shard(optimizer, params[name], key, value))
                targets[f"{_OPTIMIZER}{name}/{key}"] = target
                values[key] = state_dict.as_shard(optimizer, params[name], key, value, target.memory)
    return targets


def _as_type_of(ours: Any, value: Any) -> Any:
    """Converts a list or a number from JSON to the type that the optimizer has."""
    if isinstance(ours, tuple):
        return tuple(value)
    return torch.full_like(ours, value) if isinstance(ours, Tensor) else value
