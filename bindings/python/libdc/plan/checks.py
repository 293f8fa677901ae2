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
    """An integer, which JSON's true and false are not."""
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
    """A name as it is shown: one that moves a terminal's cursor could hide what stands beside it."""
    if not isinstance(value, str) or len(value) > MAX_NAME or not value.isprintable():
        raise ValueError(f"{name} = {str(value)[:MAX_NAME]!r}, must be a string of at most {MAX_NAME} characters, all "
                         "printable")
    return value


def stem(path: str) -> str:
    """A file's name, which may have any bytes, to be shown."""
    return "".join(letter if letter.isprintable() else "?" for letter in Path(path).stem)


def known(name: str, table: Dict[str, Any], keys: Collection[str]) -> None:
    """No key is misspelt."""
    unknown = sorted(set(table) - set(keys))
    if unknown:
        raise ValueError(f"{name} has {unknown[0]!r}, must have {', '.join(sorted(keys))} alone")


def read_json(path: str) -> Dict[str, Any]:
    """An object from a file, with the file's name in each error."""
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
    """Where the block writes, which takes the place of `path` then. After an error `path` is as it was."""
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
    """A command's exit status. Bad input is a line on stderr and 2, lost output 3, as of the other commands. Output is
    written at the end, so that its errors are told from those of files."""
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer goes nowhere
        return 3
    return status
