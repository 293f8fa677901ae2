"""Diagnoses from the flight recorders of groups of processes that really failed, and the dumps in other tools."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import libdc
import numpy as np
import pytest
from libdc._lib import lib

from conftest import TOOL, Run

Groups = Callable[[str, int], Path]


def entries(folder: Path, rank: int) -> List[Dict[str, Any]]:
    return json.loads((folder / f"rank-{rank}.json").read_text())["entries"]


# ---- the dumps


def test_dump_of_a_healthy_rank(groups: Groups) -> None:
    dump = json.loads((groups("well", 2) / "rank-1.json").read_text())
    assert (dump["format"], dump["version"], dump["rank"], dump["world"]) == ("libdc flight recorder", 1, 1, 2)
    assert (dump["status"], dump["error"], dump["dropped"], dump["transport"]) == ("DC_OK", "", 0, "local")
    rows = dump["entries"]
    assert [row["n"] for row in rows] == list(range(1, dump["recorded"] + 1))
    assert all(row["state"] == "done" for row in rows)
    assert all(row["queued_ns"] <= row["begin_ns"] <= row["end_ns"] <= dump["time_ns"] for row in rows)
    for group in ("gather", "reduce"):
        seqs = [row["seq"] for row in rows if row["group"] == group]
        assert seqs == list(range(1, len(seqs) + 1))
    gathers = [row for row in rows if row["op"] == "allgather_param"]
    assert {(row["id"], row["bytes"], row["moved"], row["dtype"], row["stream"]) for row in gathers} == \
        {(7, 48, 24, "float32", "gather")}
    assert {"init", "register_graph", "wait_allgather", "release_param", "reduce_grad", "end_backward"} <= \
        {row["op"] for row in rows}


def test_no_half_written_files(groups: Groups) -> None:
    for how in ("well", "operation", "late"):
        names = {path.name for path in groups(how, 3).iterdir()}
        assert names == {"rank-0.json", "rank-1.json", "rank-2.json"}


# ---- the diagnosis

CASES = [
    ("operation", "operation", [1], r"^rank 1 called prefetch_params_fused of parameter 7 in graph number 0 \(48 "
     r"bytes, float32\) where ranks? 0.* called allgather_param of parameter 7.*: collective 8 of the gathers$"),
    ("parameter", "operation", [1],
     r"^rank 1 called allgather_param of parameter 8 \(head\) .* where ranks? 0.* of parameter 7 in "),
    ("reduction", "operation", [1], r"^rank 1 called reduce_grad of parameter 8 .* where ranks? 0.* called "
     r"reduce_grad of parameter 7 .*: collective 6 of the reductions$"),
    ("late", "late", [1], r"^rank 1 never came to collective 8 of the gathers, allgather_param of parameter 7 .*, in "
     r"which ranks? 0.* waited (9|\d\d)\.\d s; the last that rank 1 did was end_backward, "
     r"(9|\d\d)\.\d s before they gave up$"),
    ("dead", "died", [1], r"^rank 1 died; the others say: .*rank 1"),
    ("elsewhere", "died", [1], r"^rank 1 died; the others say: .*barrier"),
    ("at the end", "died", [1], r"^rank 1 died; the others say: .*barrier"),
    ("stopped", "missing", [1], r"^rank 1 left no dump: .*; the others say: .*rank 1"),
    ("init", "error", [], r"^all \d ranks did the same 1 collective, and say: dc_init: initial_reduce_bucket_size = "
     r"100[01] on rank \d, but 100[01] on rank \d"),
]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how, kind, culprits, sentence", CASES, ids=[case[0] for case in CASES])
def test_doctor_says_who_did_what(dc: Run, groups: Groups, how: str, kind: str, culprits: List[int], sentence: str,
                                  world: int) -> None:
    folder = groups(how, world)
    diagnosis = json.loads(dc("doctor", "--dump", folder, "--json", code=1).stdout)
    if world == 2 and how in ("operation", "parameter", "reduction"):
        assert diagnosis["ranks"] in ([0], [1])  # of two, none is the usual one: rank 0 is taken for it
    assert (diagnosis["diagnosis"], diagnosis["ranks"], diagnosis["world"]) == (kind, culprits, world), diagnosis
    assert re.search(sentence, diagnosis["text"]), diagnosis["text"]
    assert dc("doctor", "--dump", folder, code=1).stdout == diagnosis["text"] + "\n"


def test_doctor_of_a_run_that_went_well(dc: Run, groups: Groups) -> None:
    text = dc("doctor", "--dump", groups("well", 3)).stdout
    assert re.match(r"all 3 ranks did the same 14 collectives; rank \d came last to the last of them, 0\.\d+ s after",
                    text)


def on_another_machine(folder: Path, rank: int, hours: int) -> None:
    """The rank's dump as a machine writes it whose clock began so many hours earlier."""
    path, ns = folder / f"rank-{rank}.json", hours * 3600 * 10**9
    dump = json.loads(path.read_text())
    dump.update(host="another", time_ns=dump["time_ns"] + ns)
    for row in dump["entries"]:
        row.update({key: row[key] + ns for key in ("queued_ns", "begin_ns", "end_ns") if row[key] > 0})
    path.write_text(json.dumps(dump))


