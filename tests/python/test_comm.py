"""Communicators from Python: collectives, groups, streams, failures that every rank learns of."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import libdc
import libdc.run
import numpy as np
import pytest
from libdc import Comm, Error, ReduceOp, Status


def test_collectives():
    def rank(comm: Comm) -> None:
        r = comm.rank
        counts = [1, 3, 0]
        recv = comm.all_gather(np.full(counts[r], r, np.int32), np.empty(4, np.int32), counts)
        assert recv.tolist() == [0, 1, 1, 1]
        part = comm.reduce_scatter(np.arange(6, dtype=np.float32), np.empty(2, np.float32), op=ReduceOp.SUM)
        assert part.tolist() == [6 * r, 6 * r + 3]
        ragged = comm.all_to_all(np.full(3 * r, r, np.int8), np.empty(3, np.int8), [r] * 3, [0, 1, 2])
        assert ragged.tolist() == [1, 2, 2]
        column = comm.all_to_all(np.arange(3.0) + 10 * r, np.empty(3))
        assert column.tolist() == [r, 10 + r, 20 + r]
        whole = comm.gather(np.array([r]), np.empty(3, np.int64) if r == 1 else None, root=1)
        assert r != 1 or whole.tolist() == [0, 1, 2]
        assert comm.scatter(whole, np.empty(r, np.int64), [0, 1, 2], root=1).tolist() == [[], [0], [1, 2]][r]
        assert comm.all_reduce(np.array([1.0 + r]), ReduceOp.MEAN).tolist() == [2]
        assert comm.broadcast(np.array([r, r]), root=2).tolist() == [2, 2]
        comm.set_checksums()
        comm.barrier()
        copy = comm.dup()
        assert (copy.rank, copy.size) == (r, 3)
        copy.barrier()
        part = comm.split(None if r == 1 else 7, key=-r)
        if part is None:
            assert r == 1
        else:
            assert (part.rank, part.size) == (1 - r // 2, 2) and part.shares_memory
            assert part.all_gather(np.array([r]), np.empty(2, np.int64)).tolist() == [2, 0]
        with pytest.raises(ValueError, match="color"):
            comm.split(-2)

    libdc.run.threads(3, rank, timeout=60)


@pytest.mark.parametrize("transport", ["processes", "tcp"])
def test_nothing_has_the_number_of_a_closed_stream(tmp_path, transport):
    """Where a program has closed its standard streams, what it prints would be written to a socket, or to weights."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, sys
for number in range(3):
    os.close(number)
import libdc
rank = int(os.environ["RANK"])
comm = libdc.init_comm(60) if {transport!r} == "processes" else libdc.Comm.tcp(
    "127.0.0.1:" + os.environ["MASTER_PORT"], "streams", rank, 2, 60)
taken = []
for number in range(3):
    try:
        taken.append(os.readlink(f"/proc/self/fd/{{number}}"))
    except OSError:
        pass
