#!/usr/bin/env python3
"""Every public function first masks the traps of floating-point exceptions (src/base/traps.h), except those that
neither compute nor wait."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parents[2]
# These return stored values, fill in a struct, or use only integers.
PLAIN = re.compile(r"dc_\w+_init$|dc_(api_version|version_string|has_feature|status_name|status_string|last_error"
                   r"|last_error_copy|dtype_size|dtype_name|device_name|buffer_retain|buffer_data|buffer_bytes"
                   r"|comm_rank|comm_size|is_profiling|op_name|linalg_solver|crc32c)$")
BODY = re.compile(r"^[a-z]\w*(?: \w+)*[ *]+(dc_[a-z]\w*)\([^;{]*\) \{\n(.*)$", re.M)


def first_statements() -> Dict[str, str]:
    """The first line in the body of each public function."""
    found: Dict[str, str] = {}
    for path in sorted((ROOT / "src").rglob("*.c")):
        for name, line in BODY.findall(path.read_text(encoding="utf-8")):
            if not name.startswith("dc__"):
                found[name] = line.strip()
    return found


def check_statements() -> List[str]:
    header = (ROOT / "include" / "dc_api.h").read_text(encoding="utf-8")
    public = re.findall(r"\b(dc_\w+)\(", "".join(re.findall(r"^DC_API [^;]*;", header, re.M)))
    first = first_statements()
    lost = [f"{name}: no definition found in src" for name in public if name not in first]
    return lost + [f"{name}: does not begin with DC__WITHOUT_TRAPS" for name in public
                   if name in first and not PLAIN.match(name) and first[name] != "DC__WITHOUT_TRAPS;"]


def main() -> int:
    found = check_statements()
    print("\n".join(found) or "public functions mask traps")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
