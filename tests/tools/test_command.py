"""The command line itself: help, errors, completion, the manual page, info, doctor, bench."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any, Dict, List

import libdc
import pytest
from libdc.run.options import MAX_RANKS

from conftest import TOOL, Run

COMMANDS = ["info", "doctor", "bench", "plan", "trace", "help", "completion", "man"]
ROOT = Path(__file__).resolve().parents[2]


def options_of(help: str) -> List[str]:
    return re.findall(r"^  (--[a-z]+)", help, re.M)


def test_help_names_every_command_and_option(dc: Run) -> None:
    text = dc("--help").stdout
    assert re.findall(r"^  ([a-z]+) {2,}", text, re.M) == COMMANDS
    assert [int(code) for code in re.findall(r"^  (\d) {2,}", text, re.M)] == [0, 1, 2, 3]
    assert dc("-h").stdout == text and dc(code=2).stdout == text
    for command in COMMANDS:
        help = dc(command, "--help").stdout
        assert help.startswith(f"libdc {command}: ") and f"usage: libdc {command} " in help
        assert len(max(help.splitlines(), key=len)) <= 120
        assert dc("help", command).stdout == help
    assert dc("help").stdout == text
    assert re.search(r"^  plan MODEL .*^  sim MODEL .*^  bench --machine FILE ", text, re.M | re.S)
    assert "(threads|processes)" in dc("bench", "--help").stdout
    assert dc("-V").stdout == dc("--version").stdout == f"libdc {libdc.__version__}\n"


@pytest.mark.parametrize("line, words", [
    (["plann"], ["COMMAND = plann", "info", "plan", "man"]),
    (["-V", "now"], ["now is one argument too many", "-V"]),
    (["--help", "info", "now"], ["info is one argument too many", "--help"]),
    (["info", "now"], ["libdc info", "now", "options only"]),
    (["info", "--jsno"], ["libdc info", "--jsno", "libdc info --help"]),
    (["info", "--json=1"], ["--json", "no value", "1"]),
    (["bench", "--ranks"], ["libdc bench", "--ranks needs a value"]),
    (["bench", "--ranks", "65"], ["--ranks = 65", "1 to 64"]),
    (["bench", "--ranks=two"], ["--ranks = two", "1 to 64"]),
    (["bench", "--ranks", "2x"], ["--ranks = 2x", "1 to 64"]),
    (["bench", "--bytes", "99999999999999999999"], ["--bytes", "1024 to 1073741824"]),
    (["bench", "--turns", "-1"], ["--turns = -1", "3 to 10001"]),
    (["bench", "--transport", "tcp"], ["--transport = tcp", "threads|processes"]),
    (["doctor", "--ranks", "0"], ["--ranks = 0", "1 to 8"]),
    (["plan"], ["libdc plan", "WHAT is missing", "layer", "libdc plan --help tells more"]),
    (["plan", "layers"], ["WHAT = layers", "layer"]),
    (["plan", "layer", "--model", "gpt"], ["--model = gpt", "bert-base|bert-large"]),
    (["plan", "layer", "--memory", "16,x"], ["--memory = 16,x", "1 to 4 numbers from 1 to 1048576"]),
    (["plan", "layer", "--memory", "1,2,3,4,5"], ["--memory = 1,2,3,4,5", "1 to 4 numbers"]),
    (["plan", "layer", "--seq", "0"], ["--seq = 0", "1 to 4 numbers"]),
    (["plan", "layer", "--seq="], ["--seq = ", "1 to 4 numbers"]),
    (["plan", "layer", "--heads", "7"], ["--heads = 7", "divide --hidden = 1024"]),
    (["plan", "layer", "--heads", "2048"], ["--heads = 2048", "divide --hidden = 1024"]),
    (["doctor", "--dump", "d", "--ranks", "3"], ["--ranks = 3 is for the tests", "--dump = d"]),
    (["plan", "layer", "--stage", "4"], ["--stage = 4", "0 to 3"]),
    (["plan", "layer", "--ranks", "0"], ["--ranks = 0", "1 to 2147483647"]),
    (["plan", "layer", "--optimizer", "lamb"], ["--optimizer = lamb", "adam|momentum|sgd"]),
    (["plan", "layer", "--layers", "2147483647", "--hidden", "131072", "--intermediate", "2147483647"], ["2^63"]),
    (["trace"], ["libdc trace", "FOLDER is missing"]),
    (["trace", "a", "b"], ["b is one argument too many", "FOLDER = a"]),
    (["trace", "a", "--format", "svg"], ["--format = svg", "perfetto|torch|torch-json"]),
    (["trace", "a", "--format", "torch"], ["--output is missing", "folder"]),
    (["trace", "a", "--json"], ["--output is missing"]),
    (["help", "plann"], ["libdc help", "COMMAND = plann", "|".join(COMMANDS)]),
    (["completion"], ["SHELL is missing", "bash|zsh|fish"]),
    (["completion", "tcsh"], ["SHELL = tcsh", "bash|zsh|fish"]),
])
def test_wrong_lines_name_argument_value_and_what_is_allowed(dc: Run, line: List[str], words: List[str]) -> None:
    done = dc(*line, code=2)
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


NUMBERS = {"bench": ["--ranks", "--bytes", "--turns"], "doctor": ["--ranks"],
           "plan": ["--layers", "--hidden", "--heads", "--intermediate", "--memory", "--seq", "--stage", "--ranks",
                    "--other"]}
BAD_NUMBERS = ["x", "", " 1", "+1", "1x", "0x1", "1.5", "1e3", "nan", "-1", "-99999999999999999999",
               "99999999999999999999", "9223372036854775808"]


def test_numbers_are_all_the_options_of_numbers(dc: Run) -> None:
    for command in COMMANDS:
        known = re.findall(r"^  (--[a-z]+) (?:N|LIST|GIB) ", dc(command, "--help").stdout, re.M)
        assert known == NUMBERS.get(command, [])


@pytest.mark.parametrize("command, option", [(command, option) for command in NUMBERS for option in NUMBERS[command]])
def test_a_bad_value_names_its_option(dc: Run, command: str, option: str) -> None:
    """Whatever else is missing or wrong on the line: an option's value is looked at first."""
    lists = ["1,x", "1,,2", "1,", ",1", "1,2,3,4,5"] if option in ("--memory", "--seq") else ["1,2"]
    for value in BAD_NUMBERS + lists:
        done = dc(command, f"{option}={value}", code=2)
        assert done.stdout == ""
        assert done.stderr.startswith(f"libdc {command}: {option} = {value}, must be "), done.stderr
    allowed = re.search(r"from (\d+) to (\d+)", done.stderr)
    assert allowed is not None
    least, most = map(int, allowed.groups())
    for bound in (least, most):
        assert dc(command, option, bound, "--help").stdout.startswith(f"libdc {command}: ")
    for beyond in (least - 1, most + 1):
        assert f"{option} = {beyond}, must be " in dc(command, option, beyond, "--help", code=2).stderr
    assert f"{option} needs a value, " in dc(command, option, code=2).stderr


