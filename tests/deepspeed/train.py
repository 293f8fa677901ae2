"""Trains a model with DeepSpeed on every rank, eager or by DeepCompile on libdc, and writes what happened as JSON.

    python -m libdc.run -n 2 tests/deepspeed/train.py --stage 3 --backend inductor --out result.json"""

from __future__ import annotations

import argparse
import collections
import json
import os
import time
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist

import deepspeed
import machine
import seed
from launch import SEED, leave
from models import Model, batch

STEADY = 8  # from this step on nothing is compiled any more


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--backend", choices=("none", "eager", "inductor"), default="none", help="none: ZeRO, eager")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--model", choices=("gpt", "bert"), default="gpt")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--gelu", choices=("none", "tanh"), default="none", help="as torch.nn.functional.gelu has it")
    parser.add_argument("--kernel", action="store_true", help="DeepSpeedTransformerLayer, with BERT")
    parser.add_argument("--broken", action="store_true", help="a graph break in the model")
    parser.add_argument("--turns", help="FILE:PLACE:PLACES, to be measured beside others")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def settings(args: argparse.Namespace) -> Dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 1000000,
                              "stage3_param_persistence_threshold": 0},
        "compile": {"deepcompile": args.backend != "none"},
        "wall_clock_breakdown": False,
    }


def count_operators(counts: List[Dict[str, int]]) -> None:
    """Lets each graph that the passes have worked on leave a table of its dc operators."""
    import deepspeed.compile.backend as backend

    run_opt_passes = backend.run_opt_passes

    def run(*args: Any, **kwargs: Any) -> None:
        run_opt_passes(*args, **kwargs)
        found = collections.Counter(node.target.__name__.split(".")[0] for node in kwargs["gm"].graph.nodes
                                    if str(node.target).startswith("dc."))
        counts.append({"bwd": int(kwargs["bwd"]), **found})

    backend.run_opt_passes = run


def count_persistent(ids: List[int]) -> None:
    """Notes which parameters are kept gathered."""
    from libdc.torch.deepspeed import handle

    set_persistent = handle.set_persistent

    def keep(ds_id: int) -> None:
        ids.append(ds_id)
        set_persistent(ds_id)

    handle.set_persistent = keep


class Turns:
    """Trainings that are measured side by side, so that a busy moment of the machine meets all of them. Each runs a few
    steps when its turn comes round, and sleeps in between. The turns are counted by a file's length."""

    STEPS = STEADY  # of a turn: the first is all that compiles

    def __init__(self, path: str, place: str, places: str) -> None:
        self.path, self.place, self.places = path, int(place), int(places)

    def begin(self) -> None:
        while os.path.getsize(self.path) % self.places != self.place:
            time.sleep(0.01)

    def end(self) -> None:
        dist.barrier()  # no rank is still busy
        if dist.get_rank() == 0:
            with open(self.path, "a", encoding="ascii") as file:
                file.write(".")
        dist.barrier()


def train(engine: Any, args: argparse.Namespace, turns: Optional[Turns]) -> Dict[str, Any]:
    """This rank's losses, seconds, gathers up to the end of each step, and peaks of memory."""
    losses, seconds, gathers, peak = [], [], [], 0
    if args.backend != "none":
        from libdc.torch import ops
    for step in range(args.steps):
        if turns and step % Turns.STEPS == 0:
            turns.begin()
        if step == STEADY:
            peak = machine.memory_kib("VmHWM")
            machine.reset_peak()
        begin = time.perf_counter()
        for micro in range(step * args.accumulate, (step + 1) * args.accumulate):
            loss = engine(*batch(args.model, micro, dist.get_rank(), args.batch))
            engine.backward(loss)
            with torch.no_grad():  # DeepSpeed 0.18 gathers into views that PyTorch 2.13 otherwise protects
                engine.step()
            losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
        if args.backend != "none":
            gathers.append(ops.context().get_memory_stats().gathers)
        if turns and (step + 1) % Turns.STEPS == 0:
            turns.end()
    return {"losses": losses, "seconds": seconds, "gathers": gathers, "compile_peak_kib": peak,
            "steady_peak_kib": machine.memory_kib("VmHWM")}


def main() -> None:
    args = arguments()
    turns = Turns(*args.turns.split(":")) if args.turns else None
    persistent: List[int] = []
    counts: List[Dict[str, int]] = []
    if args.backend != "none":
        import libdc.torch.deepspeed

        libdc.torch.deepspeed.enable(args.communicator)
        count_operators(counts)
        count_persistent(persistent)
        if deepspeed.__version__ == SEED and args.stage == 3:
            seed.allow_stage_3()
    # DeepSpeed's own shared-memory collectives, which nothing here calls, would be compiled first, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    before = machine.memory_kib("VmRSS")
    torch.manual_seed(3)
    model = Model(args.model, args.width, args.layers, broken=args.broken, gelu=args.gelu, kernel=args.kernel)
    parameters = sum(p.numel() for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings(args))
    if args.backend != "none":
        engine.compile(backend=args.backend)
    mine = {**train(engine, args, turns), "before_kib": before, "persistent": len(persistent),
            "cpu": sum(os.times()[:4])}
    everyone: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(args), "deepspeed": deepspeed.__version__, "torch": torch.__version__,
                       "parameters": parameters, "graphs": counts, "ranks": everyone}, file, indent=1)
    if turns:  # no process ends in another's last turn
        turns.begin()
        turns.end()
    engine.destroy()
    leave()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
