"""Starts ranks: `python -m libdc.run -n 2 [-m] script.py args…` as processes, threads(n, fn) as threads.

On several machines each has a launcher, which starts as many ranks as the others do:
`python -m libdc.run --nodes 2 --node-rank 0 --rendezvous HOST:PORT -n 8 script.py`. HOST is the one with node rank 0.

The first rank that fails ends the others, and its exit code is the launcher's. Ranks end with the launcher, whatever
ends it, and when what they print can no longer be written; a standard stream that was closed wants nothing of it."""

from __future__ import annotations

import argparse
import ctypes
import errno
import math
import os
import re
import resource
import secrets
import select
import selectors
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, List, NoReturn, Optional, Sequence, Tuple

from ._secret import run_secret

MAX_RANKS = 256  # of several machines
_PR_SET_PDEATHSIG = 1
_EXIT_GRACE_SECONDS = 3.0  # seconds in which the others may end by themselves and say why


def threads(n: int, fn: Callable[..., Any], *args: Any, timeout: Optional[float] = None) -> List[Any]:
    """Runs fn(comm, *args) in n threads, one a rank, and returns the results in rank order. When one raises, the
    communicator is aborted, so that the others end too, and the first exception is raised."""
    from .comm import Comm

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
    for thread in ranks:
        thread.start()
    try:
        for thread in ranks:
            thread.join()
    except BaseException:  # an interrupt: the ranks end before it goes on
        comms[0].abort("the caller of threads() was interrupted")
        for thread in ranks:
            thread.join()
        raise
    if failures:
        raise failures[0]
    return results


def _allow_files(ranks: int) -> None:
    """Ranks of several machines have connections to all others, one a communicator; they inherit this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8 * ranks + 512 if hard == resource.RLIM_INFINITY else min(8 * ranks + 512, hard)
    if resource.RLIM_INFINITY != soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _occupy_standard_streams() -> None:
    """Opens closed standard streams, so that no file opened later gets their numbers."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is fd


