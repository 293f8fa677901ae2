"""LIBDC_DEEPSPEED: enables libdc.torch.deepspeed in every Python of a job, once DeepSpeed has been imported, without a
line in its scripts. libdc-deepspeed.pth imports this when the variable is set: to 1, or to a communicator of
enable()."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import Any, Optional


class _Finder(importlib.abc.MetaPathFinder):
    """Finds DeepSpeed where the others do, and has the last word in its import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Optional[Any]:
        if name != "deepspeed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _append(spec.loader)
        return spec


def _append(loader: Any) -> None:
    exec_module = loader.exec_module

    def execute(module: Any) -> None:
        exec_module(module)
        import libdc.torch.deepspeed

        value = os.environ["LIBDC_DEEPSPEED"]
        libdc.torch.deepspeed.enable("auto" if value == "1" else value)

    loader.exec_module = execute


sys.meta_path.insert(0, _Finder())
