#!/usr/bin/env python3
"""One scenario in many languages, one network trained in three, and steps of an optimizer in five, must print the
same: run.py LIBRARY, with LIBRARY a libdc.so. Ends with one line, `N passed, N failed`. A language that is missing is a
failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, List

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = ROOT / "tests" / "ffi"
EXAMPLES = ROOT / "examples"
JNA = "/usr/share/java/jna.jar"
LIMIT = 2400


class Builder:
    """Makes commands; what they need is built in a folder."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ, "LIBDC_LIBRARY": str(library), "LIBDC_LIB_DIR": str(library.parent),
            "LIBDC_CDEF": str(folder / "dc.cdef"), "CARGO_TARGET_DIR": os.environ.get("CARGO_TARGET_DIR",
                                                                                  str(ROOT / "build" / "rust")),
        }
        self.link = [f"-I{ROOT / 'include'}", f"-L{library.parent}", "-ldc", f"-Wl,-rpath,{library.parent}", "-pthread"]

    def run(self, *command: object) -> str:
        words = [str(word) for word in command]
        if shutil.which(words[0]) is None:
            raise RuntimeError(f"{words[0]} is not installed")
        done = subprocess.run(words, capture_output=True, text=True, env=self.environment, timeout=LIMIT,
                              stdin=subprocess.DEVNULL)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def compiled(self, compiler: str, source: Path, *flags: str) -> List[str]:
        program = self.folder / f"{source.stem}-{compiler}"
        self.run(compiler, *flags, "-Wall", "-Wextra", "-Wpedantic", "-Werror", source, *self.link, "-o", program)
        return [str(program)]

    def rust(self, example: str) -> List[str]:
        self.run("cargo", "build", "--quiet", "--offline", "--manifest-path", ROOT / "bindings/rust/Cargo.toml",
                 "--example", example)
        return [str(Path(self.environment["CARGO_TARGET_DIR"]) / "debug" / "examples" / example)]

    def go(self) -> List[str]:
        program = self.folder / "step-go"
        flags = {"CGO_CFLAGS": self.link[0], "CGO_LDFLAGS": " ".join(self.link[1:]), "GOCACHE": str(self.folder / "go"),
                 "GO111MODULE": "off", "GOFLAGS": ""}
        self.environment.update(flags)
        self.run("go", "build", "-o", program, EXAMPLES / "step" / "step.go")
        return [str(program)]

    def pascal(self) -> List[str]:
        program, library = self.folder / "step-pascal", Path(self.environment["LIBDC_LIBRARY"]).parent
        self.run("fpc", "-O2", "-vewn", f"-Fl{library}", f"-k-rpath={library}", f"-o{program}",
                 f"-FU{self.folder}", EXAMPLES / "step" / "step.pas")
        return [str(program)]

    def lua(self) -> List[str]:
        generator, header = ROOT / "bindings/python/gen_cdef.py", ROOT / "include/dc_api.h"
        self.run(sys.executable, generator, header, self.folder / "dc.cdef")
        return ["luajit", str(HERE / "scenario.lua")]

    def java(self) -> List[str]:
        self.run("javac", "-cp", JNA, "-d", self.folder, HERE / "Scenario.java")
        return ["java", "-cp", f"{JNA}:{self.folder}", "Scenario"]

    def ocaml(self) -> List[str]:
        source, program = shutil.copy(HERE / "scenario.ml", self.folder), self.folder / "scenario-ocaml"
        self.run("ocamlfind", "ocamlopt", "-thread", "-package", "threads.posix,ctypes,ctypes.foreign", "-linkpkg",
                 source, "-o", program)
        return [str(program)]

    def scenarios(self) -> Dict[str, Callable[[], List[str]]]:
        # The first is what the others are compared with.
        return {
            "C": lambda: self.compiled("cc", HERE / "scenario.c", "-std=c99"),
            "C++": lambda: self.compiled("c++", HERE / "scenario.c", "-xc++", "-std=c++11"),
            "Rust": lambda: self.rust("scenario"),
            "Python, cffi": lambda: [sys.executable, str(HERE / "scenario_cffi.py")],
            "Python, ctypes": lambda: [sys.executable, str(HERE / "scenario_ctypes.py")],
            "LuaJIT": self.lua,
            "Perl": lambda: ["perl", str(HERE / "scenario.pl")],
            "Java": self.java,
            "OCaml": self.ocaml,
        }

    def networks(self) -> Dict[str, Callable[[], List[str]]]:
        return {
            "C": lambda: self.compiled("cc", EXAMPLES / "c" / "mlp.c", "-std=c99", "-O2", "-ffp-contract=off"),
            "Rust": lambda: self.rust("mlp"),
            "Python": lambda: [sys.executable, str(EXAMPLES / "python" / "mlp.py")],
        }

    def steps(self) -> Dict[str, Callable[[], List[str]]]:
        return {
            "C": lambda: self.compiled("cc", EXAMPLES / "step" / "step.c", "-std=c99"),
            "Go": self.go,
            "Free Pascal": self.pascal,
            "Rust, dc": lambda: self.rust("step"),
            "Rust, dc-sys": lambda: self.rust("step_sys"),
            "Python": lambda: [sys.executable, str(EXAMPLES / "step" / "step.py")],
        }

    def ranks(self, command: List[str]) -> str:
        """The output of two processes, rank after rank."""
        if shutil.which(command[0]) is None:
            raise RuntimeError(f"{command[0]} is not installed")
        group = f"ffi-{os.getpid()}-{time.monotonic_ns()}"
        started = [subprocess.Popen([*command, str(rank), group], env=self.environment, text=True,
                                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                   for rank in range(2)]
        try:
            printed = [process.communicate(timeout=LIMIT)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        if any(process.returncode for process in started):
            raise RuntimeError("\n".join(printed))
        return "".join(printed)


def compare(what: str, commands: Dict[str, Callable[[], List[str]]], output: Callable[[List[str]], str]) -> List[bool]:
    """Runs each; whether it printed what the first did."""
    first, same = "", []
    for language, command in commands.items():
        try:
            printed = output(command())
            fault = "" if printed == first or not first else f"printed\n{printed}"
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            printed, fault = "", str(error)
        if not first:
            first = printed
            fault = fault or ("" if printed.strip() else "printed nothing")
        print(f"{what:<9} {language:<15} {fault or f'{len(printed.splitlines())} lines, the same'}", flush=True)
        same.append(not fault)
    print(first)
    return same


def main() -> int:
    library = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        builder = Builder(library, Path(folder))
        results = compare("scenario", builder.scenarios(), builder.ranks)
        for what, programs in (("network", builder.networks()), ("step", builder.steps())):
            results += compare(what, programs, lambda command: builder.run(*command))
    print(f"{results.count(True)} passed, {results.count(False)} failed")
    return not all(results)


if __name__ == "__main__":
    sys.exit(main())
