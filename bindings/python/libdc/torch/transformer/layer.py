"""The transformer layer as a PyTorch module; under DeepSpeed's names it is in deepspeed_layer.py.

The mathematics is libdc's (docs/transformer.md). The operators dc_layer::forward and dc_layer::backward have meta
kernels and autograd, so torch.compile keeps them in its graphs. A forward in training draws the dropout's offset
from PyTorch's generator: torch.manual_seed makes runs repeat, and activation checkpointing replays the same masks."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from libdc import DType
from libdc import Tensor as LibTensor
from libdc.tensors import HOST
from libdc.transformer import WEIGHTS, Layer, LayerConfig, SavedForward
from torch._subclasses.fake_tensor import FakeTensor

from .. import devices
from ..dtypes import DTYPES, FLOAT_DTYPES
from ..sharding.untraced import untraced
from . import caching_allocator

# Operators name a layer by its configuration's id, so that modules can be copied and pickled.
_config_ids: Dict[Tuple[Any, ...], int] = {}
_configs: List[LayerConfig] = []
_lock = threading.RLock()


class _Layers:
    """A configuration's layers by device, each made when it is first needed. Modules and autograd graphs own this
    object."""

    def __init__(self) -> None:
        self.by_device: Dict[torch.device, Layer] = {}


_layers: "weakref.WeakValueDictionary[int, _Layers]" = weakref.WeakValueDictionary()


class _OwnedLayers:
    """The layers that a module keeps alive. A copy of the module keeps them too, a pickle does not."""

    def __init__(self) -> None:
        self.by_config_id: Dict[int, _Layers] = {}

    def add(self, number: int) -> None:
        if number not in self.by_config_id:
            self.by_config_id[number] = _layers_of(number)

    def __deepcopy__(self, memo: Dict[int, Any]) -> "_OwnedLayers":
        copy = _OwnedLayers()
        copy.by_config_id.update(self.by_config_id)
        return copy

    def __reduce__(self) -> Tuple[Any, ...]:
        return _OwnedLayers, ()


def _config_id(config: LayerConfig, dtype: torch.dtype) -> int:
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"hidden_states are {dtype}, must be one of {', '.join(map(str, FLOAT_DTYPES))}")
    key = (*vars(config).values(), dtype)
    if key not in _config_ids:
        complete = dataclasses.replace(config, dtype=DTYPES[dtype].name.lower())
        with _lock:
            if key not in _config_ids:
                _configs.append(complete)
                _config_ids[key] = len(_configs) - 1
    return _config_ids[key]


def _layers_of(number: int) -> _Layers:
    with _lock:
        layers = _layers.get(number)
        if layers is None:
            layers = _layers[number] = _Layers()
        return layers


def _without_dropout(config: LayerConfig) -> LayerConfig:
    return dataclasses.replace(config, attn_dropout_ratio=0.0, hidden_dropout_ratio=0.0)


def _layer_for(where: torch.device, number: int) -> Layer:
    """The layer for tensors on a device."""
    layers = _layers_of(number)
    with _lock:
        if where not in layers.by_device:
            layers.by_device[where] = Layer(_configs[number], devices.open_device("TransformerLayer", where))
        return layers.by_device[where]


# ---- the operators

def _reserve_parts(config: LayerConfig, tokens: Any, itemsize: int) -> List[Any]:
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
    parts = _reserve_parts(config, x.numel() // x.shape[-1], x.element_size())
    reserve, end = caching_allocator.empty(torch.Size([sum(map(_rounded, parts))]), torch.uint8, x.device), 0
    for part in parts:
        if part % 64:  # bytes between the parts are unused, but should be reproducible
            reserve[end + part : end + _rounded(part)] = 0
        end += _rounded(part)
    return reserve


def _check_offsets(cu_seqlens: Tensor) -> None:
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens is {cu_seqlens.dtype}, must be int32 or int64")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}, must be [samples + 1] with at least one "
                         "sample")


def _offsets(cu_seqlens: Optional[Tensor]) -> Optional[List[int]]:
    return None if cu_seqlens is None else cu_seqlens.tolist()


def _lib_tensor(tensor: Tensor, where: torch.device, name: str) -> LibTensor:
    """A tensor as the library reads and writes it. It is made without DLPack: a step has forty tensors, whose capsules
    would take longer than a small layer's work."""
    if tensor.device != where:
        raise TypeError(f"{name} is on {tensor.device}, but hidden_states are on {where}: all must be on one device")
    tensor = tensor.contiguous()
    place = HOST if where.type == "cpu" else (2, where.index)
    return LibTensor(tensor.data_ptr(), tensor.shape, DTYPES.get(tensor.dtype) or DType.of(tensor.dtype), tensor, place)