def test_manual_page_has_what_help_has(dc: Run) -> None:
    page = dc("man").stdout
    plain = page.replace("\\-", "-")
    assert "\\fBlibdc --version\\fR | \\fB--help\\fR" in plain
    for command in COMMANDS:
        help = dc(command, "--help").stdout
        assert f".SS libdc {command}" in plain
        for line in re.findall(r"^  (--.*)$", help, re.M):
            option, text = re.split(r" {2,}|(?<=[A-Z]) (?=[a-z])", line, maxsplit=1)
            assert f"\\fB{option}\\fR\n{text}" in plain, line
    for code, text in re.findall(r"^  (\d) {2,}(.*)$", dc("--help").stdout, re.M):
        assert f"\\fB{code}\\fR\n{text}" in plain
    done = subprocess.run(["groff", "-man", "-ww", "-Tascii"], input=page, text=True, capture_output=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "FOLDER/rank-*.json" in done.stdout


def complete(shell: str, script: str, words: List[str]) -> List[str]:
    if shell == "bash":
        line = " ".join(f"'{word}'" for word in words)
        program = f"{script}\ncompopt() {{ :; }}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _libdc\n" \
                  'printf "%s\\n" "${COMPREPLY[@]}"'
        command = ["bash", "-c", program]
    else:
        command = ["fish", "--no-config", "-c", f"{script}\ncomplete -C '{' '.join(words)}'"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return [line.split("\t")[0] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_completion_completes(dc: Run, shell: str) -> None:
    script = dc("completion", shell).stdout
    assert set(COMMANDS) <= set(complete(shell, script, ["libdc", ""]))
    assert complete(shell, script, ["libdc", "tr"]) == ["trace"]
    assert complete(shell, script, ["libdc", "bench", "--transport", "p"]) == ["processes"]
    assert set(complete(shell, script, ["libdc", "completion", ""])) >= {"bash", "zsh", "fish"}
    for command in COMMANDS:
        options = set(options_of(dc(command, "--help").stdout)) - {"--help"}
        assert options <= set(complete(shell, script, ["libdc", command, "--"])), command


def test_completion_of_zsh_is_right(dc: Run) -> None:
    script = dc("completion", "zsh").stdout
    # Its functions are stood in for, so that what they are given can be looked at.
    program = "compdef() { :; }\n_describe() { print -l ${(P)2}; }\n_arguments() { print -l -- \"$@\"; }\n" + script
    for command in COMMANDS:
        line = f"\nwords=(libdc {command} ''); CURRENT=3; _libdc"
        done = subprocess.run(["zsh", "-f", "-c", program + line], text=True, capture_output=True, timeout=600)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        assert set(options_of(dc(command, "--help").stdout)) <= set(re.findall(r"^(--[a-z]+)\[", done.stdout, re.M))
    done = subprocess.run(["zsh", "-f", "-c", program + "\nwords=(libdc ''); CURRENT=2; _libdc"], text=True,
                          capture_output=True, timeout=600)
    assert re.findall(r"^(\w+):", done.stdout, re.M) == COMMANDS, done.stderr


def test_info(dc: Run) -> None:
    info = json.loads(dc("info", "--json").stdout)
    assert info["library"]["version"] == libdc.__version__
    assert os.path.samefile(info["library"]["path"], Path(libdc.library_dir()) / "libdc.so.0.1")
    assert info["library"]["simd"] in SIMD
    assert info["devices"]["cpu"]["found"] and info["communicators"]["processes"]["found"]
    assert info["devices"]["cpu solver"]["found"] and "cuda solver" not in info["devices"]
    assert not info["devices"]["cuda"]["found"] and "cuda" in info["devices"]["cuda"]["text"]
    assert info["limits"]["open files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert info["launcher"]["variables"]["text"] == "none" and info["launcher"]["ranks meet"] == "one rank alone"
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[3-4]"}
    launcher = json.loads(dc("info", "--json", environment=step).stdout)["launcher"]
    assert (launcher["rank"], launcher["ranks"], launcher["address"]) == (1, 2, "n3:61447"), launcher
    assert info["limits"]["ranks over TCP"] == MAX_RANKS
    text = dc("info").stdout
    for section, rows in info.items():
        assert re.search(rf"^{section}$", text, re.M)
        assert all(f"  {name} " in text for name in rows)


@pytest.mark.parametrize("environment, meeting", [
    ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "1"},
     "over shared memory"),
    ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[3-4]"},
     "over TCP"),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "over MPI, which is not here"),
    ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "the launcher does not say as what: set LIBDC_GROUP, "
     "or MASTER_ADDR and MASTER_PORT"),
    ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "the launcher does not say where: set MASTER_ADDR and "
     "MASTER_PORT")])
