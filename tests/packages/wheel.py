#!/usr/bin/env python3
"""The wheel, as `pip wheel .` makes it from what git has and as packaging/make_wheel.py makes it for giving away: its
tags, what is in it, what its libraries need and weigh; then the second one in a fresh environment of every CPython from
3.9 on that this machine has. Ends with one line, `N passed, N failed`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Dict, Iterator, Tuple

import cuda_wheel
from support import LIBC, LIBC_OF_OLD, ROOT, Tests, environment, needed, require, run, sources

OUT = ROOT / "build" / "wheel"
INSIDE = [
    "libdc/libdc.so.0.1", "libdc/libdc.so", "libdc/libdc_torch.so", "libdc/_dc_api.abi3.so", "libdc/py.typed",
    "libdc/include/dc_api.h", "libdc/dc.pc", "libdc/dc_api.json", "libdc/torch/__init__.py", "libdc/libdc",
    "libdc/plan/uplot/LICENSE", "libdc/plan/uplot/uPlot.iife.js", "libdc/plan/uplot/uPlot.min.css",
    "man/man1/libdc.1", "man/man3/dc_allgather_param.3", "man/man7/dc_api.7",
]  # fmt: skip
MOST = 3 << 20  # bytes of libdc.so
# From Python 3.12 on a class has the buffer protocol; before it, memoryview() is a method.
BUFFER = """import gc, sys
from libdc.linalg import zeros
tensor = zeros((2, 3), "float32")
own = tensor.memoryview()
own[1, 2] = 7.0
try:
    view, way = memoryview(tensor), "__buffer__"
    assert bytes(tensor) == bytes(own)
except TypeError:
    view, way = own, "memoryview()"
