r"""DeepSpeed gathers parameters on two ranks, where a gather does nothing until it is awaited, and memory begins as
NaN: are the weights whole? Without libdc, those of DeepSpeed before 0.19.8 are not.

    PYTHONPATH=build/deepspeed/0.18.9:build/deepspeed/packages DS_ACCELERATOR=cpu \
    .venv/bin/python -m libdc.run -n 2 -m libdc.torch.deepspeed tests/deepspeed/gather.py"""

from __future__ import annotations

import types
from typing import Any

import torch

import deepspeed
import deepspeed.comm as dist
from launch import leave

_gather = dist.all_gather_into_tensor


def gather(output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    if not async_op:
        return _gather(output, tensor, group=group)
    return types.SimpleNamespace(wait=lambda: _gather(output, tensor, group=group))


def main() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.use_deterministic_algorithms(True)  # fills new memory
    dist.all_gather_into_tensor = gather
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    for parameter in model.parameters():
        parameter.ds_tensor.fill_(dist.get_rank())
    with deepspeed.zero.GatheredParameters(model.parameters()):
        for name, parameter in model.named_parameters():
            half, values = (parameter.numel() + 1) // 2, parameter.flatten().tolist()
            assert values == [0.0] * half + [1.0] * (len(values) - half), (name, values)
    leave()


if __name__ == "__main__":
    main()
