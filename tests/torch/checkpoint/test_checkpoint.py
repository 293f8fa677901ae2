"""Checkpoints that each rank writes and reads its own part of, from any number of ranks and stage to any other. They
are files of the safetensors format. Also what remains of them when something fails."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any, Callable, Dict, List

import libdc.torch as dct
import pytest
import safetensors.torch
import torch
from libdc import optim
from libdc.torch.checkpoint import safetensors_file
from libdc.torch.sharding.part import plain_tensor
from models import adamw, bits, data, make, trainable
from sharded import on, one_thread, sharded  # noqa: F401
from test_state_dict import KINDS as OWNING
from test_state_dict import learn, model
from torch import nn

KINDS: Dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch AdamW": adamw,
    "torch amsgrad, a tensor's rate": lambda net: torch.optim.AdamW(trainable(net), torch.tensor(1e-2), amsgrad=True,
                                                                  foreach=False),
    # A power of two: with other rates PyTorch's bfloat16 update rounds by an element's place in its tensor.
    "torch SGD": lambda net: torch.optim.SGD(trainable(net), 2.0**-7, momentum=0.9),
    "AdamW": lambda net: optim.AdamW(trainable(net), 1e-2),
    "two groups": lambda net: optim.AdamW([{"params": trainable(net)[:3], "betas": (0.8, 0.9)},
                                           {"params": trainable(net)[3:], "lr": 2e-2}]),
}


def train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> List[float]:
    losses = []
    for step in range(first, last):
        loss = net(*data(step, 0))  # every rank the same, so that any number of them has the same losses
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_with_other_ranks_and_stages(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"

    def begun(comm: Any, stage: int) -> Any:
        net = make().to(dtype)
        dct.shard(net, stage, comm=comm, group_size=300)
        return net, KINDS[kind](net)

    def first(comm: Any) -> Any:
        net, optimizer = begun(comm, 3)
        train(net, optimizer, 0, 4)
        dct.save_checkpoint(net, path, optimizer, {"step": 4, "rank": comm.rank, "of all": torch.arange(3) + comm.rank})
        state, weights = dct.full_optimizer_state_dict(net, optimizer)["state"], dct.full_state_dict(net)
        return state, weights, train(net, optimizer, 4, 8), bits(dct.full_state_dict(net))

    def second(comm: Any, stage: int, again: Path) -> Any:
        net, optimizer = begun(comm, stage)
        extra = dct.load_checkpoint(net, path, optimizer)
        assert extra.pop("of all").tolist() == [0, 1, 2] and extra == {"step": 4, "rank": 0}
        dct.save_checkpoint(net, again, optimizer, {"step": 4, "of all": torch.arange(3)})
        for key, value in KINDS[kind](net).param_groups[0].items():
            assert type(value) is type(optimizer.param_groups[0][key])
        return train(net, optimizer, 4, 8), bits(dct.full_state_dict(net))

    state, weights, losses, end = on(2, first)[0]
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["head.weight"] == "emb.weight"
        for name in file.keys():
            if not name.startswith("extra/"):
                _, parameter, key = name.split("/") if "/" in name else ("", name, "")
                assert torch.equal(file.get_tensor(name), state[parameter][key] if key else weights[name]), name
        assert len(file.keys()) == len(weights) + sum(len(values) for values in state.values())  # one tied, one more
    for world, stage in ((1, 0), (3, 0), (1, 3), (2, 1), (2, 2), (3, 3), (4, 3)):
        again = tmp_path / f"{world}-{stage}.safetensors"
        for got in on(world, lambda comm: second(comm, stage, again)):
            assert got == (losses, end) or world == 3, (world, stage)  # (g + g + g) / 3 need not be g
        assert again.read_bytes()[-10_000:] == path.read_bytes()[-10_000:], (world, stage)  # the tensors begin before
    assert len(os.listdir(tmp_path)) == 8


@pytest.mark.parametrize("kind", OWNING)
def test_blocks_and_layers_that_ranks_own(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    models = [model() for _ in range(3)]  # one generator serves all threads

    def first(comm: Any) -> List[float]:
        net = models[comm.rank]
        dct.shard(net, 3, comm=comm)
        optimizer = OWNING[kind](net)
        learn(net, optimizer, 0, 5)
        dct.save_checkpoint(net, path, optimizer)
        return learn(net, optimizer, 5, 10)

    def second(comm: Any, stage: int) -> List[float]:
        net = models[comm.rank]
        dct.shard(net, stage, comm=comm)
        optimizer = OWNING[kind](net)
        assert dct.load_checkpoint(net, path, optimizer) == {}
        return learn(net, optimizer, 5, 10)

    expected = on(2, first)[0]
    for world, stage in ((1, 0), (1, 3), (2, 1), (2, 3), (2, 0)):
        models = [model() for _ in range(world)]
        for losses in on(world, lambda comm: second(comm, stage)):
            assert losses == expected


def test_weights_of_others(tmp_path: Path) -> None:
    """A file of the safetensors package, with other types, and several with an index."""
    weights = {name: value.double() for name, value in make().state_dict().items() if name != "emb.weight"}
    safetensors.torch.save_file(weights, tmp_path / "one.safetensors")
    names = sorted(weights)
    for number, part in enumerate((names[:5], names[5:])):
        safetensors.torch.save_file({name: weights[name] for name in part}, tmp_path / f"{number}.safetensors")
    index = {"weight_map": {name: f"{int(name in names[5:])}.safetensors" for name in names}}
    (tmp_path / "all.safetensors.index.json").write_text(json.dumps(index))

    def load(comm: Any, name: str) -> str:
        net = sharded(comm)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        dct.load_checkpoint(net, tmp_path / name)
        return bits(dct.full_state_dict(net))

    for name in ("one.safetensors", "all.safetensors.index.json"):
        assert on(2, lambda comm: load(comm, name)) == [bits(make().state_dict())] * 2


def test_an_optimizer_without_weights(tmp_path: Path) -> None:
    """Weights in one file and the optimizer's state in another are the same as both in one."""
    weights, state = tmp_path / "weights.safetensors", tmp_path / "state.safetensors"

    def first(comm: Any) -> Any:
        net = sharded(comm)
        optimizer = adamw(net)
        train(net, optimizer, 0, 3)
        dct.save_checkpoint(net, weights)
        dct.save_checkpoint(net, state, optimizer, {"step": 3}, weights=False)
        return train(net, optimizer, 3, 6)

    def second(comm: Any) -> Any:
        net = sharded(comm)
        optimizer = adamw(net)
        before = bits(dct.full_state_dict(net))
        assert dct.load_checkpoint(net, state, optimizer) == {"step": 3}
        assert bits(dct.full_state_dict(net, cpu_offload=True)) == before
        dct.load_checkpoint(net, weights)
        return train(net, optimizer, 3, 6)

    losses = on(2, first)[0]
    with safetensors.safe_open(state, "pt") as file:
        assert all(name.startswith("optimizer/") for name in file.keys())
    assert on(3, second)[0] == losses


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    good = make().state_dict()
    del good["head.weight"]  # tied

    def file(name: str, change: Callable[[Dict[str, Any]], Any]) -> Path:
        weights = {key: value.clone() + 1 for key, value in good.items()}
        change(weights)
        safetensors.torch.save_file(weights, tmp_path / name)
        return tmp_path / name

    lacking = file("lacking", lambda weights: [weights.pop(name) for name in ("scale", "norm.bias")])
    other = file("other", lambda weights: weights.update({"norm.weight": torch.zeros(7)}))
    more = file("more", lambda weights: weights.update({"strange": torch.zeros(7)}))
    whole = file("whole", lambda weights: None)
    cut = tmp_path / "cut"
    cut.write_bytes(whole.read_bytes()[:-1])
    text = tmp_path / "text"
    text.write_text("this is no tensor")

    def refused(comm: Any) -> None:
        net = sharded(comm)
        before = bits(dct.full_state_dict(net))
        for path, said in ((lacking, "lacks scale, norm.bias, and has nothing"),
                           (more, "lacks nothing, and has strange"), (cut, "a part of one"),
                           (other, r"norm.weight has shape \(7,\) in .*other, must be \(13,\)"),
                           (text, "its first 8 bytes tell of"), (tmp_path / "none", "No such file")):
            with pytest.raises((ValueError, OSError), match=said):
                dct.load_checkpoint(net, path)
        with pytest.raises(ValueError, match="whole has no optimizer's state"):
            dct.load_checkpoint(net, whole, adamw(net))
        here = tmp_path / "none" if comm.rank == 1 else whole
        with pytest.raises((RuntimeError, OSError), match="No such file"):
            dct.load_checkpoint(net, here)
        assert bits(dct.full_state_dict(net)) == before
        dct.load_checkpoint(net, more, strict=False)
        dct.load_checkpoint(net, lacking, strict=False)
        assert bits(dct.full_state_dict(net)) != before

    on(2, refused)


