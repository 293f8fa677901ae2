"""Lets the ranks write a checkpoint: into a hidden file beside it, which then replaces it.

The hidden file is named after the path, with `.part` appended, so that the next job finds the file of a killed one.
Rank 0 locks it while the ranks write, and the lock ends with the process. So a part without a lock belongs to a dead
writer and is removed; a locked one belongs to a live writer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Tuple

from ..sharding.root import Root
from . import crc32c, safetensors_file
from .collective_errors import run_on_all_ranks
from .safetensors_file import Layout

if TYPE_CHECKING:
    from .items import WriteItem


def write(root: Root, path: str, layout: Layout, pieces: List[WriteItem]) -> None:
    """All ranks write into a file beside the path, which then replaces the path's file."""
    first = root.group.comm.rank == 0
    folder, name = os.path.split(os.path.abspath(path))
    part = os.path.join(folder, f".{name}.part")
    token = os.urandom(8)  # by which the others know rank 0's file, until the header replaces it
    lock = -1

    def begin() -> None:
        nonlocal lock
        _check_path(path)
        lock = _create(path, part)
        with _named(path):
            safetensors_file.reserve(lock, layout.nbytes)
            safetensors_file.write_bytes(lock, 0, token)
            os.fsync(lock)  # other machines read it

    def fill() -> List[Any]:
        fd = _open(root, part, *json.loads(told))
        try:
            sums = []
            with _named(path):
                for piece in pieces:
                    width = piece.elements.element_size()
                    crc = safetensors_file.write(fd, layout.offset(piece.name) + piece.begin * width, piece.elements)
                    sums.append((piece.name, piece.begin * width, piece.end * width, crc))
                os.fsync(fd)
        finally:
            os.close(fd)
        return sums

    def end(sums: Dict[str, int]) -> None:
        with _named(path):
            safetensors_file.write_bytes(lock, 0, layout.header(sums))
            os.fsync(lock)
        os.replace(part, path)
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # makes the new name durable
        finally:
            os.close(fd)

    try:
        run_on_all_ranks(root, begin if first else lambda: None, in_replica=True)
        told = root.group.all_gather_bytes(json.dumps([part, token.hex()]).encode())[0]
        mine = run_on_all_ranks(root, fill, in_replica=True)
        every = [json.loads(text) for text in root.group.all_gather_bytes(json.dumps(mine).encode())]
        run_on_all_ranks(root, lambda: end(_sums(layout, every)) if first else None, in_replica=True)
    except BaseException:
        if first and lock >= 0 and _is_at(lock, part):
            os.unlink(part)
        if not first:
            _remove_dead(part)
        raise
    finally:
        if lock >= 0:
            os.close(lock)


def _open(root: Root, part: str, made: str, token: str) -> int:
    """Opens rank 0's file, which is `made` there and begins with the token."""
    found = "no file"
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as on_exit:
        fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
        on_exit.callback(os.close, fd)
        if os.pread(fd, len(token) // 2, 0).hex() == token:
            on_exit.pop_all()
            return fd
        found = "another"  # a killed save's, on a disk of this machine's own
    raise FileNotFoundError(f"save_checkpoint: rank {root.group.comm.rank} finds {found} at {part}, and rank 0 has "
                            f"made {made}: path must be the same on every rank, in a file system that all ranks share")


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Adds the path to errors of descriptors, which have no name."""
    try:
        yield
    except OSError as error:
        error.filename = path if error.filename is None else error.filename
        raise


def _check_path(path: str) -> None:
    """Raises if the path is something that a file must not replace."""
    if not path or path.endswith("/") or "\0" in path:
        raise ValueError(f"save_checkpoint: path = {path!r}, must be a file's name")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"save_checkpoint: path = {path!r} is a folder, must be a file's name")
    if not stat.S_ISREG(mode):
        raise ValueError(f"save_checkpoint: path = {path!r} is a pipe or a device, must be a file's name")


def _create(path: str, part: str) -> int:
    """Creates and locks a new file. It removes a dead writer's file instead of reusing it, since that may have another
    name (hard link)."""
    for _ in range(100):
        _remove_dead(part)
        try:
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            why = (f"is being written by another save, which has locked {part}" if _is_file(part) else
                   f"cannot be written: {part} is a folder or a link, and not a save's")
            raise FileExistsError(f"save_checkpoint: path = {path!r} {why}") from None
        if _lock(fd) and _is_at(fd, part):
            return fd
        os.close(fd)  # before the lock, another writer took it for a dead one's
    raise FileExistsError(f"save_checkpoint: path = {path!r} is being written by other saves")


def _remove_dead(part: str) -> None:
    """Removes a part whose writer has ended."""
    try:
        fd = os.open(part, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if _lock(fd) and _is_at(fd, part):
            os.unlink(part)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
            return False
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise  # otherwise the file system has no locks, and the last writer wins
    return True


def _is_file(path: str) -> bool:
    """Whether the path is a regular file, or is gone by now."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _sums(layout: Layout, every: List[List[Tuple[str, int, int, int]]]) -> Dict[str, int]:
    """Each tensor's checksum, joined from those of the byte ranges, begin to end, that the ranks wrote."""
    sums = dict.fromkeys(layout.tensors, 0)
    reached = dict.fromkeys(layout.tensors, 0)
    for name, begin, end, crc in sorted(tuple(written) for sums_of_rank in every for written in sums_of_rank):
        if begin != reached[name]:
            raise ValueError(f"save_checkpoint: two ranks have written bytes {begin} to {reached[name]} of {name}")
        sums[name] = crc32c.join(sums[name], crc, end - begin)
        reached[name] = end
    return sums
