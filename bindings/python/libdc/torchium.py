"""The functions of torchium.utils.cuda_kernels, on libdc's operators. Code needs only another import, and runs on
machines with and without CUDA. It differs where Torchium's results are wrong: docs/differences.md lists each case.

Results are plain values: autograd does not follow these calls."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from . import _pytorch  # first
import torch
from torch.autograd.graph import get_gradient_edge

from . import linalg as _linalg
from .device import Device
from .linalg import SampleLayer

__all__ = [
    "CUDAGradientOps", "CUDAMatrixOps", "CUDAMemoryOps", "cuda_memory_info", "get_cuda_device_count",
    "get_optimal_device", "is_cuda_available",
]  # fmt: skip

BUDGET = 64 << 20  # default bytes of memory_efficient_matmul()


def _on_host(*tensors: torch.Tensor) -> List[torch.Tensor]:
    """The tensors in host memory, copied only if needed, with 16-bit floats as float32."""
    narrow = (torch.float16, torch.bfloat16)
    return [t.detach().cpu().float() if t.dtype in narrow else t.detach().cpu() for t in tensors]


def _to_device_of(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return result.to(device=like.device, dtype=like.dtype)


class CUDAMatrixOps:
    """Matrix operations of second-order optimizers."""

    @staticmethod
    def matrix_sqrt_inv_eigen(matrix: torch.Tensor, power: float = -0.25, eps: float = 1e-8) -> torch.Tensor:
        """(matrix + eps I) to a power, for a symmetric positive semidefinite matrix or a batch of them."""
        (given,) = _on_host(matrix)
        return _to_device_of(_linalg.matrix_power(given, power, eps_abs=eps), matrix)

    @staticmethod
    def batch_matrix_multiply(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """[b, m, k] times [b, k, n]."""
        if A.dim() != 3 or B.dim() != 3:
            raise ValueError(f"A has {A.dim()} dimensions and B {B.dim()}, both must have 3")
        return _to_device_of(_linalg.matmul(A.detach().cpu(), B.detach().cpu()), A)

    @staticmethod
    def kronecker_product_approx(A: torch.Tensor, B: torch.Tensor, max_bytes: Optional[int] = None) -> torch.Tensor:
        """The whole Kronecker product, exactly. libdc.linalg.kron_apply() multiplies by it without forming it."""
        left, right = _on_host(A, B)
        return _to_device_of(_linalg.kron(left, right, max_bytes=max_bytes), A)


class CUDAMemoryOps:
    """Memory."""

    @staticmethod
    def efficient_tensor_creation(shape: Sequence[int], device: Union[str, torch.device] = "cpu",
                                  dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Zeros; on the CPU aligned to 256 bytes."""
        if torch.device(device).type != "cpu":
            return torch.zeros(tuple(shape), device=device, dtype=dtype)
        return torch.from_dlpack(_linalg.zeros(shape, dtype))

    @staticmethod
    def memory_efficient_matmul(A: Any, B: Any, budget_bytes: int = BUDGET, out: Any = None) -> Any:
        """A B with at most budget_bytes beside the operands. Each of A, B and out is a tensor, a NumPy memory map or a
        libdc.linalg.FileMatrix. Where out is given, it is the result."""
        if not isinstance(A, torch.Tensor) or not isinstance(B, torch.Tensor):
            return _linalg.matmul_bounded(A, B, budget_bytes, out=out)
        left, right = _on_host(A, B)
        result = _linalg.matmul_bounded(left, right, budget_bytes, out=out)
        return _to_device_of(result, A) if out is None else result


def is_cuda_available() -> bool:
    """Whether a CUDA device can be opened."""
    return _linalg.is_cuda_available()


def get_cuda_device_count() -> int:
    """How many CUDA devices can be opened."""
    return _linalg.device_count("cuda")


def get_optimal_device() -> torch.device:
    """The device with most free memory among those that compute fast."""
    return torch.device(_linalg.get_optimal_device()[0])


def cuda_memory_info() -> Dict[str, Any]:
    """The memory of get_optimal_device() in bytes, with all keys on every machine. free_memory is what the driver or
    the system reports. The allocated memory of a CUDA device is that of this call, since these functions compute on
    the host."""
    device = get_optimal_device()
    if device.type == "cpu":
        memory = _linalg.device_memory()
    else:
        with Device(str(device)) as opened:
            memory = _linalg.device_memory(opened)
    return {"available": is_cuda_available(), "device": str(device), "total_memory": memory["total"],
            "allocated_memory": memory["reserved"], "cached_memory": memory["reserved"],
            "peak_memory": memory["peak"], "free_memory": memory["free"]}


# ---- gradients per sample ----

_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_INSTANCE_NORMS = (torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)
_MIXES_SAMPLES = torch.nn.modules.batchnorm._BatchNorm


