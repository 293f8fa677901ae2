#!/usr/bin/env python3
"""Makes the manual from the header.

    make_docs.py FOLDER              all of it: dc_api.json, man pages, and by Sphinx HTML pages with a search
    make_docs.py json FOLDER         only dc_api.json, for authors of bindings
    make_docs.py man SECTION FOLDER  the man pages of a section: one for each function, struct, enum and callback type
    make_docs.py names SECTION       prints the names of these pages"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict

import manual
import manual_html
import manual_man


def make_json(model: Dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # The first page is a text for people, not data.
    text = json.dumps({key: value for key, value in model.items() if key != "about"}, indent=1, ensure_ascii=False)
    (folder / "dc_api.json").write_text(text + "\n", encoding="utf-8")


def make_man(model: Dict[str, Any], section: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for page in folder.glob(f"dc_*.{section}"):  # functions may have been removed
        page.unlink()
    for name, text in manual_man.pages(model):
        if name.endswith(f".{section}"):
            (folder / name).write_text(text, encoding="utf-8")


def make_html(model: Dict[str, Any], folder: Path) -> None:
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(manual.ROOT / "docs", source)
    shutil.copy(manual.ROOT / "CHANGELOG.md", source / "changes.md")
    manual_html.write(model, source / "reference")
    subprocess.run([sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-D",
                    f"version={model['version']}", "-D", f"release={model['version']}", str(source),
                    str(folder / "html")], check=True)


def main() -> int:
    words = sys.argv[1:]
    model = manual.read()
    if words[0] == "names":
        print("\n".join(name for name, _ in manual_man.pages(model) if name.endswith(f".{words[1]}")))
    elif words[0] == "json":
        make_json(model, Path(words[1]))
    elif words[0] == "man":
        make_man(model, words[1], Path(words[2]))
    else:
        folder = Path(words[0])
        make_json(model, folder)
        for section in ("3", "7"):
            make_man(model, section, folder / "man" / f"man{section}")
        make_html(model, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
