"""Checks of a user's files and options. Each error names the argument, its value and what is allowed."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, Callable, Collection, Dict, Iterator

from ..arguments import check_size
from ..errors import Error

MAX_NAME = 200


def whole(name: str, value: Any, least: int, most: int) -> int:
    """An integer within bounds. JSON's true and false are refused."""
    if isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}, must be an integer")
    try:
        return check_size(name, value, most, least)
    except TypeError as error:
        raise ValueError(str(error)) from None


def real(name: str, value: float, least: float, most: float) -> float:
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} = {value}, must be {least:g} to {most:g}")
    return value


def title(name: str, value: Any) -> str:
    """A printable name: one with control characters could move a terminal's cursor and hide other output."""
    if not isinstance(value, str) or len(value) > MAX_NAME or not value.isprintable():
        raise ValueError(f"{name} = {str(value)[:MAX_NAME]!r}, must be a string of at most {MAX_NAME} characters, all "
                         "printable")
    return value


def stem(path: str) -> str:
    """A file's name for output, with unprintable characters replaced."""
    return "".join(letter if letter.isprintable() else "?" for letter in Path(path).stem)


def known(name: str, table: Dict[str, Any], keys: Collection[str]) -> None:
    """Refuses keys that are not known, such as misspelt ones."""
    unknown = sorted(set(table) - set(keys))
    if unknown:
        raise ValueError(f"{name} has {unknown[0]!r}, must have {', '.join(sorted(keys))} alone")


def read_json(path: str) -> Dict[str, Any]:
    """Reads a JSON object from a file. Each error has the file's name."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"file {path!r} cannot be read: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"file {path!r} is not JSON: {error}") from None
    except ValueError as error:  # a NUL in the name
        raise ValueError(f"file {path!r} cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"file {path!r} holds no JSON object")
    return table


@contextlib.contextmanager
def whole_file(name: str, path: str) -> Iterator[Path]:
    """Yields the path of a partial file that the block writes, and that then replaces `path`. An error leaves `path`
    unchanged."""
    partial = Path(f"{path}.part")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise ValueError(f"{name} = {path} cannot be written: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def run_command(name: str, body: Callable[[], int]) -> int:
    """Runs a command and returns its exit status: 2 for bad input, with a line on stderr, and 3 for lost output, as the
    other commands have. Output is written at the end, so that its errors differ from those of files."""
    if sys.stdout is None:
        print(f"{name}: stdout cannot be written: it is closed", file=sys.stderr)
        return 3
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            status = body()
    except (OSError, ValueError, TypeError, Error) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    try:
        sys.stdout.write(output.getvalue())
        sys.stdout.flush()
    except (OSError, UnicodeEncodeError) as error:
        print(f"{name}: stdout cannot be written: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards what is left in its buffer
        return 3
    return status
