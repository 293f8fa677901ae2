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
_AT_ONCE = select.PIPE_BUF  # bytes that a pipe which takes any takes without waiting, as most other files do
_MOST_QUEUED = 1 << 18
_LONGEST_LINE = 1 << 20  # that is kept until it is whole


class Output:
    """Standard output or error. Nothing waits for its reader: what that has not taken is queued. After a failed write
    all output is lost, and `lost` says why."""

    def __init__(self, name: str, stream: Any) -> None:
        self.name = name
        self.fd = -1 if stream is None else stream.fileno()  # None: it was closed before Python began
        self.is_terminal = stream is not None and stream.isatty()
        status = None if stream is None else os.fstat(self.fd)
        self.file = None if status is None else (status.st_dev, status.st_ino)
        self.is_pipe = status is not None and stat.S_ISFIFO(status.st_mode)
        self.is_file = status is not None and stat.S_ISREG(status.st_mode)
        self.lost: Optional[OSError] = None
        self.queue = bytearray()  # one for all outputs of a file, so that lines stay whole
        self._write = self._writer(status)

    def _writer(self, status: Optional[os.stat_result]) -> Callable[[bytes], int]:
        """A function that writes without waiting. The descriptor is other programs' too, so it stays as it is."""
        if status is not None and stat.S_ISSOCK(status.st_mode):
            connection = socket.socket(fileno=os.dup(self.fd))
            return lambda data: connection.send(data, socket.MSG_DONTWAIT)
        fd = self.fd
        if self.is_terminal:
            with contextlib.suppress(OSError):  # its name may be another terminal's in here
                own = os.open(os.ttyname(fd), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
                fd = own if os.fstat(own).st_rdev == os.fstat(fd).st_rdev else fd
        return lambda data: os.write(fd, data)

    def write(self, data: bytes) -> None:
        if self.fd >= 0 and self.lost is None:
            self.queue += data
            self.flush(0)

    def is_full(self) -> bool:
        """Ranks must not write more for now."""
        return len(self.queue) > _MOST_QUEUED

    def flush(self, timeout: float) -> None:
        """Writes what is queued, while the reader takes it, and waits for it so many seconds at most."""
        poll, written = select.poll(), 0
        if self.queue:
            poll.register(self.fd, select.POLLOUT)
        while written < len(self.queue) and self.lost is None:
            if not self.is_file and not poll.poll(0 if written else 1000 * timeout):
                break
            try:
                end = len(self.queue) if self.is_file else written + _AT_ONCE
                written += self._write(bytes(self.queue[written:end]))
            except BlockingIOError:  # another program that has the same terminal or pipe made it so, and was quicker
                break
            except OSError as error:
                self.lost = error
        del self.queue[: len(self.queue) if self.lost else written]

    def poll(self) -> None:
        """A pipe without a reader is lost before the next line is written to it: there may be none for hours."""
        if self.fd < 0 or self.lost is not None or not self.is_pipe:
            return
        poll = select.poll()
        poll.register(self.fd, 0)
        if any(events & select.POLLERR for _, events in poll.poll(0)):
            self.lost = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Process:
    """One that the launcher watches, and the lines it writes."""

    def __init__(self, name: str, command: Sequence[str], environment: Dict[str, str], out: Output,
                 err: Output) -> None:
        self.name = name
        launcher = os.getpid()
        libc = ctypes.CDLL(None)

        def before_exec() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # the launcher died before the request counted
                os._exit(1)

        pipes = [None if self.has_terminal(output) else subprocess.PIPE for output in (out, err)]
        self.process = subprocess.Popen(command, env=environment, stdin=self.STDIN, stdout=pipes[0], stderr=pipes[1],
                                        start_new_session=True, preexec_fn=before_exec)
        self.outputs = {pipe: output for pipe, output in ((self.process.stdout, out), (self.process.stderr, err))
                       if pipe is not None}
        self.partial: Dict[Any, List[bytes]] = {pipe: [] for pipe in self.outputs}  # lines without their end
        self.ended: Optional[Any] = None

    STDIN = subprocess.DEVNULL

    def has_terminal(self, output: Output) -> bool:
        """Whether its output goes to the terminal, and is not forwarded by whole lines."""
        return False

    def write_lines(self, pipe: Any, lines: bytes) -> None:
        self.outputs[pipe].write(lines)

    def take(self, pipe: Any, data: bytes) -> None:
        """Writes the whole lines of what was read, and of a very long one what there is."""
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
        """Ends what is left of the processes that it started."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def signal(self, number: int) -> None:
        # It leads its own group, which has the processes that it started.
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
        """A terminal is rank 0's own, so that it may draw on it."""
        return self.rank == 0 and output.is_terminal


class Host(Process):
    """A machine's launcher, started by ssh. Its standard input has the run's secret, and then the signals."""

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
        except BrokenPipeError:  # it has ended, which is seen soon
            pass

    def signal(self, number: int) -> None:
        """The launcher there gets the signal, and ends its ranks. SIGKILL ends ssh: then that launcher's input ends,
        and so do its ranks."""
        if number == signal.SIGKILL:
            super().signal(number)
        else:
            self._send(str(number))
