"""libdc.run --hosts: launchers that ssh starts on several machines. Here a stand-in for ssh runs the command on this
one. The end of one machine's launcher ends all, and the secret is on no command line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import libdc.run
import pytest

# It notes its arguments and its number, and hands its input on: when it dies, that input ends, as with sshd.
SSH = """#!{python} -S
import os, subprocess, sys
with open({log!r}, "a") as file:
    file.write(repr([os.getpid(), *sys.argv[1:]]) + "\\n")
child = subprocess.Popen([*{prefix}, "sh", "-c", sys.argv[-1]], stdin=subprocess.PIPE, start_new_session=True)
if os.fork() == 0:
    parent = os.getppid()
    while os.getppid() == parent:
        data = os.read(0, 4096)
        if not data:
            break
        child.stdin.write(data)
        child.stdin.flush()
    os._exit(0)
child.stdin.close()
code = child.wait()
sys.exit(code if code >= 0 else 255)
"""
RANK = """
import os, libdc, numpy as np
comm = libdc.init_comm(timeout=600)
total = comm.all_reduce(np.full(1, comm.rank + 1.0))[0]
print(comm.rank, comm.size, total, os.environ["LOCAL_RANK"], flush=True)
"""
SLEEP = RANK + "import time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(3600)\n"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: List[int]) -> None:
    end = time.monotonic() + 600
    while any(map(is_alive, pids)):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a script's text by --hosts with two machines of two ranks."""
    ssh, log, script = tmp_path / "ssh", tmp_path / "log", tmp_path / "script.py"
    ssh.write_text(SSH.format(python=sys.executable, log=str(log), prefix="[]"))
    ssh.chmod(0o755)
    started = []

    def run(text: str, *options: str) -> "subprocess.Popen[str]":
        script.write_text(text)
        environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        started.append(subprocess.Popen([sys.executable, "-m", "libdc.run", "--hosts", "127.0.0.1,localhost", "-n", "2",
                                         *options, str(script)], text=True, stdin=subprocess.DEVNULL, env=environment,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def logged(tmp_path: Path) -> List[List[Any]]:
    return [eval(line) for line in (tmp_path / "log").read_text().splitlines()]


def read_pids(process: "subprocess.Popen[str]") -> List[int]:
    assert process.stdout is not None
    pids: List[int] = []
    while len(pids) < 4:
        match = re.search(r"pid (\d+)", process.stdout.readline())
        pids += [int(match[1])] if match else []
    return pids


def test_ranks_of_two_hosts_meet(start: Callable[..., Any], tmp_path: Path) -> None:
    process = start(RANK + "print(os.environ['LIBDC_SECRET'], os.getcwd())\n")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    lines = sorted(out.splitlines())
    assert [line for line in lines if " 4 " in line] == [
        "127.0.0.1: 0 4 10.0 0", "127.0.0.1: 1 4 10.0 1", "localhost: 2 4 10.0 0", "localhost: 3 4 10.0 1"]
    others = {tuple(line.split()[1:]) for line in lines if " 4 " not in line}
    assert len(others) == 1  # one secret, and the folder of the starter
    (secret, folder), = others
    assert len(secret) == 64 and folder == str(tmp_path)
    assert len(logged(tmp_path)) == 2 and not any(secret in str(words) for words in logged(tmp_path))


def test_a_rank_that_fails_ends_all(start: Callable[..., Any]) -> None:
    process = start(RANK + "import sys, time\nif comm.rank == 3: sys.exit(7)\ncomm.barrier()\n")
    out, err = process.communicate(timeout=600)
    assert process.returncode in (1, 7), err  # of the rank that went, or of one that missed it
    assert re.search(r"localhost: libdc.run: rank 3 \(pid \d+\) failed with exit code 7; ending the others", err), err
    assert re.search(r"libdc.run: host \S+ \(pid \d+\) failed with exit code [17]; ending the others", err), err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all(start: Callable[..., Any], number: int) -> None:
    process = start(SLEEP)
    pids = read_pids(process)
    process.send_signal(number)
    process.communicate(timeout=600)
    assert process.returncode == 128 + number
    wait_until_gone(pids)


@pytest.mark.parametrize("victim", ["ssh", "starter"])
def test_a_host_or_a_starter_that_dies_ends_all(start: Callable[..., Any], tmp_path: Path, victim: str) -> None:
    process = start(SLEEP)
    pids = read_pids(process)
    if victim == "ssh":
        os.kill(logged(tmp_path)[1][0], signal.SIGKILL)
        _, err = process.communicate(timeout=600)
        assert process.returncode == 137 and "was killed by SIGKILL; ending the others" in err
    else:
        process.kill()
    wait_until_gone(pids)


def test_a_host_that_cannot_be_reached(start: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\necho ssh: no route to $8 >&2\nexit 255\n")
    process = start(RANK)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 255 and "localhost: ssh: no route" in err and "failed with exit code 255" in err


@pytest.mark.parametrize("options, text", [
    (["--hosts", "a,,b"], "--hosts a,,b: must be names with commas between"),
    (["--hosts", "a,-oProxyCommand=x"], "none of which begins with -"),
    (["--hosts=-a"], "none of which begins with -"),
    (["--hosts", "a,b", "--nodes", "2"], "--nodes: goes not with --hosts"),
    (["--hosts", "a,b", "--secret-file", "f"], "--secret-file: goes not with --hosts"),
    (["--hosts", ",".join(["a"] * 129), "-n", "8"], "machines of --hosts: 129: must be in 1..128"),
    (["--hosts", "a", "--rendezvous", "a:1"], "--rendezvous: several machines need it"),
])
def test_wrong_hosts(capsys: pytest.CaptureFixture[str], options: List[str], text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        libdc.run.main([*options, "x.py"])
    assert ended.value.code == 2 and text in capsys.readouterr().err


# Machines at a bridge, for a command. Without exec bash is the first process, which takes in what a launcher leaves.
NET = """
set -e
mount -t tmpfs none /run
ip link add bridge0 type bridge
ip link set bridge0 up
for n in 1 2 3 4; do
  ip netns add 10.9.0.$n
  ip link add port$n type veth peer name veth0 netns 10.9.0.$n
  ip link set port$n master bridge0 up
  ip -n 10.9.0.$n address add 10.9.0.$n/24 dev veth0
  ip -n 10.9.0.$n link set veth0 up
  ip -n 10.9.0.$n link set lo up
done
bash -c "$0" || exit $?
"""
ROOT = ["-r"] if os.geteuid() != 0 else []  # a user namespace, in which this user may make others
UNSHARE = ["unshare", *ROOT, "-n", "-m", "-p", "-f", "--mount-proc", "--kill-child"]  # all processes end with it


def test_hosts_in_network_namespaces(tmp_path: Path) -> None:
    ssh, script = tmp_path / "ssh", tmp_path / "script.py"
    ssh.write_text(SSH.format(python=sys.executable, log=str(tmp_path / "log"),
                              prefix="['ip', 'netns', 'exec', sys.argv[-2].split('@')[-1]]"))
    ssh.chmod(0o755)
    script.write_text(RANK)
    command = f"{sys.executable} -m libdc.run --hosts root@10.9.0.1,10.9.0.2 -n 2 --interface 10.9.0.0/24 {script}"
    done = subprocess.run([*UNSHARE, "bash", "-c", NET, command], text=True, capture_output=True,
                          stdin=subprocess.DEVNULL, timeout=600,
                          env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["10.9.0.2: 2 4 10.0 0", "10.9.0.2: 3 4 10.0 1",
                                                "root@10.9.0.1: 0 4 10.0 0", "root@10.9.0.1: 1 4 10.0 1"]
