"""libdc's devices and streams for PyTorch's. Each CUDA device is opened once, and streams wrap PyTorch's."""

from __future__ import annotations

import threading
import weakref
from typing import Optional

import libdc
import torch

CPU = torch.device("cpu")

_lock = threading.Lock()
_opened: "weakref.WeakValueDictionary[int, libdc.Device]" = weakref.WeakValueDictionary()


def numbered(where: torch.device) -> torch.device:
    """The device with its index, if it is a CUDA device."""
    if where.type == "cuda" and where.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return where


def open_device(call: str, where: torch.device) -> Optional[libdc.Device]:
    """libdc's device for tensors on a PyTorch device; None for the CPU, which is a context's default."""
    where = numbered(where)
    if where.type == "cpu":
        return None
    if where.type != "cuda":
        raise ValueError(f"{call}: {where} is a device that libdc does not have, must be the cpu or a cuda device")
    with _lock:
        device = _opened.get(where.index)
        if device is None:
            try:
                device = libdc.Device(f"cuda:{where.index}")
            except libdc.Error as error:
                raise RuntimeError(f"{call}: tensors on {where} need libdc's CUDA device: {error}") from error
            _opened[where.index] = device
    return device


def device_of(context: Optional[libdc.Context]) -> torch.device:
    """The device of a context's tensors; the CPU if there is no context."""
    if context is None or context.device.place == libdc.tensors.HOST:
        return CPU
    return torch.device("cuda", context.device.place[1])


def current_stream(where: torch.device) -> Optional[libdc.Stream]:
    """PyTorch's current stream on a device, for collectives on its tensors; None (the calling thread) for the CPU."""
    device = open_device("libdc.torch", where)
    if device is None:
        return None
    return libdc.Stream(device, torch.cuda.current_stream(where).cuda_stream)


def captures(where: torch.device) -> bool:
    """Whether PyTorch's current stream on the device is being captured into a CUDA graph."""
    return where.type == "cuda" and torch.cuda.is_current_stream_capturing()


def synchronize(where: torch.device) -> None:
    """Waits for PyTorch's current stream on the device, before a call that works on another stream or on none."""
    if where.type == "cuda":
        torch.cuda.current_stream(where).synchronize()


def check_thread_ranks(call: str, where: torch.device) -> None:
    """Ranks that are threads wait for each other in collectives. So they must not share a stream, where one rank's work
    could be queued behind another's wait. Nor may they share autograd's single thread for a card, where one rank's
    backward would queue behind the other's."""
    if where.type != "cuda":
        return
    if torch.cuda.current_stream(where) == torch.cuda.default_stream(where):
        raise ValueError(f"{call}: ranks that are threads share CUDA's default stream, and would wait for each other; "
                         "run each in a `with torch.cuda.stream(torch.cuda.Stream()):` of its own")
    if torch._C._is_multithreading_enabled():
        raise ValueError(f"{call}: ranks that are threads share autograd's thread of {where}, and would wait for each "
                         "other; run each in a `with torch.autograd.set_multithreading_enabled(False):`")
