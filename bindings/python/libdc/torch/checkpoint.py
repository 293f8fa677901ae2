"""Checkpoints of a sharded model: one safetensors file, of which every rank writes and reads its own part.

A rank's part of a parameter is a range of the whole's elements, and so a range of the file's bytes. Nothing is
gathered, and the file does not tell how many ranks wrote it, or at which stage."""

from __future__ import annotations

import json
import math
import os
import secrets
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, TypeVar, Union

import torch
from torch import Tensor, nn

from . import state, tensorfile
from .buffers import check_rule, common
from .sharded_param import ShardedParam
from .root import Root
from .shard import entry_of, root_of
from .tensorfile import Described, Layout

_KEY = "libdc"  # of the metadata in which all that is no tensor lies, as JSON
_EXTRA = "extra/"  # before a tensor's name
_OPTIMIZER = "optimizer/"  # before the name of a parameter, "/", and that of a piece of its state
Path = Union[str, "os.PathLike[str]"]
T = TypeVar("T")


class Piece(NamedTuple):
    """What this rank can write of a tensor: its elements from begin on, flat."""

    name: str
    of: Described
    begin: int
    elements: Tensor

    @property
    def end(self) -> int:
        return self.begin + self.elements.numel()


def save_checkpoint(model: nn.Module, path: Path, optimizer: Optional[torch.optim.Optimizer] = None,
                    extra: Optional[Mapping[str, Any]] = None, buffers: str = "rank0") -> None:
    """Writes the weights, and the optimizer's state if one is given, whole, into one safetensors file. Every rank must
    call it; each writes its own part, so no rank needs memory for more, and `path` must be in a file system that all
    ranks share. What lay there is replaced when the new file is complete and on the disk, and not before.

    extra    what else load_checkpoint() is to return: tensors, and what JSON can say, by names; rank 0's
    buffers  "rank0": the model's buffers are rank 0's; "mean": floating-point ones are the ranks' mean

    The weights have their names from before shard(), so that anything that reads safetensors reads them; a tied weight
    has its first name, and the metadata tells the others. The optimizer's tensors are `optimizer/NAME/KEY`, those of
    `extra` are `extra/NAME`."""
    root = root_of(model)
    path = os.fspath(path)
    _run_on_all_ranks(root, lambda: check_rule("save_checkpoint", buffers))
    agreed = common(root, model.state_dict(keep_vars=True), buffers, everywhere=False)
    pieces, aliases = _run_on_all_ranks(root, lambda: _weights(model, agreed))
    values = {name: value for name, value in (extra or {}).items() if not isinstance(value, Tensor)}
    metadata: Dict[str, Any] = {"format": 1, "extra": values}
    for name, value in (extra or {}).items():
        if name not in values:
            pieces += _run_on_all_ranks(root, lambda: _whole(root, _EXTRA + name, value))
    if optimizer is not None:
        more, metadata["optimizer"] = _run_on_all_ranks(root, lambda: _optimizer(model, optimizer))
        pieces += more
    listed = [[piece.name, piece.of, piece.begin, piece.end] for piece in pieces]
    mine = _run_on_all_ranks(root, lambda: json.dumps({"metadata": metadata, "pieces": listed}))
    lists = [json.loads(text) for text in state.all_gather_bytes(root, mine.encode())]
    tensors, writers = _run_on_all_ranks(root, lambda: _merge([list_["pieces"] for list_ in lists]))
    layout = Layout(tensors, {**aliases, _KEY: json.dumps(lists[0]["metadata"])})
    _write(root, path, layout, [p for p in pieces if writers[p.name, p.begin, p.end] == root.group.comm.rank])


def load_checkpoint(model: nn.Module, path: Path, optimizer: Optional[torch.optim.Optimizer] = None,
                    strict: bool = True) -> Dict[str, Any]:
    """Reads what save_checkpoint() wrote, on any number of ranks and at any stage, and returns its `extra`, {} if it
    had none. Each rank reads its own part alone. Every rank must call it; where something does not fit, all raise and
    nothing has changed.

    path    a safetensors file, also one of others' with weights alone, or the index of several
            (`model.safetensors.index.json`); types are converted
    strict  False: weights that the file lacks stay as they are, and those that the model lacks are not read"""
    root = root_of(model)

    def read() -> Tuple[Dict[str, Tensor], Any, Any]:
        tensors, header = tensorfile.read(os.fspath(path))
        metadata = json.loads(header.get(_KEY, "{}"))
        weights = _fit(model, path, tensors, strict)
        if optimizer is not None and "optimizer" not in metadata:
            raise ValueError(f"{path} has no optimizer's state")
        states = None if optimizer is None else _states(metadata["optimizer"], tensors, optimizer)
        tensors = {name: value.clone() for name, value in tensors.items() if name.startswith(_EXTRA)}
        return weights, states, {**metadata.get("extra", {}), **{name[len(_EXTRA):]: t for name, t in tensors.items()}}

    weights, states, extra = _run_on_all_ranks(root, read)
    if optimizer is not None:
        _run_on_all_ranks(root, lambda: state.load_full_optimizer_state_dict(model, optimizer, states))
    current = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in weights.items():
            entry = entry_of(current[name])
            if entry is None:
                current[name].copy_(value)
            else:
                state.split(entry, value, current[name])
    return extra


