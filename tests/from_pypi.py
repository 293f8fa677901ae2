"""Packages from PyPI that some tests need, installed beside .venv: their dependencies are named, not looked up."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

BUILD = Path(__file__).resolve().parents[1] / "build"


def install(requirements: Path) -> str:
    """The folder that has them."""
    folder = BUILD / requirements.parent.name / hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    if not folder.exists():
        partial = folder.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target",
                        str(partial), "-r", str(requirements)], check=True, stdin=subprocess.DEVNULL)  # fmt: skip
        partial.rename(folder)
    return str(folder)
