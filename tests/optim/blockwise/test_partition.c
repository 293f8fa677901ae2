/* How second-order optimizers divide a model: points 41 (merging and blocks) and 47 (owners) of the conformance list,
 * and how gradients and directions move between ranks. */
#include "comm_ranks.h"
#include "optim/redistribute.h"

enum { FLOWS = 5, MOST_BLOCKS = 64 };

static const int64_t limit = INT64_C(60000000000);

static void check_merge(int32_t ndim, const int64_t *shape, int64_t merge, int32_t order, const int64_t *merged) {
  dc__partition partition;
  assert_int_equal(dc__partition_merged("test", shape, ndim, merge, 1 << 20, &partition), DC_OK);
  assert_int_equal(partition.order, order);
  for (int32_t d = 0; d < order; d++) {
    assert_int_equal(partition.shape[d], merged[d]);
  }
}

#define SHAPE(...)                                               \
  (int32_t) DC__COUNT(((int64_t[]){__VA_ARGS__})), (int64_t[]) { \
    __VA_ARGS__                                                  \
  }

static void point_41_small_dimensions_are_merged(void **state) {
  (void)state;
  check_merge(SHAPE(32, 3, 64, 64), 8192, SHAPE(96, 4096));                     /* Facebook's table */
  check_merge(SHAPE(1, 2, 512, 1, 2048, 1, 3, 4), 1024, SHAPE(1024, 2048, 12)); /* Google's */
  check_merge(SHAPE(16, 16), 1024, SHAPE(16, 16));                              /* a matrix stays a matrix */
  check_merge(SHAPE(64, 3, 3, 3), 1024, SHAPE(64, 27));
  check_merge(SHAPE(2, 3, 4), 0, SHAPE(2, 3, 4));
  check_merge(SHAPE(2, 3, 4), 12, SHAPE(2, 12));
  check_merge(SHAPE(2, 3, 4), 11, SHAPE(6, 4));
  check_merge(SHAPE(1, 1, 1), 1024, SHAPE(1));
  check_merge(0, NULL, 1024, SHAPE(1));
  check_merge(SHAPE(1, 7, 1), 1024, SHAPE(7));
  check_merge(SHAPE(INT64_C(1) << 40, INT64_C(1) << 40, 0), 1024, SHAPE(0));
  check_merge(SHAPE(3, INT64_C(1) << 40, 5), INT64_MAX, SHAPE(3, 5 * (INT64_C(1) << 40)));
}

static void point_41_more_dimensions_than_a_root_has(void **state) {
  (void)state;
  int64_t shape[DC__ORDER_MAX + 1];
  dc__partition partition;
  for (int32_t d = 0; d <= DC__ORDER_MAX; d++) {
    shape[d] = 2;
  }
  assert_int_equal(dc__partition_merged("test", shape, DC__ORDER_MAX, 0, 2, &partition), DC_OK);
  assert_int_equal(partition.order, DC__ORDER_MAX);
  assert_int_equal(dc__partition_merged("test", shape, DC__ORDER_MAX + 1, 0, 2, &partition), DC_E_UNSUPPORTED);
  assert_non_null(strstr(dc_last_error(), "more than 32 dimensions"));
}

/* Every element is in one block, in row-major order there, and each part gets back its own elements. */
static void point_41_blocks_cover_a_tensor_once(void **state) {
  (void)state;
  const int64_t shapes[][4] = {{1}, {9}, {8, 8}, {7, 11}, {4, 3, 5}, {5, 2, 3, 7}};
  const int32_t orders[] = {1, 1, 2, 2, 3, 4};
  for (size_t s = 0; s < DC__COUNT(orders); s++) {
    for (int64_t side = 1; side <= 9; side++) {
      float whole[256], part[256], block[256];
      int32_t seen[256] = {0};
      dc__partition partition;
      assert_int_equal(dc__partition_merged("test", shapes[s], orders[s], 0, side, &partition), DC_OK);
      for (int64_t i = 0; i < partition.numel; i++) {
        whole[i] = (float)i;
        part[i] = -1;
      }
      for (int64_t b = 0; b < partition.blocks; b++) {
        dc__box box;
        dc__partition_box(&partition, b, &box);
        dc__box_pack(NULL, &partition, &box, whole, block);
        for (int64_t i = 0; i < box.count; i++) {
          seen[(int64_t)block[i]]++;
          assert_true(i == 0 || block[i] > block[i - 1]);
        }
        dc__box_unpack(NULL, &partition, &box, block, partition.numel / 3, partition.numel - partition.numel / 3 * 2,
                       part);
      }
      for (int64_t i = 0; i < partition.numel; i++) {
        assert_int_equal(seen[i], 1);
        bool inside = i < partition.numel - partition.numel / 3 * 2;
        assert_true(part[i] == (inside ? (float)(i + partition.numel / 3) : -1.0f));
      }
    }
  }
}

