#!/usr/bin/env python3
"""The sources of packages, of which none is built: all have the addresses of pyproject.toml, lintian reads Debian's,
and the recipe of conda-forge is rendered. Ends with one line, `N passed, N failed`."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from rattler_build import Stage0Recipe, VariantConfig
from support import ROOT, Fault, Tests, lintian, require, run, sources

PLANTED = {"homepage": "https://libdc.example/", "repository": "https://libdc.example/libdc.git",
           "email": "release@libdc.example"}
# The files that name each, of what the makers make in a folder.
NAMED = {
    "sdist/PKG-INFO": ["homepage", "repository", "email"],
    "METADATA of libdc-cuda": ["homepage", "repository", "email"],
    "rust/dc-sys/Cargo.toml": ["homepage", "repository"],
    "rust/dc/Cargo.toml": ["homepage", "repository"],
    "debian/control": ["homepage", "repository", "email"],
    "debian/changelog": ["email"],
    "conda/recipe.yaml": ["homepage", "repository"],
    "vcpkg/vcpkg.json": ["homepage"],
}
COMPILERS = {"c_compiler": ["gcc"], "c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"]}


def made(tree: Path, folder: Path) -> dict:
    """The texts of NAMED, as a tree's own scripts make them."""
    debian = Path(run(sys.executable, tree / "packaging" / "make_debian.py", folder, DEBEMAIL="").strip()) / "debian"
    run(sys.executable, tree / "packaging" / "make_recipes.py", folder)
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import make_crates, "
            "make_cuda_wheel; make_crates.stage(Path(sys.argv[2])); print(make_cuda_wheel.cuda_metadata().as_rfc822())")
    cuda = run(sys.executable, "-c", code, tree / "packaging", folder / "rust")
    texts = {"METADATA of libdc-cuda": cuda, "sdist/PKG-INFO": (debian.parent / "PKG-INFO").read_text(encoding="utf-8")}
    for name in set(NAMED) - set(texts):
        texts[name] = ((debian.parent if name.startswith("debian") else folder) / name).read_text(encoding="utf-8")
    return texts


def names_all(texts: dict) -> None:
    missing = [f"{name} has no {what}" for name, fields in NAMED.items() for what in fields
               if PLANTED[what] not in texts[name]]
    require(not missing, "; ".join(missing))


def names_none(texts: dict) -> None:
    found = [name for name, text in texts.items()
             if re.search(r"@[A-Z_]+@|^\W*(homepage|repository|project-url|vcs-browser)\b", text, re.I | re.M)]
    require(not found, f"there is something in the place of an address: {found}")


def release_refused(tree: Path) -> None:
    try:
        run(sys.executable, tree / "packaging" / "project.py")
    except Fault as fault:
        require(str(fault).count("missing: set") == 3, str(fault))
    else:
        raise Fault("a project without addresses may be released")


def plant(tree: Path) -> Path:
    path = tree / "pyproject.toml"
    text = path.read_text(encoding="utf-8")
    text = text.replace("[project.urls]\n", f'[project.urls]\nHomepage = "{PLANTED["homepage"]}"\n'
                        f'Repository = "{PLANTED["repository"]}"\n')
    path.write_text(text.replace('"libdc contributors"}', f'"libdc contributors", email = "{PLANTED["email"]}"}}'),
                    encoding="utf-8")
    return tree


def main() -> int:
    test = Tests()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = sources(folder / "tree")
        bare = folder / "bare"
        test("without addresses no package has one", lambda: names_none(made(tree, bare)))
        test("  and there is no release", lambda: release_refused(tree))
        test("every package has those of pyproject.toml", lambda: names_all(made(plant(tree), folder / "planted")))
        test("  and there is a release", lambda: run(sys.executable, tree / "packaging" / "project.py"))
        test("Debian's source package is one", lambda: run(
            "dpkg-buildpackage", "-S", "-d", "-nc", "-us", "-uc", folder=next((folder / "planted").glob("libdc-0*"))))
        test("  lintian finds no fault in it", lambda: lintian(next((folder / "planted").glob("*.dsc"))))
        test("conda-forge's recipe is rendered", lambda: require(
            [variant.recipe.package.name for variant in Stage0Recipe.from_file(
                folder / "planted" / "conda" / "recipe.yaml").render(VariantConfig(COMPILERS))] == ["libdc"],
            "it makes other packages"))
    return test.end()


if __name__ == "__main__":
    sys.exit(main())
