/* The simulated platform: every access is recorded, and the seed decides the order of all work. */
#include "program.h"
#include "sim/sim_ranks.h"

void __real_dc__cast(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count);

const char *const ground_name = "simulated ranks";
const int64_t ground_large = 1009;

const char *ground_run(const ground *g, setup s, void (*body)(rank *r), const void *user) {
  const sim_options options = {
      .seed = g->seed, .world = g->world, .no_heap = g->no_heap, .one_channel = g->one_channel};
  return sim_ranks(&options, s, body, user);
}

void ground_reads(const void *ptr, size_t bytes, const char *what) {
  sim_reads(ptr, bytes, what);
}

void ground_writes(const void *ptr, size_t bytes, const char *what) {
  sim_writes(ptr, bytes, what);
}

void *ground_new(size_t bytes) {
  return sim_new(bytes);
}

void ground_cast(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count) {
  __real_dc__cast(dst, dst_dtype, src, src_dtype, count);
}
