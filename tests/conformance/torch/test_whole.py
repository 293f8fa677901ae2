"""P: languages, releases, training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import clients
import libdc.run
import libdc.torch as dct
import pytest
import run as ffi
import torch
import torch.nn as nn
from conftest import ROOT
from models import train

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(before)


def test_check_127_exports_are_the_headers(library: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "checks" / "check_surface.py"), str(library)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_check_127_clients_of_a_release_run_on_later_libraries(library: Path) -> None:
    releases = sorted(path for path in (ROOT / "abi-check").iterdir() if (path / "clients").is_dir())
    assert releases
    for release in releases:
        assert not clients.old_on_new(release, library)
    assert not clients.new_on_old(library)


def test_check_128_one_scenario_in_four_languages(library: Path, tmp_path: Path) -> None:
    builder = ffi.Builder(library, tmp_path)
    c = builder.ranks(builder.compiled("cc", ROOT / "tests" / "ffi" / "scenario.c", "-std=c99"))
    assert c.count("done") == 2
    assert builder.ranks(builder.rust("scenario")) == c
    assert builder.ranks([sys.executable, str(ROOT / "tests" / "ffi" / "scenario_cffi.py")]) == c
    del builder.environment["LIBDC_LIBRARY"]  # the compiled adapter is linked with the package's own
    assert builder.ranks([sys.executable, str(HERE / "scenario_torch.py")]) == c


# Training


class Net(nn.Module):
    """Two layers, of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 3)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


STEPS, LR = 10, 0.05


def batch(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def plain(world: int, accumulate: int, dtype: torch.dtype) -> Dict[str, torch.Tensor]:
    """Data parallelism by hand: each rank's gradient of the same weights, and their mean."""
    net = Net().to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for step in range(STEPS):
        means: List[torch.Tensor] = [torch.zeros_like(p) for p in net.parameters()]
        for micro in range(accumulate):
            for rank in range(world):
                loss = net(batch(step * accumulate + micro, rank, dtype)) / accumulate
                for mean, grad in zip(means, torch.autograd.grad(loss, list(net.parameters()))):
                    mean += grad / world
        for parameter, mean in zip(net.parameters(), means):
            parameter.grad = mean
        optimizer.step()
    return net.state_dict()


def sharded(comm: libdc.Comm, stage: int, accumulate: int, dtype: torch.dtype) -> Dict[str, torch.Tensor]:
    net = Net().to(dtype)
    dct.shard(net, stage, comm=comm)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for step in range(STEPS):
        for micro in range(accumulate):
            (net(batch(step * accumulate + micro, comm.rank, dtype)) / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dct.full_state_dict(net)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)],
                         ids=["float32", "bfloat16"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_check_129_training_is_data_parallelism(world: int, accumulate: int, dtype: torch.dtype,
                                                tolerance: float) -> None:
    expected = plain(world, accumulate, dtype)
    for stage in (1, 2, 3):
        for weights in libdc.run.threads(world, sharded, stage, accumulate, dtype, timeout=120):
            for name, value in expected.items():
                error = (weights[name].double() - value.double()).abs().max() / value.double().abs().max()
                assert error <= tolerance, (stage, name, error)


def test_check_130_compiled_like_eager() -> None:
    """tests/torch's odd model: a graph break, tied and frozen weights, a scalar, lengths that do not divide."""
    from torch._dynamo.utils import counters

    def rank(comm: libdc.Comm, *args: Any) -> Any:
        return train(comm, *args, model={"broken": True})

    for stage in (3, 2):
        torch._dynamo.reset()
        counters.clear()
        (eager,) = libdc.run.threads(1, rank, stage, 5, timeout=300)
        (compiled,) = libdc.run.threads(1, rank, stage, 5, 1, None, "libdc", timeout=300)
        assert sum(counters["graph_break"].values()) > 0
        assert compiled.losses == eager.losses and compiled.weights == eager.weights
