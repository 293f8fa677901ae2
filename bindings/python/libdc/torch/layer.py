"""The transformer layer as a PyTorch module; and under DeepSpeed's names, for code that is written for its kernel.

The mathematics is libdc's (docs/transformer.md). The operators dc_layer::forward and dc_layer::backward have meta
kernels and autograd, so torch.compile keeps them in its graphs. A forward in training draws the dropout's offset
from PyTorch's generator: torch.manual_seed makes runs repeat, and activation checkpointing replays the same masks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from libdc import DType
from libdc import Tensor as Memory
from libdc.tensors import HOST
from libdc.transformer import WEIGHTS, SavedForward, Layer, LayerConfig
from torch._subclasses.fake_tensor import FakeTensor

from . import devices, pages

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_TYPES = {dtype: DType.of(dtype) for dtype in (*_DTYPES, torch.float64, torch.uint8)}
# Layers by what they are made from, so that modules can be copied and pickled; operators name them by number. Those on
# CUDA devices are made when they are first needed.
_numbers: Dict[Tuple[Any, ...], int] = {}
_layers: List[Layer] = []
_there: Dict[Tuple[int, torch.device], Layer] = {}


def _number(config: LayerConfig, dtype: torch.dtype) -> int:
    if dtype not in _DTYPES:
        raise TypeError(f"hidden_states are {dtype}, must be one of {', '.join(map(str, _DTYPES))}")
    key = (*vars(config).values(), dtype)
    if key not in _numbers:
        _layers.append(Layer(dataclasses.replace(config, dtype=_DTYPES[dtype])))
        _numbers[key] = len(_layers) - 1
    return _numbers[key]


def _without_dropout(config: LayerConfig) -> LayerConfig:
    return dataclasses.replace(config, attn_dropout_ratio=0.0, hidden_dropout_ratio=0.0)


def _on(where: torch.device, number: int) -> Layer:
    """The layer for tensors there."""
    if where.type == "cpu":
        return _layers[number]
    if (number, where) not in _there:
        _there[number, where] = Layer(_layers[number].config, devices.open_device("TransformerLayer", where))
    return _there[number, where]


# ---- the operators

def _parts(config: LayerConfig, tokens: Any, itemsize: int) -> List[Any]:
    """The parts of the reserve, in order, by the formula of docs/transformer.md; on symbolic sizes too."""
    intermediate = config.intermediate_size or 4 * config.hidden_size
    row, wide = itemsize * tokens * config.hidden_size, itemsize * tokens * intermediate
    kept = not config.normalize_invertible
    first, last = kept and config.pre_layer_norm, kept and not config.pre_layer_norm
    return [*[row] * first, 3 * row, row, row, *[row] * kept, wide, *[wide] * (not config.gelu_checkpoint),
            *[row] * last, 8 * tokens * config.heads, 8 * tokens, 8 * tokens]


def _rounded(part: Any) -> Any:
    return (part + 63) // 64 * 64


def _new_reserve(x: Tensor, config: LayerConfig) -> Tensor:
    parts = _parts(config, x.numel() // x.shape[-1], x.element_size())
    reserve, end = pages.empty(torch.Size([sum(map(_rounded, parts))]), torch.uint8, x.device), 0
    for part in parts:
        if part % 64:  # bytes between the parts have no meaning, but a result has the same bytes each time
            reserve[end + part : end + _rounded(part)] = 0
        end += _rounded(part)
    return reserve


def _offsets(cu_seqlens: Optional[Tensor]) -> Optional[List[int]]:
    return None if cu_seqlens is None else cu_seqlens.tolist()


def _memory(tensor: Tensor, where: torch.device, name: str) -> Memory:
    """A tensor as the library reads and writes it. Forty of them go to a step, and DLPack's capsules would take longer
    than a small layer's work."""
    if tensor.device != where:
        raise TypeError(f"{name} is on {tensor.device}, but hidden_states are on {where}: all must be on one device")
    tensor = tensor.contiguous()
    place = HOST if where.type == "cpu" else (2, where.index)
    return Memory(tensor.data_ptr(), tensor.shape, _TYPES.get(tensor.dtype) or DType.of(tensor.dtype), tensor, place)


def _memories(tensors: Sequence[Optional[Tensor]], where: torch.device, names: Sequence[str]) -> List[Optional[Memory]]:
    return [None if tensor is None else _memory(tensor, where, name) for tensor, name in zip(tensors, names)]