static void point_47_owners_are_balanced_and_the_same_everywhere(void **state) {
  (void)state;
  const double costs[] = {3, 9, 9, 1, 7, 5, 5, 2};
  int64_t order[8];
  int32_t owners[8];
  double load[3] = {0};
  dc__assign_owners(costs, 8, 3, load, order, owners);
  assert_memory_equal(order, ((int64_t[]){1, 2, 4, 5, 6, 0, 7, 3}), sizeof order);
  assert_memory_equal(owners, ((int32_t[]){1, 0, 1, 2, 2, 2, 0, 1}), sizeof owners);
  assert_true(load[0] == 14 && load[1] == 14 && load[2] == 13);

  double many[1000];
  int64_t places[1000];
  int32_t whose[1000];
  double sum = 0, largest = 0, loads[7] = {0};
  uint32_t x = 1;
  for (int i = 0; i < 1000; i++) {
    x = x * 1664525u + 1013904223u;
    many[i] = 1 + (double)(x >> 20);
    sum += many[i];
    largest = many[i] > largest ? many[i] : largest;
  }
  dc__assign_owners(many, 1000, 7, loads, places, whose);
  for (int i = 1; i < 1000; i++) {
    assert_true(many[places[i - 1]] >= many[places[i]]);
  }
  for (int r = 0; r < 7; r++) {
    assert_true(loads[r] >= sum / 7 - largest && loads[r] <= sum / 7 + largest / 3);
  }
}

/* ---- the exchange ---- */

typedef struct tensors {
  dc__partition cuts[FLOWS];
  int32_t owners[FLOWS][MOST_BLOCKS];
  dc__redist_entry flows[FLOWS];
  float *got[FLOWS];
  bool whole, broken;
} tensors;

static float value(int64_t flow, int64_t element) {
  return (float)(flow * 1000 + element);
}

static void fill(void *user, int64_t flow, float *part) {
  const tensors *t = user;
  for (int64_t i = 0; i < t->flows[flow].count; i++) {
    part[i] = value(flow, t->flows[flow].offset + i);
  }
}

static void apply(void *user, int64_t flow, const float *part) {
  const tensors *t = user;
  memcpy(t->got[flow], part, (size_t)t->flows[flow].count * sizeof *part);
}

/* Flows of all kinds: one block, many blocks, fewer elements than ranks, no elements. */
static void make_tensors(tensors *t, int32_t rank, int32_t world) {
  static const int64_t shapes[FLOWS][3] = {{6, 5, 1}, {9, 7, 1}, {1, 1, 1}, {0, 4, 1}, {3, 4, 5}};
  for (int64_t f = 0; f < FLOWS; f++) {
    (void)dc__partition_merged("test", shapes[f], 3, 0, f == 0 ? 100 : 4, &t->cuts[f]);
    for (int64_t b = 0; b < t->cuts[f].blocks; b++) {
      t->owners[f][b] = (int32_t)((f + b * 2) % world);
    }
    int64_t numel = t->cuts[f].numel;
    int64_t each = (numel + world - 1) / world;
    int64_t begin = each * rank < numel ? each * rank : numel;
    int64_t end = begin + each < numel ? begin + each : numel;
    t->flows[f] =
        (dc__redist_entry){f, &t->cuts[f], t->owners[f], t->whole ? 0 : begin, t->whole ? numel : end - begin};
  }
}

