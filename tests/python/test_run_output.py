"""The launcher and the readers of its output: slow ones, those that have stopped, and lines of any length."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time

import pytest


def test_a_slow_reader_loses_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os\nfor i in range(3000): print(os.environ['RANK'] * 60)")
    process = subprocess.Popen([sys.executable, "-m", "libdc.run", "-n", "2", str(script)], stdout=subprocess.PIPE,
                               text=True, stdin=subprocess.DEVNULL)
    time.sleep(1)  # all pipes are full
    out = process.communicate(timeout=600)[0]
    assert process.returncode == 0 and sorted(out.splitlines()) == ["0" * 60] * 3000 + ["1" * 60] * 3000


@pytest.mark.parametrize("code", ["while True: print('x' * 1000)", "print('x' * 500000); print('done')"])
def test_a_reader_that_has_stopped_delays_no_signal(tmp_path, code):
    """While ranks run, and when they have ended. The pipe stays open, without a read."""
    script = tmp_path / "script.py"
    script.write_text(f"import os\nopen(f'{tmp_path}/{{os.environ[\"RANK\"]}}', 'w').close()\n{code}")
    reads, writes = os.pipe()
    process = subprocess.Popen([sys.executable, "-m", "libdc.run", "-n", "2", "--grace", "0.2", str(script)],
                               stdout=writes, stdin=subprocess.DEVNULL)
    os.close(writes)
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):
        time.sleep(0.01)
    time.sleep(0.3)
    process.terminate()
    assert process.wait(600) == 143
    os.close(reads)


@pytest.mark.parametrize("word", ["15\n", ""])
def test_a_starter_is_heard_while_the_reader_has_stopped(tmp_path, word):
    """Its signal, and the end of its connection."""
    script = tmp_path / "script.py"
    script.write_text(f"open('{tmp_path}/begun', 'w').close()\nwhile True: print('x' * 1000)")
    reads, writes = os.pipe()
    process = subprocess.Popen([sys.executable, "-m", "libdc.run", "--secret-stdin", "--grace", "0.2", str(script)],
                               stdout=writes, stdin=subprocess.PIPE, text=True)
    os.close(writes)
    process.stdin.write(secrets.token_hex(32) + "\n")
    process.stdin.flush()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    process.stdin.write(word)
    process.stdin.flush()
    if not word:
        process.stdin.close()
    assert process.wait(600) == 143
    os.close(reads)


def test_a_terminal_that_has_stopped_delays_no_signal(tmp_path):
    """Rank 0 has it for itself, and rank 1's lines are forwarded."""
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '0': time.sleep(3600)\n"
                      f"open('{tmp_path}/begun', 'w').close()\nwhile True: print('x' * 1000)")
    ours, theirs = os.openpty()
    process = subprocess.Popen([sys.executable, "-m", "libdc.run", "-n", "2", "--grace", "0.2", str(script)],
                               stdout=theirs, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    os.close(theirs)
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    process.terminate()
    assert process.wait(600) == 143
    os.close(ours)


def test_lines_of_two_outputs_in_one_pipe_stay_whole(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nfor i in range(3000):\n  for file in (sys.stdout, sys.stderr):\n"
                      "    file.write(os.environ['RANK'] * 100 + '\\n')")
    process = subprocess.Popen([sys.executable, "-m", "libdc.run", "-n", "2", str(script)], stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    time.sleep(1)  # all pipes are full
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and sorted(out.split()) == [b"0" * 100] * 6000 + [b"1" * 100] * 6000


def test_nohup(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('begun', flush=True)\nopen(sys.argv[1]).read()\nprint('finished')")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = subprocess.Popen([sys.executable, "-m", "libdc.run", str(script), str(fifo)], stdout=subprocess.PIPE,
                               text=True, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGHUP)
    fifo.write_text("")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and out == "finished\n"


def test_long_lines(tmp_path):
    """They are forwarded, also before their end."""
    script = tmp_path / "script.py"
    script.write_text("import os\nfor i in range(300): os.write(1, b'\\r' * 65536)\nprint('end')")
    done = subprocess.run([sys.executable, "-m", "libdc.run", str(script)], capture_output=True, timeout=600,
                          stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stdout == b"\r" * 65536 * 300 + b"end\n"


def test_output_that_does_not_block(tmp_path):
    """A pipe that another program has made so: what it takes later is written later."""
    script = tmp_path / "script.py"
    script.write_text("import os\nfor i in range(3000): print(os.environ['RANK'] * 60)")
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    process = subprocess.Popen([sys.executable, "-m", "libdc.run", "-n", "2", str(script)], stdout=writes,
                               stdin=subprocess.DEVNULL)
    os.close(writes)
    with os.fdopen(reads) as file:
        lines = sorted(file.read().splitlines())
    assert process.wait(600) == 0 and lines == ["0" * 60] * 3000 + ["1" * 60] * 3000
