"""Starts the ranks of this machine, or a launcher on each of several machines, and ends all when one fails."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import resource
import secrets
import select
import selectors
import signal
import socket
import sys
import time
from typing import Any, List, Optional, Sequence, Tuple

from .processes import Host, Output, Process, Rank, StartError
from .ssh import ssh_command

_EXIT_GRACE_SECONDS = 3.0  # in which other ranks may end by themselves and say why


def _allow_files(ranks: int) -> None:
    """Raises the limit of open files, which ranks inherit. Ranks of several machines have a connection to every other
    rank for each communicator."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8 * ranks + 512 if hard == resource.RLIM_INFINITY else min(8 * ranks + 512, hard)
    if resource.RLIM_INFINITY != soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Launcher:
    """Forwards output line by line, watches the ranks, and ends all of them when one fails or a signal asks for it."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.out, self.err = Output("standard output", sys.stdout), Output("standard error", sys.stderr)
        if self.err.file is not None and self.err.file == self.out.file:
            self.err.queue = self.out.queue
        self.control: Optional[int] = None  # descriptor with the signals of the launcher that started this one
        self.ranks: List[Process] = []  # or launchers of machines
        self.selector = selectors.DefaultSelector()
        self.signals: List[int] = []
        self.first: Optional[Tuple[Process, int]] = None  # the first that failed, and its exit code
        self.stop_signal = 0
        self.output_code = 0  # not 0: the ranks' output can't be written
        self.held = contextlib.ExitStack()  # reserves the ranks' port
        self.plan: List[Tuple[float, int]] = []  # (time, signal) for processes that still run

    def start_hosts(self, options: argparse.Namespace) -> None:
        for node in range(len(options.hosts)):
            self._add(Host(options.hosts[node], ssh_command(options, node), options.secret, self.out, self.err))

    def start_ranks(self, options: argparse.Namespace) -> None:
        command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.args]
        count, shared = options.ranks, dict(os.environ)
        host, port = options.rendezvous or self._reserve_port(options.master_port)
        shared.update(WORLD_SIZE=str(count * options.nodes), LOCAL_WORLD_SIZE=str(count), MASTER_ADDR=host,
                      MASTER_PORT=str(port))
        if options.nodes == 1:
            shared["LIBDC_GROUP"] = f"libdc-{os.getpid()}-{secrets.token_hex(8)}"
        else:
            _allow_files(count * options.nodes)
            shared["LIBDC_SECRET"] = options.secret
            shared.pop("LIBDC_SECRET_FILE", None)
        shared.pop("LIBDC_LAUNCHER", None)  # this is the launcher
        given = {"LIBDC_INTERFACE": options.interface, "LIBDC_PORTS": options.ports, "LIBDC_TLS": options.tls and "1"}
        shared.update({key: value for key, value in given.items() if value})
        first = count * options.node_rank
        shared.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
        shared.setdefault("PYTHONUNBUFFERED", "1")
        for local in range(count):
            rank = first + local
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(local)}
            self._add(Rank(rank, command, own, self.out, self.err))
        self.control = options.control

    def _add(self, process: Process) -> None:
        self.ranks.append(process)
        for pipe in process.partial:
            os.set_blocking(pipe.fileno(), False)
            self.selector.register(pipe, selectors.EVENT_READ, process)

    def _reserve_port(self, wanted: int) -> Tuple[str, int]:
        """This machine's loopback address, and the wanted port. 0: reserves a free one, so that no other program gets
        it. Ranks may still listen on it, since this socket never does."""
        for family, host in (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"):
            with contextlib.suppress(OSError):  # a container may have one of the two alone
                held = socket.socket(family)
                self.held.callback(held.close)
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind((host, 0))
                return host, wanted or int(held.getsockname()[1])
        raise StartError("the ranks can't meet: this machine has no loopback address, 127.0.0.1 or ::1")

    def watch(self) -> int:
        while any(rank.code() is None for rank in self.ranks):
            self._forward(0.05)
            self._handle_signals()
            self._check_ranks()
            self._check_outputs()
            while self.plan and time.monotonic() > self.plan[0][0]:
                self._signal_all(self.plan.pop(0)[1])
        self._check_ranks()
        self.end()
        self._drain()
        self._finish_outputs()
        self._check_outputs()
        self.held.close()
        if self.stop_signal:
            return 128 + self.stop_signal
        return self.first[1] if self.first else self.output_code

    def end(self) -> None:
        for rank in self.ranks:
            if rank.process.returncode is None:
                rank.reap()

    def _handle_signals(self) -> None:
        while self.signals:
            number = self.signals.pop(0)
            if self.stop_signal:  # a second signal: kill at once
                self.grace = 0
                self._signal_all(signal.SIGKILL)
            else:
                self.stop_signal = number
                self.plan = [(time.monotonic() + self.grace, signal.SIGKILL)]
                self._signal_all(number)

    def _check_ranks(self) -> None:
        if self.first is not None or self.stop_signal or self.output_code:
            return
        for rank in self.ranks:
            code = rank.code()
            if code:
                self.first = (rank, code)
                how = f"was killed by {_signal_name(code - 128)}" if rank.killed() else f"failed with exit code {code}"
                self._forward(0)
                self.log(f"{rank.name} (pid {rank.process.pid}) {how}; ending the others")
                end = time.monotonic() + _EXIT_GRACE_SECONDS
                self.plan = [(end, signal.SIGTERM), (end + self.grace, signal.SIGKILL)]
                return

    def _check_outputs(self) -> None:
        """Ends the ranks if output is lost: its reader has gone, as under `| head`, or the disk is full."""
        for output in (self.out, self.err):
            output.poll()
        lost = next((output for output in (self.out, self.err) if output.lost is not None), None)
        if lost is None or lost.lost is None or self.output_code:
            return
        unread = lost.lost.errno == errno.EPIPE
        self.output_code = 128 + signal.SIGPIPE if unread else 1
        if not unread:
            self.log(f"{lost.name} can't be written: {lost.lost.strerror}; ending the ranks")
        if self.first is None and not self.stop_signal:
            self.plan = [(time.monotonic() + self.grace, signal.SIGKILL)]
            self._signal_all(signal.SIGTERM)

    def _finish_outputs(self) -> None:
        """Writes queued output until its readers have taken all of it, or for the time of grace after a signal."""
        given_up = time.monotonic() + self.grace
        while self.out.queue or self.err.queue:
            self._read_signals()
            for output in (self.out, self.err):
                output.flush(0.05)
            if self.signals and not self.stop_signal:
                self.stop_signal, given_up = self.signals.pop(0), time.monotonic() + self.grace
            if self.signals or (self.stop_signal and time.monotonic() > given_up):
                break

    def log(self, message: str) -> None:
        self.err.write(f"libdc.run: {message}\n".encode())

    def _signal_all(self, number: int) -> None:
        for rank in self.ranks:
            if rank.code() is None:
                rank.signal(number)

    def _forward(self, timeout: float) -> None:
        """Forwards the ranks' output. Ranks that write faster than its reader reads are blocked. The launcher is not,
        so that it sees signals and ranks that end."""
        self._read_signals()
        for output in (self.out, self.err):
            if output.queue:
                output.flush(timeout if output.is_full() else 0)
        if self.out.is_full() or self.err.is_full():
            return
        for key, _ in self.selector.select(timeout):
            self._read(key.fileobj, key.data)

    def _read_signals(self) -> None:
        """Reads signals from the launcher that started this one over ssh. If that launcher or its machine is gone, the
        ranks end too."""
        if self.control is None or not select.select([self.control], [], [], 0)[0]:
            return
        data = os.read(self.control, 4096)
        self.signals += [int(line) for line in data.split()] if data else [signal.SIGTERM]
        if not data:
            self.control = None

    def _read(self, pipe: Any, rank: Process) -> bool:
        """Forwards what can be read. False: there is nothing now, or the pipe has ended."""
        try:
            data = os.read(pipe.fileno(), 65536)
        except BlockingIOError:
            return False
        if not data:
            self._close(pipe, rank)
            return False
        rank.take(pipe, data)
        return True

    def _close(self, pipe: Any, rank: Process) -> None:
        rank.take_rest(pipe)
        self.selector.unregister(pipe)
        pipe.close()

    def _drain(self) -> None:
        """Reads the rest of the ranks' output. It does not wait for processes that a rank left behind and that hold a
        pipe open."""
        for key in list(self.selector.get_map().values()):
            reads = 0
            while reads < 64 and self._read(key.fileobj, key.data):  # 4 MiB, more than a pipe holds
                reads += 1
            if not key.fileobj.closed:  # type: ignore[union-attr]
                self._close(key.fileobj, key.data)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
