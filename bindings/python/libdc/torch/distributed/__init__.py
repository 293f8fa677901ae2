"""torch.distributed's backend "libdc": after `import libdc.torch`, init_process_group("libdc") works. See
docs/torch-distributed.md."""

from __future__ import annotations

import torch

__all__ = ["LibdcProcessGroup"]

if torch.distributed.is_available():
    from .group import LibdcProcessGroup

    torch.distributed.Backend.register_backend("libdc", LibdcProcessGroup.create, extended_api=True, devices=["cpu"])
