"""Any order of closing and collecting is safe, from any thread; calls let other threads run."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import os
import subprocess
import sys
import threading
import time
import weakref
from typing import Dict

import libdc
import libdc.run
import numpy as np
import pytest


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_any_order_of_closing(order):
    device = libdc.Device()
    comm, stream, context = libdc.Comm.single(), libdc.Stream(device), libdc.Context(device)
    context.init(comm)
    context.set_stream(stream)
    context.register_z3_param(1, [4], np.ones(4, np.float32), np.zeros(4, np.float32))
    context.register_graph_z3(1, [1])
    context.allgather_param(None, 1, 1)
    tensor = context.take_param(1, 1)
    stream.synchronize()
    things = {0: device, 1: comm, 2: stream, 3: context, 4: tensor}
    del device, comm, stream, context, tensor
    for key in order:
        thing = things.pop(key)
        if key == 4:
            assert thing.numpy().sum() == 4
        del thing
        gc.collect()


def test_cycles_are_collected():
    context = libdc.Context()
    context.init()
    grad = np.zeros(4, np.float32)
    context.register_z3_param(1, [4], np.ones(4, np.float32), grad)
    context.me = context
    gone = weakref.ref(context), weakref.ref(grad)
    del context, grad
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


def test_a_stream_that_dies_in_its_own_call():
    device = libdc.Device()
    stream = libdc.Stream(device)
    ran, may_run = threading.Event(), threading.Event()

    def work(last_reference: libdc.Stream = stream) -> None:
        may_run.wait(10)
        ran.set()

    stream.call(work)
    del stream, work
    gc.collect()
    may_run.set()
    assert ran.wait(10)
    device.close()


def test_exceptions_of_queued_calls_surface():
    with libdc.Device() as device, libdc.Stream(device) as stream:
        stream.call(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stream.synchronize()
        stream.synchronize()


def test_events_order_streams():
    with libdc.Device() as device, libdc.Stream(device) as first, libdc.Stream(device) as second:
        order, go, event = [], threading.Event(), libdc.Event(device)
        assert event.query()
        first.call(lambda: (go.wait(600), order.append(1)))
        event.record(first)
        event.wait(second)
        second.call(lambda: order.append(2))
        assert not event.query()
        with pytest.raises(libdc.Error) as caught:
            event.wait(timeout=0.05)
        assert caught.value.status == libdc.Status.E_TIMEOUT
        go.set()
        second.synchronize(600)
        assert order == [1, 2] and event.query()


def test_blocked_calls_release_the_interpreter():
    """While one thread waits for a rank that is late, another goes on."""
    ticks = []

    def rank(comm: libdc.Comm) -> None:
        if comm.rank == 1:
            end = time.monotonic() + 0.3
            while time.monotonic() < end or len(ticks) < 50:  # else the other rank's deadline comes first
                ticks.append(None)
                time.sleep(0.001)
        comm.barrier()

    libdc.run.threads(2, rank, timeout=60)


def test_closing_while_another_thread_is_inside():
    """The handle lives until the running call is done."""
    inside, go, log = threading.Event(), threading.Event(), []

    class Slow(libdc.Collectives):
        def all_gather(self, send: memoryview, recv: memoryview, dtype: libdc.DType) -> None:
            recv[:] = bytes(send) * 2

        def barrier(self) -> None:
            inside.set()
            assert go.wait(60)
            log.append("done")

        def close(self) -> None:
            log.append("closed")

    comm = libdc.Comm.external(Slow(), 0, 2, timeout=60)
    thread = threading.Thread(target=comm.barrier)
    thread.start()
    assert inside.wait(60)
    comm.close()
    go.set()
    thread.join(60)
    assert not thread.is_alive() and log == ["done", "closed"]


def test_arrays_live_until_a_stream_has_read_them():
    with libdc.Device() as device, libdc.Stream(device) as stream, libdc.Context(device) as context:
        context.init()
        context.set_stream(stream)
        grad = np.zeros(1000, np.float32)
        context.register_z3_param(1, [1000], np.ones(1000, np.float32), grad)
        context.register_graph_z3(1, [1])
        go = threading.Event()
        stream.call(lambda: go.wait(600))
        context.start_backward(True)
        context.reduce_grad(np.full(1000, 3, np.float32), 1, 1)
        gc.collect()
        scribble = [np.full(1000, 9, np.float32) for _ in range(20)]
        go.set()
        context.end_backward(1)
        stream.synchronize()
        assert (grad == 3).all() and len(scribble) == 20


def test_tensors_live_until_both_copies_of_an_id_are_made():
    with libdc.Device() as device, libdc.Stream(device) as stream, libdc.Context(device) as context:
        context.init()
        context.set_stream(stream)
        context.register_graph_z3(1, [])
        go = threading.Event()
        stream.call(lambda: go.wait(600))
        tensors = [np.full(1000, value, np.float32) for value in (1, 2)]
        alive = [weakref.ref(tensor) for tensor in tensors]
        for tensor in tensors:
            context.offload_tensor(tensor, 1, 5)
        del tensor, tensors
        gc.collect()
        kept = all(reference() is not None for reference in alive)
        go.set()
        assert kept
        copy = context.wait_offload(None, 1, 5)
        stream.synchronize()
        assert (copy.numpy() == 2).all()


def test_what_threads_pin_at_once_stays(monkeypatch):
    """A query of the first pin lets another thread run, which pins to the same stream meanwhile."""
    class Thing:
        pass

    with libdc.Device() as device, libdc.Stream(device) as stream:
        first, second, passed = threading.Event(), threading.Event(), libdc.Event(device)
        stream.call(lambda: first.wait(600))
        stream.pin("done")
        stream.pin("done too")
        passed.record(stream)
        stream.call(lambda: second.wait(600))
        things = [Thing() for _ in range(3)]
        alive = [weakref.ref(thing) for thing in things]
        stream.pin(things[0])
        first.set()
        passed.wait()
        query, others = libdc.Event.query, [things[1]]

        def slow_query(event: libdc.Event) -> bool:
            if others:
                other = threading.Thread(target=stream.pin, args=(others.pop(),))
                other.start()
                other.join()
            return query(event)

        monkeypatch.setattr(libdc.Event, "query", slow_query)
        stream.pin(things[2])
        del things
        gc.collect()
        kept = [reference() is not None for reference in alive]
        second.set()
        assert kept == [True, True, True]


class Pages(libdc.Allocator):
    """Memory from anonymous maps, which are page-aligned."""

    def __init__(self) -> None:
        self.blocks: Dict[int, mmap.mmap] = {}
        self.most = 0
        self.closed = 0

    def alloc(self, size: int, align: int) -> int:
        block = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        assert address % align == 0
        self.blocks[address] = block
        self.most = max(self.most, sum(len(block) for block in self.blocks.values()))
        return address

    def free(self, address: int, size: int, align: int) -> None:
        assert len(self.blocks[address]) == size
        del self.blocks[address]

    def close(self) -> None:
        assert not self.blocks
        self.closed += 1


def test_a_devices_memory_may_be_the_callers() -> None:
    pages = Pages()
    context = libdc.Context(libdc.Device("cpu", allocator=pages))
    context.init()
    buffer = context.memory_alloc(100000, libdc.MemoryKind.DEVICE)
    written = buffer.tensor([100000], libdc.DType.UINT8).numpy().any()
    assert not written
    assert pages.most >= 100000
    del context
    assert not pages.closed  # the buffer keeps the device
    del buffer
    assert pages.closed == 1
    with pytest.raises(libdc.Error, match='must be "cpu"'):
        libdc.Device("none", allocator=pages)
    assert pages.closed == 1


def test_what_a_forked_child_makes_ends_in_it() -> None:
    """Its handles are destroyed, and a stream's end waits for what is queued. The inherited context is the parent's."""
    inherited = libdc.Context()
    inherited.init()
    child = os.fork()
    if not child:
        try:
            del inherited
            pages = Pages()
            context = libdc.Context(libdc.Device("cpu", allocator=pages))
            context.init()
            buffer = context.memory_alloc(100000)
            del context, buffer
            stream, done = libdc.Stream(libdc.Device()), []
            stream.call(lambda: (time.sleep(0.3), done.append(None)))
            stream.close()
            os._exit(0 if pages.closed == 1 and done else 3)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    inherited.get_memory_stats()


def test_the_end_waits_for_running_callbacks() -> None:
    text = """
