"""Hugging Face's own BERT with random weights, in float64, beside libdc's layers with the same weights: outputs and all
gradients. tests/torch has the same of a model that is written there."""

from __future__ import annotations

from typing import Any, Dict, Optional

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertLayer

from libdc.torch import TransformerLayer, bert_layer_state, load_bert_layer
from libdc.transformer import LayerConfig

LAYERS = 3


def hugging_face(**more: Any) -> BertConfig:
    return BertConfig(vocab_size=101, hidden_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
                      intermediate_size=160, max_position_embeddings=40, hidden_dropout_prob=0.0,
                      attention_probs_dropout_prob=0.0, initializer_range=0.1, attn_implementation="eager", **more)


class InBert(TransformerLayer):
    """libdc's layer in a BertLayer's place. Hugging Face's mask repeats the keys' for every query."""

    def __init__(self, config: BertConfig, state: Dict[str, Tensor]) -> None:
        gelu = "erf" if config.hidden_act == "gelu" else "tanh"
        super().__init__(LayerConfig(config.hidden_size, config.num_attention_heads, config.intermediate_size,
                                     gelu=gelu, layer_norm_eps=config.layer_norm_eps, pre_layer_norm=False))
        load_bert_layer(self, state)

    def forward(self, hidden_states: Tensor, attention_mask: Optional[Tensor] = None, *_: Any, **__: Any  # type: ignore
                ) -> Tensor:
        return super().forward(hidden_states, None if attention_mask is None else attention_mask[:, :, :1])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def compare_gradients(layer: TransformerLayer, theirs: nn.Module, gate: float) -> None:
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    wanted = TransformerLayer(layer.config).double()
    load_bert_layer(wanted, gradients)
    for name, parameter in layer.named_parameters():
        assert relative(parameter.grad, getattr(wanted, name)) <= gate, name


@pytest.mark.parametrize("act", ["gelu", "gelu_new"])
@pytest.mark.parametrize("dtype,gate", [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)],
                         ids=str)
def test_06_a_layer(dtype: torch.dtype, gate: float, act: str) -> None:
    torch.manual_seed(0)
    theirs = BertLayer(hugging_face(hidden_act=act)).double()
    ours = InBert(hugging_face(hidden_act=act), theirs.state_dict()).to(dtype)
    theirs.load_state_dict(bert_layer_state(ours))  # rounded alike
    x, dy = torch.randn(3, 17, 96).to(dtype), torch.randn(3, 17, 96).to(dtype)
    mask = torch.zeros(3, 1, 1, 17)
    mask[1, ..., 9:] = -10000
    x32, x64 = x.clone().requires_grad_(), x.double().requires_grad_()
    found, expected = ours(x32, mask), theirs(x64, mask.double())
    found.backward(dy)
    expected.backward(dy.double())
    assert relative(found, expected) <= gate and relative(x32.grad, x64.grad) <= gate
    compare_gradients(ours, theirs, gate)


def test_06_a_model() -> None:
    """All layers of a BertModel replaced, with padding; what is compared does not depend on the padded places."""
    torch.manual_seed(1)
    config = hugging_face()
    theirs, ours = BertModel(config, add_pooling_layer=False).double(), BertModel(config, add_pooling_layer=False)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())  # rounded alike
    for i, layer in enumerate(ours.encoder.layer):
        ours.encoder.layer[i] = InBert(config, layer.state_dict())
    ids, keep = torch.randint(config.vocab_size, (4, 30)), torch.ones(4, 30, dtype=torch.long)
    keep[2, 11:] = 0
    dy = torch.randn(4, 30, 96) * keep[..., None]
    outputs = []
    for model in (ours, theirs):
        y = model(input_ids=ids, attention_mask=keep).last_hidden_state * keep[..., None]
        y.backward(dy.to(y.dtype))
        outputs.append(y)
    assert relative(*outputs) <= 2e-6
    for one, other in zip(ours.encoder.layer, theirs.encoder.layer):
        compare_gradients(one, other, 4e-6)
    for one, other in zip(ours.embeddings.parameters(), theirs.embeddings.parameters()):
        assert relative(one.grad, other.grad) <= 4e-6
