"""Changes of PyTorch: none at import, and those that shard() needs at its first call."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_import_changes_nothing() -> None:
    run("""
import torch
from torch.nn.utils import clip_grad
before = torch.optim.Optimizer.add_param_group, torch.amp.GradScaler.unscale_, clip_grad.clip_grad_norm_
import libdc.torch as dct, libdc.optim
libdc.optim.AdamW
assert before == (torch.optim.Optimizer.add_param_group, torch.amp.GradScaler.unscale_, clip_grad.clip_grad_norm_)
dct.shard(torch.nn.Linear(2, 2))
once = torch.optim.Optimizer.add_param_group, torch.amp.GradScaler.unscale_
assert once[0] is not before[0] and once[1] is not before[1]
dct.shard(torch.nn.Linear(2, 2))
assert once == (torch.optim.Optimizer.add_param_group, torch.amp.GradScaler.unscale_)
""")


def test_a_training_step_does_not_import_compilers() -> None:
    """They take longer to import than all of libdc."""
    run("""
import sys, torch, libdc.torch as dct
model = dct.shard(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
assert not {"torch._dynamo", "torch._functorch.compile_utils", "sympy"} & sys.modules.keys()
""")


def test_the_backend_is_known_before_shard() -> None:
    run("""
import torch
model = torch.compile(torch.nn.Linear(2, 2), backend="libdc")
assert model(torch.ones(1, 2)).shape == (1, 2)
""")


def test_the_optimizers_module_imports_pytorch_when_one_is_used() -> None:
    run("""
import sys, libdc.optim, libdc.optim.arrays
assert "torch" not in sys.modules
assert issubclass(libdc.optim.AdamW, sys.modules["torch"].optim.Optimizer)
""")


def test_parts_are_not_broadcast() -> None:
    """All ranks would get rank 0's."""
    run("""
import torch, torch.distributed as dist, libdc.torch as dct
from torch.distributed.utils import _sync_module_states
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for stage in (0, 1, 3):
    model = dct.shard(torch.nn.Linear(2, 2), stage)
    try:
        _sync_module_states(model, dist.group.WORLD, 1 << 20, 0, set())
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    assert ("_broadcast_coalesced: this is part 0 of 1 of weight" in refused) == (stage > 0), (stage, refused)
dist.destroy_process_group()
""")
