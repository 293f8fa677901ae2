"""Models on PyTorch's device meta: what gives a sharded one its values, what is an error before, and how much memory a
rank has at most."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Callable, Dict

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from libdc.transformer import LayerConfig
from models import Odd, data, make
from safetensors.torch import save_file
from sharded import on, one_thread  # noqa: F401


def on_meta(kind: Callable[[], nn.Module] = Odd) -> Any:
    with torch.device("meta"):
        return kind()


def write(source: str, folder: Path) -> Dict[str, Any]:
    """The weights of make() as other programs write them; the arguments of load_checkpoint() for them."""
    state = {name: value for name, value in make().state_dict().items() if name != "head.weight"}  # tied
    path = folder / "model.safetensors"
    if source == "file":
        save_file(state, path)
    elif source == "folder in bfloat16":
        save_file({name: value.bfloat16() for name, value in state.items()}, path)
        return {"path": folder}
    elif source == "index":
        names = sorted(state)
        files = {name: f"model-{names.index(name) % 2}.safetensors" for name in names}
        for file in set(files.values()):
            save_file({name: state[name] for name in names if files[name] == file}, folder / file)
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": files}))
    else:
        dcp.save({"model": state, "step": 3}, checkpoint_id=folder / "dcp", no_dist=True)
        return {"path": folder / "dcp", "prefix": "model."}
    return {"path": path}


@pytest.mark.parametrize("source", ["file", "folder in bfloat16", "index", "torch.distributed.checkpoint"])
def test_a_model_gets_its_weights_from_a_file(source: str, tmp_path: Path) -> None:
    arguments = write(source, tmp_path)
    expected = make().bfloat16().float() if source.endswith("bfloat16") else make()
    loss = expected(*data(0, 0)).item()

    def rank(comm: Any) -> None:
        for stage in (0, 1, 3):
            model = on_meta()
            params = dict(model.named_parameters())
            dct.shard(model, stage, comm=comm)
            assert all(param is params[name] for name, param in model.named_parameters())
            assert model.head.weight is model.emb.weight and not model.frozen.weight.requires_grad
            dct.load_checkpoint(model, **arguments)
            assert model(*data(0, 0)).item() == loss
            for name, value in dct.full_state_dict(model).items():
                assert torch.equal(value, expected.state_dict()[name])

    for world in (1, 2, 3):
        on(world, rank)


def test_a_model_gets_the_weights_that_its_modules_make() -> None:
    """reset_parameters() and load_state_dict() give the numbers that a model without shard() has, and it trains."""

    def rank(comm: Any) -> None:
        def reset(model: nn.Module) -> None:
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()

        for stage in (0, 1, 3):
            expected = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
            torch.manual_seed(4)
            reset(expected)
            model = on_meta(lambda: nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # of the same objects, before
            dct.shard(model, stage, comm=comm)
            assert model.to_empty(device="cpu") is model  # as programs for FSDP2 do
            with pytest.raises(RuntimeError, match="to_empty: device = cuda, must be cpu, where shard"):
                model.to_empty(device="cuda")
            torch.manual_seed(4)
            reset(model)
            theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
            for one, by in ((model, optimizer), (expected, theirs)):
                one(torch.ones(2, 5)).square().sum().backward()
                by.step()
            for name, value in dct.full_state_dict(model).items():
                assert torch.equal(value, expected.state_dict()[name])
            other = dct.shard(on_meta(), stage, comm=comm)
            other.load_state_dict(make().state_dict())
            assert other(*data(0, 0)).item() == make()(*data(0, 0)).item()

    on(1, rank)


class Scaled(nn.Module):
    """A layer and a buffer that no state_dict() has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.table


def test_values_that_are_missing_are_an_error(tmp_path: Path) -> None:
    x, path = torch.ones(1, 3), tmp_path / "model.safetensors"
    plain = Scaled()
    save_file(plain.state_dict(), path)

    def rank(comm: Any) -> None:
        model = dct.shard(on_meta(Scaled), 3, comm=comm)
        for read in (lambda: model(x), lambda: dct.full_state_dict(model),
                     lambda: dct.save_checkpoint(model, tmp_path / "none")):
            with pytest.raises(RuntimeError, match="layer.weight has no values yet, since the model was on meta"):
                read()
        nn.init.zeros_(model.layer.weight)
        with pytest.raises(RuntimeError, match="layer.bias has no values yet"):
            model(x)
        dct.load_checkpoint(model, path)
        with pytest.raises(RuntimeError, match="table is a buffer without values, since it was on meta"):
            model(x)
        model.table.copy_(torch.arange(3.0))
        assert torch.equal(model(x), plain(x))
        other = dct.shard(on_meta(Scaled), 3, comm=comm)
        other.table = torch.arange(3.0)
        dct.load_checkpoint(other, path)
        assert torch.equal(other(x), plain(x))

    on(2, rank)
    assert not (tmp_path / "none").exists()


