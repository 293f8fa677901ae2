"""The launcher: environment, output, exit codes, ranks that fail, die or will not end, and nothing left behind."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import time

import libdc.run
import pytest
from libdc._secret import environment_secret, make_secret, read_secret
from libdc.run.launcher import Launcher
from libdc.run.processes import StartError


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, seconds: float = 600) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def test_environment_output_and_arguments(launch):
    done = launch("import os, sys\nprint(*(os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', "
                  "'LOCAL_WORLD_SIZE', 'MASTER_ADDR')), os.environ['LIBDC_GROUP'], os.environ['MASTER_PORT'])\n"
                  "sys.stdout.write('no newline at the end')", n=3)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.replace("no newline at the end", "").splitlines())
    assert [line.split()[:5] for line in lines] == [[str(r), str(r), "3", "3", "127.0.0.1"] for r in range(3)]
    assert len({tuple(line.split()[5:]) for line in lines}) == 1 and done.stdout.count("no newline") == 3


def on_two_machines(port: int, script: str, options=()):
    """Two launchers of two ranks each, as two machines would have them."""
    command = [sys.executable, "-m", "libdc.run", "--nodes", "2", "--rendezvous", f"localhost:{port}", "-n", "2",
               "--secret-file", f"{script}.secret", *options]
    nodes = [subprocess.Popen([*command, "--node-rank", str(node), script], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for node in range(2)]
    return [(*node.communicate(timeout=600), node.returncode) for node in nodes]


def test_secret_file(tmp_path):
    path = tmp_path / "secret"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LIBDC_SECRET")}

    def launch_alone(*options: str, **more):
        command = [sys.executable, "-m", "libdc.run", "--nodes", "2", "--rendezvous", "localhost:9", *options]
        return subprocess.run([*command, "x.py"], text=True, capture_output=True, env=environment, **more)

    assert "several machines need a secret, or any machine could join" in launch_alone().stderr
    path.write_text("0123456789abcdef")
    path.chmod(0o644)
    done = launch_alone("--secret-file", str(path))
    assert done.returncode == 2 and "mode 0644 lets other users read the secret; must be 0600" in done.stderr
    path.chmod(0o600)
    for content, count in ((b"", 0), (b"short\n", 5), (b"x" * 1025, 1025), (b"\xff" * 16, 16), (b"a\0" * 8, 16)):
        path.write_bytes(content)
        done = launch_alone("--secret-file", str(path))
        assert done.returncode == 2 and f"{path}: the secret has {count} characters, must have 16" in done.stderr
    done = launch_alone("--secret-stdin", input="short\n")
    assert done.returncode == 2 and "standard input: the secret has 5 characters" in done.stderr
    path.unlink()
    assert make_secret(str(path)) and not make_secret(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(read_secret(str(path))) == 64
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]
    path.unlink()
    part = tmp_path / f"secret.{os.getpid()}.part"  # of a process with the same number, on another machine
    part.touch()
    assert make_secret(str(path)) and part.exists()


def test_a_secret_of_another_user(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    make_secret(str(path))
    if os.geteuid() == 0:
        os.chown(path, 4711, -1)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match=f"{path}: user {owner} owns the file and knows the secret"):
        read_secret(str(path))


def test_a_secret_s_file_that_is_gone_at_the_end(tmp_path):
    path = tmp_path / "secret"
    (tmp_path / "x.py").write_text(f"import os; os.unlink({str(path)!r})")
    done = subprocess.run([sys.executable, "-m", "libdc.run", "--nodes", "2", "--rendezvous", "localhost:9",
                           "--secret-file", str(path), str(tmp_path / "x.py")], text=True, capture_output=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_secrets_of_the_environment(tmp_path, monkeypatch):
    (tmp_path / "empty").touch(0o600)
    for name, value, text in (("LIBDC_SECRET_FILE", str(tmp_path / "empty"), "empty: the secret has 0 characters"),
                              ("LIBDC_SECRET", "short", "LIBDC_SECRET: the secret has 5 characters")):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=text):
            environment_secret()


def test_several_machines(tmp_path, port):
    script = tmp_path / "script.py"
    script.write_text("import os, libdc, numpy as np\ncomm = libdc.init_comm(timeout=600)\n"
                      "data = comm.all_reduce(np.full(3, comm.rank + 1.0))\nother = libdc.init_comm(timeout=600)\n"
                      "other.barrier()\n"
                      "print(comm.rank, comm.size, os.environ['LOCAL_RANK'], data[0], os.environ['LIBDC_TLS'])\n")
    first, second = on_two_machines(port, str(script), options=["--tls"])
    assert first[2] == second[2] == 0, (first, second)
    assert sorted(first[0].splitlines()) == ["0 4 0 10.0 1", "1 4 1 10.0 1"]
    assert sorted(second[0].splitlines()) == ["2 4 0 10.0 1", "3 4 1 10.0 1"]


def test_a_rank_that_fails_ends_the_other_machine_s(tmp_path, port):
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time, libdc\ncomm = libdc.init_comm(timeout=600)\ncomm.barrier()\n"
                      "if comm.rank == 3: sys.exit(7)\n"
                      "try: comm.barrier()\n"
                      "except libdc.Error:\n"
                      "  if comm.rank == 2: time.sleep(3600)  # its launcher is to see rank 3 first\n"
                      "  raise\n")
    first, second = on_two_machines(port, str(script))
    assert second[2] == 7 and first[2] == 1
    assert "rank 3 d" in first[1] and "while rank" in first[1]


@pytest.mark.parametrize("arguments, text", [
    (["--nodes", "2"], "--rendezvous: several machines need it"),
    (["--rendezvous", "a:1"], "one does not take it"),
    (["--nodes", "129", "-n", "8", "--rendezvous", "a:1"],
     "--nodes 129: must be in 1..128, since there may be 1024 ranks"),
    (["--nodes", "2", "--node-rank", "2", "--rendezvous", "a:1"], "--node-rank 2: must be in 0..1"),
    (["--nodes", "2", "--rendezvous", "a:70000"], "--rendezvous a:70000: must be HOST:PORT"),
])
def test_wrong_machines(arguments, text):
    done = subprocess.run([sys.executable, "-m", "libdc.run", *arguments, "x.py"], text=True, capture_output=True,
                          timeout=600)
    assert done.returncode == 2 and text in done.stderr


def test_a_wrong_wish_for_tls_starts_no_rank():
    """Machines that ssh reaches do not have this environment: their ranks would go unencrypted without a word."""
    done = subprocess.run([sys.executable, "-m", "libdc.run", "--hosts", "a,b", "x.py"], text=True, capture_output=True,
                          timeout=600, env={**os.environ, "LIBDC_TLS": "yes"})
    assert done.returncode == 2 and "LIBDC_TLS=yes: must be 0 or 1" in done.stderr


def test_modules_and_their_arguments():
    done = subprocess.run([sys.executable, "-m", "libdc.run", "-n", "2", "-m", "platform", "--terse"], text=True,
                          capture_output=True, timeout=600)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2


def test_lines_are_whole(launch):
    done = launch("import os\nfor i in range(500): print(os.environ['RANK'] * 60)", n=2)
    assert sorted(done.stdout.splitlines()) == ["0" * 60] * 500 + ["1" * 60] * 500


def test_a_failing_rank_ends_the_others(launch):
    done = launch("import os, sys, time\nprint(os.getpid(), flush=True)\n"
                  "if os.environ['RANK'] == '1': time.sleep(0.5); sys.exit(3)\ntime.sleep(3600)", n=3)
    assert done.returncode == 3
    assert "rank 1 (pid " in done.stderr and "failed with exit code 3" in done.stderr
    assert gone([int(pid) for pid in done.stdout.split()])


def test_ranks_that_fail_together_all_have_their_say(launch):
    done = launch("import libdc, numpy as np, os, sys, time\ncomm = libdc.init_comm(timeout=600)\n"
                  "pids = comm.all_gather(np.full(1, os.getpid(), np.int32), np.empty(2, np.int32))\n"
                  "if comm.rank == 1: sys.exit(2)\n"
                  "while ') Z' not in open(f'/proc/{pids[1]}/stat').read(): time.sleep(0.01)\n"
                  "time.sleep(0.5)\nprint('no such file', file=sys.stderr)\nsys.exit(2)")  # whichever is seen first
    assert done.returncode == 2 and "no such file" in done.stderr


def test_a_killed_rank_is_named(launch):
    done = launch("import os, signal, time\n"
                  "if os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(3600)")
    assert done.returncode == 137 and "rank 0 (pid " in done.stderr and "killed by SIGKILL" in done.stderr


def test_ranks_that_ignore_the_request_are_killed_with_their_children(launch):
    done = launch("import os, signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                  "print(os.getpid(), subprocess.Popen(['sleep', '3600']).pid, flush=True)\n"
                  "if os.environ['RANK'] == '1': time.sleep(0.3); sys.exit(4)\ntime.sleep(3600)", "--grace", "0.5")
    assert done.returncode == 4
    assert gone([int(pid) for pid in done.stdout.split()])


def test_a_dead_rank_is_an_error_for_those_who_wait(launch):
    """The library tells the others, before the launcher has to."""
    done = launch("import libdc, os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                  "try:\n"  # it may die while the other still makes the group
                  "  comm = libdc.init_comm(timeout=600)\n"
                  "  if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
                  "  comm.barrier()\n"
                  "except libdc.Error as error: print(error.name)", "--grace", "600")
    assert done.returncode == 137 and done.stdout == "DC_E_PEER_DEAD\n", done.stderr


@pytest.fixture
def sleepers(tmp_path):
    script = tmp_path / "sleep.py"
    script.write_text("import os, time\ntry: print(os.getpid(), flush=True); time.sleep(3600)\n"
                      "except KeyboardInterrupt: print('interrupted', flush=True); raise")
    process = subprocess.Popen([sys.executable, "-m", "libdc.run", "-n", "2", str(script)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    yield process, pids
    process.kill()
    process.communicate()
    assert gone(pids)


def test_interrupts_are_forwarded_once_and_waited_for(sleepers):
    process, pids = sleepers
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130 and out.count("interrupted") == 2 and gone(pids)
    assert "rank" not in err.replace("libdc.run", "")


def test_termination_is_forwarded(sleepers):
    process, pids = sleepers
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    assert process.returncode == 143 and gone(pids)


def test_ranks_end_with_a_killed_launcher(sleepers):
    process, pids = sleepers
    process.kill()
    assert gone(pids)


# ---- output that cannot be written

CHATTY = """import os, sys, time
print(os.getpid(), file=open({pids!r}, "a"))
print("rank", os.environ["RANK"], flush=True)
print("rank", os.environ["RANK"], file=sys.stderr, flush=True)
time.sleep(3600)
"""


@pytest.fixture
def chatty(tmp_path):
    """Two ranks that print and stay, started with these streams; when the launcher has ended, they must have, too."""
    pids, script = tmp_path / "pids", tmp_path / "chatty.py"
    script.write_text(CHATTY.format(pids=str(pids)))

    def run(shell: str):
        done = subprocess.run(["sh", "-c", f'"{sys.executable}" -m libdc.run -n 2 "{script}" {shell}'], text=True,
                              capture_output=True, timeout=600, stdin=subprocess.DEVNULL)
        assert gone([int(pid) for pid in pids.read_text().split()])
        return done

    return run


def test_a_full_disk_ends_the_ranks_with_an_error(chatty):
    done = chatty(">/dev/full")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "libdc.run: standard output can't be written: No space left on device; ending the ranks\n" in done.stderr
    assert chatty("2>/dev/full").returncode == 1
    assert chatty(">/dev/full 2>/dev/full").returncode == 1


def test_a_reader_that_goes_ends_the_ranks(chatty):
    done = chatty("| head -n 1 >/dev/null; exit 0")
    assert (done.returncode, done.stdout) == (0, "") and "Traceback" not in done.stderr and "libdc" not in done.stderr
    done = chatty("2>&1 | head -n 1 >/dev/null; exit 0")
    assert (done.stdout, done.stderr) == ("", "")
    done = chatty("2>&1 | (read -r a; read -r b; read -r c; read -r d); exit 0")  # all four lines: no later write fails
    assert (done.stdout, done.stderr) == ("", "")


def test_what_a_launcher_ends_with_when_nobody_reads(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('x' * 10, flush=True)\nimport time; time.sleep(3600)")
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-m", "libdc.run", "-n", "2", str(script)], stdout=writes, timeout=600,
                          stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_want_nothing(tmp_path, closed):
    """Nor does anything else get their numbers: the other one has its own lines alone."""
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('out', flush=True)\nprint('err', file=sys.stderr, flush=True)\n"
                      "sys.exit(3 if os.environ['RANK'] == '1' and len(sys.argv) > 1 else 0)")
    for arguments, code in ("", 0), ("fail", 3):
        done = subprocess.run(["sh", "-c", f'"{sys.executable}" -m libdc.run -n 2 "{script}" {arguments} {closed}'],
                              text=True, capture_output=True, timeout=600, stdin=subprocess.DEVNULL)
        assert done.returncode == code
        assert done.stdout == ("" if ">&- " in f"{closed} ".replace("2>&-", "") else "out\nout\n")
        assert done.stderr.count("err\n") == (0 if "2>&-" in closed else 2)
        assert ("failed with exit code 3" in done.stderr) == (code == 3 and "2>&-" not in closed)


def test_a_rank_that_cannot_be_started_is_named(launch):
    done = launch("import time\ntime.sleep(600)", n=20,
                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24)))
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(r"libdc.run: rank \d+ can't be started: \S+: Too many open files\n", done.stderr), done.stderr


def test_a_machine_without_127_0_0_1(monkeypatch):
    """Its ranks meet at ::1."""
    refused = ["127.0.0.1"]

    class Socket(socket.socket):
        def bind(self, address):
            if address[0] in refused:
                raise OSError(99, "Cannot assign requested address")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Socket)
    assert Launcher(1.0)._reserve_port(29) == ("::1", 29)
    refused.append("::1")
    with pytest.raises(StartError, match="no loopback address, 127.0.0.1 or ::1"):
        Launcher(1.0)._reserve_port(0)


# ---- command lines

@pytest.mark.parametrize("arguments", [["--", "x"], ["--", "--", "x"], ["a", "--", "b"], ["-n", "3", "--help"], []])
def test_arguments_of_the_script_are_its_own(tmp_path, arguments):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])")
    for before in ([], ["--"]):
        done = subprocess.run([sys.executable, "-m", "libdc.run", "-n", "1", *before, str(script), *arguments],
                              text=True, capture_output=True, timeout=600, stdin=subprocess.DEVNULL)
        assert done.stdout == f"{arguments}\n", done.stderr


@pytest.mark.parametrize("option, name, allowed, values", [
    ("-n", "-n", "1..64", ["x", "", "0", "-1", "65", "1.5", "1e1", "1_0", "+2", " 2", "9" * 30, "nan"]),
    ("--nodes", "--nodes", "1..1024", ["x", "", "0", "-2", "1025", "9" * 5000]),
    ("--node-rank", "--node-rank", "0..0", ["x", "", "1", "-1", "9" * 30]),
    ("--master-port", "--master-port", "0..65535", ["x", "", "-1", "65536", "80.0"]),
    ("--ports", "--ports", "FIRST-LAST, in 1..65535", ["x", "", "5", "5-3", "0-9", "1-65536", "-1-5", "1-2-3"]),
    ("--grace", "--grace", "a number of seconds in 0..1e9", ["x", "", "-1", "nan", "inf", "-inf", "1e10"]),
])
def test_a_bad_value_names_its_option(capsys, option, name, allowed, values):
    for value in values:
        with pytest.raises(SystemExit) as ended:
            libdc.run.main([f"{'--ranks' if option == '-n' else option}={value}", "x.py"])
        assert ended.value.code == 2
        assert f": {name} {value}: must be " in (said := capsys.readouterr().err) and allowed in said, said
    with pytest.raises(SystemExit):
        libdc.run.main([option])
    assert f"{option}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["-n", "0", "x.py"], ["-n", "65", "x.py"], ["-n", "2"], []])
def test_bad_command_lines(arguments):
    done = subprocess.run([sys.executable, "-m", "libdc.run", *arguments], text=True, capture_output=True, timeout=600)
    assert done.returncode == 2 and "usage:" in done.stderr
    assert "two ranks of train.py: python -m libdc.run -n 2 train.py" in done.stderr


def test_a_missing_script_fails():
    done = subprocess.run([sys.executable, "-m", "libdc.run", "-n", "2", "/nowhere.py"], text=True, capture_output=True,
                          timeout=600)
    assert done.returncode == 2 and "failed with exit code 2" in done.stderr


def test_torchrun_s_variables_make_a_group(port):
    script = "import libdc; comm = libdc.init_comm(timeout=600); comm.barrier(); print(comm.rank, comm.size)"
    base = {key: value for key, value in os.environ.items() if key != "LIBDC_GROUP"}
    base.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="0")
    ranks = [subprocess.Popen([sys.executable, "-c", script], text=True, env={**base, "RANK": str(r)},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for r in range(2)]
    outputs = [rank.communicate(timeout=600) for rank in ranks]
    assert [out for out, _ in outputs] == ["0 2\n", "1 2\n"], outputs
