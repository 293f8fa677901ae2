/* The split of a parameter over ranks under ZeRO-3. */
#include "harness.h"

static void test_parts_make_up_the_whole(void **state) {
  (void)state;
  for (int64_t numel = 0; numel <= 40; numel++) {
    for (int32_t world = 1; world <= 20; world++) {
      const int64_t chunk = (numel + world - 1) / world;
      int64_t end = 0;
      for (int32_t r = 0; r < world; r++) {
        int64_t offset = -1, count = -1;
        assert_int_equal(dc_shard_range(numel, r, world, &offset, &count), DC_OK);
        assert_int_equal(offset, end);
        assert_true(count >= 0 && count <= chunk);
        assert_true(count == chunk || offset + count == numel);
        end = offset + count;
      }
      assert_int_equal(end, numel);
    }
  }
}

static void test_the_edges(void **state) {
  (void)state;
  int64_t offset, count;
  assert_int_equal(dc_shard_range(5, 3, 4, &offset, &count), DC_OK); /* 2, 2, 1 and 0 elements */
  assert_int_equal(offset, 5);
  assert_int_equal(count, 0);
  assert_int_equal(dc_shard_range(INT64_MAX, INT32_MAX - 1, INT32_MAX, &offset, &count), DC_OK);
  assert_true(offset <= INT64_MAX - count && offset + count == INT64_MAX);
  assert_int_equal(dc_shard_range(INT64_MAX, 0, 1, &offset, &count), DC_OK);
  assert_true(offset == 0 && count == INT64_MAX);
  assert_int_equal(dc_shard_range(1, INT32_MAX - 1, INT32_MAX, &offset, &count), DC_OK);
  assert_true(offset == 1 && count == 0);
}

static void refused(dc_status status, const char *text) {
  assert_int_equal(status, DC_E_INVALID);
  if (strstr(dc_last_error(), text) == NULL) {
    fail_msg("\"%s\" is not in \"%s\"", text, dc_last_error());
  }
}

static void test_refusals(void **state) {
  (void)state;
  int64_t offset = 3, count = 4;
  refused(dc_shard_range(-1, 0, 2, &offset, &count), "numel = -1");
  refused(dc_shard_range(1, 0, 0, &offset, &count), "world_size = 0");
  refused(dc_shard_range(1, 2, 2, &offset, &count), "rank = 2");
  refused(dc_shard_range(1, -1, 2, &offset, &count), "rank = -1");
  refused(dc_shard_range(1, 0, 2, NULL, &count), "offset is NULL");
  refused(dc_shard_range(1, 0, 2, &offset, NULL), "count is NULL");
  assert_true(offset == 3 && count == 4);
}

/* Registration accepts the function's range on every rank. */
static void register_shard(rank *r) {
  float shard[4] = {0}, grad[4] = {0};
  for (int64_t numel = 1; numel <= 13; numel++) {
    int64_t offset, count;
    CHECK(r, dc_shard_range(numel, r->rank, r->world, &offset, &count) == DC_OK);
    dc_tensor weights = flat(shard, &count, DC_FLOAT32), grads = flat(grad, &count, DC_FLOAT32);
    CHECK(r, dc_register_z3_param(r->ctx, numel, &numel, 1, &weights, &grads, 0, DC_DTYPE_NONE) == DC_OK);
  }
}

static void test_registration_takes_it(void **state) {
  (void)state;
  run_ranks((setup){.world = 4}, register_shard, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_parts_make_up_the_whole),
      cmocka_unit_test(test_the_edges),
      cmocka_unit_test(test_refusals),
      cmocka_unit_test(test_registration_takes_it),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
