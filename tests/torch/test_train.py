"""The trainer as a user starts it: real processes, a tiny model, the files that it leaves behind."""
from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from safetensors.torch import load_file

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "gpt" / "train.py"
TINY = ["--model", "tiny", "--steps", "8", "--sample", "12", "--seed", "3"]


def command(*args: str) -> List[str]:
    return [sys.executable, "-m", "libdc.run", "-n", "2", str(TRAIN), *args]


def start(args: List[str], cwd: Path, **kwargs: Any) -> "subprocess.Popen[str]":
    changed = "LIBDC_TRAIN_STEPS", "LIBDC_TRAIN_RUNS", "RANK", "WORLD_SIZE"
    env = {k: v for k, v in os.environ.items() if k not in changed}
    env["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen(args, cwd=cwd, env={**env, **kwargs}, text=True, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def finish(process: "subprocess.Popen[str]", status: int = 0) -> str:
    try:
        out, err = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"still running after 600 s\n{out}\n{err}")
    assert process.returncode == status, f"status {process.returncode}\n{out}\n{err}"
    return out + err


def train(cwd: Path, *args: str, status: int = 0) -> str:
    return finish(start(command(*args), cwd), status)


def metrics(folder: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> List[float]:
    return [row["loss"] for row in metrics(folder)]


def same_weights(a: Path, b: Path) -> bool:
    x, y = (load_file(p / "step-000008.safetensors") for p in (a, b))
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 8 steps with a checkpoint in the middle."""
    cwd = tmp_path_factory.mktemp("train")
    out = train(cwd, *TINY, "--save-every", "4", "--out", "full")
    assert "held-out text" in out and "a sample of its writing" in out
    return cwd / "full"


def test_folder(run: Path) -> None:
    rows = metrics(run)
    assert [r["step"] for r in rows] == list(range(1, 9))
    assert rows[-1]["loss"] < rows[0]["loss"] < 6
    assert (run / "sample.txt").read_text().startswith("def ")
    assert {p.name for p in run.glob("step-*")} == {"step-000004.safetensors", "step-000008.safetensors"}
    assert not list(run.glob(".*.part"))


def test_wire_bytes_are_the_formula(run: Path) -> None:
    saved = load_file(run / "step-000008.safetensors")
    weights = {name: value for name, value in saved.items() if "/" not in name}
    linear_bias = ("qkv.bias", "proj.bias", "up.bias", "down.bias", "head.bias")
    whole = sum(t.numel() for t in weights.values())
    again = sum(t.numel() for n, t in weights.items() if not n.endswith(linear_bias) and "tokens" not in n
                and "positions" not in n)  # what a backward reads
    for row in metrics(run):
        assert row["reduce_wire_bytes"] == whole // 2 * 4
        assert row["gather_wire_bytes"] == (whole + again) // 2 * 4
        assert row["step"] < 3 or row["allocations"] == 0


def test_chart_is_a_png(run: Path) -> None:
    data = (run / "loss.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, body, size = 8, b"", (0, 0)
    while at < len(data):
        (length,) = struct.unpack(">I", data[at:at + 4])
        kind, part = data[at + 4:at + 8], data[at + 8:at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length:at + 12 + length])[0] == zlib.crc32(kind + part)
        if kind == b"IHDR":
            size = struct.unpack(">II", part[:8])
        body += part if kind == b"IDAT" else b""
        at += 12 + length
    assert len(zlib.decompress(body)) == size[1] * (1 + 3 * size[0])


def test_trace_has_the_lanes_of_every_rank(run: Path) -> None:
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    work = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 for e in work)
    names = {e["name"] for e in work}
    assert {"forward", "backward"} <= names and any("allgather" in n or "prefetch" in n for n in names)
    assert any("reduce" in n for n in names)


@pytest.mark.parametrize("stage", ["3", "2", "0"])
def test_resume_gives_the_same_bits(run: Path, stage: str) -> None:
    """Also at another stage: the checkpoint holds full weights and the whole optimizer state."""
    again = run.parent / f"resumed-{stage}"
    shutil.copytree(run, again)
    (again / "step-000008.safetensors").unlink()
    out = train(run.parent, "--resume", again.name, "--stage", stage, "--sample", "0")
    assert "goes on after step 4" in out
    assert losses(again) == losses(run)
    assert same_weights(again, run)


def test_two_machines_give_the_same_bits(run: Path, port: int) -> None:
    """As two launchers, whose ranks have no memory in common: TCP between them."""
    machines = [sys.executable, "-m", "libdc.run", "-n", "1", "--nodes", "2", "--rendezvous", f"localhost:{port}",
                "--secret-file", str(run.parent / "secret")]
    nodes = [start([*machines, "--node-rank", str(node), str(TRAIN), *TINY, "--out", "far"], run.parent)
             for node in range(2)]
    for node in nodes:
        finish(node)
    assert losses(run.parent / "far") == losses(run) and same_weights(run.parent / "far", run)


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(run: Path) -> None:
    cwd, folder = run.parent, run.parent / "stopped"
    process = start(command(*TINY, "--steps", "100000", "--warmup", "0", "--out", "stopped"), cwd)
    deadline = time.monotonic() + 600
    while not (folder / "metrics.jsonl").exists() or len(metrics(folder)) < 3:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert "stopped after step" in finish(process, 130)
    done = len(metrics(folder))
    assert (folder / f"step-{done:06d}.safetensors").exists() and not list(folder.glob(".*.part"))
    for name in ("loss.png", "trace.json"):
        assert (folder / name).stat().st_size > 0
    train(cwd, "--resume", "stopped", "--steps", str(done + 2), "--sample", "0")
    assert len(metrics(folder)) == done + 2


def test_compare_says_equal(tmp_path: Path) -> None:
    out = train(tmp_path, "--model", "tiny", "--compare", "--steps", "4", "--accumulate", "2")
    assert "have the same bits at every step" in out and "NO" not in out
    assert not (tmp_path / "runs").exists()


def test_one_process(tmp_path: Path) -> None:
    finish(start([sys.executable, str(TRAIN), *TINY, "--steps", "2", "--quiet", "--out", "one"], tmp_path))
    assert len(losses(tmp_path / "one")) == 2


def test_ranks_start_the_launcher_and_ci_shortens(tmp_path: Path) -> None:
    process = start([sys.executable, str(TRAIN), "--ranks", "2", "--model", "tiny", "--quiet", "--out", "r"], tmp_path,
                    LIBDC_TRAIN_STEPS="3")
    assert finish(process) == ""
    assert json.loads((tmp_path / "r" / "config.json").read_text())["ranks"] == 2
    assert len(losses(tmp_path / "r")) == 3


WRONG_ARGUMENTS = {
    "--stage 4": "argument --stage: invalid choice: 4",
    "--model huge": "argument --model: invalid choice: 'huge'",
    "--steps 0": "--steps = 0, must be >= 1",
    "--batch 6 --ranks 4": "--batch = 6, must be a multiple of ranks * accumulate = 4 * 1",
    "--ranks 0": "--ranks = 0, must be 1 to 64",
    "--eager --compile": "not allowed with argument --eager",
    "--compare --out x": "--compare writes no folder",
    "--resume missing": "--resume missing: not a run's folder",
    "--resume": "--resume: there is no run in",
}


def test_wrong_arguments(tmp_path: Path) -> None:
    """In one process, whose start takes most of the time."""
    script = tmp_path / "wrong.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(TRAIN.parent)!r})
import train
for line in {list(WRONG_ARGUMENTS)!r}:
    sys.argv = ["train.py", *line.split()]
    try:
        status = train.main()
    except SystemExit as end:
        status = end.code
    print("status", status, "end of", line, file=sys.stderr)
""")
    folder = tmp_path / "empty"
    folder.mkdir()
    out = finish(start([sys.executable, str(script)], folder))
    for line, text in WRONG_ARGUMENTS.items():
        said, out = out.split(f"end of {line}\n", 1)
        assert text in said and said.endswith("status 2 ") and "Traceback" not in said, said
    assert not list(folder.iterdir())


def test_wrong_arguments_under_the_launcher_are_said_once(run: Path) -> None:
    out = train(run.parent, "--batch", "3", status=2)
    assert out.count("must be a multiple of ranks * accumulate = 2 * 1") == 1
    assert "--out full: holds a run already" in train(run.parent, *TINY, "--out", "full", status=2)
