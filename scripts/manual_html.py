"""The header as reStructuredText for Sphinx: a page for each chapter, and the first page's rules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, Iterator, List

from manual_man import COLLECTIVE, THREADS, returned


class Writer:
    """Writes text as reStructuredText, with the library's names as links."""

    def __init__(self, model: Dict[str, Any]) -> None:
        self.model = model
        self.roles = {name: "func" for name in model["functions"]}
        self.roles.update({name: "struct" for name in [*model["structs"], *model["opaque"]]})
        self.roles.update({name: "type" for name in [*model["callbacks"], *model["aliases"]]})
        self.roles.update({name: "enum" for name in model["enums"]})
        self.roles.update({name: "macro" for name in model["macros"]})
        self.roles.update({member["name"]: "enumerator" for enum in model["enums"].values()
                           for member in enum["members"]})

    def text(self, text: str) -> str:
        text = re.sub(r"([\\*`|_])", r"\\\1", text)

        def linked(match: "re.Match[str]") -> str:
            name = match[0].replace("\\", "").rstrip("()")
            role = self.roles.get(name)
            return f"\\ :c:{role}:`{name}`\\ " if role else match[0]

        return re.sub(r"\b(?:dc|DC)(?:\\_\w+?)+\b(?!\\_)(?:\(\))?", linked, text)

    def paragraphs(self, body: List[str], indent: str) -> Iterator[str]:
        for part in body:
            if part.startswith(" "):
                yield f"{indent}::\n\n{indent}   {part.strip()}\n"
            elif part.strip():
                yield f"{indent}{self.text(part)}\n"

    def function(self, f: Dict[str, Any]) -> Iterator[str]:
        yield f".. c:function:: {f['prototype'].rstrip(';')}\n"
        yield from self.paragraphs([f["summary"], *f["doc"]], "   ")
        for param in f["params"]:
            yield f"   :param {param['name']}: {self.text(param['doc'])}"
        if returned(f):
            yield f"   :returns: {self.text(returned(f))}"
        yield ""
        if f["errors"]:
            errors = (f":c:enumerator:`{code}`{f' ({self.text(why)})' if why else ''}"
                      for code, why in f["errors"].items() if code != "DC_OK")
            yield f"   *Errors:* {'; '.join(errors)}.\n"
        yield f"   *Threads:* [{f['threads']}] {THREADS[f['threads']]}"
        if f["collective"]:
            yield f"\n   *Ranks:* {COLLECTIVE}"
        yield f"\n   .. versionadded:: {f['since']}\n"

    def struct(self, name: str, struct: Dict[str, Any]) -> Iterator[str]:
        yield f".. c:struct:: {name}\n"
        yield from self.paragraphs([struct["doc"]], "   ")
        for field in struct["fields"]:
            yield f"   .. c:member:: {field['declaration']}\n\n      {self.text(field['doc'])}\n"

    def enum(self, name: str, enum: Dict[str, Any]) -> Iterator[str]:
        yield f".. c:enum:: {name}\n"
        yield from self.paragraphs([enum["doc"]], "   ")
        for member in enum["members"]:
            yield f"   .. c:enumerator:: {member['name']} = {member['value']}\n\n      {self.text(member['doc'])}\n"

    def chapter(self, number: int, title: str, intro: List[str]) -> str:
        out = [title, "=" * len(title), ""]
        out += [self.rst_block(intro), ""]
        here = {kind: {name: item for name, item in self.model[kind].items() if item["chapter"] == number}
                for kind in ("functions", "structs", "enums", "callbacks", "opaque", "aliases", "macros")}
        for name, item in here["macros"].items():
            if name not in ("DC_API", "DC_API_H"):
                out += [f".. c:macro:: {name}\n", f"   {self.text(item['doc'])}\n", f"   ``{item['value']}``\n"]
        for name, item in here["aliases"].items():
            out += [f".. c:type:: {item['type']} {name}\n", f"   {self.text(item['doc'])}\n"]
        for name, item in here["opaque"].items():
            out += [f".. c:struct:: {name}\n", f"   {self.text(item['doc'])} Opaque.\n"]
        for name, item in here["callbacks"].items():
            arguments = ", ".join(f"{param['type']} {param['name']}" for param in item["params"])
            out += [f".. c:type:: {item['returns']} (*{name})({arguments})\n", f"   {self.text(item['doc'])}\n"]
        for name, item in here["enums"].items():
            out += self.enum(name, item)
        for name, item in here["structs"].items():
            out += self.struct(name, item)
        for item in here["functions"].values():
            out += self.function(item)
        return "\n".join(out) + "\n"

    def rst_block(self, lines: List[str]) -> str:
        """A comment's text: paragraphs and indented blocks. The latter are lists or arguments, or are kept as they
        are."""
        out: List[str] = []
        inside: List[str] = []
        for line in [*lines, ""]:
            if line.startswith("  "):
                inside.append(line)
                continue
            out += ["", *self.indented(inside), ""] if inside else []
            inside = []
            out.append(self.text(line))
        return "\n".join(out)

    def indented(self, lines: List[str]) -> List[str]:
        if lines[0].startswith("  - "):
            items = re.split(r"(?:^| )- ", " ".join(line.strip() for line in lines))[1:]
            return [f"- {self.text(item)}" for item in items]
        if lines[0].split()[0] == next(iter(self.model["arguments"]), ""):
            return [f":{name}: {self.text(text)}" for name, text in self.model["arguments"].items()]
        return ["::", "", *(f"  {line}" for line in lines)]


def write(model: Dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    writer = Writer(model)
    names = []
    for chapter in model["chapters"]:
        name = re.sub(r"\W+", "-", chapter["title"].lower()).strip("-")
        names.append(f"{chapter['number']:02d}-{name}")
        text = writer.chapter(chapter["number"], chapter["title"], chapter["intro"])
        (folder / f"{names[-1]}.rst").write_text(text, encoding="utf-8")
    text = re.sub(r"This header is the manual.*?(?=The walk)", "", model["about"].split("SPDX")[0], flags=re.S)
    about = [re.sub(r"^ \* ?", "", line) for line in text.splitlines()]
    lines = ["The header", "==========", "", *writer.rst_block(about).splitlines(), ""]
    lines += [".. toctree::", "   :maxdepth: 1", ""]
    lines += [f"   {name}" for name in names]
    (folder / "index.rst").write_text("\n".join(lines) + "\n", encoding="utf-8")
