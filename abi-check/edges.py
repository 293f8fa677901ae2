"""Every function called with NULL and with numbers at their edges, while floating-point exceptions are trapped. It
returns, an error names the function, and outputs of a call that failed are unchanged. After every call the locale, the
rounding mode and the traps are as before."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import List, Set

import contract
from header import ROOT, must, read, run

NUMBERS = ["0", "1", "-1", "INT32_MIN", "INT32_MAX", "NAN", "-INFINITY"]  # the last two for double
HANDLES = {"dc_device": "device", "dc_context": "context", "dc_comm": "comm", "dc_linalg": "linalg"}
PROGRAM = """
#define _GNU_SOURCE
#include <dc_api.h>
#include <fenv.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
enum { OUTPUTS = 8 };
static union output { size_t struct_size; void *handle; char bytes[4096]; } now[OUTPUTS], before[OUTPUTS];
static unsigned control;
static unsigned controls(void) {
  unsigned bits = (unsigned)fegetround() | (unsigned)fegetexcept();
#ifdef __x86_64__
  bits |= (__builtin_ia32_stmxcsr() & 0xffc0u) << 16; /* all but the flags of what happened */
#endif
  return bits;
}
static void kept(const char *call) {
  if (controls() != control)
    printf("%s: changed how floating-point numbers are rounded, or what traps\\n", call);
  if (strcmp(setlocale(LC_ALL, NULL), "C.UTF-8") != 0)
    printf("%s: changed the locale\\n", call);
}
/* A struct as its initialiser makes it; anything else with a pattern. */
static void *place(int number, size_t struct_size) {
  memset(&now[number], struct_size ? 0 : 0x5a, sizeof now[number]);
  if (struct_size)
    now[number].struct_size = struct_size;
  before[number] = now[number];
  return &now[number];
}
static void unchanged(const char *call, int number, int is_handle) {
  if (is_handle && now[number].handle == NULL)
    now[number].handle = before[number].handle;
  if (memcmp(&now[number], &before[number], sizeof now[number]) != 0)
    printf("%s: failed, and changed output %d\\n", call, number);
}
static void status(const char *call, const char *name, dc_status got) {
  kept(call);
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
  dc_status got;
  setlocale(LC_ALL, "C.UTF-8");
  fesetround(FE_UPWARD);
  feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW);
  control = controls();
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
    return [kind for kind, _ in contract.parameters(prototype)]


def _of_kind(number: str, kind: str) -> str:
    return "0" if number.endswith(("NAN", "INFINITY")) and kind != "double" else number


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
            words = ["NULL" if kind.endswith(("*", "_fn")) else f"({kind}){_of_kind(number, kind)}" for kind in types]
            calls.append(f"{name}({', '.join([handle, *words[1:]] if words and words[0] == 'NULL' else words)})")
    return list(dict.fromkeys(calls))


def _with_outputs(call: str, prototype: str, structs: Set[str]) -> str:
    """The same call with places for its outputs, which a failure leaves as they are."""
    name, words = call[:-1].split("(", 1)
    given, after = words.split(", "), ""
    for number, kind in enumerate(_parameters(prototype)):
        target = kind[:-1].strip()
        if not kind.endswith("*") or kind.startswith("const ") or target in ("void", *HANDLES) or number == 0:
            continue
        if re.fullmatch(r"dc_\w+", target) and target not in structs:
            continue  # another handle
        given[number] = f"place({number % 8}, {f'sizeof({target})' if target in structs else 0})"
        after += f' unchanged("{call}", {number % 8}, {int(target.endswith("*"))});'
    if not after:
        return ""
    made = f"{name}({', '.join(given)})"
    return (f'  got = {made}; kept("{call}");\n'
            f"  if (got != DC_OK && got != DC_E_BUFFER_TOO_SMALL) {{{after} }}")


def faults(library: Path) -> List[str]:
    lines = []
    header = read(ROOT / "include" / "dc_api.h")
    for name, prototype in header.functions.items():
        # These end what the others use, or wait for other ranks.
        for call in _calls(name, prototype):
            if name in ("dc_cleanup", "dc_comm_abort", "dc_init") and "(NULL" not in call:
                continue
            if prototype.startswith("dc_status "):
                lines.append(f'  status("{call}", "{name}", {call});')
                lines.append(_with_outputs(call, prototype, set(header.structs)))
            else:
                lines.append(f'  (void){call}; kept("{call}");' if not prototype.startswith("void ")
                             else f'  {call}; kept("{call}");')
    lines = [line for line in lines if line]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "edges.c"
        source.write_text(PROGRAM.replace("CALLS", "\n".join(lines)), encoding="utf-8")
        must("cc", "-g", f"-I{ROOT / 'include'}", source, f"-L{library.parent}", "-ldc", "-lm", "-o",
             source.with_suffix(""))
        done = run(source.with_suffix(""), LD_LIBRARY_PATH=str(library.parent), PATH=os.environ["PATH"])
    said = done.stdout.splitlines()
    fine = [line for line in said if line.startswith("OK ")]
    print(f"  {len(lines)} calls, {len(fine)} of them allowed")
    found = [line for line in said if not line.startswith("OK ")]
    found += [f"{line}: with NULL for its handle" for line in fine if "(NULL" in line]
    return found + ([f"exit {done.returncode} {done.stderr}"] if done.returncode else [])
