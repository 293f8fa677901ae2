#!/usr/bin/env python3
"""Things that documents and comments name exist: files by their paths, and sources that a comment names without their
folder. In documents so do names in backquotes: targets of the Makefile, suites, functions and constants of the library.
Planted faults show that missing things are found."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Iterator, List, Set

from check_english import texts as texts_of, tracked_files

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "abi-check|bench|bindings|docs|examples|include|packaging|scripts|src|tests|tools"
FILE = re.compile(rf"(?<![\w/.*$}}-])(?:{FOLDERS}|facts)/[\w./*-]*\w")
SUFFIX = re.compile(r"\.\w+$")  # in code, where strings may be prefixes of paths
# A source without its folder. Names such as x_cpu are placeholders, and the last ones are PyTorch's.
BARE = re.compile(r"(?<![\w/.*-])([a-z]\w+\.(?:c|cu|py))\b(?!\()")
OF_OTHERS = ("src/comm/tcp/hmac/sodium_sha256.c",)
ANY = re.compile(r"x_\w+|test_x|script|test_c10d_\w+|test_fully_shard_\w+")
COMMENTS = {".c", ".h", ".cu", ".cpp", ".py", ".rs", ".pml"}
NOT_READ = ("CHANGELOG.md", "bench/results/", "abi-check/0", "docs/deepspeed.md", "tests/deepspeed/", "tests/mutants/",
            "tests/models/run.py", "tests/packages/", "scripts/checks/check_docs.py")
MADE = re.compile(r"DATE|share/|^build/")


def check_files(name: str, text: str) -> Iterator[str]:
    """Paths that do not exist. A path is relative to the root or the document's folder; one with * must match a
    file."""
    for found in sorted(set(FILE.findall(text))):
        place = found.split(":")[0]
        if not name.endswith((".md", ".build")) and not SUFFIX.search(place) or MADE.search(place):
            continue
        if not any(list(folder.glob(place)) for folder in (ROOT, (ROOT / name).parent)):
            yield f"{name}: there is no {place}"


def check_bare_names(name: str, text: str, names: Set[str]) -> Iterator[str]:
    comments = "\n".join(comment for _, comment in texts_of(name, text)[0])
    for found in sorted(set(BARE.findall(comments)) - names):
        if not ANY.fullmatch(found.rpartition(".")[0]):
            yield f"{name}: there is no {found}"


def check_words(name: str, text: str, words: Set[str]) -> Iterator[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    table = (ROOT / "scripts" / "run_tests.py").read_text(encoding="utf-8")
    suites = set(re.findall(r'^    "([\w-]+)": ', table, re.M))
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)):
        target = re.match(r"make (?:-\w+ )*([a-z][\w-]*)(?: |$)", code)
        if target and not re.search(rf"^{target[1]}:", makefile, re.M):
            yield f"{name}: there is no `make {target[1]}`"
        for suite in (re.findall(r'SUITES="?([\w -]+)', code) or [""])[0].split():
            if suite not in suites:
                yield f"{name}: there is no suite {suite}"
    for word in sorted(set(re.findall(r"\b(?:dc|dc_|DC)_[a-z0-9A-Z]\w*\b(?!_?\*)", text)) - words):
        yield f"{name}: there is no {word}"


def check_page(name: str, text: str, words: Set[str]) -> List[str]:
    found = list(check_files(name, text))
    return found + (list(check_words(name, text, words)) if name.endswith(".md") else [])


PLANTED = {
    "see `src/gone.c`": "there is no src/gone.c", "tests/gone_*.c": "there is no tests/gone_*.c",
    "`make gone`": "there is no `make gone`", '`make test SUITES="gcc gone"`': "there is no suite gone",
    "`dc_gone()`": "there is no dc_gone",
}  # fmt: skip


def main() -> int:
    names = tracked_files()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in names
             if Path(name).suffix in {*COMMENTS, ".md", ".build", ".sh"} and not name.startswith("tests/fuzz/seeds")}
    code = [text for name, text in texts.items() if not name.endswith(".md") and name != "scripts/checks/check_docs.py"]
    words = {word for text in code for word in re.findall(r"\w+", text)}
    words |= set(re.findall(r"\w+", (ROOT / "src" / "libdc.map").read_text(encoding="utf-8")))
    found = [fault for name, text in sorted(texts.items()) if not name.startswith(NOT_READ)
             for fault in check_page(name, text, words)]
    bare = {Path(name).name for name in names}
    found += [fault for name, text in sorted(texts.items()) if Path(name).suffix in COMMENTS
              and not name.startswith((*NOT_READ, *OF_OTHERS)) for fault in check_bare_names(name, text, bare)]
    found += [f"the planted fault {text!r} is not found" for text, fault in PLANTED.items()
              if f"x.md: {fault}" not in check_page("x.md", text, words)]
    if not list(check_bare_names("x.c", "/* See gone.c. */", bare)):
        found.append("the planted fault gone.c is not found")
    print("\n".join(found) or f"what {len(texts)} files name is there; {len(PLANTED) + 1} planted faults are found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
