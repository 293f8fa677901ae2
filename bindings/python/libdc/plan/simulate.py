"""The command libdc sim: a plan's step on 8 to 65,536 ranks, with slow ranks, failures and checkpoints.

Ranks are alike and wait for each other in each step, so a step takes the time of its slowest rank. One draw gives that
time: the largest of N draws has the distribution function of one draw to the power N. Failures and checkpoints are
simulated events. All of it is a model; docs/planner.md lists the assumptions."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import sys
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .checks import real, run_command
from .machine import load, names
from .model import read
from .options import Options
from .step import Plan, run

PLANNED_RANKS = 256  # the most that are planned; more are scaled from there
_STEPS = 400  # the number drawn for a mean
_NORMAL = statistics.NormalDist()


class Faults(NamedTuple):
    """How ranks fail and straggle."""

    mtbf_hours: float = 50000.0  # of one rank
    checkpoint_s: float = 30.0
    restart_s: float = 600.0
    deviation: float = 0.01  # standard deviation of a rank's time for a step, over its mean


_FAULT_HELP = {"mtbf_hours": "from one failure of a rank to its next, in the mean",
               "checkpoint_s": "a checkpoint takes", "restart_s": "a restart takes",
               "deviation": "of a rank's time for a step, over its mean"}


class Scale(NamedTuple):
    """Training on a number of ranks."""

    ranks: int
    step_ns: float  # without stragglers or failures
    straggling: float  # a step's mean time over step_ns
    interval_s: float  # between checkpoints
    goodput: float  # share of the time in steps that are not lost
    efficiency: float  # tokens a second and rank, over those of a rank that never waits


def unscalable(plan: Plan) -> str:
    """Why this plan does not tell the time of other numbers of ranks; empty if it does."""
    options, machine = plan.options, plan.machine
    if options.replicas > 1:
        return f"replicas = {options.replicas}: ranks gather from their group alone"
    if options.offload:
        return "offload: a step waits for the host's link too"
    if not options.heap and 1 < machine.ranks_per_node < options.ranks:
        return "heap = False: collectives go in two levels"
    return ""


def communication_ns(plan: Plan, ranks: int) -> float:
    """A step's communication time on another number of ranks: the plan's whole tensors, on both levels of links at the
    same time. A collective over several nodes takes the latency once for each doubling of nodes."""
    machine, planned = plan.machine, plan.options.ranks
    if ranks == 1 or planned == 1:
        return 0.0
    whole = (plan.gather_wire_bytes + plan.reduce_wire_bytes) * planned / (planned - 1)
    local = min(machine.ranks_per_node or ranks, ranks)
    nodes = math.ceil(ranks / local)
    calls = 3 * len(plan.model.layers) * plan.options.accumulate
    node = whole * (local - 1) / ranks / machine.node_bytes_per_second * 1e9 + calls * machine.node_latency_ns
    network = whole * (ranks - local) / ranks / machine.network_bytes_per_second * 1e9
    network += calls * machine.network_latency_ns * math.log2(nodes)
    return max(node, network)


def step_ns(plan: Plan, ranks: int) -> float:
    """A step's time. Exposed communication grows in proportion to all communication. The part of it that exceeds the
    computation is exposed too."""
    now = communication_ns(plan, ranks)
    share = plan.exposed_ns / plan.communication_ns if plan.communication_ns else 0.0
    return plan.compute_ns + max(share * now, now - plan.compute_ns)


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """The best time between checkpoints (Young 1974): sqrt(2 C M)."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_goodput(interval_s: float, faults: Faults, mtbf_s: float) -> float:
    """Daly 2006: work takes M e^(R/M) (e^((t + C)/M) - 1) / t times as long, if failures may come at any time."""
    exponent, restarts = (interval_s + faults.checkpoint_s) / mtbf_s, faults.restart_s / mtbf_s
    if exponent + restarts > 500:  # a double would overflow
        return 0.0
    return interval_s / (mtbf_s * math.exp(restarts) * math.expm1(exponent))


def simulated_goodput(interval_s: float, faults: Faults, mtbf_s: float, draw: random.Random, segments: int) -> float:
    """The goodput from simulated failures. A failure loses the work after the last checkpoint; a restart may fail
    too."""
    time = 0.0
    for _ in range(segments):
        needed = interval_s + faults.checkpoint_s
        failure = draw.expovariate(1 / mtbf_s)
        while failure < needed:
            time += failure
            needed = faults.restart_s + interval_s + faults.checkpoint_s
            failure = draw.expovariate(1 / mtbf_s)
        time += needed
    return segments * interval_s / time


def straggling(deviation: float, ranks: int, draw: random.Random) -> float:
    """The mean, over steps, of the slowest rank's time over the mean rank's."""
    slowest = [_NORMAL.inv_cdf(min(draw.random() ** (1 / ranks), 1 - 1e-16)) for _ in range(_STEPS)]
    return max(1.0, 1 + deviation * statistics.fmean(slowest))


