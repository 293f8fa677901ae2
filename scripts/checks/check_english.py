#!/usr/bin/env python3
"""Comments, documents and error texts follow the rules of English in CONTRIBUTING.md: a thing is "it", a mechanism has
its usual word, and a sentence has at most 30 words. Planted faults show that each rule finds what it is for."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Iterator, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 30
C_LIKE = {".c", ".h", ".cu", ".cuh", ".cpp", ".pml"}
HASH = {".sh", ".build", ".toml", ".ini", ".yml"}
# Other authors' texts, results of programs, frozen copies, and this list of words.
NOT_READ = ("bench/results/", "abi-check/0", "tests/mutants/", "tests/fuzz/seeds", "tests/abi/", "docs/deepspeed.md",
            "bindings/rust/dc-sys/src/bindings.rs", "scripts/checks/check_english.py",
            "src/comm/tcp/hmac/sodium_sha256.c")
# Tables of checks, whose texts are not sentences.
TABLES = ("docs/conformance",)
# Not checked for clauses that are subjects.
CLAUSES = ("docs/conformance",)
# Rules in CONTRIBUTING.md that name these words.
ALLOWED = ('Say "a caller" or "a reader"', 'No clause with "what" or "who"')
# Words that must not be used, and what to use instead.
WORDS = {
    r"he|him|his|himself|she|her|hers": "it, its",
    r"who|whom|whoever": "the rank, thread or caller that ..., or a passive",
    r"nobody|no one": "no caller, no rank, or a passive",
    r"somebody|someone|everybody|everyone": "a caller, a rank, every rank",
    r"kin|kins": "shape group",
    r"heed|heeds|heeded": "reads, obeys",
    r"newcomers?": "new connection",
    r"strangers?": "unknown process",
    r"guests?": "peer",
    r"judges?|judged|judgements?": "checks, decides",
    r"settles?|settled": "synchronises, waits, chooses",
    r"brothers?": "peer, the other ranks",
    r"houses?": "project, tree",
    r"rooms|(?:a|the|this|that|each|every|its|own|his) room(?! for)": "module (of source), space (in memory)",
    r"dwells?|dwelt": "is, stays",
    r"hither|thither|whence|whither|thereof|therewith|wherein|thereby|thereupon|hereby": "a plain word",
    r"ere|lest|aught|naught|nought|tidings": "a plain word",
}
WORD_RULES = [(re.compile(rf"\b(?:{words})\b", re.I), instead) for words, instead in WORDS.items()]
C_TOKEN = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)
RUST_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|r#".*?"#|"(?:\\.|[^"\\])*"', re.S)
Block = Tuple[int, str]


def tracked_files() -> List[str]:
    """Files that git tracks or would add. In an unpacked tarball, all files that no build has made."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True).stdout.split("\0")
    else:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")
                 if not {"build", ".venv", "__pycache__"} & set(path.relative_to(ROOT).parts)]
    return [name for name in names if (ROOT / name).is_file()]


def without_code(text: str) -> str:
    """The text with empty lines in place of fenced code."""
    return re.sub(r"^( *)```.*?^ *```", lambda code: "\n" * code[0].count("\n"), text, flags=re.S | re.M)


def merged(lines: Iterator[Block]) -> Iterator[Block]:
    """Joins one-line comments on consecutive lines to one text."""
    start, last, text = 0, -1, ""
    for number, line in lines:
        if number == last + 1:
            text += "\n" + line
        else:
            if text:
                yield start, text
            start, text = number, line
        last = number
    if text:
        yield start, text


def c_texts(source: str, token: "re.Pattern[str]") -> Tuple[List[Block], List[Block]]:
    """(comments, strings) of a source."""
    comments: List[Block] = []
    lines: List[Block] = []
    strings: List[Block] = []
    number, at = 1, 0
    for found in token.finditer(source):
        number, at = number + source.count("\n", at, found.start()), found.start()
        text = found[0]
        if text.startswith("//"):
            lines.append((number, re.sub(r"^//[/!]?<?", "", text)))
        elif text.startswith("/*"):
            comments.append((number, re.sub(r"\n[ \t]*\*(?!/)", "\n", re.sub(r"^/\*+<?|\*+/$", "", text))))
        elif text[0] in '"r':
            strings.append((number, text))
    return comments + list(merged(iter(lines))), strings