static int check_round(dc__redistribute *x, tensors *t, const bool *skip, int32_t rank) {
  CHECK_OK(dc__redistribute_to_owners(x, skip, fill, t));
  for (int64_t f = 0; f < FLOWS; f++) {
    for (int64_t b = 0; b < t->cuts[f].blocks; b++) {
      dc__box box;
      dc__partition_box(&t->cuts[f], b, &box);
      float whole[128], want[128];
      for (int64_t i = 0; i < t->cuts[f].numel; i++) {
        whole[i] = value(f, i);
      }
      dc__box_pack(NULL, &t->cuts[f], &box, whole, want);
      float *block = dc__redistribute_block(x, f, b);
      CHECK((block != NULL) == (t->owners[f][b] == rank));
      for (int64_t i = 0; i < box.count && block != NULL && !(skip != NULL && skip[f]); i++) {
        CHECK(block[i] == want[i]);
        block[i] = -block[i];
      }
    }
    for (int64_t i = 0; i < 128; i++) {
      t->got[f][i] = 1;
    }
  }
  CHECK_OK(dc__redistribute_from_owners(x, skip, apply, t));
  for (int64_t f = 0; f < FLOWS; f++) {
    for (int64_t i = 0; i < t->flows[f].count; i++) {
      CHECK(t->got[f][i] == (skip != NULL && skip[f] ? 1 : -value(f, t->flows[f].offset + i)));
    }
  }
  return 0;
}

static int exchange_rank(dc_comm *comm, void *arg) {
  dc_device *device;
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  for (int whole = 0; whole <= 1; whole++) {
    float memory[FLOWS][128];
    tensors t = {.whole = whole == 1};
    dc__redistribute *x;
    for (int64_t f = 0; f < FLOWS; f++) {
      t.got[f] = memory[f];
    }
    make_tensors(&t, comm->rank, comm->world);
    CHECK_OK(dc__redistribute_create("test", device, arg != NULL ? NULL : comm, t.flows, FLOWS, &x));
    CHECK(dc__redistribute_bytes(x) > 0);
    const bool skip[FLOWS] = {false, true, false, false, true};
    int64_t allocations = atomic_load(&device->allocations);
    CHECK(check_round(x, &t, NULL, comm->rank) == 0);
    CHECK(check_round(x, &t, skip, comm->rank) == 0);
    CHECK(check_round(x, &t, NULL, comm->rank) == 0);
    CHECK(atomic_load(&device->allocations) == allocations);
    dc__redistribute_destroy(x);
  }
  dc_device_destroy(device);
  return 0;
}

static void gradients_reach_owners_and_directions_come_back(void **state) {
  (void)state;
  on_all_groups(exchange_rank, NULL);
  assert_int_equal(on_threads(1, limit, exchange_rank, ""), 0); /* without a communicator */
}

/* The last rank's part of flow 1 begins one element too early. */
static int broken_rank(dc_comm *comm, void *arg) {
  (void)arg;
  dc_device *device;
  tensors t = {0};
  dc__redistribute *x;
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  make_tensors(&t, comm->rank, comm->world);
  t.flows[1].offset -= comm->rank == comm->world - 1;
  CHECK(dc__redistribute_create("test", device, comm, t.flows, FLOWS, &x) == DC_E_MISMATCH);
  CHECK_SAYS(
      "test: the ranks' parts of parameter 1 have 63 elements together and 42 up to the first gap; they must "
      "make up its 63");
  CHECK(x == NULL);
  dc_device_destroy(device);
  return 0;
}

static void parts_that_do_not_fit_are_refused_by_every_rank(void **state) {
  (void)state;
  assert_int_equal(on_threads(3, limit, broken_rank, NULL), 0);
}

static int agreeing_rank(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK_OK(dc__optim_agree_status("test", comm, DC_OK));
  if (comm->rank == 1) {
    CHECK(dc__optim_agree_status("test", comm, dc__fail(DC_E_SHAPE, "test: own words")) == DC_E_SHAPE);
    CHECK_SAYS("test: own words");
  } else {
    CHECK(dc__optim_agree_status("test", comm, DC_OK) == DC_E_ABORTED);
    CHECK_SAYS("test: nothing was done, since rank 1 failed with DC_E_SHAPE");
  }
  CHECK_OK(dc__optim_agree_status("test", comm, DC_OK)); /* the communicator stays usable */
  return 0;
}

static void one_rank_that_fails_fails_all(void **state) {
  (void)state;
  assert_int_equal(on_threads(3, limit, agreeing_rank, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(point_41_small_dimensions_are_merged),
      cmocka_unit_test(point_41_more_dimensions_than_a_root_has),
      cmocka_unit_test(point_41_blocks_cover_a_tensor_once),
      cmocka_unit_test(point_47_owners_are_balanced_and_the_same_everywhere),
      cmocka_unit_test(gradients_reach_owners_and_directions_come_back),
      cmocka_unit_test(parts_that_do_not_fit_are_refused_by_every_rank),
      cmocka_unit_test(one_rank_that_fails_fails_all),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
