"""Work in order: the object that PyTorch waits for, and the thread that runs it."""

from __future__ import annotations

import collections
import contextlib
import datetime
import functools
import os
import threading
import weakref
from typing import Any, Callable, Deque, List, Optional

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from .tensors import count_modes

_c10d: Any = torch._C._distributed_c10d
_InferenceMode: Any = torch._C._InferenceMode  # the core of torch.inference_mode(), without its Python class
_FOREVER = datetime.timedelta(0)
_unregistering = threading.local()


class Work(dist.Work):
    """One call of a process group, running or done."""

    def __init__(self, run: Callable[[], Any], result: Any, source: int = -1) -> None:
        super().__init__()
        self._run: Optional[Callable[[], Any]] = run
        self._result, self.source = result, source
        self._error: Optional[BaseException] = None
        self._guard = threading.Lock()
        self._future: Optional[torch.futures.Future[Any]] = None
        self._chained: Optional[torch.futures.Future[Any]] = None
        self._done = False
        self._lane: Optional[_State] = None  # the lane in which it is queued
        self._registered: Optional[List[torch.Tensor]] = None
        self._pending = threading.Lock()  # held until the work is done
        self._pending.acquire()

    def execute(self) -> Optional["torch.futures.Future[Any]"]:
        """Runs the call. Returns its future, if there is one, to be set once the lane is free, since its callbacks may
        make other calls."""
        try:
            assert self._run is not None
            with _InferenceMode(True):  # allows writes to leaves, and to inference tensors
                if torch._C._is_any_autocast_enabled() or count_modes():
                    with torch.autocast("cpu", enabled=False), _disable_current_modes():
                        self._run()
                else:
                    self._run()
        except BaseException as error:
            self._error = error
        self._run = None
        with self._guard:
            self._done = True
            future = self._future
        self._pending.release()
        return future

    def wait(self, timeout: datetime.timedelta = _FOREVER) -> bool:
        """Blocks until the call is done. Raises the call's exception, or DistError after the timeout. The call itself
        then continues, up to the group's own timeout."""
        if self._registered is not None and getattr(_unregistering, "is_on", False):
            self._register_all(self._registered)
            return True
        if not self._done:
            seconds = timeout.total_seconds()
            if self._lane is not None:
                self._lane.check_process()
                if seconds <= 0:
                    self._lane.help(self)
            if not self._pending.acquire(timeout=seconds if seconds > 0 else -1):
                raise dist.DistError(f"libdc: the work was not done within wait's {seconds:g} s; it is still under way")
            self._pending.release()
        if self._registered is not None:
            self._unregister()
        if self._error is not None:
            raise self._error
        return True

    synchronize = wait

    # PyTorch's wait_tensor() waits for the works that are registered for a tensor's memory. PyTorch's ProcessGroup
    # registers them in methods that this backend overrides.

    def register(self) -> "Work":
        """Registers the work for wait_tensor(), if the caller allows it."""
        if _c10d._allow_inflight_collective_as_graph_input():
            parts = (each if isinstance(each, list) else [each] for each in self._result)
            self._register_all([tensor for each in parts for tensor in each])
        return self

    def _register_all(self, tensors: List[torch.Tensor]) -> None:
        self._registered = tensors
        for tensor in tensors:
            _c10d._register_work(tensor, self)

    def _unregister(self) -> None:
        """Unregisters the work by wait_tensor(), since there is no other way. That also removes other works with the
        same memory, and waits for them; those register themselves again instead of waiting."""
        tensors, self._registered = self._registered or [], []
        _unregistering.is_on = True
        try:
            for tensor in tensors:
                torch.ops._c10d_functional.wait_tensor(tensor)
        finally:
            _unregistering.is_on = False
            self._registered = None

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Optional[BaseException]:
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._result

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        # An error in a future reaches C++ (DDP) only if a callback raises it.
        with self._guard:
            if self._chained is None:
                self._future = torch.futures.Future()
                self._chained = self._future.then(lambda _: self.result())
                done = self._done
            else:
                done = False
        if done:
            self._future.set_result(None)  # type: ignore[union-attr]
        return self._chained


