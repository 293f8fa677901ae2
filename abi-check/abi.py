#!/usr/bin/env python3
"""Everything that keeps the ABI: abi.py LIBRARY TESTS. LIBRARY is a debug build, TESTS the folder of its test programs.
Prints what it compared, and ends with one line, `N passed, N failed`. A tool that is missing is a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Callable, List

from pycparser.c_parser import ParseError  # type: ignore[import-untyped]

import clients
import contract
import edges
import gate
import mutants
import surface
from header import ROOT, read

RELEASES = sorted(path for path in (ROOT / "abi-check").glob("*.*") if path.is_dir())


def struct_rows() -> List[str]:
    """Each sized struct has a row in the table of tests/abi/test_growth.c."""
    text = (ROOT / "tests" / "abi" / "test_growth.c").read_text(encoding="utf-8")
    sized = [name for name, fields in read(ROOT / "include" / "dc_api.h").structs.items()]
    missing = [name for name in sized if f"ROW({name}," not in text]
    print(f"  {len(sized)} sized structs, {len(sized) - len(missing)} rows in tests/abi/test_growth.c")
    return [f"{name}: no row in tests/abi/test_growth.c" for name in missing] + ([] if sized else ["no structs found"])


def main() -> int:
    library, tests = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    include = ROOT / "include"
    failed = 0
    passed = 0

    def check(what: str, faults: Callable[[], List[str]]) -> None:
        nonlocal failed, passed
        print(what)
        try:
            found = faults()
        except (SystemExit, OSError, subprocess.SubprocessError, ParseError) as error:  # a tool is missing, or fails
            found = [str(error)]
        print("".join(f"  FAIL {fault}\n" for fault in found) or "  ok")
        failed, passed = failed + bool(found), passed + (not found)

    check("releases that are kept", lambda: [] if RELEASES else ["none: run abi-check/freeze.py"])
    for release in RELEASES:
        baseline = release / "libdc.x86_64.abi"
        check(f"the ABI of {library.name} has all of {release.name}, unchanged ({baseline.relative_to(ROOT)})",
              lambda: gate.faults(library, include, baseline, release))
        check(f"initialisers, parameters and version of {release.name}, and C++ clients",
              lambda: contract.faults(include, library, release))
        check(f"programs built for {release.name} on {library.name}", lambda: clients.old_on_new(release, library))
        check(f"programs built for {release.name} on a library whose structs have all grown",
              lambda: clients.old_on_grown(release))
    check("what the library asks of the loader", lambda: contract.elf_faults(library))
    check("today's header has the layouts, constants and prototypes of every release (tests/abi)",
          lambda: mutants.lock_faults(include))
    check("changes that the gate and the locks must catch, and changes that they must let pass",
          lambda: mutants.main(RELEASES[-1] / "libdc.x86_64.abi"))
    check(f"a program built for a newer libdc on {library.name}", lambda: clients.new_on_old(library))
    check("every list of functions is the same", lambda: surface.faults(library, tests))
    check("every function, called with nothing and with numbers at their edges, returns, names itself, and leaves "
          "outputs, locale, rounding and traps alone",
          lambda: edges.faults(library))
    check("Python's own layout of the structs is that of the locks", surface.layout_faults)
    check("every place says the same version", surface.version_faults)
    check("every sized struct is tested as it grows", struct_rows)
    print(f"{passed} passed, {failed} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