def _how(run: Layer, call: str, x: Tensor, offsets: Optional[List[int]]) -> Dict[str, Any]:
    """On a card a call's work is on PyTorch's current stream, and its workspace PyTorch's, which goes back to its
    allocator in that stream's order. On the CPU the calling thread works, and keeps one."""
    if x.is_cpu:
        return {}
    batch, seq = (0, 0) if offsets is not None else x.shape[:2]
    nbytes = getattr(run.cost(batch, seq, offsets), f"{call}_workspace_bytes")
    return {"stream": devices.current_stream(x.device),
            "workspace": _memory(x.new_empty(nbytes, dtype=torch.uint8), x.device, "workspace")}


# The weights one by one: PyTorch takes a tenth of a millisecond for an operator with a list of tensors and gradients.
@torch.library.custom_op("dc_layer::forward", mutates_args=(), schema=(
    "(Tensor x, Tensor? mask, Tensor? cu_seqlens, Tensor offset, int layer, bool keep, " +
    ", ".join(f"Tensor {name}" for name in WEIGHTS) + ") -> (Tensor, Tensor)"))  # fmt: skip
def _forward(x: Tensor, mask: Optional[Tensor], cu_seqlens: Optional[Tensor], offset: Tensor, layer: int, keep: bool,
             *weights: Tensor) -> Tuple[Tensor, Tensor]:
    where, run = x.device, _on(x.device, layer)
    out = pages.empty(x.shape, x.dtype, where)
    given = (_memories(weights, where, WEIGHTS), _memory(x, where, "hidden_states"),
             *_memories([mask], where, ["attention_mask"]))
    offsets = _offsets(cu_seqlens)
    if not keep:
        run.inference(*given, offsets, out=_memory(out, where, "out"), **_how(run, "inference", x, offsets))
        return out, x.new_empty(0, dtype=torch.uint8)
    reserve = _new_reserve(x, run.config)
    run.forward(*given, int(offset), offsets, out=_memory(out, where, "out"),
                reserve=_memory(reserve, where, "reserve"), **_how(run, "forward", x, offsets))
    return out, reserve


@_forward.register_fake
def _(x: Tensor, mask: Optional[Tensor], cu_seqlens: Optional[Tensor], offset: Tensor, layer: int, keep: bool,
      *weights: Tensor) -> Tuple[Tensor, Tensor]:
    parts = _parts(_layers[layer].config, x.numel() // x.shape[-1], x.element_size()) if keep else []
    size = sum(map(_rounded, parts))
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(size, dtype=torch.uint8)


@torch.library.custom_op("dc_layer::backward", mutates_args=())
def _backward(grad: Tensor, x: Tensor, mask: Optional[Tensor], cu_seqlens: Optional[Tensor],
              weights: Sequence[Tensor], offset: Tensor, reserve: Tensor, out: Optional[Tensor], layer: int,
              wanted: Sequence[bool]) -> List[Tensor]:
    where, run, offsets = x.device, _on(x.device, layer), _offsets(cu_seqlens)
    keys, result = _memories([mask, out], where, ["attention_mask", "out"])
    kept = SavedForward(_memory(reserve, where, "reserve"), tuple(x.shape), None, offsets, keys, int(offset), result)
    dx = pages.empty(x.shape, x.dtype, where)
    gradients = [pages.empty(weight.shape, weight.dtype, where) if want else None
                 for weight, want in zip(weights, wanted)]
    run.backward(_memories(weights, where, WEIGHTS), _memory(x, where, "hidden_states"), _memory(grad, where, "grad"),
                 kept,
                 _memory(dx, where, "dx"), _memories(gradients, where, WEIGHTS), **_how(run, "backward", x, offsets))
    return [dx, *(x.new_empty(0) if gradient is None else gradient for gradient in gradients)]


@_backward.register_fake
def _(grad: Tensor, x: Tensor, mask: Optional[Tensor], cu_seqlens: Optional[Tensor], weights: Sequence[Tensor],
      offset: Tensor, reserve: Tensor, out: Optional[Tensor], layer: int, wanted: Sequence[bool]) -> List[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format),
            *(torch.empty_like(weight, memory_format=torch.contiguous_format) if want else x.new_empty(0)
              for weight, want in zip(weights, wanted))]


def _keep(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    x, mask, cu_seqlens, offset, ctx.layer, _, *weights = inputs
    config = _layers[ctx.layer].config
    needs_output = config.normalize_invertible and not config.pre_layer_norm
    ctx.save_for_backward(x, mask, cu_seqlens, offset, output[1], output[0] if needs_output else None, *weights)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Optional[Tensor], _: Any) -> Tuple[Any, ...]:
    x, mask, cu_seqlens, offset, reserve, out, *weights = ctx.saved_tensors
    if grad is None:
        return (None,) * (6 + len(weights))
    wanted = [weight.requires_grad for weight in weights]
    dx, *gradients = _backward(grad, x, mask, cu_seqlens, weights, offset, reserve, out, ctx.layer, wanted)
    return dx, *(None,) * 5, *(gradient if want else None for gradient, want in zip(gradients, wanted))


