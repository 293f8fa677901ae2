"""The gate's own test: changes of the header, of the version script and of the library, and what is to be said of each.
The library is the stub of empty functions, whose ABI is that of the real one. Without this, a gate that lets everything
pass would look healthy. `mutants.py` prints the table."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Callable, List, NamedTuple, Optional, Tuple

import contract
import gate
from header import ROOT, build_stub, must, run

Edits = Tuple[Tuple[str, str], ...]


class Mutant(NamedTuple):
    name: str
    caught: str  # by what: "gate", "locks", "contract", "elf", or several; "" for a change that is allowed
    header: Edits = ()
    script: Edits = ()
    soname: str = "libdc.so.0.1"
    inside: str = "int x;"
    code: str = ""  # more in the library
    link: Tuple[str, ...] = ()
    spoil: Optional[Callable[[Path, Path], None]] = None  # (library, baseline)


def _strip(library: Path, _: Path) -> None:
    must("strip", "--strip-debug", library)


def _delete(_: Path, baseline: Path) -> None:
    baseline.unlink()


def _empty(_: Path, baseline: Path) -> None:
    baseline.write_bytes(b"")


END = "  local:\n    *;\n};\n"
RESET = "    dc_reset;\n"
SYNC = "  int32_t sync_before_reduce;"
CHECK = "  int32_t check_finite;     "
LAST = "  int32_t reserved0;    /**< 0 */\n} dc_adamw_options;"
FREE = "  int64_t free_activation_threshold;"


TENSOR = "typedef struct dc_tensor {"
BUSY = "  DC_E_BUSY = -107, "
PROFILING = "DC_API int32_t dc_is_profiling("
RESET_DECLARED = "DC_API dc_status dc_reset(dc_context *context)"
IFUNC = ("static dc_status reset_any(dc_context *context) { return context == 0; }\n"
         "static dc_status (*resolve(void))(dc_context *) { return reset_any; }\n"
         'dc_status dc_reset(dc_context *context) __attribute__((ifunc("resolve")));')
STATIC_TLS = ('__thread int of_thread __attribute__((tls_model("initial-exec")));\n'
              "dc_status dc_reset(dc_context *context) { return context != 0 ? of_thread++ : 0; }")


def _node(function: str) -> Tuple[str, str]:
    return END, f"{END}DC_0.2 {{\n  global:\n    {function};\n}} DC_0.1;\n"


MUTANTS = [
    Mutant("nothing", ""),
    Mutant("a comment", "", (("/** The operators, for", "/** All the operators, for"),)),
    Mutant("an opaque struct grows", "", inside="int x; long y[4];"),
    Mutant("a function more, in a new node", "",
           (("DC_API int32_t dc_is_profiling(", "DC_API int32_t dc_new(void);\nDC_API int32_t dc_is_profiling("),),
           (_node("dc_new"),)),
    Mutant("an enumerator more", "", (("  DC_MEAN = 2 ", "  DC_MAX = 3,\n  DC_MEAN = 2 "),)),
    Mutant("an enumeration more", "", ((TENSOR, f"enum dc_new {{ DC_NEW = 1 }};\n{TENSOR}"),)),
    Mutant("a constant more", "", (("#define DC_API_VERSION", "#define DC_NEW 1\n#define DC_API_VERSION"),)),
    Mutant("a struct and an opaque type more", "",
           ((TENSOR, f"typedef struct dc_new dc_new;\ntypedef struct dc_sized {{ size_t struct_size; }} dc_sized;\n"
             f"{TENSOR}"),)),
    Mutant("a field appended", "",
           ((LAST, "  int32_t reserved0;\n  int64_t appended;\n} dc_adamw_options;"),
            ("{sizeof(dc_adamw_options), 0, 0, 0, 0, 0, 0, 0, 0}",
             "{sizeof(dc_adamw_options), 0, 0, 0, 0, 0, 0, 0, 0, 0}"))),
    Mutant("a callback appended", "",
           (("} dc_comm_callbacks;", "  int32_t (*appended)(void *user);\n} dc_comm_callbacks;"),)),
    Mutant("a reserved field put to use", "", ((LAST, LAST.replace("reserved0;", "in_use;")),)),
    Mutant("a function that is chosen when loaded", "", code=IFUNC),
    Mutant("attributes", "",
           ((f"{RESET_DECLARED};", f'{RESET_DECLARED} __attribute__((nonnull(1), deprecated("no")));'),)),
    Mutant("a parameter renamed", "", ((RESET_DECLARED, RESET_DECLARED.replace("*context", "*ctx")),)),
    Mutant("the next patch", "", (("#define DC_VERSION_PATCH 0", "#define DC_VERSION_PATCH 1"),
                                  ("#define DC_API_VERSION 1000", "#define DC_API_VERSION 1001"))),
    Mutant("a function less", "gate",
           (("DC_API dc_status dc_reset(dc_context *context);", ""),), ((RESET, ""),)),
    Mutant("a function that is not exported", "gate and contract", (), ((RESET, ""),)),
    Mutant("a symbol in another node", "gate", (), ((RESET, ""), _node("dc_reset"))),
    Mutant("another soname", "gate", soname="libdc.so.0.2"),
    Mutant("an argument more", "gate and locks",
           (("dc_reset(dc_context *context)", "dc_reset(dc_context *context, int32_t how)"),)),
    Mutant("an argument less", "gate and locks",
           (("dc_end_backward(dc_context *context, int64_t graph_id, int32_t release_buckets)",
             "dc_end_backward(dc_context *context, int64_t graph_id)"),)),
    Mutant("another argument type", "gate and locks",
           (("dc_context_trace_start(dc_context *context, int64_t",
             "dc_context_trace_start(dc_context *context, int32_t"),)),
    Mutant("another result type", "gate and locks",
           (("DC_API dc_status dc_reset(", "DC_API int64_t dc_reset("),)),
    Mutant("const dropped", "locks", (("dc_is_profiling(const dc_context *", "dc_is_profiling(dc_context *"),)),
    Mutant("const added", "locks", (("dc_comm_check(dc_comm *", "dc_comm_check(const dc_comm *"),)),
    Mutant("another callback type", "gate and locks",
           (("(*broadcast)(void *data, int64_t bytes, int32_t root",
             "(*broadcast)(void *data, int64_t bytes, int64_t root"),)),
    Mutant("two fields swapped", "gate and locks",
           (("  int32_t symmetric_memory; ", "  int32_t other; "),
            ("  int32_t double_buffer; ", "  int32_t symmetric_memory; "),
            ("  int32_t other; ", "  int32_t double_buffer; "))),
    Mutant("a field inserted", "gate and locks", ((SYNC, f"  int32_t inserted;\n{SYNC}"),)),
    Mutant("a field removed", "gate and locks", ((SYNC, ""),)),
    Mutant("a field renamed", "locks", ((SYNC, "  int32_t sync_prior_to_reduce;"),)),
    Mutant("a field widened", "gate and locks", ((CHECK, "  int64_t check_finite;"),)),
    Mutant("a field narrowed", "gate and locks", ((FREE, "  int32_t free_activation_threshold;"),)),
    Mutant("a field without its sign", "gate and locks", ((SYNC, "  uint32_t sync_before_reduce;"),)),
    Mutant("an enumerator's value", "locks", (("DC_E_BUSY = -107", "DC_E_BUSY = -112"),)),
    Mutant("an enumerator less", "locks", (("  DC_E_BUSY = -107, ", "  "),)),
    Mutant("packed structs", "locks", ((TENSOR, f"#pragma pack(4)\n{TENSOR}"),)),
    Mutant("a field with another alignment", "gate and locks and contract",
           ((SYNC, SYNC.replace("  int32_t", "  _Alignas(16) int32_t")),)),
    Mutant("C++ without extern \"C\"", "contract", (('extern "C" {', 'extern "C++" {'),)),
    Mutant("an enumerator of 64 bits", "locks", ((BUSY, f"{BUSY}DC_E_WIDE = 1LL << 40, "),)),
    Mutant("an initialiser with another type", "contract",
           (("0, DC_DTYPE_NONE, NULL}", "0, DC_FLOAT32, NULL}"),)),
    Mutant("an older DC_API_VERSION", "contract", (("#define DC_API_VERSION 1000", "#define DC_API_VERSION 999"),)),
    Mutant("a DC_API_VERSION of its own", "contract",
           (("#define DC_API_VERSION 1000", "#define DC_API_VERSION 2000"),)),
    Mutant("parameters swapped", "contract",
           (("dc_kron(dc_linalg *linalg, const dc_tensor *a, const dc_tensor *b,",
             "dc_kron(dc_linalg *linalg, const dc_tensor *b, const dc_tensor *a,"),)),
    Mutant("another library needed", "elf", link=("-Wl,--no-as-needed", "-lstdc++")),
    Mutant("an executable stack", "elf", link=("-Wl,-z,execstack",)),
    Mutant("static thread-local storage", "elf", code=STATIC_TLS),
    Mutant("debug information stripped", "gate", spoil=_strip),
    Mutant("the baseline deleted", "gate", spoil=_delete),
    Mutant("the baseline empty", "gate", spoil=_empty),
]


def _edited(source: Path, edits: Edits, target: Path) -> None:
    text = source.read_text(encoding="utf-8")
    for old, new in edits:
        if text.count(old) != 1:
            raise SystemExit(f"mutants: {old!r} is {text.count(old)} times in {source.name}, must be there once")
        text = text.replace(old, new)
    target.write_text(text, encoding="utf-8")


def lock_faults(include: Path) -> List[str]:
    """The locks of every release, compiled with a header, by two compilers."""
    found = []
    for lock in sorted((ROOT / "tests" / "abi").glob("*_[0-9]*_[0-9]*.c")):
        for compiler in ("gcc", "clang-14"):
            done = run(compiler, "-std=c11", "-fsyntax-only", f"-I{include}", lock)
            if done.returncode:
                found.append(next(line for line in done.stderr.splitlines() if "error" in line))
    return found


def verdict(mutant: Mutant, baseline: Path) -> Tuple[str, str]:
    """The check that caught it, and its first message."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        include = folder / "include"
        include.mkdir()
        _edited(ROOT / "include" / "dc_api.h", mutant.header, include / "dc_api.h")
        _edited(ROOT / "src" / "libdc.map", mutant.script, folder / "libdc.map")
        copy = Path(shutil.copy(baseline, folder))
        library = build_stub(folder, include / "dc_api.h", folder / "libdc.map", mutant.soname, mutant.inside,
                             mutant.code, mutant.link)
        if mutant.spoil:
            mutant.spoil(library, copy)
        found = {"gate": gate.faults(library, include, copy, baseline.parent), "locks": lock_faults(include),
                 "contract": contract.faults(include, library, baseline.parent), "elf": contract.elf_faults(library)}
    said = [fault for faults in found.values() for fault in faults]
    return " and ".join(name for name, faults in found.items() if faults), " ".join(said[:1])


def main(baseline: Path) -> List[str]:
    """Prints the verdicts; what differs from what is to be said."""
    wrong = []
    for mutant in MUTANTS:
        caught, said = verdict(mutant, baseline)
        print(f"  {'ok   ' if caught == mutant.caught else 'WRONG'} {mutant.name:<32} "
              f"{f'caught by {caught}' if caught else 'passes':<26} {said[:60]}")
        if caught != mutant.caught:
            wrong.append(f"{mutant.name}: caught by {caught or 'nothing'}, must be {mutant.caught or 'nothing'}")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(sorted((ROOT / "abi-check").glob("*.*/libdc.x86_64.abi"))[-1])))