def test_info_says_how_ranks_meet_without_mpi(dc: Run, environment: Dict[str, str], meeting: str) -> None:
    """As init_comm() does it. Slurm's steps speak PMI here."""
    environment = {**environment, "PMI_RANK": "1", "LIBDC_MPI_LIB": "/no/such/library"}
    launcher = json.loads(dc("info", "--json", environment=environment).stdout)["launcher"]
    assert launcher["ranks meet"] == meeting, launcher


SIMD = {"plain C": "generic", "avx2": "avx2", "avx512": "avx512", "avx512bf16": "avx512bf16",
        "amx": "amx"}


def test_info_says_what_dc_cpu_leaves(dc: Run) -> None:
    best = list(SIMD).index(json.loads(dc("info", "--json").stdout)["library"]["simd"])
    for at, (shown, value) in enumerate(SIMD.items()):
        library = json.loads(dc("info", "--json", environment={"LIBDC_CPU": value}).stdout)["library"]
        assert library["simd"] == (shown if at < best else list(SIMD)[best])
    cpu = json.loads(dc("info", "--json", environment={"LIBDC_CPU": "sse2"}).stdout)["devices"]["cpu"]
    assert not cpu["found"] and "LIBDC_CPU = \"sse2\", must be generic" in cpu["text"]


