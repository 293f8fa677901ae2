"""The command `libdc` of the installed package, also `python -m libdc`: the compiled tool beside the library."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    os.environ.setdefault("LIBDC_PYTHON", sys.executable)  # the interpreter that libdc doctor asks about the package
    os.execv(Path(__file__).with_name("libdc"), ["libdc", *sys.argv[1:]])


if __name__ == "__main__":
    main()