def _lib_tensors(tensors: Sequence[Optional[Tensor]], where: torch.device,
                 names: Sequence[str]) -> List[Optional[LibTensor]]:
    return [None if tensor is None else _lib_tensor(tensor, where, name) for tensor, name in zip(tensors, names)]


def _run_options(run: Layer, call: str, x: Tensor, offsets: Optional[List[int]]) -> Dict[str, Any]:
    """A call's stream and workspace. On a card it runs on PyTorch's current stream, with a workspace from PyTorch's
    allocator, which gets it back in that stream's order. On the CPU the calling thread runs it, and keeps its own
    workspace."""
    if x.is_cpu:
        return {}
    batch, seq = (0, 0) if offsets is not None else x.shape[:2]
    nbytes = getattr(run.cost(batch, seq, offsets), f"{call}_workspace_bytes")
    return {"stream": devices.current_stream(x.device),
            "workspace": _lib_tensor(x.new_empty(nbytes, dtype=torch.uint8), x.device, "workspace")}


# The weights are separate arguments, since a differentiable operator with a list of tensors costs PyTorch a tenth of a
# millisecond.
@torch.library.custom_op("dc_layer::forward", mutates_args=(), schema=(
    "(Tensor x, Tensor? mask, Tensor? cu_seqlens, Tensor offset, int layer, bool keep, " +
    ", ".join(f"Tensor {name}" for name in WEIGHTS) + ") -> (Tensor, Tensor)"))  # fmt: skip
def _forward(x: Tensor, mask: Optional[Tensor], cu_seqlens: Optional[Tensor], offset: Tensor, layer: int, keep: bool,
             *weights: Tensor) -> Tuple[Tensor, Tensor]:
    where, run = x.device, _layer_for(x.device, layer)
    out = caching_allocator.empty(x.shape, x.dtype, where)
    given = (_lib_tensors(weights, where, WEIGHTS), _lib_tensor(x, where, "hidden_states"),
             *_lib_tensors([mask], where, ["attention_mask"]))
    offsets = _offsets(cu_seqlens)
    if not keep:
        run.inference(*given, offsets, out=_lib_tensor(out, where, "out"),
                      **_run_options(run, "inference", x, offsets))
        return out, x.new_empty(0, dtype=torch.uint8)
    reserve = _new_reserve(x, run.config)
    run.forward(*given, int(offset), offsets, out=_lib_tensor(out, where, "out"),
                reserve=_lib_tensor(reserve, where, "reserve"), **_run_options(run, "forward", x, offsets))
    return out, reserve


