"""The operators through PyTorch's dispatcher, beside an operator that does nothing and is registered the same way.

    python bench/bench_ops.py [--json]

Calls that start no communication. "graph" is how compiled graphs call them (below autograd), "eager" how a program
does. Median microseconds of a call; the rows take turns. Needs a C compiler for the empty operator."""
from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import tempfile
import time
from typing import Any, Callable, Dict, List

import torch

import machine
from libdc.torch import dc, ops

HERE = os.path.dirname(os.path.abspath(__file__))
ADAPTER = os.path.join(HERE, "..", "bindings", "torch", "adapter")
CALLS, ROUNDS = 2000, 31
GRAPH, KEPT, FROZEN = 3, 7, 8


def empty_operator() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "empty_op.so")
        subprocess.run([os.environ.get("CC", "cc"), "-O2", "-fPIC", "-shared", "-fexceptions", "-I", ADAPTER, "-I",
                        os.path.join(HERE, "..", "include"), os.path.join(HERE, "empty_op.c"),
                        os.path.join(ADAPTER, "shim.c"), "-o", library, "-ldl"], check=True)
        register = ctypes.CDLL(library).register_empty
    register.restype = ctypes.c_char_p
    error = register()
    if error:
        raise SystemExit(error.decode())
    return torch.ops.dc_bench.empty.default


def rows() -> Dict[str, Callable[[], Any]]:
    config = {"symmetric_memory": 0, "double_buffer": 1, "free_activation_threshold": 1 << 20, "sync_before_reduce": 0,
              "sync_after_reduce": 0, "sync_before_allgather": 0, "sync_after_allgather": 0}
    dc.init(None, config, 1 << 20)
    shard, token = torch.randn(1024), torch.empty(0)
    dc.register_z3_param(KEPT, [32, 32], shard, None, True)
    dc.register_z3_param(FROZEN, [32, 32], shard, None, False)
    dc.register_graph_z3(GRAPH, [KEPT, FROZEN])
    d, empty, alias = torch.ops.dc, empty_operator(), torch.ops.aten.alias.default
    gather, wait, release = d.allgather_param.default, d.wait_allgather.default, d.release_param.default
    reduce, offload, end = d.reduce_grad.default, d.offload_parameter.default, d.end_backward.default
    take = torch.ops.dc_rt.take.default
    w = wait(gather(token, GRAPH, KEPT), GRAPH, KEPT)
    return {
        "empty operator": lambda: empty(w, GRAPH, KEPT),
        "aten::alias": lambda: alias(w),
        "offload_parameter, nothing to drop": lambda: offload(w, GRAPH, KEPT),
        "allgather_param, gathered already": lambda: gather(token, GRAPH, KEPT),
        "wait_allgather, done already": lambda: wait(w, GRAPH, KEPT),
        "release_param, persistent": lambda: release(w, GRAPH, KEPT, 1),
        "take, persistent": lambda: take(token, GRAPH, KEPT),
        "reduce_grad, frozen": lambda: reduce(w, GRAPH, FROZEN),
        "end_backward, nothing pending": lambda: end(GRAPH),
    }


def microseconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    calls = rows()
    times: Dict[str, Dict[str, List[float]]] = {name: {"graph": [], "eager": []} for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            with torch.inference_mode(), torch._C._AutoDispatchBelowAutograd():
                times[name]["graph"].append(microseconds(call))
            times[name]["eager"].append(microseconds(call))
    medians = {name: {kind: round(statistics.median(values), 3) for kind, values in kinds.items()}
               for name, kinds in times.items()}
    dc.cleanup()
    if arguments.json:
        print(json.dumps({"machine": machine.describe(), "kernels": ops.backend, "microseconds": medians}))
        return
    print(f"{ops.backend} kernels, torch {torch.__version__}\n{'call':36}{'graph':>9}{'eager':>9}  µs")
    for name, kinds in medians.items():
        print(f"{name:36}{kinds['graph']:9.2f}{kinds['eager']:9.2f}")


if __name__ == "__main__":
    main()
