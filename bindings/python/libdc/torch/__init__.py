"""libdc for PyTorch: shard(model, stage) trains a model whose state is sharded over ranks. See docs/torch.md."""

from __future__ import annotations

from .. import _pytorch  # first
from . import dc, distributed
from .checkpoint.save_load import load_checkpoint, save_checkpoint
from .checkpoint.state_dict import (full_optimizer_state_dict, full_state_dict, load_full_optimizer_state_dict,
                                    load_full_state_dict)
from .default_comm import init
from .planning import plan
from .process_group import comm_from_process_group
from .sharding.clip_grad import clip_grad_norm_
from .sharding.model import (full_shape, gathered, grads_finite, no_sync, prefetch, reshard, stats, trace_read,
                             trace_start, unshard)
from .sharding.policy import Policy
from .sharding.shard import shard
from .transformer.caching_allocator import set_cache_limit
from .transformer.deepspeed_layer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from .transformer.layer import TransformerLayer, bert_layer_state, load_bert_layer

__all__ = [
    "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer", "Policy", "TransformerLayer", "bert_layer_state",
    "clip_grad_norm_", "comm_from_process_group", "dc", "distributed", "full_optimizer_state_dict", "full_shape",
    "full_state_dict", "gathered", "grads_finite", "init", "load_bert_layer", "load_checkpoint",
    "load_full_optimizer_state_dict", "load_full_state_dict", "no_sync", "plan", "prefetch", "reshard",
    "save_checkpoint", "set_cache_limit", "shard", "stats", "trace_read", "trace_start", "unshard",
]  # fmt: skip
