"""One rank of one implementation that trains the GPT of examples/gpt. Reads commands from standard input, a line
each, and answers with a line of JSON: `steps N` trains N steps, `end` leaves. Between commands it sleeps, so that
several implementations can take turns on one machine."""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from typing import Any, Callable, Dict, List, Optional

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "..", "examples", "gpt"), os.path.dirname(HERE)]

import torch  # noqa: E402

import machine  # noqa: E402
from data import Text  # noqa: E402
from model import CONFIGS, GPT  # noqa: E402

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


class Torch:
    """A step of whatever looks like a plain PyTorch model."""

    def __init__(self, model: torch.nn.Module, call: Optional[Callable[..., torch.Tensor]] = None) -> None:
        self.call = model if call is None else call
        self.optimizer = adamw(model.parameters())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.call(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def wire_bytes(self) -> Optional[int]:
        return None


class Libdc(Torch):
    def __init__(self, model: torch.nn.Module, stage: int, backend: str) -> None:
        import libdc.torch as dct
        self.model, self.stats = model, dct.stats
        dct.shard(model, stage=stage)
        super().__init__(model, torch.compile(model, backend=backend) if backend else None)

    def wire_bytes(self) -> Optional[int]:
        s = self.stats(self.model)
        return s.gather_wire_bytes + s.reduce_wire_bytes


class DeepSpeed:
    def __init__(self, model: torch.nn.Module, stage: int, batch: int) -> None:
        import deepspeed
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        config = {"train_micro_batch_size_per_gpu": batch // RANKS, "gradient_accumulation_steps": 1,
                  "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
                  "steps_per_print": 10**9, "gradient_clipping": 0.0}  # its default is to clip at 1
        self.engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=adamw(model.parameters()))

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.engine(x, y)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def wire_bytes(self) -> Optional[int]:
        return None


def build(name: str, model: GPT, batch: int) -> Any:
    base, _, backend = name.partition("+")
    if base == "local":
        return Torch(model)
    if base.startswith("libdc"):
        return Libdc(model, int(base[5:]), backend)
    if base.startswith("zero"):
        return DeepSpeed(model, int(base[4:]), batch)
    peer, _, transport = base.partition("-")
    if transport:
        import libdc.torch  # noqa: F401  registers the backend libdc
    import torch.distributed as dist
    if transport == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    else:
        dist.init_process_group(transport or "gloo")
    if peer == "ddp":
        return Torch(torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True))  # spares a copy
    if peer == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (RANKS,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return Torch(model)
    raise SystemExit(f"worker.py: unknown implementation {name}")


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("name")
    p.add_argument("--model", choices=CONFIGS, default="small")
    p.add_argument("--batch", type=int, default=4)
    a = p.parse_args()
    # Libraries print; the answers must stay lines of JSON.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    config = CONFIGS[a.model]
    text = Text.load(config.seq, 0)
    if a.name.startswith("zero"):
        import deepspeed  # noqa: F401  its own import is not the model's memory
    if a.name.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    if "libdc" in a.name:
        import libdc.torch  # noqa: F401
    start = machine.memory_kib("VmRSS")
    torch.manual_seed(1234)
    run = build(a.name, GPT(config), a.batch)
    step = 0

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")

    def train(count: int) -> Dict[str, Any]:
        nonlocal step
        seconds: List[float] = []
        losses: List[float] = []
        wire, cpu = run.wire_bytes(), time.process_time()
        for _ in range(count):
            x, y = text.batch(step, a.batch, RANK, RANKS)
            begin = time.perf_counter()
            loss = run.step(x, y)
            seconds.append(time.perf_counter() - begin)
            losses.append(loss.item())
            step += 1
        moved = None if wire is None else (run.wire_bytes() - wire) / count
        return {"seconds": seconds, "losses": losses, "wire_bytes": moved, "cpu": time.process_time() - cpu,
                "peak_kib": machine.memory_kib("VmHWM") - start}

    answer(ready=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "steps":
            answer(**train(int(words[1])))
        elif words[0] == "reset_peak":
            machine.reset_peak()
            answer()
        elif words[0] == "end":
            break
    answer(bye=True)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a peer that waits in a collective must not keep this process
