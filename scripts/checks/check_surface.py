#!/usr/bin/env python3
"""The header, the version script and a built library name the same functions: check_surface.py [LIBRARY]; without it,
the installed Python package's. The library needs only the C library. It does not print, end the process, install signal
handlers, or read the environment except READ. Its dc_x_init() functions give the same bytes as the header's DC_X_INIT
macros."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List

from check_header import ROOT, initialisers, read

NEEDED = re.compile(r"(libc|libm|libpthread|libdl|ld-linux.*)\.so\.\d+")
READ = {"LIBDC_CPU", "LIBDC_CUDA_LIB_DIR", "LIBDC_MPI_LIB", "NCCL_COMM_BLOCKING"}  # LIBDC_CUDA_LIB_DIR: by the plug-in
MPI_LAUNCHERS = {"FLUX_TASK_RANK", "OMPI_COMM_WORLD_SIZE", "PALS_RANKID", "PMIX_RANK", "PMI_FD", "PMI_RANK",
                 "SLURM_PROCID"}
LAUNCH = ROOT / "src" / "comm" / "launch" / "launch.c"  # dc_launch_get(), whose purpose is to read the environment
FORBIDDEN = {
    "abort", "exit", "_exit", "_Exit", "quick_exit", "__assert_fail", "getenv", "setenv", "putenv",
    "signal", "sigaction", "raise", "printf", "vprintf", "puts", "putchar", "perror", "fprintf", "vfprintf", "dprintf",
    "fputs", "fputc", "fwrite", "stdout", "stderr", "__printf_chk", "__fprintf_chk", "__vfprintf_chk", "setlocale",
    "fesetround", "system", "popen", "fork",
}  # fmt: skip
# Allowed: __register_atfork, once in src/comm/tcp/socket.c, since a child with copies of a rank's sockets would hide
# the rank's death from its peers. Also atexit, once in src/comm/mpi/runtime.c, since libdc must finalize the MPI that
# it initialised, and only then can. Launchers report a process as failed that ends without.


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def symbols(library: Path, flag: str) -> List[str]:
    """The dynamic symbols' names with versions, without the version nodes themselves."""
    lines = (line.split() for line in output("nm", "-D", flag, str(library)).splitlines())
    return [words[-1] for words in lines if words[-2] != "A"]


def check_names(library: Path) -> List[str]:
    header = set(re.findall(r"\b(dc_\w+)\(", "".join(re.findall(r"^DC_API [^;]*;", read(), re.M))))
    script = (ROOT / "src" / "libdc.map").read_text(encoding="utf-8")
    mapped = re.findall(r"^\s+(dc_\w+);", script, re.M)
    node = re.findall(r"^(DC_[\d.]+) \{", script, re.M)
    exported = dict(name.partition("@@")[::2] for name in symbols(library, "--defined-only"))
    faults = [f"{name}: in the header, not in src/libdc.map" for name in sorted(header - set(mapped))]
    faults += [f"{name}: in src/libdc.map, not in the header" for name in sorted(set(mapped) - header)]
    faults += [f"{name}: exported, not in the header" for name in sorted(set(exported) - header)]
    faults += [f"{name}: in the header, not exported" for name in sorted(header - set(exported))]
    faults += [f"{name}: its version is not {node}" for name, version in exported.items() if version not in node]
    faults += [f"src/libdc.map: {b} is not after {a}" for a, b in zip(mapped, mapped[1:]) if not a < b]
    return faults


def check_uses(library: Path) -> List[str]:
    called = {name.partition("@")[0] for name in symbols(library, "--undefined-only")}
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", "-W", str(library)))
    faults = [f"{name}: called by the library, which promises not to" for name in sorted(called & FORBIDDEN)]
    read = [variable.strip('"') for path in sorted(set((ROOT / "src").rglob("*.c")) - {LAUNCH})
            for variable in re.findall(r"getenv\((.*?)\)", path.read_text(encoding="utf-8"))]
    faults += [f"{path}: getenv is read by programs with more rights than their caller too, must be secure_getenv"
               for path in sorted((ROOT / "src").rglob("*.c"))
               if re.search(r"(?<!secure_)getenv\(", path.read_text(encoding="utf-8"))]
    if set(read) != READ | MPI_LAUNCHERS:
        faults.append(f"the environment is read for {', '.join(read)}, must be "
                      f"{', '.join(sorted(READ | MPI_LAUNCHERS))}")
    return faults + [f"{name}: needed by the library" for name in needed if not NEEDED.fullmatch(name)]


def check_initialisers(library: Path) -> List[str]:
    """Runs a program that compares each macro's bytes with its function's. Objects are static, so that padding is
    zero."""
    lines = ["#include <dc_api.h>", "#include <stdio.h>", "#include <string.h>", "int main(void) {"]
    for name in initialisers(read()):
        macro = f"{name.upper()}_INIT"
        lines += [f"  {{ static const {name} macro = {macro}; {name} call; memset(&call, 0xa5, sizeof call);",
                  f"    {name}_init(&call, sizeof call);",
                  f'    if (memcmp(&macro, &call, sizeof call) != 0) puts("{name}_init is not {macro}"); }}']
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "main.c", Path(folder) / "main"
        source.write_text("\n".join([*lines, "  return 0; }"]) + "\n", encoding="utf-8")
        output("cc", f"-I{ROOT / 'include'}", str(source), str(library), f"-Wl,-rpath,{library.parent}", "-o",
               str(program))
        return output(str(program)).splitlines()


def main() -> int:
    if len(sys.argv) > 1:
        library = Path(sys.argv[1]).resolve()
    else:
        import libdc

        library = Path(libdc.library_dir()) / "libdc.so.0.1"
    faults = check_names(library) + check_uses(library) + check_initialisers(library)
    print("\n".join(faults) or f"{library.name}: the header's functions and no others; it uses what it may")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
