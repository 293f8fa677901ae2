"""Replaces DeepSpeed's transformer layer by libdc's, as part of enable()."""

from __future__ import annotations

import sys

from ..transformer import deepspeed_layer


def replace() -> None:
    """Replaces DeepSpeedTransformerLayer and DeepSpeedTransformerConfig by libdc's in every loaded module of DeepSpeed
    that has them."""
    import deepspeed.ops.transformer.transformer as original

    for ours in (deepspeed_layer.DeepSpeedTransformerLayer, deepspeed_layer.DeepSpeedTransformerConfig):
        theirs = getattr(original, ours.__name__)
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "deepspeed" and module.__dict__.get(ours.__name__) is theirs:
                setattr(module, ours.__name__, ours)
