#!/usr/bin/env python3
"""README.md has at most 150 lines, and what it shows works: every command of its ```sh blocks runs (in short), every
```python block runs, the one with PyTorch on two ranks, and every ```c block compiles against the header."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs"
SHORT = {"LIBDC_TRAIN_STEPS": "2"}
C_BLOCK = """#include "dc_api.h"
void readme(dc_context *ctx, const int64_t *shape, dc_tensor shard, dc_tensor grad, dc_tensor full, dc_tensor gradient);
void readme(dc_context *ctx, const int64_t *shape, dc_tensor shard, dc_tensor grad, dc_tensor full, dc_tensor gradient)
{
%s
}
"""


def run(*command: str, **environment: str) -> str:
    """A complaint, or nothing."""
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
    print(f"$ {' '.join(command)}\n{done.stdout[-2000:]}", flush=True)
    return f"exit status {done.returncode}: {' '.join(command)}" if done.returncode else ""


def main() -> int:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, re.S | re.M)
    faults = [f"README.md has {n} lines, at most 150 are allowed" for n in [len(text.splitlines())] if n > 150]
    before = set(RUNS.iterdir()) if RUNS.exists() else set()
    with tempfile.TemporaryDirectory() as folder:
        for number, (language, block) in enumerate(blocks):
            path = Path(folder) / f"block{number}.{language}"
            if language == "sh":
                faults += [run("bash", "-c", line, **SHORT) for line in block.splitlines() if line]
            elif language == "python":
                path.write_text(block, encoding="utf-8")
                launcher = ["-m", "libdc.run", "-n", "2"] if "libdc.torch" in block else []
                faults.append(run(sys.executable, *launcher, str(path)))
            elif language == "c":
                path.write_text(C_BLOCK % block, encoding="utf-8")
                faults.append(run("gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-Iinclude", "-fsyntax-only", str(path)))
    for new in set(RUNS.iterdir()) - before if RUNS.exists() else ():
        shutil.rmtree(new, ignore_errors=True)
    faults = [fault for fault in faults if fault]
    print("\n".join(faults) or f"README.md: {len(blocks)} blocks work")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