def test_other_optimizers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"

    def run(comm: Any) -> None:
        net = sharded(comm)
        optimizer = KINDS["torch AdamW"](net)
        train(net, optimizer, 0, 2)
        dct.save_checkpoint(net, path, optimizer)
        before = bits(dct.full_state_dict(net))
        with pytest.raises(ValueError, match="the optimizer has 2 parameter groups, the saved one 1"):
            dct.load_checkpoint(net, path, KINDS["two groups"](net))
        with pytest.raises(ValueError, match="other parameters than the saved one"):
            dct.load_checkpoint(net, path, torch.optim.AdamW(trainable(net)[1:]))
        for kind, lacking in ((torch.optim.SGD, "dampening, momentum"),
                              (torch.optim.Adagrad, "initial_accumulator_value, lr_decay, sum")):
            with pytest.raises(ValueError, match=f"{kind.__name__}: .* another kind of optimizer: it lacks {lacking}"):
                dct.load_checkpoint(net, path, kind(trainable(net), 0.1))
        foreign = torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1)
        for call in (lambda: dct.save_checkpoint(net, path, foreign), lambda: dct.load_checkpoint(net, path, foreign),
                     lambda: dct.full_optimizer_state_dict(net, foreign)):
            with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) that the model does not have"):
                call()
        assert bits(dct.full_state_dict(net)) == before

    on(2, run)


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.safetensors"
    write = safetensors_file.write

    def run(comm: Any) -> None:
        net = sharded(comm)
        dct.save_checkpoint(net, path)
        comm.barrier()
        before = path.read_bytes()

        def full(fd: int, place: int, elements: torch.Tensor) -> int:
            if broken[0] and elements.data_ptr() in mine:
                raise OSError(28, "No space left on device")
            return write(fd, place, elements)

        if comm.rank == 1:
            mine.update(plain_tensor(parameter).data_ptr() for parameter in net.parameters())
            monkeypatch.setattr(safetensors_file, "write", full)
            broken[0] = True
        comm.barrier()
        with pytest.raises((OSError, RuntimeError), match="No space left on device"):
            dct.save_checkpoint(net, path)
        comm.barrier()
        broken[0] = False
        with pytest.raises(TypeError, match=r"save_checkpoint: extra\['x'\]\[1\] is of type set, must be a str, int"):
            dct.save_checkpoint(net, path, extra={"x": [1, {1, 2}]})
        with pytest.raises((OSError, RuntimeError), match="No such file"):
            dct.save_checkpoint(net, tmp_path / "none" / "step")
        with pytest.raises((OSError, RuntimeError), match="is a folder, must be a file's name"):
            dct.save_checkpoint(net, tmp_path)
        if comm.rank == 0:
            os.mkfifo(tmp_path.with_name("pipe"))
        comm.barrier()
        for wrong, text in ("", "must be a file's name"), (tmp_path.with_name("pipe"), "is a pipe or a device"):
            with pytest.raises((ValueError, RuntimeError), match=f"path = '{wrong}',? {text}"):
                dct.save_checkpoint(net, wrong)
        assert path.read_bytes() == before and os.listdir(tmp_path) == ["step.safetensors"]

    mine: Any = set()
    broken = [False]
    on(2, run)


