#!/usr/bin/env python3
"""Builds and runs every suite, three at a time: run_tests.py [SUITE…]. Ends with one line, `N passed, N failed`.

Many suites keep one core busy and wait for the rest of their time, so three together end sooner. Each suite's output is
in build/logs; a failed one's end is shown. A missing tool is a failure, not a skip."""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Callable, Dict, List, Optional, Set, Tuple

from conformance import RESULTS
from suite import BUILD, LOGS, ROOT, Count, Suite, cmocka_count, counted, one, stop

SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=0:second_deadlock_stack=1:ignore_noninstrumented_modules=1",
}
SANITIZED = ["-Dbuildtype=debugoptimized", "-Doptimization=1", "-Db_lundef=false"]  # with -O2 the build takes longer
AT_ONCE = 3


def c_tests(suite: Suite, setup: List[str], compiler: str, wrapper: Optional[str] = None) -> Count:
    folder = BUILD / suite.name
    flags = ["-Dwerror=true", "-Dtests=true", *setup]
    if not (folder / "build.ninja").exists():
        # LLVM's linker takes a third of the time, which matters for hundreds of programs with sanitizers.
        tools = {"gcc": {"CXX": "g++"}, "clang-14": {"CXX": "clang++-14", "CC_LD": "lld", "CXX_LD": "lld"}}[compiler]
        if suite.run("meson", "setup", str(folder), *flags, CC=compiler, **tools) != 0:
            return Count(failed=1)
    if suite.run("meson", "compile", "-C", str(folder)) != 0:
        return Count(failed=1)
    # meson adds the wrapper's name to the log's name
    log = folder / "meson-logs" / ("testlog.json" if wrapper is None else f"testlog-{wrapper.split()[0]}.json")
    log.unlink(missing_ok=True)
    # One more at a time than there are cores, since some wait rather than work. The tests' limits end those that hang.
    command = ["meson", "test", "-C", str(folder), "--no-rebuild", "--timeout-multiplier=20", "--num-processes=3"]
    status = suite.run(*command, *([f"--wrapper={wrapper}"] if wrapper else []), **SANITIZERS)
    if not log.exists():
        return Count(failed=1)
    total = Count()
    for line in log.read_text(encoding="utf-8").splitlines():
        test = json.loads(line)
        text = test.get("stdout", "") + test.get("stderr", "")
        count = cmocka_count(text, test["returncode"])
        if count.failed:
            suite.write(f"\n==== {test['name']}: {test['result']}\n{text}\n")
        total += count
    return total if sum(total) and (status == 0 or total.failed) else total + Count(failed=1)  # some tests did not run


def pytest(suite: Suite, *arguments: str, **environment: str) -> Count:
    report = LOGS / f"{suite.name}.xml"
    report.unlink(missing_ok=True)
    status = suite.run(sys.executable, "-m", "pytest", "-ra", "--durations=5", f"--junitxml={report}", *arguments,
                       **environment)
    if not report.exists():
        return Count(failed=1)
    total = Count()
    for part in ElementTree.parse(report).iter("testsuite"):
        tests, skipped = int(part.get("tests", 0)), int(part.get("skipped", 0))
        failed = int(part.get("failures", 0)) + int(part.get("errors", 0))
        total += Count(max(0, tests - failed - skipped), failed, skipped)
    if status != 0 and total.failed == 0:
        total += Count(failed=1)
    return total


def checks(suite: Suite) -> Count:
    """Runs every file of scripts/checks, each as one test, and checks that the tables of conformance have the tree's
    tests."""
    total = one(suite.run(sys.executable, "scripts/conformance.py", "--tests"))
    for script in sorted((ROOT / "scripts" / "checks").glob("check_*.py")):
        total += one(suite.run(sys.executable, str(script)))
    return total


def abi(suite: Suite) -> Count:
    """The library of suite gcc against every release."""
    built = BUILD / "gcc"
    status = suite.run(sys.executable, "abi-check/abi.py", str(built / "libdc.so"), str(built / "tests"))
    return counted(suite, r"^(?P<passed>\d+) passed, (?P<failed>\d+) failed$", status)


