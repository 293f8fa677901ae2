"""Keeps dictionary keys that are not str through JSON, which would convert them to str. For example, a MultiStepLR's
milestones are numbers."""

from __future__ import annotations

from typing import Any, Dict

_PAIRS = "libdc.pairs"  # the only key of an object that holds a dictionary as pairs of key and value


def with_pairs(value: Any, path: str = "") -> Any:
    """The value with such dictionaries as lists of pairs. path: where the value is, for errors."""
    if isinstance(value, (list, tuple)):
        return [with_pairs(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        if value is not None and not isinstance(value, (str, int, float)):
            raise TypeError(f"save_checkpoint: {path} is of type {type(value).__name__}, must be a str, int, float, "
                            "bool or None, or a list or dict of them; of extra also a tensor, under a name of its own")
        return value
    for key in value:
        if key is not None and not isinstance(key, (str, int, float)):  # JSON would make a tuple a list
            raise TypeError(f"save_checkpoint: {path} has the key {key!r}, must be a str, int, float, bool or None")
    items = {key: with_pairs(item, f"{path}[{key!r}]" if path else str(key)) for key, item in value.items()}
    if all(isinstance(key, str) for key in items) and _PAIRS not in items:
        return items
    return {_PAIRS: [[key, item] for key, item in items.items()]}


def without_pairs(value: Dict[str, Any]) -> Dict[Any, Any]:
    """The inverse of with_pairs(), for json.loads(object_hook=...)."""
    return dict(value[_PAIRS]) if value.keys() == {_PAIRS} else value
