/* Gradients: the same bits for every stage, bucket size and world; accumulation, ownership, types. */
#include <math.h>

#include "harness.h"

enum { GRAPH = 3, COUNT = 7 };

static const int64_t sizes[COUNT] = {1, 3, 10, 64, 1000, 257, 5};

/* Gradients that round when added: the order of additions shows in the bits. */
static float gradient(int32_t by, int64_t param, int64_t step, int64_t i) {
  uint32_t x = (uint32_t)(by * 73856093 + param * 19349663 + step * 83492791 + i * 2654435761);
  x ^= x >> 15;
  x *= 0x2c1b3c6du;
  x ^= x >> 12;
  return ((float)(x & 0xffff) / 65536.0f - 0.5f) * powf(2.0f, (float)(x >> 28) - 8.0f);
}

/* The definition: neighbours pair up, level by level, then one division. */
static float mean_over_ranks(int32_t world, int64_t param, int64_t step, int64_t i) {
  float v[64];
  for (int32_t r = 0; r < world; r++) {
    v[r] = gradient(r, param, step, i);
  }
  int32_t n = world;
  while (n > 1) {
    int32_t out = 0;
    for (int32_t k = 0; k < n; k += 2) {
      v[out++] = k + 1 < n ? v[k] + v[k + 1] : v[k];
    }
    n = out;
  }
  return v[0] / (float)world;
}

/* A parameter of any stage, with this rank's part of its gradient. */
typedef struct any {
  int64_t id, numel, begin, count, padded;
  float *grad, *weights;
} any;

/* At stages 1 and 2, parts are those of flat partitions: uneven, so that some ranks own nothing of a parameter. */
static void own(rank *r, int32_t stage, any *p) {
  if (stage == 0) {
    p->begin = 0;
    p->count = p->numel;
  } else if (stage == 3) {
    int64_t chunk = ceil_div(p->numel, r->world);
    p->begin = r->rank * chunk < p->numel ? r->rank * chunk : p->numel;
    p->count = p->numel - p->begin < chunk ? p->numel - p->begin : chunk;
  } else if (p->id % 3 == 0) { /* one rank owns all of it */
    p->begin = 0;
    p->count = r->rank == p->id % r->world ? p->numel : 0;
  } else { /* split between two ranks */
    int64_t cut = p->numel / 3;
    p->begin = r->rank == 0 ? 0 : cut;
    p->count = r->rank == 0 ? cut : r->rank == 1 ? p->numel - cut : 0;
    if (r->world == 1) {
      p->count = p->numel;
    }
  }
  p->padded = stage == 3 ? ceil_div(p->numel, r->world) : p->count;
}

static dc_status register_any(rank *r, int32_t stage, any *p, int64_t id) {
  p->id = id;
  p->numel = sizes[id];
  own(r, stage, p);
  p->grad = malloc(((size_t)p->padded + 1) * sizeof(float));
  p->weights = calloc((size_t)p->numel + (size_t)p->padded + 1, sizeof(float));
  for (int64_t i = 0; i <= p->padded; i++) {
    p->grad[i] = NAN; /* registration must zero it */
  }
  dc_tensor grad = flat(p->grad, &p->padded, DC_FLOAT32);
  if (stage == 3) {
    dc_tensor shard = flat(p->weights, &p->padded, DC_FLOAT32);
    return dc_register_z3_param(r->ctx, id, &p->numel, 1, &shard, &grad, 0, DC_DTYPE_NONE);
  }
  dc_tensor whole = flat(p->weights, &p->numel, DC_FLOAT32);
  return dc_register_param(r->ctx, id, &p->numel, 1, &whole, &grad, p->begin);
}

static dc_status register_stage(rank *r, int32_t stage, int64_t graph, const int64_t *ids, int64_t count) {
  dc_status (*const by_stage[])(dc_context *, int64_t, const int64_t *, int64_t) = {
      dc_register_graph_z0, dc_register_graph_z1, dc_register_graph_z2, dc_register_graph_z3};
  return by_stage[stage](r->ctx, graph, ids, count);
}

static dc_status reduce(rank *r, const any *p, int64_t step) {
  float *g = malloc((size_t)p->numel * sizeof *g);
  for (int64_t i = 0; i < p->numel; i++) {
    g[i] = gradient(r->rank, p->id, step, i);
  }
  dc_tensor t = flat(g, &p->numel, DC_FLOAT32);
  dc_status status = dc_reduce_grad(r->ctx, &t, GRAPH, p->id);
  memset(g, 0x7f, (size_t)p->numel * sizeof *g); /* the caller may overwrite it on return */
  free(g);
  return status;
}

