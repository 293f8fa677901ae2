"""Dictionaries with other keys than str in JSON, which makes str of them. A MultiStepLR's milestones are numbers."""

from __future__ import annotations

from typing import Any, Dict

_PAIRS = "libdc.pairs"  # the only key of an object that has a dictionary's keys and values as pairs


def with_pairs(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [with_pairs(item) for item in value]
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value) and _PAIRS not in value:
        return {key: with_pairs(item) for key, item in value.items()}
    return {_PAIRS: [[key, with_pairs(item)] for key, item in value.items()]}


def without_pairs(value: Dict[str, Any]) -> Dict[Any, Any]:
    """For json.loads(object_hook=...)."""
    return dict(value[_PAIRS]) if value.keys() == {_PAIRS} else value
