#!/usr/bin/env python3
"""Every source of src/ has a test that its name leads to. x.c, x_cpu.c, x_avx2.c and so on have test_x.c below the
folder of their module in tests/; x_cuda.c, x.cu, x_launch.c and the files of `cuda` and `nccl` have theirs below
tests/cudasim. Public functions (src/api) have theirs wherever it is. Where a test of another name covers a source,
ELSEWHERE says which, and what it does there; an entry that is not needed is a fault.

    scripts/checks/check_stems.py            fails if a source has no test
    scripts/checks/check_stems.py --table    prints the table stem to tests"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, Set

ROOT = Path(__file__).resolve().parents[2]
VARIANT = re.compile(r"_(cuda|cpu|avx2|avx512|avx512bf16|amx|launch)$")


class Elsewhere(NamedTuple):
    test: str  # below tests/
    sources: str  # below src/; with suffix only where two have the same stem
    why: str


ELSEWHERE: List[Elsewhere] = [
    # public functions
    Elsewhere("comm/test_comm.c", "api/collectives", "every collective by its public function"),
    Elsewhere("conformance/context.c", "api/context runtime/context", "contexts made, reset, aborted and destroyed"),
    Elsewhere("transformer/test_layer_errors.c", "api/layer/layer_config", "each field's bounds"),
    Elsewhere("transformer/test_layer_errors.c", "api/layer/layer_handle", "NULL and wrong handles"),
    Elsewhere("python/test_linalg.py", "api/linalg/linalg", "handles, their threads and scratch memory"),
    Elsewhere("linalg/kron/test_kron.c", "api/linalg/matrix_products", "products by their public functions"),
    Elsewhere("api/test_edge_cases.c", "api/step", "steps, statistics, dry runs and traces at their edges"),
    Elsewhere("api/test_bad_input.c", "api/operators", "each argument refused by its name"),
    Elsewhere("optim/test_elementwise_errors.c", "api/optimizer/optimizer", "each argument refused by its name"),
    # communicators
    Elsewhere("comm/test_comm.c", "comm/all_reduce comm/shm/shm comm/shm/collective comm/shm/staging "
              "comm/shm/single_rank comm/tcp/collective comm/tcp/transfer", "each type, split and kind of group"),
    Elsewhere("comm/external/test_external.c", "comm/external/collective", "ragged, grouped and 16-bit data"),
    Elsewhere("comm/test_coll_group.c", "comm/shm/heap", "memory that peers read, and its limit"),
    Elsewhere("comm/test_comm_errors.c", "comm/shm/wait comm/shm/group", "every wait ends, and nothing is left"),
    Elsewhere("comm/shm/test_rendezvous.c", "comm/shm/fd_passing comm/shm/rendezvous_root",
              "how processes find each other"),
    Elsewhere("comm/tcp/relay/test_relay.c", "comm/tcp/relay/relay_data",
              "each type and split in rounds of 4 to 13 ranks"),
    Elsewhere("comm/tcp/bootstrap/test_rendezvous.c", "comm/tcp/tcp comm/tcp/socket",
              "addresses, and how ranks find each other"),
    Elsewhere("comm/tcp/test_tcp_shutdown.c", "comm/tcp/group", "ranks that fail, go or are copied"),
    Elsewhere("faults/test_tcp_trust.c", "comm/tcp/bootstrap/auth", "wrong secrets, replays and damaged handshakes"),
    Elsewhere("faults/test_tcp_liveness.c", "comm/tcp/failure/liveness", "dead, cut off and stopped ranks"),
    Elsewhere("faults/test_tcp_many_ranks.c", "comm/tcp/overlay/votes", "deaths in groups without a mesh, one text"),
    Elsewhere("faults/test_tcp_corruption.c", "comm/tcp/own_part", "sums and copies of received data, damaged or not"),
    Elsewhere("comm/tcp/hmac/test_hmac.c", "comm/tcp/hmac/sodium_sha256", "the vectors of FIPS 180-4 and RFC 4231"),
    Elsewhere("comm/tcp/test_mesh.c", "comm/tcp/mesh_calls", "connections of all ranks, of strangers and of late ones"),
    Elsewhere("comm/tcp/failure/test_stragglers.c", "comm/tcp/failure/failure comm/tcp/failure/watcher",
              "queries while a rank waits, one failure for all ranks"),
    Elsewhere("comm/levels/test_levels.c", "comm/levels/collective comm/machine", "layouts of ranks on machines, bits"),
    Elsewhere("comm/mpi/test_mpi.c", "comm/mpi/calls comm/mpi/collective comm/mpi/library",
              "ranks of each MPI: bits, launchers"),
    Elsewhere("comm/mpi/test_carrier.c", "comm/tcp/relay/carried", "ranks that do not come, leave or wait elsewhere"),
    Elsewhere("comm/mpi/test_mpi_death.c", "comm/mpi/runtime comm/mpi/wait", "lost ranks of each MPI, in each phase"),
    Elsewhere("cudasim/nccl/test_contexts.c", "comm/nccl/nccl", "communicators, made and freed by contexts"),
    Elsewhere("cudasim/nccl/test_errors.c", "comm/nccl/library comm/nccl/wait comm/nccl/watchdog",
              "versions, missing ranks, deadlines"),
    Elsewhere("cudasim/nccl/test_windows.c", "comm/nccl/memory", "registered memory"),
    # devices
    Elsewhere("cudasim/device/test_device.c", "device/cuda/event device/cuda/event_pool device/cuda/memory "
              "device/cuda/stream device/cuda/stream_ops device/cuda/timestamp", "order, events, memory, streams"),
    Elsewhere("cudasim/device/test_device_errors.c", "device/plugin device/cuda/driver device/cuda/modules "
              "device/cuda/plugin_host", "devices that cannot be opened, each call failing"),
    Elsewhere("cudasim/linalg/test_eigh_errors.c", "device/cuda/eigh_cusolver device/cuda/vendor_library",
              "matrices that fail, the library's absence"),
    # kernels
    Elsewhere("kernels/test_gemm.c", "kernels/gemm/gemm_epilogue kernels/gemm/pack", "epilogues, packed operands"),
    Elsewhere("linalg/eigh/test_eigh_solve.c", "kernels/gemm/blas linalg/eigh/eigh_reference",
              "solvers of a library that fail, and libdc's own"),
    Elsewhere("sim/test_sim.c", "kernels/elementwise/stream", "queued copies, sums and zeros, on simulated streams"),
    Elsewhere("cudasim/device/test_gemm_cublaslt.c", "kernels/cuda/gemm/gemm_epilogue.cu "
              "kernels/cuda/gemm/gemm_epilogue_launch kernels/cuda/gemm/gemm_launch linalg/linalg_gemm_cuda",
              "products and epilogues beside the CPU's"),
    Elsewhere("cudasim/kernels/test_attention.c", "kernels/cuda/attention/attention_backward transformer/attention "
              "transformer/attention_backward", "the card's kernels beside the CPU's, forward and backward"),
    Elsewhere("cudasim/kernels/test_elementwise.c", "kernels/cuda/launch kernels/cuda/kernel_images",
              "kernels loaded and launched"),
    Elsewhere("cudasim/kernels/test_rowops.c", "kernels/cuda/rowops/column_sums", "sums over rows"),
    Elsewhere("cudasim/linalg/test_matrix_functions.c", "kernels/cuda/matrix/inverse_root_newton.cu "
              "kernels/cuda/matrix/inverse_root_newton_launch kernels/cuda/matrix/kron.cu "
              "kernels/cuda/matrix/kron_launch kernels/cuda/matrix/kron_nearest.cu "
              "kernels/cuda/matrix/kron_nearest_launch kernels/cuda/matrix/matrix.cu "
              "kernels/cuda/matrix/matrix_launch linalg/kron/kron_cuda linalg/kron/kron_nearest_cuda "
              "linalg/roots/inverse_root_newton_cuda linalg/polar/newton_schulz_cuda linalg/batch_slice_cuda",
              "every such operator beside the CPU's"),
    Elsewhere("cudasim/linalg/test_eigh.c", "kernels/cuda/matrix/root_warm_start.cu "
              "kernels/cuda/matrix/root_warm_start_launch linalg/eigh/symmetric_cuda "
              "linalg/roots/root_warm_start_cuda", "decompositions, powers, roots from an earlier basis"),
    Elsewhere("cudasim/optim/test_shampoo.c", "kernels/cuda/matrix/orthogonal_iteration.cu "
              "kernels/cuda/matrix/orthogonal_iteration_launch linalg/eigh/orthogonal_iteration_cuda "
              "kernels/cuda/optim/blockwise.cu kernels/cuda/optim/blockwise_launch optim/blockwise/blockwise_cuda "
              "optim/blockwise/soap_basis_cuda", "Shampoo and SOAP beside the CPU's"),
    Elsewhere("cudasim/optim/test_elementwise.c", "kernels/cuda/optim/update.cu kernels/cuda/optim/update_launch "
              "optim/param_update_cuda", "AdamW and SGD beside the CPU's"),
    Elsewhere("cudasim/linalg/test_per_sample.c", "kernels/cuda/per_sample/embedding.cu "
              "kernels/cuda/per_sample/embedding_launch linalg/per_sample/per_sample_linear_cuda",
              "every kind of layer"),
    # matrix operators
    Elsewhere("linalg/eigh/test_eigh.c", "linalg/eigh/back_transform linalg/eigh/symmetric",
              "eigenvectors, symmetric matrices with strides and scales"),
    Elsewhere("linalg/eigh/test_eigh_calls.c", "linalg/handle linalg/strided", "threads, scratch memory, strides"),
    Elsewhere("linalg/roots/test_root_quadrature.c", "linalg/eigh/tridiagonal",
              "roots by tridiagonal form, on all spectra"),
    Elsewhere("optim/blockwise/test_soap.c", "linalg/eigh/orthogonal_iteration", "SOAP's later bases"),
    Elsewhere("linalg/out_of_core/test_out_of_core.c", "linalg/linalg_gemm linalg/out_of_core/out_of_core_file "
              "linalg/out_of_core/out_of_core_plan", "batches, matrices in files, budgets from the least on"),
    Elsewhere("linalg/per_sample/test_per_sample.c", "linalg/per_sample/im2col linalg/per_sample/per_sample_read",
              "convolutions, and what is refused"),
    # optimizers
    Elsewhere("optim/test_elementwise.c", "optim/adamw optim/sgd optim/param_update_cpu optim/optimizer",
              "both kinds against their definitions"),
    Elsewhere("optim/test_state.c", "optim/checkpoint", "state saved, loaded and refused"),
    Elsewhere("optim/test_loss_scale.c", "optim/step_consensus", "ranks of which one has found something"),
    Elsewhere("optim/blockwise/test_partition.c", "optim/redistribute",
              "owners, and the way of gradients between ranks"),
    Elsewhere("optim/blockwise/test_shampoo.c", "optim/blockwise/blockwise optim/blockwise/blockwise_cpu "
              "optim/blockwise/blockwise_plan optim/blockwise/grafting_cpu optim/blockwise/precondition",
              "steps against a reference in float64"),
    Elsewhere("optim/blockwise/test_shampoo_state.c", "optim/blockwise/blockwise_update", "parts, ranks and threads"),
    Elsewhere("optim/kfac/test_kfac.c", "optim/kfac/kfac_curvature", "curvature against its definition"),
    Elsewhere("optim/kfac/test_kfac_step.c", "optim/kfac/kfac_update", "steps, momentum and clipping"),
    Elsewhere("cudasim/optim/test_kfac.c", "optim/kfac/kfac_factors_cuda", "factors beside the CPU's"),
    # the runtime
    Elsewhere("cudasim/runtime/test_capture.c", "runtime/capture", "steps captured into CUDA graphs"),
    Elsewhere("models/test_param_table.c", "runtime/copies", "each state of a parameter's copies"),
    Elsewhere("runtime/test_flight_recorder.c", "runtime/flight_recorder_dump", "dumps while calls block and fail"),
    Elsewhere("conformance/finite.c", "runtime/grad_finite", "infinities and NaN on every rank"),
    Elsewhere("conformance/registration.c", "runtime/graphs runtime/params", "parameters and graphs, and refusals"),
    Elsewhere("runtime/test_offload.c", "runtime/stats", "statistics, and dry runs"),
    # the layer
    Elsewhere("python/layer/test_layer.py", "transformer/backward transformer/forward transformer/linear",
              "against a reference in float64"),
    Elsewhere("python/layer/test_layer_dropout.py", "transformer/dropout", "masks, and their gradients"),
    Elsewhere("python/layer/test_layer_flags.py", "transformer/layout", "what is kept, by each flag"),
    Elsewhere("python/layer/test_layer_numerics.py", "transformer/layernorm", "sums of hard rows"),
    Elsewhere("transformer/test_layer.c", "transformer/submit", "on the calling thread and on streams"),
]


def sources() -> List[str]:
    return sorted(str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*")
                  if path.suffix in (".c", ".cu"))


def tests() -> List[str]:
    return sorted(str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.c"))


def is_for_cuda(source: str) -> bool:
    folders = source.split("/")[:-1]
    return "cuda" in folders or "nccl" in folders or source.endswith(("_cuda.c", ".cu"))


def named(source: str, among: List[str]) -> List[str]:
    """The tests that match the source's own name."""
    stem, module, cuda = VARIANT.sub("", Path(source).stem), source.split("/")[0], is_for_cuda(source)
    folder = "" if module == "api" else "cudasim/nccl/" if "nccl" in source.split("/") else \
        f"cudasim/{module}/" if cuda else f"{module}/"
    found = [test for test in among if Path(test).stem == f"test_{stem}" and test.startswith(folder)]
    kernel_of_optim = "kernels/cuda/" in source and "/optim/" in source
    found += [test for test in among if cuda and (module == "kernels" or kernel_of_optim)
              and re.fullmatch(rf"cudasim/(linalg|optim|transformer)/test_{stem}\.c", test)]
    same = [test for test in found if Path(test).parent == Path(source).parent]
    return same or found