static bool has_mean(rank *r, const any *p, int64_t step) {
  for (int64_t i = 0; i < p->count; i++) {
    if (p->grad[i] != mean_over_ranks(r->world, p->id, step, p->begin + i)) {
      return false;
    }
  }
  for (int64_t i = p->count; i < p->padded; i++) {
    if (p->grad[i] != 0.0f) { /* padding stays zero, whatever is next to it in a bucket */
      return false;
    }
  }
  return true;
}

typedef struct stage_case {
  int32_t stage;
} stage_case;

static void every_stage(rank *r) {
  int32_t stage = ((const stage_case *)r->user)->stage;
  any p[COUNT];
  int64_t ids[COUNT];
  for (int64_t i = 0; i < COUNT; i++) {
    ids[i] = i;
    OK(r, register_any(r, stage, &p[i], i));
    for (int64_t k = 0; k < p[i].padded; k++) {
      CHECK(r, p[i].grad[k] == 0.0f);
    }
  }
  OK(r, register_stage(r, stage, GRAPH, ids, COUNT));
  for (int64_t step = 0; step < 4; step++) {
    if (step == 2) {
      OK(r, dc_context_reset_stats(r->ctx));
    }
    OK(r, dc_start_backward(r->ctx, 1));
    for (int64_t i = COUNT - 1; i >= 0; i--) {
      OK(r, reduce(r, &p[i], step));
    }
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    for (int64_t i = 0; i < COUNT; i++) {
      CHECK(r, has_mean(r, &p[i], step)); /* replaced, not added to the last step's */
    }
  }
  dc_memory_stats s = {.struct_size = sizeof s};
  OK(r, dc_context_get_memory_stats(r->ctx, &s));
  int64_t expected = 0;
  for (int64_t i = 0; i < COUNT; i++) {
    any part = p[i];
    own(r, stage == 0 ? 3 : stage, &part);
    expected += part.count * (r->world - 1) + (stage == 0 ? part.numel - part.count : 0);
  }
  CHECK(r, s.reduce_wire_bytes == 2 * 4 * expected);
  CHECK(r, s.allocations == 0 && s.reductions == 2 * COUNT);
  for (int64_t i = 0; i < COUNT; i++) {
    free(p[i].grad);
    free(p[i].weights);
  }
}

static void test_every_stage(void **state) {
  (void)state;
  const int64_t buckets[] = {1, 70, 1 << 20};
  const int32_t worlds[] = {1, 2, 3, 5};
  for (int32_t stage = 0; stage <= 3; stage++) {
    for (size_t b = 0; b < 3; b++) {
      for (size_t w = 0; w < 4; w++) {
        setup s = {.world = worlds[w], .bucket = buckets[b]};
        s.config.double_buffer = b == 1 ? -1 : 0;
        run_ranks(s, every_stage, &(stage_case){stage});
      }
    }
  }
}

/* Micro-batches: stage 1 sums locally until the boundary, stages 2 and 3 add reduced parts. Four steps, each of which
 * frees the buckets. */
static void micro_batches(rank *r) {
  int32_t stage = ((const stage_case *)r->user)->stage;
  any p;
  int64_t id = 4;
  OK(r, register_any(r, stage, &p, id));
  OK(r, register_stage(r, stage, GRAPH, &id, 1));
  dc_memory_stats s = {.struct_size = sizeof s};
  for (int64_t step = 0; step < 4; step++) {
    OK(r, dc_context_reset_stats(r->ctx));
    for (int64_t micro = 0; micro < 3; micro++) {
      OK(r, dc_start_backward(r->ctx, micro == 2));
      OK(r, reduce(r, &p, 3 * step + micro));
      OK(r, dc_end_backward(r->ctx, GRAPH, 1));
      OK(r, dc_context_get_memory_stats(r->ctx, &s));
      CHECK(r, s.reductions == (stage == 1 ? micro / 2 : micro + 1));
      CHECK(r, s.bucket_bytes == 0);
    }
    for (int64_t i = 0; i < p.count; i++) {
      float sum = 0.0f, local[3];
      double exact = 0.0, size = 0.0;
      for (int64_t m = 0; m < 3; m++) {
        local[m] = mean_over_ranks(r->world, id, 3 * step + m, p.begin + i);
        sum = m == 0 ? local[m] : sum + local[m];
        exact += local[m];
        size += fabs(local[m]) + fabs(mean_over_ranks(r->world, id, 3 * step + m, p.begin + i));
      }
      if (stage == 1) {
        CHECK(r, fabs(p.grad[i] - exact) <= 1e-5 * (1 + size)); /* summed before the mean, so it rounds differently */
      } else {
        CHECK(r, p.grad[i] == sum);
      }
    }
  }
  free(p.grad);
  free(p.weights);
}

