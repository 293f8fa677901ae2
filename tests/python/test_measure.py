"""libdc bench --machine: a file that the planner reads, and what its figures mean there."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from libdc import plan as planner
from libdc.plan import measure

LAYERS = {"tokens": 16, "layers": [{"shapes": [[256, 64], [256]], "flops": 1 << 30, "repeat": 2}]}


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "libdc", "bench", *arguments], text=True, capture_output=True,
                          stdin=subprocess.DEVNULL, timeout=600)


def test_the_machine_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    done = bench("--machine", str(path), "--clock", "processor")
    assert done.returncode == 0, done.stdout + done.stderr
    machine = planner.load(str(path))
    assert machine.cores == len(os.sched_getaffinity(0)) and "GFLOP/s a core" in done.stdout
    assert machine.host_bytes_per_second == machine.memory_bytes_per_second // 2  # a copy reads and writes
    assert min(machine[5:11]) > 0 and machine.peak("float32") > 10**8
    assert {width for width, _ in machine.product_percent_by_width} == {64, 256, 1024}
    assert {rows for rows, _ in machine.product_percent_by_rows} == {16, 64, 256, 512}
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]
    plan = planner.run(planner.from_layers(LAYERS, "layers"), machine, planner.Options(ranks=2, dtype="float32"))
    assert plan.step_ns > 0


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    done = bench(f"--machine={tmp_path}/none/machine.json")
    assert done.returncode == 2 and "none/machine.json" in done.stderr and "Traceback" not in done.stderr


def test_no_memory_for_ranks_is_no_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/figures")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(ValueError, match="^the ranks that measure cannot be run: .* No space left on device: "):
        measure.measure(str(tmp_path / "machine.json"))
    assert list(tmp_path.iterdir()) == []


def test_products_are_as_fast_as_their_width() -> None:
    machine = planner.load("h100")._replace(product_percent_by_width=((64, 25), (256, 100)))
    assert [machine.percent_of_width(width) for width in (1, 64, 65, 4096)] == [25, 25, 100, 100]
    model = planner.from_layers(LAYERS, "layers")
    options = planner.Options(micro_batch=64, optimizer=False)
    narrow, even = (planner.run(model, each, options).compute_ns for each in (machine, planner.load("h100")))
    assert narrow == pytest.approx(4 * even, rel=1e-4)  # whole nanoseconds


def test_products_of_few_rows_are_slower() -> None:
    """Rows are all tokens of a rank's micro-batch."""
    machine = planner.load("h100")._replace(product_percent_by_rows=((16, 25), (64, 50), (256, 100)))
    model = planner.from_layers(LAYERS, "layers")
    times = {samples: planner.run(model, machine, planner.Options(micro_batch=samples, optimizer=False)).compute_ns
             for samples in (1, 4, 16)}
    assert [times[16], times[4]] == pytest.approx([2 * times[4], 2 * times[1]], rel=1e-3)


def test_ranks_share_cores() -> None:
    """8 ranks on 2 cores take at least 4 times a rank's work; on 8 cores they do not."""
    machine = planner.load("h100")._replace(ranks_per_node=0)
    model, options = planner.from_layers(LAYERS, "layers"), planner.Options(ranks=8, micro_batch=64)
    few, own = (planner.run(model, machine._replace(cores=cores), options) for cores in (2, 0))
    assert few.step_ns >= 4 * few.compute_ns > 2 * own.step_ns > 0


def test_bad_files_are_named(tmp_path: Path) -> None:
    table = json.loads((Path(planner.__file__).parent / "machines" / "h100.json").read_text())
    for widths, text in (([], "must be an object"), ({"64": 0}, "must be 1 to 100"), ({"²": 1}, "must be an object"),
                         ({"a": 3}, "must be an object")):
        path = tmp_path / "machine.json"
        path.write_text(json.dumps({**table, "product_percent_by_width": widths}))
        with pytest.raises(ValueError, match=text):
            planner.load(str(path))
