"""The transformer layer on arrays: forward and backward of BERT's encoder layer, with DeepSpeed's parameters.

    layer = Layer(LayerConfig(hidden_size=768, heads=12, hidden_dropout_ratio=0.1, pre_layer_norm=False))
    weights = layer.initial_weights()
    output, kept = layer.forward(weights, x)                  # x: [batch, sequence, hidden]
    gradient_x, gradients = layer.backward(weights, x, output_gradient, kept)

Arrays are anything with DLPack, NumPy's interface or the buffer protocol; results are libdc.Tensor, which NumPy and
every DLPack library read in place. LIBDC_NUM_THREADS sets the number of threads if the configuration does not."""

from __future__ import annotations

import dataclasses
import reprlib
import threading
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ._handle import OwnedHandle
from ._lib import ffi, gc_handle, lib, new_struct
from .arguments import assign, choice, counted, environment_number, handle_arg
from .device import Device, Stream, handle_of
from .errors import check
from .linalg.handle import make
from .tensors import HOST, Place, Tensor, View, _count
from .types import DType

WEIGHTS = ("attn_qkvw", "attn_qkvb", "attn_ow", "attn_ob", "attn_nw", "attn_nb", "inter_w", "inter_b", "output_w",
           "output_b", "norm_w", "norm_b")  # fmt: skip
SITES = {"attention": 1, "projection": 2, "output": 3}
_GELU = {"tanh": 1, "erf": 2}
_INVENTORIES = {"libdc": 0, "deepspeed": 1}
_ALIGN = 64


@dataclasses.dataclass
class LayerConfig:
    """A layer's parameters; see dc_layer_config. 0 is "no limit" for batch_size and max_seq_length, and the default
    for the others that have one."""

    hidden_size: int
    heads: int
    intermediate_size: int = 0
    batch_size: int = 0
    max_seq_length: int = 0
    attn_dropout_ratio: float = 0.0
    hidden_dropout_ratio: float = 0.0
    num_hidden_layers: int = 0
    initializer_range: float = 0.0
    layer_norm_eps: float = 0.0
    seed: int = 0
    layer_id: int = 0
    local_rank: int = -1
    fp16: bool = False
    dtype: Any = None
    grad_dtype: Any = None
    gelu: str = "tanh"
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    attn_dropout_checkpoint: bool = False
    adjust_init_range: bool = True
    stochastic_mode: bool = False
    training: bool = True
    threads: int = 0

    def _struct(self) -> Any:
        config = new_struct("dc_layer_config")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("dtype", "grad_dtype"):
                value = int(DType.of(value))
            elif field.name == "gelu":
                if value not in _GELU:
                    raise ValueError(f"gelu = {value!r}, must be 'tanh' or 'erf'")
                value = _GELU[value]
            elif field.name in ("pre_layer_norm", "adjust_init_range", "training"):
                if value not in (True, False):  # -1, C's false, would be true in Python
                    raise ValueError(f"config.{field.name} = {value!r}, must be True or False")
                value = 1 if value else -1
            elif field.name == "threads":
                value = value or environment_number("LIBDC_NUM_THREADS") or 0
            assign(config, field.name, value, f"config.{field.name}")
        return config


def _checked(config: LayerConfig) -> LayerConfig:
    if not isinstance(config, LayerConfig):
        raise TypeError(f"config = {config!r}, must be a libdc.transformer.LayerConfig")
    return config


class Cost(NamedTuple):
    """The memory and floating-point operations of a call; see dc_layer_cost."""

    forward_workspace_bytes: int
    backward_workspace_bytes: int
    inference_workspace_bytes: int
    reserve_bytes: int
    kept_bytes: int
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int


class Plan(NamedTuple):
    """The memory of a rank that trains a stack of layers; see dc_layer_plan."""

    micro_batch: int
    parameters: int
    weight_bytes: int
    grad_bytes: int
    optimizer_bytes: int
    working_bytes: int
    kept_bytes: int
    workspace_bytes: int
    total_bytes: int


def plan(config: LayerConfig, seq_length: int, memory_bytes: int, micro_batch: int = 0, other_bytes: int = 0,
         other_parameters: int = 0, ranks: int = 1, stage: int = 0, moments: int = 2, inventory: str = "libdc") -> Plan:
    """Plans the memory of config.num_hidden_layers layers with micro_batch samples; 0: as many as fit into
    memory_bytes. moments: float32 numbers that the optimizer keeps for each parameter. inventory: whose activations to
    count, "libdc" or "deepspeed"."""
    options, out = new_struct("dc_layer_plan_options"), new_struct("dc_layer_plan")
    c_config = _checked(config)._struct()
    for name, value in dict(seq_length=seq_length, micro_batch=micro_batch, memory_bytes=memory_bytes, stage=stage,
                            other_bytes=other_bytes, other_parameters=other_parameters, ranks=ranks,
                            moments=moments).items():
        assign(options, name, value, name)
    options.inventory = choice("inventory", inventory, _INVENTORIES)
    check(lib.dc_layer_get_plan(c_config, options, out))
    return Plan(*(getattr(out, name) for name in Plan._fields))


