#!/usr/bin/env python3
"""Second-order operators against PyTorch, Torchium, Opacus and Facebook's Distributed Shampoo: bench.py [--only PART…]
[--quick] [--save] [--shampoo FOLDER].

All implementations of a row take turns, round by round, with two threads (torch also with one), so ratios within a
round share the machine's noise. A figure is the median over rounds, and the ratio is the median of the rounds' ratios.
Between two turns is a pause, since the threads of a library that has just finished go on spinning for a while. "Memory
given": the result is written to memory that is there; the others take new memory for it in each call, whose pages the
system clears. libdc has memory given in all rows. Of gradients per sample, vmap(grad) and Opacus do the forward as
well. Errors are against float64. Peers that are not installed are left out (requirements.txt beside this file).
Distributed Shampoo is on no package index: FOLDER is a checkout of github.com/facebookresearch/optimizers. --quick has
every row, in fewer rounds; --save writes bench/results/linalg-DATE.md and .json."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from fractions import Fraction
from typing import Any, Callable, Dict, List

import numpy as np
import torch
from libdc import linalg

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
import machine  # noqa: E402

Row = Dict[str, Any]
ROUNDS = 7
SCRATCH = 2 * 7  # MiB of the library's two threads
PAUSE = 0.02  # seconds: PyTorch's threads look for work for some milliseconds, on the cores that the next one needs
SHAMPOO = ""  # a checkout's folder
QUIET = machine.Quiet()


def turns(ways: Dict[str, Callable[[], Any]], rounds: int = 0) -> Dict[str, List[float]]:
    """Milliseconds of each, round by round, after one warm-up."""
    times: Dict[str, List[float]] = {name: [] for name in ways}
    for number in range((rounds or ROUNDS) + 1):
        for name, way in ways.items():
            time.sleep(PAUSE)
            begin = time.perf_counter()
            way()
            if number > 0:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return times


def rows_of(part: str, shape: str, times: Dict[str, List[float]], base: str, **more: Dict[str, Any]) -> List[Row]:
    """base: the way that the others are compared with."""
    rows = []
    for name, own in times.items():
        ratio = statistics.median(b / t for b, t in zip(times[base], own))
        rows.append({"part": part, "shape": shape, "way": name, "ms": statistics.median(own), "best_ms": min(own),
                     f"times as fast as {base}": ratio, **{key: value.get(name) for key, value in more.items()}})
    return rows


def with_threads(threads: int, way: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        torch.set_num_threads(threads)
        return way()

    return run


def torchium() -> Any:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from torchium.utils import cuda_kernels  # type: ignore[import-not-found]
        return cuda_kernels
    except Exception as error:  # it prints, and imports what it does not need
        print(f"torchium is left out: {error}")
        return None


def shampoo(folder: str) -> Any:
    if not folder:
        return None
    sys.path.insert(0, folder)
    try:
        from distributed_shampoo.preconditioner import matrix_functions  # type: ignore[import-not-found]
        from distributed_shampoo.preconditioner.matrix_functions_types import EigenConfig  # type: ignore
    except Exception as error:
        print(f"Distributed Shampoo is left out: {error}")
        return None
    return lambda a, eps: matrix_functions.matrix_inverse_root(a, Fraction(4), EigenConfig(), eps)


# ---- roots ----


def factors(batch: int, n: int, seed: int = 0) -> torch.Tensor:
    """Factors as Shampoo has them: averages of G G^T with a power law."""
    g = torch.Generator().manual_seed(seed)
    shape = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))[0] * torch.arange(1, n + 1) ** -1.0
    parts = []
    for _ in range(batch):
        x = shape @ torch.randn(n, 2 * n, generator=g, dtype=torch.float64) / (2 * n) ** 0.5
        parts.append(x @ x.T)
    a = torch.stack(parts).float()
    return (a + a.mT) / 2


def torch_root(a: torch.Tensor, eps_rel: float) -> torch.Tensor:
    values, q = torch.linalg.eigh(a)
    values = values.clamp_min(0) + eps_rel * values[..., -1:]
    return (q * values.pow(-0.25).unsqueeze(-2)) @ q.mT


def error_of(x: Any, a: torch.Tensor, eps_rel: float) -> float:
    want = torch_root(a.double(), eps_rel)
    return float((torch.as_tensor(x).double() - want).norm() / want.norm())


def part_roots() -> List[Row]:
    rows: List[Row] = []
    peer, facebook = torchium(), shampoo(SHAMPOO)
    two, eps_rel = linalg.Handle(threads=2), 1e-6
    for batch, n in ((64, 64), (32, 128), (16, 256), (8, 512), (2, 1024)):
        a = factors(batch, n)
        out = torch.empty_like(a)
        ways: Dict[str, Callable[[], Any]] = {
            "torch.linalg.eigh, 2 threads": with_threads(2, lambda: torch_root(a, eps_rel)),
            "torch.linalg.eigh, 1 thread": with_threads(1, lambda: torch_root(a, eps_rel)),
            "torch.linalg.eigh, float64, 2 threads": with_threads(2, lambda: torch_root(a.double(), eps_rel).float()),
            "libdc float32": lambda: linalg.inverse_root(a, 4, eps_rel=eps_rel, precision="float32", out=out,
                                                         handle=two),
            "libdc": lambda: linalg.inverse_root(a, 4, eps_rel=eps_rel, out=out, handle=two),
        }
        if peer is not None:
            root = peer.CUDAMatrixOps.matrix_sqrt_inv_eigen
            ways["Torchium, one after the other"] = with_threads(2, lambda: [root(m, -0.25, 1e-8) for m in a])
        if facebook is not None:
            added = [float(eps_rel * torch.linalg.eigvalsh(m)[-1]) for m in a]
            ways["Distributed Shampoo, one after the other"] = with_threads(
                2, lambda: torch.stack([facebook(m, eps) for m, eps in zip(a, added)]))
        if n <= 256:
            ways["libdc, Newton"] = lambda: linalg.inverse_root_newton(a, 4, eps_rel=eps_rel, out=out, handle=two,
                                                                       info=[])
        errors = {name: error_of(way(), a, eps_rel) for name, way in ways.items()
                  if not name.startswith("Torchium") and not name.endswith("Newton")}
        rows += rows_of("roots", f"{batch} of {n}", turns(ways), "torch.linalg.eigh, 2 threads", error=errors)
    return rows


def part_warm() -> List[Row]:
    """A warm refresh beside PyTorch's decomposition, libdc's, which gives a basis as well, and a root without one."""
    rows: List[Row] = []
    two, eps_rel = linalg.Handle(threads=2), 1e-4
    for batch, n, beta in ((16, 256, 0.999), (8, 512, 0.999), (1, 1024, 0.999)):
        before = factors(batch, n)
        after = beta * before + (1 - beta) * factors(batch, n, seed=1)
        out = torch.empty_like(after)
        for precision in ("float32", "float64"):
            basis = torch.zeros(before.shape, dtype=getattr(torch, precision))
            linalg.inverse_root(before, 4, eps_rel=eps_rel, basis=basis, out=out, handle=two)
            fresh = basis.clone()
            info: List[linalg.SpectralInfo] = []

            def warm() -> Any:
                return linalg.inverse_root(after, 4, eps_rel=eps_rel, basis=basis, tolerance=1e-2, out=out, info=info,
                                           handle=two)

            ways = {"decomposition": lambda: linalg.inverse_root(after, 4, eps_rel=eps_rel, basis=fresh, out=out,
                                                                 handle=two),
                    "warm": warm,
                    "root alone": lambda: linalg.inverse_root(after, 4, eps_rel=eps_rel, precision=precision, out=out,
                                                              handle=two),
                    "torch.linalg.eigh, 2 threads": with_threads(
                        2, lambda: torch_root(after.to(getattr(torch, precision)), eps_rel).float())}
            errors = {name: error_of(way(), after, eps_rel) for name, way in ways.items()}
            paths = {"warm": ", ".join(sorted({i.path.name for i in info}))}
            rows += rows_of("warm", f"{batch} of {n}, {precision}, beta {beta}", turns(ways),
                            "torch.linalg.eigh, 2 threads", error=errors, path=paths)
    return rows


# ---- gradients per sample ----


def opacus_way(layer: torch.nn.Linear, x: torch.Tensor, weights: torch.Tensor) -> Any:
    try:
        from opacus.grad_sample import GradSampleModule  # type: ignore[import-not-found]
    except Exception as error:
        print(f"opacus is left out: {error}")
        return None
    import copy

    module = GradSampleModule(copy.deepcopy(layer), loss_reduction="sum")

    def run() -> torch.Tensor:
        (module(x) * weights).sum().backward()
        grads = module._module.weight.grad_sample
        for p in module.parameters():
            p.grad = p.grad_sample = None
        return grads

    return run


def product(output: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (output * weights).sum()


def sample_limit(two: linalg.Handle, out: torch.Tensor, multiplications: int) -> float:
    """Milliseconds that nothing on these cores goes below: those of the multiplications, two operations each, at a
    large product's rate, or of filling the gradients' memory, whichever is more."""
    a, c = torch.randn(2048, 2048), torch.empty(2048, 2048)
    times = turns({"product": lambda: linalg.matmul(a, a, out=c, handle=two), "fill": lambda: out.zero_()})
    return max(min(times["product"]) * multiplications / 2048 ** 3, min(times["fill"]))


def part_samples() -> List[Row]:
    from torch.func import functional_call, grad, vmap

    rows: List[Row] = []
    two, peer = linalg.Handle(threads=2), torchium()
    torch.set_num_threads(2)
    for n, t, i, o in ((64, 1, 512, 512), (32, 1, 1024, 1024), (8, 128, 768, 768)):
        layer = torch.nn.Linear(i, o)
        x = torch.randn(n, t, i) if t > 1 else torch.randn(n, i)
        delta = torch.randn(*x.shape[:-1], o)  # the loss is a sum with these weights, so this is its gradient
        parameters = dict(layer.named_parameters())
        out, given = torch.empty(n, o, i), torch.empty(n, o, i)
        spec = linalg.SampleLayer("linear")

        def one(p: Any, xi: torch.Tensor, di: torch.Tensor) -> torch.Tensor:
            return (functional_call(layer, p, (xi,)) * di).sum()

        ways: Dict[str, Callable[[], Any]] = {
            "vmap(grad)": lambda: vmap(grad(one), (None, 0, 0))(parameters, x, delta)["weight"],
            "einsum": lambda: torch.einsum("nto,nti->noi" if t > 1 else "no,ni->noi", delta, x),
            "torch.bmm, memory given": lambda: torch.bmm(delta.view(n, t, o).mT, x.view(n, t, i), out=given),
            "libdc": lambda: linalg.per_sample_grads(spec, x, delta, weight=out, want_bias=False, handle=two)[0],
            "libdc, norms alone": lambda: linalg.per_sample_norms(spec, x, delta, want_bias=False, handle=two),
        }
        way = opacus_way(layer, x, delta)
        if way is not None:
            ways["Opacus"] = way
        if peer is not None and t == 1:
            ways["Torchium"] = lambda: peer.CUDAGradientOps.per_sample_gradients(layer, product, x, delta)
        want = ways["einsum"]().double()
        errors = {name: float((w().double() - want).norm() / want.norm()) for name, w in ways.items()
                  if "norms" not in name and name != "Torchium"}
        squares = want.square().sum((1, 2))
        errors["libdc, norms alone"] = float((ways["libdc, norms alone"]().double() - squares).norm() / squares.norm())
        memory = {name: peak_mib(w) for name, w in ways.items()}
        times = turns(ways)
        base = "torch.bmm, memory given"  # the same work
        limit = {"libdc": statistics.median(times[base]) / sample_limit(two, out, n * t * i * o)}
        rows += rows_of("samples", f"{n} x {t}, {i} to {o}", times, base, error=errors, peak_MiB=memory, limit=limit)
    return rows


def peak_mib(way: Callable[[], Any]) -> float:
    """The most memory that a call takes beside the memory in use before it."""
    machine.reset_peak()
    before = machine.memory_kib("VmRSS")
    way()
    return max(0, machine.memory_kib("VmHWM") - before) / 1024


# ---- bounded products ----


def copy_rate(file: str) -> float:
    """Nanoseconds a byte of runs of 1 MiB, which calls cost nothing, from a file that is in memory, on one thread."""
    buffer = bytearray(1 << 20)
    with open(file, "rb", buffering=0) as source:
        best = float("inf")
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            for at in range(0, 64 << 20, len(buffer)):
                os.preadv(source.fileno(), [buffer], at)
            best = min(best, time.perf_counter() - begin)
    return best * 1e9 / (64 << 20)


def part_bounded() -> List[Row]:
    """The limit: copies take the same cores as the product, so nothing hides them; a memory of S elements wants 2 n^3 /
    sqrt(S) of them read (Hong and Kung; Irony, Toledo and Tiskin) and n^2 written, at copy_rate() on each core. S is
    the budget and the threads' scratch memory, through which operands go as well."""
    rows: List[Row] = []
    two, n = linalg.Handle(threads=2), 4096
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        maps = []
        for name in "abc":
            array = np.memmap(os.path.join(folder, name), np.float32, "w+", shape=(n, n))
            array[:] = rng.standard_normal((n, n), np.float32)
            array.flush()
            maps.append(linalg.FileMatrix(os.path.join(folder, name), (n, n), "float32"))
            del array
        a, b = (np.fromfile(m.file, np.float32).reshape(n, n) for m in maps[:2])
        out = np.empty((n, n), np.float32)
        ways: Dict[str, Callable[[], Any]] = {"all in memory": lambda: linalg.matmul(a, b, out=out, handle=two)}
        peaks: Dict[str, float] = {}
        traffic: Dict[str, float] = {}  # milliseconds
        rate = copy_rate(maps[0].file)
        ways["all in memory"]()  # touches the threads' scratch memory, which the peaks are not to count
        for mib in (10, 20, 60):  # 5, 10 and 31 % of the operands
            # a handle of its own: what it keeps between calls is part of the budget
            ways[f"files, {mib} MiB"] = lambda mib=mib, h=linalg.Handle(threads=2): linalg.matmul_bounded(
                maps[0], maps[1], mib << 20, out=maps[2], handle=h)
            peaks[f"files, {mib} MiB"] = peak_mib(ways[f"files, {mib} MiB"])
            elements = 2 * n ** 3 / ((mib + SCRATCH) * 2 ** 20 / 4) ** 0.5 + n ** 2
            traffic[f"files, {mib} MiB"] = elements * 4 * rate / 2 * 1e-6
        want = a[:64].astype(np.float64) @ b
        got = np.fromfile(maps[2].file, np.float32).reshape(n, n)[:64]
        error = {name: float(np.linalg.norm(got - want) / np.linalg.norm(want)) for name in peaks}
        times = turns(ways, 3)
        plain = statistics.median(times["all in memory"])
        limits = {name: plain / (plain + extra) for name, extra in traffic.items()}
        rows += rows_of("bounded", f"{n}^3", times, "all in memory", error=error, peak_MiB=peaks, limit=limits)
    return rows


