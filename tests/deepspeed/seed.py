"""Stage 3 of DeepSpeed 0.18.9 on a PyTorch that it refuses. From 2.9 on Dynamo checks its guards of a parameter's size
as soon as it has made them, and a partitioned parameter's does not hold. 0.19 has the remedy, a module of its own: here
it stands for 0.18.9's of the same name, so that all of that version's passes meet libdc. Nothing of this is in
libdc."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch._dynamo.config

from launch import BUILD, NEWEST


def allow_stage_3() -> None:
    import deepspeed.compile.init_z3 as init_z3
    import deepspeed.runtime.engine as engine

    required = engine.required_torch_version

    def required_torch_version(**bounds: Any) -> bool:
        return bounds != {"min_version": 2.9} and bool(required(**bounds))

    engine.required_torch_version = required_torch_version
    init_z3.patch_fake_tensor = _newest("patch_fake_tensor").patch_fake_tensor
    torch._dynamo.config.force_parameter_static_shapes = False
    torch._dynamo.config.force_nn_module_property_static_shapes = False


def _newest(name: str) -> Any:
    """A module of the newest version's compile package."""
    spec = importlib.util.spec_from_file_location(name, BUILD / NEWEST / "deepspeed" / "compile" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