@_forward.register_fake
def _(x: Tensor, mask: Optional[Tensor], cu_seqlens: Optional[Tensor], offset: Tensor, layer: int, keep: bool,
      *weights: Tensor) -> Tuple[Tensor, Tensor]:
    parts = _reserve_parts(_configs[layer], x.numel() // x.shape[-1], x.element_size()) if keep else []
    size = sum(map(_rounded, parts))
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(size, dtype=torch.uint8)


@torch.library.custom_op("dc_layer::backward", mutates_args=())
def _backward(grad: Tensor, x: Tensor, mask: Optional[Tensor], cu_seqlens: Optional[Tensor],
              weights: Sequence[Tensor], offset: Tensor, reserve: Tensor, out: Optional[Tensor], layer: int,
              wanted: Sequence[bool]) -> List[Tensor]:
    where, run, offsets = x.device, _layer_for(x.device, layer), _offsets(cu_seqlens)
    keys, result = _lib_tensors([mask, out], where, ["attention_mask", "out"])
    kept = SavedForward(_lib_tensor(reserve, where, "reserve"), tuple(x.shape), None, offsets, keys, int(offset),
                        result)
    dx = caching_allocator.empty(x.shape, x.dtype, where)
    gradients = [caching_allocator.empty(weight.shape, weight.dtype, where) if want else None
                 for weight, want in zip(weights, wanted)]
    run.backward(_lib_tensors(weights, where, WEIGHTS), _lib_tensor(x, where, "hidden_states"),
                 _lib_tensor(grad, where, "grad"), kept, _lib_tensor(dx, where, "dx"),
                 _lib_tensors(gradients, where, WEIGHTS), **_run_options(run, "backward", x, offsets))
    return [dx, *(x.new_empty(0) if gradient is None else gradient for gradient in gradients)]


@_backward.register_fake
def _(grad: Tensor, x: Tensor, mask: Optional[Tensor], cu_seqlens: Optional[Tensor], weights: Sequence[Tensor],
      offset: Tensor, reserve: Tensor, out: Optional[Tensor], layer: int, wanted: Sequence[bool]) -> List[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format),
            *(torch.empty_like(weight, memory_format=torch.contiguous_format) if want else x.new_empty(0)
              for weight, want in zip(weights, wanted))]


def _setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    x, mask, cu_seqlens, offset, ctx.layer, _, *weights = inputs
    ctx.owned_layers = _layers_of(ctx.layer)
    config = _configs[ctx.layer]
    needs_output = config.normalize_invertible and not config.pre_layer_norm
    ctx.save_for_backward(x, mask, cu_seqlens, offset, output[1], output[0] if needs_output else None, *weights)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_formula(ctx: Any, grad: Optional[Tensor], _: Any) -> Tuple[Any, ...]:
    x, mask, cu_seqlens, offset, reserve, out, *weights = ctx.saved_tensors
    if grad is None:
        return (None,) * (6 + len(weights))
    wanted = [weight.requires_grad for weight in weights]
    dx, *gradients = _backward(grad, x, mask, cu_seqlens, weights, offset, reserve, out, ctx.layer, wanted)
    return dx, *(None,) * 5, *(gradient if want else None for gradient, want in zip(gradients, wanted))


_forward.register_autograd(_backward_formula, setup_context=_setup_context)


# ---- the module


@untraced
def _refuse_tangents(tensors: Sequence[Optional[Tensor]]) -> None:
    """Refuses forward-mode inputs. PyTorch would treat them as constants in an operator without a forward-mode
    derivative."""
    transforms = torch._C._functorch.get_interpreter_stack() or []
    if any(transform.key() is torch._C._functorch.TransformType.Jvp for transform in transforms) or \
            any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError("TransformerLayer has no forward-mode derivative, as torch.func.jvp, jacfwd and "
                           "torch.autograd.forward_ad take it: use backward() or torch.autograd.grad()")


