"""Trains a model with DeepSpeed on every rank, eager or by DeepCompile on libdc, and writes what happened as JSON.

    python -m libdc.run -n 2 tests/deepspeed/train.py --stage 3 --backend inductor --out result.json"""

from __future__ import annotations

import argparse
import collections
import json
import os
import time
from typing import Any, Dict, List

import torch
import torch.distributed as dist

import deepspeed
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
    parser.add_argument("--broken", action="store_true", help="a graph break in the model")
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


def peak_memory() -> int:
    """The process's, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def main() -> None:
    args = arguments()
    persistent: List[int] = []
    gathers: List[int] = []  # up to the end of each step
    counts: List[Dict[str, int]] = []
    if args.backend != "none":
        import libdc.torch.deepspeed

        libdc.torch.deepspeed.enable(args.communicator)
        count_operators(counts)
        count_persistent(persistent)
    # DeepSpeed's own shared-memory collectives, which nothing here calls, would be compiled first, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = Model(args.model, args.width, args.layers, broken=args.broken)
    parameters = sum(p.numel() for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings(args))
    if args.backend != "none":
        engine.compile(backend=args.backend)
    losses, seconds, peak = [], [], 0
    context = None
    if args.backend != "none":
        from libdc.torch import ops

        context = ops.context()
    for step in range(args.steps):
        if step == STEADY:
            peak = peak_memory()
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")  # the peak starts anew
        begin = time.perf_counter()
        for micro in range(args.accumulate):
            loss = engine(*batch(args.model, step * args.accumulate + micro, rank, args.batch))
            engine.backward(loss)
            with torch.no_grad():  # DeepSpeed 0.18 gathers into views that PyTorch 2.13 otherwise protects
                engine.step()
            losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
        if context is not None:
            gathers.append(context.get_memory_stats().gathers)
    mine = {"losses": losses, "seconds": seconds, "gathers": gathers, "persistent": len(persistent),
            "steady_peak": peak_memory(), "peak": max(peak, peak_memory())}
    everyone: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(args), "deepspeed": deepspeed.__version__, "torch": torch.__version__,
                       "parameters": parameters, "graphs": counts, "ranks": everyone}, file, indent=1)
    engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
