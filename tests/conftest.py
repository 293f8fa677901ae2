"""Shared by the tests of all folders."""

from __future__ import annotations

import contextlib
import socket
from typing import Iterator

import pytest


@pytest.fixture
def port() -> Iterator[int]:
    """The first of four consecutive ports that no other process is given: sockets that do not listen hold them."""
    while True:
        with contextlib.ExitStack() as stack:
            first = _hold(stack, 0)
            if first and all(_hold(stack, first + behind) for behind in range(1, 4)):
                yield first
                return


def _hold(stack: contextlib.ExitStack, port: int) -> int:
    """0: another process has it."""
    held = stack.enter_context(socket.socket())
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(("127.0.0.1", port))
    except (OSError, OverflowError):
        return 0
    return int(held.getsockname()[1])
