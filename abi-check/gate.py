"""The gate: a library's ABI, as libabigail reads it from debug information, against a release's baseline."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import List

from header import must, read, run

# No locations and no paths: baselines are the same on every machine. Headers are named only here, when writing; named
# at the comparison as well, types without a location would count as private, and changes of them would pass.
WRITE = ["--drop-private-types", "--no-show-locs", "--no-corpus-path", "--no-comp-dir-path", "--no-elf-needed",
         "--type-id-style", "hash", "--exported-interfaces-only"]


def write(library: Path, include: Path, target: Path) -> None:
    must("abidw", "--headers-dir", include, *WRITE, "--out-file", target, library)
    # The translation units' names, which must differ, without the way there.
    text = re.sub(r" path='[^']*/(src/[^']*)'", r" path='\1'", target.read_text(encoding="utf-8"))
    target.write_text(text, encoding="utf-8")


def _growth(include: Path, release: Path) -> str:
    """The suppression of structs that have only grown at their end, which sized structs may."""
    before, now = read(release / "dc_api.h").structs, read(include / "dc_api.h").structs
    grown = [name for name, fields in before.items() if "struct_size" in fields and name in now
             and len(now[name]) > len(fields) and list(now[name].items())[: len(fields)] == list(fields.items())]
    return (f"[suppress_type]\n  type_kind = struct\n  name_regexp = ^({'|'.join(grown)})$\n"
            "  has_data_member_inserted_at = end\n")


def faults(library: Path, include: Path, baseline: Path, release: Path) -> List[str]:
    """The faults; none if the library has all that the baseline has, unchanged but for structs that grew."""
    absent = [tool for tool in ("abidw", "abidiff", "readelf") if shutil.which(tool) is None]
    if absent:
        return [f"{tool} is not installed (Debian: abigail-tools, binutils)" for tool in absent]
    if not baseline.is_file() or baseline.stat().st_size == 0:
        return [f"no baseline {baseline.name}"]
    # abidiff finds two libraries without debug information alike.
    if ".debug_info" not in must("readelf", "-SW", library):
        return [f"no debug information in {library.name}"]
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / "now.abi"
        write(library, include, now)
        rules = Path(folder) / "growth.suppr"
        rules.write_text(_growth(include, release), encoding="utf-8")
        done = run("abidiff", "--no-added-syms", "--suppressions", rules, baseline, now)
    # Bits: 1 error, 2 usage, 4 change, 8 incompatible change.
    if done.returncode:
        told = [line.strip() for line in done.stdout.splitlines() if re.search(r"^\s+\S", line)]
        return [f"abidiff {done.returncode}: {' / '.join(told[:3]) or done.stderr.strip()}"]
    return []
