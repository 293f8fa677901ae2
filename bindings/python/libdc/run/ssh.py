"""Launchers of other machines, started by ssh."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
from typing import List

from .._secret import check_secret

_FIRST_PORT, _PORTS = 20000, 12000  # below Linux's ephemeral ports


def choose_meeting(hosts: List[str]) -> str:
    """An address on the first machine, with a random port: only that machine could tell whether it is free."""
    host = hosts[0].rpartition("@")[2]
    return f"{host}:{_FIRST_PORT + secrets.randbelow(_PORTS)}"


def read_secret_line() -> str:
    """Reads the first line of standard input. Later lines are signals, and are left there."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise ValueError("standard input ended before the secret")
        line += byte
    return check_secret("standard input", line.decode("latin-1").strip())


def ssh_command(options: argparse.Namespace, node: int) -> List[str]:
    """The command that runs this launcher on a machine, in the same folder and with the same Python. A machine may
    vanish silently, so ssh probes it every 5 s, and ends if it has not answered for 15 s."""
    launcher = [sys.executable, "-m", "libdc.run", "--secret-stdin", "-n", str(options.ranks), "--grace",
                str(options.grace)]
    if len(options.hosts) > 1:
        host, port = options.rendezvous
        meeting = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        launcher += ["--nodes", str(len(options.hosts)), "--node-rank", str(node), "--rendezvous", meeting]
    for name, value in (("--interface", options.interface), ("--ports", options.ports)):
        launcher += [name, value] if value else []
    launcher += ["--tls"] if options.tls else []
    launcher += [*(["-m"] if options.module else []), "--", options.script, *options.args]
    return ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "--",
            options.hosts[node], f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(launcher)}"]
