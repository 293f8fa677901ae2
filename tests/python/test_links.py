"""Two machines, as network namespaces with a link: what two levels send over it, by the link's own counter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

RANK = """
import sys
import libdc
import numpy as np
rank, address, node = int(sys.argv[1]), sys.argv[2], sys.argv[3] or None
def received():
    with open("/proc/net/dev") as table:
        return sum(int(line.split(":")[1].split()[0]) for line in table if "veth" in line)
with libdc.Comm.tcp(address, "links", rank, 4, timeout=100, secret="a secret of the test", node=node) as comm:
    data = np.arange(1 << 20, dtype=np.float32) * (rank + 1)
    comm.barrier()
    before = received()
    comm.barrier()
    comm.all_reduce(data)
    comm.barrier()
    after = received()
    comm.barrier()
    assert data[3] == 30
    print(f"received {after - before}", flush=True)
"""

ROOT = ["-r"] if os.geteuid() != 0 else []  # a user namespace, in which this user may make others

NET = """
set -e
mount -t tmpfs none /run
ip netns add n0
ip netns add n1
ip link add veth0 netns n0 type veth peer name veth1 netns n1
for n in 0 1; do
  ip -n n$n address add 10.9.0.$((n + 1))/24 dev veth$n
  ip -n n$n link set veth$n up
  ip -n n$n link set lo up
done
for r in 0 1 2 3; do
  ip netns exec n$((r / 2)) "$0" "$1" $r 10.9.0.1:29871 "${2:+$2$r}" &
done
wait
"""


def test_two_levels_send_half_of_the_direct_exchange(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    share = 4 << 20  # a machine receives its ranks' halves of the sums, and of the means
    for node, expected in (("", 1 * share), ("alone", 2 * share)):
        done = subprocess.run(["unshare", *ROOT, "-n", "-m", "bash", "-c", NET, sys.executable, str(script), node],
                              text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=300)
        counts = [int(count) for count in re.findall(r"received (\d+)", done.stdout)]
        assert done.returncode == 0 and len(counts) == 4, done.stdout + done.stderr
        for count in counts:  # heads of packets and messages, handshakes, and what a busy machine sends again
            assert expected <= count <= expected * 1.5, (node, counts)
