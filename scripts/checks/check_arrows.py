#!/usr/bin/env python3
"""Reads every #include under src/. A module may include the modules that EDGES names, each by its one header,
MODULE/MODULE.h; docs/architecture.md draws the same edges, and each of them is used. Only files named *_cuda and those
in folders `cuda` may include headers named *_cuda.h, of which other modules may include
src/kernels/cuda/kernels_cuda.h. Bindings, examples and tools include only the public header. Every function of the
public header is defined under src/api. Prints FILE:LINE of each fault."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Set, Tuple

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
# From the top down: a module includes only modules below it, so there is no cycle.
EDGES: Dict[str, List[str]] = {
    "api": ["planner", "optim", "runtime", "transformer", "linalg", "comm", "kernels", "device"],
    "planner": ["transformer"],
    "optim": ["linalg", "comm", "kernels"],
    "runtime": ["comm", "kernels"],
    "transformer": ["kernels", "device", "base"],
    "linalg": ["kernels", "device"],
    "comm": ["kernels", "device", "base"],
    "kernels": ["device", "base"],
    "device": ["base"],
    "base": [],
}
ORDER = list(EDGES)
CUDA_KERNELS = SRC / "kernels" / "cuda" / "kernels_cuda.h"
# Files for the host that still have a branch for CUDA. stream.c is the one that chooses the device's kernels.
CUDA_BRANCHES = {"kernels/elementwise/stream.c", "linalg/kron/kron.c", "linalg/per_sample/per_sample.c",
                 "optim/blockwise/blockwise_plan.c", "optim/blockwise/partition.c", "transformer/layout.c",
                 "transformer/submit.c"}
OUTSIDE = ["bindings", "examples", "tools"]
PUBLIC = "dc_api.h"
# Files outside of src/api that define public functions: lower modules call these, and the CUDA plug-in has a copy of
# one.
PUBLIC_BELOW = {"base/op.c", "base/status.c", "base/tensor.c", "device/buffer.c", "device/cuda/plugin_host.c"}
SUFFIXES = {".c", ".h", ".cc", ".cpp", ".cu", ".cuh", ".inc"}


def sources(folder: Path) -> List[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())


def includes(path: Path) -> Iterator[Tuple[int, str, str]]:
    """(line number, text after #include, the file name in it or "")."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = re.match(r"\s*#\s*include(?:_next)?\b\s*(.*)", line)
        if match:
            name = re.match(r'[<"]([^>"]+)[>"]', match[1])
            yield number, match[1].strip(), name[1] if name else ""


def resolve_include(path: Path, name: str) -> Optional[Path]:
    """The project's file that the compiler would include; it looks beside the including file first."""
    for folder in (path.parent, SRC, ROOT / "include"):
        if (folder / name).is_file():
            return (folder / name).resolve()
    return None


def module_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0]


def is_for_cuda(path: Path) -> bool:
    return path.stem.endswith("_cuda") or path.parent.is_relative_to(SRC / "kernels" / "cuda") or \
        path.parent.is_relative_to(SRC / "device" / "cuda")


def check_module_include(path: Path, text: str, name: str) -> str:
    """The reason why a file of a module may not include this; "" if it may."""
    module = module_of(path)
    if module not in EDGES:
        return f"{module} is no module of EDGES"
    if not name:
        return "an #include must name its file"
    target = resolve_include(path, name)
    if target is None:
        return "no such file" if text.startswith('"') else ""
    if target == ROOT / "include" / PUBLIC:
        return ""
    if SRC not in target.parents:
        return "it is not in src"
    if target.stem.endswith("_cuda") and not is_for_cuda(path) \
            and path.relative_to(SRC).as_posix() not in CUDA_BRANCHES:
        return "it is for files named *_cuda"
    other = module_of(target)
    if other == module:
        return ""
    if other not in EDGES[module]:
        return f"{module} may include {', '.join(EDGES[module]) or 'no other module'}"
    if target in (SRC / other / f"{other}.h", CUDA_KERNELS):
        return ""
    return f"it is private to {other}; include {other}/{other}.h"


def check_outside_include(path: Path, text: str, name: str) -> str:
    target = resolve_include(path, name) if name else None
    return f"only {PUBLIC} is public" if target is not None and SRC in target.parents else ""


def used_edges() -> Set[Tuple[str, str]]:
    targets = ((path, resolve_include(path, name)) for path in sources(SRC) for _, _, name in includes(path) if name)
    return {(module_of(path), module_of(target)) for path, target in targets if target and SRC in target.parents}


def drawn_edges() -> Dict[str, List[str]]:
    """The graph of docs/architecture.md: lines `MODULE → MODULE MODULE…`."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return {module: others.split() for module, others in re.findall(r"^(\w+) +→((?: +\w+)+)$", text, re.M)}


def check_graph() -> List[str]:
    used = used_edges()
    lines = [f"EDGES: {module} → {other} goes up" for module, others in EDGES.items() for other in others
             if ORDER.index(other) <= ORDER.index(module)]
    lines += [f"EDGES: {module} → {other} is allowed and unused" for module, others in EDGES.items() for other in others
              if (module, other) not in used]
    if drawn_edges() != {module: others for module, others in EDGES.items() if others}:
        lines.append("docs/architecture.md draws other edges than EDGES has, or in another order")
    return lines


def check_includes() -> Tuple[int, List[str]]:
    count = 0
    lines = []
    for folder, fault in [(SRC, check_module_include), *((ROOT / name, check_outside_include) for name in OUTSIDE)]:
        for path in sources(folder):
            for number, text, name in includes(path):
                count += 1
                reason = fault(path, text, name)
                if reason:
                    lines.append(f"{path.relative_to(ROOT)}:{number}: #include {text}: {reason}")
    return count, lines


def check_public_headers() -> List[str]:
    """Definitions of public functions outside src/api."""
    header = re.sub(r"/\*.*?\*/", "", (ROOT / "include" / PUBLIC).read_text(encoding="utf-8"), flags=re.S)
    public = set(re.findall(r"\b(dc_\w+)\(", header))
    lines = []
    for path in sources(SRC):
        if module_of(path) == "api" or str(path.relative_to(SRC)) in PUBLIC_BELOW:
            continue
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"^(?!static\b)[A-Za-z][\w *]*?\b(dc_\w+)\([^;{}]*\)\s*\{", text, re.M):
            if match[1] in public:
                number = text.count("\n", 0, match.start()) + 1
                lines.append(f"{path.relative_to(ROOT)}:{number}: {match[1]} is public; define it under src/api")
    return lines


def main() -> int:
    count, lines = check_includes()
    lines += check_public_headers()
    lines += check_graph()
    edges = sum(len(others) for others in EDGES.values())
    print("\n".join(lines) or f"{count} includes along {edges} edges, all of them allowed, drawn and used")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
