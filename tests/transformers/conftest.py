"""Installs Hugging Face's package from PyPI beside .venv, without its dependencies but those that it imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from from_pypi import install


def pytest_configure() -> None:
    sys.path.append(install(Path(__file__).with_name("requirements.txt")))
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded: models come from a configuration
