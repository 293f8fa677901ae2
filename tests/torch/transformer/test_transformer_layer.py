"""TransformerLayer and DeepSpeed's names: against a float64 BERT layer in PyTorch, under autograd's tools, the
compiler, checkpointing and ZeRO-3. The numbers are those of the layer's conformance list; the others are in
tests/python."""

from __future__ import annotations

import ast
import copy
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, List

import pytest
import torch
import torch.nn.functional as F
from libdc.torch import (DeepSpeedTransformerConfig, DeepSpeedTransformerLayer, TransformerLayer, bert_layer_state,
                         load_bert_layer)
from libdc.torch.transformer import layer as layer_module
from libdc.transformer import WEIGHTS, LayerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import libdc

OPS = torch.ops.dc_layer


class Bert(nn.Module):
    """Hugging Face's BertLayer as it is written there, without dropout; pre: with the normalisations first."""

    def __init__(self, hidden: int, heads: int, intermediate: int, form: str = "none", pre: bool = False) -> None:
        super().__init__()
        self.heads, self.form, self.pre = heads, form, pre
        self.attention = nn.ModuleDict({
            "self": nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")}),
            "output": nn.ModuleDict({"dense": nn.Linear(hidden, hidden), "LayerNorm": nn.LayerNorm(hidden, eps=1e-12)}),
        })
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden, intermediate)})
        self.output = nn.ModuleDict({"dense": nn.Linear(intermediate, hidden),
                                     "LayerNorm": nn.LayerNorm(hidden, eps=1e-12)})
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05) if parameter.dim() == 2 else nn.init.normal_(parameter, 0.5, 0.3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, h = x.shape
        one, two = self.attention["output"], self.output
        a = two["LayerNorm"](x) if self.pre else x
        q, k, v = (self.attention["self"][name](a).view(b, s, self.heads, -1).transpose(1, 2)
                   for name in ("query", "key", "value"))
        p = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(h // self.heads) + mask, -1)
        z = x + one["dense"]((p @ v).transpose(1, 2).reshape(b, s, h))
        y = one["LayerNorm"](z)
        f = two["dense"](F.gelu(self.intermediate["dense"](y), approximate=self.form))
        return z + f if self.pre else two["LayerNorm"](y + f)


def config(hidden: int = 64, heads: int = 4, intermediate: int = 96, ratio: float = 0.0, **more: Any) -> LayerConfig:
    return LayerConfig(hidden, heads, intermediate, attn_dropout_ratio=ratio, hidden_dropout_ratio=ratio, **more)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("dtype,gate", [(torch.float32, 2e-6), (torch.float16, 1.5e-3), (torch.bfloat16, 1.2e-2)],
                         ids=str)
def test_06_hugging_face_layer(dtype: torch.dtype, gate: float, pre: bool) -> None:
    torch.manual_seed(0)
    for form, gelu in (("none", "erf"), ("tanh", "tanh")):
        bert = Bert(64, 4, 96, form, pre).double()
        layer = TransformerLayer(config(gelu=gelu, pre_layer_norm=pre))
        load_bert_layer(layer, {"bert.0." + key: value for key, value in bert.state_dict().items()}, "bert.0.")
        layer.to(dtype)
        bert.load_state_dict(bert_layer_state(layer))  # rounded alike
        x = torch.randn(3, 17, 64, dtype=dtype, requires_grad=True)
        mask = torch.zeros(3, 1, 1, 17)
        mask[1, ..., 9:] = -10000
        y = layer(x, mask)
        x64 = x.detach().double().requires_grad_()
        expected = bert(x64, mask.double())
        dy = torch.randn_like(y)
        y.backward(dy)
        expected.backward(dy.double())
        assert relative(y, expected) <= gate and relative(x.grad, x64.grad) <= gate
        found, wanted = dict(layer.named_parameters()), dict(bert.named_parameters())
        for name, parts in layer_module._HF.items():
            whole = torch.cat([wanted[part].grad for part in parts])
            assert relative(found[name].grad, whole) <= gate, name


def test_18_fewer_than_half_of_eager() -> None:
    """BERT-base's proportions at S = 512, all flags: what autograd keeps of the eager layer, without any dropout."""
    bert, seen = Bert(768, 12, 3072), {}
    skip = {parameter.untyped_storage().data_ptr() for parameter in bert.parameters()}

    def note(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in skip:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        bert(torch.randn(1, 512, 768), torch.zeros(1, 1, 1, 512))
    for pre in (True, False):
        layer = TransformerLayer(LayerConfig(768, 12, pre_layer_norm=pre, normalize_invertible=True,
                                             gelu_checkpoint=True, attn_dropout_checkpoint=True))
        assert layer.kept_bytes(1, 512) < sum(seen.values()) / 2


def test_06_missing_and_wrong_weights() -> None:
    with pytest.raises(TypeError, match="config = 64, must be a libdc.transformer.LayerConfig"):
        TransformerLayer(64)  # type: ignore[arg-type]
    layer = TransformerLayer(config())
    state = bert_layer_state(layer)
    with pytest.raises(ValueError, match="inter_w"):
        load_bert_layer(TransformerLayer(config(intermediate=100)), state)
    del state["output.dense.bias"]
    with pytest.raises(KeyError, match="output.dense.bias"):
        load_bert_layer(layer, state)


def arguments(layer: TransformerLayer, keep: bool = True, packed: bool = False) -> tuple:
    x = torch.randn(10, 64) if packed else torch.randn(2, 5, 64)
    mask = None if packed else torch.randn(2, 1, 1, 5)
    cu = torch.tensor([0, 7, 10], dtype=torch.int32) if packed else None
    number = layer_module._config_id(layer.config, x.dtype)
    weights = [weight.detach().clone().requires_grad_() for weight in layer.weights]
    return x.requires_grad_(), mask, cu, torch.tensor(7), number, keep, *weights


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool, flag: bool) -> None:
    layer = TransformerLayer(config(ratio=0.1, pre_layer_norm=False, normalize_invertible=flag, gelu_checkpoint=flag))
    given = arguments(layer, True, packed)
    torch.library.opcheck(OPS.forward.default, given)
    x, mask, cu, offset, number, _, *weights = given
    torch.library.opcheck(OPS.forward.default, (x, mask, cu, offset, number, False, *weights),
                          test_utils=("test_schema", "test_faketensor"))
    weights = [weight.detach() for weight in weights]
    out, reserve = OPS.forward.default(x.detach(), mask, cu, offset, number, True, *weights)
    torch.library.opcheck(OPS.backward.default, (torch.randn_like(out), x.detach(), mask, cu, weights, offset, reserve,
                                                 out, number, [True, False] * 6))


def train_step(run: Callable[..., Tensor], layer: TransformerLayer, x: Tensor, *more: Any) -> List[Tensor]:
    torch.manual_seed(3)
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x, *more)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


def same(a: List[Tensor], b: List[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_a_break(backend: str) -> None:
    torch._dynamo.reset()
    layer = TransformerLayer(config(ratio=0.1))
    x, mask = torch.randn(2, 9, 64), torch.zeros(2, 9)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    if backend == "aot_eager":  # Inductor draws its own random numbers: other masks
        assert same(train_step(compiled, layer, x, mask), train_step(layer, layer, x, mask))
    else:
        assert torch.isfinite(torch.stack([g.norm() for g in train_step(compiled, layer, x, mask)])).all()
    layer.eval()
    assert torch.equal(compiled(x, mask), layer(x, mask))
    assert torch.equal(compiled(torch.cat([x, x], 1)), layer(torch.cat([x, x], 1)))


def test_slices_of_a_batch() -> None:
    """Rows that are strided, input, mask and gradient: the same bits as from a copy."""
    layer = TransformerLayer(config())
    whole, masks, dys = torch.randn(4, 20, 80), torch.randn(4, 1, 1, 20), torch.randn(4, 64, 20)
    x, mask, dy = whole[1:3, 4:15, 8:72], masks[1:3, ..., 4:15], dys[1:3, :, 4:15].mT
    assert not x.is_contiguous() and not mask.is_contiguous() and not dy.is_contiguous()
    results = []
    for copy in (Tensor.detach, Tensor.contiguous):
        layer.zero_grad()
        leaf = copy(x).detach().requires_grad_()
        y = layer(leaf, copy(mask))
        y.backward(copy(dy))
        results.append([y.detach(), leaf.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
    assert same(*results)


def test_checkpointing_replays_the_masks() -> None:
    layer = TransformerLayer(config(ratio=0.2))
    x = torch.randn(2, 9, 64)
    assert same(train_step(layer, layer, x),
                train_step(lambda x: checkpoint(layer, x, use_reentrant=False), layer, x))
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer(x, offset=5), layer(x, offset=5))


def test_11_eval_and_no_grad() -> None:
    layer, plain = (TransformerLayer(config(ratio=ratio, seed=4)) for ratio in (0.2, 0.0))
    x = torch.randn(2, 9, 64)
    with torch.no_grad():
        assert torch.equal(layer.eval()(x), plain(x))
        state = torch.get_rng_state()
        layer(x), plain(x)
        assert torch.equal(state, torch.get_rng_state())
        assert not torch.equal(layer.train()(x), plain(x))
    y = layer.eval()(x.requires_grad_())  # a backward in eval is one without dropout
    y.sum().backward()
    expected = x.grad.clone()
    x.grad = None
    plain(x).sum().backward()
    assert torch.equal(x.grad, expected)


def test_module() -> None:
    layer = TransformerLayer(config(seed=1, layer_id=2))
    assert [name for name, _ in layer.named_parameters()] == list(WEIGHTS)
    again = TransformerLayer(config(seed=1, layer_id=2))
    assert same(layer.weights, again.weights)
    x = torch.randn(1, 3, 64)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x), layer(x))
    meta = TransformerLayer(config(seed=1, layer_id=2), device="meta").to_empty(device="cpu")
    meta.reset_parameters()
    assert same(meta.weights, layer.weights)
    layer.inter_b.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.inter_b.grad is None and layer.inter_w.grad is not None
    assert "heads=4" in repr(layer)
    assert torch.equal(layer(x, torch.full((1, 3), -1e300, dtype=torch.float64)),  # finite stays finite
                       layer(x, torch.full((1, 3), torch.finfo(torch.float32).min)))
    with pytest.raises(ValueError, match="attention_mask"):
        layer(x, torch.zeros(1, 1, 3, 2))
    with pytest.raises(TypeError, match="bool"):
        layer(x, torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="hidden_states"):
        layer(x[0])
    with pytest.raises(TypeError, match="float64"):
        layer(x.double())


def test_10_packed() -> None:
    layer = TransformerLayer(config(ratio=0.1))
    x = torch.randn(2, 7, 64)
    mask = torch.zeros(2, 7)
    mask[1, 3:] = -math.inf
    dense = layer(x, mask, offset=3)
    packed = layer(torch.cat([x[0], x[1, :3]]), cu_seqlens=torch.tensor([0, 7, 10]), offset=3)
    for wrong in (torch.tensor([0, 7.5, 10]), torch.tensor([[0, 10]]), torch.tensor([], dtype=torch.int64)):
        with pytest.raises((TypeError, ValueError), match="cu_seqlens"):
            layer(x[0], cu_seqlens=wrong)
    assert torch.allclose(packed, torch.cat([dense[0], dense[1, :3]]), atol=1e-5)


# ---- DeepSpeed's names


def test_the_tutorial() -> None:
    config = DeepSpeedTransformerConfig(batch_size=64, max_seq_length=128, hidden_size=64, heads=4,
                                        attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1, num_hidden_layers=3,
                                        initializer_range=0.02, local_rank=0, seed=1234, fp16=True,
                                        pre_layer_norm=True, attn_dropout_checkpoint=False,
                                        normalize_invertible=False, gelu_checkpoint=False)
    layers = nn.ModuleList([copy.deepcopy(DeepSpeedTransformerLayer(config)) for _ in range(config.num_hidden_layers)])
    x = torch.randn(2, 21, 64, dtype=torch.float16, requires_grad=True)
    mask = torch.zeros(2, 1, 1, 21, dtype=torch.float16)
    y = x
    for layer in layers:
        y = layer(y, mask)
    y.float().sum().backward()
    assert y.dtype == torch.float16 and torch.isfinite(x.grad).all()
    assert len({layer.config.layer_id for layer in layers}) == 3
    assert not torch.equal(layers[0].attn_qkvw, layers[1].attn_qkvw)
    assert abs(float(layers[0].output_w.float().std()) / (0.02 / math.sqrt(6)) - 1) < 0.05


def test_deepspeed_configuration(tmp_path: Path) -> None:
    values = {"hidden_size": 64, "heads": 4, "hidden_dropout_ratio": 0.0, "return_tuple": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    config = DeepSpeedTransformerConfig.from_json_file(str(path))
    output = DeepSpeedTransformerLayer(config)(torch.randn(1, 2, 64))
    assert isinstance(output, tuple) and output[0].shape == (1, 2, 64)
    with pytest.raises(ValueError, match="hiden_size"):
        DeepSpeedTransformerConfig.from_dict({"hiden_size": 64})
    for wrong in ({"hidden_dropout_ratio": -1}, {"attn_dropout_ratio": 1}, {"heads": 5}, {"hidden_size": -1}):
        with pytest.raises(libdc.Error, match=next(iter(wrong))):
            DeepSpeedTransformerLayer(DeepSpeedTransformerConfig.from_dict({**values, **wrong}))
    with pytest.raises(ValueError, match="head_mask"):
        DeepSpeedTransformerLayer(config)(torch.randn(1, 2, 64), head_mask=torch.ones(4))
    parts = [[torch.randn(64, 64) for _ in range(4)] + [torch.randn(64), torch.randn(256, 64), torch.randn(64, 256),
                                                        torch.randn(64)],
             [torch.randn(64) for _ in range(5)] + [torch.randn(256), torch.randn(64), torch.randn(64)]]
    layer = DeepSpeedTransformerLayer(config, *parts)
    assert torch.equal(layer.attn_qkvb[64:128], parts[1][1]) and torch.equal(layer.norm_w, parts[0][7])
    grads: List[Any] = []
    layer(torch.randn(1, 2, 64), grads=grads)[0].square().sum().backward()
    found = {name: grad for grad, name in grads}
    assert len(found) == len(grads) == 12
    assert torch.equal(found["V_W"], layer.attn_qkvw.grad[128:]) and torch.equal(found["N2_W"], layer.attn_nw.grad)
    layer(torch.randn(1, 2, 64), grads=grads)[0].sum().backward()  # a forward's hooks end with the next one
    pickle.loads(pickle.dumps(layer))(torch.randn(1, 2, 64))
    layer(torch.randn(1, 2, 64))[0].sum().backward()
    assert len(grads) == 24 and not any(weight._backward_hooks for weight in layer.parameters())


def curve(model: nn.ModuleList, dtype: torch.dtype, x: Tensor, target: Tensor, *more: Tensor) -> Tensor:
    """The losses of 100 steps: float32 weights, 16-bit work, and a factor on the loss as float16 needs one."""
    working, factor = copy.deepcopy(model).to(dtype), 256.0
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), []
    masters, parts = list(model.parameters()), list(working.parameters())
    for _ in range(100):
        with torch.no_grad():
            torch._foreach_copy_(parts, masters)
        y = x
        for layer in working:
            y = layer(y, *more)
        loss = (y.float() - target).square().mean()
        for part in parts:
            part.grad = None
        (loss * factor).backward()
        for master, part in zip(masters, parts):
            master.grad = part.grad.float() / factor
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
def test_26_a_long_stack_learns_as_eager_does(pre: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    threads, depth = torch.get_num_threads(), 24
    torch.set_num_threads(1)
    layers = nn.ModuleList(TransformerLayer(config(32, 2, 64, gelu="erf", pre_layer_norm=pre, layer_id=i,
                                                   num_hidden_layers=depth, threads=1)) for i in range(depth))
    eager = nn.ModuleList(Bert(32, 2, 64, "none", pre) for _ in range(depth))
    for ours, theirs in zip(layers, eager):
        theirs.load_state_dict(bert_layer_state(ours))
    x, target = torch.randn(2, 8, 32, dtype=dtype), torch.randn(2, 8, 32)
    found = curve(layers, dtype, x, target)
    expected = curve(eager, dtype, x, target, torch.zeros(2, 1, 1, 8, dtype=dtype))
    torch.set_num_threads(threads)
    assert found[-1] < 0.6 * found[0]
    assert float((found - expected).abs().sum() / expected.sum()) <= 0.01


def test_the_example(tmp_path: Path) -> None:
    """examples/bert under ZeRO-3 on two ranks: the flags change no bit of a Pre-LN model's training."""
    script = Path(__file__).parents[3] / "examples" / "bert" / "train.py"
    command = [sys.executable, "-m", "libdc.run", "-n", "2", str(script), "--compare", "--steps", "12", "--layers", "2",
               "--hidden", "32", "--seq", "32", "--out", str(tmp_path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the losses of every step have the same bits" in done.stdout
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    losses = [[json.loads(line)["loss"] for line in (tmp_path / name).read_text().splitlines()]
              for name in ("metrics.jsonl", "metrics-1.jsonl")]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0] and len(losses[0]) == 12


def test_sharded(launch: Callable[..., str]) -> None:
    """ZeRO-3 on two ranks: the losses of one process with the whole batch."""
    text = """
import torch
import libdc.torch as dct
from libdc.transformer import LayerConfig

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), *(dct.TransformerLayer(LayerConfig(
        32, 2, 64, layer_id=i, normalize_invertible=True, gelu_checkpoint=True)) for i in range(2)),
        torch.nn.Linear(32, 4))

def losses(model, x, y):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())

x, y = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)), torch.ones(4, 6, 4)
alone = list(losses(model(), x, y))
comm = dct.init()
sharded = dct.shard(model(), stage=3)
rank, part = comm.rank, x.shape[0] // comm.size
own = list(losses(sharded, x[rank * part:][:part], y[:part]))
print((alone, own), flush=True)
"""
    results = [ast.literal_eval(line[line.index("("):]) for line in launch(text).splitlines() if "([" in line]
    assert len(results) == 2
    for step, alone in enumerate(results[0][0]):
        assert abs(sum(own[step] for _, own in results) / 2 - alone) < 1e-4