_forward.register_autograd(_differentiate, setup_context=_keep)


# ---- the module


class TransformerLayer(nn.Module):
    """One encoder layer of BERT. config: see libdc.transformer.LayerConfig; its dtype is that of the parameters, and
    `module.to(torch.bfloat16)` changes both. Weights have DeepSpeed's names and shapes: attn_qkvw, attn_qkvb, …
    It computes where its input is, on the CPU or on a CUDA device, and its parameters must be there too."""

    def __init__(self, config: LayerConfig, device: Any = None) -> None:
        super().__init__()
        if not isinstance(config, LayerConfig):
            raise TypeError(f"config = {config!r}, must be a libdc.transformer.LayerConfig")
        self.config = config
        dtype = getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
        dtype = dtype or (torch.float16 if config.fp16 else torch.float32)
        layer = _layers[_number(config, dtype)]
        _number(_without_dropout(config), dtype)  # of eval(), which torch.compile could not make while it traces
        for name, shape in layer.weight_shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
        if not self.attn_qkvw.is_meta and not isinstance(self.attn_qkvw, FakeTensor):
            self.reset_parameters()

    @property
    def weights(self) -> List[Tensor]:
        """The twelve weights in the library's order."""
        return [getattr(self, name) for name in WEIGHTS]

    def kept_bytes(self, batch: int, seq_length: int) -> int:
        """What stays in memory between forward and backward, the input included; see dc_layer_cost."""
        return _layers[_number(self.config, self.attn_qkvw.dtype)].cost(batch, seq_length).kept_bytes

    def reset_parameters(self) -> None:
        """Initial weights: a function of the configuration's seed and layer_id."""
        where = self.attn_qkvw.device
        layer = _on(where, _number(self.config, self.attn_qkvw.dtype))
        devices.synchronize(where)
        layer.initialize(_memories([weight.detach() for weight in self.weights], where, WEIGHTS))

    def forward(self, hidden_states: Tensor, attention_mask: Optional[Tensor] = None,
                cu_seqlens: Optional[Tensor] = None, offset: Union[int, Tensor, None] = None) -> Tensor:
        """hidden_states: [batch, sequence, hidden]; or packed [tokens, hidden], with the samples' offsets in
        cu_seqlens, which on a card are waited for unless they are in host memory. attention_mask: added to the scores
        of the keys, [batch, sequence] with any 1s between. offset: of the dropout, in host memory; by default
        PyTorch's generator gives one."""
        x, config = hidden_states, self.config
        if cu_seqlens is None and x.dim() != 3:
            raise ValueError(f"hidden_states have shape {tuple(x.shape)}, must be [batch, sequence, hidden]")
        if attention_mask is not None:
            attention_mask = self._mask(attention_mask, x)
        number = _number(config, x.dtype)
        weights = self.weights
        keep = torch.is_grad_enabled() and config.training and (
            x.requires_grad or any(weight.requires_grad for weight in weights))
        if self.training and config.training:
            drops = config.attn_dropout_ratio > 0 or config.hidden_dropout_ratio > 0
            keep = keep or drops
        else:  # as if there were no dropout
            drops = False
            number = _number(_without_dropout(config), x.dtype)
        if offset is None:
            offset = torch.randint(1 << 62, (), dtype=torch.int64, device="cpu") if drops else 0
        if not isinstance(offset, Tensor):
            offset = torch.tensor(offset, dtype=torch.int64, device="cpu")
        return _forward(x, attention_mask, cu_seqlens, offset, number, keep, *weights)[0]

    @staticmethod
    def _mask(mask: Tensor, x: Tensor) -> Tensor:
        batch, seq = x.shape[:2]
        if mask.numel() != batch * seq or mask.shape[0] != batch or mask.shape[-1] != seq:
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, must be [{batch}, {seq}] with any 1s "
                             "between: it is added to the scores of the keys, the same for all queries")
        if not mask.is_floating_point():
            raise TypeError(f"attention_mask is {mask.dtype}, must be floating point: 0 keeps a key, -10000 drops it")
        return mask if mask.dtype in (x.dtype, torch.float32) else mask.to(torch.float32)

    def extra_repr(self) -> str:
        config = self.config
        return (f"hidden_size={config.hidden_size}, heads={config.heads}, "
                f"intermediate_size={config.intermediate_size or 4 * config.hidden_size}, "
                f"pre_layer_norm={config.pre_layer_norm}")