static void test_micro_batches(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    run_ranks((setup){.world = 2}, micro_batches, &(stage_case){stage});
    run_ranks((setup){.world = 3}, micro_batches, &(stage_case){stage});
  }
}

/* A parameter without a gradient in the first micro-batch is replaced in the second, not added to the old contents.
 * dc_context_accumulate_grads makes it be added. */
static void accumulation_is_per_parameter(rank *r) {
  any p[2];
  int64_t ids[2] = {2, 3};
  OK(r, register_any(r, 3, &p[0], 2));
  OK(r, register_any(r, 3, &p[1], 3));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, ids, 2));
  OK(r, dc_start_backward(r->ctx, 0));
  OK(r, reduce(r, &p[0], 0));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  for (int64_t i = 0; i < p[1].count; i++) {
    p[1].grad[i] = 1e9f; /* the caller may write to its buffer */
  }
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, reduce(r, &p[1], 1));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, has_mean(r, &p[0], 0) && has_mean(r, &p[1], 1));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, dc_context_accumulate_grads(r->ctx, NULL, 0)); /* an empty list means none, not all */
  OK(r, reduce(r, &p[0], 4));
  OK(r, dc_context_accumulate_grads(r->ctx, &ids[1], 1));
  OK(r, reduce(r, &p[1], 2));
  OK(r, reduce(r, &p[1], 3)); /* tied weights reduce twice in a backward */
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, has_mean(r, &p[0], 4));
  for (int64_t i = 0; i < p[1].count; i++) {
    float sum = mean_over_ranks(r->world, 3, 1, p[1].begin + i) + mean_over_ranks(r->world, 3, 2, p[1].begin + i);
    CHECK(r, p[1].grad[i] == sum + mean_over_ranks(r->world, 3, 3, p[1].begin + i));
  }
  FAILS(r, dc_context_update_param_grad_buffer(r->ctx, 77, NULL, 0), DC_E_NOT_FOUND, "id = 77");
  float *other = malloc(sizeof(float) * (size_t)p[1].padded);
  dc_tensor buffer = flat(other, &p[1].padded, DC_FLOAT32);
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, reduce(r, &p[1], 4));
  FAILS(r, dc_context_update_param_grad_buffer(r->ctx, 3, &buffer, 0), DC_E_BUSY, "pending");
  FAILS(r, dc_reset(r->ctx), DC_E_BUSY, "pending");
  FAILS(r, dc_register_graph_z3(r->ctx, GRAPH, ids, 2), DC_E_BUSY, "pending");
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  OK(r, dc_context_update_param_grad_buffer(r->ctx, 3, &buffer, 0));
  OK(r, reduce(r, &p[1], 5));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  free(p[1].grad);
  p[1].grad = other;
  CHECK(r, has_mean(r, &p[1], 5));
  for (int i = 0; i < 2; i++) {
    free(p[i].grad);
    free(p[i].weights);
  }
}

static void test_accumulation_is_per_parameter(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, accumulation_is_per_parameter, NULL);
}

/* Two graphs fill the same buckets alternately, and share a parameter. */
static void two_graphs(rank *r) {
  any p[3];
  int64_t first[2] = {2, 3}, second[2] = {3, 4};
  for (int64_t i = 0; i < 3; i++) {
    OK(r, register_any(r, 3, &p[i], i + 2));
  }
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, first, 2));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH + 1, second, 2));
  for (int64_t step = 0; step < 3; step++) {
    OK(r, dc_start_backward(r->ctx, 1));
    OK(r, reduce(r, &p[0], step));
    float *g = malloc(1000 * sizeof *g);
    for (int64_t i = 0; i < 1000; i++) {
      g[i] = gradient(r->rank, 4, step, i);
    }
    dc_tensor t = flat(g, &p[2].numel, DC_FLOAT32);
    OK(r, dc_reduce_grad(r->ctx, &t, GRAPH + 1, 4));
    free(g);
    OK(r, reduce(r, &p[1], step));
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    OK(r, dc_end_backward(r->ctx, GRAPH + 1, 1));
    OK(r, dc_end_backward(r->ctx, GRAPH + 1, 1)); /* nothing is pending: cheap and harmless */
    for (int64_t i = 0; i < 3; i++) {
      CHECK(r, has_mean(r, &p[i], step));
    }
  }
  for (int i = 0; i < 3; i++) {
    free(p[i].grad);
    free(p[i].weights);
  }
}