comm.barrier()
os._exit(len(taken))
""")
    done = subprocess.run([sys.executable, "-m", "libdc.run", "-n", "2", str(script)], text=True, capture_output=True,
                          timeout=600, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr


def test_groups_and_streams_keep_their_arrays():
    def rank(comm: Comm) -> None:
        with libdc.Device() as device, libdc.Stream(device) as stream:
            out = [np.empty(200, np.float32) for _ in range(3)]
            with comm.group(stream):
                for k in range(3):
                    comm.all_gather(np.full(100, 10 * k + comm.rank, np.float32), out[k], stream=stream)
            stream.synchronize(30)
            assert [part[0] for part in out] == [0, 10, 20] and [part[-1] for part in out] == [1, 11, 21]

    libdc.run.threads(2, rank, timeout=60)


def test_wrong_counts_are_refused():
    with pytest.raises(ValueError, match="counts has 2 entries, must have one for each of 1 rank$"):
        Comm.single().all_gather(np.zeros(1), np.zeros(1), [1, 0])
    with pytest.raises(ValueError, match="recv_counts has 2 entries, must have one for each of 1 rank$"):
        Comm.single().all_to_all(np.zeros(1), np.zeros(1), None, [1, 0])
    with pytest.raises(ValueError, match="timeout"):
        Comm.threads(2, timeout=0)
    with pytest.raises(Error) as caught:
        Comm.threads(65)
    assert caught.value.status == Status.E_INVALID


def test_a_late_rank_is_a_timeout():
    def rank(comm: Comm) -> None:
        if comm.rank == 0:
            with pytest.raises(Error) as caught:
                comm.barrier()
            assert caught.value.status == Status.E_TIMEOUT and "waited 0.3 s" in str(caught.value)

    libdc.run.threads(2, rank, timeout=0.3)


def test_different_calls_are_a_mismatch():
    def rank(comm: Comm) -> int:
        with pytest.raises(Error) as caught:
            comm.all_reduce(np.zeros(4 + comm.rank, np.float32))
        return caught.value.status

    assert libdc.run.threads(2, rank, timeout=60) == [Status.E_MISMATCH] * 2


def test_the_first_exception_ends_all_ranks():
    statuses = []

    def rank(comm: Comm) -> None:
        if comm.rank == 1:
            raise KeyError("the cause")
        try:
            comm.barrier()
        except Error as error:
            statuses.append(error.status)
            raise

    with pytest.raises(KeyError, match="the cause"):
        libdc.run.threads(3, rank)
    assert statuses == [Status.E_ABORTED] * 2


def test_ranks_end_where_a_thread_cannot_be_had(monkeypatch):
    start, started = threading.Thread.start, []

    def start_the_first(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_the_first)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        libdc.run.threads(2, Comm.barrier, timeout=60)
    assert not started[0].is_alive()


class Broken(libdc.Collectives):
    def all_gather(self, send, recv, dtype):
        raise ConnectionError("the cable is out")

    reduce_scatter = broadcast = barrier = all_gather


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_in_a_callback_is_an_error(asynchronous):
    with Comm.external(Broken(), 0, 2, timeout=10) as comm:
        with libdc.Device() as device, libdc.Stream(device) as stream:
            with pytest.raises(Error) as caught:
                comm.broadcast(np.zeros(4), stream=stream if asynchronous else None)
                stream.synchronize()
                comm.check()
    assert caught.value.status == Status.E_CALLBACK
    assert isinstance(caught.value.__cause__, (ConnectionError, TypeError))


@pytest.mark.parametrize("result", [5, False, "a request"])
def test_a_callback_that_returns_something_fails(result):
    class Returning(libdc.Collectives):
        def all_gather(self, send, recv, dtype):
            recv[:] = bytes(send) * 2
            return result

    with Comm.external(Returning(), 0, 2, timeout=10) as comm, pytest.raises(Error) as caught:
        comm.barrier()
    assert caught.value.status == Status.E_CALLBACK
    cause = caught.value.__cause__
    assert type(cause) is TypeError and str(cause) == f"Returning's method returned {result!r}, must return None"


def test_ranks_over_tcp(port):
    address = f"127.0.0.1:{port}"

    def rank(number):
        with Comm.tcp(address, "test", number, 3, timeout=60) as comm, comm.dup() as copy:
            data = np.full(1000, number + 1, np.float32)
            comm.all_reduce(data)
            part = np.full(5, number, np.int32)
            whole = copy.all_gather(part, np.empty(15, np.int32))
            assert (data == 6).all() and whole.tolist() == [0] * 5 + [1] * 5 + [2] * 5
            assert not comm.shares_memory and not comm.takes_devices
            return number

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(rank, range(3))) == [0, 1, 2]
    with pytest.raises(Error, match="must be HOST:PORT"):
        Comm.tcp("here", "test", 0, 1)


def test_errors_name_the_option_and_no_secret():
    for secret in (b"0123456789abcdef", "0123456789abcdef\0"):
        with pytest.raises(TypeError, match=r"^secret = a (str|bytes), must be a str without NUL$"):
            Comm.tcp("localhost:1", "g", 0, 2, secret=secret)
    with pytest.raises(ValueError, match="heartbeat = 0, must be > 0 seconds"):
        Comm.tcp("localhost:1", "g", 0, 2, heartbeat=0)


def test_tls_needs_a_secret(monkeypatch):
    monkeypatch.delenv("LIBDC_SECRET", raising=False)
    monkeypatch.delenv("LIBDC_SECRET_FILE", raising=False)
    for name, value in dict(RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="1",
                            LIBDC_TLS="1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(libdc.Error, match="options.tls = 1 needs options.secret"):
        libdc.init_comm()
    monkeypatch.setenv("LIBDC_TLS", "yes")
    with pytest.raises(RuntimeError, match="LIBDC_TLS=yes: must be 0 or 1"):
        libdc.init_comm()
    monkeypatch.setenv("LIBDC_TLS", "1")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(RuntimeError, match="LIBDC_TLS=1, but MPI moves the data"):
        libdc.init_comm()


def test_init_comm_needs_a_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert libdc.init_comm().size == 1
    for key in ("LIBDC_GROUP", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match="LIBDC_GROUP"):
        libdc.init_comm()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(RuntimeError, match="several machines"):
        libdc.init_comm()


def test_nccl_or_why_not():
    try:
        assert libdc.nccl_version() >= 21900
    except Error as error:
        assert error.status == Status.E_UNSUPPORTED and "NCCL: " in str(error)
    with libdc.Device() as device, pytest.raises(Error, match='device "cpu" is no card'):
        Comm.single().nccl(device)
