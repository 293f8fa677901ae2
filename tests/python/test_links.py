"""Four machines of two ranks, as network namespaces at a bridge, with each launcher. A machine receives over its link
the payload that libdc counts, and stated heads. Sums have the same bits with each launcher."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
from test_hosts import NET, SSH, UNSHARE

HOSTS, EACH, RANKS, BYTES = [f"10.9.0.{n}" for n in range(1, 5)], 2, 8, 4 << 20  # bytes: of 1 Mi float32

# First in two levels, then by the direct exchange. An optimizer tells what its communicator received, as no other call
# does. Each of its eight matrices has an owner, which gathers the gradient's parts and sends the direction to all.
RANK = """
import hashlib, json, os, sys, time
from pathlib import Path
import libdc, numpy as np
from libdc.optim.arrays import Muon

def counters():
    (received, packets), = [line.split(":")[1].split()[:2] for line in open("/proc/net/dev") if "veth0" in line]
    names, values = [line.split() for line in open("/proc/net/snmp") if line[:4] == "Tcp:"]
    return np.array([float(received), float(packets), float(values[names.index("RetransSegs")]), time.monotonic()])

def measure(comm, *calls):  # a machine's link is read while all ranks wait
    comm.barrier()
    before = counters()
    comm.barrier()
    for call in calls:
        call()
    comm.barrier()
    seen = counters() - before
    comm.barrier()
    return list(seen)

def exchange(comm):
    own = np.random.default_rng(comm.rank).standard_normal(1 << 20, np.float32)
    part, total, every = np.array_split(own, comm.size)[comm.rank], own.copy(), np.empty_like(own)
    moved = measure(comm, lambda: comm.all_reduce(total), lambda: comm.all_gather(part, every))
    with Muon(comm=comm, steps=1) as optimizer:
        for _ in range(8):
            optimizer.add_param((256, 256), comm.rank << 13, 1 << 13)
        weights, grads = (np.array_split(array[:1 << 16].copy(), 8) for array in (total, own))
        before = optimizer.stats().wire_bytes
        stepped = measure(comm, lambda: optimizer.step(weights, grads))
        wire = optimizer.stats().wire_bytes - before
    return {"digest": hashlib.sha256(total.tobytes() + every.tobytes()).hexdigest(), "moved": moved,
            "stepped": stepped, "wire": wire}

launch = libdc.get_launch()
with libdc.init_comm(timeout=600) as comm:
    rank, size, seen = comm.rank, comm.size, [exchange(comm)]
if launch.uses_mpi:
    comm = libdc.Comm.mpi(600, node="")
else:
    host, _, port = launch.address.rpartition(":")
    comm = libdc.Comm.tcp(f"{host}:{int(port) + 1}", "direct", rank, size, 600, os.environ["LIBDC_SECRET"], node="")
with comm:
    seen.append(exchange(comm))
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen))
    comm.barrier()
if launch.launcher == "pmi":
    os._exit(0)  # without MPI_Finalize, in which Debian's MPICH over UCX's TCP often hangs, also without libdc
"""

# A machine has a name of its own, by which Open MPI tells machines apart.
ON_HOST = ("['ip', 'netns', 'exec', sys.argv[-2], 'unshare', '-u', 'sh', '-c', 'hostname \"$0\" && exec \"$@\"', "
           "sys.argv[-2]]")
# MPI's launchers give options, the machine, and a command in words. Their input stays open, which would keep the
# stand-in alive.
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec ssh -- "$host" "$*" < /dev/null
"""
# A launcher's command line, before the script.
LAUNCHERS = {
    "libdc.run": "{python} -m libdc.run --hosts {hosts} -n 2 {script}",
    "torchrun": "n=0; for host in {spaced}; do ssh -- $host \"exec {python} -m torch.distributed.run --nnodes 4 "
                "--node-rank $n --nproc-per-node 2 --master-addr 10.9.0.1 --master-port 29500 {script}\" & "
                "n=$((n + 1)); done; for job in $(jobs -p); do wait $job || exit $?; done",
    "mpirun.mpich": "ssh -- 10.9.0.1 'exec mpirun.mpich -launcher ssh -launcher-exec {agent} -iface veth0 "
                    "-hosts {hosts} -ppn 2 -n 8 {python} {script}'",
    "mpirun.openmpi": "ssh -- 10.9.0.1 'exec mpirun.openmpi --mca plm_rsh_agent {agent} --mca btl_tcp_if_include "
                      "10.9.0.0/24 --mca oob_tcp_if_include 10.9.0.0/24 --host {slots} -n 8 {python} {script}'",
}


