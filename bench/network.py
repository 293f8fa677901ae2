"""Machines as network namespaces at a bridge, and links of a limited rate. It needs root, iproute2 and the kernel's
module sch_tbf."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import List

CONTROL = "cubic"  # Linux's own default
SEGMENTS = 3000  # bytes that TCP hands to a link at once, as it does on a network whose round trip takes 0.5 ms or more


def address(machine: int) -> str:
    return f"10.9.0.{machine + 1}"


def enter() -> None:
    """Starts the program again in a network and with mounts of its own, and ends as that one does. There it returns."""
    if "BENCH_NETWORK" not in os.environ:
        sys.exit(subprocess.run(["unshare", "-n", "-m", sys.executable, *sys.argv],
                                env={**os.environ, "BENCH_NETWORK": "own"}).returncode)


def connect(machines: int) -> None:
    """Namespaces n0, n1, … at a bridge. A round trip over it takes microseconds, so TCP would hand a link 64 KiB at
    once. Of eight machines each would have a queue of 0.9 MB then, in which acknowledgements of others wait too. The
    last connections of a collective would stand idle, as on no network of such rates."""
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "bridge0", "type", "bridge")
    _ip("link", "set", "bridge0", "up")
    for i in range(machines):
        _ip("netns", "add", f"n{i}")
        _ip("link", "add", f"port{i}", "type", "veth", "peer", "name", "veth0", "netns", f"n{i}")
        _ip("link", "set", f"port{i}", "master", "bridge0", "up")
        _ip("-n", f"n{i}", "address", "add", f"{address(i)}/24", "dev", "veth0")
        _ip("-n", f"n{i}", "link", "set", "veth0", "gso_max_size", f"{SEGMENTS}", "up")
        _ip("-n", f"n{i}", "link", "set", "lo", "up")
        subprocess.run([*of_machine(i), "sysctl", "-qw", "net.ipv4.tcp_tso_rtt_log=0"], check=True)
        _ip("-n", f"n{i}", "route", "replace", "10.9.0.0/24", "dev", "veth0", "proto", "kernel", "scope", "link", "src",
            address(i), "congctl", CONTROL)  # a namespace's sysctl refuses all but the machine's default


def limit(machines: int, rate: int) -> None:
    """Of what a machine sends, in Mbit/s."""
    for i in range(machines):
        subprocess.run(["tc", "-n", f"n{i}", "qdisc", "replace", "dev", "veth0", "root", "tbf", "rate", f"{rate}mbit",
                        "burst", "4kb", "latency", "400ms"], check=True)


def of_machine(machine: int) -> List[str]:
    """The words before a command that shall run on it."""
    return ["ip", "netns", "exec", f"n{machine}"]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdin=subprocess.DEVNULL)