def part_kron() -> List[Row]:
    rows: List[Row] = []
    two, peer = linalg.Handle(threads=2), torchium()
    torch.set_num_threads(2)
    for m, p in ((50, 100), (96, 96)):
        a, b, x = torch.randn(m, m), torch.randn(p, p), torch.randn(m, p)
        out, whole, given = torch.empty(m, p), torch.empty(m * p, m * p), torch.empty(m, p, m, p)
        ways: Dict[str, Callable[[], Any]] = {"torch.kron(a, b) @ x": lambda: torch.kron(a, b) @ x.flatten(),
                "torch.kron(a, b)": lambda: torch.kron(a, b),
                "torch.mul, memory given": lambda: torch.mul(a[:, None, :, None], b[None, :, None, :], out=given),
                "libdc.kron, memory given": lambda: linalg.kron(a, b, out=whole, handle=two),
                "libdc.kron_apply": lambda: linalg.kron_apply(a, b, x, out=out, handle=two)}
        if peer is not None:
            ways["Torchium"] = lambda: peer.CUDAMatrixOps.kronecker_product_approx(a, b)
        rows += rows_of("kron", f"{m} and {p}", turns(ways), "torch.kron(a, b) @ x")
    return rows


PARTS = {"roots": part_roots, "warm": part_warm, "samples": part_samples, "bounded": part_bounded, "kron": part_kron}