class _Output:
    """Standard output or error. After a failed write all output is lost, and `lost` says why."""

    def __init__(self, name: str, stream: Any) -> None:
        self.name = name
        self.fd = -1 if stream is None else stream.fileno()  # None: it was closed before Python began
        self.is_terminal = stream is not None and stream.isatty()
        self.is_pipe = stream is not None and stat.S_ISFIFO(os.fstat(self.fd).st_mode)
        self.lost: Optional[OSError] = None

    def write(self, data: bytes) -> None:
        while data and self.fd >= 0 and self.lost is None:
            try:
                data = data[os.write(self.fd, data):]
            except BlockingIOError:  # another program that has the same terminal or pipe made it so
                select.select([], [self.fd], [], 1.0)
            except OSError as error:
                self.lost = error

    def poll(self) -> None:
        """A pipe without a reader is lost before the next line is written to it: there may be none for hours."""
        if self.fd < 0 or self.lost is not None or not self.is_pipe:
            return
        poll = select.poll()
        poll.register(self.fd, 0)
        if any(events & select.POLLERR for _, events in poll.poll(0)):
            self.lost = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class _Rank:
    """A process of the group and the lines it writes."""

    def __init__(self, rank: int, command: Sequence[str], environment: Dict[str, str], out: _Output,
                 err: _Output) -> None:
        self.rank = rank
        launcher = os.getpid()
        libc = ctypes.CDLL(None)

        def before_exec() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # the launcher died before the request counted
                os._exit(1)

        # A terminal is rank 0's own, so that it may draw on it; all other output is forwarded by whole lines.
        pipes = [None if rank == 0 and output.is_terminal else subprocess.PIPE for output in (out, err)]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=pipes[0],
                                        stderr=pipes[1], start_new_session=True, preexec_fn=before_exec)
        self.outputs = {pipe: output for pipe, output in ((self.process.stdout, out), (self.process.stderr, err))
                       if pipe is not None}
        self.partial = {pipe: b"" for pipe in self.outputs}
        self.ended: Optional[Any] = None

    def code(self) -> Optional[int]:
        """Exit code as a shell has it, None while running. The process stays a zombie, and so its group's number its
        own, until reap()."""
        if self.ended is None:
            self.ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if self.ended is None:
            return None
        return self.ended.si_status + (128 if self.killed() else 0)

    def killed(self) -> bool:
        return self.ended is not None and self.ended.si_code != os.CLD_EXITED

    def reap(self) -> None:
        """Ends what is left of the rank's processes."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def signal(self, number: int) -> None:
        # The rank leads its own group, which has the processes that it started.
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass


class _Launcher:
    """Forwards output line by line, watches the ranks, and ends all of them when one fails or a signal says so."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.out, self.err = _Output("standard output", sys.stdout), _Output("standard error", sys.stderr)
        self.ranks: List[_Rank] = []
        self.selector = selectors.DefaultSelector()
        self.signals: List[int] = []
        self.first: Optional[Tuple[_Rank, int]] = None  # the rank that failed first, and its code
        self.stop_signal = 0
        self.output_code = 0  # not 0: what the ranks print can't be written
        self.reserved_port = socket.socket()
        self.plan: List[Tuple[float, int]] = []  # when what still runs gets which signal

    def start(self, command: Sequence[str], options: argparse.Namespace) -> None:
        count, shared = options.ranks, dict(os.environ)
        host, port = options.rendezvous or ("127.0.0.1", options.master_port or self._reserve_port())
        shared.update(WORLD_SIZE=str(count * options.nodes), LOCAL_WORLD_SIZE=str(count), MASTER_ADDR=host,
                      MASTER_PORT=str(port))
        if options.nodes == 1:
            shared["LIBDC_GROUP"] = f"libdc-{os.getpid()}-{secrets.token_hex(8)}"
        else:
            _allow_files(count * options.nodes)
            shared["LIBDC_SECRET"] = options.secret
            shared.pop("LIBDC_SECRET_FILE", None)
        given = {"LIBDC_INTERFACE": options.interface, "LIBDC_PORTS": options.ports, "LIBDC_TLS": options.tls and "1"}
        shared.update({key: value for key, value in given.items() if value})
        first = count * options.node_rank
        shared.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
        shared.setdefault("PYTHONUNBUFFERED", "1")
        for local in range(count):
            rank = first + local
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(local)}
            self.ranks.append(_Rank(rank, command, own, self.out, self.err))
            for pipe in self.ranks[-1].partial:
                os.set_blocking(pipe.fileno(), False)
                self.selector.register(pipe, selectors.EVENT_READ, self.ranks[-1])

    def _reserve_port(self) -> int:
        """A free port that no other program gets meanwhile: the ranks may listen there, this socket never does."""
        self.reserved_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved_port.bind(("127.0.0.1", 0))
        return int(self.reserved_port.getsockname()[1])

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
        self._check_outputs()
        self.reserved_port.close()
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
            if self.stop_signal:  # asked twice: no more patience
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
                self._log(f"rank {rank.rank} (pid {rank.process.pid}) {how}; ending the other ranks")
                end = time.monotonic() + _EXIT_GRACE_SECONDS
                self.plan = [(end, signal.SIGTERM), (end + self.grace, signal.SIGKILL)]
                return

    def _check_outputs(self) -> None:
        """The output is lost: its reader has gone, as under `| head`, or the disk is full."""
        for output in (self.out, self.err):
            output.poll()
        lost = next((output for output in (self.out, self.err) if output.lost is not None), None)
        if lost is None or lost.lost is None or self.output_code:
            return
        unread = lost.lost.errno == errno.EPIPE
        self.output_code = 128 + signal.SIGPIPE if unread else 1
        if not unread:
            self._log(f"{lost.name} can't be written: {lost.lost.strerror}; ending the ranks")
        if self.first is None and not self.stop_signal:
            self.plan = [(time.monotonic() + self.grace, signal.SIGKILL)]
            self._signal_all(signal.SIGTERM)

    def _log(self, message: str) -> None:
        self.err.write(f"libdc.run: {message}\n".encode())

    def _signal_all(self, number: int) -> None:
        for rank in self.ranks:
            if rank.code() is None:
                rank.signal(number)

    def _forward(self, timeout: float) -> None:
        for key, _ in self.selector.select(timeout):
            self._read(key.fileobj, key.data)

    def _read(self, pipe: Any, rank: _Rank) -> bool:
        """False: there is nothing to read, now or any more."""
        try:
            data = os.read(pipe.fileno(), 65536)
        except BlockingIOError:
            return False
        if not data:
            self._close(pipe, rank)
            return False
        whole, newline, rest = (rank.partial[pipe] + data).rpartition(b"\n")
        rank.partial[pipe] = rest
        rank.outputs[pipe].write(whole + newline)
        return True

    def _close(self, pipe: Any, rank: _Rank) -> None:
        rank.outputs[pipe].write(rank.partial[pipe])
        self.selector.unregister(pipe)
        pipe.close()

    def _drain(self) -> None:
        """Reads the rest of the ranks' output. A process that a rank left behind may hold a pipe open, and is not
        waited for."""
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        example = f"For example, two ranks of train.py: {self.prog} -n 2 train.py; all choices: {self.prog} --help"
        self.exit(2, f"{self.format_usage()}{self.prog}: {message}\n{example}\n")


