"""The caller's transport, as the table of functions that the library calls."""

from __future__ import annotations

import sys
from typing import Any, List, Optional, Sequence, Tuple

from ._lib import InCallback, Registry, callback, ffi, lib, new_struct
from .types import DType


class Collectives:
    """The caller's transport: subclass it for Comm.external. Methods are called on any thread; each blocks until it is
    done, and returns None or raises. Buffers are memoryviews of bytes, whose sizes give the counts. Methods must not
    write to the buffers that they send."""

    def all_gather(self, send: memoryview, recv: memoryview, dtype: DType) -> None:
        """recv = every rank's send, in rank order."""
        raise NotImplementedError

    def reduce_scatter(self, send: memoryview, recv: memoryview, dtype: DType) -> None:
        """recv = sum over ranks of block `rank` of send."""
        raise NotImplementedError

    def broadcast(self, data: memoryview, root: int) -> None:
        raise NotImplementedError

    def barrier(self) -> None:
        raise NotImplementedError

    def all_to_all(self, send: memoryview, send_counts: Sequence[int], recv: memoryview, recv_counts: Sequence[int],
                   dtype: DType) -> None:
        """Rank r gets send_counts[r] elements. Optional: with it libdc computes sums itself, in the same order as on
        every other transport, and pads nothing."""
        raise NotImplementedError

    def split(self, ranks: Sequence[int]) -> "Collectives":
        """A group of these ranks of this one, in this order. All ranks call at once, each with its group's ranks. A
        rank in no group gets an empty list, and returns itself. Comm.split needs this method."""
        raise NotImplementedError

    def dup(self) -> Optional["Collectives"]:
        """An independent group of the same ranks; None if there is none, so that all work shares this one."""
        return None

    def abort(self) -> None:
        """Makes blocked calls raise, on other ranks too if it can, and also calls that have begun and block later.
        Called on another thread: at the deadline, by Comm.abort, and when this rank alone cannot go on. Without it the
        deadline cannot end a blocked method."""

    def close(self) -> None:
        """Called once, when the communicator is gone."""


class External:
    """Collectives in use, their world size, and the exceptions of the communicator and all its duplicates."""

    def __init__(self, collectives: Collectives, world: int, errors: List[BaseException]) -> None:
        self.collectives = collectives
        self.world = world
        self.errors = errors


_externals = Registry()
_TABLE = dict(ffi.typeof("dc_comm_callbacks").fields)
_CALLBACK_FAILED = 1


def _bytes(pointer: Any, count: int) -> memoryview:
    return memoryview(ffi.buffer(ffi.cast("char *", pointer), count)) if count else memoryview(bytearray())


def _guarded(user: Any, call: Any) -> int:
    """Runs a method of the caller's transport. An exception, or a result (which may stand for unfinished work), becomes
    an error number."""
    with InCallback():
        external = None
        try:
            external = _externals.get(user)
            result = call(external)
            if result is not None:
                raise TypeError(f"{type(external.collectives).__name__}'s method returned {result!r}, must return None")
            return 0
        except BaseException as error:
            if external is not None:
                external.errors.append(error)
            return _CALLBACK_FAILED


@callback(_TABLE["all_gather"].type, error=_CALLBACK_FAILED)
def _all_gather(send: Any, recv: Any, count: int, dtype: int, user: Any) -> int:
    size = count * lib.dc_dtype_size(dtype)
    return _guarded(user, lambda external: external.collectives.all_gather(
        _bytes(send, size), _bytes(recv, size * external.world), DType(dtype)))


@callback(_TABLE["reduce_scatter"].type, error=_CALLBACK_FAILED)
def _reduce_scatter(send: Any, recv: Any, count: int, dtype: int, user: Any) -> int:
    size = count * lib.dc_dtype_size(dtype)
    return _guarded(user, lambda external: external.collectives.reduce_scatter(
        _bytes(send, size * external.world), _bytes(recv, size), DType(dtype)))


@callback(_TABLE["broadcast"].type, error=_CALLBACK_FAILED)
def _broadcast(data: Any, size: int, root: int, user: Any) -> int:
    return _guarded(user, lambda external: external.collectives.broadcast(_bytes(data, size), root))


@callback(_TABLE["barrier"].type, error=_CALLBACK_FAILED)
def _barrier(user: Any) -> int:
    return _guarded(user, lambda external: external.collectives.barrier())


@callback(_TABLE["dup"].type, error=_CALLBACK_FAILED)
def _dup(user: Any, new_user: Any) -> int:
    def dup(external: External) -> None:
        copy = external.collectives.dup()
        if copy is None:
            raise RuntimeError(f"{type(external.collectives).__name__}.dup() returned None after it had been used")
        new_user[0] = _externals.put(External(copy, external.world, external.errors))

    return _guarded(user, dup)


@callback(_TABLE["split"].type, error=_CALLBACK_FAILED)
def _split(ranks: Any, count: int, user: Any, new_user: Any) -> int:
    def split(external: External) -> None:
        part = external.collectives.split(ffi.unpack(ranks, count) if count else [])
        if count:
            new_user[0] = _externals.put(External(part, count, external.errors))

    return _guarded(user, split)


@callback(_TABLE["all_to_all"].type, error=_CALLBACK_FAILED)
def _all_to_all(send: Any, send_counts: Any, recv: Any, recv_counts: Any, dtype: int, user: Any) -> int:
    def all_to_all(external: External) -> None:
        counts = [ffi.unpack(each, external.world) for each in (send_counts, recv_counts)]
        sent, received = (_bytes(data, sum(each) * lib.dc_dtype_size(dtype))
                          for data, each in zip((send, recv), counts))
        external.collectives.all_to_all(sent, counts[0], received, counts[1], DType(dtype))

    return _guarded(user, all_to_all)


@callback(_TABLE["abort"].type)
def _abort(user: Any) -> None:
    _guarded(user, lambda external: external.collectives.abort())


@callback(_TABLE["destroy_user"].type)
def _destroy_user(user: Any) -> None:
    with InCallback():
        external = _externals.pop(user)
        try:
            external.collectives.close()
        except Exception as error:
            sys.unraisablehook(_Unraisable(error, external.collectives))
        del external


class _Unraisable:
    def __init__(self, error: BaseException, where: Any) -> None:
        self.exc_type, self.exc_traceback, self.object = type(error), error.__traceback__, where
        self.exc_value: Optional[BaseException] = error
        self.err_msg: Optional[str] = None


def make_table(collectives: Collectives, world: int) -> Tuple[Any, External]:
    """The table, and the state behind it. If no communicator takes the table over, call drop_table()."""
    table = new_struct("dc_comm_callbacks")
    table.all_gather, table.reduce_scatter = _all_gather, _reduce_scatter
    table.broadcast, table.barrier = _broadcast, _barrier
    if type(collectives).dup is not Collectives.dup:
        table.dup = _dup
    if type(collectives).split is not Collectives.split:
        table.split = _split
    if type(collectives).all_to_all is not Collectives.all_to_all:
        table.all_to_all = _all_to_all
    table.abort, table.destroy_user = _abort, _destroy_user
    state = External(collectives, world, [])
    table.user = _externals.put(state)
    return table, state


def drop_table(table: Any) -> None:
    _externals.pop(table.user)