static void test_two_graphs(void **state) {
  (void)state;
  run_ranks((setup){.world = 2, .bucket = 500}, two_graphs, NULL);
}

/* 16-bit gradients are summed in float32, into a float32 buffer, so values near float16's maximum do not overflow. A
 * bucket with gradients of two types is flushed too. */
static void half_precision(rank *r) {
  int64_t id = 0, numel = 100, chunk = ceil_div(100, r->world);
  float *grad = malloc((size_t)chunk * sizeof *grad);
  float *shard = calloc((size_t)chunk, sizeof *shard);
  dc_tensor g = flat(grad, &chunk, DC_FLOAT32), w = flat(shard, &chunk, DC_FLOAT32);
  OK(r, dc_register_z3_param(r->ctx, id, &numel, 1, &w, &g, 0, DC_DTYPE_NONE));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  uint16_t big[100], one[100];
  for (int i = 0; i < 100; i++) {
    big[i] = 0x7b00; /* 57344 in float16 */
    one[i] = 0x3f80; /* 1 in bfloat16 */
  }
  dc_tensor t = flat(big, &numel, DC_FLOAT16);
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, dc_reduce_grad(r->ctx, &t, GRAPH, id));
  t = flat(one, &numel, DC_BFLOAT16);
  OK(r, dc_reduce_grad(r->ctx, &t, GRAPH, id));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  int64_t begin = r->rank * chunk;
  for (int64_t i = 0; i < chunk && begin + i < numel; i++) {
    CHECK(r, grad[i] == 57345.0f);
  }
  free(grad);
  free(shard);
}

static void test_half_precision(void **state) {
  (void)state;
  run_ranks((setup){.world = 4}, half_precision, NULL);
  run_ranks((setup){.world = 3}, half_precision, NULL);
}

static void profiling_and_frozen(rank *r) {
  any p;
  int64_t id = 4, frozen = 50, numel = 9, chunk = ceil_div(9, r->world);
  OK(r, register_any(r, 3, &p, id));
  float w[9] = {0}, g[9] = {0};
  dc_tensor shard = flat(w, &chunk, DC_FLOAT32), grad = flat(g, &numel, DC_FLOAT32);
  OK(r, dc_register_z3_param(r->ctx, frozen, &numel, 1, &shard, NULL, 0, DC_DTYPE_NONE));
  int64_t ids[2] = {id, frozen};
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, ids, 2));
  OK(r, dc_enable_profiling(r->ctx, 1));
  CHECK(r, dc_is_profiling(r->ctx) == 1);
  OK(r, reduce(r, &p, 0));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  OK(r, dc_enable_profiling(r->ctx, 0));
  OK(r, dc_reduce_grad(r->ctx, &grad, GRAPH, frozen));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  dc_memory_stats s = {.struct_size = sizeof s};
  OK(r, dc_context_get_memory_stats(r->ctx, &s));
  CHECK(r, s.reductions == 0 && s.flushes == 0 && p.grad[0] == 0.0f);
  OK(r, reduce(r, &p, 1));
  OK(r, dc_context_step_abort(r->ctx)); /* drops the local sum */
  OK(r, reduce(r, &p, 2));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, has_mean(r, &p, 2));
  free(p.grad);
  free(p.weights);
}

static void test_profiling_and_frozen(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, profiling_and_frozen, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_stage),
      cmocka_unit_test(test_micro_batches),
      cmocka_unit_test(test_accumulation_is_per_parameter),
      cmocka_unit_test(test_two_graphs),
      cmocka_unit_test(test_half_precision),
      cmocka_unit_test(test_profiling_and_frozen),
  };
  return cmocka_run_group_tests_name("reduce", tests, NULL, NULL);
}
