"""A public header as data: its functions, structs and constants. C code is made from them: locks of a release's layouts
and prototypes, and a library of empty functions that stands for a missing one."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

from pycparser import c_ast, c_generator, c_parser  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "bindings" / "python"), str(ROOT / "scripts")]

from gen_cdef import cdef_of  # noqa: E402

TYPES = "".join(f"typedef int {name};" for name in ("size_t", "int32_t", "uint32_t", "int64_t", "uint64_t"))


class Header(NamedTuple):
    functions: Dict[str, str]  # the prototype, without DC_API and semicolon
    structs: Dict[str, Dict[str, str]]  # each field's type, as a cast has it
    constants: List[str]
    opaque: List[str]
    enums: List[str]
    since: Dict[str, str]  # the version that a function's comment names


class _NoName(c_ast.NodeVisitor):  # type: ignore[misc]
    """Takes the name out of a declarator, which leaves the type; parameters keep theirs."""

    def visit_TypeDecl(self, node: c_ast.TypeDecl) -> None:
        node.declname = None

    def visit_FuncDecl(self, node: c_ast.FuncDecl) -> None:
        self.visit(node.type)


def _type(node: c_ast.Node) -> str:
    _NoName().visit(node)
    return str(c_generator.CGenerator().visit(node))


def read(path: Path) -> Header:
    text = path.read_text(encoding="utf-8")
    cdef = cdef_of(text)
    constants = re.findall(r"^#define (\w+)", cdef, re.M)
    header = Header({}, {}, constants, [], [], {})
    for node in c_parser.CParser().parse(TYPES + re.sub(r"^#.*$", "", cdef, flags=re.M)).ext:
        kind = node.type
        if isinstance(kind, c_ast.FuncDecl):
            header.functions[node.name] = c_generator.CGenerator().visit(node)
        elif isinstance(kind, c_ast.Enum):
            header.enums.extend([f"enum {kind.name}"] if kind.name else [])
            header.constants.extend(item.name for item in kind.values.enumerators)
        elif isinstance(kind, c_ast.TypeDecl) and isinstance(kind.type, c_ast.Struct):
            if kind.type.decls is None:
                header.opaque.append(node.name)
            else:
                header.structs[node.name] = {field.name: _type(field.type) for field in kind.type.decls}
    # A chapter's introduction may say it for the group of functions that follows.
    since = ""
    for match in re.finditer(r"/\*\*.*?\*/|^DC_API [^;]*;", text, re.S | re.M):
        named = re.search(r"Since (\d+\.\d+)", match[0])
        if match[0].startswith("/**"):
            since = named[1] if named else ""
        else:
            header.since[re.sub(r"\(.*", "", match[0], flags=re.S).split()[-1].lstrip("*")] = since
    if not (header.functions and header.structs and header.constants):
        raise SystemExit(f"{path}: no functions, structs or constants found")
    return header


def run(*command: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(word) for word in command], text=True, capture_output=True, stdin=subprocess.DEVNULL,
                          timeout=3600, **({"env": environment} if environment else {}))  # type: ignore[call-overload]


def must(*command: object) -> str:
    done = run(*command)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def _measure(path: Path, header: Header) -> Dict[str, str]:
    """The compiler's answers for sizes, alignment, offsets and values."""
    asked = {name: f"(long long){name}" for name in header.constants}
    asked.update({f"sizeof({name})": f"(long long)sizeof({name})" for name in [*header.structs, *header.enums]})
    for name, fields in header.structs.items():
        asked[f"_Alignof({name})"] = f"(long long)_Alignof({name})"
        asked.update({f"offsetof({name}, {field})": f"(long long)offsetof({name}, {field})" for field in fields})
    lines = [f"#include <{path.name}>", "#include <stdio.h>", "int main(void) {"]
    lines += [f'  printf("%lld\\n", {what});' for what in asked.values()]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "measure.c"
        source.write_text("\n".join([*lines, "  return 0; }"]) + "\n", encoding="utf-8")
        must("cc", f"-I{path.parent}", source, "-o", source.with_suffix(""))
        return dict(zip(asked, must(source.with_suffix("")).split()))


def layout_lock(path: Path, version: str) -> str:
    header = read(path)
    values = _measure(path, header)
    lines = [f"/* Sizes, offsets, types and constants of libdc {version}, which every later {version[0]}.x keeps.",
             " * Made by abi-check/freeze.py at the release, frozen since. */",
             "/* clang-format off */", "#include <dc_api.h>", ""]
    wide = "sizeof(void *) != 8 || "
    for name, fields in header.structs.items():
        lines.append(f'_Static_assert({wide}sizeof({name}) >= {values[f"sizeof({name})"]}, "{version}");')
        lines.append(f'_Static_assert({wide}_Alignof({name}) == {values[f"_Alignof({name})"]}, "{version}");')
        for field, kind in fields.items():
            if field.startswith("reserved"):
                continue  # may get a name and a use
            at = values[f"offsetof({name}, {field})"]
            lines.append(f'_Static_assert({wide}offsetof({name}, {field}) == {at}, "{version}");')
            base, _, count = kind.partition("[")  # an array would decay to a pointer: the pointer to it does not
            asked, kind = ("&", f"{base}(*)[{count}") if count else ("", kind)
            lines.append(f'_Static_assert(_Generic({asked}(({name} *)0)->{field}, {kind}: 1, default: 0), '
                         f'"{version}");')
    lines += [f'_Static_assert(sizeof({name}) == {values[f"sizeof({name})"]}, "{version}");' for name in header.enums]
    changing = ("DC_VERSION_", "DC_API_VERSION")
    lines += [f'_Static_assert({name} == {values[name]}, "{version}");' for name in header.constants
              if not name.startswith(changing)]
    return "\n".join(lines) + "\n"


def prototype_lock(path: Path, version: str) -> str:
    lines = [f"/* The prototypes of libdc {version}, which every later {version[0]}.x keeps: another is an error.",
             " * Made by abi-check/freeze.py at the release, frozen since. */",
             "/* clang-format off */", "#include <dc_api.h>", ""]
    return "\n".join(lines + [f"{text};" for text in read(path).functions.values()]) + "\n"


def stub(path: Path, inside: str, code: str = "") -> str:
    """C of a library with the header's functions, which do nothing; inside: what opaque structs hold; code: more, which
    may define functions of the header."""
    header = read(path)
    lines = ["#include <dc_api.h>"] + [f"struct {name} {{ {inside} }};" for name in header.opaque] + [code]
    for name, text in header.functions.items():
        if f" {name}(" in code:
            continue
        lines.append(f"{text} {{ }}" if text.startswith("void dc_") else f"{text} {{ return 0; }}")
    return "\n".join(lines) + "\n"


def build_stub(folder: Path, header: Path, script: Path, soname: str = "libdc.so.0.1",
               inside: str = "int x;", code: str = "", link: Tuple[str, ...] = ()) -> Path:
    """folder/libdc.so, with debug information."""
    source, library = folder / "stub.c", folder / soname
    source.write_text(stub(header, inside, code), encoding="utf-8")
    must("gcc", "-g", "-gdwarf-4", "-Og", "-shared", "-fPIC", f"-I{header.parent}", source, f"-Wl,-soname,{soname}",
         f"-Wl,--version-script={script}", *link, "-o", library)
    link = folder / "libdc.so"
    link.unlink(missing_ok=True)
    link.symlink_to(library.name)
    return library
