#!/usr/bin/env python3
"""The wheel libdc-cuda beside the wheel libdc, in a fresh environment: cuda_wheel.py FOLDER, which has both. It has the
plug-in alone, for old distributions, and libdc finds it. The simulated driver of suite gcc executes the PTX that nvcc
put into it; suite wheel packs a plug-in of the C++ build. Ends with one line, `N passed, N failed`."""

from __future__ import annotations

import re
import sys
import tempfile
import zipfile
from pathlib import Path

from support import LIBC_OF_OLD, ROOT, Tests, environment, needed, require, run

SIMULATED = ROOT / "build" / "gcc" / "tests" / "cudasim"
MOST = 5 << 20  # bytes of the wheel
OPEN = "import libdc\ntry:\n  libdc.Device('cuda')\n  print('opened')\nexcept libdc.Error as error:\n  print(error)"
# The steps of examples/step, with weights in the device's memory.
STEPS = """import libdc, numpy as np
from libdc.linalg import Handle
from libdc.optim.arrays import AdamW
from simulated import memory, there

device = libdc.Device("cuda")
adamw = AdamW(0.01, Handle(1, device=device), weight_decay=0.1)
adamw.add_param((4,))
weights = there(np.array([1, -2, 3, 0.5], np.float32), device)
for _ in range(3):
    adamw.step([weights], [there(np.array([0.5, 0.25, -1, 0], np.float32), device)])
for weight in memory(weights).view(np.float32):
    print(f"{weight.view(np.uint32):08x} {weight:.6f}")
"""


def contents(wheel: Path, folder: Path) -> None:
    """The plug-in alone; it needs no library but glibc, and gives one function."""
    require(wheel.stat().st_size < MOST, f"it has {wheel.stat().st_size} bytes, at most {MOST} are allowed")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
        archive.extractall(folder)
    require(names == {"libdc/libdc_cuda.so"}, f"it has {sorted(names)}")
    version = wheel.name.split("-")[1]
    require(re.findall(r"^Requires-Dist: (libdc\b.*)$", metadata, re.M) == [f"libdc=={version}"],
            f"it does not ask for its own version of libdc:\n{metadata}")
    plugin = folder / "libdc" / "libdc_cuda.so"
    require(needed(plugin) <= LIBC_OF_OLD, f"it needs {sorted(needed(plugin))}")
    given = re.findall(r" T (\w+)", run("nm", "-D", "--defined-only", plugin))
    require(given == ["dc_plugin_entry"], f"it exports {given}")
    print(f"    {plugin.name:<20}{plugin.stat().st_size:>9} bytes, needs {', '.join(sorted(needed(plugin)))}; "
          f"the wheel has {wheel.stat().st_size}")


def driver() -> str:
    """The folder of the simulated driver."""
    require((SIMULATED / "libdc_cuda.so").exists(), "the simulated driver is not built: make test SUITES=gcc")
    return str(SIMULATED)


def opening(own: Path, says: str) -> None:
    said = run(own, "-c", OPEN, folder=own.parent)
    require(re.search(says, said), f"opening the device says {said}")


def compare_steps(own: Path) -> None:
    """Those of the simulated driver have the CPU's bits."""
    steps = run(own, "-c", STEPS, folder=own.parent, LD_LIBRARY_PATH=driver(),
                PYTHONPATH=str(ROOT / "tests" / "python"))
    require(steps == run(own, ROOT / "examples" / "step" / "step.py", folder=own.parent), f"other bits:\n{steps}")


def simulated(libdc: Path, folder: Path) -> None:
    """With the plug-in of the simulated driver."""
    run(sys.executable, "packaging/make_cuda_wheel.py", folder, Path(driver()) / "libdc_cuda.so")
    own = environment(Path(sys.executable), folder / "simulated", f"{libdc}[cuda,numpy]", "--find-links", folder)
    compare_steps(own)
    run(sys.executable, "-m", "pip", "--python", own, "uninstall", "--quiet", "--yes", "libdc-cuda")
    opening(own, "this installation has no libdc_cuda.so")


def main() -> int:
    wheels, test = Path(sys.argv[1]).resolve(), Tests()
    libdc, cuda = (next(wheels.glob(f"{name}-*.whl"), wheels / "none.whl") for name in ("libdc", "libdc_cuda"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        test(f"{cuda.name}: auditwheel agrees with its tag", lambda: require(re.search(
            r"manylinux_2_(1\d|2[0-8])_", run(sys.executable, "-m", "auditwheel", "show", cuda)), "it does not"))
        test("  its contents; it needs glibc alone", lambda: contents(cuda, folder / "contents"))
        own = folder / "environment" / "bin" / "python"
        test("pip installs libdc[cuda]", lambda: environment(
            Path(sys.executable), folder / "environment", f"{libdc}[cuda,numpy]", "--find-links", wheels))
        test("  the device opens, or says that there is no driver", lambda: opening(own, "opened|libcuda.so.1"))
        test("  on the simulated driver it trains as the CPU, by its PTX", lambda: compare_steps(own))
        test("a plug-in for the simulated driver trains as the CPU", lambda: simulated(libdc, folder))
    return test.end()


if __name__ == "__main__":
    sys.exit(main())