class SavedForward(NamedTuple):
    """A forward's reserve, and the arguments that its backward needs again."""

    reserve: Any
    shape: Tuple[int, ...]
    seq_length: Optional[int]
    cu_seqlens: Optional[Sequence[int]]
    mask: Any
    offset: int
    output: Any


_allocate = ffi.new_allocator(should_clear_after_alloc=False)


class Block:
    """Memory at an address that is a multiple of 64."""

    def __init__(self, nbytes: int) -> None:
        self._memory = _allocate("char[]", max(1, nbytes) + _ALIGN)
        start = int(ffi.cast("uintptr_t", self._memory))
        self.address = (start + _ALIGN - 1) // _ALIGN * _ALIGN
        self.nbytes = nbytes


def empty(shape: Sequence[int], dtype: Any) -> Tensor:
    """An uninitialised tensor in host memory."""
    dtype = DType.of(dtype)
    block = Block(_count(shape) * dtype.itemsize)
    return Tensor(block.address, tuple(shape), dtype, block)


def _type_summary(value: Any) -> str:
    return f"a {type(value).__name__}{f' of {len(value)}' if hasattr(value, '__len__') else ''}"


def _read_offsets(cu_seqlens: Any) -> List[int]:
    try:
        offsets = [x.__index__() for x in cu_seqlens]
        ffi.new("int32_t[]", offsets)
    except (AttributeError, TypeError, OverflowError):
        raise TypeError(f"cu_seqlens = {reprlib.repr(cu_seqlens)}, must be a sequence of 32-bit integers") from None
    if not offsets:
        raise ValueError("cu_seqlens is empty, must have 0 and the end of each sample")
    return offsets


class _Arrays:
    """The weights as an array of dc_tensor. Arrays that are None or not wanted become tensors without a type."""

    def __init__(self, arrays: Sequence[Any], name: str, place: Place, writable: bool, wanted: Sequence[bool]) -> None:
        if isinstance(arrays, dict) or not hasattr(arrays, "__len__") or len(arrays) != len(WEIGHTS):
            raise TypeError(f"{name} is {_type_summary(arrays)}, must be a sequence of {len(WEIGHTS)} arrays: "
                            f"{', '.join(WEIGHTS)}")
        self._views = [View(array if want else None, writable, f"{name}[{weight}]", (place,))
                       for array, want, weight in zip(arrays, wanted, WEIGHTS)]
        self.c = ffi.new("dc_tensor[]", [(new_struct("dc_tensor") if view.c == ffi.NULL else view.c)[0]
                                         for view in self._views])

    @property
    def arguments(self) -> Tuple[Any, int, int]:
        return self.c, ffi.sizeof("dc_tensor"), len(WEIGHTS)


