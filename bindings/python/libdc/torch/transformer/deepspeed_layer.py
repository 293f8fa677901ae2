"""The transformer layer under DeepSpeed's names, for code that is written for its kernel."""

from __future__ import annotations

import dataclasses
import json
import weakref
from typing import Any, List, Mapping, MutableMapping, Optional, Sequence

import torch
from torch import Tensor

from libdc.transformer import LayerConfig

from .layer import TransformerLayer


class DeepSpeedTransformerConfig:
    """The configuration of DeepSpeed's transformer kernel, with the same arguments. Meaningless values that the
    original accepts silently, such as ratios below 0, are refused when a layer is made."""

    def __init__(self, batch_size: int = -1, hidden_size: int = -1, intermediate_size: int = -1, heads: int = -1,
                 attn_dropout_ratio: float = 0.0, hidden_dropout_ratio: float = 0.0, num_hidden_layers: int = -1,
                 initializer_range: float = -1, layer_norm_eps: float = 1e-12, local_rank: int = -1, seed: int = -1,
                 fp16: bool = False, pre_layer_norm: bool = True, normalize_invertible: bool = False,
                 gelu_checkpoint: bool = False, adjust_init_range: bool = True,
                 attn_dropout_checkpoint: bool = False, stochastic_mode: bool = False, return_tuple: bool = False,
                 training: bool = True, max_seq_length: int = -1) -> None:
        values = dict(locals())
        del values["self"]
        self.__dict__.update(values)

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> "DeepSpeedTransformerConfig":
        config = cls()
        for key, value in json_object.items():
            if key not in config.__dict__:
                raise ValueError(f"{key} is no parameter; allowed are {', '.join(config.__dict__)}")
            setattr(config, key, value)
        return config

    @classmethod
    def from_json_file(cls, json_file: str) -> "DeepSpeedTransformerConfig":
        with open(json_file, encoding="utf-8") as file:
            return cls.from_dict(json.load(file))

    def layer_config(self, layer_id: int) -> LayerConfig:
        """The library's configuration, where 0 means "not given", as -1 does in DeepSpeed's."""
        fields = {field.name for field in dataclasses.fields(LayerConfig)}
        values = {key: value for key, value in self.__dict__.items() if key in fields}
        for key in ("batch_size", "max_seq_length", "intermediate_size", "num_hidden_layers", "initializer_range"):
            values[key] = 0 if values[key] == -1 else values[key]
        # As in the original, batch_size and max_seq_length are only hints: any number of samples and tokens runs.
        return LayerConfig(**{**values, "batch_size": 0, "max_seq_length": 0, "layer_id": layer_id, "training": True})


# The original's names for the weights in its list of gradients.
_GRADS = {"attn_qkvw": "V_W", "attn_qkvb": "V_B", "attn_ow": "O_W", "attn_ob": "O_B", "attn_nw": "N2_W",
          "attn_nb": "N2_B", "inter_w": "int_W", "inter_b": "int_B", "output_w": "out_W", "output_b": "out_B",
          "norm_w": "norm_W", "norm_b": "norm_B"}  # fmt: skip

# Handles of hooks, from a layer's latest forward with `grads`. They are outside of the layer, since they can be neither
# copied nor pickled.
_GRAD_HOOKS: MutableMapping["DeepSpeedTransformerLayer", List[Any]] = weakref.WeakKeyDictionary()


class DeepSpeedTransformerLayer(TransformerLayer):
    """DeepSpeed's layer: DeepSpeedTransformerLayer(config), forward(hidden_states, attention_mask). Layers number
    themselves, so one configuration serves all layers of a model."""

    layer_id = 0

    def __init__(self, config: DeepSpeedTransformerConfig, initial_weights: Optional[Sequence[Tensor]] = None,
                 initial_biases: Optional[Sequence[Tensor]] = None) -> None:
        own = config.layer_config(DeepSpeedTransformerLayer.layer_id)
        DeepSpeedTransformerLayer.layer_id += 1
        super().__init__(own)
        self.return_tuple = config.return_tuple
        if initial_weights is not None and initial_biases is not None:
            self._initial(initial_weights, initial_biases)

    def _initial(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        """Copies initial values, in this order: query, key, value, attention output, the norm after attention, both
        feed-forward layers, the other norm."""
        names = [("attn_ow", "attn_ob"), ("attn_nw", "attn_nb"), ("inter_w", "inter_b"), ("output_w", "output_b"),
                 ("norm_w", "norm_b")]  # fmt: skip
        with torch.no_grad():
            self.attn_qkvw.copy_(torch.cat(list(weights[:3])))
            self.attn_qkvb.copy_(torch.cat(list(biases[:3])))
            for (weight, bias), w, b in zip(names, weights[3:], biases[3:]):
                getattr(self, weight).copy_(w)
                getattr(self, bias).copy_(b)

    def forward(self, hidden_states: Tensor, attention_mask: Optional[Tensor] = None,  # type: ignore[override]
                head_mask: Any = None, layer_head_mask: Any = None, encoder_hidden_states: Any = None,
                encoder_attention_mask: Any = None, past_key_value: Any = None, output_attentions: bool = False,
                grads: Any = None) -> Any:
        given = {"head_mask": head_mask, "layer_head_mask": layer_head_mask, "past_key_value": past_key_value,
                 "encoder_hidden_states": encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask,
                 "output_attentions": output_attentions or None}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} is given, but this layer has no such thing")
        if torch.is_grad_enabled():
            for handle in _GRAD_HOOKS.pop(self, ()):
                handle.remove()
            if grads is not None:
                self._hand_out(grads)
        output = super().forward(hidden_states, attention_mask)
        return (output,) if self.return_tuple else output

    def _hand_out(self, grads: List[Any]) -> None:
        """Makes backward append [gradient, name] to the list for each weight, until the next forward. Of query, key and
        value it appends only value's."""
        handles = _GRAD_HOOKS.setdefault(self, [])
        for name, called in _GRADS.items():
            weight = getattr(self, name)
            rows = slice(2 * self.config.hidden_size, None) if called.startswith("V_") else slice(None)
            if weight.requires_grad:
                handles.append(Tensor.register_hook(  # for this forward only; gathered weights refuse this
                    weight, lambda grad, rows=rows, called=called: grads.append([grad[rows], called])))
