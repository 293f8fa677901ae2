"""torch.distributed's backend "libdc": after `import libdc.torch`, init_process_group("libdc") works. See
docs/torch-distributed.md."""

from __future__ import annotations

import torch

__all__ = ["LibdcProcessGroup"]

if torch.distributed.is_available():
    from .group import LibdcProcessGroup

    torch.distributed.Backend.register_backend("libdc", LibdcProcessGroup.create, extended_api=True, devices=["cpu"])
    # From PyTorch 2.15 on, groups of other backends get a hook that a group of a Python class cannot have.
    getattr(torch.distributed.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("libdc")
