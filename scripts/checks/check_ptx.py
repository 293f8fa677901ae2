#!/usr/bin/env python3
"""The PTX in tests/cudasim/ptx was made from the kernels' current sources."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ptx_texts import ARCHIVE, FAMILIES, ROOT, digest, noted


def main() -> int:
    then, now = noted(), {family: digest(family) for family in FAMILIES}
    changed = [family for family in sorted({*then, *now}) if then.get(family) != now.get(family)]
    for family in changed:
        print(f"{ARCHIVE.relative_to(ROOT)}: the sources of {family} have changed since; `make cuda` makes it anew, "
              "without a card")
    if not changed:
        print(f"{ARCHIVE.relative_to(ROOT)}: the PTX of {', '.join(FAMILIES)}")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