def rust(suite: Suite) -> Count:
    """The Rust crates on the library of suite gcc. Their declarations must be those that bindgen makes from the
    header."""
    built, manifest = str(BUILD / "gcc"), ("--manifest-path", "bindings/rust/Cargo.toml")
    environment = {"LIBDC_LIB_DIR": built, "LD_LIBRARY_PATH": built, "CARGO_TARGET_DIR": str(BUILD / "rust")}
    total = one(suite.run("bindings/rust/dc-sys/gen.sh", "--check"))
    total += one(suite.run("cargo", "fmt", *manifest, "--all", "--check"))
    # Newer clippy no longer has these two lints in its defaults. Debian's has, and they are wrong here.
    total += one(suite.run("cargo", "clippy", "--offline", *manifest, "--all-targets", "--", "-D", "warnings", "-A",
                           "clippy::needless-collect", "-A", "clippy::redundant-clone", **environment))
    status = suite.run("cargo", "test", "--offline", *manifest, **environment)
    return total + counted(suite, r"^test result: \w+\. (?P<passed>\d+) passed; (?P<failed>\d+) failed", status)


def ffi(suite: Suite) -> Count:
    """One scenario from every language, on the library of suite gcc."""
    status = suite.run(sys.executable, "tests/ffi/run.py", str(BUILD / "gcc" / "libdc.so"),
                       CARGO_TARGET_DIR=str(BUILD / "rust"))
    return counted(suite, r"^(?P<passed>\d+) passed, (?P<failed>\d+) failed$", status)


def spin(suite: Suite) -> Count:
    """The protocols' models, and their mutants; prints how many states were searched."""
    status = suite.run(sys.executable, "tests/models/run.py")
    return counted(suite, r"^(?P<passed>\d+) passed, (?P<failed>\d+) failed$", status)


def fuzz(suite: Suite) -> Count:
    """A few seconds of `make fuzz`, from the same seeds."""
    status = suite.run(sys.executable, "tests/fuzz/run.py", "--runs=4000")
    return counted(suite, r"^(?P<passed>\d+) passed, (?P<failed>\d+) failed$", status)


# Programs that together use every module and end soon, even if only one thread runs at a time. None tests deadlines or
# killed processes, since programs are slow under valgrind.
EVERY_MODULE = ("base/test_tensor", "device/test_arena", "device/cpu/test_stream", "kernels/test_accumulate",
                "comm/external/test_external", "api/test_bad_input", "api/test_edge_cases", "runtime/test_gather",
                "runtime/test_offload", "runtime/test_reduce", "abi/test_growth", "models/test_param_table",
                "sim/sim_offload")


def valgrind(suite: Suite) -> Count:
    """Runs programs of suite gcc under valgrind, which finds a fault that no sanitizer here does: uninitialised values
    in any code."""
    total = Count()
    for name in EVERY_MODULE:
        status = suite.run("valgrind", "--quiet", "--fair-sched=yes", "--leak-check=full",
                           "--errors-for-leak-kinds=definite", "--show-leak-kinds=definite", "--error-exitcode=99",
                           str(BUILD / "gcc" / "tests" / name))
        total += one(status)
    return total


def dist(suite: Suite) -> Count:
    """The tarball of `make dist`, built without git and without downloads by meson."""
    if suite.run("make", "dist") != 0:
        return Count(failed=1)
    tarball = max(BUILD.glob("libdc-*.tar.gz"), key=lambda path: path.stat().st_mtime)
    with tempfile.TemporaryDirectory(prefix="libdc-dist-") as folder:
        out, programs = f"{folder}/build", [f"tests/{name}" for name in EVERY_MODULE]
        total = one(suite.run("tar", "-xzf", str(tarball), "-C", folder, "--strip-components=1") or
                    suite.run("meson", "setup", out, folder, "--wrap-mode=nodownload", "-Doptimization=0",
                              "-Ddebug=false")
                    or suite.run("ninja", "-C", out, "tools/libdc/libdc", *programs))
        # It is also PyPI's sdist: it has metadata, and pip can prepare it for installation.
        total += one(suite.run("grep", "-q", "^Name: libdc$", f"{folder}/PKG-INFO") or
                     suite.run(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps",
                               "--no-build-isolation", "--force-reinstall", str(tarball)))
        for name in ("tools/libdc/libdc", *programs) if total.passed else ():
            total += one(suite.run(f"{out}/{name}", *(["info"] if name.endswith("/libdc") else [])))
    return total


def package(script: str, *arguments: str) -> Callable[[Suite], Count]:
    """The tests of a package, by its script in tests/packages; sizes are shown."""

    def body(suite: Suite) -> Count:
        status = suite.run(sys.executable, f"tests/packages/{script}.py", *arguments)
        for line in re.findall(r"^    (\S+ +\d+ bytes.*)$", suite.text(), re.M)[-3:]:
            suite.notes.append(f"{'':<11}{line}")
        return counted(suite, r"^(?P<passed>\d+) passed, (?P<failed>\d+) failed$", status)

    return body


def cuda_wheel(suite: Suite) -> Count:
    """The wheel libdc-cuda, built with nvcc."""
    built = one(suite.run("make", "wheel-cuda"))
    return built + package("cuda_wheel", str(BUILD / "wheel"))(suite) if built.passed else built


