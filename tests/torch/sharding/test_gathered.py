"""`with gathered(model):` whole weights outside of forward."""

from __future__ import annotations

from typing import Any

import libdc.run
import libdc.torch as dct
import pytest
import torch
from models import Odd, bits, data, make
from sharded import on, one_thread, sharded  # noqa: F401


def test_gathered() -> None:
    def rank(comm: Any) -> None:
        model = sharded(comm)
        whole = make()
        with dct.gathered(model):
            assert torch.equal(model.emb.weight, whole.emb.weight) and torch.equal(model.scale, whole.scale)
            assert model.emb.weight is model.emb.weight
            with dct.gathered(model.norm):
                model.norm.weight.sum().backward()
        assert model.norm.weight.grad.sum() == 13
        assert model.emb.weight.to_local().shape == (241,) and dct.stats(model).gathered_bytes == 0

    on(2, rank)


@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.bfloat16}])
def test_what_all_ranks_write_into_gathered_weights_is_kept(options: Any) -> None:
    def change(model: Odd) -> None:
        with torch.no_grad():
            model.emb.weight.mul_(2)
            model.norm.weight[3] = 5
        model.blocks[0].up.weight.data += 0.25  # as peft merges adapters
        model.blocks[1].up.weight.data = model.blocks[1].up.weight.data * 3
        model.scale.data.fill_(7)

    expected = make()
    change(expected)

    def rank(comm: Any, stage: int) -> None:
        model = sharded(comm, stage, **options)
        model(*data(0, 0)).backward() if not options else None
        with dct.gathered(model):
            change(model)
            if not options:
                assert model(*data(0, 0)).item() == expected(*data(0, 0)).item()  # a forward inside has them too
        assert bits(dct.full_state_dict(model)) == bits(expected.state_dict())
        if not options:
            assert model(*data(0, 0)).item() == expected(*data(0, 0)).item()
        with pytest.raises(ArithmeticError):
            with dct.gathered(model):
                model.emb.weight.detach().zero_()
                raise ArithmeticError
        if stage > 0:
            assert bits(dct.full_state_dict(model)) == bits(expected.state_dict())
        with pytest.raises(RuntimeError, match="gathered: rank 1 has written other values into norm.weight than rank"):
            with dct.gathered(model):
                model.norm.weight.detach()[-1] = comm.rank

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_what_one_rank_writes_into_gathered_weights_is_kept() -> None:
    def rank(comm: Any, stage: int) -> None:
        model = sharded(comm, stage, mesh=(2, 2) if stage == 3 else None)
        expected = make()
        with torch.no_grad():
            expected.emb.weight[3] = 2
            expected.scale.fill_(-1)
            expected.norm.bias.add_(1)
        with dct.gathered(model, write=True), torch.no_grad():
            model.emb.weight, model.scale, model.norm.bias  # at stage 3, all ranks read together
            if comm.rank == 1:
                model.emb.weight[3] = 2
                model.scale.data = torch.tensor(-1.0)
            if comm.rank > 1:
                model.norm.bias.add_(1)
        assert bits(dct.full_state_dict(model)) == bits(expected.state_dict())
        assert model(*data(0, 0)).item() == expected(*data(0, 0)).item()
        with pytest.raises(RuntimeError, match="rank 3 has written other values into norm.weight than rank 2, so"):
            with dct.gathered(model), torch.no_grad():
                old = model.norm.weight.clone()
                if comm.rank == 2:
                    model.norm.weight.copy_(old)  # no other value than before, but it is written
                if comm.rank == 3:
                    model.norm.weight.zero_()

    for stage in (0, 1, 3):
        libdc.run.threads(4, rank, stage, timeout=60)


def test_parameters_that_ranks_write_in_gathered() -> None:
    """Past their modules' attributes. At stage 0 they are whole, else parts."""
    new = make()
    for p in new.parameters():
        p.data.mul_(2)
    other = make()
    other.load_state_dict({**new.state_dict(), "scale": torch.tensor(3.0)})

    def rank(comm: Any, stage: int) -> None:
        model = sharded(comm, stage, mesh=(2, 2) if stage == 3 else None)
        with dct.gathered(model):
            model.load_state_dict(new.state_dict())
            assert torch.equal(model.norm.weight, new.norm.weight)
            model(*data(0, 0))
            model.scale.data.fill_(3)
        assert bits(dct.full_state_dict(model)) == bits(other.state_dict())
        if stage > 0:
            with pytest.raises(RuntimeError, match="gathered: scale was written as the parameter, .*, but not on rank "
                                                   "0, whose part .*: write into the module's attribute"):
                with dct.gathered(model):
                    model.norm.weight
                    if comm.rank == 1:
                        model.load_state_dict(make().state_dict())
            model(*data(0, 0)).backward()
            return
        with dct.gathered(model):
            if comm.rank == 1:
                model.load_state_dict(new.state_dict())
        assert bits(dct.full_state_dict(model)) == bits(new.state_dict())
        assert model(*data(0, 0)).item() == new(*data(0, 0)).item()

    for stage in (0, 1, 3):
        libdc.run.threads(4, rank, stage, timeout=60)


def test_a_weight_is_written_whole_or_as_a_part() -> None:
    def rank(comm: Any, stage: int, reads: bool) -> None:
        model = sharded(comm, stage)
        scale = model.scale

        def write(rank: int) -> None:
            with dct.gathered(model), torch.no_grad():
                assert model.scale.shape == ()
                if rank == 1:
                    model.scale.fill_(2)
                scale.add_(1)
                if reads:
                    assert model.scale.item() == 3

        if stage == 0:
            write(1)
            assert scale.item() == 3
            return
        with pytest.raises(RuntimeError, match="gathered: scale was written both as a whole, by its module's attr"):
            write(comm.rank)

    for stage in (0, 1, 3):
        for reads in (False, True):
            libdc.run.threads(2, rank, stage, reads, timeout=60)


def test_gathered_weights_to_read_alone() -> None:
    def rank(comm: Any, stage: int) -> None:
        model = sharded(comm, stage)
        before = bits(dct.full_state_dict(model))
        with dct.gathered(model, write=False):
            assert torch.equal(model.emb.weight, make().emb.weight) and model.scale.requires_grad
        changes = lambda: model.norm.weight.detach().zero_(), lambda: setattr(model.scale, "data", torch.zeros(()))
        for change in changes:
            with pytest.raises(RuntimeError, match="was written in a block with write = False, so the change would be"):
                with dct.gathered(model, write=False):
                    change()
        assert bits(dct.full_state_dict(model)) == before

    for stage in (1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_modules_own_weight_may_be_assigned(stage: int) -> None:
    """peft's merge_and_unload() does so, once it has written into it."""

    def rank(comm: Any) -> None:
        net = sharded(comm, stage)
        params = dict(net.named_parameters())
        with dct.gathered(net):
            net.norm.weight.detach().fill_(3)
            net.norm.weight = net.norm.weight
            with pytest.raises(TypeError, match="cannot assign"):
                net.norm.weight = torch.zeros_like(net.norm.weight)
            with pytest.raises(TypeError, match="cannot assign"):
                net.norm.weight = net.norm.bias
        assert all(params[name] is param for name, param in net.named_parameters())
        assert (dct.full_state_dict(net)["norm.weight"] == 3).all()
        net(*data(0, 0)).backward()

    on(2, rank)
