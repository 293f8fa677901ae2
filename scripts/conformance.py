#!/usr/bin/env python3
"""Makes the tables of docs/conformance*.md: the checks of a list in tests/conformance, the tests with their numbers,
and the results of the last runs of the suites with these tests.

    scripts/conformance.py            writes them
    scripts/conformance.py --check    fails if one is not up to date, a check has no test, a test names no check, or a
                                      test did not run or did not pass
    scripts/conformance.py --tests    fails if the tests in a table are not those of the tree; needs no results

A test carries numbers in its name (check_51_52_what_it_shows, test_check_8_… in Python, in the folders of its list), or
in a comment above it with the list's word: `conformance: 122`."""

from __future__ import annotations

import argparse
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Set, Tuple

ROOT = Path(__file__).resolve().parent.parent
C_RESULTS = ROOT / "build" / "gcc" / "meson-logs" / "testlog.json"

RUNTIME = """# Conformance

What DeepCompile's runtime must do, as {count} checks, and the tests that show it, each by the number of its check. "≠"
marks what libdc does differently on purpose; the note says how the original does it, or by which of its faults in
`differences.md` (D1 to D15). Written by `scripts/conformance.py` out of `tests/conformance/lists/checks.txt`, the
tests, and their results; `make test` fails if a check has no test, or one that does not pass.

The C tests touch memory by the copies of the device under test alone, and run on three: `cpu`, with ranks as threads;
the CUDA device on a simulated driver (`gpu-status.md`), likewise, and counted with `cpu`; and `sim`, where every order
of streams is drawn from seeds and a checker reports what nothing orders (`simulation.md`). What is about CUDA's
streams is shown on simulated streams. `LIBDC_TEST_DEVICE=NAME` runs them on another device. The Python tests go
through the PyTorch adapter, on `cpu`.

{summary}
"""


SECOND_ORDER = """# Conformance of second-order operators

What operators and optimizers of second order must do, as {count} checks, and the tests that show it, each by the number
of its check. "≠" marks what libdc answers otherwise than the field does, on purpose; the note says how; "…" what is not
there yet. Written by `scripts/conformance.py` out of `tests/conformance/lists/second_order.txt`, the tests, and their
results; `make test` fails if a check has no test, or one that does not pass.

{summary}
"""

LAYER = """# Conformance of the transformer layer

The {count} points of the layer and the tests that show each by its number, against a reference in float64
(`tests/python/layer/layer_reference.py`). "≠" marks what the original, DeepSpeed's transformer kernel, does otherwise;
the note says how. Written by `scripts/conformance.py` out of `tests/conformance/lists/layer.txt`, the tests, and their
results; `make test` fails if a point has no test, or one that does not pass.

Gates, for the output and each gradient: relative error in the Frobenius norm at most 2e-6 in float32, 1.5e-3 in float16
and 1.2e-2 in bfloat16, and the greatest error at most 2e-5, 4e-3 and 2.5e-2 of the greatest value. Some tests widen
them by a factor that they name.

{summary}
"""


class Table(NamedTuple):
    word: str  # the word of comments that have numbers
    checks: Path
    count: int
    document: Path
    head: str
    places: str  # pattern of the files whose tests have numbers in their names
    c_name: str  # how such a name begins
    python_name: str
    suites: Tuple[str, ...]  # pytest's suites


CHECKS, DOCS = ROOT / "tests" / "conformance", ROOT / "docs"
TABLES = [
    Table("conformance", CHECKS / "lists" / "checks.txt", 130, DOCS / "conformance.md", RUNTIME,
          r"tests/conformance/", "check_", "test_check_", ("conformance",)),
    Table("second-order", CHECKS / "lists" / "second_order.txt", 55, DOCS / "conformance-second-order.md", SECOND_ORDER,
          r"tests/(linalg|optim|api/test_devices|python/test_(linalg|optim|soap))", "(?:test|point)_", "test_",
          ("python", "torch")),
    Table("layer", CHECKS / "lists" / "layer.txt", 32, DOCS / "conformance-layer.md", LAYER,
          r"tests/((python/layer|faults|transformer|planner)/test_layer|tools/test_plan|"
          r"torch/transformer/test_transformer_layer)",
          "test_", "test_", ("python", "torch", "tools")),
]