def docs(suite: Suite) -> Count:
    """The manual: pages without warnings of Sphinx, a search, and man pages without warnings of groff."""
    folder = BUILD / "docs"
    total = one(suite.run(sys.executable, "scripts/make_docs.py", str(folder)))
    total += one(suite.run("grep", "-q", "dc_allgather_param", str(folder / "html" / "searchindex.js")))
    lint = ("set -e; for page in build/docs/man/man?/*; do "
            "out=$(MANROFFSEQ= man --warnings=all -E UTF-8 -l -Tutf8 -Z $page 2>&1 >/dev/null); "
            "[ -z \"$out\" ] || { echo \"$page: $out\"; exit 1; }; done; "
            "man -M build/docs/man dc_allgather_param | grep -q NAME")
    return total + one(suite.run("sh", "-c", lint, LC_ALL="C.UTF-8"))


def conformance(suite: Suite) -> Count:
    """Runs the checks that are about PyTorch. Then every check's tests, including those of suite gcc, must have
    passed."""
    return pytest(suite, "tests/conformance") + one(suite.run(sys.executable, "scripts/conformance.py", "--check"))


def blocks(suite: Suite, *pages: str) -> Count:
    """The code in pages; each page is one test."""
    total = Count()
    for pattern in pages:
        found = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob(pattern))
        for page in found or [pattern]:  # a pattern without pages fails, as no file
            total += one(suite.run(sys.executable, "scripts/run_blocks.py", page))
    return total


def clang_format(suite: Suite) -> Count:
    # The public header is aligned by hand: its comments are the manual.
    files = sorted(str(path.relative_to(ROOT)) for folder in ("src", "tests", "bench", "examples", "bindings", "tools")
                   for path in (ROOT / folder).rglob("*.[ch]"))
    return one(suite.run("clang-format-14", "--dry-run", "--Werror", *files))


def clang_tidy(suite: Suite) -> Count:
    """The checks of .clang-tidy, on what suite gcc compiles of the library, its plug-in and the command."""
    status = suite.run("run-clang-tidy-14", "-quiet", "-p", str(BUILD / "gcc"), "-j2", "-extra-arg=-w",
                       f"{re.escape(str(ROOT))}/(src|tools)/.*[.]c$")
    text = suite.text()
    suite.write("\n".join(sorted(set(re.findall(r"^.*error: .*$", text, re.M)))))
    return one(status or not re.search(r"^clang-tidy.* -p=", text, re.M))  # at least one file was read


def examples_c(suite: Suite) -> Count:
    """The C examples as a user builds them, against an installed library."""
    prefix = BUILD / "prefix"
    folder = BUILD / "install"
    if not (folder / "build.ninja").exists():
        suite.run("meson", "setup", str(folder), "-Dtests=false", f"--prefix={prefix}", "--libdir=lib")
    if suite.run("meson", "install", "-C", str(folder), "--quiet") != 0:
        return Count(failed=1)
    total = Count()
    for source in sorted((ROOT / "examples").rglob("*.c")):
        program = str(folder / source.stem)
        build = suite.run("sh", "-c", f"${{CC:-cc}} -std=c99 -Wall -Wextra -Werror '{source}' -o '{program}' "
                          "$(pkg-config --cflags --libs dc) -lm -pthread",
                          PKG_CONFIG_PATH=str(prefix / "lib/pkgconfig"))
        total += one(build or suite.run(program, LD_LIBRARY_PATH=str(prefix / "lib")))
    return total


ASLR_OFF = "setarch -R"  # the sanitizers' fixed shadow addresses fail under some kernels' address randomisation

