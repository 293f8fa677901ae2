#!/usr/bin/env python3
"""The recipe of conda-forge, built by rattler-build, which then runs the recipe's own tests. A channel of empty
packages stands for conda-forge's compilers and tools; this machine's are used. Ends with one line, `N passed, N
failed`."""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path
from typing import List

from rattler_build import Stage0Recipe, ToolConfiguration, VariantConfig
from support import Tests, require, run

COMPILERS = {"c_compiler": ["gcc"], "c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"]}
TOOLS = {"gcc_linux-64": "14.3.0", "sysroot_linux-64": "2.28", "meson": "1.9.0", "ninja": "1.13.1",
         "pkg-config": "0.29.2", "python": "3.13.0"}


def build(recipe: Stage0Recipe, channel: Path, test: str) -> List[Path]:
    built: List[Path] = []
    for variant in recipe.render(VariantConfig(COMPILERS)):
        channels = [channel.as_uri()] if (channel / "noarch").exists() else []
        done = variant.run_build(output_dir=channel, channels=channels,
                                 tool_config=ToolConfiguration(test_strategy=test))
        built += done.packages
    return built


def channel_of_tools(channel: Path) -> None:
    for name, version in TOOLS.items():
        build(Stage0Recipe.from_dict({"package": {"name": name, "version": version}, "build": {"script": ["true"]}}),
              channel, "skip")


def contents(packages: List[Path]) -> None:
    require([path.name.rsplit("-", 2)[0] for path in packages] == ["libdc"], f"it makes {packages}")
    with zipfile.ZipFile(packages[0]) as archive:
        require(any(name.startswith("pkg-libdc-") for name in archive.namelist()), "it is no package of conda")
    print(f"    {packages[0].name}: {packages[0].stat().st_size} bytes")


def main() -> int:
    test = Tests()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        channel = folder / "channel"
        packages: List[Path] = []
        test("make_recipes.py", lambda: run(sys.executable, "packaging/make_recipes.py", folder, folder.as_uri()))
        channel.mkdir()
        test("a channel of tools", lambda: channel_of_tools(channel))
        recipe = folder / "conda" / "recipe.yaml"
        test("rattler-build, and the recipe's tests: libdc doctor", lambda: packages.extend(
            build(Stage0Recipe.from_file(recipe), channel, "native")))
        test("  what it makes", lambda: contents(packages))
    return test.end()


if __name__ == "__main__":
    sys.exit(main())
