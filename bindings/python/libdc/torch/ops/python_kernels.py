"""The operators' kernels in Python, on the libdc package. Schemas, results and errors are those of the compiled
adapter. They are used where the adapter is not installed, and tests compare it with them."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, List, Optional, Sequence

import libdc
import torch

from ..dtypes import DTYPES, TORCH_DTYPES

_SCHEMAS = {
    "dc": (
        "allgather_param(Tensor a, int graph_id, int id, ScalarType? dtype = None) -> Tensor",
        "prefetch_params_fused(int graph_id, Tensor[] params, int[] ids, ScalarType[]? dtypes = None) -> ()",
        "wait_allgather(Tensor(a) a, int graph_id, int id) -> Tensor(a)",
        "release_param(Tensor(a) a, int graph_id, int id, int n_users) -> Tensor(a)",
        "reduce_grad(Tensor a, int graph_id, int id) -> Tensor",
        "free_tensors(Tensor[] a) -> ()",
        "offload_tensor(Tensor a, int graph_id, int id) -> Tensor",
        "reload_tensor(Tensor a, int graph_id, int id) -> Tensor",
        "wait_offload(Tensor a, int graph_id, int id) -> Tensor",
        "wait_reload(Tensor a, int graph_id, int id) -> Tensor",
        "offload_parameter(Tensor a, int graph_id, int id) -> ()",
        "reload_parameter(Tensor a, int graph_id, int id) -> ()",
        "end_backward(int graph_id) -> ()",
    ),
    "dc_rt": (
        "take(Tensor shard, int graph_id, int id, ScalarType? dtype = None) -> Tensor",
        "take_params(int graph_id, int[] ids, ScalarType[]? dtypes = None) -> Tensor[]",
        "reduce_grads(Tensor[] grads, int graph_id, int[] ids) -> ()",
        "alloc(int[] shape, ScalarType dtype, int kind) -> Tensor",
    ),
}

# PyTorch passes element types in a list to Python as their numbers in c10::ScalarType.
_SCALAR_TYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip

# Operators that may have no tensor argument, and so are not dispatched by device.
_ANY_DEVICE = ("prefetch_params_fused", "free_tensors", "end_backward", "take_params", "reduce_grads", "alloc")
_libraries: List[torch.library.Library] = []
# Buffers of live tensors by address, which is all that is known of a tensor that is passed back.
_buffers: "weakref.WeakValueDictionary[int, libdc.Buffer]" = weakref.WeakValueDictionary()


_ContextOf = Callable[[Optional[int]], Optional[libdc.Context]]


def register(context_of: _ContextOf) -> None:
    """Defines the operators and their CPU and Meta kernels. context_of: the context of a graph, or the default one for
    None."""
    for namespace, schemas in _SCHEMAS.items():
        try:
            library = torch.library.Library(namespace, "DEF")
        except RuntimeError as error:
            _libraries.clear()
            raise ImportError(
                f"libdc.torch: the operator namespace '{namespace}' is taken: DeepSpeed's own dc operators "
                "(deepspeed.ops.dc), or a second copy of libdc, are loaded in this process. Use one of them."
            ) from error
        _libraries.append(library)
        for schema in schemas:
            library.define(schema)
            name = schema.split("(")[0]
            key = "CompositeExplicitAutograd" if name in _ANY_DEVICE else "CPU"
            library.impl(name, _kernel(context_of, namespace, schema, globals()[f"_{name}"]), key)
            fake = globals().get(f"_{name}_fake")
            if fake is not None:
                library.impl(name, _kernel(context_of, namespace, schema, fake), "Meta")


def _kernel(context_of: _ContextOf, namespace: str, schema: str, body: Callable[..., Any]) -> Callable[..., Any]:
    name, _, rest = schema.partition("(")
    name = f"{namespace}::{name}"
    arguments = [argument.split()[1] for argument in rest.partition(") ->")[0].split(", ")]
    graph = arguments.index("graph_id") if "graph_id" in arguments else None

    @functools.wraps(body)
    def kernel(*args: Any) -> Any:
        context = context_of(None if graph is None else args[graph])
        if context is None:
            raise RuntimeError(f"{name}: no default context: call libdc.torch.dc.init() first")
        try:
            return body(context, *args)
        except libdc.Error as error:
            raise RuntimeError(error.text) from error
        except _ArgumentError as error:
            raise RuntimeError(f"{name}: {error}") from None

    return kernel


class _ArgumentError(Exception):
    """A wrong argument that is refused before libdc is called."""


def _dtype(dtype: Any) -> libdc.DType:
    if dtype is None:
        return libdc.DType.NONE
    if dtype not in DTYPES:
        names = ", ".join(known.name.lower() for known in TORCH_DTYPES)
        raise _ArgumentError(f"dtype: {dtype} is not one of libdc's ({names})")
    return DTYPES[dtype]


def _read(a: torch.Tensor) -> torch.Tensor:
    if a.layout is not torch.strided:
        raise _ArgumentError("a: must be a strided tensor (not sparse)")
    _dtype(a.dtype)
    return a.detach().contiguous()


def _tensor(result: libdc.Tensor) -> torch.Tensor:
    if isinstance(result.buffer, libdc.Buffer):
        _buffers[result.data] = result.buffer
    return torch.from_dlpack(result)


def _alias(a: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.alias.default(a)


def _allgather_param(context: libdc.Context, a: torch.Tensor, graph_id: int, id: int,
                     dtype: Any = None) -> torch.Tensor:
    return _tensor(context.allgather_param(None, graph_id, id, _dtype(dtype)))


def _gather_fake(context: libdc.Context, a: torch.Tensor, graph_id: int, id: int, dtype: Any = None) -> torch.Tensor:
    info = context.dry_run(libdc.Op.ALLGATHER_PARAM, graph_id, id, _dtype(dtype))
    return torch.empty(info.shape or (), dtype=TORCH_DTYPES[info.dtype], device="meta")


_allgather_param_fake = _take_fake = _gather_fake


def _take(context: libdc.Context, shard: torch.Tensor, graph_id: int, id: int, dtype: Any = None) -> torch.Tensor:
    context.allgather_param(None, graph_id, id, _dtype(dtype))
    return _tensor(context.take_param(graph_id, id, _dtype(dtype)))


def _take_params(context: libdc.Context, graph_id: int, ids: Sequence[int],
                 dtypes: Optional[Sequence[Any]] = None) -> List[torch.Tensor]:
    if dtypes is not None and len(dtypes) != len(ids):
        raise _ArgumentError(f"ids and dtypes must be of one length, have {len(ids)} and {len(dtypes)}")
    types = [None] * len(ids) if dtypes is None else [_SCALAR_TYPES.get(dtype, dtype) for dtype in dtypes]
    taken: List[torch.Tensor] = []
    try:
        for id, dtype in zip(ids, types):
            taken.append(_take(context, torch.empty(0), graph_id, max(id, ~id), dtype))
            if id < 0 and taken[-1].dim() != 2:
                raise _ArgumentError(f"id = {~id} is not a matrix, whose transpose ~id would be")
    except BaseException:
        taken.clear()  # a DLPack tensor's deleter could not run while the exception propagates
        raise
    return [whole.t().detach() if id < 0 else whole for id, whole in zip(ids, taken)]


def _prefetch_params_fused(context: libdc.Context, graph_id: int, params: Sequence[torch.Tensor], ids: Sequence[int],
                           dtypes: Optional[Sequence[Any]] = None) -> None:
    counts = len(params), len(ids), len(ids) if dtypes is None else len(dtypes)
    if len(set(counts)) != 1:
        raise _ArgumentError("params, ids and dtypes must be of one length, have {}, {} and {}".format(*counts))
    types = dtypes and [_dtype(_SCALAR_TYPES.get(dtype, dtype)) for dtype in dtypes]
    context.prefetch_params_fused(graph_id, ids, types)


def _wait_allgather(context: libdc.Context, a: torch.Tensor, graph_id: int, id: int) -> torch.Tensor:
    context.wait_allgather(None, graph_id, id)
    return _alias(a)


def _release_param(context: libdc.Context, a: torch.Tensor, graph_id: int, id: int, n_users: int) -> torch.Tensor:
    context.release_param(None, graph_id, id, n_users)
    return _alias(a)


def _alias_fake(context: libdc.Context, a: torch.Tensor, *_: int) -> torch.Tensor:
    return _alias(a)


_wait_allgather_fake = _release_param_fake = _alias_fake


def _reduce_grad(context: libdc.Context, a: torch.Tensor, graph_id: int, id: int) -> torch.Tensor:
    context.reduce_grad(_read(a), graph_id, id)
    return torch.empty(0, dtype=a.dtype, device=a.device)


def _reduce_grads(context: libdc.Context, grads: Sequence[torch.Tensor], graph_id: int, ids: Sequence[int]) -> None:
    if len(grads) != len(ids):
        raise _ArgumentError(f"grads and ids must be of one length, have {len(grads)} and {len(ids)}")
    for grad, id in zip(grads, ids):
        context.reduce_grad(_read(grad), graph_id, id)


def _reduce_grad_fake(context: libdc.Context, a: torch.Tensor, graph_id: int, id: int) -> torch.Tensor:
    return torch.empty(0, dtype=a.dtype, device="meta")


def _free_tensors(context: libdc.Context, a: Sequence[torch.Tensor]) -> None:
    views = []
    for tensor in a:
        address = tensor.data_ptr()
        count = tensor.numel() if address else 0  # no address: already freed
        dtype = DTYPES.get(tensor.dtype, libdc.DType.UINT8)
        views.append(libdc.Tensor(address, (count,), dtype, _buffers.get(address)))
    for tensor, view, freed in zip(a, views, context.free_tensors(views)):
        storage = tensor.untyped_storage()
        if freed and view.buffer is None and storage.resizable():
            storage.resize_(0)


def _offload_tensor(context: libdc.Context, a: torch.Tensor, graph_id: int, id: int) -> torch.Tensor:
    return _tensor(context.offload_tensor(_read(a), graph_id, id))


def _wait_offload(context: libdc.Context, a: torch.Tensor, graph_id: int, id: int) -> torch.Tensor:
    return _tensor(context.wait_offload(None, graph_id, id))


def _reload_tensor(context: libdc.Context, a: torch.Tensor, graph_id: int, id: int) -> torch.Tensor:
    return _tensor(context.reload_tensor(None, graph_id, id))


def _wait_reload(context: libdc.Context, a: torch.Tensor, graph_id: int, id: int) -> torch.Tensor:
    result = context.wait_reload(_read(a) if context.is_profiling() else None, graph_id, id)
    return _tensor(result) if isinstance(result, libdc.Tensor) else result.clone()


def _offload_parameter(context: libdc.Context, a: torch.Tensor, graph_id: int, id: int) -> None:
    context.offload_parameter(None, graph_id, id)


def _reload_parameter(context: libdc.Context, a: torch.Tensor, graph_id: int, id: int) -> None:
    context.reload_parameter(None, graph_id, id)


def _no_result_fake(context: libdc.Context, *_: Any) -> None:
    return None


_offload_parameter_fake = _reload_parameter_fake = _no_result_fake


def _end_backward(context: libdc.Context, graph_id: int) -> None:
    context.end_backward(graph_id)


def _alloc(context: libdc.Context, shape: Sequence[int], dtype: torch.dtype, kind: int) -> torch.Tensor:
    element = _dtype(dtype)
    size = element.itemsize
    for i, length in enumerate(shape):
        size *= length
        if length < 0 or size >= 1 << 63:
            raise _ArgumentError(f"shape[{i}] = {length}, must be >= 0 and the whole must fit in memory")
    return _tensor(context.memory_alloc(size, kind).tensor(shape, element))