assert (way == "__buffer__") == (sys.version_info >= (3, 12)), way
view[0, 0] = 5.0
assert tensor.tolist() == own.tolist() == [[5.0, 0.0, 0.0], [0.0, 0.0, 7.0]]
assert (view.format, view.shape, view.readonly) == ("f", (2, 3), False)
del tensor, own
gc.collect()
assert view[1, 2] == 7.0
print(way)
"""
ASK = """import sys, sysconfig, venv
print(sys.implementation.name, sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"""


def run_in(tree: Path) -> Path:
    """The sources, with what Python leaves beside them when it runs there."""
    for folder in {path.parent for path in (tree / "bindings" / "python" / "libdc").rglob("*.py")}:
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "old.cpython-311.pyc").touch()
    return tree


def contents(wheel: Path, libraries: set, folder: Path) -> None:
    """Files, sizes, and what the shared libraries need."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for name in INSIDE:
            require(any(there == name or there.endswith(f".data/data/{name}") for there in names), f"no {name} in it")
        caches = [name for name in names if "__pycache__" in name]
        require(not caches, f"it has {caches}")
        archive.extractall(folder)
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    size, package = sizes["libdc/libdc.so.0.1"], folder / "libdc"
    require(size < MOST, f"libdc has {size} bytes, at most {MOST} are allowed")
    for library in [*sorted(package.glob("*_*.so")), package / "libdc.so.0.1", package / "libdc"]:
        asked = needed(library)
        require(asked <= libraries | {"libdc.so.0.1"}, f"{library.name} needs {sorted(asked)}")
        print(f"    {library.name:<20}{library.stat().st_size:>9} bytes, needs {', '.join(sorted(asked))}")
    print(f"    installed           {sum(sizes.values()):>9} bytes in {len(sizes)} files; the wheel has "
          f"{wheel.stat().st_size}")


def number_of_stat(folder: Path) -> None:
    """A wheel's stat() gives an old glibc 1 on x86-64, and 0 on 64-bit ARM, as the preprocessor sees it."""
    sys.path.insert(0, str(ROOT / "packaging"))
    from make_wheel import STAT

    source = folder / "stat.c"
    source.write_text(STAT, encoding="utf-8")
    for number, macro in ((1, "-D__x86_64__=1"), (0, "-U__x86_64__")):
        text = run("gcc", "-E", "-P", "-U__x86_64__", macro, source)
        require(f"enum {{ VERSION = {number} }};" in text and text.count("(VERSION, what, to)") == 6, text)


def wrong_names(checker: str, *options: str) -> None:
    """A user's own check of a program, against the installed package."""
    program = ROOT / "tests" / "packages" / "wrong_names.py"
    lines = program.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:  # without this project's settings
        done = subprocess.run([sys.executable, "-m", checker, *options, program], cwd=folder, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=3600)
    found = {int(number) for number in re.findall(r"wrong_names\.py:(\d+):.*\berror:? ", done.stdout)}
    expected = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    require(found == expected, f"{checker} names the lines {sorted(found)}, not {sorted(expected)}:\n{done.stdout}")


def pythons() -> Iterator[Tuple[str, Path]]:
    """CPythons from 3.9 on: on the path, and pyenv's."""
    found: Dict[str, Path] = {}
    places = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    places += sorted(Path.home().glob(".pyenv/versions/*/bin"))
    for folder in places:
        for program in sorted(folder.glob("python3.*")) if folder.name != "shims" else []:
            version = re.fullmatch(r"python3\.(\d+)", program.name)
            if version and int(version[1]) >= 9 and ".venv" not in program.parts:
                asked = subprocess.run([program, "-c", ASK], text=True, capture_output=True)
                if asked.stdout.split() == ["cpython", "0"]:
                    found.setdefault(program.name, program)
    yield from sorted(found.items(), key=lambda item: int(item[0][8:]))


def first_lines() -> str:
    """The example of the README that needs no PyTorch."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    return next(block for block in blocks if "libdc.torch" not in block)


def installed(python: Path, wheel: Path, folder: Path) -> None:
    """The package without a compiler at hand, its library from C, and from ctypes."""
    own = environment(python, folder, f"{wheel}[numpy]")
    clean = {"PATH": str(folder / "bin"), "PYTHONPATH": ""}
    example = folder / "example.py"
    example.write_text(first_lines(), encoding="utf-8")
    require(re.fullmatch(r"\[[^\[\]]*\]|\[\[.*\]\]", run(own, example, folder=folder, **clean).strip(), re.S),
            "the README's example printed something else")
    mode = "import libdc; print(libdc.ffi_mode)"
    require(run(own, "-c", mode, folder=folder, **clean).strip() == "api", "the compiled module is not used")
    require(run(own, "-c", mode, folder=folder, LIBDC_FFI="abi", **clean).strip() == "abi",
            "the package does not work without its compiled module")
    code = ("import ctypes, libdc.config; dc = ctypes.CDLL(libdc.config.answers()['library']); "
            "dc.dc_version_string.restype = ctypes.c_char_p; print(dc.dc_version_string().decode())")
    require(re.fullmatch(r"\d+\.\d+\.\d+", run(own, "-c", code, folder=folder, **clean).strip()), "ctypes")
    require(run(folder / "bin" / "libdc", "--version", folder=folder, **clean) ==
            run(own, "-m", "libdc", "-V", folder=folder, **clean), "libdc does not run")
    require("0 broken" in run(folder / "bin" / "libdc", "doctor", folder=folder, **clean), "libdc doctor finds a fault")
    run(own, ROOT / "examples" / "step" / "step.py", folder=folder, **clean)
    run(own, "-c", "import libdc.optim, libdc.optim.arrays", folder=folder, **clean)
    print(f"    a tensor is read by {run(own, '-c', BUFFER, folder=folder, **clean).strip()}")
    for statement in ("import libdc.torch", "from libdc.optim import AdamW", "import libdc.torchium"):
        code = f"try:\n  {statement}\nexcept ImportError as error:\n  print(error)"
        require("pip install 'torch" in run(own, "-c", code, folder=folder, **clean),
                f"{statement} does not say that it needs PyTorch")
    program = folder / "gather"
    flags = run(own, "-m", "libdc.config", "--cflags", "--libs", folder=folder).split()
    run("cc", ROOT / "examples" / "01_gather.c", *flags, "-pthread", "-o", program)
    require("of 2: 0 1 2 3 4 5" in run(program), "01_gather.c printed something else")
    place = run(own, "-m", "libdc.config", "--pkgconfigdir", folder=folder).strip()
    again = run("pkg-config", "--cflags", "--libs", "dc", PKG_CONFIG_PATH=place).split()
    run("cc", ROOT / "examples" / "01_gather.c", *again, "-pthread", "-o", program)
    run(program)


def packed(python: Path, folder: Path) -> None:
    """The sdist, as `python -m build` makes it before the wheel: with no more than meson-python asks for."""
    own = environment(python, folder, "pyproject-metadata>=0.9", "tomli; python_version < '3.11'")
    run(own, "packaging/make_sdist.py", folder / "sdist")


def main() -> int:
    test = Tests()
    OUT.mkdir(parents=True, exist_ok=True)
    for old in OUT.glob("libdc-*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        test("pip wheel . of what git has",
             lambda: print(run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ".",
                               folder=run_in(sources(folder / "clone"))).strip()))
        plain = next(iter(folder.glob("libdc-*.whl")), folder / "none.whl")
        test(f"{plain.name}: its tag says CPython 3.9 and later",
             lambda: require("-cp39-abi3-linux_" in plain.name, "it does not"))
        test("  its contents; it needs libc and libm alone", lambda: contents(plain, LIBC, folder / "plain"))
        test("the number of struct stat is the processor's", lambda: number_of_stat(folder))
        test("the wheel to be given away", lambda: run(sys.executable, "packaging/make_wheel.py", OUT))
        given = next(iter(OUT.glob("libdc-*.whl")), OUT / "none.whl")
        test(f"{given.name}: its tag is a manylinux that PyTorch's wheels can be beside", lambda: require(
            re.search(r"-cp39-abi3-manylinux_2_(1\d|2[0-8])_", given.name), "it is not"))
        test("  auditwheel agrees", lambda: require(
            "manylinux_2_" in run(sys.executable, "-m", "auditwheel", "show", given), "it does not"))
        test("  its contents; it needs glibc alone", lambda: contents(given, LIBC_OF_OLD, folder / "given"))
        # Of a wheel it would read libdc.so too, the linker's script.
        test("  abi3audit finds nothing that CPython 3.9 lacks", lambda: run(
            Path(sys.executable).parent / "abi3audit", "--strict", folder / "given" / "libdc" / "_dc_api.abi3.so"))
        test("mypy, strict", lambda: run(sys.executable, "-m", "mypy"))
        test("mypy names each wrong line of wrong_names.py, and no other", lambda: wrong_names("mypy"))
        test("and so does pyright", lambda: wrong_names("pyright", "--pythonpath", sys.executable))
        found = dict(pythons())
        print(f"    CPythons here: {', '.join(found)}")
        oldest = next(iter(found))
        test(f"{oldest}: it makes the sdist", lambda: packed(found[oldest], folder / "packed"))
        for version, python in found.items():
            test(f"{version}: README's example, a step, doctor, both ways of loading, ctypes, C by two sorts of flags",
                 lambda python=python, version=version: installed(python, given, folder / version))
        test("libdc[cuda]: a plug-in of its own wheel, on the simulated driver, trains as the CPU",
             lambda: cuda_wheel.simulated(given, folder))
    return test.end()


if __name__ == "__main__":
    sys.exit(main())
