"""Enables libdc.torch.deepspeed in every Python that has this folder in PYTHONPATH, also in those that DeepSpeed's own
tests spawn, once DeepSpeed has been imported."""

from __future__ import annotations

import importlib.abc
import importlib.util
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

        libdc.torch.deepspeed.enable()

    loader.exec_module = execute


sys.meta_path.insert(0, _Finder())
