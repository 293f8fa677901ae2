"""DeepSpeed's transformer layer, by the same switch: its names stand for libdc's."""

from __future__ import annotations

import sys

from ..transformer import deepspeed_layer


def replace() -> None:
    """Wherever a module of DeepSpeed has its own DeepSpeedTransformerLayer or DeepSpeedTransformerConfig, it has
    libdc's from now on."""
    import deepspeed.ops.transformer.transformer as original

    for ours in (deepspeed_layer.DeepSpeedTransformerLayer, deepspeed_layer.DeepSpeedTransformerConfig):
        theirs = getattr(original, ours.__name__)
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "deepspeed" and module.__dict__.get(ours.__name__) is theirs:
                setattr(module, ours.__name__, ours)
