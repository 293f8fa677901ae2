#!/usr/bin/env python3
"""Builds the wheel libdc-cuda: make_cuda_wheel.py FOLDER [PLUGIN]. It holds libdc_cuda.so alone, and puts it beside the
library of the wheel libdc, which looks for it there and takes that of its own version. nvcc comes from PyPI's wheels
(cuda-tools.txt). The plug-in is linked for old distributions, as the wheel libdc is (make_wheel.py). With PLUGIN that
file is packed as it is, with this machine's tag: for tests of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from make_wheel import old_glibc, repair, run
from packaging.requirements import Requirement
from project import ROOT, metadata
from pyproject_metadata import Readme, StandardMetadata

TOOLS = ROOT / "build" / "cuda-tools"
BUILD = ROOT / "build" / "wheel-cuda"
README = """The CUDA device of libdc: `pip install "libdc[cuda]"`. The driver must be that of CUDA 12 or later.

Products of matrices need NVIDIA's cuBLAS, eigenvalues cuSOLVER, and several cards NCCL. A PyTorch for CUDA brings them;
otherwise they come with `pip install "libdc-cuda[cu12]"`, or `[cu13]` for a driver of CUDA 13.
"""
LIBRARIES = {"cu12": ["nvidia-cublas-cu12", "nvidia-cusolver-cu12", "nvidia-nccl-cu12"],
             "cu13": ["nvidia-cublas", "nvidia-cusolver", "nvidia-nccl-cu13"]}


def cuda_metadata() -> StandardMetadata:
    """That of libdc, but for what is the plug-in's own."""
    made = metadata()
    made.name = "libdc-cuda"
    made.description = "The CUDA device of libdc"
    made.readme = Readme(README, None, "text/markdown")
    made.license = "Apache-2.0"
    made.license_files = [Path("LICENSE")]
    made.dependencies = [Requirement(f"libdc=={made.version}")]
    made.optional_dependencies = {extra: [Requirement(name) for name in names] for extra, names in LIBRARIES.items()}
    return made


def tools() -> None:
    """Installs the compilers, unless those of the list are there."""
    wanted = ROOT / "packaging" / "cuda-tools.txt"
    have = TOOLS / wanted.name
    if not have.is_file() or have.read_bytes() != wanted.read_bytes():
        shutil.rmtree(TOOLS, ignore_errors=True)
        run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", TOOLS, "-r", wanted)
        shutil.copy(wanted, have)


def build() -> Path:
    tools()
    nvidia = TOOLS / "nvidia"
    path = os.pathsep.join([str(nvidia / "cu13" / "bin"), os.environ["PATH"]])
    if not (BUILD / "build.ninja").exists():
        run("meson", "setup", BUILD, "-Dcuda=enabled", "-Dtests=false", "-Dbuildtype=release", "-Dstrip=true",
            f"-Dptxas={nvidia / 'cuda_nvcc' / 'bin' / 'ptxas'}", PATH=path,
            LDFLAGS=old_glibc(BUILD.with_name("wheel-cuda-glibc")))
    run("meson", "compile", "-C", BUILD, "dc_cuda:shared_library", PATH=path)
    plugin = BUILD / "libdc_cuda.so"
    subprocess.run([sys.executable, ROOT / "scripts" / "checks" / "check_image.py", plugin], check=True)
    return plugin


def pack(plugin: Path, folder: Path) -> Path:
    """The wheel with this machine's tag."""
    made = cuda_metadata()
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        (tree / "libdc").mkdir()
        run("strip", "--strip-unneeded", plugin, "-o", tree / "libdc" / "libdc_cuda.so")
        info = tree / f"libdc_cuda-{made.version}.dist-info"
        (info / "licenses").mkdir(parents=True)
        shutil.copy(ROOT / "LICENSE", info / "licenses")
        (info / "METADATA").write_bytes(bytes(made.as_rfc822()))
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        (info / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: make_cuda_wheel\nRoot-Is-Purelib: false\n"
                                    f"Tag: py3-none-{platform}\n", encoding="utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        run(sys.executable, "-m", "wheel", "pack", tree, "--dest-dir", folder)
    return folder / f"libdc_cuda-{made.version}-py3-none-{platform}.whl"


def main() -> int:
    target = Path(sys.argv[1]).resolve()
    if len(sys.argv) > 2:
        print(pack(Path(sys.argv[2]), target))
        return 0
    with tempfile.TemporaryDirectory() as name:
        repair(pack(build(), Path(name)), target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
