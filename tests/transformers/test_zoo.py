"""Hugging Face's models, unchanged, train at stages 0, 1 and 3 with the losses of one process. The command zoo.py runs
them at every stage, and on more ranks."""

from __future__ import annotations

import pytest
from one_thread import one_thread  # noqa: F401
from zoo import LIMIT, ZOO, largest_difference


@pytest.mark.parametrize("name", ZOO)
def test_losses_are_those_of_one_process(name: str) -> None:
    for stage, difference in largest_difference(ZOO[name], [0, 1, 3], 2, 2).items():
        assert difference <= LIMIT, stage