def launch_ranks(launcher: str, folder: Path) -> List[Any]:
    """Returns what each rank tells."""
    for name, text in (("ssh", SSH.format(python=sys.executable, log=str(folder / "log"), prefix=ON_HOST)),
                       ("agent", AGENT), ("rank.py", RANK)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    command = LAUNCHERS[launcher].format(
        python=sys.executable, agent=folder / "agent", script=f"{folder}/rank.py {folder}", hosts=",".join(HOSTS),
        spaced=" ".join(HOSTS), slots=",".join(f"{host}:{EACH}" for host in HOSTS))
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment = {**kept, "PATH": f"{folder}{os.pathsep}{kept['PATH']}", "LIBDC_SECRET": "a secret of the test",
                   "LIBDC_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "UCX_TLS": "tcp,self"}  # MPICH's network; it would find the machines' common memory
    done = subprocess.run([*UNSHARE, "bash", "-c", NET, command], text=True, capture_output=True, env=environment,
                          stdin=subprocess.DEVNULL, timeout=600)
    files = [folder / f"{rank}.json" for rank in range(RANKS)]
    ended = done.returncode == 0 or launcher == "mpirun.mpich"  # which calls an end without MPI_Finalize a failure
    assert ended and all(file.exists() for file in files), done.stdout + done.stderr
    return [json.loads(file.read_text()) for file in files]


def digest() -> str:
    """Of the ranks' sum, added as a binary tree over ranks, and of their parts."""
    own = [np.random.default_rng(rank).standard_normal(BYTES // 4, np.float32) for rank in range(RANKS)]
    every = np.concatenate([np.array_split(own[rank], RANKS)[rank] for rank in range(RANKS)])
    while len(own) > 1:
        own = [low + high for low, high in zip(own[::2], own[1::2])]
    return hashlib.sha256(own[0].tobytes() + every.tobytes()).hexdigest()


def heads(packets: float, again: float, seconds: float, mpi_payload: float) -> float:
    """The most bytes that come to a machine beside a payload. A packet, of data or an acknowledgement, may be one that
    a card would cut into frames. mpi_payload: what MPI moves, 0 if TCP does."""
    pairs = EACH * (RANKS - EACH)  # of a rank of this machine and one of another
    ethernet_ip_tcp, longest_segment = 14 + 20 + 60, 1448
    calls = pairs * 8 * 488  # a dc__tcp_header for each of at most 8 collectives, with the barriers around them
    heartbeats = 2 * pairs * (seconds + 1) * 824  # a dc__tcp_control_msg a second, of the whole and of a column
    neighbours = 4096  # ARP, and what IPv6 asks when a link begins
    fragments = mpi_payload / 4096 * 64  # MPI's own heads
    return packets * ethernet_ip_tcp + again * longest_segment + calls + heartbeats + neighbours + fragments


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_machine_s_link_carries_the_payload(launcher: str, tmp_path: Path) -> None:
    if not (importlib.util.find_spec("torch") if launcher == "torchrun" else
            launcher == "libdc.run" or shutil.which(launcher)):
        pytest.skip(f"{launcher} is not here")
    ranks, by_mpi = launch_ranks(launcher, tmp_path), "mpirun" in launcher
    assert {seen["digest"] for rank in ranks for seen in rank} == {digest()}
    matrices = 2 * 8 * (256 * 256 * 4)  # gradients, and directions back
    for levels, direct in ranks:
        small = direct["wire"] - matrices * (RANKS - 1) // RANKS  # by which ranks compare a step, directly in both
        foreign = (direct["wire"] - small) * (RANKS - EACH) // (RANKS - 1)  # but for the other rank of this machine
        assert 0 <= small < 4096 and (levels["wire"] - small) * EACH == foreign, (levels, direct)
        payloads = {"moved": EACH * 3 * BYTES * (RANKS - EACH) // RANKS,  # an all-reduce is a reduction and a gather
                    "stepped": EACH * foreign}
        for way, seen in enumerate((levels, direct)):
            for name, payload in payloads.items():
                count, packets, _, seconds = seen[name]
                payload = payload if seen is direct else payload // EACH
                again = sum(rank[way][name][2] for rank in ranks[::EACH])
                least = 0 if by_mpi and seen is direct else payload  # MPI may pass parts on within a machine
                most = payload + heads(packets, again, seconds, payload if by_mpi else 0)
                assert least <= count <= most, (launcher, name, payload, most, seen)