# The suites whose results are in the tables.
RESULTS = tuple(sorted({"gcc"}.union(*(table.suites for table in TABLES)) - {"conformance"}))


class Check(NamedTuple):
    number: int
    chapter: str
    mark: str
    text: str
    note: str


class Test(NamedTuple):
    path: str  # relative to the root
    name: str
    numbers: Tuple[int, ...]


class Result(NamedTuple):
    device: str
    state: str  # "passed", "failed", or why it was skipped


def read_checks(table: Table) -> List[Check]:
    chapter, checks = "", []
    for line in table.checks.read_text(encoding="utf-8").splitlines():
        row = [part.strip() for part in line.split("|")]
        if len(row) == 4 and row[0].isdigit():
            checks.append(Check(int(row[0]), chapter, *row[1:]))
        elif re.match(r"[A-Z]\. ", line):
            chapter = line
    return checks


def numbers_of(text: str) -> Tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def read_tests(table: Table) -> Iterator[Test]:
    for path in sorted((ROOT / "tests").rglob("*")):
        if path.suffix not in (".c", ".py") or not path.is_file():
            continue
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if re.match(table.places, name):
            pattern = rf"cmocka_unit_test\((({table.c_name}(?:\d+_)+)\w+)\)" if path.suffix == ".c" else \
                rf"^def (({table.python_name}(?:\d+_)+)\w+)\("
            for match in re.finditer(pattern, text, re.M):
                yield Test(name, match[1], numbers_of(match[2]))
        for match in re.finditer(table.word + r": ([\d, ]+).*\n(?:.*\n){0,2}?(?:static void|def) (test_\w+)\(", text):
            yield Test(name, match[2], numbers_of(match[1]))


def c_results() -> Iterator[Tuple[str, Result]]:
    """The result of every cmocka test by name, once for each device."""
    words = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}
    for line in C_RESULTS.read_text(encoding="utf-8").splitlines():
        program = json.loads(line)
        device = "sim" if "sim" in re.split(r"[\s_:]", program["name"]) else "cpu"
        for word, name in re.findall(r"^\[ +(OK|FAILED|SKIPPED) +\] (\w+)$", program.get("stdout", ""), re.M):
            yield name, Result(device, words[word])


def python_results(path: Path) -> Iterator[Tuple[str, Result]]:
    """The result of every pytest test, by its module and its name without parameters."""
    for case in ElementTree.parse(path).iter("testcase"):
        skipped = case.find("skipped")
        failed = case.find("failure") is not None or case.find("error") is not None
        state = "failed" if failed else "passed" if skipped is None else skipped.get("message", "skipped")
        module = case.get("classname", "").split(".")[-1]
        yield f"{module}.{case.get('name', '').split('[')[0]}", Result("cpu", state)


def read_results(table: Table) -> Dict[str, Set[Result]]:
    results: Dict[str, Set[Result]] = {}
    paths = [C_RESULTS, *(ROOT / "build" / "logs" / f"{suite}.xml" for suite in table.suites)]
    for path in paths:
        if not path.exists():
            sys.exit(f'conformance: {path.relative_to(ROOT)} is not there: make test '
                     f'SUITES="gcc {" ".join(table.suites)}"')
        for name, result in c_results() if path == C_RESULTS else python_results(path):
            results.setdefault(name, set()).add(result)
    return results


def results_of(test: Test, results: Dict[str, Set[Result]]) -> Set[Result]:
    path = Path(test.path)
    return results.get(test.name if path.suffix == ".c" else f"{path.stem}.{test.name}", set())


