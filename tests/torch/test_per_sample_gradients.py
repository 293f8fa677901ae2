"""CUDAGradientOps.per_sample_gradients() on models that use parameters otherwise than by calling their layers."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import pytest
import torch
import torch.nn.functional as F
from libdc.torchium import CUDAGradientOps
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint


def loop(model: nn.Module, loss_fn: Any, inputs: Tensor, targets: Tensor) -> List[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(loss_fn(model(inputs[i : i + 1]), targets[i : i + 1]), parameters, allow_unused=True)
            for i in range(len(inputs))]
    return [torch.stack([row[k] if row[k] is not None else torch.zeros_like(p) for row in rows])
            for k, p in enumerate(parameters)]


class Model(nn.Module):
    """A layer, and a forward that is a function of the model and the input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def hooked(result: Callable[[nn.Linear, Tensor], Tensor], early: bool = False) -> nn.Module:
    model = Model(lambda m, x: m.l(x))
    if early:
        model.l.register_forward_pre_hook(lambda layer, args: (result(layer, args[0]),))
    else:
        model.l.register_forward_hook(lambda layer, args, output: result(layer, output))
    return model


def pruned() -> nn.Module:
    linear = nn.Linear(4, 4)
    prune.l1_unstructured(linear, "weight", amount=0.5)
    return linear


def penalty(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(m.l(x).square().sum(), x, create_graph=True)
    return m.l(x) + slope


def replaced() -> nn.Module:
    linear = nn.Linear(4, 4)
    linear.forward = lambda x: F.linear(x, 2 * linear.weight, linear.bias)  # type: ignore[method-assign]
    return linear


MODELS: Dict[str, Callable[[], nn.Module]] = {
    "layer's weight in a function": lambda: Model(lambda m, x: F.linear(x, m.l.weight, m.l.bias)),
    "both": lambda: Model(lambda m, x: F.linear(m.l(x).relu(), m.l.weight)),
    "penalty of a weight": lambda: Model(lambda m, x: m.l(x) + m.l.weight.square().sum()),
    "penalty of a bias": lambda: Model(lambda m, x: m.l(x) + m.l.bias.square().sum()),
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)).eval(),
    "parametrized weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "pruned": pruned,
    "replaced forward": replaced,
    "hook that doubles": lambda: hooked(lambda layer, output: 2 * output),
    "hook with the weight": lambda: hooked(lambda layer, output: output + layer.weight.sum()),
    "hook in front": lambda: hooked(lambda layer, x: x * 3, early=True),
    "hook in front with the weight": lambda: hooked(lambda layer, x: x * layer.weight.sum(), early=True),
    "keyword": lambda: Model(lambda m, x: m.l(input=x)),
    "RMSNorm without weight": lambda: nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4, elementwise_affine=False)),
    "LayerNorm without weight": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False)),
    "flattened samples": lambda: Model(lambda m, x: m.l(x.reshape(-1, 4)).reshape(x.shape) + x),
    "a layer that is not used": lambda: Model(lambda m, x: m.l(x), other=nn.Linear(2, 2)),
    "part without gradients": lambda: Model(lambda m, x: m.l(x) * m.l(x).detach()),
    "under no_grad": lambda: Model(lambda m, x: torch.no_grad()(m.l)(x) + m.other(x), other=nn.Linear(4, 4)),
    "output changed in place": lambda: Model(lambda m, x: m.l(m.l(x).relu_()).mul_(3)),
    "view changed in place": lambda: Model(lambda m, x: m.l(m.l(x[:, None]).mul_(2)).squeeze(1)),
    "checkpoint": lambda: Model(lambda m, x: checkpoint(lambda x: m.l(torch.tanh(m.l(x))), x, use_reentrant=False)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_a_loop(kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]().double()
    x = torch.randn(3, *([2, 4] if kind == "flattened samples" else [4]), dtype=torch.float64)
    y = torch.randn_like(x)
    loss_fn = lambda output, target: ((output - target).square().sum() * output.flatten(1)[:, 0]).tanh().sum()
    want = loop(model, loss_fn, x, y)
    for _ in range(2):  # the first call leaves nothing behind
        got = CUDAGradientOps.per_sample_gradients(model, loss_fn, x, y)
        for a, b in zip(got, want):
            assert torch.allclose(a, b, atol=1e-11), (a - b).abs().max()
    for module in model.modules():
        for value in vars(module).values():
            assert not isinstance(value, Tensor) or not torch._C._functorch.is_functorch_wrapped_tensor(value)


def test_a_matrix_of_words_that_is_the_last_layer_too() -> None:
    model = Model(lambda m, x: F.linear(m.l(m.e(x)), m.e.weight), e=nn.Embedding(7, 4))
    x, y = torch.randint(7, (3, 5)), torch.randint(7, (3, 5))
    loss_fn = lambda output, target: F.cross_entropy(output.transpose(1, 2), target)
    got = CUDAGradientOps.per_sample_gradients(model, loss_fn, x, y)
    for a, b in zip(got, loop(model, loss_fn, x, y)):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_loss_with_the_models_weights() -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(3, 4), torch.randn(3, 3)
    loss_fn = lambda output, target: F.mse_loss(output, target) + model.weight.square().sum()
    with pytest.raises(ValueError, match="the loss depends on the model's parameters"):
        CUDAGradientOps.per_sample_gradients(model, loss_fn, x, y)


def test_a_gradient_inside_of_a_model_is_right_or_an_error() -> None:
    model, x, y = Model(penalty), torch.randn(3, 4), torch.randn(3, 4)
    try:
        got = CUDAGradientOps.per_sample_gradients(model, F.mse_loss, x, y)
    except RuntimeError:
        return
    for a, b in zip(got, loop(model, F.mse_loss, x, y)):
        assert torch.allclose(a, b, atol=1e-5)


def test_hooks_of_all_modules() -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(3, 4), torch.randn(3, 3)
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: 2 * output)
    try:
        got, want = CUDAGradientOps.per_sample_gradients(model, F.mse_loss, x, y), loop(model, F.mse_loss, x, y)
    finally:
        hook.remove()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want))


def test_an_input_that_is_changed_in_place_is_an_error() -> None:
    def change(m: Any, x: Tensor) -> Tensor:
        x = x * 1
        output = m.l(x)
        x.mul_(3)
        return output + x

    model, x, y = Model(change), torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="inplace"):
        F.mse_loss(model(x), y).backward()
    with pytest.raises(RuntimeError, match="Linear: its input was changed in place"):
        CUDAGradientOps.per_sample_gradients(model, F.mse_loss, x, y)
    model.l.weight.requires_grad_(False)  # a bias does not need the input
    got, want = CUDAGradientOps.per_sample_gradients(model, F.mse_loss, x, y), loop(model, F.mse_loss, x, y)
    assert torch.allclose(got[0], want[0], atol=1e-6)
