/* Kernels that try what threads of a block can do together, and kernels with a fault (test_fibers.c). */
#include "probes.h"
#include "kernels/cuda/gpu.h"

namespace {

DC_DEVICE float *in(const probe_args &args) {
  return DC_MEMORY(args.in, args.count * 4, 4);
}
DC_DEVICE float *out(const probe_args &args) {
  return DC_MEMORY(args.out, args.count * 4, 4);
}

DC_DEVICE float warp_sum(float x) {
  for (uint32_t mask = DC_WARP / 2; mask > 0; mask /= 2) {
    x += dc_shuffle_xor(x, mask);
  }
  return x;
}

/* The block's sum, on each of its threads; called twice, so it ends with a barrier. */
template <bool BARRIER>
DC_DEVICE float block_sum(float x) {
  DC_SHARED(float, part, [PROBE_THREADS / DC_WARP]);
  const float mine = warp_sum(x);
  if (dc_thread() % DC_WARP == 0) {
    part[dc_thread() / DC_WARP] = mine;
  }
  if (BARRIER) {
    dc_sync();
  }
  float sum = 0;
  for (uint32_t warp = 0; warp < dc_threads() / DC_WARP; warp++) {
    sum += part[warp];
  }
  dc_sync();
  return sum;
}

DC_DEVICE int64_t element() {
  return (static_cast<int64_t>(dc_block(2) * dc_blocks(1) + dc_block(1)) * dc_blocks(0) + dc_block(0)) * dc_threads() +
         dc_thread();
}

}  // namespace

DC_BLOCK_KERNEL(probe_sums, probe_args, PROBE_THREADS) {
  const int64_t i = element();
  const float x = in(args)[i];
  const float mean = block_sum<true>(x) / static_cast<float>(dc_threads());
  out(args)[i] = block_sum<true>((x - mean) * (x - mean));
}

/* A block's elements in reverse, through the launch's shared memory; odd lanes' votes. */
DC_BLOCK_KERNEL(probe_reverse, probe_args, PROBE_THREADS) {
  DC_LAUNCH_SHARED(float, tile);
  const int64_t i = element();
  tile[dc_thread()] = in(args)[i] + static_cast<float>(dc_ballot((dc_thread() & 1) != 0) == 0xaaaaaaaau);
  dc_sync();
  out(args)[i] = tile[dc_threads() - 1 - dc_thread()];
}

/* Within a warp, earlier writes are visible after its barrier. */
DC_BLOCK_KERNEL(probe_warp, probe_args, PROBE_THREADS) {
  DC_SHARED(float, tile, [PROBE_THREADS]);
  tile[dc_thread()] = in(args)[element()];
  dc_sync_warp();
  out(args)[element()] = tile[dc_thread() ^ 5];
}

/* ---- faults ---- */

DC_BLOCK_KERNEL(probe_no_barrier, probe_args, PROBE_THREADS) {
  out(args)[element()] = block_sum<false>(in(args)[element()]);
}

DC_BLOCK_KERNEL(probe_no_warp_barrier, probe_args, PROBE_THREADS) {
  DC_SHARED(float, tile, [PROBE_THREADS]);
  tile[dc_thread()] = in(args)[element()];
  out(args)[element()] = tile[dc_shuffle(dc_thread(), dc_thread() ^ 5)]; /* which orders nothing */
}

DC_BLOCK_KERNEL(probe_outside, probe_args, PROBE_THREADS) {
  DC_SHARED(float, tile, [PROBE_THREADS]);
  float *next = &tile[1];
  next[dc_thread()] = 1;
  dc_sync();
  out(args)[element()] = tile[dc_thread()];
}

DC_BLOCK_KERNEL(probe_diverges, probe_args, PROBE_THREADS) {
  if (dc_thread() < DC_WARP) {
    dc_sync();
  }
  out(args)[element()] = 1;
}

DC_BLOCK_KERNEL(probe_half_warp, probe_args, PROBE_THREADS) {
  if (dc_thread() % DC_WARP < 16) {
    out(args)[element()] = dc_shuffle_xor(1.0f, 1);
  }
  dc_sync();
}

DC_BLOCK_KERNEL(probe_stray, probe_args, PROBE_THREADS) {
  dc_sync();
  if (dc_thread() == 40) {
    *DC_MEMORY(args.out + args.count, 4, 4) = 1;
  }
  dc_sync();
}

DC_KERNEL(probe_no_block, probe_args, PROBE_THREADS) {
  dc_sync();
  out(args)[dc_first()] = 1;
}

static const cudasim_kernel *const kernels[] = {
    &probe_sums,    &probe_reverse,  &probe_warp,      &probe_no_barrier, &probe_no_warp_barrier,
    &probe_outside, &probe_diverges, &probe_half_warp, &probe_stray,      &probe_no_block,
    nullptr};

extern "C" {
extern const cudasim_image probes;
const cudasim_image probes = {0, kernels};
}
