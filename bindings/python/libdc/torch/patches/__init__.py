"""Patches of PyTorch that the first shard() of a process applies. Models that are not sharded run as before."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Patches PyTorch once. Its functions then support sharded parameters (torch_functions.py), gradient scalers agree
    on found_inf (grad_scaler.py), and an optimizer's step announces the parameters that it changed (optimizer_step.py).
    """
    from . import grad_scaler, optimizer_step, torch_functions

    global _installed
    with _lock:
        if not _installed:
            _installed = True
            torch_functions.patch_torch_functions()
            grad_scaler.patch_grad_scaler()
            optimizer_step.announce_steps()
