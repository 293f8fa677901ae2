"""Rules for some modules or parameters of a sharded model: shard(..., policy={pattern: Policy(...)}).

FSDP2 uses nested calls in place of the map. Here one call of shard() has one context: the ranks compare the whole model
once, and neighbours in the order of use share handshakes and buckets. Nested calls would have to wait for the last
one."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class Policy(NamedTuple):
    """Rules for the modules or parameters that a pattern matches. A module's rules hold for all that is in it, unless a
    module or parameter inside has its own. None: the rule of the surrounding module.

    param_dtype            as in shard()
    reduce_dtype           as in shard()
    reshard_after_forward  False: at stage 3 weights stay whole until the optimizer's step, as at stage 2
    ignored                True: parameters are not sharded, and differ by rank; their gradients are not averaged
    group                  True: the parameters of each module that the pattern matches are gathered as one, however
                           many elements they have, and not with others
    cast_forward_inputs    True: floating-point tensors among the module's forward arguments are cast to param_dtype
    output_dtype           type of floating-point tensors that the module's forward returns"""

    param_dtype: Optional[torch.dtype] = None
    reduce_dtype: Optional[torch.dtype] = None
    reshard_after_forward: Optional[bool] = None
    ignored: Optional[bool] = None
    group: Optional[bool] = None
    cast_forward_inputs: Optional[bool] = None
    output_dtype: Optional[torch.dtype] = None


class Casts(NamedTuple):
    """Types to which a module's forward casts inputs and outputs; None: no cast."""

    inputs: Optional[torch.dtype] = None
    outputs: Optional[torch.dtype] = None

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def cast(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.inputs is not None:
                args, kwargs = _cast(args, self.inputs), _cast(kwargs, self.inputs)
            result = forward(self_, *args, **kwargs)
            return result if self.outputs is None else _cast(result, self.outputs)

        return cast


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Casts floating-point tensors in lists, tuples, dictionaries and dataclasses."""
    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        fields = {field.name: _cast(getattr(leaf, field.name), dtype) for field in dataclasses.fields(leaf)}
        other = copy.copy(leaf)
        for name, value in fields.items():
            object.__setattr__(other, name, value)
        return other

    return tree_map(cast, values)


class ParamPolicy(NamedTuple):
    """The rules for one parameter."""

    param_dtype: Optional[torch.dtype]
    reduce_dtype: Optional[torch.dtype]
    persistent: bool = False  # stays whole until the optimizer's step
    ignored: bool = False
    group: int = 0  # parameters with the same number are gathered as one; 0: no such group


class Policies:
    """The rules for each parameter and module of a model."""

    def __init__(self, model: nn.Module, policy: Optional[Mapping[str, Policy]], param_dtype: Optional[torch.dtype],
                 reduce_dtype: Optional[torch.dtype]) -> None:
        self.given = dict(policy or {})
        self._patterns = [(_pattern(text), rules) for text, rules in self.given.items()]
        self._named: Set[int] = set()  # patterns that match something
        self._groups = 0
        self.params: Dict[nn.Parameter, ParamPolicy] = {}
        self.casts: Dict[nn.Module, Casts] = {}
        self._names: Dict[nn.Parameter, str] = {}
        around = Policy(param_dtype, reduce_dtype)
        self._visit(model, "", around, 0, set())
        for number, text in enumerate(self.given):
            if number not in self._named:
                raise ValueError(f"shard: policy[{text!r}] names no module and no parameter of the model, as "
                                 "named_modules() and named_parameters() have them; * stands for one part of a name, "
                                 "** for any number")

    def forget_model(self) -> None:
        """Drops references to the model, once all parameters and modules have their rules."""
        self.params, self.casts, self._names = {}, {}, {}

    def of(self, param: nn.Parameter) -> ParamPolicy:
        return self.params[param]

    def __str__(self) -> str:
        return str({text: {name: str(value) for name, value in rules._asdict().items() if value is not None}
                    for text, rules in self.given.items()})

    def _visit(self, module: nn.Module, name: str, around: Policy, group: int, above: Set[nn.Module]) -> None:
        rules, own = self._merge(name, around)
        if own.group is not None:
            self._groups += bool(own.group)
            group = self._groups if own.group else 0
        self._note_casts(module, name, rules, own)
        prefix = name + "." if name else ""
        for key, param in module._parameters.items():
            if param is not None:
                self._note_param(prefix + key, param, rules, group)
        for key, child in module._modules.items():
            if child is not None and child not in above:
                self._visit(child, prefix + key, rules, group, above | {module})

    def _merge(self, name: str, around: Policy) -> Tuple[Policy, Policy]:
        """The rules for a name, merged with those around it; and the rules that patterns give the name itself."""
        own = Policy()
        for number, (pattern, rules) in enumerate(self._patterns):
            if pattern.fullmatch(name):
                self._named.add(number)
                own = _over(own, rules)
        return _over(around, own), own

    def _note_casts(self, module: nn.Module, name: str, rules: Policy, own: Policy) -> None:
        if own.cast_forward_inputs and rules.param_dtype is None:
            raise ValueError(f"shard: policy of {name or 'the model'}: cast_forward_inputs = True without a "
                             "param_dtype, which the inputs would get")
        casts = Casts(rules.param_dtype if own.cast_forward_inputs else None, own.output_dtype)
        if casts != Casts() and self.casts.setdefault(module, casts) != casts:
            raise ValueError(f"shard: policy of {name}: the module has another name, for which the policy differs")

    def _note_param(self, name: str, param: nn.Parameter, rules: Policy, group: int) -> None:
        rules, own = self._merge(name, rules)
        for field in ("group", "cast_forward_inputs", "output_dtype"):
            if getattr(own, field) is not None:
                raise ValueError(f"shard: policy of {name}: {field} is for modules, and this is a parameter")
        found = ParamPolicy(rules.param_dtype if param.is_floating_point() else None, rules.reduce_dtype,
                            rules.reshard_after_forward is False, bool(rules.ignored), group)
        first = self.params.setdefault(param, found)
        if first._replace(group=0) != found._replace(group=0):
            raise ValueError(f"shard: policy of {name}: the parameter is tied to {self._names[param]}, for which the "
                             "policy differs")
        self._names.setdefault(param, name)


def _over(rules: Policy, own: Policy) -> Policy:
    return rules._replace(**{name: value for name, value in own._asdict().items() if value is not None})


def _pattern(text: str) -> "re.Pattern[str]":
    """Compiles a pattern: `*` matches one part of a name, `**` any number of them."""
    parts: List[str] = re.split(r"(\*\*|\*)", text)
    return re.compile("".join({"*": "[^.]+", "**": ".+"}.get(part, re.escape(part)) for part in parts))


def check(policy: Any) -> None:
    """Raises if policy is not a map from patterns to rules."""
    if policy is not None and not isinstance(policy, Mapping):
        raise TypeError(f"shard: policy is a {type(policy).__name__}, must map patterns to libdc.torch.Policy")
    for text, rules in (policy or {}).items():
        if not isinstance(text, str) or not isinstance(rules, Policy):
            raise TypeError(f"shard: policy[{text!r}] is a {type(rules).__name__}, must be a libdc.torch.Policy")
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(rules, field)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise TypeError(f"shard: policy[{text!r}]: {field} = {value!r}, must be a floating-point torch.dtype "
                                "or None")
        for field in ("reshard_after_forward", "ignored", "group", "cast_forward_inputs"):
            value = getattr(rules, field)
            if value not in (True, False, None):
                raise TypeError(f"shard: policy[{text!r}]: {field} = {value!r}, must be True, False or None")
