/* Gradients larger than a bucket go through it in pieces. The bits are those of a bucket that holds them whole, and
 * buckets do not grow. */
#include "harness.h"
#include "sanitized.h"

enum { GRAPH = 3, PARAMS = 3, WORLD = 5, STEPS = 3, PIECE = 1 << 16 };

/* Two large gradients, of which the second has a shorter last chunk or none, and a small one behind them. */
static const int64_t sizes[PARAMS] = {3 * PIECE + 8, 2 * PIECE + 7001, 100};

typedef struct large_case {
  int32_t stage;
  int32_t dtype; /* type of the gradients */
  bool records;  /* writes to `whole` instead of comparing with it */
} large_case;

/* Each rank's parts as a large bucket gives them; longer than any part. */
static float whole[WORLD][PARAMS][3 * PIECE + 8];

/* Numbers of very different sizes: the order of additions shows in the sums. */
static void fill_gradient(const rank *r, int64_t id, int step, int32_t dtype, void *data) {
  for (int64_t i = 0; i < sizes[id]; i++) {
    uint32_t x = (uint32_t)(r->rank * 73856093 + id * 19349663 + step * 83492791 + i * 2654435761);
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    x ^= x >> 12;
    float value = ((float)(x & 0xffff) / 65536.0f - 0.5f) * (float)(1u << (x >> 28));
    if (dtype == DC_FLOAT64) {
      ((double *)data)[i] = value;
    } else {
      ((float *)data)[i] = value;
    }
  }
}

static dc_status register_large(rank *r, int32_t stage, int64_t id, int64_t chunk, float *weights, float *part) {
  const int64_t begin = r->rank * chunk < sizes[id] ? r->rank * chunk : sizes[id];
  int64_t owned = sizes[id] - begin < chunk ? sizes[id] - begin : chunk;
  if (stage == 3) {
    dc_tensor shard = flat(weights, &chunk, DC_FLOAT32), grad = flat(part, &chunk, DC_FLOAT32);
    return dc_register_z3_param(r->ctx, id, &sizes[id], 1, &shard, &grad, 0, DC_DTYPE_NONE);
  }
  dc_tensor full = flat(weights, &sizes[id], DC_FLOAT32), grad = flat(part, &owned, DC_FLOAT32);
  return dc_register_param(r->ctx, id, &sizes[id], 1, &full, &grad, begin);
}

static dc_status one_backward(rank *r, const large_case *c, int step, bool update, void *scratch) {
  dc_status status = dc_start_backward(r->ctx, update);
  for (int64_t id = 0; id < PARAMS && status == DC_OK; id++) {
    fill_gradient(r, id, step, c->dtype, scratch);
    dc_tensor grad = flat(scratch, &sizes[id], c->dtype);
    status = dc_reduce_grad(r->ctx, &grad, GRAPH, id);
  }
  return status != DC_OK ? status : dc_end_backward(r->ctx, GRAPH, 0);
}

static void large_gradients(rank *r) {
  large_case *c = (large_case *)(uintptr_t)r->user;
  static const int64_t ids[PARAMS] = {0, 1, 2};
  float *weights = calloc((size_t)sizes[0], sizeof *weights), *part[PARAMS];
  double *scratch = malloc((size_t)sizes[0] * sizeof *scratch);
  for (int64_t id = 0; id < PARAMS; id++) {
    int64_t chunk = ceil_div(sizes[id], r->world);
    part[id] = calloc((size_t)chunk + 1, sizeof **part);
    OK(r, register_large(r, c->stage, id, chunk, weights, part[id]));
  }
  OK(r, c->stage == 3   ? dc_register_graph_z3(r->ctx, GRAPH, ids, PARAMS)
        : c->stage == 2 ? dc_register_graph_z2(r->ctx, GRAPH, ids, PARAMS)
                        : dc_register_graph_z1(r->ctx, GRAPH, ids, PARAMS));
  for (int step = 0; step < STEPS; step++) { /* two micro-batches, and the last one */
    OK(r, one_backward(r, c, step, step == STEPS - 1, scratch));
  }
  dc_memory_stats stats = {.struct_size = sizeof stats};
  OK(r, dc_context_get_memory_stats(r->ctx, &stats));
  CHECK(r, c->records || stats.bucket_bytes <= 2 * PIECE * (int64_t)dc_dtype_size(c->dtype));
  for (int64_t id = 0; id < PARAMS; id++) {
    int64_t chunk = ceil_div(sizes[id], r->world);
    CHECK(r, c->records || memcmp(part[id], whole[r->rank][id], (size_t)chunk * sizeof **part) == 0);
    if (c->records) {
      memcpy(whole[r->rank][id], part[id], (size_t)chunk * sizeof **part);
    }
    free(part[id]);
  }
  free(weights);
  free(scratch);
}

static void test_large_gradients(void **state) {
  (void)state;
#ifdef SANITIZED /* sanitizers make it slow */
  static const int32_t worlds[] = {2, WORLD};
#else
  static const int32_t worlds[] = {1, 2, 3, WORLD};
#endif
  for (size_t w = 0; w < sizeof worlds / sizeof worlds[0]; w++) {
    for (int32_t stage = 1; stage <= 3; stage++) {
      for (int32_t single = -1; single <= 0; single++) {
        large_case c = {.stage = stage, .dtype = stage == 2 ? DC_FLOAT64 : DC_FLOAT32};
        const dc_config config = {.double_buffer = single};
        c.records = true;
        run_ranks((setup){.world = worlds[w], .bucket = 1 << 20, .config = config}, large_gradients, &c);
        c.records = false;
        run_ranks((setup){.world = worlds[w], .bucket = 1000, .config = config}, large_gradients, &c);
      }
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_large_gradients)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
