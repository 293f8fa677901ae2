"""The launcher's processes, and what they print."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import stat
import subprocess
import time
from typing import Any, Callable, Dict, List, Optional, Sequence

_PR_SET_PDEATHSIG = 1
_AT_ONCE = select.PIPE_BUF  # bytes that a writable pipe, or most other files, take without blocking
_MOST_QUEUED = 1 << 18
_LONGEST_LINE = 1 << 20  # bytes of a line that are kept until it is whole


class Output:
    """Standard output or error. Writing never waits for the reader: output that it has not taken is queued. After a
    failed write all output is lost, and `lost` says why."""

    def __init__(self, name: str, stream: Any) -> None:
        self.name = name
        self.fd = -1 if stream is None else stream.fileno()  # None: it was closed before Python started
        self.is_terminal = stream is not None and stream.isatty()
        status = None if stream is None else os.fstat(self.fd)
        self.file = None if status is None else (status.st_dev, status.st_ino)
        self.is_pipe = status is not None and stat.S_ISFIFO(status.st_mode)
        self.is_file = status is not None and stat.S_ISREG(status.st_mode)
        self.lost: Optional[OSError] = None
        self.queue = bytearray()  # shared by outputs to the same file, so that lines stay whole
        self._write = self._writer(status)

    def _writer(self, status: Optional[os.stat_result]) -> Callable[[bytes], int]:
        """A function that writes without blocking. The descriptor's flags stay unchanged, since other programs share
        it."""
        if status is not None and stat.S_ISSOCK(status.st_mode):
            connection = socket.socket(fileno=os.dup(self.fd))
            return lambda data: connection.send(data, socket.MSG_DONTWAIT)
        fd = self.fd
        if self.is_terminal:
            with contextlib.suppress(OSError):  # in a container the name may be another terminal's
                own = os.open(os.ttyname(fd), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
                fd = own if os.fstat(own).st_rdev == os.fstat(fd).st_rdev else fd
        return lambda data: os.write(fd, data)

    def write(self, data: bytes) -> None:
        if self.fd >= 0 and self.lost is None:
            self.queue += data
            self.flush(0)

    def is_full(self) -> bool:
        """Whether ranks must not write more for now."""
        return len(self.queue) > _MOST_QUEUED

    def flush(self, timeout: float) -> None:
        """Writes queued output as long as the reader takes it. Waits at most timeout seconds for the reader."""
        poll, written = select.poll(), 0
        if self.queue:
            poll.register(self.fd, select.POLLOUT)
        while written < len(self.queue) and self.lost is None:
            if not self.is_file and not poll.poll(0 if written else 1000 * timeout):
                break
            try:
                end = len(self.queue) if self.is_file else written + _AT_ONCE
                written += self._write(bytes(self.queue[written:end]))
            except BlockingIOError:  # another program made the shared terminal or pipe non-blocking, and filled it
                break
            except OSError as error:
                self.lost = error
        del self.queue[: len(self.queue) if self.lost else written]

    def poll(self) -> None:
        """Notices a pipe without a reader before the next write, which may be hours later."""
        if self.fd < 0 or self.lost is not None or not self.is_pipe:
            return
        poll = select.poll()
        poll.register(self.fd, 0)
        if any(events & select.POLLERR for _, events in poll.poll(0)):
            self.lost = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class StartError(Exception):
    """The system refused a process."""


class Process:
    """A process that the launcher watches, and the lines that it writes."""

    def __init__(self, name: str, command: Sequence[str], environment: Dict[str, str], out: Output,
                 err: Output) -> None:
        self.name = name
        launcher = os.getpid()
        libc = ctypes.CDLL(None)

        def before_exec() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # the launcher died before prctl() took effect
                os._exit(1)

        pipes = [None if self.has_terminal(output) else subprocess.PIPE for output in (out, err)]
        try:
            self.process = subprocess.Popen(command, env=environment, stdin=self.STDIN, stdout=pipes[0],
                                            stderr=pipes[1], start_new_session=True, preexec_fn=before_exec)
        except OSError as error:  # no such command, or a limit on files or processes
            raise StartError(f"{name} can't be started: {command[0]}: {error.strerror}") from None
        self.outputs = {pipe: output for pipe, output in ((self.process.stdout, out), (self.process.stderr, err))
                       if pipe is not None}
        self.partial: Dict[Any, List[bytes]] = {pipe: [] for pipe in self.outputs}  # unfinished lines
        self.ended: Optional[Any] = None

    STDIN = subprocess.DEVNULL

    def has_terminal(self, output: Output) -> bool:
        """Whether the process writes to the terminal itself. Otherwise whole lines are forwarded."""
        return False

    def write_lines(self, pipe: Any, lines: bytes) -> None:
        self.outputs[pipe].write(lines)

    def take(self, pipe: Any, data: bytes) -> None:
        """Writes the whole lines of the data, and the beginning of a line that gets very long."""
        partial = self.partial[pipe]
        whole, newline, rest = data.rpartition(b"\n")
        if newline or sum(map(len, partial)) > _LONGEST_LINE:
            self.write_lines(pipe, b"".join([*partial, whole, newline]))
            partial.clear()
        if rest:
            partial.append(rest)

    def take_rest(self, pipe: Any) -> None:
        self.write_lines(pipe, b"".join(self.partial[pipe]))

    def code(self) -> Optional[int]:
        """The exit code as a shell gives it; None while running. The process stays a zombie until reap(), so that its
        group's number is not reused."""
        if self.ended is None:
            self.ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if self.ended is None:
            return None
        return self.ended.si_status + (128 if self.killed() else 0)

    def killed(self) -> bool:
        return self.ended is not None and self.ended.si_code != os.CLD_EXITED

    def reap(self) -> None:
        """Kills the processes that it started and that are left, and reaps the process."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def signal(self, number: int) -> None:
        # The process leads its own group, which has the processes that it started.
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass


class Rank(Process):
    """A rank of this machine."""

    def __init__(self, rank: int, command: Sequence[str], environment: Dict[str, str], out: Output,
                 err: Output) -> None:
        self.rank = rank
        super().__init__(f"rank {rank}", command, environment, out, err)

    def has_terminal(self, output: Output) -> bool:
        """Rank 0 writes to a terminal itself, so that it can draw on it."""
        return self.rank == 0 and output.is_terminal


class Host(Process):
    """A machine's launcher, started by ssh. It gets the run's secret, and then signals, on its standard input."""

    STDIN = subprocess.PIPE

    def __init__(self, host: str, command: Sequence[str], secret: str, out: Output, err: Output) -> None:
        super().__init__(f"host {host}", command, dict(os.environ), out, err)
        self.prefix = f"{host}: ".encode()
        self._send(secret)

    def write_lines(self, pipe: Any, lines: bytes) -> None:
        super().write_lines(pipe, b"".join(self.prefix + line for line in lines.splitlines(keepends=True)))

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            os.write(self.process.stdin.fileno(), f"{line}\n".encode())
        except BrokenPipeError:  # the process has ended, which code() reports
            pass

    def signal(self, number: int) -> None:
        """Sends the signal to the machine's launcher, which ends its ranks. SIGKILL ends ssh instead: the launcher's
        input ends, and so it ends its ranks."""
        if number == signal.SIGKILL:
            super().signal(number)
        else:
            self._send(str(number))
