"""Where a model's and a context's tensors are: what is chosen by them, and what is refused. PyTorch's fake tensors are
on CUDA devices that no machine need have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

import libdc
import libdc.torch as dct
import libdc.transformer
from libdc import optim
from libdc.torch import dc, devices, ops
from libdc.torch.transformer import layer
from libdc.transformer import WEIGHTS, LayerConfig

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer")
D, RT = torch.ops.dc, torch.ops.dc_rt
CONFIG = {key: 0 for key in libdc.Config._fields}
GRAPH = 1 << 40


class Params(nn.Module):
    def __init__(self, *where: str) -> None:
        super().__init__()
        for i, device in enumerate(where):
            self.register_parameter(f"p{i}", nn.Parameter(torch.empty(4, device=device)))


@pytest.fixture
def fakes() -> Iterator[None]:
    with FakeTensorMode():
        yield


@pytest.fixture
def graph_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for a context on cuda:1 that a graph is bound to."""
    context = SimpleNamespace(handle=8, device=SimpleNamespace(place=(2, 1), handle=16))
    monkeypatch.setitem(ops._bound, GRAPH, context)
    return context


def refused(kind: Any, text: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    assert str(caught.value).startswith(text), caught.value


def test_shard_wants_one_device(fakes: None) -> None:
    refused(ValueError, "shard: p1 is on cuda:0, but p0 is on cpu: all parameters must be on one device",
            dct.shard, Params("cpu", "cuda:0"))
    refused(ValueError, "shard: p1 is on cuda:1, but p0 is on cuda:0: all", dct.shard, Params("cuda:0", "cuda:1"))


def test_without_a_cuda_device_it_says_what_is_missing(fakes: None) -> None:
    if libdc.has_feature("cuda") and torch.cuda.is_available():
        pytest.skip("here is one")
    text = "tensors on cuda:0 need libdc's CUDA device: dc_device_open: "
    refused(RuntimeError, "shard: " + text, dct.shard, Params("cuda:0"))
    refused(RuntimeError, "AdamW: " + text, optim.AdamW, Params("cuda:0").parameters())
    with torch.device("cuda:0"):
        refused(RuntimeError, "dc.init: " + text, dc.init, None, CONFIG, 64)
    with torch.device("meta"):
        refused(ValueError, "dc.init: meta is a device that libdc does not have", dc.init, None, CONFIG, 64)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.Muon, optim.Shampoo, optim.SOAP])
def test_an_optimizer_wants_one_device(fakes: None, kind: Any) -> None:
    name = kind.__name__
    mixed = [nn.Parameter(torch.empty(2, 2, device=where)) for where in ("cpu", "cuda:0")]
    refused(ValueError, f"{name}: parameter 1 is on cuda:0, but the first is on cpu: all must be on one device", kind,
            mixed)
    with _disable_current_modes():
        here = nn.Parameter(torch.ones(2, 2))
        optimizer = kind([here])
    refused(ValueError, f"{name}: parameter 1 is on cuda:0, but the first is on cpu: all", optimizer.add_param_group,
            {"params": mixed[1:]})
    assert len(optimizer.param_groups) == 1
    refused(ValueError, f"{name}: parameter 0 is on meta and torch.strided, must be on the cpu or on a cuda device and",
            kind, [nn.Parameter(torch.empty(2, 2, device="meta"))])


def test_kfac_wants_one_device(fakes: None) -> None:
    mixed = nn.Linear(2, 2)
    mixed.bias = nn.Parameter(torch.empty(2, device="cuda:0"))
    refused(ValueError, "KFAC: parameter 1 is on cuda:0, but the first is on cpu: all must be on one device",
            optim.KFAC, mixed)
    refused(ValueError, "KFAC: parameter 0 is on meta and torch.strided, must be on the cpu or on a cuda device and",
            optim.KFAC, nn.Linear(2, 2, device="meta"))
    if not (libdc.has_feature("cuda") and torch.cuda.is_available()):
        there = nn.Linear(2, 2, bias=False, device="meta")
        there.weight = nn.Parameter(torch.empty(2, 2, device="cuda:0"))
        refused(RuntimeError, "KFAC: tensors on cuda:0 need libdc's CUDA device: dc_device_open: ", optim.KFAC, there)


def test_an_optimizer_follows_pytorchs_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = optim.AdamW([nn.Parameter(torch.ones(4))])
    current, told = [7], []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: SimpleNamespace(cuda_stream=current[-1]))
    monkeypatch.setattr(devices, "current_stream", lambda where: current[-1])
    monkeypatch.setattr(optimizer._native, "set_stream", told.append)
    optimizer.step()
    assert told == []  # the CPU has none
    optimizer._device = torch.device("cuda:0")
    optimizer.step()
    optimizer.sync_groups()
    current.append(9)
    assert optimizer.skipped_steps == 0
    assert told == [7, 9]


