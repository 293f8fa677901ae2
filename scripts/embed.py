#!/usr/bin/env python3
"""A file as a C array: embed.py NAME INPUT OUTPUT."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    name, source, target = sys.argv[1:]
    data = Path(source).read_bytes()
    lines = (",".join(map(str, data[at:at + 32])) for at in range(0, len(data), 32))
    body = ",\n".join(lines)
    # Images are read in words.
    Path(target).write_text(f"extern const unsigned char {name}[];\n"
                            f"_Alignas(64) const unsigned char {name}[] = {{\n{body}}};\n", encoding="ascii")


if __name__ == "__main__":
    main()
