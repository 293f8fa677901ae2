"""The command `dc` of the installed package: the compiled tool beside the library."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    os.environ.setdefault("LIBDC_PYTHON", sys.executable)  # the interpreter that dc doctor asks about the package
    os.execv(Path(__file__).with_name("dc"), ["dc", *sys.argv[1:]])
