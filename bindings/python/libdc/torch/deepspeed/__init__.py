"""DeepSpeed's DeepCompile on libdc's operators: its Python code runs unchanged, with libdc in place of its C++ and CUDA
code.

    import libdc.torch.deepspeed
    libdc.torch.deepspeed.enable()      # before engine.compile()

`python -m libdc.torch.deepspeed train.py` enables it for a program without these lines.

See docs/deepspeed.md."""

from __future__ import annotations

import re
from typing import Tuple

from .. import ops
from . import handle, shims, transformer

TESTED = "0.18.9", "0.19.8"  # the oldest and newest supported versions of DeepSpeed
COMMUNICATORS = "auto", "libdc", "torch"

_enabled = False


def enable(communicator: str = "auto") -> None:
    """Makes DeepSpeed's op builder for `dc` return libdc's module, and replaces DeepSpeedTransformerLayer by libdc's.
    Call it on every rank before engine.compile().

    communicator  "libdc": libdc's own, for ranks of one machine; "torch": the collectives of DeepSpeed's process group;
                  "auto": "libdc" if all ranks share a machine, else "torch"

    A second call only changes the communicator of engines that are compiled later. RuntimeError: DeepSpeed is not
    installed, or its version is outside the tested range, or its own dc library is loaded already."""
    global _enabled
    if communicator not in COMMUNICATORS:
        raise ValueError(f"libdc.torch.deepspeed.enable: communicator = {communicator!r}, must be one of "
                         f"{', '.join(map(repr, COMMUNICATORS))}")
    if not _enabled:
        _install(_check_version())
        _enabled = True
    handle.communicator = communicator


def is_enabled() -> bool:
    """Whether DeepSpeed runs on libdc."""
    return _enabled


def _numbers(version: str) -> Tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def _check_version() -> Tuple[int, ...]:
    """DeepSpeed's version, if it is in the tested range."""
    try:
        import deepspeed
    except ImportError as error:
        raise RuntimeError(f"libdc.torch.deepspeed: DeepSpeed cannot be imported ({error})") from error
    oldest, newest = TESTED
    version = _numbers(deepspeed.__version__)
    if not _numbers(oldest) <= version <= _numbers(newest):
        raise RuntimeError(f"libdc.torch.deepspeed: DeepSpeed is version {deepspeed.__version__}; {oldest} to {newest} "
                           "are tested, and the parts that libdc replaces change from version to version")
    return version


def _install(version: Tuple[int, ...]) -> None:
    import deepspeed.compile.util as util
    from deepspeed.ops.op_builder.builder import OpBuilder

    if OpBuilder._loaded_ops.get("dc") is not None or util.dc_handle is not None:
        raise RuntimeError("libdc.torch.deepspeed: DeepSpeed's own dc library is loaded already; call enable() before "
                           "the first engine.compile()")
    ops.load()
    if _has_current_signatures():
        handle.define_current_overloads()
    else:
        handle.define_legacy_overloads()
        shims.apply_to_legacy()
    shims.apply(version)
    transformer.replace()
    OpBuilder._loaded_ops["dc"] = handle


def _has_current_signatures() -> bool:
    """Whether DeepSpeed uses the operators' current signatures. They came with the function add_end_backward."""
    import deepspeed.compile.fx as fx

    return hasattr(fx, "add_end_backward")
