/* Collectives and a ZeRO-3 step on values of which every bit of the result is known. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tool.h"

/* ---- values ---- */

/* A different number for every seed and place; so small that any type has the sum over eight ranks. */
static int64_t small_integer(int64_t seed, int64_t i) {
  uint64_t x = ((uint64_t)seed * 1000003 + (uint64_t)i) * UINT64_C(0x9e3779b97f4a7c15);
  return (int64_t)(x >> 56) % 31 - 15;
}

/* Floats get fractions whose sums are rounded, where the expected sum can be computed exactly. */
static double exact_value(int64_t seed, int64_t i, int32_t dtype) {
  bool fine = dtype == DC_FLOAT32 || dtype == DC_FLOAT64;
  return (double)small_integer(seed, i) * (fine ? 1.0 / 3.0 : 1.0);
}

static uint16_t bfloat16_of(double value) { /* of small whole numbers: no rounding */
  float f = (float)value;
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static uint16_t float16_of(double value) { /* of whole numbers up to 2048: no rounding */
  uint16_t sign = value < 0 ? 0x8000 : 0;
  double rest = value < 0 ? -value : value;
  int exponent = 0;
  if (rest == 0) {
    return sign;
  }
  for (; rest >= 2; rest /= 2) {
    exponent++;
  }
  return (uint16_t)(sign | (exponent + 15) << 10 | (int)((rest - 1) * 1024));
}

static void store_element(void *at, int32_t dtype, int64_t i, double value) {
  switch (dtype) {
    case DC_FLOAT32:
      ((float *)at)[i] = (float)value;
      break;
    case DC_FLOAT64:
      ((double *)at)[i] = value;
      break;
    case DC_FLOAT16:
      ((uint16_t *)at)[i] = float16_of(value);
      break;
    case DC_BFLOAT16:
      ((uint16_t *)at)[i] = bfloat16_of(value);
      break;
    case DC_INT8:
      ((int8_t *)at)[i] = (int8_t)(int64_t)value;
      break;
    case DC_INT32:
      ((int32_t *)at)[i] = (int32_t)value;
      break;
    default:
      ((int64_t *)at)[i] = (int64_t)value;
  }
}

/* The sum over ranks as the header says it: a binary tree, in the type itself for 32 and 64 bits. */
static double reduce_exactly(int world, int64_t i, int32_t dtype, bool mean) {
  float f[64];
  double d[64];
  for (int r = 0; r < world; r++) {
    d[r] = exact_value(r, i, dtype);
    f[r] = (float)d[r];
  }
  for (int step = 1; step < world; step *= 2) {
    for (int r = 0; r + step < world; r += 2 * step) {
      d[r] += d[r + step];
      f[r] += f[r + step];
    }
  }
  if (dtype == DC_FLOAT32) {
    return (double)(mean ? f[0] / (float)world : f[0]);
  }
  return mean ? d[0] / world : d[0];
}

dc_tensor flat(void *data, const int64_t *count, int32_t dtype) {
  dc_tensor t = DC_TENSOR_INIT;
  t.data = data;
  t.shape = count;
  t.ndim = 1;
  t.dtype = dtype;
  return t;
}

/* ---- collectives ---- */

/* Memory of one size and type. */
typedef struct collectives_state {
  rank *r;
  int32_t dtype;
  int64_t count; /* elements of a rank's part */
  char *part, *whole, *expected;
} collectives_state;

static bool check_equal(const collectives_state *g, const char *what, const char *found, const char *expected,
                        int64_t count) {
  size_t size = dc_dtype_size(g->dtype);
  for (int64_t i = 0; i < count; i++) {
    if (memcmp(found + (size_t)i * size, expected + (size_t)i * size, size) != 0) {
      return rank_fail(g->r, "%s of %" PRId64 " elements of %s: element %" PRId64 " has other bits than it should",
                       what, count, dc_dtype_name(g->dtype), i);
    }
  }
  return true;
}

static bool collectives_ok(const collectives_state *g, const char *what, dc_status status) {
  return status == DC_OK ||
         rank_fail(g->r, "%s of %s: %s (%s)", what, dc_dtype_name(g->dtype), dc_last_error(), dc_status_name(status));
}

static bool check_all_gather(const collectives_state *g) {
  int64_t total = g->count * g->r->world;
  for (int64_t i = 0; i < g->count; i++) {
    store_element(g->part, g->dtype, i, exact_value(g->r->rank, i, g->dtype));
  }
  for (int64_t i = 0; i < total; i++) {
    store_element(g->expected, g->dtype, i, exact_value(i / g->count, i % g->count, g->dtype));
  }
  dc_tensor send = flat(g->part, &g->count, g->dtype);
  dc_tensor recv = flat(g->whole, &total, g->dtype);
  return collectives_ok(g, "all-gather", dc_comm_all_gather(g->r->comm, &send, &recv, NULL, NULL)) &&
         check_equal(g, "all-gather", g->whole, g->expected, total);
}

static bool check_reduce(const collectives_state *g, bool scatter) {
  int64_t total = g->count * g->r->world;
  int64_t first = scatter ? g->r->rank * g->count : 0;
  bool mean = g->dtype == DC_FLOAT32 || g->dtype == DC_FLOAT64;
  int32_t op = mean ? DC_MEAN : DC_SUM;
  for (int64_t i = 0; i < total; i++) {
    store_element(g->whole, g->dtype, i, exact_value(g->r->rank, i, g->dtype));
  }
  int64_t count = scatter ? g->count : total;
  for (int64_t i = 0; i < count; i++) {
    store_element(g->expected, g->dtype, i, reduce_exactly(g->r->world, first + i, g->dtype, mean));
  }
  dc_tensor send = flat(g->whole, &total, g->dtype);
  dc_tensor recv = flat(g->part, &g->count, g->dtype);
  if (scatter) {
    return collectives_ok(g, "reduce-scatter", dc_comm_reduce_scatter(g->r->comm, &send, &recv, NULL, op, NULL)) &&
           check_equal(g, "reduce-scatter", g->part, g->expected, count);
  }
  return collectives_ok(g, "all-reduce", dc_comm_all_reduce(g->r->comm, &send, op, NULL)) &&
         check_equal(g, "all-reduce", g->whole, g->expected, count);
}

static bool check_broadcast(const collectives_state *g) {
  int root = g->r->world - 1;
  for (int64_t i = 0; i < g->count; i++) {
    store_element(g->part, g->dtype, i, exact_value(g->r->rank, i, g->dtype));
    store_element(g->expected, g->dtype, i, exact_value(root, i, g->dtype));
  }
  dc_tensor data = flat(g->part, &g->count, g->dtype);
  return collectives_ok(g, "broadcast", dc_comm_broadcast(g->r->comm, &data, root, NULL)) &&
         check_equal(g, "broadcast", g->part, g->expected, g->count);
}

/* A rank's part for another one begins at an element of that rank's number. */
static bool check_all_to_all(const collectives_state *g) {
  int64_t total = g->count * g->r->world;
  for (int64_t i = 0; i < total; i++) {
    int64_t other = i / g->count, element = i % g->count;
    store_element(g->part, g->dtype, i, exact_value(g->r->rank, element + other, g->dtype));
    store_element(g->expected, g->dtype, i, exact_value(other, element + g->r->rank, g->dtype));
  }
  dc_tensor send = flat(g->part, &total, g->dtype);
  dc_tensor recv = flat(g->whole, &total, g->dtype);
  return collectives_ok(g, "all-to-all", dc_comm_all_to_all(g->r->comm, &send, NULL, &recv, NULL, NULL)) &&
         check_equal(g, "all-to-all", g->whole, g->expected, total);
}

bool check_collectives(rank *r) {
  static const int32_t dtypes[] = {DC_FLOAT32, DC_FLOAT64, DC_FLOAT16, DC_BFLOAT16, DC_INT8, DC_INT32, DC_INT64};
  static const int64_t counts[] = {1, 7, 1000, 300001}; /* staged, in one round and more, and read in place */
  enum { MOST = 300001 };
  size_t bytes = (size_t)MOST * sizeof(double) * (size_t)r->world;
  char *memory = malloc(3 * bytes);
  bool well = memory != NULL || rank_fail(r, "no memory for %zu bytes", 3 * bytes);
  for (size_t d = 0; d < COUNT(dtypes) && well; d++) {
    for (size_t c = 0; c < COUNT(counts) && well; c++) {
      const collectives_state g = {.r = r,
                                   .dtype = dtypes[d],
                                   .count = counts[c],
                                   .part = memory,
                                   .whole = memory + bytes,
                                   .expected = memory + 2 * bytes};
      well = check_all_gather(&g) && check_reduce(&g, true) && check_reduce(&g, false) && check_broadcast(&g) &&
             check_all_to_all(&g) && collectives_ok(&g, "barrier", dc_comm_barrier(r->comm));
    }
  }
  free(memory);
  return well;
}

/* ---- a ZeRO-3 step ---- */

enum { GRAPH = 1, PARAM = 7, ELEMENTS = 1001 }; /* no multiple of the ranks: the last shard is padded */

typedef struct step {
  rank *r;
  dc_context *context;
  int64_t chunk;
  float *shard, *grad, *full;
} step;

static bool step_ok(const step *s, const char *what, dc_status status) {
  return status == DC_OK || rank_fail(s->r, "%s: %s (%s)", what, dc_last_error(), dc_status_name(status));
}

static bool step_register(const step *s) {
  static const int64_t shape[1] = {ELEMENTS};
  static const int64_t ids[1] = {PARAM};
  for (int64_t i = 0; i < s->chunk; i++) {
    s->shard[i] = (float)exact_value(1, s->r->rank * s->chunk + i, DC_FLOAT32);
  }
  dc_tensor shard = flat(s->shard, &s->chunk, DC_FLOAT32);
  dc_tensor grad = flat(s->grad, &s->chunk, DC_FLOAT32);
  return step_ok(s, "dc_init", dc_init(s->context, s->r->comm, NULL, 1 << 16)) &&
         step_ok(s, "dc_register_z3_param",
                 dc_register_z3_param(s->context, PARAM, shape, 1, &shard, &grad, 0, DC_DTYPE_NONE)) &&
         step_ok(s, "dc_register_graph_z3", dc_register_graph_z3(s->context, GRAPH, ids, 1));
}

/* Checks the gathered weights: all shards, minus the updates. */
static bool step_gather(const step *s, int updates) {
  dc_tensor out = DC_TENSOR_INIT;
  if (!step_ok(s, "dc_allgather_param", dc_allgather_param(s->context, NULL, GRAPH, PARAM, DC_DTYPE_NONE, &out)) ||
      !step_ok(s, "dc_wait_allgather", dc_wait_allgather(s->context, NULL, GRAPH, PARAM))) {
    return false;
  }
  for (int64_t i = 0; i < ELEMENTS; i++) {
    float expected = (float)exact_value(1, i, DC_FLOAT32);
    for (int u = 0; u < updates; u++) {
      expected -= (float)reduce_exactly(s->r->world, i, DC_FLOAT32, true);
    }
    if (memcmp((float *)out.data + i, &expected, sizeof expected) != 0) {
      return rank_fail(s->r, "step %d: weight %" PRId64 " is %.9g, should be %.9g", updates, i,
                       (double)((float *)out.data)[i], (double)expected);
    }
  }
  return step_ok(s, "dc_release_param", dc_release_param(s->context, NULL, GRAPH, PARAM, 1));
}

static bool step_reduce_and_update(const step *s) {
  static const int64_t shape[1] = {ELEMENTS};
  for (int64_t i = 0; i < ELEMENTS; i++) {
    s->full[i] = (float)exact_value(s->r->rank, i, DC_FLOAT32);
  }
  dc_tensor grad = flat(s->full, shape, DC_FLOAT32);
  if (!step_ok(s, "dc_start_backward", dc_start_backward(s->context, 1)) ||
      !step_ok(s, "dc_reduce_grad", dc_reduce_grad(s->context, &grad, GRAPH, PARAM)) ||
      !step_ok(s, "dc_end_backward", dc_end_backward(s->context, GRAPH, 0))) {
    return false;
  }
  for (int64_t i = 0; i < s->chunk && s->r->rank * s->chunk + i < ELEMENTS; i++) {
    float expected = (float)reduce_exactly(s->r->world, s->r->rank * s->chunk + i, DC_FLOAT32, true);
    if (memcmp(&s->grad[i], &expected, sizeof expected) != 0) {
      return rank_fail(s->r, "gradient %" PRId64 " is %.9g, should be %.9g", s->r->rank * s->chunk + i,
                       (double)s->grad[i], (double)expected);
    }
    s->shard[i] -= s->grad[i];
  }
  return step_ok(s, "dc_context_params_updated", dc_context_params_updated(s->context, NULL, 0));
}

bool check_zero3(rank *r) {
  step s = {.r = r, .chunk = (ELEMENTS + r->world - 1) / r->world};
  float *memory = calloc((size_t)(2 * s.chunk) + ELEMENTS, sizeof *memory);
  dc_device *device = NULL;
  bool well = memory != NULL || rank_fail(r, "out of memory");
  if (well) {
    s.shard = memory;
    s.grad = memory + s.chunk;
    s.full = memory + 2 * s.chunk;
    well = step_ok(&s, "dc_device_open", dc_device_open("cpu", NULL, &device)) &&
           step_ok(&s, "dc_context_create", dc_context_create(device, NULL, &s.context)) && step_register(&s);
  }
  for (int steps = 0; steps < 3 && well; steps++) {
    well = step_gather(&s, steps) && step_reduce_and_update(&s);
  }
  well = well && step_gather(&s, 3);
  dc_context_destroy(s.context);
  dc_device_destroy(device);
  free(memory);
  return well;
}
