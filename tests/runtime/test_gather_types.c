/* Gathers in one type after another. */
#include "harness.h"
#include "kernels/kernels.h"

enum { GRAPH = 7 };

/* Shards of every type, with values that narrower types round, are gathered in one type after another. Each gather
 * gives the cast of the shard, whatever the earlier gathers were. */
enum { KINDS = 7, ELEMENTS = 9 };
static const int32_t kinds[KINDS] = {DC_FLOAT32, DC_FLOAT64, DC_FLOAT16, DC_BFLOAT16, DC_INT8, DC_INT32, DC_INT64};

static void fill_inexact(void *data, int32_t dtype, int64_t begin, int64_t count) {
  static const double values[ELEMENTS] = {1.0 / 3, -2.0 / 7, 1e5 / 3, 3.7, -200.3, 70000.1, 1e-6, 1 + 0x1p-50, 300};
  static const int64_t whole[ELEMENTS] = {1, -128, 127, 300, -70001, 16777217, 0x7fffffff, 0x7fffffffffffff, -5};
  for (int64_t i = 0; i < count; i++) {
    const void *value = dc__dtype_is_float(dtype) ? (const void *)&values[begin + i] : &whole[begin + i];
    dc__cast((char *)data + (size_t)i * dc_dtype_size(dtype), dtype, value,
             dc__dtype_is_float(dtype) ? DC_FLOAT64 : DC_INT64, 1);
  }
}

static void types_in_any_order(rank *r) {
  const int64_t chunk = ceil_div(ELEMENTS, r->world), count = ELEMENTS, id = 4;
  int64_t begin = r->rank * chunk, mine = begin + chunk > ELEMENTS ? ELEMENTS - begin : chunk;
  for (int own = 0; own < KINDS; own++) {
    double shard[ELEMENTS], whole[ELEMENTS], expected[ELEMENTS];
    fill_inexact(shard, kinds[own], begin, mine);
    fill_inexact(whole, kinds[own], 0, ELEMENTS);
    dc_tensor s = flat(shard, &chunk, kinds[own]), full = DC_TENSOR_INIT;
    OK(r, dc_register_z3_param(r->ctx, id, &count, 1, &s, NULL, 0, DC_DTYPE_NONE));
    OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
    for (int order = 0; order < KINDS * KINDS * KINDS; order++) {
      const int steps[3] = {order % KINDS, order / KINDS % KINDS, order / KINDS / KINDS};
      for (int k = 0; k < 3; k++) {
        int32_t dtype = kinds[steps[k]];
        if (order % 2 == 0) {
          OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, &id, &dtype, 1));
        }
        OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, dtype, &full));
        OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, id));
        dc__cast(expected, dtype, whole, kinds[own], ELEMENTS);
        if (memcmp(full.data, expected, ELEMENTS * dc_dtype_size(dtype)) != 0) {
          snprintf(r->failure, sizeof r->failure, "rank %d of %d: shard of %s, gathered as %s, %s, %s: the %s is wrong",
                   r->rank, r->world, dc_dtype_name(kinds[own]), dc_dtype_name(kinds[steps[0]]),
                   dc_dtype_name(kinds[steps[1]]), dc_dtype_name(kinds[steps[2]]), dc_dtype_name(dtype));
          return;
        }
      }
      OK(r, dc_release_param(r->ctx, NULL, GRAPH, id, 1));
    }
    OK(r, dc_reset(r->ctx));
    OK(r, dc_unregister_param(r->ctx, id));
  }
}

static void test_types_in_any_order(void **state) {
  (void)state;
  run_ranks((setup){.world = 1}, types_in_any_order, NULL);
  run_ranks((setup){.world = 2}, types_in_any_order, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_types_in_any_order),
  };
  return cmocka_run_group_tests_name("gather_types", tests, NULL, NULL);
}
