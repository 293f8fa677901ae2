"""Checks of arguments. Their errors name the argument, which cffi's own do not."""

from __future__ import annotations

import os
from typing import Any, Mapping, Optional, Tuple

from ._lib import ffi


def counted(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun, such as "1 entry" or "2 entries"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def c_string(name: str, value: Any) -> bytes:
    """A string for C, where a NUL would end it. The error does not show a secret, since errors reach logs."""
    shown = f"a {type(value).__name__}" if name == "secret" else repr(value)
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"{name} = {shown}, must be a str without NUL")
    try:
        return value.encode()
    except UnicodeEncodeError:  # os.fsdecode() makes such halves of a pair
        raise ValueError(f"{name} = {shown}, must have characters of UTF-8 alone") from None


def c_path(name: str, value: Any) -> bytes:
    """A path for C, where a NUL would end it."""
    try:
        path = os.fsencode(value)
    except (TypeError, UnicodeEncodeError):
        path = b"\0"
    if b"\0" in path:
        raise TypeError(f"{name} = {value!r}, must be a path without NUL")
    return path


def check_size(name: str, value: Any, maximum: int = (1 << 63) - 1, minimum: int = 0) -> int:
    """An integer within bounds: a number of things or bytes."""
    try:
        number = value.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"{name} = {value!r}, must be an integer") from None
    if not minimum <= number <= maximum:
        raise ValueError(f"{name} = {value!r}, must be {minimum} to {maximum}")
    return int(number)


def c_int(name: str, value: Any) -> int:
    """Any integer of 32 bits: which ones are allowed is the library's to say."""
    return check_size(name, value, (1 << 31) - 1, -(1 << 31))


def c_int64(name: str, value: Any) -> int:
    """The same of 64 bits."""
    return check_size(name, value, minimum=-(1 << 63))


def c_double(name: str, value: Any) -> float:
    """Any number, likewise."""
    try:
        return float(ffi.new("double *", value)[0])
    except (TypeError, OverflowError):
        raise TypeError(f"{name} = {value!r}, must be a number") from None


def flag(name: str, value: Any) -> bool:
    """A switch. Any object has a truth, and that of "False" is True."""
    given = value.item() if hasattr(value, "item") else value
    if not isinstance(given, int) or given not in (0, 1):
        raise TypeError(f"{name} = {value!r}, must be True or False")
    return bool(given)


def int64_array(name: str, values: Any) -> Tuple[Any, int]:
    """(int64_t[], count) of a sequence of integers. The array of an empty sequence has one element."""
    try:
        return ffi.new("int64_t[]", list(values) or [0]), len(values)
    except (TypeError, OverflowError):
        raise TypeError(f"{name} = {values!r}, must be a sequence of 64-bit integers") from None


def choice(name: str, value: Any, allowed: Mapping[str, int]) -> int:
    """The library's number for a choice that Python names by a string."""
    if value not in allowed:
        raise ValueError(f"{name} = {value!r}, must be one of {', '.join(map(repr, allowed))}")
    return allowed[value]


def assign(struct: Any, field: str, value: Any, name: str) -> None:
    """Sets a field of a struct. `name` is the argument's in errors."""
    try:
        setattr(struct, field, value)
    except (TypeError, OverflowError):
        kind = dict(ffi.typeof(struct).item.fields)[field].type.cname
        raise TypeError(f"{name} = {value!r}, must be a number that C's {kind} holds") from None


def handle_arg(name: str, value: Any, kind: Any, optional: bool = True) -> Any:
    """The handle of an object of the package, or NULL for None where that is allowed."""
    if value is None and optional:
        return ffi.NULL
    if not isinstance(value, kind):
        raise TypeError(f"{name} = {value!r}, must be a {kind.__name__}{' or None' if optional else ''}")
    return value._handle


def timeout_ns(timeout: Any, name: str = "timeout") -> int:
    """Seconds as nanoseconds, for timeout_ns and other times. None becomes 0, the library's default."""
    if timeout is None:
        return 0
    try:
        seconds = float(timeout)
    except (TypeError, ValueError):
        raise TypeError(f"{name} = {timeout!r}, must be a number of seconds, or None") from None
    if not 0 < seconds <= 9e9:
        raise ValueError(f"{name} = {timeout!r}, must be > 0 seconds and at most 9e9, or None")
    return max(1, int(seconds * 1e9))


def environment_number(name: str) -> Optional[int]:
    """The number in an environment variable; None if it is not set, or empty."""
    value = os.environ.get(name)
    if value and not (value.isascii() and value.isdigit()):
        raise ValueError(f"{name}={value} in the environment: must be a number >= 0")
    return int(value) if value else None
