#!/usr/bin/env python3
"""Reads the subjects of all commits since this check was added: `area: imperative`, at most 72 characters, no stop; an
empty line before the body. Merges are left out, and a tree without its history passes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 72
SUBJECT = re.compile(r"[a-z][a-z0-9_/, -]*: [^\s].*[^.\s]")


def git(*arguments: str) -> str:
    if not (ROOT / ".git").exists():
        return ""
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout


def check_message(message: str) -> List[str]:
    subject, *body = message.rstrip("\n").split("\n")
    faults = []
    if len(subject) > LONGEST:
        faults.append(f"the subject has {len(subject)} characters, at most {LONGEST} are allowed")
    if not SUBJECT.fullmatch(subject):
        faults.append("the subject is not `area: imperative`")
    if body and body[0]:
        faults.append("no empty line between subject and body")
    return faults


def main() -> int:
    first = git("log", "--diff-filter=A", "--format=%H", "--", ":(glob)scripts/**/check_commits.py").split()
    messages = git("log", "--no-merges", "--format=%B%x00", f"{first[-1]}..HEAD").split("\0") if first else []
    messages = [message.lstrip("\n") for message in messages if message.strip()]
    lines = [f"{message.splitlines()[0]!r}: {fault}" for message in messages for fault in check_message(message)]
    print("\n".join(lines) or f"{len(messages)} commits read as CONTRIBUTING.md says")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