def _keep_works_of_reducers() -> None:
    """Of DDP's works in join(), its reducer in C++ holds the half of C++ alone, which has none of the methods above."""
    inner: Any = _c10d.Reducer._set_forward_pass_work_handle
    held: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()

    @functools.wraps(inner)
    def set_work(self: Any, work: Any, *args: Any, **kwargs: Any) -> None:
        held[self] = work
        inner(self, work, *args, **kwargs)

    _c10d.Reducer._set_forward_pass_work_handle = set_work


_keep_works_of_reducers()


def check_process(process: int) -> None:
    """Raises in a child of fork(), which lacks its parent's threads and would wait for ever."""
    if process != os.getpid():
        raise dist.DistError(f"libdc: this process group belongs to process {process}, which forked this one "
                             f"({os.getpid()}): a child makes groups of its own")


class Lane:
    """Runs work in the order of its calls. Work of non-blocking calls runs on the lane's thread, which starts with the
    first such call and ends with the lane. While that thread runs a future's callbacks, another one serves the lane. A
    caller that waits runs queued work itself, since switching threads costs more than a small call."""

    def __init__(self) -> None:
        self._state = _State()
        weakref.finalize(self, _State.close, self._state).atexit = False

    def submit(self, work: Work, blocking: bool) -> Work:
        state = self._state
        state.check_process()
        with state.changed:
            if state.closed:
                raise dist.DistError("libdc: this process group is closed")
            inline = blocking and not state.busy and not state.queue
            if inline:
                state.busy = threading.get_ident()
            else:
                work._lane = state
                state.queue.append(work)
                try:
                    state.ensure_server()
                except RuntimeError:  # the error tells the caller that the call failed, so it must not run later
                    state.queue.remove(work)
                    raise
                state.changed.notify_all()
        if inline:
            state.run(work)
        if blocking:
            work.wait()
        return work

    def end(self) -> bool:
        """As close(), but does not wait. Returns whether all work is done."""
        self._state.close()
        if self._state.busy == threading.get_ident():  # in a signal handler, which interrupted that work
            return True
        return not (self._state.busy or any(each.is_alive() for each in self._state.threads
                                            if each is not threading.current_thread()))

    def close(self) -> None:
        """Refuses more work, and waits for submitted work."""
        self._state.close()
        for thread in self._state.threads:
            if thread is not threading.current_thread():
                thread.join()


class _State:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: Deque[Work] = collections.deque()
        self.threads: List[threading.Thread] = []
        self.servers = 0  # threads that take work, except those in a future's callbacks
        self.busy = 0  # the id of the thread that runs work; 0: none
        self.closed = False
        self.process = os.getpid()

    def check_process(self) -> None:
        check_process(self.process)

    def ensure_server(self) -> None:
        """Starts a thread for queued work if none serves. All others may be in callbacks, which may wait for that work.
        The lock must be held."""
        if self.queue and self.servers == 0:
            thread = threading.Thread(target=self.serve, name="libdc process group", daemon=True)
            thread.start()  # fails if the process has too many threads
            self.servers += 1
            self.threads.append(thread)

    def run(self, work: Work, is_server: bool = False) -> None:
        """Runs a work whose turn has come."""
        future = work.execute()
        with self.changed:
            self.busy = 0
            if self.queue or self.closed:
                self.changed.notify_all()
            if future is None:
                return
            self.servers -= is_server
            with contextlib.suppress(RuntimeError):  # if no thread starts, this one or a waiter runs the queue
                self.ensure_server()
        future.set_result(None)
        with self.changed:
            self.servers += is_server

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def help(self, work: Work) -> None:
        """Runs queued work up to and with this one, unless another thread is running some."""
        while not work._done:
            with self.changed:
                if self.busy or not self.queue:
                    return
                self.busy = threading.get_ident()
                first = self.queue.popleft()
            self.run(first)
            if first is not work and not isinstance(first._error, (Exception, type(None))):
                raise first._error  # KeyboardInterrupt etc. are for this thread, which may never wait for first

    def serve(self) -> None:
        while True:
            with self.changed:
                while self.busy or not (self.queue or self.closed):
                    self.changed.wait()
                if not self.queue:
                    self.servers -= 1
                    return
                self.busy = threading.get_ident()
                work = self.queue.popleft()
            self.run(work, True)
            del work  # frees its tensors while this thread waits

