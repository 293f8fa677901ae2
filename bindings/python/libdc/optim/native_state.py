"""The state of torch.optim.Optimizer over libdc's handle: `state` shows the library's own memory."""

from __future__ import annotations

import copy
from typing import Any, Dict, List, Optional, Pattern, Sequence, Set, Tuple

import torch
from torch import Tensor

from ..torch.sharding.part import plain_tensor
from . import arrays
from .param_shard import ParamShard, on_elements


_MAX_STEP = 1 << 53  # the library's limit


class NativeState(torch.optim.Optimizer):
    """The base of NativeOptimizer, which creates the library's optimizer and adds groups and parameters to it."""

    _owned_state: Optional[Pattern[str]] = None  # names of state of a block or a layer, which one rank has
    _optional_state: Sequence[str] = ("master",)  # pieces of state that torch.optim's namesake does not have
    _native: Optional[arrays.Optimizer]
    _parts: List[ParamShard]
    _state_ids: Optional[List[int]]  # of `state` as last compared

    def _reset_native(self) -> None:
        raise NotImplementedError

    def _name(self) -> str:
        return type(self).__name__

    def _find_device(self) -> None:
        raise NotImplementedError

    def _use_current_stream(self) -> None:
        raise NotImplementedError

    def _sync_group(self, index: int, group: Optional[Dict[str, Any]] = None) -> None:
        raise NotImplementedError

    def _add_param(self, param: Tensor, group: int) -> None:
        raise NotImplementedError

    def _sync_state(self) -> None:
        """Applies what the caller changed in `state` since the last step: a removed entry is initialised anew, and
        replaced tensors are copied."""
        if self._state_ids == self._shown_ids():
            return
        for index, part in enumerate(self._parts):
            entry, pieces = self.state.get(part.param), part.pieces
            if pieces is None or not entry:
                if pieces is not None:
                    self._clear(index)
                elif entry:
                    self._load_state({part.param: entry})
            elif len(entry) != len(pieces) or any(entry.get(name) is not piece for name, piece in pieces.items()):
                self._load_state({part.param: entry})
        self._state_ids = self._shown_ids()

    def _shown_ids(self) -> List[int]:
        """The ids of the tensors in `state`. The library's tensors live as long as this object, so no other tensor gets
        their ids."""
        return [id(piece) for entry in self.state.values() for piece in entry.values()]

    def _show_state(self, index: int, pieces: Dict[str, Tensor]) -> None:
        part = self._parts[index]
        part.pieces, self.state[part.param] = pieces, dict(pieces)
        self._state_ids = None  # so that the next step compares, and sees a removal

    def _views(self, index: int) -> Dict[str, Tensor]:
        """The pieces of a parameter's state: the library's own memory."""
        native, part = self._native, self._parts[index]
        assert native is not None
        pieces = {name: torch.from_dlpack(native.state(index, name)) for name in native.state_names(index)}
        return {name: piece if self.is_owned(name) else part.view(piece) for name, piece in pieces.items()}

    def is_owned(self, name: str) -> bool:
        """Whether a piece of state belongs to a block or a layer, which one rank owns."""
        return self._owned_state is not None and self._owned_state.match(name) is not None

    def pieces(self, param: Tensor) -> Set[str]:
        """The names of a parameter's state on this rank; empty if the optimizer does not have the parameter."""
        assert self._native is not None
        return {name for index, part in enumerate(self._parts) if part.param is param
                for name in self._native.state_names(index)}

    @on_elements
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:  # type: ignore[override]
        """As PyTorch's, except that state keeps its own types. A state of torch.optim's optimizer of the same name is
        taken, too. A parameter's state must be complete or absent. A state that does not fit is an error, and changes
        nothing."""
        hooked: List[Dict[str, Any]] = []  # the dictionary as hooks left it, with parts of whole tensors
        last = self.register_load_state_dict_pre_hook(lambda _, given: hooked.append(given))
        try:
            super().load_state_dict({**state_dict, "state": self._own_copies(state_dict["state"])})
        finally:
            last.remove()
        saved = hooked[0]["state"]  # PyTorch casts its own copy to the parameters' types
        numbers = [number for group in hooked[0]["param_groups"] for number in group["params"]]
        self._load_state({part.param: saved[i] for part, i in zip(self._parts, numbers) if i in saved})

    def _own_copies(self, state: Dict[int, Any]) -> Dict[int, Any]:
        """A state with copies in place of the library's own memory, which loading clears first. Such memory is here
        because state_dict() returns it, and torch.distributed.checkpoint loads into it."""
        own = {piece.data_ptr() for index in range(len(self._parts)) for piece in self._views(index).values()}

        def own_copy(value: Any) -> Any:
            shared = isinstance(value, Tensor) and plain_tensor(value).untyped_storage().data_ptr() in own
            return copy.deepcopy(value) if shared else value

        return {number: {name: own_copy(value) for name, value in values.items()} for number, values in state.items()}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """Completes load_state_dict(), copies and unpickling. A copy or an unpickled optimizer gets a new handle of the
        library."""
        for group in state["param_groups"]:  # torch.optim's states lack libdc's options
            for name, value in getattr(self, "defaults", state.get("defaults", {})).items():
                group.setdefault(name, value)
        before = dict(self.__dict__)
        if "_native" in before:  # raises before the groups and the old state are lost
            try:
                if all(part.pieces is None for part in self._parts) and self._is_remade(state["param_groups"]):
                    self._make_native(state["param_groups"])
                self._match_state(state["state"], state["param_groups"])
                self._use_current_stream()
                for index, group in enumerate(state["param_groups"]):
                    self._sync_group(index, group)
            except Exception:
                self.__dict__.update(before)
                raise
        super().__setstate__(state)
        given = self.state
        if "_native" not in before:
            self._make_native(self.param_groups)
        self.state = type(given)(dict)
        for index in range(len(self._parts)):
            self._clear(index)
        self._load_state(given)

    def _is_remade(self, groups: List[Dict[str, Any]]) -> bool:
        """Whether loading these groups into an optimizer without a state makes the library's anew, because their
        options decide on the pieces of its state."""
        return False

    def _make_native(self, groups: List[Dict[str, Any]]) -> None:
        """Makes the library's optimizer anew, for these groups."""
        self._reset_native()
        self._find_device()
        for index, group in enumerate(groups):
            self._sync_group(index, group)
            for param in group["params"]:
                self._add_param(param, index)

    def _clear(self, index: int) -> None:
        """Resets a parameter's state to that before its first step."""
        for name, piece in self._views(index).items():
            self._init_piece(name, piece)
        self._parts[index].pieces = None

    def _init_piece(self, name: str, piece: Tensor) -> None:
        piece.zero_()
        self._init_state_piece(name, piece)

    def _init_state_piece(self, name: str, piece: Tensor) -> None:
        """Sets initial values that are not zeros. Overridden by optimizers that have some."""

    def _load_state(self, given: Any) -> None:
        """Copies a state dictionary's values into the library's memory."""
        for index, views, values in self._match_state(given, self.param_groups):
            for name, piece in views.items():
                if name in values:
                    piece.copy_(values[name])
                else:
                    self._init_piece(name, piece)
            self._show_state(index, views)

    def _match_state(self, given: Any, groups: Any) -> List[Tuple[int, Dict[str, Tensor], Dict[str, Tensor]]]:
        """For each parameter that has state in the dictionary: its index, the library's pieces, and the values for
        them."""
        fitted = []
        group_of = [group for group in groups for _ in group["params"]]
        for index, (part, group) in enumerate(zip(self._parts, group_of)):
            if not given.get(part.param):
                continue
            views = self._views(index)
            saved = {name: value for name, value in given[part.param].items() if value is not None}
            if "master" not in views:  # a float32 parameter is its own master copy
                saved.pop("master", None)
            state = self._from_torch_state(saved, part, group, views)
            lacking = [name for name in views if name not in state and name not in self._optional_state]
            if lacking:
                raise ValueError(f"{self._name()}: the state of parameter {index} lacks {lacking[0]!r}")
            values = {}
            for name, value in state.items():
                if name not in views:
                    raise ValueError(f"{self._name()}: parameter {index} has no state {name!r}, only "
                                     f"{', '.join(views)}")
                values[name] = self._check_piece(index, name, views[name], torch.as_tensor(value))
            fitted.append((index, views, values))
        return fitted

    def _from_torch_state(self, state: Dict[str, Any], part: ParamShard, group: Dict[str, Any],
                  views: Dict[str, Tensor]) -> Dict[str, Any]:
        """Converts a parameter's state from torch.optim's optimizer of the same name, where the library's pieces
        differ."""
        return state

    def _check_piece(self, index: int, name: str, view: Tensor, value: Tensor) -> Tensor:
        part = self._parts[index]
        if view.shape == (part.count,) and value.shape == (part.length,):
            value = value[: part.count]  # drops the padding of a sharded parameter
        if value.shape != view.shape:
            raise ValueError(f"{self._name()}: state {name!r} of parameter {index} has shape {tuple(value.shape)}, "
                             f"must be {tuple(view.shape)}")
        if name == "step" and not (0 <= float(value) <= _MAX_STEP and float(value).is_integer()):
            raise ValueError(f"{self._name()}: step of parameter {index} = {float(value)}, must be a whole number from "
                             f"0 to 2^53")
        return value
