#!/usr/bin/env python3
"""The sources of packages, of which none is built: all have the addresses of pyproject.toml, lintian reads Debian's,
and the recipe of conda-forge is rendered. Ends with one line, `N passed, N failed`."""

from __future__ import annotations

import os
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
# Packages with the library, which has code of others in it, name those licences; a file with the notices is theirs too.
OF_OTHERS = "AND BSD-2-Clause AND ISC"
LICENCES = {
    "rust/dc-sys/Cargo.toml": OF_OTHERS, "vcpkg/vcpkg.json": OF_OTHERS,
    "conda/recipe.yaml": f"{OF_OTHERS}\n  license_file:\n    - LICENSE\n    - packaging/debian/copyright\n",
}  # fmt: skip
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


def names_licences(texts: dict) -> None:
    missing = [name for name, text in LICENCES.items() if text not in texts[name]]
    require(not missing, f"not all licences are in {missing}")


def names_none(texts: dict) -> None:
    found = [name for name, text in texts.items()
             if re.search(r"@[A-Z_]+@|^\W*(homepage|repository|project-url|vcs-browser)\b", text, re.I | re.M)]
    require(not found, f"there is something in the place of an address: {found}")


def same_bytes(tree: Path, folder: Path) -> None:
    """The tarball of files that another umask and another checkout have made."""
    tarballs = set()
    for mode, second in ((0o644, 1_700_000_000), (0o600, 1_600_000_000)):
        for path in tree.rglob("*"):
            if path.is_file():
                path.chmod(mode | path.stat().st_mode & 0o100)
                os.utime(path, (second, second))
        run(sys.executable, tree / "packaging" / "make_sdist.py", folder, SOURCE_DATE_EPOCH="1700000000")
        tarballs.add(next(folder.glob("libdc-*.tar.gz")).read_bytes())
    require(len(tarballs) == 1, "the same files give other bytes")


def release_refused(tree: Path) -> None:
    try:
        run(sys.executable, tree / "packaging" / "project.py")
    except Fault as fault:
        require(str(fault).count("missing: set") == 3, str(fault))
    else:
        raise Fault("a project without addresses may be released")


def names_unknown(tree: Path, folder: Path) -> None:
    """A file that git does not have is packed with a word about it, whatever its name."""
    run("git", "init", "--quiet", folder=tree)
    run("git", "add", "--all", folder=tree)
    run("git", "-c", "user.name=n", "-c", "user.email=n@libdc.example", "commit", "--quiet", "--message=all",
        folder=tree)
    (tree / "my notes é.txt").write_text("mine\n", encoding="utf-8")
    said = run(sys.executable, tree / "packaging" / "make_sdist.py", folder)
    require("not in git, and packed: my notes é.txt\n" in said, f"it says {said}")
    inside = run("tar", "-tzf", next(folder.glob("libdc-*.tar.gz")), "--quoting-style=literal")
    require("/my notes é.txt\n" in inside, "it is not in the tarball")


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
        test("the same files give the same tarball", lambda: same_bytes(sources(folder / "same"), folder / "again"))
        test("without addresses no package has one", lambda: names_none(made(tree, bare)))
        test("  and there is no release", lambda: release_refused(tree))
        test("every package has those of pyproject.toml", lambda: names_all(made(plant(tree), folder / "planted")))
        test("  and there is a release", lambda: run(sys.executable, tree / "packaging" / "project.py"))
        test("each package names the licences of what it has", lambda: names_licences(made(tree, folder / "licences")))
        test("Debian's source package is one", lambda: run(
            "dpkg-buildpackage", "-S", "-d", "-nc", "-us", "-uc", folder=next((folder / "planted").glob("libdc-0*"))))
        test("  lintian finds no fault in it", lambda: lintian(next((folder / "planted").glob("*.dsc"))))
        test("a file that git does not have is named", lambda: names_unknown(sources(folder / "git"), folder / "named"))
        test("conda-forge's recipe is rendered", lambda: require(
            [variant.recipe.package.name for variant in Stage0Recipe.from_file(
                folder / "planted" / "conda" / "recipe.yaml").render(VariantConfig(COMPILERS))] == ["libdc"],
            "it makes other packages"))
    return test.end()


if __name__ == "__main__":
    sys.exit(main())