def checks_of(text: str) -> Dict[str, Dict[str, Any]]:
    return {row["check"]: row for row in json.loads(text)["checks"]}


def test_doctor_is_well(dc: Run) -> None:
    done = dc("doctor", "--json")
    checks = checks_of(done.stdout)
    assert done.stderr == ""  # no progress in a pipe
    assert {row["state"] for row in checks.values()} == {"ok"}, checks
    assert all(row["seconds"] >= 0 for row in checks.values())
    for name in ("clock", "memory", "descriptors", "shared memory", "streams", "collectives, ranks as threads",
                 "collectives, ranks as processes", "ZeRO-3 step, ranks as processes", "PyTorch adapter"):
        assert name in checks


def test_doctor_on_four_ranks(dc: Run) -> None:
    text = dc("doctor", "--ranks", 4, environment={"LIBDC_PYTHON": "/no/such/python"}).stdout
    assert text.endswith("10 ok, 0 broken, 2 absent\n") and text.count("4 ranks, ") == 4, text


def test_doctor_names_the_broken_part(dc: Run) -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    done = dc("doctor", "--json", code=1, preexec_fn=few_files, environment={"LIBDC_PYTHON": "/no/such/python"})
    broken = {name: row for name, row in checks_of(done.stdout).items() if row["state"] == "BROKEN"}
    assert list(broken) == ["descriptors"] and "ulimit -n, now 40" in broken["descriptors"]["text"]

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = dc("doctor", "--json", code=1, preexec_fn=small_files, environment={"LIBDC_PYTHON": "/no/such/python"})
    broken = {name: row for name, row in checks_of(done.stdout).items() if row["state"] == "BROKEN"}
    assert "shared memory" in broken and "64 MiB" in broken["shared memory"]["text"], broken
    assert not any("threads" in name for name in broken)


@pytest.mark.parametrize("script, text", [
    ("echo 'ImportError: libdc.so is of another time'; exit 1", "ImportError: libdc.so is of another time"),
    ("kill -SEGV $$", r"{python} was killed by signal 11 \(.*\)")])  # it has been run, so nothing is absent
