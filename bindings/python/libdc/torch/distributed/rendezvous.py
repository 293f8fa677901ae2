"""How the ranks of a process group reach each other: shared memory on one machine, TCP otherwise."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
from typing import Any, Callable, List, Optional, Sequence

import libdc
import torch.distributed as dist

from ..._secret import environment_secret, environment_tls
from ...launch import environment_ports

_MAX_LOCAL = 64  # the most ranks in shared memory
_PAIR_HEAP_BYTES = 1 << 24  # a pair needs only staging memory


class Rendezvous:
    """The ranks' places, which they exchange through the store."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        if size == 1:
            return
        store.set(f"place/{rank}", f"{_machine()} {_address()} {os.getpid()}")
        if rank == 0:
            plan = {"name": secrets.token_hex(16), "secret": secrets.token_hex(32),
                    "places": [self._place_of(r) for r in range(size)]}
            store.set("plan", json.dumps(plan))
        self._wait_for("plan", 0)
        plan = json.loads(store.get("plan"))
        self._name, self._places = plan["name"], [tuple(place.split()) for place in plan["places"]]
        self._outer, self.store = store, dist.PrefixStore(self._name, store)
        self._secret: str = environment_secret() or plan["secret"]

    def _place_of(self, rank: int) -> str:
        key = f"place/{rank}"
        self._wait_for(key, rank)
        return str(self.store.get(key).decode())

    def _wait_for(self, key: str, rank: int) -> None:
        try:
            self.store.wait([key], self.timeout)
        except RuntimeError as error:
            if "timeout" not in str(error).lower():
                raise
            raise dist.DistStoreError(f"libdc: rank {self.rank} waited {self.timeout.total_seconds():g} s for rank "
                                      f"{rank} of {self.size} in the store: it has not come") from error

    def comm(self) -> libdc.Comm:
        """A communicator of all ranks; blocks until they have come. Later groups may use the same store, so no rank
        returns before the plan is deleted."""
        if self.size == 1:
            return libdc.Comm.single()
        try:
            comm = self._meet("all", range(self.size), 0)
        finally:
            with contextlib.suppress(RuntimeError):  # the store has no deletion, and then serves one group
                self._outer.delete_key(f"place/{self.rank}")
                if self.rank == 0:
                    self._outer.delete_key("plan")
        comm.barrier()
        return comm

    def has_ended(self, rank: int) -> bool:
        """Whether a rank of this machine has ended. False for ranks of other machines, about which nothing is known."""
        machine, _, process = self._places[rank]
        return bool(machine == self._places[self.rank][0]) and not _is_running(process)

    def pair(self, what: str, first: int, second: int) -> libdc.Comm:
        """A communicator of two ranks, one of which is this one. what: a name that no other pair of these two has."""
        return self._meet(f"{what}.{first}.{second}", (first, second), _PAIR_HEAP_BYTES)

    def _meet(self, what: str, ranks: Sequence[int], heap_bytes: int) -> libdc.Comm:
        rank, size, seconds = list(ranks).index(self.rank), len(ranks), self.timeout.total_seconds()
        name = f"{self._name}.{what}"
        if size <= _MAX_LOCAL and len({self._places[r][0] for r in ranks}) == 1:
            return libdc.Comm.processes(name, rank, size, seconds, heap_bytes)
        host = self._places[ranks[0]][1]
        key = f"port/{what}"
        if rank == 0:
            self.store.set(key, str(_free_port(host)))
        if not poll(lambda: self.store.check([key]), self.timeout):  # get() would wait up to the store's own timeout
            raise dist.DistStoreError(f"libdc: rank {self.rank} waited {seconds:g} s for rank {ranks[0]} of "
                                      f"{self.size} to tell in the store where it listens")
        port = int(self.store.get(key))
        return libdc.Comm.tcp(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", name, rank, size, seconds,
                              self._secret, os.environ.get("LIBDC_INTERFACE") or None, environment_ports(),
                              tls=environment_tls())


def poll(test: Callable[[], Any], timeout: datetime.timedelta) -> Optional[Any]:
    """Calls test() until its result is true, and returns that result; None after the timeout. A store's own wait()
    would block other threads' use of the store."""
    import time

    deadline, pause = time.monotonic() + timeout.total_seconds(), 0.0001
    while time.monotonic() < deadline:
        found = test()
        if found:
            return found
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    return None


def _machine() -> str:
    """A name that processes have in common if they can share memory: the same running kernel, network namespace and
    process namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return ":".join([boot, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid"))])


def _is_running(process: str) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        with open(f"/proc/{process}/stat", encoding="latin-1") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _address() -> str:
    """This machine's address on the way to the store's machine, at which others can reach it."""
    host, port = os.environ.get("MASTER_ADDR") or socket.gethostname(), int(os.environ.get("MASTER_PORT") or 1)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _free_port(host: str) -> int:
    """A free port, of LIBDC_PORTS if that is set."""
    first, last = environment_ports()
    candidates: List[int] = list(range(first, last + 1)) if first else [0]
    for port in candidates:
        try:
            with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                return int(probe.getsockname()[1])
        except OSError:
            continue
    raise RuntimeError(f"libdc: LIBDC_PORTS={first}-{last} has no free port at {host}")
