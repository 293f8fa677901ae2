"""The build backend: meson-python's, but its wheels are tagged for CPython 3.9 and later, not for the Python that built
them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

from mesonpy import (  # noqa: F401
    build_editable, get_requires_for_build_editable, get_requires_for_build_sdist, get_requires_for_build_wheel,
)
from mesonpy import build_wheel as _build_wheel


def build_wheel(wheel_directory: str, config_settings: Optional[Any] = None,
                metadata_directory: Optional[str] = None) -> str:
    name: str = _build_wheel(wheel_directory, config_settings, metadata_directory)
    if "-abi3-" not in name:  # PyPy, or a Python without a stable ABI
        return name
    done = subprocess.run([sys.executable, "-m", "wheel", "tags", "--python-tag", "cp39", "--remove",
                           str(Path(wheel_directory) / name)], check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.strip().splitlines()[-1]).name


def build_sdist(sdist_directory: str, config_settings: Optional[Any] = None) -> str:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "packaging"))
    from make_sdist import make

    return make(Path(sdist_directory)).name