def test_any_bytes_are_tensors_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "some"
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([True]), "c": torch.zeros(0, 3)}
    safetensors.torch.save_file(tensors, path)
    good = path.read_bytes()
    assert set(safetensors_file.File(str(path)).tensors) == {"a", "b", "c"}
    chance, fine = random.Random(3), 0
    for _ in range(3000):
        bad = bytearray(good[: chance.randrange(len(good) + 1)] if chance.random() < 0.2 else good)
        for _ in range(chance.randrange(1, 4)):
            if bad:
                bad[chance.randrange(len(bad))] = chance.choice((0, 34, 48, 57, 123, 255, chance.randrange(256)))
        path.write_bytes(bad)
        try:
            file = safetensors_file.File(str(path))
        except ValueError:
            continue
        fine += 1
        for name, tensor in file.tensors.items():
            file.read(name, 0, torch.empty(tensor.numel(), dtype=tensor.dtype))
    assert fine > 100


def test_descriptions_of_another_form(tmp_path: Path) -> None:
    for text, reason in (("[1]", "its description is no object of JSON"),
                         ('{"__metadata__":[1]}', "its metadata are no strings"),
                         ('{"__metadata__":{"x":1}}', "its metadata are no strings")):
        (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text.encode())
        with pytest.raises(ValueError, match=f"{tmp_path / 'x'} is no safetensors file, or a part of one: {reason}"):
            safetensors_file.File(str(tmp_path / "x"))