def check_table(table: Table, checks: List[Check], tests: List[Test], results: Dict[str, Set[Result]]) -> List[str]:
    known, shown = {check.number for check in checks}, {number for test in tests for number in test.numbers}
    faults = [] if [check.number for check in checks] == list(range(1, table.count + 1)) else \
        [f"{table.checks.name}: the checks are not 1 to {table.count} in order"]
    later = {check.number for check in checks if check.mark == "…"}
    faults += [f"{table.word} {number} has no test" for number in sorted(known - shown - later)]
    for test in tests:
        faults += [f"{test.path}: {test.name}: there is no {table.word} {number}" for number in test.numbers
                   if number not in known]
        states = {result.state for result in results_of(test, results)}
        if not states:
            faults.append(f"{test.path}: {test.name} did not run")
        faults += [f"{test.path}: {test.name}: {state}" for state in sorted(states)
                   if state != "passed" and not state.startswith("needs a card")]
    for check in checks:
        mine = [test for test in tests if check.number in test.numbers]
        if mine and not any(result.state == "passed" for test in mine for result in results_of(test, results)):
            faults.append(f"{table.word} {check.number}: nothing of it passed")
    return faults


def state_of(mine: List[Test], results: Dict[str, Set[Result]]) -> str:
    ended = {result for test in mine for result in results_of(test, results)}
    if any(result.state == "failed" for result in ended):
        return "fails"
    if not mine:
        return "not there yet"
    devices = sorted({result.device for result in ended if result.state == "passed"})
    waiting = sorted({result.state for result in ended if result.state.startswith("needs a card")})
    return "; ".join([f"passes on {', '.join(devices)}"] * bool(devices) + waiting)


def document(table: Table, checks: List[Check], tests: List[Test], results: Dict[str, Set[Result]]) -> str:
    rows: List[str] = []
    chapter, counts = "", {"passes on cpu": 0, "passes on sim": 0, "needs a card": 0}
    for check in checks:
        if check.chapter != chapter:
            chapter = check.chapter
            rows += ["", f"## {chapter}", "", "| # | | check | tests | state |", "|---|---|---|---|---|"]
        mine = [test for test in tests if check.number in test.numbers]
        state = state_of(mine, results)
        counts["passes on cpu"] += "cpu" in state
        counts["passes on sim"] += "sim" in state
        counts["needs a card"] += "needs a card" in state
        text = check.text + (f" ({check.note})" if check.note else "")
        names = "<br>".join(f"`{test.path.replace('tests/conformance/', '')}:{test.name}`" for test in mine)
        mark = "" if check.mark == "…" and mine else check.mark
        rows.append(f"| {check.number} | {mark} | {text} | {names} | {state} |")
    summary = (f"{len(checks)} checks, {len(tests)} tests: {counts['passes on cpu']} checks are shown on cpu, "
               f"{counts['passes on sim']} on sim; {counts['needs a card']} have a part that needs a card.")
    if table.word != "conformance":
        summary = f"{len(checks)} checks, {len(tests)} tests: {counts['passes on cpu']} checks are shown."
    return table.head.format(count=len(checks), summary=summary) + "\n".join(rows) + "\n"


def without_results(text: str) -> List[str]:
    """The lines of a document without the checks' results, and without the counts of checks and tests in the
    summary."""
    rows = [line.rsplit("|", 2)[0] if line.startswith("| ") else line for line in text.splitlines()]
    return [re.sub(r"(?<= tests: ).*", "", row) for row in rows]


def check_tests() -> int:
    faults = []
    for table in TABLES:
        text = table.document.read_text(encoding="utf-8")
        if without_results(text) != without_results(document(table, read_checks(table), list(read_tests(table)), {})):
            faults.append(f"{table.document.relative_to(ROOT)} lists other tests than the tree holds: make test "
                          f'SUITES="{" ".join(RESULTS)} conformance", then scripts/conformance.py')
    print("\n".join(faults) or "all passed")
    return bool(faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--tests", action="store_true", help="compare the names of the tests alone")
    arguments = parser.parse_args()
    if arguments.tests:
        return check_tests()
    check_only = arguments.check
    faults: List[str] = []
    for table in TABLES:
        checks, tests, results = read_checks(table), list(read_tests(table)), read_results(table)
        faults += check_table(table, checks, tests, results)
        text = document(table, checks, tests, results)
        if not check_only:
            table.document.write_text(text, encoding="utf-8")
        elif not table.document.exists() or table.document.read_text(encoding="utf-8") != text:
            faults.append(f"{table.document.relative_to(ROOT)} is not what scripts/conformance.py writes")
        print(f"{table.word}: {len(checks)} checks, {len(tests)} tests")
    print("\n".join(faults) or "all passed")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
