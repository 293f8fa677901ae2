"""libdc sim: events against closed forms, and the numbers of ranks up to 65,536."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from libdc import plan as planner
from libdc.plan import page, simulate

MODEL = {"tokens": 512, "layers": [{"shapes": [[4096, 1024]], "flops": 1 << 36, "kept_bytes": 1 << 20, "repeat": 4}]}


def plan_of(folder: Path, ranks: int) -> planner.Plan:
    path = folder / "model.json"
    path.write_text(json.dumps(MODEL))
    return planner.run(planner.read(str(path), None, 2), planner.load("h100"), planner.Options(ranks=ranks))


@pytest.mark.parametrize("mtbf_s", [3e3, 3e4, 1e6])
def test_events_are_within_a_percent_of_daly(mtbf_s: float) -> None:
    faults = simulate.Faults(restart_s=120.0)
    interval = simulate.young_interval_s(faults.checkpoint_s, mtbf_s)
    events = simulate.simulated_goodput(interval, faults, mtbf_s, random.Random(1), 200000)
    assert events == pytest.approx(simulate.daly_goodput(interval, faults, mtbf_s), rel=0.01)


def test_young_is_close_to_the_best_interval() -> None:
    faults, mtbf_s = simulate.Faults(), 1e5
    young = simulate.young_interval_s(faults.checkpoint_s, mtbf_s)
    best = max(simulate.daly_goodput(young * factor / 50, faults, mtbf_s) for factor in range(10, 200))
    assert simulate.daly_goodput(young, faults, mtbf_s) == pytest.approx(best, rel=1e-3)


def test_the_slowest_of_many_is_drawn_at_once() -> None:
    draw = random.Random(3)
    slowest = sum(max(draw.gauss(1, 0.02) for _ in range(64)) for _ in range(4000)) / 4000
    assert simulate.straggling(0.02, 64, random.Random(1)) == pytest.approx(slowest, rel=0.005)
    assert simulate.straggling(0.0, 65536, random.Random(1)) == 1.0


def test_communication_is_the_plans_where_it_was_planned(tmp_path: Path) -> None:
    """Bandwidth alone: bytes that 8 divides, and no latency."""
    small, large = plan_of(tmp_path, 8), plan_of(tmp_path, 64)
    free = small._replace(machine=small.machine._replace(node_latency_ns=0, network_latency_ns=0))
    link = small.machine.node_bytes_per_second
    assert simulate.communication_ns(free, 8) == pytest.approx((small.node_bytes + small.network_bytes) / link * 1e9)
    assert simulate.communication_ns(free, 64) == pytest.approx(
        large.network_bytes / small.machine.network_bytes_per_second * 1e9)


@pytest.mark.parametrize("options, reason", [
    (dict(replicas=8), "replicas = 8"), (dict(offload=True), "offload"), (dict(heap=False), "heap = False")])
def test_plans_that_do_not_say_how_they_scale_are_refused(tmp_path: Path, options: Any, reason: str) -> None:
    plan = plan_of(tmp_path, 64)
    other = planner.run(plan.model, plan.machine, planner.Options(ranks=64, **options))
    with pytest.raises(ValueError, match=reason):
        simulate.simulate(other, 64, simulate.Faults())
    assert page.figures(other)["scale"] == [] and page.figures(plan)["scale"]


def test_the_command(tmp_path: Path) -> None:
    plan_of(tmp_path, 1)

    def sim(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, "-m", "libdc", "sim", str(tmp_path / "model.json"), *arguments],
                              text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=600)

    rows = json.loads(sim("--json").stdout)
    assert [row["ranks"] for row in rows] == [8, 64, 512, 4096, 65536]
    efficiency = [row["efficiency"] for row in rows]
    assert efficiency == sorted(efficiency, reverse=True) and 0 < efficiency[-1] < efficiency[0] <= 1
    by_ranks = {row["ranks"]: row for row in rows}
    for numbers in ("8", "1,4096", "65536,8"):  # a row depends on no other
        assert all(row["ranks"] == 1 or row == by_ranks[row["ranks"]]
                   for row in json.loads(sim("--json", "--ranks", numbers).stdout))
    assert by_ranks[8]["step_ns"] == pytest.approx(plan_of(tmp_path, 8).step_ns, rel=0.01)
    assert sim().stdout.splitlines()[-1].split()[0] == "65536" and sim().stdout == sim().stdout
    assert json.loads(sim("--json", "--mtbf-hours", "0.001", "--restart-s", "1e9").stdout)[0]["goodput"] == 0
    for arguments, text in ((["--ranks", "8,x"], "ranks = 8,x"), (["--mtbf-hours", "0"], "mtbf_hours = 0.0, must be"),
                            (["--restart-s", "inf"], "restart_s = inf, must be 0 to 1e+09"),
                            (["--deviation", "nan"], "deviation = nan, must be 0 to 1"),
                            (["--tokens", "8"], "tokens = 8, must not be given for layers")):
        done = sim(*arguments)
        assert done.returncode == 2 and text in done.stderr
