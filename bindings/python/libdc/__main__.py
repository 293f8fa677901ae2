"""The command `libdc` of the installed package, also `python -m libdc`: the compiled tool beside the library, and the
planner and the simulator, which are Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import List


def is_of_layer(words: List[str]) -> bool:
    """Whether `libdc plan` with these words is the compiled tool's. Its operand, `layer`, may follow its options."""
    return not words or words[0] in ("layer", "--help") or (words[-1] == "layer" and words[-2] not in ("--html",
                                                                                                     "--machine"))


def main() -> None:
    if sys.argv[1:2] == ["plan"] and not is_of_layer(sys.argv[2:]):
        from .plan.__main__ import main as plan

        sys.exit(plan(sys.argv[2:]))
    if sys.argv[1:2] == ["sim"]:
        from .plan.simulate import main as simulate

        sys.exit(simulate(sys.argv[2:]))
    if sys.argv[1:2] == ["bench"] and any(argument.split("=")[0] == "--machine" for argument in sys.argv):
        from .plan.measure import main as measure

        sys.exit(measure(sys.argv[2:]))
    os.environ.setdefault("LIBDC_PYTHON", sys.executable)  # the interpreter that libdc doctor asks about the package
    os.execv(Path(__file__).with_name("libdc"), ["libdc", *sys.argv[1:]])


if __name__ == "__main__":
    main()