def python_texts(source: str) -> Iterator[Block]:
    lines: List[Block] = []
    before = tokenize.NEWLINE
    for kind, text, (number, column), _, line in tokenize.generate_tokens(io.StringIO(source).readline):
        if kind == tokenize.COMMENT:
            if not text.startswith(("#!", "# noqa", "# type:", "# fmt:", "# ruff:", "# pylint:", "# mypy:")):
                if line[:column].strip():
                    yield number, text[1:]
                else:
                    lines.append((number, text[1:]))
        elif kind != tokenize.NL:
            if kind == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
                yield number, re.sub(r"^[rbfRBF]*(\"\"\"|'''|\"|')|(\"\"\"|'''|\"|')$", "", text)
            before = kind
    yield from merged(iter(lines))


def hash_texts(source: str) -> Iterator[Block]:
    yield from merged((number, line.lstrip()[1:]) for number, line in enumerate(source.split("\n"), 1)
                      if line.lstrip().startswith("#") and not line.startswith("#!"))


def document_texts(source: str) -> Iterator[Block]:
    """A document with empty lines in place of its code."""
    hidden = r"<!--.*?-->|(?<=\n\n)(?: {4}[^\n]*\n)+"
    yield 1, re.sub(hidden, lambda code: "\n" * code[0].count("\n"), without_code(source), flags=re.S)


def texts(name: str, source: str) -> Tuple[List[Block], List[Block]]:
    suffix = Path(name).suffix
    if suffix in C_LIKE or suffix == ".rs":
        return c_texts(source, RUST_TOKEN if suffix == ".rs" else C_TOKEN)
    if suffix in (".py", ".pyi") or source.startswith("#!/usr/bin/env python3"):
        return list(python_texts(source)), []
    if suffix == ".md":
        return list(document_texts(source)), []
    if suffix in HASH or Path(name).name == "Makefile" or source.startswith("#!"):
        return list(hash_texts(source)), []
    return [], []


# The beginning of an item: a bullet, a number, a cell, or names with a gap after them, as in the header's lists.
ITEM = re.compile(r"(?:[-*+|]|\d+[.)]|@\w+)\s|(?:[\w.:\[\]*\"/-]+,? )*[\w.:\[\]*\"/()-]+\s{2,}\S")
OPENS = re.compile(r"[#|@]|(?:Returns|Source|Since|Errors that all share)\b")


def passages(block: Block) -> Iterator[Block]:
    """A text's paragraphs and items. An empty line, an item, a cell or a heading ends one, and so does a line that is
    indented no deeper than the item before it. A line with several gaps is a table's."""
    start, text = block[0], without_code(block[1])
    held: List[str] = []
    first, item_indent, last = start, -1, 0
    for number, line in enumerate(text.split("\n"), start):
        bare, indent = line.strip(), len(line) - len(line.lstrip())
        item = ITEM.match(bare) if number > start else None
        formula = bool(held) and held[-1].endswith(":") and indent > last
        if held and (not bare or item or formula or OPENS.match(bare) or indent <= item_indent):
            yield first, " ".join(held)
            held = []
        if bare.startswith("|"):
            yield from ((number, cell.strip()) for cell in bare.strip("|").split("|"))
        elif len(re.findall(r"\S {3,}\S", bare)) > 1:
            yield from ((number, cell) for cell in re.split(r" {3,}", bare))
        elif bare:
            if not held:
                first, item_indent = number, indent - formula if item or formula else -1
            held.append(bare)
            last = indent
            if bare.startswith("#"):
                yield first, " ".join(held)
                held = []
    if held:
        yield first, " ".join(held)


def plain(text: str) -> str:
    """The text with code and addresses replaced by one word each, and without the arguments of calls."""
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"https?://\S+", "address", text)
    text = re.sub(r"\b(?:e\.g|i\.e|cf|vs|etc|approx|resp|Sec|Fig|Eq)\.", "abbr", text)
    return re.sub(r"\b(\w+)\([^()]*\)", r"\1", text)


