"""Where the library of this package is, for C programs: python -m libdc.config --cflags --libs.

The same is in dc.pc, beside the library: PKG_CONFIG_PATH=$(python -m libdc.config --pkgconfigdir) pkg-config --libs
dc."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Dict

HERE = os.path.dirname(os.path.abspath(__file__))


def answers() -> Dict[str, str]:
    """The text that each option prints."""
    folder, include = shlex.quote(HERE), shlex.quote(os.path.join(HERE, "include"))
    return {
        "cflags": f"-I{include}",
        "libs": f"-L{folder} -Wl,-rpath,{folder} -ldc",
        "includedir": os.path.join(HERE, "include"),
        "libdir": HERE,
        "library": os.path.join(HERE, "libdc.so.0.1"),
        "pkgconfigdir": HERE,
        "json": os.path.join(HERE, "dc_api.json"),
    }


def main() -> int:
    helps = {
        "cflags": "flags for the compiler", "libs": "flags for the linker", "includedir": "folder of dc_api.h",
        "libdir": "folder of the library", "library": "path of the library, for foreign-function interfaces",
        "pkgconfigdir": "folder of dc.pc", "json": "the header as data, for bindings",
    }
    parser = argparse.ArgumentParser(prog="python -m libdc.config", description="Where the library of this package is.")
    for name, text in helps.items():
        parser.add_argument(f"--{name}", dest="asked", action="append_const", const=name, help=text)
    asked = parser.parse_args().asked
    if not asked:
        parser.error("nothing asked; see --help")
    print(" ".join(answers()[name] for name in asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
