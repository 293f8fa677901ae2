"""Every function called with nothing, and with numbers at their edges: it returns, and an error names the function."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import List

from header import ROOT, must, read, run

NUMBERS = ["0", "1", "-1", "INT32_MIN", "INT32_MAX"]
HANDLES = {"dc_device": "device", "dc_context": "context", "dc_comm": "comm", "dc_linalg": "linalg"}
PROGRAM = """
#include <dc_api.h>
#include <stdio.h>
#include <string.h>
static void status(const char *call, const char *name, dc_status got) {
  if (got == DC_OK)
    printf("OK %s\\n", call);
  else if (strcmp(dc_status_name(got), "DC_E_UNKNOWN") == 0)
    printf("%s: status %d has no name\\n", call, got);
  else if (strcmp(name, "dc_last_error_copy") != 0 && /* it must not change what it copies */
           strncmp(dc_last_error(), name, strlen(name)) != 0)
    printf("%s: the text does not begin with the name: %s\\n", call, dc_last_error());
}
int main(void) {
  dc_device *device;
  dc_context *context;
  dc_comm *comm;
  dc_linalg *linalg;
  if (dc_device_open("cpu", NULL, &device) || dc_context_create(device, NULL, &context) ||
      dc_comm_create_threads(1, NULL, &comm) || dc_init(context, comm, NULL, 1) ||
      dc_linalg_create(device, NULL, &linalg))
    return 3;
CALLS
  dc_context_destroy(context);
  dc_comm_destroy(comm);
  dc_linalg_destroy(linalg);
  dc_device_destroy(device);
  return 0;
}
"""


def _parameters(prototype: str) -> List[str]:
    inside = prototype[prototype.index("(") + 1 : prototype.rindex(")")]
    return [] if inside == "void" else [re.sub(r"\w+$", "", part).strip() for part in inside.split(", ")]


def _calls(name: str, prototype: str) -> List[str]:
    """All pointers NULL, and, where the first is a handle, a good one; all numbers the same."""
    types = _parameters(prototype)
    first = re.sub(r"[ *]|const", "", types[0]) if types else ""
    handles = ["NULL"]
    if first in HANDLES and types[0].count("*") == 1 and not name.endswith("_destroy"):
        handles.append(HANDLES[first])
    calls = []
    for handle in handles:
        for number in NUMBERS:
            words = ["NULL" if kind.endswith(("*", "_fn")) else f"({kind}){number}" for kind in types]
            calls.append(f"{name}({', '.join([handle, *words[1:]] if words and words[0] == 'NULL' else words)})")
    return list(dict.fromkeys(calls))


def faults(library: Path) -> List[str]:
    lines = []
    for name, prototype in read(ROOT / "include" / "dc_api.h").functions.items():
        # These end what the others use, or wait for other ranks.
        for call in _calls(name, prototype):
            if name in ("dc_cleanup", "dc_comm_abort", "dc_init") and "(NULL" not in call:
                continue
            lines.append(f'  status("{call}", "{name}", {call});' if prototype.startswith("dc_status ")
                         else f"  (void){call};" if not prototype.startswith("void ") else f"  {call};")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "edges.c"
        source.write_text(PROGRAM.replace("CALLS", "\n".join(lines)), encoding="utf-8")
        must("cc", "-g", f"-I{ROOT / 'include'}", source, f"-L{library.parent}", "-ldc", "-o", source.with_suffix(""))
        done = run(source.with_suffix(""), LD_LIBRARY_PATH=str(library.parent), PATH=os.environ["PATH"])
    said = done.stdout.splitlines()
    fine = [line for line in said if line.startswith("OK ")]
    print(f"  {len(lines)} calls, {len(fine)} of them allowed")
    found = [line for line in said if not line.startswith("OK ")]
    found += [f"{line}: with NULL for its handle" for line in fine if "(NULL" in line]
    return found + ([f"exit {done.returncode} {done.stderr}"] if done.returncode else [])
