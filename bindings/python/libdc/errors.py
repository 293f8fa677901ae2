"""Failures of the library as exceptions."""

from __future__ import annotations

from typing import Optional

from ._lib import lib, text
from .types import Status


class Error(RuntimeError):
    """A call that failed. status is the error's number, name its identifier ("DC_E_STATE"), text the library's message.
    For DC_E_INVALID it is a ValueError, too."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = int(status)
        self.text = message

    @property
    def name(self) -> str:
        return text(lib.dc_status_name(self.status))

    def __str__(self) -> str:
        return f"{self.text} [{self.name}]"


class InvalidError(Error, ValueError):
    """An argument's value is not allowed: DC_E_INVALID."""


def check(status: int, cause: Optional[BaseException] = None) -> None:
    """Raises Error unless status is 0. Call it on the thread that got the status, since the message is that
    thread's."""
    if status != 0:
        message = text(lib.dc_last_error()) or text(lib.dc_status_string(status))
        raise (InvalidError if status == Status.E_INVALID else Error)(status, message) from cause


def closed(kind: str) -> Error:
    return Error(Status.E_STATE, f"this {kind} is closed")