def test_a_copy_has_no_values_either() -> None:
    x, plain = torch.ones(1, 3), Scaled()

    def rank(comm: Any, stage: int) -> None:
        model = dct.shard(on_meta(Scaled), stage, comm=comm)
        nn.init.zeros_(model.layer.weight)
        other = copy.deepcopy(model)
        for fill, missing in ((lambda net: net.load_state_dict(plain.state_dict()), "layer.bias has no values yet"),
                              (lambda net: net.table.copy_(plain.table), "table is a buffer without values")):
            with pytest.raises(RuntimeError, match=missing):
                other(x)
            fill(other)
        assert torch.equal(other(x), plain(x)) and torch.equal(copy.deepcopy(other)(x), plain(x))
        with pytest.raises(RuntimeError, match="layer.bias has no values yet"):
            model(x)

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_a_file_that_cannot_be_read_gives_no_values(tmp_path: Path) -> None:
    """Damage reaches the memory of a model without values, which therefore still has none."""
    path = tmp_path / "model.safetensors"
    on(1, lambda comm: dct.save_checkpoint(dct.shard(make(), 3, comm=comm), path))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    def rank(comm: Any) -> None:
        model = dct.shard(on_meta(), 3, comm=comm)
        with pytest.raises(Exception, match="is damaged"):
            dct.load_checkpoint(model, path)
        with pytest.raises(RuntimeError, match="has no values yet"):
            model(*data(0, 0))

    on(2, rank)
    for name, text in (("model", "has no .metadata of"), ("broken", "is no folder of torch.distributed.checkpoint")):
        (tmp_path / name).mkdir()
        if name == "broken":
            (tmp_path / name / ".metadata").write_bytes(b"")
        with pytest.raises(ValueError, match=text):
            on(1, lambda comm: dct.load_checkpoint(dct.shard(on_meta(), 3, comm=comm), tmp_path / name))


def test_all_ranks_begin_on_meta_or_none() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(ValueError, match="on meta"):
            dct.shard(on_meta() if comm.rank else make(), 3, comm=comm)
        mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
        dct.shard(mixed, 3, comm=comm)  # where the others are
        nn.init.ones_(mixed[1].weight)
        nn.init.ones_(mixed[1].bias)
        assert mixed(torch.ones(1, 3)).shape == (1, 3)
        with torch.device("meta"), pytest.raises(RuntimeError, match="PyTorch's default device is meta"):
            dct.shard(nn.Linear(3, 3), 3, comm=comm)
        with pytest.raises(ValueError, match="device = cuda, but parameters are on cpu"):
            dct.shard(make(), 3, comm=comm, device="cuda")

    on(2, rank)


@pytest.mark.parametrize("on_device_meta", [False, True])
def test_a_transformer_layer_resets_its_parameters(on_device_meta: bool) -> None:
    """The library's initial weights are whole, and were an error of parts."""
    config = LayerConfig(hidden_size=16, heads=2, seed=3)
    expected = dct.TransformerLayer(config).state_dict()

    def rank(comm: Any, stage: int) -> None:
        layer = dct.TransformerLayer(config, device="meta" if on_device_meta else None)
        dct.shard(layer, stage, comm=comm, device="cpu")
        if not on_device_meta:
            for param in layer.parameters():
                nn.init.zeros_(param)
        layer.reset_parameters()
        whole = dct.full_state_dict(layer)
        assert whole.keys() == expected.keys() and all(torch.equal(whole[name], expected[name]) for name in whole)
        layer(torch.ones(1, 2, 16)).sum().backward()

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


MEMORY = """
import ctypes, gc, libdc.torch as dct, torch, torch.distributed.checkpoint as dcp, torch.nn as nn
from safetensors.torch import save_file

LAYERS, WIDTH, MIB = 12, 1024, 1 << 20
ranks, folder = dct.init(), FOLDER


def build():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).requires_grad_(False)


def status(key):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(key))


if ranks.rank == 0:
    state = build().state_dict()
    save_file(state, folder + "/file.safetensors")
    save_file({name: value.bfloat16() for name, value in state.items()}, folder + "/short.safetensors")
    dcp.save(state, checkpoint_id=folder + "/dcp", no_dist=True)
    del state
for source in ("file.safetensors", "short.safetensors", "dcp", "reset"):
    ranks.barrier()
    with torch.device("meta"):
        model = build()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")  # VmHWM begins again
    before = status("VmRSS")
    dct.shard(model, 3)
    if source == "reset":
        for layer in model:
            layer.reset_parameters()
    else:
        dct.load_checkpoint(model, folder + "/" + source)
    print("peak", status("VmHWM") - before, flush=True)
    del model
"""


def test_no_rank_has_memory_for_the_whole_model(launch: Callable[..., str], tmp_path: Path) -> None:
    """48 MiB of weights in layers of 4 MiB, on two ranks. A rank has its half and one layer, or two while one becomes
    another type or is cut. The rest is for what libdc and PyTorch allocate themselves."""
    script = MEMORY.replace("FOLDER", repr(str(tmp_path)))
    peaks = [float(line.split()[-1]) for line in launch(script, 2).splitlines() if "peak" in line]
    assert len(peaks) == 8 and max(peaks) < 24 + 2 * 4 + 12 < 48, peaks
