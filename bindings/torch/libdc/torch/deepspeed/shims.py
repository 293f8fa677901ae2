"""What DeepSpeed's Python takes for granted on CUDA and a CPU has not. Nothing else of DeepSpeed is changed; each shim is
listed in docs/deepspeed.md."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Iterator

import torch

# Bytes that the communication profile gathers at most: 2 for each of 2^23 bfloat16 elements.
_PROFILE_MAX_LOG2 = 24


def apply() -> None:
    """Applies all of them, once."""
    _replace_accelerator()
    _profile_without_python_dispatcher()
    _limit_communication_profile()


# The accelerator


class _Event:
    """A CUDA event's clock, where work is done when its call returns."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        return (end.time - self.time) * 1000.0

    def synchronize(self) -> None:
        """Nothing is under way."""

    wait = synchronize

    def query(self) -> bool:
        return True


class _Random:
    """torch.random, whose fork_rng() takes its devices for CUDA's unless told otherwise."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.random, name)

    @staticmethod
    @contextlib.contextmanager
    def fork_rng(devices: Any = None, enabled: bool = True) -> Iterator[None]:
        with torch.random.fork_rng(devices=[], enabled=enabled):
            yield


def _replace_accelerator() -> None:
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Accelerator(CPU_Accelerator):  # type: ignore[misc]
        """DeepSpeed's own for CPUs, with the three answers that its compile package cannot do without."""

        def current_device(self) -> str:
            return "cpu"  # DeepSpeed's is the local rank, as a string, which torch.device() refuses

        @property
        def Event(self) -> Any:
            return _Event

        def random(self) -> Any:
            return _Random()

    if type(get_accelerator()) is CPU_Accelerator:
        set_accelerator(Accelerator())


# Profiling


def _profile_without_python_dispatcher() -> None:
    """While AOTAutograd compiles, the Python dispatcher is on and holds the GIL around c10d's operators, for which Gloo's
    threads wait in turn: a deadlock. DeepSpeed's passes communicate while they profile."""
    import deepspeed.compile.backend as backend

    run_opt_passes = backend.run_opt_passes

    def run_passes(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisablePythonDispatcher():
            return run_opt_passes(*args, **kwargs)

    backend.run_opt_passes = run_passes


def _limit_communication_profile() -> None:
    """DeepSpeed times gathers of up to 2 GB, 15 times each, which takes minutes and 6 GB a rank by Gloo. Times of larger
    ones are extrapolated."""
    import deepspeed.compile.profilers.comm_profile as profile

    run_all_gather = profile.run_all_gather

    def run(device: Any, dtype: Any, maxsize: int, *args: Any, **kwargs: Any) -> Any:
        return run_all_gather(device, dtype, min(maxsize, _PROFILE_MAX_LOG2), *args, **kwargs)

    profile.run_all_gather = run