def test_doctor_finds_a_broken_package(dc: Run, tmp_path: Path, script: str, text: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    done = dc("doctor", code=1, environment={"LIBDC_PYTHON": str(python)})
    text = text.replace("{python}", str(python))
    assert re.search(rf"^BROKEN +Python package +import libdc: {text}$", done.stdout, re.M)
    assert done.stdout.endswith("10 ok, 2 broken, 0 absent\n")


def test_progress_is_for_terminals(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    done = subprocess.run([str(TOOL), "doctor"], stdout=subprocess.DEVNULL, stderr=slave, timeout=600,
                          env={**os.environ, "LIBDC_PYTHON": "/no/such/python"})
    os.close(slave)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert done.returncode == 0
    assert "... clock" in shown and "... ZeRO-3 step, ranks as processes" in shown and shown.endswith("\x1b[K")


@pytest.mark.parametrize("transport", ["threads", "processes"])
def test_bench(dc: Run, transport: str) -> None:
    line = ["bench", "--transport", transport, "--bytes", 65536, "--turns", 3]
    result = json.loads(dc(*line, "--json").stdout)
    assert (result["ranks"], result["transport"], result["turns"]) == (2, transport, 3)
    moved = [(row["name"], row["bytes"]) for row in result["rows"] if "bytes" in row]
    names = ["all-gather", "reduce-scatter", "all-reduce", "broadcast", "ZeRO-3 gather", "ZeRO-3 gradient"]
    assert moved == [(name, bytes) for bytes in (4096, 65536) for name in names]
    for row in result["rows"]:
        assert row["us"] > 0
        if "bytes" in row:
            assert row["of_memcpy"] == pytest.approx(row["memcpy_us"] / row["us"], rel=1e-6)
            assert row["gb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3, rel=1e-6)
    assert [row["name"] for row in result["rows"] if "bytes" not in row] == ["gathered already"]
    text = dc(*line, "--ranks", 1).stdout
    assert text.startswith(f"1 rank as {transport}\n") and len(text.splitlines()) == 2 + 13


def test_ranks_end_with_the_command() -> None:
    """They have its standard error, which ends when they do. Their work would take minutes."""
    process = subprocess.Popen([str(TOOL), "bench", "--turns", "10001"], stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(ranks := children.read_text().split()) < 2:
        assert process.poll() is None
    try:
        process.kill()
        assert process.communicate(timeout=60)[1] == b""
    except subprocess.TimeoutExpired:
        for rank in ranks:
            os.kill(int(rank), signal.SIGKILL)
        raise


# ---- what cannot be written

PRINTS = [["--help"], ["--version"], ["info"], ["info", "--json"], ["doctor"], ["doctor", "--json"],
          ["bench", "--transport", "threads", "--bytes", "1024", "--turns", "3"], ["bench", "--turns=3", "--json"],
          ["plan", "layer"], ["plan", "layer", "--json"], ["help"], ["completion", "bash"], ["completion", "zsh"],
          ["completion", "fish"], ["man"], ["man", "--help"]]


def unwritable(line: List[str], how: str) -> "subprocess.CompletedProcess[str]":
    """The command with a standard output that is full, closed, or a pipe without a reader."""
    if how == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reads, out = os.pipe()
        os.close(reads)

    def before() -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # else it ends by that, as a shell expects
        if how == "closed":
            os.close(1)

    try:
        return subprocess.run([str(TOOL), *line], stdout=out, stderr=subprocess.PIPE, text=True, preexec_fn=before,
                              stdin=subprocess.DEVNULL, timeout=600,
                              env={**os.environ, "LIBDC_PYTHON": "/no/such/python"})
    finally:
        os.close(out)


@pytest.mark.parametrize("how, reason", [("full", "No space left on device"), ("closed", "Bad file descriptor"),
                                         ("unread", "Broken pipe")])
def test_output_that_is_lost_is_an_error(how: str, reason: str) -> None:
    assert {line[0] for line in PRINTS} >= set(COMMANDS) - {"trace"}  # which test_dumps.py has dumps for
    for line in PRINTS if how == "full" else [["info"], ["plan", "layer", "--json"], ["man"]]:
        done = unwritable(line, how)
        assert (done.returncode, done.stderr) == (3, f"libdc: standard output can't be written: {reason}\n"), line


def test_a_reader_that_has_seen_enough_ends_it(dc: Run) -> None:
    done = subprocess.run(["sh", "-c", '"$0" man | head -n 1', str(TOOL)], text=True, capture_output=True, timeout=600)
    assert done.stdout.startswith(".TH LIBDC 1") and done.stderr == ""


def test_no_file_gets_a_closed_streams_number(dc: Run) -> None:
    """Shared memory and libraries are opened while libdc info prints; none of them may be standard output or error."""
    def closed() -> None:
        for fd in (0, 1, 2):
            os.close(fd)

    for line in (["info"], ["doctor"]):
        done = subprocess.run([str(TOOL), *line], preexec_fn=closed, timeout=600, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              env={**os.environ, "LIBDC_PYTHON": "/no/such/python"})
        assert done.returncode == 3


def test_readme_and_the_manual_agree_on_the_command(dc: Run) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in re.findall(r"^\.venv/bin/libdc (\w+)", text, re.M):
        assert command in COMMANDS
