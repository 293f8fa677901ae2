"""python -m libdc.torch.deepspeed [-m] PROGRAM [ARGUMENT…]: runs a program, or with -m a module, with DeepSpeed on
libdc and without changes to the program. LIBDC_DEEPSPEED names the communicator of enable(); the default is "auto"."""

from __future__ import annotations

import os
import runpy
import sys

from . import enable


def main() -> None:
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    program = arguments[is_module:]
    if not program or program[0].startswith("-"):
        sys.exit("usage: python -m libdc.torch.deepspeed [-m] PROGRAM [ARGUMENT…]")
    enable(os.environ.get("LIBDC_DEEPSPEED") or "auto")
    sys.argv[:] = program
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
