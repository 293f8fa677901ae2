"""The kernels' images without nvcc: what is made of its PTX, and what a library must hold."""

from __future__ import annotations

import importlib
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PTX = ("//\n.version 9.0\n.target sm_80\n\t.pragma \"used_bytes_mask 0xff\";\n\t.pragma \"nounroll\";\n"
       "\tld.u32 \t%r1, [%rd1];\n")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "checks"))
    return importlib.import_module


def code(capability: int, abi: bytes = b"\x33\x07") -> bytes:
    head = b"\x7fELF\x02\x01\x01" + abi + bytes(7) + struct.pack("<HHI", 2, 190, 129)
    return head + bytes(24) + bytes((capability, 5, 80, 0))


def test_ptx_is_of_the_first_cuda_12(script: Any) -> None:
    made = script("cuda_image").lowered(PTX)
    assert made == "//\n.version 8.0\n.target sm_80\n\t.pragma \"nounroll\";\n\tld.u32 \t%r1, [%rd1];\n"
    with pytest.raises(AssertionError, match="0 versions"):
        script("cuda_image").lowered("no PTX")


def test_a_library_must_hold_what_every_driver_takes(script: Any) -> None:
    check = script("check_image")
    ptx = script("cuda_image").lowered(PTX).encode()
    whole = b"\x7fELF\x02\x01\x01" + bytes(60) + (code(80) + code(90) + ptx) * 2
    assert check.check_families(whole, 2) == []
    assert check.check_families(whole, 3) == ["2 images for sm_80, must be 3", "2 images for sm_90, must be 3",
                                      "PTX of 2 families, must be 3"]
    assert check.check_families(code(80) + code(90, b"\x41\x08") + ptx, 1) == [
        "machine code that drivers of CUDA 12 do not take", "0 images for sm_90, must be 1"]
    assert check.check_families(code(80) + code(90) + PTX.encode(), 1) == ["PTX 9.0 for sm_80, must be 8.0 for sm_80"]
    assert check.families() == (ROOT / "src" / "kernels" / "cuda" / "meson.build").read_text().count("'-fmad=")


def test_the_check_says_what_it_looked_at(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture) -> None:
    check = script("check_image")
    monkeypatch.setattr(sys, "argv", ["check_image.py"])
    monkeypatch.setattr(check, "BUILT", tmp_path / "libdc_cuda.so")
    assert check.main() == 0 and "has not built any here" in capsys.readouterr().out
    check.BUILT.write_bytes(code(80))
    assert check.main() == 1 and "libdc_cuda.so: 1 images for sm_80" in capsys.readouterr().out


def test_instructions_have_bounds(script: Any) -> None:
    record = script("record_kernels")
    code = ("\t.section\t.text.probe,\"ax\"\n.text.probe:\n        /*0000*/                   LDC R1, c[0x0][0x28] ;\n"
            "        /*0010*/              @!P0 HMMA.16816.F32.BF16 R96, R132, R128, R96 ;\n"
            "        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;\n"
            "        /*0030*/              @P1  STL [R1], R2 ;\n")
    found = record.disassembled(code, "sm_90")
    assert found == {("probe", "sm_90"): {"all": 4, "hmma": 1, "ldsm": 0, "ldgsts": 0, "bar": 1, "local": 1}}
    assert record.beyond(found, {}) == ["probe for sm_90 has 1 accesses to local memory, must have none"]
    found["probe", "sm_90"]["local"] = 0
    assert record.beyond(found, {("probe", "sm_90"): {"all": 4}}) == []
    assert record.beyond(found, {("probe", "sm_90"): {"all": 3}}) == [
        "probe for sm_90 has 4 instructions, must have at most 3"]
    assert record.beyond({}, {}) == ["there is no image of a kernel"]
    assert record.beyond({("probe", "sm_90"): {"all": 0, "local": 0}}, {}) == [
        "probe for sm_90: no instructions were read"]


def test_registers_are_those_of_the_last_compilation(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """Also where that was in a run that was beyond the bounds, after which nothing is compiled again."""
    record, file, build, nvdisasm = script("record_kernels"), tmp_path / "kernels.txt", tmp_path / "b", tmp_path / "dis"
    build.mkdir()
    (build / "probe.90.cubin").write_bytes(b"")
    nvdisasm.write_text("#!/bin/sh\necho .text.probe:; for i in 1 2 3; do echo '  /*0000*/  LDC R1 ;'; done\n")
    nvdisasm.chmod(0o755)

    def run(said: str) -> int:
        monkeypatch.setattr(sys, "argv", ["", str(file), str(build), str(nvdisasm), "echo", said])
        return int(record.main())

    assert run("ninja: no work to do.") == 1 and "ptxas has said nothing of it; remove" in capsys.readouterr().out
    compiled = "ptxas info : Compiling entry function 'probe' for 'sm_90'\nptxas info : Used {} registers, 8 bytes smem"
    assert run(compiled.format(40)) == 0 and file.read_text().split()[-9:-6] == ["40", "8", "0"]
    file.write_text(file.read_text().replace("         3", "         2"))
    bounds = file.read_text()
    assert run(compiled.format(64)) == 1 and file.read_text() == bounds
    file.write_text(bounds.splitlines()[0] + "\n")  # the line is deleted
    assert run("ninja: no work to do.") == 0 and file.read_text().split()[-9:-6] == ["64", "8", "0"]