import threading, time, libdc
begun = threading.Event()
def call():
    begun.set()
    time.sleep(0.3)
    print("done")
stream = libdc.Stream(libdc.Device())
stream.call(call)
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", text], text=True, capture_output=True, stdin=subprocess.DEVNULL,
                          timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("keeper", ["np", "libdc", "ctypes", "threading.local()", "itself"])
def test_what_is_kept_to_the_end_ends_in_silence(keeper: str) -> None:
    """Handles, tensors and capsules die while the interpreter takes its modules down, in any order."""
    text = f"""
import ctypes, threading, libdc, libdc.dlpack, libdc.optim.arrays, numpy as np
class Keeper: pass
itself = Keeper()
context = libdc.Context()
context.init()
buffer = context.memory_alloc(64)
view = buffer.tensor((16,), libdc.DType.FLOAT32)
optimizer = libdc.optim.arrays.AdamW()
optimizer.add_param((4,))
optimizer.step([np.ones(4, np.float32)], [np.ones(4, np.float32)])
keeper = {keeper}
keeper.me = keeper
keeper.things = [context, buffer, view, np.from_dlpack(view), view.__dlpack__(), optimizer, libdc.Comm.single(),
                 np.from_dlpack(optimizer.state(0, optimizer.state_names(0)[0])), libdc.Stream(libdc.Device())]
if keeper not in (itself, np, libdc, ctypes):
    threading.kept = keeper
"""
    done = subprocess.run([sys.executable, "-c", text], text=True, capture_output=True, stdin=subprocess.DEVNULL,
                          timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_thread_that_calls_back_too_late_is_held() -> None:
    """After the interpreter's modules went, a stream's thread comes to a call that is left: it must find its code.
    Objects in the list of codecs are freed last."""
    text = """
import codecs, ctypes, threading, libdc
from libdc._lib import ffi, lib
c = ctypes.CDLL(None)
semaphore = ctypes.create_string_buffer(64)
c.sem_init(semaphore, 0, 0)
wait, go = (ctypes.cast(thing, ctypes.c_void_p).value for thing in (c.sem_wait, semaphore))
class Late:
    def __del__(self, post=c.sem_post, sleep=c.usleep, semaphore=semaphore):
        post(semaphore)
        sleep(50000)
codecs.register(lambda name, late=Late(): None)
stream = threading.kept = libdc.Stream(libdc.Device())
lib.dc_stream_call(stream._handle, ffi.cast("dc_stream_fn", wait), ffi.cast("void *", go))
stream.call(int)
del ffi, lib, stream
"""
    done = subprocess.run([sys.executable, "-c", text], text=True, capture_output=True, stdin=subprocess.DEVNULL,
                          timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
