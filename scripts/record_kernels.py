#!/usr/bin/env python3
"""Runs a build, and records the resources of each kernel for each card. ptxas reports the registers of a thread, the
shared memory of a block and the bytes spilled. nvdisasm shows the instructions: all, products of tensor cores (HMMA),
their loads (LDSM), asynchronous copies (LDGSTS), barriers (BAR) and accesses to local memory.

    scripts/record_kernels.py FILE BUILD NVDISASM COMMAND...

Kernels that were not compiled this time keep the last report of ptxas. It is in BUILD/ptxas.log, since a run beyond the
bounds leaves FILE unchanged. The bounds: no access to local memory, and at most a tenth more instructions than in FILE;
a line that is deleted there is recorded anew. Exits with the command's status, or with 1 beyond the bounds."""

from __future__ import annotations

import concurrent.futures
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Dict, List, Tuple

Key = Tuple[str, str]
KINDS = {"hmma": r"HMMA\b", "ldsm": r"LDSM\b", "ldgsts": r"LDGSTS\b", "bar": r"BAR\b", "local": r"(?:LDL|STL)\b"}
COLUMNS = ("registers", "shared", "spilled", "all", *KINDS)
GROWTH = 1.1


def row(key: Key, values: Dict[str, int]) -> str:
    return f"{key[0]:44}{key[1]:>6}" + "".join(f"{values[column]:>10}" for column in COLUMNS)


def kept(file: Path) -> Dict[Key, Dict[str, int]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    columns = lines[0].split()[2:] if lines else []
    parts = [line.split() for line in lines[1:]]
    return {(name, card): dict(zip(columns, map(int, values))) for name, card, *values in parts}


def compiled(text: str) -> Dict[Key, Dict[str, int]]:
    table = {}
    for part in re.split(r"Compiling entry function ", text)[1:]:
        name = re.match(r"'(\w+)' for '(\w+)'", part)
        used = re.search(r"Used (\d+) registers[^\n]*", part)
        if name is not None and used is not None:
            shared = re.search(r"(\d+) bytes smem", used[0])
            spilled = re.search(r"(\d+) bytes spill stores", part)
            table[name[1], name[2]] = {"registers": int(used[1]), "shared": int(shared[1]) if shared else 0,
                                       "spilled": int(spilled[1]) if spilled else 0}
    return table


def disassembled(text: str, card: str) -> Dict[Key, Dict[str, int]]:
    """The instruction counts of each kernel in an image."""
    table = {}
    for part in re.split(r"^\.text\.", text, flags=re.M)[1:]:
        opcodes = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", part, re.M)
        counts = Counter({kind: sum(1 for opcode in opcodes if re.match(pattern, opcode))
                          for kind, pattern in KINDS.items()})
        table[part.split(":")[0], card] = {"all": len(opcodes), **counts}
    return table


def count(build: Path, nvdisasm: str) -> Dict[Key, Dict[str, int]]:
    def one(image: Path) -> Dict[Key, Dict[str, int]]:
        done = subprocess.run([nvdisasm, "-c", str(image)], check=True, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL)
        return disassembled(done.stdout, f"sm_{image.name.split('.')[1]}")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        tables = pool.map(one, sorted(build.rglob("*.cubin")))
    return {key: values for table in tables for key, values in table.items()}


def beyond(table: Dict[Key, Dict[str, int]], before: Dict[Key, Dict[str, int]]) -> List[str]:
    faults = [] if table else ["there is no image of a kernel"]
    faults += [f"{name} for {card} has {values['local']} accesses to local memory, must have none"
               for (name, card), values in table.items() if values["local"] > 0]
    faults += [f"{name} for {card}: no instructions were read" for (name, card), values in table.items()
               if values["all"] == 0]
    for key, values in table.items():
        most = before.get(key, {}).get("all", values["all"]) * GROWTH
        if values["all"] > most:
            faults.append(f"{key[0]} for {key[1]} has {values['all']} instructions, must have at most {most:.0f}")
    return faults


def said_by_ptxas(build: Path, output: str) -> str:
    """The output of ptxas in this run and earlier ones, the latest last."""
    log = build / "ptxas.log"
    if "Compiling entry function" in output:
        with open(log, "a", encoding="utf-8") as file:
            file.write(output)
    return log.read_text(encoding="utf-8") if log.exists() else ""


def main() -> int:
    file, build, nvdisasm = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    done = subprocess.run(sys.argv[4:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    sys.stdout.write(done.stdout)
    said = said_by_ptxas(build, done.stdout)  # even if it failed: the next build compiles only the rest
    if done.returncode != 0:
        return done.returncode
    before, new = kept(file), compiled(said)
    table = {key: {**dict.fromkeys(COLUMNS, 0), **before.get(key, {}), **new.get(key, {}), **counts}
             for key, counts in count(build, nvdisasm).items()}
    faults = beyond(table, before)
    faults += [f"{name} for {card}: ptxas has said nothing of it; remove {build}" for name, card in sorted(table)
               if (name, card) not in {*before, *new}]
    print("\n".join(faults) or f"{file}: {len(table)} lines, all within their bounds")
    if not faults:
        head = f"{'kernel':44}{'card':>6}" + "".join(f"{column:>10}" for column in COLUMNS)
        file.write_text("\n".join([head, *(row(key, table[key]) for key in sorted(table))]) + "\n", encoding="utf-8")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