def simulate(plan: Plan, ranks: int, faults: Faults, seed: int = 1) -> Scale:
    reason = unscalable(plan)
    if reason:
        raise ValueError(f"simulate: the plan has {reason}, so how it scales is not known")
    draw = random.Random(seed)
    step = step_ns(plan, ranks)
    slow = straggling(faults.deviation, ranks, draw)
    mtbf_s = faults.mtbf_hours * 3600 / ranks
    interval = young_interval_s(faults.checkpoint_s, mtbf_s)
    goodput = 0.0  # nearly all steps are lost, and there would be too many events
    if daly_goodput(interval, faults, mtbf_s) > 0.01:
        goodput = simulated_goodput(interval, faults, mtbf_s, draw, 20000)
    if step <= 0:
        raise ValueError(f"{plan.model.name}: a step takes no time, since it has no work: how it scales is not known")
    return Scale(ranks, step, slow, interval, goodput, plan.compute_ns / (step * slow) * goodput)


def breaks_first(scale: Scale, plan: Plan) -> str:
    """The name of the largest loss."""
    losses = {"communication": 1 - plan.compute_ns / scale.step_ns, "stragglers": 1 - 1 / scale.straggling,
              "failures": 1 - scale.goodput}
    return max(losses, key=lambda name: losses[name])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="libdc sim", description="How a step scales, by a model: see docs/planner.md")
    add = parser.add_argument
    add("model", help="a JSON of layers, or Hugging Face's config.json")
    add("--machine", default="h100", help=f"a file, or one of {', '.join(names())}")
    add("--ranks", default="8,64,512,4096,65536", help="numbers of ranks, 1 to 65536")
    add("--stage", type=int, default=3, choices=range(4))
    add("--tokens", type=int, help="of a sample, for a config.json: 1024, or its positions, if not given")
    add("--micro-batch", type=int, default=1, help="samples")
    add("--accumulate", type=int, default=1, help="micro-batches of a step")
    add("--recompute", action="store_true", help="keep the layers' inputs alone")
    for name, value in Faults()._asdict().items():
        add(f"--{name.replace('_', '-')}", type=float, default=value, help=f"{_FAULT_HELP[name]} (%(default)s)")
    add("--seed", type=int, default=1, help="of the failures that are drawn")
    add("--json", action="store_true")
    return parser


def _faults(arguments: argparse.Namespace) -> Faults:
    bounds = {"mtbf_hours": (1e-3, 1e12), "checkpoint_s": (1e-3, 1e9), "restart_s": (0.0, 1e9), "deviation": (0.0, 1.0)}
    return Faults(*(real(name, getattr(arguments, name), *bounds[name]) for name in Faults._fields))


def _scales(arguments: argparse.Namespace) -> List[Tuple[Plan, Scale]]:
    """The scaling at each number of ranks, with the plan behind it: one for that number, or one for the most ranks that
    are planned."""
    try:
        numbers = [int(text) for text in arguments.ranks.split(",")]
    except ValueError:
        numbers = [0]
    if not all(1 <= number <= 65536 for number in numbers):
        raise ValueError(f"ranks = {arguments.ranks}, must be numbers from 1 to 65536 with commas between")
    faults = _faults(arguments)
    options = Options(1, arguments.stage, arguments.micro_batch, arguments.accumulate, recompute=arguments.recompute)
    model, machine = read(arguments.model, arguments.tokens, options.element), load(arguments.machine)
    plans = {planned: run(model, machine, dataclasses.replace(options, ranks=planned))
             for planned in {min(number, PLANNED_RANKS) for number in numbers}}
    pairs = [(plans[min(number, PLANNED_RANKS)], number) for number in numbers]
    return [(plan, simulate(plan, number, faults, arguments.seed)) for plan, number in pairs]


def _command(arguments: argparse.Namespace) -> int:
    rows: List[Dict[str, Any]] = [{**scale._asdict(), "breaks_first": breaks_first(scale, plan)}
                                  for plan, scale in _scales(arguments)]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    print(f"{'ranks':>6}{'step ms':>12}{'slowest':>10}{'checkpoint every s':>20}{'goodput':>10}{'efficiency':>12}"
          "  lost most to")
    for row in rows:
        print(f"{row['ranks']:>6}{row['step_ns'] / 1e6:>12.2f}{row['straggling']:>10.4f}{row['interval_s']:>20.0f}"
              f"{row['goodput']:>10.4f}{row['efficiency']:>12.4f}  {row['breaks_first']}")
    return 0


def main(argv: Optional[List[str]] = None) -> int:
    arguments = _parser().parse_args(argv)
    return run_command("libdc sim", lambda: _command(arguments))


if __name__ == "__main__":
    sys.exit(main())