def test_every_type(tmp_path: Path) -> None:
    for dtype in safetensors_file._TYPE_NAMES:
        tensor = torch.zeros(3, 2, dtype=dtype)
        tensor.view(torch.uint8).random_(0, 2)
        info = safetensors_file.TensorInfo(safetensors_file.type_name("x", dtype), (3, 2))
        layout = safetensors_file.Layout({"x": info}, {})
        with open(tmp_path / "x", "wb") as file:
            safetensors_file.reserve(file.fileno(), layout.nbytes)
            crc = safetensors_file.write(file.fileno(), layout.offset("x"), tensor.view(-1))
            safetensors_file.write_bytes(file.fileno(), 0, layout.header({"x": crc}))
        again = safetensors.torch.load_file(tmp_path / "x")["x"]
        assert again.dtype == dtype and torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))
    with pytest.raises(ValueError, match="x is torch.complex128, must be float64, float32"):
        safetensors_file.type_name("x", torch.complex128)


def test_the_ranks_are_asked_for() -> None:
    with pytest.raises(ValueError, match="not a sharded model"):
        dct.save_checkpoint(make(), "x")


def test_lazy_conjugates_and_negatives(tmp_path: Path) -> None:
    """Their memory has other values than they."""
    path = str(tmp_path / "lazy")
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    extra = {"conjugate": numbers.conj(), "negative": numbers.conj().imag, "one": numbers[:1].conj().imag}
    net = nn.Linear(2, 2)
    net.register_buffer("turned", numbers.conj())
    net.register_buffer("minus", numbers[:1].conj().imag)
    dct.save_checkpoint(dct.shard(net, 3), path, extra=extra)
    other = nn.Linear(2, 2)
    other.register_buffer("turned", torch.zeros(2, dtype=torch.complex64))
    other.register_buffer("minus", torch.zeros(1))
    loaded = dct.load_checkpoint(dct.shard(other, 3), path)
    assert all(torch.equal(loaded[name], value) for name, value in extra.items())
    assert torch.equal(other.turned, net.turned) and torch.equal(other.minus, net.minus)


def test_keys_that_are_no_text(tmp_path: Path) -> None:
    """JSON has none, but a scheduler's milestones are numbers."""
    path = tmp_path / "a.safetensors"

    def schedule() -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.1)

    net, first, second = dct.shard(nn.Linear(2, 2), 3), schedule(), schedule()
    extra = {"scheduler": first.state_dict(), "nested": [{1: {"libdc.pairs": None}, True: 2, None: {}}], "empty": {}}
    dct.save_checkpoint(net, path, extra=extra)
    loaded = dct.load_checkpoint(net, path)
    second.load_state_dict(loaded["scheduler"])
    rates = []
    for _ in range(5):
        second.optimizer.step()
        second.step()
        rates.append(round(second.get_last_lr()[0], 6))
    assert rates == [1, 0.1, 0.1, 0.01, 0.01]
    assert {name: loaded[name] for name in ("nested", "empty")} == {name: extra[name] for name in ("nested", "empty")}
    saved = path.read_bytes()
    with pytest.raises(TypeError, match=r"extra\['a'\]\[1\] has the key \(1, 2\), must be a str, int, float, bool or"):
        dct.save_checkpoint(net, path, extra={"a": [0, {(1, 2): 3}]})
    assert path.read_bytes() == saved


@pytest.mark.parametrize("stage", range(4))
def test_what_an_open_block_has_written_is_saved(stage: int, tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        net = dct.shard(nn.Linear(3, 2), stage, comm=comm)
        with dct.gathered(net):
            net.weight.detach().fill_(7)
            assert (dct.full_state_dict(net)["weight"] == 7).all()
            net.weight.detach().fill_(8)
            dct.save_checkpoint(net, tmp_path / "a.safetensors")

    on(2, rank)
    assert (safetensors.torch.load_file(tmp_path / "a.safetensors")["weight"] == 8).all()
