"""Starts ranks: `python -m libdc.run -n 2 [-m] script.py args…` as processes, threads(n, fn) as threads.

Each of several machines has its own launcher, all with the same number of ranks:
`python -m libdc.run --nodes 2 --node-rank 0 --rendezvous HOST:PORT -n 8 script.py`. HOST is the one with node rank 0.
`python -m libdc.run --hosts a,b -n 8 script.py` starts these launchers by ssh.

The first rank that fails ends the others, and its exit code is the launcher's. Ranks end when the launcher does, for
whatever reason, and when their output can no longer be written. A standard stream that was closed from the start is no
error."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Any, Callable, List, Optional, Sequence

from .launcher import Launcher
from .options import read_options
from .processes import StartError

_SSH_SECONDS = 5


def threads(n: int, fn: Callable[..., Any], *args: Any, timeout: Optional[float] = None) -> List[Any]:
    """Runs fn(comm, *args) in n threads, one for each rank, and returns the results in rank order. If one raises, the
    communicator is aborted, so that the others end too, and the first exception is raised."""
    from ..comm import Comm

    comms = Comm.threads(n, timeout=timeout)
    results: List[Any] = [None] * n
    failures: List[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = fn(comms[rank], *args)
        except BaseException as error:
            failures.append(error)
            comms[rank].abort(f"rank {rank} raised {type(error).__name__}: {error}")

    ranks = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(n)]
    try:
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
    except BaseException:  # an interrupt, or a thread failed to start: end the ranks before raising
        comms[0].abort("the caller of threads() was interrupted")
        for thread in ranks:
            if thread.ident is not None:  # the thread was started
                thread.join()
        raise
    if failures:
        raise failures[0]
    return results


def _occupy_standard_streams() -> None:
    """Opens /dev/null for closed standard streams, so that no file opened later gets their numbers."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is fd


def main(argv: Optional[Sequence[str]] = None) -> int:
    options = read_options(argv)
    _occupy_standard_streams()
    patience = _SSH_SECONDS if options.hosts else 0  # the launchers there have the same grace
    launcher = Launcher(options.grace + patience)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: launcher.signals.append(number))
    try:
        if options.hosts:
            launcher.start_hosts(options)
        else:
            launcher.start_ranks(options)
        return launcher.watch()
    except StartError as error:
        launcher.log(str(error))
        launcher.err.flush(options.grace)
        return 1
    finally:
        launcher.end()
        if options.made_secret:
            with contextlib.suppress(FileNotFoundError):  # the job's own clean-up was quicker
                os.unlink(options.secret_file)
