"""Hybrid sharding: shard(mesh=(replicas, shards)) trains as shard() on as many ranks, and writes one checkpoint."""

from __future__ import annotations

import pathlib
from typing import Any

import libdc.optim
import libdc.run
import libdc.torch as dct
import pytest
import torch
from models import adamw, data, make, train
from sharded import on, one_thread, sharded  # noqa: F401


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_bits_of_shard_without_a_mesh(stage: int) -> None:
    plain = on(4, lambda comm: train(comm, stage, steps=6, accumulate=2))
    for mesh in ((2, 2), (4, 1), (1, 4)):
        hybrid = on(4, lambda comm: train(comm, stage, steps=6, accumulate=2, mesh=mesh))
        assert [run.losses for run in hybrid] == [run.losses for run in plain]
        assert {run.weights for run in hybrid} == {plain[0].weights}


def test_a_rank_holds_its_part_among_its_shards() -> None:
    def rank(comm: Any) -> Any:
        model = sharded(comm, 3, mesh=(2, 2))
        return [p.numel() for p in model.parameters()]

    whole = on(2, lambda comm: [p.numel() for p in sharded(comm, 3).parameters()])
    assert on(4, rank) == [whole[0]] * 4


def test_checkpoint(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "model.safetensors")

    def save(comm: Any) -> Any:
        model = sharded(comm, 3, mesh=(2, 2))
        optimizer = adamw(model)
        model(*data(0, comm.rank)).backward()
        optimizer.step()
        dct.save_checkpoint(model, path, optimizer, extra={"step": 1})
        with pytest.raises((OSError, RuntimeError), match="nowhere"):
            dct.save_checkpoint(model, str(tmp_path / "nowhere" / "x"))
        return dct.full_state_dict(model)

    def load(comm: Any, **mesh: Any) -> Any:
        model = sharded(comm, 3, **mesh)
        assert dct.load_checkpoint(model, path, adamw(model)) == {"step": 1}
        return dct.full_state_dict(model)

    saved = on(4, save)[0]
    for loaded in (*on(4, lambda comm: load(comm, mesh=(2, 2))), *on(3, load)):
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_of_all_has_the_whole(stage: int) -> None:
    """The optimizers' blocks included."""

    def rank(comm: Any) -> Any:
        model = sharded(comm, stage, mesh=(2, 2))
        optimizer = libdc.optim.Shampoo(model.parameters(), 0.01)
        model(*data(0, comm.rank)).backward()
        optimizer.step()
        return (bool(dct.full_state_dict(model, rank0_only=True)),
                bool(dct.full_optimizer_state_dict(model, optimizer, rank0_only=True)))

    assert on(4, rank) == [(True, True)] + [(False, False)] * 3


def test_one_replica_that_fails_makes_all_fail(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "model.safetensors")
    dct.save_checkpoint(dct.shard(make(), 0), path)

    def rank(comm: Any) -> Any:
        model = sharded(comm, 3, mesh=(2, 2))
        with torch.no_grad():
            model.scale.fill_(5)
        late = comm.rank >= 2
        with pytest.raises((OSError, RuntimeError), match="missing"):
            dct.load_checkpoint(model, path + ".missing" if late else path)
        with pytest.raises((ValueError, RuntimeError), match="buffers = 'none'"):
            dct.save_checkpoint(model, path, buffers="none" if late else "rank0")
        return float(dct.full_state_dict(model)["scale"])

    assert on(4, rank) == [5] * 4


@pytest.mark.parametrize("stage, mesh", [(3, (2, 2)), (0, None), (3, None)])
def test_ranks_with_other_files_than_one_another(stage: int, mesh: Any, tmp_path: pathlib.Path) -> None:
    """As an old copy on a machine's own disk. Its tensors have the same names, types and shapes."""
    model = dct.shard(make(), 0)
    for name in ("new", "old"):
        dct.save_checkpoint(model, tmp_path / name)
        with torch.no_grad():
            model.scale.fill_(9)

    def rank(comm: Any) -> Any:
        other = sharded(comm, stage, mesh=mesh)
        with torch.no_grad():
            other.scale.fill_(5)
        with pytest.raises(ValueError, match="on ranks 2, 3 is not the file that rank 0 has"):
            dct.load_checkpoint(other, tmp_path / ("old" if comm.rank >= 2 else "new"))
        return float(dct.full_state_dict(other)["scale"])

    assert on(4, rank) == [5] * 4


@pytest.mark.parametrize("mesh, says", [((2, 3), "is for 6 ranks, but there are 2"), ((2,), "two integers > 0"),
                                        (2, "two integers > 0"), ((0, 2), "two integers > 0")])
def test_a_mesh_that_does_not_fit(mesh: Any, says: str) -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(ValueError, match=says):
            dct.shard(make(), 3, comm=comm, mesh=mesh)

    libdc.run.threads(2, rank, timeout=60)


def test_device_mesh(launch: Any) -> None:
    out = launch("""
import libdc.torch as dct, torch, torch.distributed as dist
from models import data, make
dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
model = make()
dct.shard(model, 3, mesh=mesh)
model(*data(0, dist.get_rank())).backward()
print(sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in make().parameters()))
dist.barrier()
dist.destroy_process_group()
""")
    assert out == "True\nTrue\n"
