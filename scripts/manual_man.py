"""Man pages from the header: each function, struct, enum and callback type has one; dc_api(7) is the first page."""

from __future__ import annotations

import re
from typing import Any, Dict, Iterator, List, Tuple

THREADS = {
    "any": "From any thread at any time.",
    "handle": "One thread at a time for one handle; calls on one context are serialised by the library itself.",
}
COLLECTIVE = "Collective: every rank makes this call, in the same order among its collective calls."


def escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...").replace("·", "*")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.M)


def prose(text: str) -> str:
    """The text with the library's names in bold."""
    return re.sub(r"\b(dc_\w+(?:\(\))?|DC_[A-Z]\w*)", r"\\fB\1\\fP", escaped(text))


def page(name: str, section: int, version: str, summary: str, parts: List[Tuple[str, str]]) -> str:
    head = f'.TH {name} {section} "" "libdc {version}" "libdc"\n.SH NAME\n{name} \\- {escaped(summary)}\n'
    return head + "".join(f".SH {title}\n{text.rstrip()}\n" for title, text in parts if text.strip())


def listed(items: List[Tuple[str, str]]) -> str:
    return "".join(f".TP\n.B {escaped(name)}\n{prose(text) or '(no text)'}\n" for name, text in items)


def verbatim(text: str) -> str:
    return f".nf\n{escaped(text.rstrip())}\n.fi\n"


def paragraphs(body: List[str]) -> str:
    return "".join(f".PP\n.RS 4\n{verbatim(part.strip())}.RE\n" if part.startswith(" ") else f".PP\n{prose(part)}\n"
                   for part in body)


def summary_of(text: str) -> str:
    """A NAME line: the first sentence without its full stop."""
    return text.rstrip(".").split(". ")[0] or "part of libdc"


def returned(f: Dict[str, Any]) -> str:
    """The text of RETURN VALUE: the comment's, unless that only adds errors to those of other functions, which the list
    has."""
    said: str = f["returns_doc"]
    if f["returns"] == "dc_status" and not said.startswith("Returns"):
        return "DC_OK, or one of the errors below."
    return re.sub(r"^Returns ", "", said)


def see_also(names: List[str]) -> str:
    return "\n".join(f".BR {escaped(name)} (3){',' if name != names[-1] else ''}" for name in names) + "\n"


def function(name: str, f: Dict[str, Any], model: Dict[str, Any]) -> str:
    chapter = [other for other, g in model["functions"].items() if g["chapter"] == f["chapter"] and other != name]
    near = sorted(chapter, key=lambda other: abs(list(model["functions"]).index(other)
                                                 - list(model["functions"]).index(name)))[:6]
    declaration = "#include <dc_api.h>\n\n" + f["prototype"].replace("(", "(\n    ", 1).replace(", ", ",\n    ")
    errors = [(code, why or model["status"].get(code, "")) for code, why in f["errors"].items()]
    return page(name, 3, model["version"], summary_of(f["summary"]), [
        ("SYNOPSIS", verbatim(declaration)),
        ("DESCRIPTION", paragraphs([f["summary"], *f["doc"]])),
        ("PARAMETERS", listed([(param["name"], param["doc"]) for param in f["params"]])),
        ("RETURN VALUE", f".PP\n{prose(returned(f))}\n" if returned(f) else ""),
        ("ERRORS", listed([error for error in errors if error[0] != "DC_OK"])),
        ("THREADS", f".PP\n{escaped(THREADS[f['threads']])}\n"),
        ("RANKS", f".PP\n{escaped(COLLECTIVE)}\n" if f["collective"] else ""),
        ("SINCE", f".PP\nlibdc {f['since']}\n"),
        ("SEE ALSO", see_also([*near, "dc_api"]).replace("dc_api (3)", "dc_api (7)")),
    ])


def pages(model: Dict[str, Any]) -> Iterator[Tuple[str, str]]:
    """The file name and content of each page."""
    version = model["version"]
    model = {**model, "status": {member["name"]: member["doc"]
                                 for member in model["enums"]["dc_status_code"]["members"]}}
    also = ("SEE ALSO", ".BR dc_api (7)\n")
    for name, item in model["functions"].items():
        yield f"{name}.3", function(name, item, model)
    for name, item in model["structs"].items():
        fields = [(field["declaration"], field["doc"]) for field in item["fields"]]
        yield f"{name}.3", page(name, 3, version, summary_of(item["doc"]), [
            ("DESCRIPTION", paragraphs([item["doc"]])), ("FIELDS", listed(fields)), also])
    for name, item in model["enums"].items():
        members = [(f"{member['name']} = {member['value']}", member["doc"]) for member in item["members"]]
        yield f"{name}.3", page(name, 3, version, summary_of(item["doc"]), [
            ("DESCRIPTION", paragraphs([item["doc"]])), ("VALUES", listed(members)), also])
    for name, item in model["callbacks"].items():
        arguments = ", ".join(f"{param['type']} {param['name']}" for param in item["params"])
        yield f"{name}.3", page(name, 3, version, summary_of(item["doc"]), [
            ("SYNOPSIS", verbatim(f"typedef {item['returns']} (*{name})({arguments});")),
            ("DESCRIPTION", paragraphs([item["doc"]])), also])
    yield "dc_api.7", overview(model)


def overview(model: Dict[str, Any]) -> str:
    about = re.sub(r"^ \* ?", "", model["about"].split("SPDX")[0], flags=re.M)
    chapters = ""
    for chapter in model["chapters"]:
        names = [name for name, f in model["functions"].items() if f["chapter"] == chapter["number"]]
        listing = ",\n".join(f"\\fB{name}\\fP(3)" for name in names)
        chapters += f".SS {chapter['number']}. {escaped(chapter['title'])}\n{listing}\n"
    return page("dc_api", 7, model["version"], "sharded training (ZeRO 0 to 3) as operators behind one stable C ABI",
                [("DESCRIPTION", verbatim(about)), ("FUNCTIONS", chapters)])
