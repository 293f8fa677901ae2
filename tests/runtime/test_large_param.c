/* The memory of a step whose only parameter is much larger than a bucket. */
#include "harness.h"
#include "runtime/runtime.h"

enum { GRAPH = 3, ELEMENTS = 3 << 22, BUCKET = 1 << 18, STEPS = 3 };

/* Memory of the device, and of the heap that peers read, which the context holds. */
static int64_t held_bytes(const dc_context *ctx) {
  dc__arena *const arenas[] = {ctx->arenas.gathered, ctx->arenas.working, ctx->arenas.shared, ctx->arenas.buckets};
  int64_t bytes = 0;
  for (size_t i = 0; i < DC__COUNT(arenas); i++) {
    dc__arena_stats stats;
    dc__arena_get_stats(arenas[i], &stats);
    bytes += stats.chunk_bytes;
  }
  return bytes;
}

static void one_step(rank *r, const dc_tensor *grad) {
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 0, DC_DTYPE_NONE, &full));
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 0));
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 0, 1));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, dc_reduce_grad(r->ctx, grad, GRAPH, 0));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  OK(r, dc_context_params_updated(r->ctx, NULL, 0));
}

/* Memory for the whole parameter, the shard's copy that peers read, and two buckets. */
static void large_param(rank *r) {
  const int64_t count = ELEMENTS, chunk = ceil_div(ELEMENTS, r->world), id = 0;
  float *shard = calloc((size_t)chunk, sizeof *shard), *part = calloc((size_t)chunk, sizeof *part);
  float *whole = calloc(ELEMENTS, sizeof *whole);
  dc_tensor s = flat(shard, &chunk, DC_FLOAT32), g = flat(part, &chunk, DC_FLOAT32);
  dc_tensor grad = flat(whole, &count, DC_FLOAT32);
  OK(r, dc_register_z3_param(r->ctx, id, &count, 1, &s, &g, 0, DC_DTYPE_NONE));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  for (int step = 0; step < STEPS; step++) {
    one_step(r, &grad);
  }
  CHECK(r, held_bytes(r->ctx) * 10 <= (int64_t)ELEMENTS * 4 * 16); /* chunks are never freed, so this is the peak */
  free(shard);
  free(part);
  free(whole);
}

static void test_large_param(void **state) {
  (void)state;
  run_ranks((setup){.world = 2, .bucket = BUCKET}, large_param, NULL);
  run_ranks((setup){.world = 4, .bucket = BUCKET}, large_param, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_large_param)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