def _autocast(tensors: List[Tensor]) -> List[Tensor]:
    """Under torch.autocast, the tensors in its type, as for nn.Linear's input and weights."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or tensors[0].dtype not in FLOAT_DTYPES:
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [tensor.to(dtype) for tensor in tensors]


class TransformerLayer(nn.Module):
    """One encoder layer of BERT. config: see libdc.transformer.LayerConfig. Its dtype is the parameters' type;
    `module.to(torch.bfloat16)` changes the type of both parameters and computation. Weights have DeepSpeed's names and
    shapes: attn_qkvw, attn_qkvb, … The layer runs on its input's device, the CPU or a CUDA device, and its parameters
    must be there too. Under torch.autocast it computes in autocast's type."""

    def __init__(self, config: LayerConfig, device: Any = None) -> None:
        super().__init__()
        if not isinstance(config, LayerConfig):
            raise TypeError(f"config = {config!r}, must be a libdc.transformer.LayerConfig")
        self.config = config
        dtype = getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
        dtype = dtype or (torch.float16 if config.fp16 else torch.float32)
        self._owned_layers = _OwnedLayers()
        self._owned_layers.add(_config_id(config, dtype))
        # The layer for eval() is made here, since torch.compile could not make it while tracing.
        self._owned_layers.add(_config_id(_without_dropout(config), dtype))
        layer = _layer_for(devices.CPU, _config_id(config, dtype))
        for name, shape in layer.weight_shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
        if not self.attn_qkvw.is_meta and not isinstance(self.attn_qkvw, FakeTensor):
            self.reset_parameters()

    @property
    def weights(self) -> List[Tensor]:
        """The twelve weights in the library's order."""
        return [getattr(self, name) for name in WEIGHTS]

    def kept_bytes(self, batch: int, seq_length: int) -> int:
        """Bytes that are kept between forward and backward, including the input; see dc_layer_cost."""
        return _layer_for(devices.CPU, _config_id(self.config, self.attn_qkvw.dtype)).cost(batch, seq_length).kept_bytes

    def reset_parameters(self) -> None:
        """Sets initial weights, which depend only on the configuration's seed and layer_id. In a sharded model, each
        rank keeps its part of them."""
        where, dtype = self.attn_qkvw.device, self.attn_qkvw.dtype
        layer = _layer_for(where, _config_id(self.config, dtype))
        whole = [torch.empty(shape, dtype=dtype, device=where) for shape in layer.weight_shapes.values()]
        devices.synchronize(where)
        layer.initialize(_lib_tensors(whole, where, WEIGHTS))
        with torch.no_grad():
            for weight, values in zip(self.weights, whole):
                weight.copy_(values)

    def forward(self, hidden_states: Tensor, attention_mask: Optional[Tensor] = None,
                cu_seqlens: Optional[Tensor] = None, offset: Union[int, Tensor, None] = None) -> Tensor:
        """hidden_states: [batch, sequence, hidden]; or packed [tokens, hidden], with the samples' offsets in
        cu_seqlens. On a card the call waits for cu_seqlens unless it is in host memory. attention_mask: added to the
        scores of the keys, [batch, sequence] with any 1s between; it gets no gradient. offset: that of the dropout's
        random numbers, in host memory; by default PyTorch's generator draws it. Forward-mode derivatives are
        refused."""
        x, config = hidden_states, self.config
        if forward_ad._current_level >= 0:
            _refuse_tangents([x, attention_mask, *self.weights])
        x, *weights = _autocast([x, *self.weights])
        if cu_seqlens is None and x.dim() != 3:
            raise ValueError(f"hidden_states have shape {tuple(x.shape)}, must be [batch, sequence, hidden]")
        if cu_seqlens is not None:
            _check_offsets(cu_seqlens)
        if attention_mask is not None:
            attention_mask = self._mask(attention_mask, x)
        number = _config_id(config, x.dtype)
        keep = torch.is_grad_enabled() and config.training and (
            x.requires_grad or any(weight.requires_grad for weight in weights))
        if self.training and config.training:
            drops = config.attn_dropout_ratio > 0 or config.hidden_dropout_ratio > 0
            keep = keep or drops
        else:  # runs without dropout
            drops = False
            number = _config_id(_without_dropout(config), x.dtype)
        if not torch.compiler.is_compiling():
            self._owned_layers.add(number)
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
        if mask.dtype is torch.float64:  # keeps finite numbers finite in float32
            largest = torch.finfo(torch.float32).max
            mask = mask.where(mask.isinf(), mask.clamp(-largest, largest))
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
    state: the state dict; prefix: that of the layer's names, for instance "bert.encoder.layer.0."."""
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
    """The layer's weights under the names of a Hugging Face BertLayer: the inverse of load_bert_layer()."""
    state = {}
    for name, names in _HF.items():
        for part, value in zip(names, getattr(layer, name).detach().chunk(len(names))):
            state[prefix + part] = value.clone()
    return state
