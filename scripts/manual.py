"""The public header as data: every declaration with its comment. The manual is made from this, and check_manual.py
checks it. Needs only Python, since `meson install` makes the man pages too.

A block is: a first sentence; prose; lines `name  text` of parameters; `Returns …`; and `[class] Since version.`
A parameter that a block leaves out is described in the list of arguments on the header's first page. `as dc_x`
refers to another block for errors; a chapter's introduction may give errors that all its functions share. A
parameter's or a field's text begins with [in], [out], [in,out], [view] or [none] where its type does not tell the
direction of its data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "include" / "dc_api.h"

TOKEN = re.compile(
    r"/\* ==== (?P<chapter>\d+\. [^\n]*?) =+ *(?:\n(?P<intro>.*?))?\*/"
    r"|/\*\*(?P<comment>(?!<).*?)\*/"
    r"|^#define (?P<macro>DC_\w+) +(?P<value>\{.*?\}|\S+) *$"
    r"|^enum (?P<enum>\w+) \{(?P<members>.*?)\};"
    r"|^typedef struct (?P<struct>\w+) \{(?P<fields>.*?)^\} \w+;"
    r"|^typedef struct (?P<opaque>\w+) \w+;"
    r"|^typedef (?P<returns>[^(;]*?)\(\*(?P<callback>\w+)\)\((?P<arguments>[^;]*)\);"
    r"|^typedef (?P<target>\w+) (?P<alias>\w+);"
    r"|^DC_API (?P<prototype>[^;]*);",
    re.S | re.M)


TAG = re.compile(r"\[(in|out|in,out|view|none)\] ")


class Text(NamedTuple):
    """A block's parts."""

    summary: str
    body: List[str]  # paragraphs; a formula is kept as it is, and begins with a blank
    params: Dict[str, str]
    returns: str
    threads: str
    collective: bool
    since: str


def strip(comment: str) -> List[str]:
    """A comment's lines without stars. Indentation relative to the block is kept."""
    lines = [re.sub(r"^\s*\*? ?", "", line.rstrip()) for line in comment.strip("\n").splitlines()]
    margin = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    return [line.strip() for line in lines[:1]] + [line[margin:] for line in lines[1:]]


def joined(text: str, line: str) -> str:
    return f"{text} {line.strip()}".strip()


def block(comment: str, names: List[str]) -> Text:
    """Reads a block; names are the declaration's parameters."""
    params: Dict[str, str] = {}
    prose: List[str] = [""]
    current: Optional[Tuple[str, ...]] = None
    for line in strip(comment):
        head = re.match(r"(\w+(?:, \w+)*) {2,}(\S.*)", line)
        if head and all(name in names for name in head[1].split(", ")):
            current = tuple(head[1].split(", "))
            params.update({name: head[2] for name in current})
        elif current and line.startswith("  "):
            params.update({name: joined(params[name], line) for name in current})
        elif line.startswith("    ") or not line:
            current = None
            prose += [f" {line.strip()}", ""] if line else [""]
        else:
            current = None
            prose[-1] = joined(prose[-1], line)
    end = re.search(r"\[(any|handle)(, collective)?\] Since ([\d.]+\d)\.", prose[-1])
    if end:
        prose[-1] = prose[-1].replace(end[0], "").strip()
    returns = ""
    for number, paragraph in enumerate(prose):
        found = re.search(r"(?:^|(?<=[.)] ))((?:Returns|Errors as|Also DC_E_|Otherwise as) ?.*)", paragraph)
        if found and not paragraph.startswith(" "):
            returns, prose[number] = found[1], paragraph[:found.start()].strip()
            break
    first = re.match(r".*?\.(?= |$)", prose[0])
    summary = first[0] if first else prose[0]
    prose[0] = prose[0][len(summary):].strip()
    return Text(summary, [part for part in prose if part.strip()], params, returns,
                end[1] if end else "", bool(end and end[2]), end[3] if end else "")


def split_arguments(text: str) -> Iterator[Tuple[str, str]]:
    """The type and name of each parameter."""
    for part in re.split(r",(?![^(]*\))", " ".join(text.split())):
        found = re.fullmatch(r"\s*(.*?)(\w+)\s*", part)
        if found and found[1]:
            yield found[1].strip(), found[2]


