"""Damaged, unknown and foreign files, saves that are killed, and two saves of one path."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import re
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict

import damage_checkpoints
import libdc.torch as dct
import pytest
import torch
import torch.distributed.checkpoint as dcp
from libdc.torch.checkpoint import crc32c, safetensors_file
from libdc.torch.checkpoint.distributed_folder import Folder
from models import adamw, bits, data
from sharded import alone, on, one_thread, sharded  # noqa: F401
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

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

        def rename(header: Header) -> None:
            header["extra/other"] = header.pop(piece)

        changes = {
            "has format 99, must be 1 to 2": (told(lambda values: values.update(format=99)), True),
            "has format 2 and no checksums": (lambda header: None, False),
            f"lacks {re.escape(piece)}": (lambda header: (rename(header), told(lambda values: values.update(
                format=1))(header)), False),
            "extra/other is a tensor without a checksum": (rename, True),
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
        with pytest.raises(ValueError, match="'a\\\\x00' is no file's name: it has a NUL"):
            dct.load_checkpoint(net, "a\0", optimizer)
        for name, text in {"x\n\x1b": r"has 'x\\n\\x1b', which the model does not have", "y": "has y, which"}.items():
            strange = rewrite(tmp_path / "good", tmp_path / "strange", lambda header: header.update(
                {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}), sealed=False)
            rewrite(tmp_path / "strange", tmp_path / "strange", told(lambda values: values.update(format=1)), False)
            with pytest.raises(ValueError, match=text):
                dct.load_checkpoint(net, strange, optimizer)
        listed = rewrite(tmp_path / "good", tmp_path / "listed", told(lambda values: values.update(extra=[1])))
        with pytest.raises(ValueError, match="listed has metadata of libdc that cannot be read"):
            dct.load_checkpoint(net, listed, optimizer)
        os.mkfifo(tmp_path / "pipe")
        for strange in (tmp_path / "pipe", Path("/dev/zero")):
            with pytest.raises(ValueError, match=f"{strange} is no safetensors file: it is a folder, a pipe or"):
                dct.load_checkpoint(net, strange, optimizer)
        with pytest.raises(ValueError, match=f"the folder {tmp_path} has no .metadata of torch.distributed.checkpoint"):
            dct.load_checkpoint(net, tmp_path, optimizer)
        assert bits(dct.full_state_dict(net)) == before

    alone(run)


def foreign(path: Path, text: str, nbytes: int = 8) -> Path:
    """A file of others, without checksums."""
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(nbytes))
    return path


@pytest.mark.parametrize("text, nbytes, says", [
    ('{"a":%s,"a":%s}', 8, "it has 'a' twice"),
    ('{"a":%s,"b":%s}', 8, "b begins at byte 0, must be 4, where the tensors before it end"),
    ('{"a":%s}', 8, "its tensors have 4 bytes, and the file has 8 for them"),
    ('{"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', 8, "b begins at byte 4, must be 0"),
    ('{"a":%s,"b":{"dtype":"F32","shape":[4611686018427387904,4,0],"data_offsets":[4,4]}}', 4, "overflowed"),
    ('{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', 4, r"a has shape \[nan\]"),
    ('{"a":%s,"__metadata__":{"x":NaN}}', 4, "its metadata are no strings"),
])
def test_descriptions_that_do_not_fit(tmp_path: Path, text: str, nbytes: int, says: str) -> None:
    path = foreign(tmp_path / "f", text.replace("%s", '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'), nbytes)
    with pytest.raises(ValueError, match=f"{path} is no safetensors file, or a part of one: .*{says}"):
        safetensors_file.File(str(path))


def test_indices_that_do_not_fit(tmp_path: Path) -> None:
    index = tmp_path / "index.json"
    for name in ("1", "2"):
        foreign(tmp_path / name, '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4)
    index.write_text('{"weight_map":{"a":"1","b":"2"}}')
    with pytest.raises(ValueError, match="index.json names the files 1 and 2, which both have a"):
        safetensors_file.open_files(str(index))
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match="pipe.json is no safetensors file: it is a folder, a pipe or a device"):
        safetensors_file.open_files(str(tmp_path / "pipe.json"))


class Call:
    """Pickled, it is a call of a function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def test_a_folder_that_calls_or_leaves_itself(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    description = tmp_path / ".metadata"
    good = description.read_bytes()
    into = torch.zeros(2)
    Folder(str(tmp_path)).read("a", 0, into)
    assert into.tolist() == [1, 1]
    description.write_bytes(pickle.dumps(Call(os.mkdir, str(tmp_path / "called"))))
    with pytest.raises(ValueError, match="cannot be read .*it names posix.mkdir, which is no part of a description"):
        Folder(str(tmp_path))
    assert not (tmp_path / "called").exists()
    metadata = pickle.loads(good)
    for kind, name, error in ((_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST", None),  # as Python 3.11.2 pickles it
                              (_MEM_FORMAT_ENCODING, "__reduce__", "it reads __reduce__ of"),
                              (torch.Size, "count", "it reads count of")):
        metadata.planner_data = Call(getattr, kind, name)
        description.write_bytes(pickle.dumps(metadata))
        with pytest.raises(ValueError, match=error) if error else contextlib.nullcontext():
            Folder(str(tmp_path))
    for name in ("../__0_0.distcp", str(tmp_path / "__0_0.distcp")):
        metadata = pickle.loads(good)
        for info in metadata.storage_data.values():
            info.relative_path = name
        description.write_bytes(pickle.dumps(metadata))
        with pytest.raises(ValueError, match=f"it names the file '{name}', must be one in the folder"):
            Folder(str(tmp_path))


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


@pytest.mark.parametrize("left", (False, True))
def test_ranks_that_do_not_share_a_folder(left: bool, tmp_path: Path) -> None:
    """left: a killed save's part is on the second machine's disk, and must not be taken for rank 0's."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    if left:
        (folders[1] / ".step.part").write_bytes(bytes(1000))

    def run(comm: Any) -> None:
        finds = f"rank 1 finds {'another' if left else 'no file'} at .*/b/.step.part, and rank 0 has made .*/a/.step.pa"
        with pytest.raises((FileNotFoundError, RuntimeError), match=finds):
            dct.save_checkpoint(sharded(comm), folders[comm.rank] / "step")

    on(2, run)
    assert not any(os.listdir(folder) for folder in folders)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    def run(net: Any) -> None:
        (tmp_path / ".folder.part").mkdir()
        (tmp_path / "target").write_text("precious")
        (tmp_path / ".link.part").symlink_to(tmp_path / "target")
        for name in ("folder", "link"):
            with pytest.raises(FileExistsError, match=f"{name}' cannot be written: .*{name}.part is a folder or a"):
                dct.save_checkpoint(net, tmp_path / name)
        assert (tmp_path / "target").read_text() == "precious"
        for path in ("", f"{tmp_path}/new/", f"{tmp_path}/new\0"):
            with pytest.raises(ValueError, match="save_checkpoint: path = '.*', must be a file's name"):
                dct.save_checkpoint(net, path)
        for wrong in (os.fsencode(tmp_path / "new"), 5, None):
            for name, call in ("save", dct.save_checkpoint), ("load", dct.load_checkpoint):
                with pytest.raises(TypeError, match=f"^{name}_checkpoint: path = .*, must be a str, or a path object"):
                    call(net, wrong)
        with pytest.raises(TypeError, match="save_checkpoint: extra has the name 1, must be a str"):
            dct.save_checkpoint(net, tmp_path / "new", extra={1: 2})
        wrongs = {"optimizer": (3, {}), "weights": ("no", None)}, {"optimizer": (3,), "strict": ("no",), "prefix": (3,)}
        for call, options in zip((dct.save_checkpoint, dct.load_checkpoint), wrongs):
            for name, value in ((name, value) for name, values in options.items() for value in values):
                with pytest.raises(TypeError, match=f"^{call.__name__}: {name} = {value!r}, must be "):
                    call(net, tmp_path / "new", **{name: value})
        for wrong, what in ((net.state_dict()["head.weight"], "part 0 of 1 of .*full_tensor"),
                            (torch.eye(3).to_sparse(), "a tensor of torch.sparse_coo, must be a whole tensor"),
                            (torch.ones(2, device="meta"), "a tensor of the device meta, must be a whole tensor")):
            with pytest.raises(ValueError, match=rf"^save_checkpoint: extra\['x'\] is {what}"):
                dct.save_checkpoint(net, tmp_path / "new", extra={"x": wrong})
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)  # as a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        try:
            with pytest.raises(OSError, match="File too large: .*/new'"):
                dct.save_checkpoint(net, tmp_path / "new")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert sorted(os.listdir(tmp_path)) == [".folder.part", ".link.part", "target"]
        (tmp_path / "latest").symlink_to(tmp_path / "target")
        dct.save_checkpoint(net, tmp_path / "latest")
        assert not (tmp_path / "latest").is_symlink() and (tmp_path / "target").read_text() == "precious"

    alone(run)


def test_killed_saves() -> None:
    done = subprocess.run([sys.executable, HERE / "kill_saves.py", "4"], text=True, capture_output=True, timeout=600)
    assert done.returncode == 0 and "and nothing stayed" in done.stdout, done.stdout + done.stderr