def test_an_optimizer_of_moved_parameters_says_so() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = optim.AdamW([param])
    with FakeTensorMode(allow_non_fake_inputs=True):
        moved = nn.Parameter(torch.empty(4, device="cuda:0"))
        moved.grad = torch.empty(4, device="cuda:0")
        optimizer._parts[0].param = optimizer.param_groups[0]["params"][0] = moved  # as model.to() moves a parameter
        refused(RuntimeError, "AdamW: parameter 0 is on cuda:0, but was on cpu when the optimizer was made: move",
                optimizer.step)


@pytest.mark.parametrize("where", ["cuda:1", "meta"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_layers_results_are_where_its_input_is(fakes: None, where: str, packed: bool) -> None:
    config, dtype = LayerConfig(64, 4, 96, hidden_dropout_ratio=0.1, dtype="bfloat16"), torch.bfloat16
    module, device = layer.TransformerLayer(config, device=where), torch.device(where)
    x = torch.empty((9, 64) if packed else (2, 5, 64), dtype=dtype, device=where)
    given = {"cu_seqlens": torch.tensor([0, 4, 9])} if packed else {"attention_mask": torch.empty(2, 5, device=where)}
    with torch.no_grad():  # autograd on CUDA devices wants a PyTorch that has them: backward's operator by itself
        out = module.eval()(x, **given)
        rest = given.get("attention_mask"), given.get("cu_seqlens")
        offset, number, weights = torch.tensor(0, device="cpu"), layer._config_id(config, dtype), module.weights
        kept, reserve = torch.ops.dc_layer.forward(x, *rest, offset, number, True, *weights)
        grads = torch.ops.dc_layer.backward(kept, x, *rest, weights, offset, reserve, None, number, [True] * 12)
    for ours, like in zip((out, kept, *grads), (x, x, x, *weights)):
        assert (ours.device, ours.shape, ours.dtype) == (device, like.shape, dtype)
    assert reserve.device == device and x.nbytes + reserve.nbytes == libdc.transformer.Layer(config).cost(
        1, 9 if packed else 10).kept_bytes


def test_a_layer_wants_one_device(fakes: None) -> None:
    where, x = torch.device("cuda:0"), torch.empty(1, 2, 64, device="cuda:0")
    refused(TypeError, "attn_ow is on cpu, but hidden_states are on cuda:0: all must be on one device",
            layer._lib_tensors, [*[x] * 2, torch.empty(1), *[x] * 9], where, WEIGHTS)
    memory = layer._lib_tensor(x, where, "hidden_states")
    assert memory.place == (2, 0) and memory.shape == x.shape
    if not (libdc.has_feature("cuda") and torch.cuda.is_available()):
        number = layer._config_id(LayerConfig(64, 4), torch.float32)
        refused(RuntimeError, "TransformerLayer: tensors on cuda:0 need libdc's CUDA device", layer._layer_for, where,
                number)


def test_the_default_context_takes_tensors_of_its_device(fakes: None) -> None:
    with _disable_current_modes():
        dc.init(None, CONFIG, 64)
    try:
        assert ops.device() == devices.device_of(ops.context()) == torch.device("cpu")
        refused(ValueError, "dc.register_z3_param: ds_tensor is on cuda:0 with layout torch.strided, must be a strided "
                "tensor on cpu", dc.register_z3_param, 1, (4,), torch.empty(4, device="cuda:0"), None, False)
    finally:
        dc.cleanup()


def test_fakes_are_on_the_graphs_device(fakes: None, graph_on_cuda: Any) -> None:
    assert ops.device(GRAPH) == torch.device("cuda", 1)
    x = torch.empty(3, 2, device="cuda:1")
    host = D.offload_tensor(x, GRAPH, 1)
    assert host.device == D.wait_offload(host, GRAPH, 1).device == torch.device("cpu")
    for back in (D.reload_tensor(host, GRAPH, 1), D.wait_reload(host, GRAPH, 1), D.wait_allgather(x, GRAPH, 1),
                 D.release_param(x, GRAPH, 1, 1), D.reduce_grad(x, GRAPH, 1)):
        assert back.device == x.device
    assert D.reload_tensor(host, 3, 1).device == torch.device("cpu"), "another graph's context is on the CPU"
    assert RT.alloc([2], torch.float32, libdc.MemoryKind.DEVICE).device == ops.device()


def test_a_context_on_cuda_wants_a_pytorch_with_cuda(graph_on_cuda: Any) -> None:
    if torch.version.cuda is not None:
        pytest.skip("here is one")
    text = {"compiled": "libdc.torch: a context on cuda:1: this PyTorch has no CUDA",
            "python": "libdc.torch: a context on cuda:1 needs the compiled operators"}[ops.backend]
    refused(RuntimeError, text, ops.bind, GRAPH + 1, graph_on_cuda)
    refused(RuntimeError, text, ops.set_context, graph_on_cuda)
    assert GRAPH + 1 not in ops._bound and ops.context() is not graph_on_cuda and not ops._tracked


def test_streams_and_devices_of_the_cpu_are_none() -> None:
    assert devices.current_stream(torch.device("cpu")) is None and devices.open_device("test", devices.CPU) is None