_HF = {
    "attn_qkvw": ("attention.self.query.weight", "attention.self.key.weight", "attention.self.value.weight"),
    "attn_qkvb": ("attention.self.query.bias", "attention.self.key.bias", "attention.self.value.bias"),
    "attn_ow": ("attention.output.dense.weight",), "attn_ob": ("attention.output.dense.bias",),
    "attn_nw": ("attention.output.LayerNorm.weight",), "attn_nb": ("attention.output.LayerNorm.bias",),
    "inter_w": ("intermediate.dense.weight",), "inter_b": ("intermediate.dense.bias",),
    "output_w": ("output.dense.weight",), "output_b": ("output.dense.bias",),
    "norm_w": ("output.LayerNorm.weight",), "norm_b": ("output.LayerNorm.bias",),
}  # fmt: skip


def load_bert_layer(layer: TransformerLayer, state: Mapping[str, Tensor], prefix: str = "") -> TransformerLayer:
    """Copies the weights of a Hugging Face BertLayer (Post-LN, gelu="erf" for its default activation) into a layer.
    state: the state dict; prefix: what stands before the layer's names, "bert.encoder.layer.0." say."""
    missing = [prefix + name for names in _HF.values() for name in names if prefix + name not in state]
    if missing:
        raise KeyError(f"the state dict has no {', '.join(missing)}")
    with torch.no_grad():
        for name, names in _HF.items():
            value = torch.cat([state[prefix + part] for part in names])
            target = getattr(layer, name)
            if value.shape != target.shape:
                raise ValueError(f"{name}: {tuple(value.shape)} in the state dict, {tuple(target.shape)} in the layer")
            target.copy_(value)
    return layer


def bert_layer_state(layer: TransformerLayer, prefix: str = "") -> Dict[str, Tensor]:
    """The layer's weights under the names of a Hugging Face BertLayer: load_bert_layer() backwards."""
    state = {}
    for name, names in _HF.items():
        for part, value in zip(names, getattr(layer, name).detach().chunk(len(names))):
            state[prefix + part] = value.clone()
    return state


# ---- DeepSpeed's names


class DeepSpeedTransformerConfig:
    """The configuration of DeepSpeed's transformer kernel, with its arguments. Values that the original takes in
    silence, and that make no sense, are refused when a layer is made: ratios below 0, among others."""

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
        """The library's: what DeepSpeed writes as -1, "not given", is its 0."""
        fields = {field.name for field in dataclasses.fields(LayerConfig)}
        values = {key: value for key, value in self.__dict__.items() if key in fields}
        for key in ("batch_size", "max_seq_length", "intermediate_size", "num_hidden_layers", "initializer_range"):
            values[key] = 0 if values[key] == -1 else values[key]
        # Any number of samples and tokens runs, as in the original; these two are hints.
        return LayerConfig(**{**values, "batch_size": 0, "max_seq_length": 0, "layer_id": layer_id, "training": True})


# What the original calls the weights whose gradients it hands out.
_GRADS = {"attn_qkvw": "V_W", "attn_qkvb": "V_B", "attn_ow": "O_W", "attn_ob": "O_B", "attn_nw": "N2_W",
          "attn_nb": "N2_B", "inter_w": "int_W", "inter_b": "int_B", "output_w": "out_W", "output_b": "out_B",
          "norm_w": "norm_W", "norm_b": "norm_B"}  # fmt: skip


class DeepSpeedTransformerLayer(TransformerLayer):
    """DeepSpeed's layer: DeepSpeedTransformerLayer(config), forward(hidden_states, attention_mask). Layers count
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
        """Query, key, value, attention output, normalisation after attention, the two of the feed-forward part, the
        other normalisation."""
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
        if grads is not None:
            self._hand_out(grads)
        output = super().forward(hidden_states, attention_mask)
        return (output,) if self.return_tuple else output

    def _hand_out(self, grads: List[Any]) -> None:
        """Backward appends [gradient, name] to the list for each weight; of query, key and value only the last."""
        for name, called in _GRADS.items():
            weight = getattr(self, name)
            rows = slice(2 * self.config.hidden_size, None) if called.startswith("V_") else slice(None)
            if weight.requires_grad:
                weight.register_hook(lambda grad, rows=rows, called=called: grads.append([grad[rows], called]))