def _arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = _Parser(prog="python -m libdc.run",
                     description="Runs a script on N ranks of this machine, or of each of several.")
    parser.add_argument("-n", "--ranks", metavar="N", default="1", help="number of processes (default 1)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("--nodes", default="1", help="machines, each with a launcher and N ranks (default 1)")
    parser.add_argument("--node-rank", default="0", help="which of them this is, from 0")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="for several machines: machine 0, and a free port of "
                        "its with a free one behind it")
    parser.add_argument("--master-port", default="0", help="MASTER_PORT of the ranks (default: a free one)")
    parser.add_argument("--secret-file", metavar="FILE", help="for several machines: a file of mode 0600 with the "
                        "run's secret, the same on all; the first launcher that finds none makes it and removes it at "
                        "the end, which serves machines with a common folder (default: LIBDC_SECRET or _FILE)")
    parser.add_argument("--interface", metavar="NAME|CIDR", help="where the ranks listen, for instance eth1 or "
                        "10.1.0.0/16 (default: LIBDC_INTERFACE, or all)")
    parser.add_argument("--ports", metavar="FIRST-LAST", help="ports of all listeners but the rendezvous (any)")
    parser.add_argument("--tls", action="store_true", help="encrypt what goes between machines: TLS 1.3 by OpenSSL 3; "
                        "on all launchers or on none (default: LIBDC_TLS=1)")
    parser.add_argument("--grace", default="10", help="seconds from SIGTERM to SIGKILL (default 10)")
    parser.add_argument("script", help="a Python program, which every rank runs")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)

    def number(name: str, text: str, minimum: int, maximum: int, why: str = "") -> int:
        if not re.fullmatch("-?[0-9]{1,18}", text) or not minimum <= int(text) <= maximum:
            parser.error(f"{name} {text}: must be in {minimum}..{maximum}{why}")
        return int(text)

    options.ranks = number("-n", options.ranks, 1, 64)
    options.nodes = number("--nodes", options.nodes, 1, MAX_RANKS // options.ranks,
                           f", since there may be {MAX_RANKS} ranks")
    options.node_rank = number("--node-rank", options.node_rank, 0, options.nodes - 1)
    options.master_port = number("--master-port", options.master_port, 0, 65535)
    try:
        grace = float(options.grace)
    except ValueError:
        grace = math.nan
    if not 0 <= grace <= 1e9:  # which NaN is not, either
        parser.error(f"--grace {options.grace}: must be a number of seconds in 0..1e9")
    options.grace, options.made_secret = grace, False
    if (options.rendezvous is None) != (options.nodes == 1):
        parser.error("--rendezvous: several machines need it, one does not take it")
    if options.rendezvous is not None:
        host, _, port = options.rendezvous.rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) < 65535:
            parser.error(f"--rendezvous {options.rendezvous}: must be HOST:PORT, with a port of 1 to 65534")
        options.rendezvous = host.strip("[]"), int(port)
        try:
            options.secret, options.made_secret = run_secret(options.secret_file)
        except (OSError, ValueError) as error:
            parser.error(f"--secret-file: {error}")
    return options


def main(argv: Optional[Sequence[str]] = None) -> int:
    options = _arguments(argv)
    command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.args]
    _occupy_standard_streams()
    launcher = _Launcher(options.grace)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: launcher.signals.append(number))
    try:
        launcher.start(command, options)
        return launcher.watch()
    finally:
        launcher.end()
        if options.made_secret:
            os.unlink(options.secret_file)


def _main() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    _main()
