"""Errors name a model's parameters as the model does."""

from __future__ import annotations

import pytest
import torch

import libdc
import libdc.torch as dct


@pytest.mark.parametrize("stage", [0, 3])
def test_errors_have_the_models_names(stage: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    dct.shard(model, stage=stage)
    root = model.__dict__["_dc"].root
    with pytest.raises(libdc.Error, match=r"parameter 2 \(1\.weight\) is in 1 graph"):
        root.group.context.unregister_param(2)