END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?!\.)|:\s*$")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text. Entries of a list, as in "Returns A; B; C" or "three things: A; B; C", count
    separately."""
    for sentence in END.split(text):
        if re.match(r"(Returns|Errors) ", sentence):
            yield from re.split(r";|, (?=DC_E_|and )", sentence)
        elif ";" in sentence.partition(": ")[2]:
            yield from sentence.split(";")
        else:
            yield sentence


def word_count(sentence: str) -> int:
    return len(re.findall(r"(?<![\w.])[A-Za-z][\w.'/-]*", sentence))


def faults(name: str, source: str) -> Iterator[str]:
    comments, strings = texts(name, source)
    for block in comments:
        for number, passage in passages(block):
            if any(allowed in passage for allowed in ALLOWED):
                continue
            text = plain(passage)
            yield from word_faults(name, number, text)
            for sentence in sentences(text):
                if re.match(r"What (?!.*\?$)", sentence) and not name.startswith(CLAUSES):
                    yield f"{name}:{number}: a clause is the subject: {sentence[:60]}..."
                if word_count(sentence) > LIMIT and not name.startswith(TABLES):
                    yield f"{name}:{number}: a sentence of {word_count(sentence)} words: {sentence[:60]}..."
    if name.startswith(("src/", "tools/")):
        for number, text in strings:
            yield from word_faults(name, number, text)


def word_faults(name: str, number: int, text: str) -> Iterator[str]:
    for rule, instead in WORD_RULES:
        for found in rule.findall(text):
            if not found.isupper():  # a constant
                yield f"{name}:{number}: \"{found}\": {instead}"


LONG = "word " * (LIMIT + 1) + "end. "
# File name, source, and the beginning of the expected fault's text; "" for none.
PLANTED = [
    ("x.c", "/* One.\n * A rank that he waits for. */", '"he": '),
    ("x.c", 'char *s = "who /* he */"; // nobody\n', '"nobody": '),
    ("src/base/status.c", 'return dc__fail(0, "somebody waits");', '"somebody": '),
    ("x.c", "/* One. What is left is freed. */", "a clause is "),
    ("x.c", f"/* {LONG} */", "a sentence of "),
    ("x.h", f"/** Sums. {LONG}*/\nint a; /**< {LONG[:50]} */", "a sentence of "),
    ("x.c", f"/* {LONG[:100]}. {LONG[:100]}. */", ""),
    ("x.h", "/** Sums.\n *  a    " + "word " * 20 + "\n *  out  " + "word " * 20 + "\n *  Returns DC_OK. */", ""),
    ("x.c", "/* In " + "word " * 20 + "\n *\n *   - " + "word " * 20 + "\n *   - " + "word " * 20 + "*/", ""),
    ("x.py", f'"""A module."""\nx = "{LONG}"  # whoever\n', '"whoever": '),
    ("x.py", f'def f():\n    """{LONG}"""\n', "a sentence of "),
    ("x.rs", f"/// Sums.\n/// ```\n/// let who = 1; {LONG}\n/// ```\nfn f<'a>() {{}}\n", ""),
    ("x.rs", "/// Sums for\n/// everybody.\n", '"everybody": '),
    ("x.sh", "# A rank\n# and his part\necho who\n", '"his": '),
    ("x.md", f"Text.\n\n```c\nwho {LONG}\n```\n\n    who\n\n| {LONG[:100]} | {LONG[:100]} |\n`who`\n", ""),
    ("x.md", f"- One `dc_x(a, b)`\n{LONG}", "a sentence of "),
]


def planted_faults() -> Iterator[str]:
    for name, source, expected in PLANTED:
        found = [fault.split(":", 2)[2].strip() for fault in faults(name, source)]
        if len(found) != bool(expected) or expected and not found[0].startswith(expected):
            yield f"the planted fault in {name}, {source!r}, gives {found}"


def main() -> int:
    found: List[str] = []
    count = 0
    for name in tracked_files():
        path = ROOT / name
        if not name.startswith(NOT_READ) and path.suffix in {*C_LIKE, *HASH, ".rs", ".py", ".pyi", ".md", ""}:
            try:
                source = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            count += 1
            found += faults(name, source)
    found += planted_faults()
    print("\n".join(found) or f"{count} files follow the rules of English; {len(PLANTED)} planted faults are found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