def page(about: Row, foreign: float, rows: List[Row]) -> str:
    lines = ["# Second-order operators", "", f"`{machine.command('bench/linalg/bench.py')}` on {about['date']}, "
             f"{about['cpu']}, {about['cores']} cores, commit {about['commit']}, LAPACK "
             f"{linalg.default().solver}; others used {100 * foreign:.0f} % of the machine. Limits are times as fast "
             "as the same way, by what the cores can do: of a bounded product, the plain one's time and the copies "
             f"that its memory makes necessary, 2 n^3 / sqrt(budget and {SCRATCH} MiB of scratch memory) elements read "
             "and n^2 written; of gradients per sample, their multiplications at a large product's rate, or filling "
             "their memory. Reached is the part of it.",
             "",
             "| part | shape | way | ms | best | times as fast | as | error | peak MiB | limit | reached |",
             "|---|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        base = next(key for key in row if key.startswith("times as fast as "))
        error, peak, limit = row.get("error"), row.get("peak_MiB"), row.get("limit")
        lines.append(f"| {row['part']} | {row['shape']} | {row['way']} | {row['ms']:.2f} | {row['best_ms']:.2f} | "
                     f"{row[base]:.2f} | {base[17:]} | {'' if error is None else f'{error:.1e}'} | "
                     f"{'' if peak is None else f'{peak:.1f}'} | "
                     f"{' | ' if limit is None else f'{limit:.2f} | {100 * row[base] / limit:.0f} %'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    global ROUNDS, SHAMPOO
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--shampoo", default="")
    options = parser.parse_args()
    ROUNDS, SHAMPOO = 3 if options.quick else ROUNDS, options.shampoo
    rows: List[Row] = []
    own = time.process_time()
    QUIET.begin()
    for name in options.only:
        rows += PARTS[name]()
    QUIET.end()
    about, foreign = machine.describe(), QUIET.foreign(time.process_time() - own)
    text = page(about, foreign, rows)
    print(text)
    if options.save:
        stem = os.path.join(os.path.dirname(HERE), "results", f"linalg-{about['date'][:10]}")
        with open(stem + ".json", "w", encoding="utf-8") as file:
            json.dump({"about": about, "foreign": foreign, "rows": rows}, file, indent=1)
        with open(stem + ".md", "w", encoding="utf-8") as file:
            file.write(text)
        print(f"written: {stem}.json, {stem}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