class Layer(OwnedHandle):
    """One layer; see dc_layer. It owns no weights: every call takes the twelve arrays, in the order of WEIGHTS and in
    the device's memory. Calls may come from any thread."""

    _kind = "layer"

    def __init__(self, config: LayerConfig, device: Optional[Device] = None) -> None:
        self.config = _checked(config)
        self.dtype = DType.of(config.dtype) or (DType.FLOAT16 if config.fp16 else DType.FLOAT32)
        self.grad_dtype = DType.of(config.grad_dtype) or self.dtype
        c_config, out = config._struct(), ffi.new("dc_layer **")
        self._device = device or Device()
        self.place = self._device.place  # where all arrays must be
        check(lib.dc_layer_create(handle_arg("device", self._device, Device), c_config, out))
        self._owned: Any = gc_handle(out[0], lib.dc_layer_destroy)
        self._local = threading.local()

    def close(self) -> None:
        """Frees the layer and its threads' workspaces. No call may be running; later calls are errors."""
        self._owned, self._local = None, threading.local()

    @property
    def weight_shapes(self) -> Dict[str, Tuple[int, ...]]:
        shapes = {}
        for index, name in enumerate(WEIGHTS):
            shape, ndim = ffi.new("int64_t[2]"), ffi.new("int32_t *")
            check(lib.dc_layer_get_weight_shape(self._handle, index, shape, ndim))
            shapes[name] = tuple(shape[0:ndim[0]])
        return shapes

    def initial_weights(self, dtype: Any = None) -> List[Tensor]:
        """New initial weights. dtype: the layer's (None) or float32."""
        weights = [self._empty(shape, dtype or self.dtype) for shape in self.weight_shapes.values()]
        self.initialize(weights)
        return weights

    def initialize(self, weights: Sequence[Any]) -> None:
        """Writes initial weights into arrays."""
        check(lib.dc_layer_init_weights(self._handle, *self._views(weights, "weights", True).arguments))

    def _call(self, shape: Sequence[int], seq_length: Optional[int], cu_seqlens: Optional[Sequence[int]],
              mask: Any = None, offset: int = 0) -> Tuple[Any, List[Any]]:
        call = new_struct("dc_layer_call")
        keep: List[Any] = []
        if cu_seqlens is None:
            if len(shape) != 3:
                raise ValueError(f"x has the shape {tuple(shape)}, must be [batch, sequence, hidden], or packed with "
                                 "cu_seqlens")
            assign(call, "batch", shape[0], "batch")
            assign(call, "seq_length", shape[1], "seq_length")
        else:
            offsets = _read_offsets(cu_seqlens)
            longest = max((b - a for a, b in zip(offsets, offsets[1:])), default=0)
            call.batch = len(offsets) - 1
            assign(call, "seq_length", seq_length or longest, "seq_length")
            keep.append(ffi.new("int32_t[]", offsets))
            call.cu_seqlens = keep[-1]
        if mask is not None:
            keep.append(self._view(mask, "mask"))
            call.mask = keep[-1].c
        assign(call, "offset", offset, "offset")
        return call, keep

    def _view(self, array: Any, name: str, writable: bool = False) -> View:
        return View(array, writable, name, (self.place,))

    def _input(self, x: Any) -> Tuple[View, Tuple[int, ...]]:
        if x is None:
            raise TypeError("x is None, must be an array")
        view = self._view(x, "x")
        return view, tuple(view.c.shape[i] for i in range(view.c.ndim))

    def _views(self, arrays: Sequence[Any], name: str, writable: bool = False,
               wanted: Sequence[bool] = (True,) * len(WEIGHTS)) -> _Arrays:
        return _Arrays(arrays, name, self.place, writable, wanted)

    def _empty(self, shape: Sequence[int], dtype: Any) -> Tensor:
        return empty(shape, dtype) if self.place == HOST else make(self._device, shape, DType.of(dtype))

    def _workspace(self, nbytes: int, cached: bool) -> Tensor:
        """A workspace, cached by thread. Queued work gets a new one, since the next call may come before it is done."""
        block: Optional[Tensor] = getattr(self._local, "workspace", None) if cached else None
        if block is None or block.nbytes < nbytes:
            block = self._empty((nbytes,), DType.UINT8)
            if cached:
                self._local.workspace = block
        return block

    def _run(self, function: Any, call: Any, nbytes: int, where: Tuple[Optional[Stream], Any], keep: List[Any],
             weights: _Arrays, *arguments: Any) -> None:
        """Calls the function with nbytes of workspace, and keeps all memory alive until the stream has done the work.
        where: the stream, and the caller's workspace or None."""
        stream, workspace = where
        block = self._view(self._workspace(nbytes, stream is None) if workspace is None else workspace, "workspace",
                           True)
        call.workspace, call.workspace_bytes = block.c.data, block.c.shape[0]
        call.stream = handle_of(stream)
        check(function(self._handle, call, *weights.arguments, *(argument.c for argument in arguments)))
        if stream is not None and workspace is None:
            stream.pin(block, keep, weights, arguments)

    def _cost(self, call: Any) -> Cost:
        cost = new_struct("dc_layer_cost")
        check(lib.dc_layer_get_cost(self._handle, call, cost))
        return Cost(*(getattr(cost, name) for name in Cost._fields))

    def cost(self, batch: int, seq_length: int, cu_seqlens: Optional[Sequence[int]] = None) -> Cost:
        """The memory and floating-point operations of a call on a batch."""
        call, keep = self._call((batch, seq_length, 0), seq_length, cu_seqlens)
        return self._cost(call)

    def forward(self, weights: Sequence[Any], x: Any, mask: Any = None, offset: int = 0,
                cu_seqlens: Optional[Sequence[int]] = None, seq_length: Optional[int] = None, out: Any = None,
                reserve: Any = None, stream: Optional[Stream] = None,
                workspace: Any = None) -> Tuple[Any, SavedForward]:
        """The layer's output, and what backward() needs. x: [batch, sequence, hidden], or [tokens, hidden] with the
        offsets of the samples in cu_seqlens. mask is added to the attention scores of the keys. offset: of the dropout
        masks' random numbers, a new one for each step. out, reserve: the caller's memory for them; None: new memory.
        stream: where the work runs; None means the calling thread, which waits for a CUDA device. workspace: uint8
        memory of at least the bytes that cost() says. With it the caller must keep all memory of a call until the
        stream has done the work; without it the stream does so."""
        view, shape = self._input(x)
        call, keep = self._call(shape, seq_length, cu_seqlens, mask, offset)
        cost = self._cost(call)
        out = self._empty(shape, self.dtype) if out is None else out
        reserve = self._empty((cost.reserve_bytes,), DType.UINT8) if reserve is None else reserve
        kept = self._view(reserve, "reserve", True)
        call.reserve, call.reserve_bytes = kept.c.data, kept.c.shape[0]
        nbytes = cost.forward_workspace_bytes if self.config.training else cost.inference_workspace_bytes
        self._run(lib.dc_layer_forward, call, nbytes, (stream, workspace), [keep, kept],
                  self._views(weights, "weights"), view, self._view(out, "out", True))
        return out, SavedForward(reserve, shape, seq_length, cu_seqlens, mask, offset, out)

    def inference(self, weights: Sequence[Any], x: Any, mask: Any = None, cu_seqlens: Optional[Sequence[int]] = None,
                  seq_length: Optional[int] = None, out: Any = None, stream: Optional[Stream] = None,
                  workspace: Any = None) -> Any:
        """The layer's output without dropout; nothing is kept."""
        view, shape = self._input(x)
        call, keep = self._call(shape, seq_length, cu_seqlens, mask)
        out = self._empty(shape, self.dtype) if out is None else out
        self._run(lib.dc_layer_inference, call, self._cost(call).inference_workspace_bytes, (stream, workspace), keep,
                  self._views(weights, "weights"), view, self._view(out, "out", True))
        return out

    def backward(self, weights: Sequence[Any], x: Any, grad_output: Any, kept: SavedForward, grad_input: Any = None,
                 grad_weights: Optional[Sequence[Any]] = None, accumulate: bool = False,
                 wanted: Optional[Sequence[bool]] = None, stream: Optional[Stream] = None,
                 workspace: Any = None) -> Tuple[Any, List[Any]]:
        """(gradient of x, gradients of the twelve weights), in grad_input and grad_weights if those are given.
        accumulate: adds to grad_weights; grad_input is overwritten as usual. wanted: for each weight, whether its
        gradient is computed. The others are None, and their memory in grad_weights is not touched. stream, workspace:
        as in forward()."""
        if not isinstance(kept, SavedForward):
            raise TypeError(f"kept is {_type_summary(kept)}, must be what forward() returned beside the output")
        if accumulate and grad_weights is None:
            raise ValueError(f"accumulate = {accumulate!r}, but there are no grad_weights to which it could add")
        call, keep = self._call(kept.shape, kept.seq_length, kept.cu_seqlens, kept.mask, kept.offset)
        nbytes = self._cost(call).backward_workspace_bytes
        call.accumulate = int(accumulate)
        reserve = self._view(kept.reserve, "kept.reserve")
        call.reserve, call.reserve_bytes = reserve.c.data, reserve.c.shape[0]
        grad_input = self._empty(kept.shape, self.dtype) if grad_input is None else grad_input
        wants = [True] * len(WEIGHTS) if wanted is None else list(wanted)
        if len(wants) != len(WEIGHTS):
            raise ValueError(f"wanted has {counted(len(wants), 'entry', 'entries')}, must have {len(WEIGHTS)}")
        if grad_weights is None:
            grad_weights = [self._empty(shape, self.grad_dtype) if want else None
                            for shape, want in zip(self.weight_shapes.values(), wants)]
        gradients = self._views(grad_weights, "grad_weights", True, wants)
        self._run(lib.dc_layer_backward, call, nbytes, (stream, workspace), [keep, reserve],
                  self._views(weights, "weights"), self._view(x, "x"), self._view(kept.output, "kept.output"),
                  self._view(grad_output, "grad_output"), self._view(grad_input, "grad_input", True),
                  gradients)
        return grad_input, [gradient if want else None for gradient, want in zip(grad_weights, wants)]

    def dropout_mask(self, site: str, batch: int, seq_length: int, offset: int = 0) -> Tuple[Tensor, float]:
        """The dropout mask of a site ("attention", "projection", "output") for an offset, 1 where an element is kept;
        and the factor that multiplies kept elements."""
        c_site = choice("site", site, SITES)
        call, keep = self._call((batch, seq_length, 0), None, None, None, offset)
        config = self.config
        shape = ((batch, config.heads, seq_length, seq_length) if site == "attention"
                 else (batch, seq_length, config.hidden_size))
        mask, scale = self._empty(shape, DType.UINT8), ffi.new("double *")
        check(lib.dc_layer_get_dropout_mask(self._handle, call, c_site, self._view(mask, "mask", True).c, scale))
        return mask, scale[0]