def _run_on_all_ranks(root: Root, work: Callable[[], T]) -> T:
    """Work's result, if it succeeded on every rank; else all raise, the others with the first failure's text."""
    failure: Optional[BaseException] = None
    try:
        result = work()
    except Exception as error:
        failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    for rank, other in enumerate(state.all_gather_bytes(root, text.encode("ascii", "backslashreplace"))):
        if other and failure is None:
            raise RuntimeError(f"rank {rank}: {other.decode()}")
    if failure is not None:
        raise failure
    return result


# What this rank has


def _weights(model: nn.Module, buffers: Mapping[int, Tensor]) -> Tuple[List[Piece], Dict[str, str]]:
    """The model's weights, its buffers' values by their ids, and under which name a tied weight's others are."""
    root = root_of(model)
    pieces: List[Piece] = []
    first: Dict[int, str] = {}
    aliases: Dict[str, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise ValueError(f"save_checkpoint: {name} of the model's state is a {type(value).__name__}, must be a "
                             "tensor")
        if first.setdefault(id(value), name) != name:
            aliases[name] = first[id(value)]
            continue
        entry = entry_of(value)
        pieces += _whole(root, name, buffers[id(value)]) if entry is None else _part(entry, name, value)
    return pieces, aliases


def _part(entry: ShardedParam, name: str, value: Tensor) -> List[Piece]:
    """This rank's part of a tensor that has the parameter's elements. What all ranks have they share out."""
    of = Described(tensorfile.type_name(name, value.dtype), tuple(entry.shape))
    flat = value.detach().reshape(-1)
    begin, end = entry.part
    if entry.group.stage == 0:
        begin = min(entry.group.comm.rank * entry.length, entry.numel)
        end = min(begin + entry.length, entry.numel)
        flat = flat[begin:]
    return [Piece(name, of, begin, flat[: end - begin])]


def _whole(root: Root, name: str, value: Tensor, owned: bool = False) -> List[Piece]:
    """A tensor that all ranks have, which rank 0 writes, or one that this rank owns."""
    if root.group.comm.rank > 0 and not owned:
        return []
    of = Described(tensorfile.type_name(name, value.dtype), tuple(value.shape))
    return [Piece(name, of, 0, value.detach().reshape(-1))]


def _optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tuple[List[Piece], Dict[str, Any]]:
    """The optimizer's tensors, and the rest of its state with their names in place of them."""
    root, names = root_of(model), state.names_of(model)
    pieces: List[Piece] = []
    groups = []
    values: Dict[str, Dict[str, Any]] = {}
    for group, shown in zip(optimizer.param_groups, optimizer.state_dict()["param_groups"]):
        for param in group["params"]:
            if id(param) not in names:
                raise ValueError(f"save_checkpoint: the optimizer has a parameter of shape {tuple(param.shape)} that "
                                 "the model does not have")
            name, entry = names[id(param)], entry_of(param)
            for key, value in optimizer.state.get(param, {}).items():
                if not isinstance(value, Tensor):
                    values.setdefault(name, {})[key] = value
                    continue
                tensor = f"{_OPTIMIZER}{name}/{key}"
                owned = state.is_owned(optimizer, key)
                if entry is not None and not owned and state.is_part(entry, key, value):
                    pieces += _part(entry, tensor, value)
                else:
                    pieces += _whole(root, tensor, value, owned)
        groups.append({**{key: _plain(value) for key, value in shown.items()},
                       "params": [names[id(param)] for param in group["params"]]})
    return pieces, {"param_groups": groups, "values": values}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _merge(lists: List[List[Any]]) -> Tuple[Dict[str, Described], Dict[Tuple[str, int, int], int]]:
    """From what each rank can write, all tensors, and the rank that writes each: the first that has it."""
    tensors: Dict[str, Described] = {}
    writers: Dict[Tuple[str, int, int], int] = {}
    for rank, pieces in enumerate(lists):
        for name, (dtype, shape), begin, end in pieces:
            of = Described(dtype, tuple(shape))
            if tensors.setdefault(name, of) != of:
                raise ValueError(f"save_checkpoint: {name} is {dtype} {list(shape)} on rank {rank}, but "
                                 f"{tensors[name].dtype} {list(tensors[name].shape)} on a rank before it")
            writers.setdefault((name, begin, end), rank)
    ranges: Dict[str, List[Tuple[int, int]]] = {name: [] for name in tensors}
    for name, begin, end in writers:
        ranges[name].append((begin, end))
    for name, of in tensors.items():
        missing = tensorfile.cover(ranges[name], math.prod(of.shape))
        if missing:
            raise ValueError(f"save_checkpoint: no rank has elements {missing[0][0]} to {missing[0][1]} of {name}")
    return tensors, writers


# The file


def _write(root: Root, path: str, layout: Layout, pieces: List[Piece]) -> None:
    """All ranks write into a file beside the path, which then takes its place."""
    first = root.group.comm.rank == 0
    folder, name = os.path.split(os.path.abspath(path))
    token = state.all_gather_bytes(root, secrets.token_hex(8).encode())[0].decode()
    part = os.path.join(folder, f".{name}.{token}.part")

    def begin() -> None:
        if os.path.isdir(path):
            raise IsADirectoryError(f"save_checkpoint: path = {path!r} is a folder, must be a file's name")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            tensorfile.reserve(fd, layout.nbytes)
            tensorfile.write_bytes(fd, 0, layout.header)
        finally:
            os.close(fd)

    def fill() -> None:
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            rank = root.group.comm.rank
            raise FileNotFoundError(f"save_checkpoint: rank {rank} does not see {part}, which rank 0 made: "
                                    "path must be in a file system that all ranks share") from None
        try:
            for piece in pieces:
                place = layout.place(piece.name) + piece.begin * piece.elements.element_size()
                tensorfile.write(fd, place, piece.elements)
            os.fsync(fd)
        finally:
            os.close(fd)

    def end() -> None:
        os.replace(part, path)
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # the name
        finally:
            os.close(fd)

    try:
        _run_on_all_ranks(root, begin if first else lambda: None)
        _run_on_all_ranks(root, fill)
        _run_on_all_ranks(root, end if first else lambda: None)
    finally:
        if first and os.path.exists(part):
            os.unlink(part)


# What a file has


def _fit(model: nn.Module, path: Path, tensors: Mapping[str, Tensor], strict: bool) -> Dict[str, Tensor]:
    """The file's weights under the model's names; a tied weight may have any of its names."""
    current = model.state_dict(keep_vars=True)
    same: Dict[int, List[str]] = {}
    for name, value in current.items():
        same.setdefault(id(value), []).append(name)
    weights: Dict[str, Tensor] = {}
    missing = []
    for group in same.values():
        found = next((name for name in group if name in tensors), None)
        if found is None:
            missing.append(group[0])
            continue
        value = current[group[0]]
        entry = entry_of(value)
        shape = tuple(value.shape if entry is None else entry.shape)
        if tuple(tensors[found].shape) != shape:
            raise ValueError(f"load_checkpoint: {found} has shape {tuple(tensors[found].shape)} in {path}, must be "
                             f"{shape}")
        weights[group[0]] = tensors[found]
    unknown = [name for name in tensors if name not in current and not name.startswith((_EXTRA, _OPTIMIZER))]
    if strict and (missing or unknown):
        raise ValueError(f"load_checkpoint: {path} lacks {_some(missing)}, and has {_some(unknown)}, which the model "
                         "does not have; strict=False reads the rest")
    return weights


def _some(names: List[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"


def _states(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor],
            optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
    """The optimizer's whole state, as full_optimizer_state_dict() has it."""
    names = [name for group in metadata["param_groups"] for name in group["params"]]
    states: Dict[str, Dict[str, Any]] = {name: dict(metadata["values"].get(name, {})) for name in names}
    for tensor, value in tensors.items():
        if tensor.startswith(_OPTIMIZER):
            name, _, key = tensor[len(_OPTIMIZER):].rpartition("/")
            states[name][key] = value
    groups = [{key: _like(ours.get(key), value) for key, value in group.items()}
              for ours, group in zip(optimizer.param_groups, metadata["param_groups"])]
    if len(optimizer.param_groups) != len(metadata["param_groups"]):
        ours = len(optimizer.param_groups)
        raise ValueError(f"load_checkpoint: the optimizer has {ours} parameter group{'s' if ours != 1 else ''}, the "
                         f"saved one {len(metadata['param_groups'])}")
    return {"state": {name: values for name, values in states.items() if values}, "param_groups": groups}


def _like(ours: Any, value: Any) -> Any:
    """What JSON has made a list or a number, as the optimizer has it."""
    if isinstance(ours, tuple):
        return tuple(value)
    return torch.full_like(ours, value) if isinstance(ours, Tensor) else value
