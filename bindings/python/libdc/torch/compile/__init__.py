"""torch.compile on sharded models: tracing.py puts operators into the graphs, passes.py orders them, and
dynamo_backend.py has backend="libdc". The entry point in pyproject.toml names `backend`."""

from __future__ import annotations

from .dynamo_backend import backend, register_backend

__all__ = ["backend", "register_backend"]
