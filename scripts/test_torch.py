#!/usr/bin/env python3
"""Runs the tests of the PyTorch adapter on another PyTorch: test_torch.py VERSION [PYTEST ARGUMENT…]. It is not part of
`make test`, since PyTorch's wheel is half a gigabyte.

PyPI's wheels are built for CUDA and name its libraries, gigabytes of them, which nothing here calls. They are replaced
by libraries whose functions all return "no driver"; PyTorch then says that there is no GPU, and computes on the CPU.
Such a PyTorch 2.11 crashes, with libdc or without, when a second thread traces a model: its guard for devices is in
the first thread's memory. So the tests that compile in threads are left out, unless they are named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, Set

ROOT = Path(__file__).resolve().parent.parent
NEEDS = ["typing-extensions", "sympy", "networkx", "jinja2", "filelock", "fsspec", "numpy", "pytest", "safetensors",
         "setuptools", "cffi"]  # fmt: skip
TESTS = ["tests/torch/ops/test_ops.py", "tests/torch/ops/test_ops_fakes.py", "tests/torch/ops/test_ops_python.py",
         "tests/torch/test_dc.py", "tests/torch/test_process_group.py",
         "tests/torch/process_group/test_backend.py", "tests/torch/sharding/test_shard.py"]  # fmt: skip
NO_DRIVER = 35  # cudaErrorInsufficientDriver; an error in the other libraries, too


def run(*command: object, check: bool = True) -> str:
    return subprocess.run([str(word) for word in command], check=check, cwd=ROOT, text=True,
                          stdout=subprocess.PIPE).stdout


def stand_ins(folder: Path) -> None:
    """Makes stand-ins for libraries that PyTorch's need and this machine lacks, in PyTorch's own folder, where those
    look."""
    libraries = sorted(folder.glob("*.so*"))
    missing: Set[str] = set()
    system = run("ldconfig", "-p")
    for library in libraries:
        needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", "-W", library))
        missing |= {name for name in needed if not (folder / name).exists() and f"\t{name} " not in system}
    defined: Set[str] = set()
    wanted: Dict[str, str] = {}
    home: Dict[str, str] = {}  # the library that defines a symbol version
    for library in libraries:
        for soname, names in re.findall(r"File: (\S+) .*((?:\n .*Name: .*)+)", run("readelf", "-V", "-W", library)):
            home.update({version: soname for version in re.findall(r"Name: (\S+)", names)})
        defined |= set(re.findall(r" [A-Za-z] (\w+)", run("nm", "-D", "--defined-only", library)))
        for name, version in re.findall(r" [Uw] (\w+)(?:@(\S+))?$", run("nm", "-D", "--undefined-only", library), re.M):
            if not re.match(r"GLIBC|GCC|CXX|GOMP|OMP|GOACC", version):
                wanted[name] = version
    plain = sorted(name for name, version in wanted.items() if not version and name not in defined)
    for number, soname in enumerate(sorted(missing)):
        nodes: Dict[str, list] = {}
        for name, version in wanted.items():
            if home.get(version) == soname:
                nodes.setdefault(version, []).append(name)
        names = [name for listed in nodes.values() for name in listed] + (plain if number == 0 else [])
        source, script = folder / f"{soname}.c", folder / f"{soname}.map"
        source.write_text("".join(
            f'const char *{name}(void) {{ return "no driver"; }}\n' if "String" in name or "GetErrorName" in name
            else f"long {name}(void) {{ return {NO_DRIVER}; }}\n" for name in names), encoding="utf-8")
        script.write_text("".join(f"{node} {{ global: {'; '.join(listed)}; }};\n" for node, listed in nodes.items()),
                          encoding="utf-8")
        versions = [f"-Wl,--version-script={script}"] if nodes else []
        run("gcc", "-w", "-shared", "-fPIC", "-fno-builtin", source, f"-Wl,-soname,{soname}", *versions, "-o",
            folder / soname)
    print(f"{len(missing)} stand-ins: {', '.join(sorted(missing))}", flush=True)


def main() -> int:
    version, arguments = sys.argv[1], sys.argv[2:]
    place = ROOT / "build" / f"torch-{version}"
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        run(sys.executable, "-m", "venv", place)
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", f"torch=={version}")
        run(python, "-m", "pip", "install", "--quiet", *NEEDS)
        stand_ins(next(place.glob("lib/python3*/site-packages/torch/lib")))
        (place / "ready").touch()
    run(sys.executable, "packaging/make_wheel.py", place / "wheel")
    wheel = max((place / "wheel").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel)
    print(run(python, "-c", "import torch; print('PyTorch', torch.__version__, 'GPU:', torch.cuda.is_available())"))
    return subprocess.run([python, "-m", "pytest", "-q", *(arguments or TESTS)], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
