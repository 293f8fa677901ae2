"""Installs Hugging Face's package from PyPI beside .venv, without its dependencies but those that it imports."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
BUILD = Path(__file__).resolve().parents[2] / "build" / "transformers"


def pytest_configure() -> None:
    folder = BUILD / hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    if not folder.exists():
        partial = folder.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target",
                        str(partial), "-r", str(REQUIREMENTS)], check=True, stdin=subprocess.DEVNULL)  # fmt: skip
        partial.rename(folder)
    sys.path.append(str(folder))
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded: models come from a configuration
