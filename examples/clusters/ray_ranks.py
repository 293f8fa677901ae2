"""Starts the ranks of a script on the machines of a Ray cluster: `python ray_ranks.py --nodes 2 -n 8 train.py ARGS…`.
An actor on each machine runs `libdc.run`. When a rank fails, its launcher ends, and so do the others.

SPDX-License-Identifier: Apache-2.0"""

from __future__ import annotations

import argparse
import secrets
import socket
import subprocess
import sys
from typing import List, Tuple

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class Node:
    """A machine with its launcher."""

    def choose_meeting(self) -> Tuple[str, int]:
        """This machine's address, and a port that is now free, as is the next one."""
        while True:
            with socket.socket() as first, socket.socket() as second:
                first.bind(("", 0))
                port = first.getsockname()[1]
                try:
                    second.bind(("", port + 1))
                except (OSError, OverflowError):
                    continue
                return ray.util.get_node_ip_address(), port

    def run(self, arguments: List[str], secret: str) -> int:
        """Runs `libdc.run`, and returns its exit code. The secret is not on the command line, which others can read."""
        command = [sys.executable, "-m", "libdc.run", "--secret-stdin", *arguments]
        launcher = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        launcher.stdin.write(f"{secret}\n")
        launcher.stdin.flush()  # it stays open, since its end would end the ranks
        return launcher.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("-n", "--ranks", type=int, default=8, help="ranks on each machine, with a CPU each")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    ray.init()
    group = placement_group([{"CPU": options.ranks}] * options.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    nodes = [ray.remote(Node).options(num_cpus=options.ranks, scheduling_strategy=PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=i)).remote() for i in range(options.nodes)]
    host, port = ray.get(nodes[0].choose_meeting.remote())
    secret = secrets.token_hex(32)
    meeting = ["--nodes", str(options.nodes), "--rendezvous", f"{host}:{port}"] if options.nodes > 1 else []
    codes = ray.get([node.run.remote(["-n", str(options.ranks), *meeting,
                                      *(["--node-rank", str(i)] if meeting else []), *options.script], secret)
                     for i, node in enumerate(nodes)])
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