@pytest.mark.parametrize("rank", [0, 1])
def test_machines_have_clocks_of_their_own(dc: Run, groups: Groups, tmp_path: Path, rank: int) -> None:
    shutil.copytree(groups("late", 2), tmp_path / "d")
    on_another_machine(tmp_path / "d", rank, 1000)
    diagnosis = json.loads(dc("doctor", "--dump", tmp_path / "d", "--json", code=1).stdout)
    assert (diagnosis["diagnosis"], diagnosis["ranks"]) == ("late", [1]), diagnosis
    assert re.search(r"end_backward, (9|\d\d)\.\d s before they gave up$", diagnosis["text"]), diagnosis
    events = json.loads(dc("trace", tmp_path / "d").stdout)["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert 0 <= min(event["ts"] for event in work) and max(event["ts"] for event in work) < 600e6


def test_doctor_without_a_rank(dc: Run, groups: Groups, tmp_path: Path) -> None:
    shutil.copytree(groups("well", 3), tmp_path / "d")
    (tmp_path / "d" / "rank-2.json").unlink()
    diagnosis = json.loads(dc("doctor", "--dump", tmp_path / "d", "--json", code=1).stdout)
    assert (diagnosis["diagnosis"], diagnosis["ranks"]) == ("missing", [2])
    assert diagnosis["text"].endswith("; the others have no error")


def test_names_do_not_reach_the_terminal_as_commands(dc: Run, groups: Groups, tmp_path: Path) -> None:
    shutil.copytree(groups("parameter", 3), tmp_path / "d")
    for path in (tmp_path / "d").iterdir():
        path.write_text(path.read_text().replace('"head"', '"he\\u001b[2Jad\\n"'))
    assert "parameter 8 (he?[2Jad?) " in dc("doctor", "--dump", tmp_path / "d", code=1).stdout
    text = json.loads(dc("doctor", "--dump", tmp_path / "d", "--json", code=1).stdout)["text"]
    assert "parameter 8 (he\x1b[2Jad\n) " in text


def test_a_difference_says_more_than_a_missing_file(dc: Run, groups: Groups, tmp_path: Path) -> None:
    shutil.copytree(groups("parameter", 3), tmp_path / "d")
    (tmp_path / "d" / "rank-2.json").unlink()
    assert json.loads(dc("doctor", "--dump", tmp_path / "d", "--json", code=1).stdout)["diagnosis"] == "operation"


def test_a_file_of_an_earlier_run_is_told(dc: Run, groups: Groups, tmp_path: Path) -> None:
    """The rank that was killed has left none, and so that of the run before is there."""
    note = "; but rank 1 failed before all that rank 0 has in its dump: the run may be an earlier one"
    shutil.copytree(groups("parameter", 2), tmp_path / "d")
    assert note not in dc("doctor", "--dump", tmp_path / "d", code=1).stdout
    shutil.copy(groups("dead", 2) / "rank-0.json", tmp_path / "d")
    earlier, later = (json.loads((tmp_path / "d" / f"rank-{rank}.json").read_text()) for rank in (1, 0))
    began = later["entries"][0]["queued_ns"]
    if earlier["time_ns"] >= began:  # the groups ran in another order
        (tmp_path / "d" / "rank-1.json").write_text(json.dumps({**earlier, "time_ns": began - 1}))
    assert dc("doctor", "--dump", tmp_path / "d", code=1).stdout.endswith(note + "\n")


# ---- folders that are not right


def test_folders_that_are_none(dc: Run, groups: Groups, tmp_path: Path) -> None:
    def says(folder: Path, text: str) -> None:
        for line in (["doctor", "--dump", folder], ["trace", folder]):
            done = dc(*line, code=3)
            assert done.stdout == "" and text in done.stderr, done.stderr

    says(tmp_path / "nowhere", "No such file")
    says(tmp_path, "has no rank-R.json")
    (tmp_path / "rank-0.json").write_text("")
    says(tmp_path, "is no JSON: byte 0: it ends too early")
    (tmp_path / "rank-0.json").write_text('{"format": "something else", "entries": []}')
    says(tmp_path, "is no dump of libdc's flight recorder")
    text = (groups("well", 2) / "rank-0.json").read_text()
    (tmp_path / "rank-0.json").write_text(text.replace('"version":1', '"version":2'))
    says(tmp_path, "its version is not 1")
    (tmp_path / "rank-0.json").write_text(text.replace('"world":2', '"world":1025'))
    says(tmp_path, "its rank and world are none")
    for number in ("-1", "9223372036854775807"):
        (tmp_path / "rank-0.json").write_text(text.replace('"seq":2,', f'"seq":{number},'))
        says(tmp_path, "an entry has a number below 0 or over 2^61")
    (tmp_path / "rank-0.json").write_text(text.replace('"seq":2,', '"seq":92233720368547758070,'))
    says(tmp_path, "no whole number")
    (tmp_path / "rank-0.json").write_text(text)
    (tmp_path / "rank-1.json").write_text((groups("well", 3) / "rank-1.json").read_text())
    says(tmp_path, "dumps of more than one run: ranks 0 of 2 and 1 of 3")


def test_an_argument_that_is_no_folder_is_named(dc: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in ("nowhere", "pipe"):
        assert f"--dump = {tmp_path / place} can't be read: " in dc("doctor", "--dump", tmp_path / place, code=3).stderr
        assert f"FOLDER = {tmp_path / place} can't be read: " in dc("trace", tmp_path / place, code=3).stderr


def test_what_is_no_regular_file_is_refused_and_not_waited_for(dc: Run, tmp_path: Path) -> None:
    place = tmp_path / "rank-0.json"

    def says(text: str) -> None:
        for line in (["doctor", "--dump", tmp_path], ["trace", tmp_path]):
            done = dc(*line, code=3)
            assert done.stdout == "" and f"{place} can't be read: {text}" in done.stderr, done.stderr

    os.mkfifo(place)
    says("it is a pipe, must be a file")
    place.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        says("it is a socket or a device, must be a file")
    place.unlink()
    place.symlink_to("/dev/zero")
    says("it is a device, must be a file")
    place.unlink()
    place.mkdir()
    says("it is a folder, must be a file")
    place.rmdir()
    place.touch()
    os.truncate(place, 1 << 42)
    says("it has 4398046511104 bytes, a dump has at most ")
    os.truncate(place, 1 << 32)  # a hole, which would be read for long and take as much memory
    says("it has a NUL character")


def test_dumps_of_large_groups(dc: Run, groups: Groups, tmp_path: Path) -> None:
    """By the caller's collectives a group may have 1,024 ranks."""
    text = (groups("well", 2) / "rank-0.json").read_text()
    for rank in range(1024):
        own = text.replace('"world":2', '"world":1024').replace('"rank":0', f'"rank":{rank}')
        (tmp_path / f"rank-{rank}.json").write_text(own)
    assert dc("doctor", "--dump", tmp_path).stdout.startswith("all 1024 ranks did the same 14 collectives; ")
    for rank in range(100, 130):
        (tmp_path / f"rank-{rank}.json").unlink()
    diagnosis = json.loads(dc("doctor", "--dump", tmp_path, "--json", code=1).stdout)
    assert (diagnosis["diagnosis"], diagnosis["ranks"]) == ("missing", list(range(100, 130)))
    assert diagnosis["text"].startswith("ranks 100, 101, 102, ") and "115 and 14 more left no dump" in diagnosis["text"]
    (tmp_path / "rank-0.json").write_text(text.replace('"world":2', '"world":4294967298'))
    assert "its rank and world are none" in dc("doctor", "--dump", tmp_path, code=3).stderr


def test_numbers_far_apart_take_no_time(dc: Run, groups: Groups, tmp_path: Path) -> None:
    text = (groups("well", 2) / "rank-0.json").read_text()
    (tmp_path / "rank-0.json").write_text(text.replace('"seq":7,', '"seq":1000000000000000,'))
    (tmp_path / "rank-1.json").write_text((groups("well", 2) / "rank-1.json").read_text())
    dc("doctor", "--dump", tmp_path)  # to count from 7 to there would take days


def test_no_file_makes_it_crash(dc: Run, groups: Groups, tmp_path: Path) -> None:
    """Cut and changed dumps: a diagnosis, a trace or a refusal, but no signal."""
    text = (groups("parameter", 2) / "rank-0.json").read_text()
    chance = random.Random(4)
    for _ in range(150):
        cut = list(text[: chance.randrange(len(text))] if chance.random() < 0.3 else text)
        for _ in range(chance.randrange(4)):
            cut[chance.randrange(len(cut))] = chance.choice('{}[]",:0-9\\u\0né')
        (tmp_path / "rank-0.json").write_text("".join(cut), encoding="utf-8")
        for line in (["doctor", "--dump", str(tmp_path)], ["trace", str(tmp_path)]):
            done = subprocess.run([str(TOOL), *line], capture_output=True, timeout=600)
            assert done.returncode in (0, 1, 3), (done.returncode, "".join(cut)[:200])


# ---- traces


def test_perfetto(dc: Run, groups: Groups, tmp_path: Path) -> None:
    folder = groups("late", 3)
    out = tmp_path / "trace.json"
    assert "3 rank" in dc("trace", folder, "-o", out).stdout
    told = json.loads(dc("trace", folder, f"--output={out}", "--json").stdout)
    assert told["ranks"] == 3 and told["output"] == str(out)
    trace = json.loads(out.read_text())
    assert json.loads(dc("trace", folder).stdout) == trace
    events = trace["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert len(work) == told["entries"] == sum(len(entries(folder, rank)) for rank in range(3))
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in work)
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert {pid for pid, _ in names} == {0, 1, 2} and all(f"rank {pid} (pid " in name for pid, name in names)
    assert any(event["args"]["state"] == "failed" and event["dur"] > 2e6 for event in work)
    starts = {event["id"] for event in events if event["ph"] == "s"}
    ends = {event["id"] for event in events if event["ph"] == "f"}
    assert starts == ends and len(starts) == 3 * 5 + 2  # a gather's arrow to its wait; the late rank's last never was
    row, event = entries(folder, 0)[5], [event for event in work if event["pid"] == 0][5]
    assert event["dur"] == pytest.approx((row["end_ns"] - row["begin_ns"]) / 1e3, abs=1e-3)


def test_a_trace_that_cannot_be_written_is_an_error(dc: Run, groups: Groups, tmp_path: Path) -> None:
    folder = groups("well", 2)

    def fails(line: List[Any], text: str, **kwargs: Any) -> None:
        done = subprocess.run([str(TOOL), *map(str, line)], stderr=subprocess.PIPE, text=True, timeout=600, **kwargs)
        assert done.returncode == 3 and done.stderr.endswith(text), done.stderr

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    with open("/dev/full", "w") as full:
        for line in (["trace", folder], ["doctor", "--dump", folder], ["doctor", "--dump", folder, "--json"],
                     ["trace", folder, "-o", tmp_path / "well.json"]):
            fails(line, "standard output can't be written: No space left on device\n", stdout=full)
    assert json.loads((tmp_path / "well.json").read_text()) == json.loads(dc("trace", folder).stdout)
    fails(["trace", folder, "-o", "/dev/full"], "--output = /dev/full can't be written: No space left on device\n")
    fails(["trace", folder, "-o", tmp_path], f"--output = {tmp_path} can't be written: Is a directory\n")
    for kind, name in (("perfetto", "half.json"), ("torch", "half"), ("torch-json", "half")):
        out = tmp_path / name
        file = out / "rank_0" if kind != "perfetto" else out
        fails(["trace", folder, "--format", kind, "-o", out],
              f"--output = {file} can't be written: File too large\n", preexec_fn=small_files)
        assert not file.exists()


def analyse(folder: Path, *arguments: str) -> str:
    """The output of PyTorch's analyser for a folder."""
    done = subprocess.run([str(Path(sys.executable).with_name("torchfrtrace")), str(folder), *arguments], text=True,
                          capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_json_is_utf8_whatever_bytes_there_are(tmp_path: Path) -> None:
    """Names and paths may have any, and an error's text ends where its memory does."""
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    for reason in ("é" * 600, "x" + "é" * 600):
        comm = libdc.Comm.threads(1)[0]
        with libdc.Context() as context:
            context.init(comm)
            context.register_z3_param(7, (1,), np.zeros(1, np.float32), np.zeros(1, np.float32))
            context.register_graph_z3(1, [7])
            name = b"\xffa\xc0\x80\xed\xa0\x80\xf5 \xe2\x82\xac \xe2\x82"
            assert lib.dc_context_set_param_name(context._handle, 7, name) == 0
            context.allgather_param(None, 1, 7)
            comm.abort(reason)
            with pytest.raises(libdc.Error, match="aborted"):
                context.start_forward()
            context.trace_dump(folder)
        with open(folder + b"/rank-0.json", "rb") as file:
            dump = json.loads(file.read().decode())
        assert dump["error"].endswith(("é", "\ufffd"))
        names = {entry.get("name") for entry in dump["entries"]} - {None}
        assert names == {"?a?????? \u20ac ??".replace("?", "\ufffd")}
    done = subprocess.run([str(TOOL), "trace", folder, "-o", folder + b"/out", "--json"], capture_output=True,
                          timeout=600)
    assert json.loads(done.stdout.decode())["output"].endswith("/caf\ufffd/out")


def test_pytorchs_analyser_reads_the_dumps(dc: Run, groups: Groups, tmp_path: Path) -> None:
    dc("trace", groups("well", 3), "--format", "torch", "-o", tmp_path / "well")
    out = tmp_path / "db"
    text = analyse(tmp_path / "well", "-o", str(out))
    assert "error" not in text.lower() and "missing" not in text.lower(), text
    _, database = pickle.loads(out.read_bytes())
    assert len(database.collectives) == 14 and all(collective.pass_check for collective in database.collectives)
    assert {group.desc for group in database.groups} == {"libdc"} and len(database.ncclcalls) == 3 * 14

    dc("trace", groups("late", 3), "--format", "torch", "-o", tmp_path / "late")
    text = analyse(tmp_path / "late")
    assert "Not all ranks joining collective, sequence number: 8" in text and "missing ranks: {1}" in text, text


def test_ranks_of_another_run_are_refused(dc: Run, groups: Groups, tmp_path: Path) -> None:
    """PyTorch's analyser would take them for ranks of this one."""
    def files() -> Dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    out = tmp_path / "out"
    for kind in ("torch-json", "torch"):  # the same ranks are written over
        dc("trace", groups("well", 3), "--format", kind, "-o", out)
    before = files()
    assert sorted(before) == ["rank_0", "rank_1", "rank_2"] and pickle.loads(before["rank_2"])["version"] == "2.10"
    done = dc("trace", groups("well", 2), "--format", "torch", "-o", out, code=3)
    assert done.stdout == "" and f"--output = {out} has rank_2 of another run" in done.stderr
    assert files() == before
    (out / "rank_2").rename(out / "notes")
    dc("trace", groups("well", 2), "--format", "torch", "-o", out)
    assert sorted(files()) == ["notes", "rank_0", "rank_1"] and files()["rank_1"] != before["rank_1"]
    done = dc("trace", groups("well", 2), "--format", "torch", "-o", out / "notes", code=3)
    assert f"--output = {out / 'notes'} can't be read: Not a directory" in done.stderr


def test_pytorchs_json_has_the_same(dc: Run, groups: Groups, tmp_path: Path) -> None:
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    folder = groups("well", 3)
    dc("trace", folder, "--format", "torch", "-o", tmp_path / "pickled")
    dc("trace", folder, "--format", "torch-json", "-o", tmp_path / "json")
    details = {}
    for rank in range(3):
        dump = json.loads((tmp_path / "json" / f"rank_{rank}").read_text())
        assert dump == pickle.loads((tmp_path / "pickled" / f"rank_{rank}").read_bytes())
        details[f"rank_{rank}"] = {"host_name": "host", "rank": rank, **dump}
    database = build_db(details, JobConfig().parse_args([str(tmp_path)]), "2.10")
    assert len(database.collectives) == 14
