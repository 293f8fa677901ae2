#!/usr/bin/env python3
"""The project as packages name it: all of it is in pyproject.toml, and the version in meson.build. project.py prints
the addresses, and fails where one is missing that a release must have."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Dict, Optional

from pyproject_metadata import StandardMetadata

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11, where meson-python brings the same as tomli
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PLACES = {
    "HOMEPAGE": "Homepage under [project.urls]",
    "REPOSITORY": "Repository under [project.urls]",
    "MAINTAINER": "the first author's email",
}


def metadata() -> StandardMetadata:
    with open(ROOT / "pyproject.toml", "rb") as file:
        made = StandardMetadata.from_pyproject(tomllib.load(file), ROOT)
    project = (ROOT / "meson.build").read_text(encoding="utf-8")
    made.version = re.findall(r"^project\(.* version: '([\d.]+)'", project)[0]
    made.dynamic.remove("version")
    return made


def addresses(made: StandardMetadata) -> Dict[str, Optional[str]]:
    """By the names of PLACES; None is one that is not set."""
    name, email = made.authors[0]
    return {"HOMEPAGE": made.urls.get("Homepage"), "REPOSITORY": made.urls.get("Repository"),
            "MAINTAINER": f"{name} <{email}>" if email else None}


def fill(template: str, values: Dict[str, Optional[str]]) -> str:
    """A template with each @NAME@ replaced; a line that needs a value of None is left out."""
    for name, value in values.items():
        template = re.sub(rf"^.*@{name}@.*\n", "", template, flags=re.M) if value is None else \
            template.replace(f"@{name}@", value)
    return template


def main() -> int:
    made = metadata()
    missing = 0
    print(f"{made.name} {made.version}, {made.license}")
    for name, value in addresses(made).items():
        print(f"{name.lower()}: {value or f'missing: set {PLACES[name]} in pyproject.toml'}")
        missing += value is None
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