# Long suites that keep one core busy begin early, beside those that keep both busy.
SUITES: Dict[str, Callable[[Suite], Count]] = {
    "checks": checks,
    "format": clang_format,
    "gcc": lambda suite: c_tests(suite, ["-Ddebug=true", "-Doptimization=g", "-Dbench=true"], "gcc"),
    "torch": lambda suite: pytest(suite, "tests/torch"),
    "tidy": clang_tidy,
    "abi": abi,
    "valgrind": valgrind,
    "asan": lambda suite: c_tests(
        suite, [*SANITIZED, "-Db_sanitize=address,undefined",
                "-Dc_args=-fno-sanitize-recover=all -fno-omit-frame-pointer",
                "-Dcpp_args=-fno-sanitize-recover=all -fno-omit-frame-pointer"], "clang-14", ASLR_OFF),
    "python": lambda suite: pytest(suite, "tests/python"),
    "spin": spin,
    "fuzz": fuzz,
    "tsan": lambda suite: c_tests(
        suite, [*SANITIZED, "-Db_sanitize=thread"], "clang-14", ASLR_OFF),
    "transformers": lambda suite: pytest(suite, "tests/transformers"),
    "frameworks": lambda suite: pytest(suite, "tests/frameworks"),
    "deepspeed": lambda suite: pytest(suite, "tests/deepspeed"),
    "examples": examples_c,
    "rust": rust,
    "ffi": ffi,
    "python-abi": lambda suite: pytest(suite, "tests/python", "-m", "not slow", LIBDC_FFI="abi"),
    "dist": dist,
    "sources": package("sources"),
    "wheel": package("wheel"),
    "crates": package("crates"),
    "install": package("install"),
    "docs": docs,
    "tools": lambda suite: pytest(suite, "tests/tools"),
    "conformance": conformance,
    "guide": lambda suite: blocks(suite, "docs/guide/*.md", "docs/optimizers.md", "docs/kfac.md", "docs/from-*.md"),
    "readme": lambda suite: blocks(suite, "README.md"),
}

# Run only by `make release-check`, or by name.
RELEASE: Dict[str, Callable[[Suite], Count]] = {
    "versions": lambda suite: one(suite.run(sys.executable, "scripts/checks/check_versions.py")),
    "wheel-cuda": cuda_wheel,
    "debian": package("debian"),
    "conda": package("conda"),
    "vcpkg": package("vcpkg"),
    "addresses": lambda suite: one(suite.run(sys.executable, "packaging/project.py")),
}


# Suites that must run first, if they are chosen; otherwise results of an earlier run are used.
NEEDS: Dict[str, Tuple[str, ...]] = {
    "tidy": ("gcc",), "abi": ("gcc",), "valgrind": ("gcc",), "rust": ("gcc",), "ffi": ("gcc", "rust"),
    "python": ("gcc",), "python-abi": ("gcc", "python"), "tools": ("gcc",), "wheel": ("gcc",), "wheel-cuda": ("gcc",),
    "conformance": RESULTS,
}
LOOKS_S = 0.5  # between checks for signals. An exception in a handler could leave a lock of the pool held.
ended: List[int] = []  # signals that asked for the end
ALONE = ("readme",)  # it may reinstall the package, which others import


def may_begin(name: str, waiting: List[str], active: Set[str]) -> bool:
    if active and (name in ALONE or any(other in ALONE for other in active)):
        return False
    return not any(other in waiting or other in active for other in NEEDS.get(name, ()))


def run_suite(name: str, body: Callable[[Suite], Count]) -> Count:
    suite = Suite(name)
    begin = time.monotonic()
    try:
        count = body(suite)
    except Exception:  # the other suites continue
        suite.write(traceback.format_exc())
        count = Count(failed=1)
    if not sum(count):
        suite.write("run_tests: no test ran\n")
        count = Count(failed=1)
    word = "FAILED" if count.failed else "ok" if count.passed else "skipped"
    lines = [f"{name:<11}{word:<7}{count.passed:>5} passed {count.failed:>3} failed {time.monotonic() - begin:>7.1f} s "
             f"{suite.processor_s:>7.1f} s of processors   build/logs/{name}.log", *suite.notes]
    print("\n".join(lines + ([suite.tail()] if count.failed else [])), flush=True)
    return count


def run_all(chosen: List[str], suites: Dict[str, Callable[[Suite], Count]]) -> Count:
    waiting, total = list(chosen), Count()
    active: Dict[Future[Count], str] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            while (waiting or active) and not ended:
                for name in list(waiting):
                    if len(active) < AT_ONCE and may_begin(name, waiting, set(active.values())):
                        waiting.remove(name)
                        active[pool.submit(run_suite, name, suites[name])] = name
                for done in wait(active, LOOKS_S, FIRST_COMPLETED).done:
                    del active[done]
                    total += done.result()
        finally:
            stop()
    return total


def main() -> int:
    for ends in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ends) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(ends, lambda number, _: ended.append(number))
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # its encoding may lack tests' characters
    LOGS.mkdir(parents=True, exist_ok=True)
    chosen = list(dict.fromkeys(sys.argv[1:])) or list(SUITES)
    suites = {**SUITES, **RELEASE}
    unknown = [name for name in chosen if name not in suites]
    if unknown:
        print(f"run_tests: no suite {unknown[0]!r}; there are {', '.join(suites)}", file=sys.stderr)
        return 2
    total = run_all(chosen, suites)
    if ended:
        return 128 + ended[0]
    skipped = f", {total.skipped} skipped" if total.skipped else ""
    print(f"{total.passed} passed, {total.failed} failed{skipped}")
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