def members(text: str) -> Iterator[Dict[str, Any]]:
    pattern = r"(DC_\w+) = (-?\d+),?\s*(?:/\*\*<(.*?)\*/)?"
    for name, value, comment in re.findall(pattern, text, re.S):
        yield {"name": name, "value": int(value), "doc": " ".join(" ".join(strip(comment)).split()) if comment else ""}


def fields(text: str) -> Iterator[Dict[str, Any]]:
    before = ""
    for comment, declaration, after in re.findall(r"/\*\*(?!<)(.*?)\*/|([^;/]+);\s*(?:/\*\*<(.*?)\*/)?", text, re.S):
        if comment:
            before = comment
            continue
        declaration = " ".join(declaration.split())
        pointer = re.fullmatch(r"(.*)\(\*(\w+)\)\((.*)\)", declaration)
        array = re.fullmatch(r"(.*?)(\w+)(\[\d+\])", declaration)
        name = pointer[2] if pointer else array[2] if array else declaration.split()[-1].lstrip("*")
        kind = (f"{pointer[1]}(*)({pointer[3]})" if pointer else f"{array[1].strip()}{array[3]}" if array
                else declaration[:-len(name)].strip())
        said = " ".join(" ".join(strip(after or before)).split()) if after or before else ""
        yield {"name": name, "type": kind, "declaration": declaration, "doc": said}
        before = ""


def glossary(text: str) -> Dict[str, str]:
    """The list of arguments on the first page, as a dictionary."""
    found: Dict[str, str] = {}
    names: List[str] = []
    inside = False
    for line in strip(text):
        if line.startswith("Arguments"):
            inside = True
        elif inside and not line:
            break
        elif inside and not line.startswith("     "):
            head = re.match(r" *(\w+(?:, \w+)*) {2,}(\S.*)", line)
            names = head[1].split(", ") if head else []
            found.update({name: head[2] for name in names} if head else {})
        elif inside:
            found.update({name: joined(found[name], line) for name in names})
    return found


def codes(text: str) -> Dict[str, str]:
    """Status codes in the order in which a text names them, each with its text in brackets."""
    found: Dict[str, str] = {}
    for name, why in re.findall(r"\b(DC_(?:OK|E_\w+))\b(?: \(([^()]*(?:\([^()]*\)[^()]*)*)\))?", text):
        found[name] = found.get(name) or why
    return found


def errors_of(name: str, functions: Dict[str, Dict[str, Any]], shared: Dict[int, str]) -> Dict[str, str]:
    """A function's status codes, with those of the blocks that it refers to and of its chapter."""
    function = functions[name]
    found = codes(function["returns_doc"])
    for other in re.findall(r"\bas (dc_\w+)", function["returns_doc"]):
        if other in functions and other != name:
            for code, why in errors_of(other, functions, shared).items():
                found.setdefault(code, why)
    for code, why in codes(shared.get(function["chapter"], "")).items():
        if function["returns"] == "dc_status":
            found.setdefault(code, why)
    return found


def read(path: Path = HEADER) -> Dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    front = text[:text.index("*/")].lstrip("/* ")
    model: Dict[str, Any] = {
        "version": ".".join(re.findall(r"^#define DC_VERSION_\w+ (\d+)", text, re.M)), "about": front,
        "arguments": glossary(front), "chapters": [], "functions": {}, "callbacks": {}, "structs": {}, "enums": {},
        "opaque": {}, "aliases": {}, "macros": {},
    }
    comment, chapter = "", 0
    for match in TOKEN.finditer(text, text.index("*/")):
        part = match.groupdict()
        said = " ".join(" ".join(strip(comment)).split()) if comment else ""
        common = {"doc": said, "chapter": chapter}
        if part["chapter"]:
            chapter += 1
            title = part["chapter"].split(". ", 1)[1]
            model["chapters"].append({"number": chapter, "title": title, "intro": strip(part["intro"] or "")})
        elif part["comment"]:
            comment = part["comment"]
            continue
        elif part["macro"]:
            model["macros"][part["macro"]] = {"value": part["value"], **common}
        elif part["enum"]:
            model["enums"][part["enum"]] = {**common, "members": list(members(part["members"]))}
        elif part["struct"]:
            model["structs"][part["struct"]] = {**common, "fields": list(fields(part["fields"]))}
        elif part["opaque"]:
            model["opaque"][part["opaque"]] = common
        elif part["callback"]:
            model["callbacks"][part["callback"]] = {
                "returns": part["returns"].strip(), **common,
                "params": [{"name": name, "type": kind} for kind, name in split_arguments(part["arguments"])]}
        elif part["alias"]:
            model["aliases"][part["alias"]] = {"type": part["target"], **common}
        elif part["prototype"]:
            _function(model, part["prototype"], comment, chapter)
        # Consecutive macros without a blank line between them share a comment.
        comment = comment if part["macro"] and text.startswith("\n#define", match.end()) else ""
    for struct in model["structs"].values():
        _lay_out(struct)
    shared = {entry["number"]: _shared(entry["intro"]) for entry in model["chapters"]}
    for name, function in model["functions"].items():
        function["errors"] = errors_of(name, model["functions"], shared)
        for param in function["params"]:
            param["direction"] = tag(param["doc"]) or _direction(param["type"], model["opaque"])
    for name, struct in model["structs"].items():
        struct["direction"] = _struct_direction(name, model)
        for field in struct["fields"]:
            field["direction"] = tag(field["doc"]) or struct["direction"]
    return model


