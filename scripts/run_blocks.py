#!/usr/bin/env python3
"""The code in README.md, the guide and some other pages works: run_blocks.py FILE… runs every block of code in them.

    sh      each line runs (the trainer in short)
    python  runs; on two ranks where it uses libdc.torch
    c       a program is compiled against the installed package, without warnings, as C and C++, and run; other lines
            are only compiled
    rust    a program runs with the crate `dc`
    text    the output of the block before it, with lines in any order, since ranks print at any time

A block of another language is a fault. Blocks that are not meant to run have no language."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, NamedTuple, Optional

import libdc.config

ROOT = Path(__file__).resolve().parent.parent
STRICT = ["-Wall", "-Wextra", "-Werror"]
LINES = 150
C_LINES = """#include <dc_api.h>
void lines(dc_context *ctx, dc_comm *comm, const int64_t *shape, dc_tensor shard, dc_tensor grad, dc_tensor full,
           dc_tensor gradient);
void lines(dc_context *ctx, dc_comm *comm, const int64_t *shape, dc_tensor shard, dc_tensor grad, dc_tensor full,
           dc_tensor gradient)
{
(void)ctx, (void)comm, (void)shape, (void)shard, (void)grad, (void)full, (void)gradient;
%s
}
"""
CARGO = """[package]
name = "block"
version = "0.0.0"
edition = "2021"

[dependencies]
dc = {{ path = "{root}/bindings/rust/dc" }}

[workspace]
"""


class Done(NamedTuple):
    output: str
    fault: str


def run(*command: object, **environment: str) -> Done:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=3600)
    print(f"$ {' '.join(words)}\n{done.stdout[-2000:]}", flush=True)
    return Done(done.stdout, f"exit status {done.returncode}: {' '.join(words)}" if done.returncode else "")


def c(block: str, folder: Path) -> Done:
    source, program = folder / "block.c", folder / "block"
    where = libdc.config.answers()
    flags = [*STRICT, *where["cflags"].split(), "-pthread"]
    if "int main(" not in block:
        source.write_text(C_LINES % block, encoding="utf-8")
        return run("gcc", "-std=c99", *flags, "-Wno-pedantic", "-fsyntax-only", source)
    source.write_text(block, encoding="utf-8")
    done = run("g++", "-std=c++11", "-x", "c++", *flags, "-fsyntax-only", source)
    done = done if done.fault else run("gcc", "-std=c99", *flags, source, *where["libs"].split(), "-lm", "-o", program)
    return done if done.fault else run(program)


def rust(block: str, folder: Path) -> Done:
    (folder / "src").mkdir()
    (folder / "src" / "main.rs").write_text(block, encoding="utf-8")
    (folder / "Cargo.toml").write_text(CARGO.format(root=ROOT), encoding="utf-8")
    library = libdc.config.answers()["libdir"]
    return run("cargo", "run", "--quiet", "--offline", "--manifest-path", folder / "Cargo.toml", LIBDC_LIB_DIR=library,
               LD_LIBRARY_PATH=library, CARGO_TARGET_DIR=str(ROOT / "build" / "rust"), RUSTFLAGS="-D warnings")


def python(block: str, folder: Path) -> Done:
    path = folder / "block.py"
    path.write_text(block, encoding="utf-8")
    launcher = ["-m", "libdc.run", "-n", "2"] if "libdc.torch" in block else []
    return run(sys.executable, *launcher, path)


def sh(block: str, folder: Path) -> Done:
    short = {"LIBDC_TRAIN_STEPS": "2", "LIBDC_TRAIN_RUNS": str(folder)}
    outputs = [run("bash", "-c", line, **short) for line in block.splitlines() if line]
    return Done("".join(done.output for done in outputs), "\n".join(done.fault for done in outputs if done.fault))


def blocks(path: Path) -> List[str]:
    """The faults of a file's blocks."""
    faults, last = [], None  # type: List[str], Optional[Done]
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    fences = re.findall(r"^ *(?:```|~~~)", text, re.M)
    if len(fences) != 2 * len(found):  # else text between two blocks would be taken for a block
        faults.append(f"{path.name}: {len(fences)} lines of ``` or ~~~, {2 * len(found)} of which are ends of blocks")
    for language, block in found:
        if language == "text":
            if last is None or sorted(last.output.splitlines()) != sorted(block.splitlines()):
                faults.append(f"{path.name} shows\n{block}but this was printed:\n{last.output if last else ''}")
        elif language in ("c", "rust", "python", "sh"):
            with tempfile.TemporaryDirectory() as folder:
                last = {"c": c, "rust": rust, "python": python, "sh": sh}[language](block, Path(folder))
            faults += [last.fault] if last.fault else []
        elif language:
            faults.append(f"{path.name}: a block of {language}, which nothing runs")
    print(f"{path.name}: {len(found)} blocks", flush=True)
    return faults


def main() -> int:
    faults: List[str] = []
    for name in sys.argv[1:]:
        path = ROOT / name
        lines = len(path.read_text(encoding="utf-8").splitlines())
        faults += [f"{name} has {lines} lines, at most {LINES} are allowed"] if lines > LINES else []
        faults += blocks(path)
    print("\n".join(faults) or "all blocks work")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
