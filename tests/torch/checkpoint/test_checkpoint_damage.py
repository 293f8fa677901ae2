"""Damaged, unknown and foreign files, saves that are killed, and two saves of one path."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict

import damage_checkpoints
import libdc.torch as dct
import pytest
import torch
from libdc.torch.checkpoint import crc32c, safetensors_file
from models import adamw, bits, data
from sharded import alone, on, one_thread, sharded  # noqa: F401

HERE = Path(__file__).parent
Header = Dict[str, Any]


def rewrite(source: Path, target: Path, change: Callable[[Header], Any], sealed: bool = True) -> Path:
    """A copy with another header, with or without checksums that fit."""
    old = source.read_bytes()
    end = 8 + int(struct.unpack("<Q", old[:8])[0])
    header = json.loads(old[8:end])
    change(header)
    if sealed:
        header["__metadata__"]["libdc.header_crc32c"] = "0" * 8
    else:
        header["__metadata__"] = {key: value for key, value in header["__metadata__"].items() if "crc32c" not in key}
    text = json.dumps(header, separators=(",", ":")).encode()
    new = struct.pack("<Q", len(text)) + text
    if sealed:
        new = new.replace(b'"libdc.header_crc32c":"00000000"', b'"libdc.header_crc32c":"%08x"' % crc32c.checksum(new))
    target.write_bytes(new + old[end:])
    return target


def told(change: Callable[[Header], Any]) -> Callable[[Header], None]:
    """A change of what the metadata of libdc say."""

    def changed(header: Header) -> None:
        values = json.loads(header["__metadata__"]["libdc"])
        change(values)
        header["__metadata__"]["libdc"] = json.dumps(values)

    return changed


def saved(net: Any, path: Path) -> torch.optim.Optimizer:
    optimizer = adamw(net)
    net(*data(0, 0)).backward()
    optimizer.step()
    dct.save_checkpoint(net, path, optimizer, {"step": 1})
    return optimizer


def test_checksums_of_parts_join() -> None:
    whole = os.urandom(1000)
    for cut in (0, 1, 7, 500, 999, 1000):
        parts = crc32c.checksum(whole[:cut]), crc32c.checksum(whole[cut:])
        assert crc32c.join(*parts, 1000 - cut) == crc32c.checksum(whole)


def test_no_damaged_checkpoint_is_loaded_wrong(tmp_path: Path) -> None:
    found = damage_checkpoints.run(60, tmp_path)
    assert found["wrong"] == 0 and found["refused"] > 40


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    def run(net: Any) -> None:
        optimizer = saved(net, tmp_path / "new")
        before = bits(dct.full_state_dict(net))
        old = rewrite(tmp_path / "new", tmp_path / "old", told(lambda values: values.update(format=1)), sealed=False)
        with torch.no_grad():
            for param in net.parameters():
                param.zero_()
        assert dct.load_checkpoint(net, old, optimizer) == {"step": 1}
        assert bits(dct.full_state_dict(net)) == before

    alone(run)


def test_what_cannot_be_loaded_is_refused_by_its_path(tmp_path: Path) -> None:
    def run(net: Any) -> None:
        optimizer = saved(net, tmp_path / "good")
        before = bits(dct.full_state_dict(net))
        tensors = safetensors_file.File(str(tmp_path / "good")).tensors
        piece = next(name for name in tensors if name.endswith("/exp_avg"))
        changes = {
            "has format 99, must be 1 to 2": (told(lambda values: values.update(format=99)), True),
            "has format 2 and no checksums": (lambda header: None, False),
            f"lacks {re.escape(piece)}": (lambda header: (header.pop(piece), told(lambda values: values.update(
                format=1))(header)), False),
            f"{re.escape(piece)} is a tensor without a checksum": (lambda header: header.pop(piece), True),
        }
        for number, (text, (change, sealed)) in enumerate(changes.items()):
            bad = rewrite(tmp_path / "good", tmp_path / f"bad{number}", change, sealed)
            with pytest.raises(ValueError, match=f"{re.escape(str(bad))}.*{text}"):
                dct.load_checkpoint(net, bad, optimizer)
        for name in ("../good", str(tmp_path / "good"), "a/../../good"):
            index = tmp_path / "index.json"
            index.write_text(json.dumps({"weight_map": {"x": name}}))
            with pytest.raises(ValueError, match=f"index.json names the file '{re.escape(name)}', must be one in its"):
                dct.load_checkpoint(net, index, optimizer)
        os.mkfifo(tmp_path / "pipe")
        for strange in (tmp_path / "pipe", Path("/dev/zero")):
            with pytest.raises(ValueError, match=f"{strange} is no safetensors file: it is a folder, a pipe or"):
                dct.load_checkpoint(net, strange, optimizer)
        with pytest.raises(ValueError, match=f"the folder {tmp_path} has no .metadata of torch.distributed.checkpoint"):
            dct.load_checkpoint(net, tmp_path, optimizer)
        assert bits(dct.full_state_dict(net)) == before

    alone(run)


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.safetensors"

    def run(net: Any) -> None:
        optimizer = saved(net, path)
        read = safetensors_file.File.read
        monkeypatch.setattr(safetensors_file.File, "read", lambda *a: (os.truncate(path, 4000), read(*a))[1])
        with pytest.raises(ValueError, match="step.safetensors has become shorter while it was read"):
            dct.load_checkpoint(net, path, optimizer)

    alone(run)


def test_two_writers_of_one_name(tmp_path: Path) -> None:
    path, part = tmp_path / "step.safetensors", tmp_path / ".step.safetensors.part"

    def run(comm: Any) -> None:
        net = sharded(comm)
        dct.save_checkpoint(net, path)
        comm.barrier()
        with open(part, "w") if comm.rank == 0 else open(os.devnull) as other:
            if comm.rank == 0:
                fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises((FileExistsError, RuntimeError), match="is being written by another save"):
                dct.save_checkpoint(net, path)
            comm.barrier()
            assert sorted(os.listdir(tmp_path)) == [part.name, path.name]
            comm.barrier()
        comm.barrier()
        dct.save_checkpoint(net, path)  # the lock has ended, as that of a killed process does
        assert os.listdir(tmp_path) == [path.name]

    on(2, run)


def test_killed_saves() -> None:
    done = subprocess.run([sys.executable, HERE / "kill_saves.py", "4"], text=True, capture_output=True, timeout=600)
    assert done.returncode == 0 and "and nothing stayed" in done.stdout, done.stdout + done.stderr