def faults() -> List[str]:
    among, listed = tests(), sources()
    elsewhere: Dict[str, List[str]] = {}
    wrong: List[str] = []
    for entry in ELSEWHERE:
        if not (ROOT / "tests" / entry.test).is_file():
            wrong.append(f"scripts/checks/check_stems.py: there is no tests/{entry.test}")
        for name in entry.sources.split():
            source = name if name.endswith(".cu") else f"{name}.c"
            elsewhere.setdefault(source if source in listed else f"{name}.cu", []).append(entry.test)
    for source, by in sorted(elsewhere.items()):
        if source not in listed:
            wrong.append(f"scripts/checks/check_stems.py: there is no src/{source}")
        elif named(source, among):
            wrong.append(f"scripts/checks/check_stems.py: src/{source} has {named(source, among)[0]}; drop {by[0]}")
    wrong += [f"src/{source}: no test has its stem, and scripts/checks/check_stems.py names none" for source in listed
              if not named(source, among) and source not in elsewhere]
    if "--table" in sys.argv[1:]:
        for source in listed:
            print(f"src/{source:<55} {' '.join(named(source, among) or elsewhere.get(source, ['-']))}")
    by_name: Set[str] = {source for source in listed if named(source, among)}
    print("\n".join(wrong) or f"{len(listed)} sources have a test: {len(by_name)} by their stem, {len(elsewhere)} by "
          "the list")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(faults()))
