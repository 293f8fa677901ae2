"""What the first shard() of a process changes in PyTorch. Nothing changes for models that are not sharded."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Once: functions that read parameters or gradients learn of sharded ones (foreign.py), gradient scalers agree on
    found_inf (scaler.py), and an optimizer's step announces the parameters that it changed (shard.py)."""
    from . import foreign, scaler
    from .shard import announce_steps

    global _installed
    with _lock:
        if not _installed:
            _installed = True
            foreign.patch_torch_functions()
            scaler.patch_grad_scaler()
            announce_steps()