def tag(doc: str) -> str:
    """The direction tag at the beginning of a text, or ""."""
    found = TAG.match(doc)
    return found[1] if found else ""


def _lay_out(struct: Dict[str, Any]) -> None:
    """Adds offsets and sizes for 64-bit pointers. Every type that the header may use is aligned to its size."""
    end = 0
    for field in struct["fields"]:
        kind, _, count = field["type"].partition("[")
        narrow = re.fullmatch(r"u?int(8|16|32)_t|float", kind)
        size = (int(narrow[1] or 32) // 8 if narrow else 8)
        field["offset"] = end = (end + size - 1) // size * size
        end += size * int(count.rstrip("]") or 1)
    struct["size"] = (end + 7) // 8 * 8


def _direction(kind: str, opaque: Dict[str, Any]) -> str:
    """The direction of data according to its type: pointers to handles, texts and numbers are written, and so are
    structs unless they are const. Untyped memory is the caller's pointer, which is passed on."""
    target = kind[:-1].strip()
    written = kind.endswith("*") and (target.endswith("*") or not kind.startswith("const ")) and target != "void"
    return "out" if written and target not in opaque else "in"


def _struct_direction(name: str, model: Dict[str, Any]) -> str:
    """The direction of a struct. in: callers fill it; out: the library does; in,out: both, in different calls."""
    filled = read = False
    for function, entry in model["functions"].items():
        for param in entry["params"]:
            if param["type"] == f"{name} *" and not function.endswith("_init"):
                filled |= tag(param["doc"]) in ("", "view")
            read |= param["type"] == f"const {name} *"
    read |= any(re.search(rf"\b{name} \*", field["type"]) for struct in model["structs"].values()
                for field in struct["fields"])
    return "in,out" if filled and read else "out" if filled else "in"


def _shared(intro: List[str]) -> str:
    found = re.search(r"Errors that all share: .*?\.(?: |$)", " ".join(intro))
    return found[0] if found else ""


def _function(model: Dict[str, Any], prototype: str, comment: str, chapter: int) -> None:
    found = re.match(r"(.*?)(\w+)\((.*)\)$", " ".join(prototype.split()))
    if not found:
        raise SystemExit(f"{HEADER.name}: cannot read {prototype!r}")
    arguments = list(split_arguments(found[3]))
    text = block(comment, [name for _, name in arguments])
    model["functions"][found[2]] = {
        "chapter": chapter, "prototype": f"{found[0]};", "returns": found[1].strip(), "summary": text.summary,
        "doc": text.body, "returns_doc": text.returns, "threads": text.threads,
        "collective": text.collective, "since": text.since,
        "params": [{"name": name, "type": kind, "doc": text.params.get(name) or _common(model["arguments"], name, kind)}
                   for kind, name in arguments],
    }


def _common(arguments: Dict[str, str], name: str, kind: str) -> str:
    """The first page's text on an argument: on a handle, or on the place for a new one."""
    given, _, place = arguments.get(name, "").partition(". As the place for a new one: ")
    return f"set to {place}" if place and kind.endswith("**") else given