def _conv_padding(module: Any) -> Tuple[int, ...]:
    """Padding in front; 'same' puts an odd zero at the end."""
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    if module.padding == "same":
        return tuple(d * (k - 1) // 2 for k, d in zip(module.kernel_size, module.dilation))
    return tuple(module.padding)


def _describe(module: torch.nn.Module) -> Optional[SampleLayer]:
    """The layer's constants; None for one that libdc does not know."""
    if "forward" in vars(module):
        return None
    if type(module) is torch.nn.Linear:
        return SampleLayer("linear")
    if type(module) in _CONVOLUTIONS and module.padding_mode == "zeros":  # type: ignore[union-attr]
        conv: Any = module
        return SampleLayer("conv", conv.kernel_size, conv.stride, _conv_padding(conv), conv.dilation, conv.groups)
    if type(module) is torch.nn.Embedding and not module.scale_grad_by_freq and not module.sparse:
        return SampleLayer("embedding", rows=module.num_embeddings, padding_row=module.padding_idx)
    if type(module) is torch.nn.EmbeddingBag and module.mode in ("sum", "mean") and not module.scale_grad_by_freq \
            and not module.sparse:
        return SampleLayer(f"bag_{module.mode}", rows=module.num_embeddings, padding_row=module.padding_idx)
    return _describe_norm(module)


def _describe_norm(module: Any) -> Optional[SampleLayer]:
    if type(module) is torch.nn.LayerNorm:
        return SampleLayer("layer_norm", features=torch.Size(module.normalized_shape).numel(), eps=module.eps)
    if type(module) is torch.nn.RMSNorm:
        eps = torch.finfo(module.weight.dtype).eps if module.eps is None else module.eps
        return SampleLayer("rms_norm", features=torch.Size(module.normalized_shape).numel(), eps=eps)
    if type(module) is torch.nn.GroupNorm:
        return SampleLayer("group_norm", groups=module.num_groups, eps=module.eps)
    if type(module) in _INSTANCE_NORMS and not module.track_running_stats:
        return SampleLayer("group_norm", groups=module.num_features, eps=module.eps)
    return None


class _Call(NamedTuple):
    """A layer's forward: its input and that tensor's version, and where it begins and ends in the autograd graph."""

    module: torch.nn.Module
    layer: SampleLayer
    x: torch.Tensor
    version: int
    source: Any  # the input's node in the graph; None: it has no gradient
    edge: Any  # the output's gradient edge


class _LayerCalls:
    """Calls of a model's layers in a forward pass."""

    def __init__(self, layers: Dict[torch.nn.Module, SampleLayer]) -> None:
        self.list: List[_Call] = []
        self._layers = layers
        # These hooks run before the model's own, which may replace the layer's output.
        self._hooks = [module.register_forward_hook(self._record, prepend=True, with_kwargs=True) for module in layers]

    def _record(self, module: torch.nn.Module, inputs: Tuple[Any, ...], options: Dict[str, Any],
              output: torch.Tensor) -> torch.Tensor:
        given = list(inputs) + [value for value in options.values() if value is not None]
        x = inputs[0] if inputs else options["input"]
        if type(module) is torch.nn.EmbeddingBag and (len(given) > 1 or x.dim() != 2):
            raise ValueError("EmbeddingBag: takes indices [samples, indices] alone, without offsets or weights")
        if output.requires_grad:
            # Keeps the gradient edge and not the tensor, which later code may change in place. That would remove a
            # view's edge from the graph.
            output = output.clone() if output._is_view() else output
            source = get_gradient_edge(x).node if x.requires_grad else None
            self.list.append(_Call(module, self._layers[module], x.detach(), x._version, source,
                                   get_gradient_edge(output)))
        return output

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _nodes(start: Any, end: Any = None) -> Iterator[Any]:
    """A node of the graph and all that it leads to, except `end` and nodes that only `end` leads to."""
    seen, left = {None, end}, [start]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left.extend(following for following, _ in node.next_functions)
            yield node


def _only_layers_use(trained: List[torch.nn.Parameter], calls: List[_Call], loss: torch.Tensor) -> bool:
    """Whether the loss depends on parameters only through the layers' outputs. Functions of the model, penalties and
    hooks may use parameters too, and output gradients do not cover those uses."""
    inside: Set[Any] = set()
    for call in calls:
        inside.update(_nodes(call.edge.node, call.source))
    hidden = inside - {call.edge.node for call in calls} | {get_gradient_edge(p).node for p in trained}
    return not any(following in hidden for node in _nodes(loss.grad_fn) if node not in inside
                   for following, _ in node.next_functions)


def _sample_losses(loss_fn: Callable[..., torch.Tensor], output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of each sample's own loss, whatever loss_fn does over a batch."""
    each = torch.func.vmap(lambda o, t: loss_fn(o.unsqueeze(0), t.unsqueeze(0)))(output, targets)
    return each.sum()


def _grads_by_layer(model: torch.nn.Module, layers: Dict[torch.nn.Module, SampleLayer],
                    trained: List[torch.nn.Parameter], loss_fn: Any, inputs: torch.Tensor,
                    targets: torch.Tensor) -> Optional[Dict[torch.nn.Parameter, torch.Tensor]]:
    """Gradients from one forward and one backward pass, which touch no .grad. None: the loss depends on parameters
    outside these layers."""
    uses = _LayerCalls(layers)
    try:
        with torch.enable_grad():
            loss = _sample_losses(loss_fn, model(inputs), targets)
    finally:
        uses.close()
    if not _only_layers_use(trained, uses.list, loss) or any(len(call.x) != len(inputs) for call in uses.list):
        return None
    if not uses.list or not loss.requires_grad:
        return {}
    deltas = torch.autograd.grad(loss, [call.edge for call in uses.list], allow_unused=True)
    found: Dict[torch.nn.Parameter, torch.Tensor] = {}
    for call, delta in zip(uses.list, deltas):
        if delta is None:
            continue
        weight, bias = (call.module._parameters.get(name) for name in ("weight", "bias"))
        parts = [p if p is not None and p.requires_grad else None for p in (weight, bias)]
        if parts[0] is not None and call.x._version != call.version:
            raise RuntimeError(f"{type(call.module).__name__}: its input was changed in place after its forward")
        grads = _linalg.per_sample_grads(call.layer, call.x.cpu().contiguous(), delta.cpu().contiguous(),
                                         want_weight=parts[0] is not None, want_bias=parts[1] is not None)
        for parameter, grad in zip(parts, grads):
            if parameter is not None:
                grad = _to_device_of(grad.reshape(grad.shape[0], *parameter.shape), parameter)
                found[parameter] = found[parameter] + grad if parameter in found else grad
    return found


def _grads_by_autograd(model: torch.nn.Module, loss_fn: Any, inputs: torch.Tensor,
                       targets: torch.Tensor) -> Dict[torch.nn.Parameter, torch.Tensor]:
    """Gradients of models whose parameters are not all in known layers, or are also used outside their layers."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss(values: Dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(model, values, (x.unsqueeze(0),))
        return loss_fn(output, y.unsqueeze(0)).sum()

    values = {name: p.detach() for name, p in named.items()}
    each = torch.func.vmap(torch.func.grad_and_value(loss), (None, 0, 0), randomness="different")
    # Hooks such as weight_norm's store tensors of the transform in their module. The old values are restored
    # afterwards.
    attributes = [(m, {k: v for k, v in vars(m).items() if isinstance(v, torch.Tensor)}) for m in model.modules()]
    try:
        with torch.enable_grad():
            grads, losses = each(values, inputs.detach(), targets)
    finally:
        for module, tensors in attributes:
            vars(module).update(tensors)
    trained = {get_gradient_edge(p).node for p in named.values()}
    if losses.requires_grad and not trained.isdisjoint(_nodes(losses.grad_fn)):
        raise ValueError("the loss depends on the model's parameters otherwise than by calls of the model")
    return {p: grads[name] for name, p in named.items()}


class CUDAGradientOps:
    """Gradients per sample."""

    @staticmethod
    def per_sample_gradients(model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor], inputs: torch.Tensor,
                             targets: torch.Tensor) -> List[torch.Tensor]:
        """For each trained parameter, in the order of model.parameters(), one tensor with the samples in the first
        dimension: the gradient of loss_fn(model(x), y) of each sample alone. No .grad is read or written. If a layer's
        input has as many rows as there are samples, its rows must be the samples."""
        mixing = next((m for m in model.modules() if isinstance(m, _MIXES_SAMPLES) and m.training), None)
        if mixing is not None:
            raise ValueError(f"{type(mixing).__name__} in training mixes samples: they have no gradients of their own")
        trained = [p for p in model.parameters() if p.requires_grad]
        wanted = set(trained)
        described = {m: _describe(m) for m in model.modules() if not wanted.isdisjoint(m.parameters(recurse=False))}
        layers = {m: layer for m, layer in described.items() if layer is not None}
        known = {m._parameters.get(name) for m in layers for name in ("weight", "bias")}
        found: Optional[Dict[torch.nn.Parameter, torch.Tensor]] = {} if inputs.shape[0] == 0 else None
        if found is None and wanted <= known and not torch.nn.modules.module._global_forward_hooks:
            found = _grads_by_layer(model, layers, trained, loss_fn, inputs, targets)
        if found is None:
            found = _grads_by_autograd(model, loss_fn, inputs, targets)
        return [found[p] if p in found else p.new_zeros((inputs.shape[0], *p.shape)) for p in trained]
