/* F: the fused prefetch. */
#include "conformance.h"

enum { COUNT = 6 };

/* Registers COUNT parameters of equal size, in one graph. */
static void register_all(rank *r, param *p, int64_t *ids, int64_t numel) {
  for (int64_t i = 0; i < COUNT; i++) {
    p[i] = (param){.id = i, .shape = {numel}, .stage = 3};
    ids[i] = i;
    OK(r, register_param(r, &p[i]));
  }
  OK(r, register_graph(r, GRAPH, 3, ids, COUNT));
  OK(r, dc_context_trace_start(r->ctx, 100));
}

static void use_all(rank *r, param *p, const int32_t *dtypes) {
  for (int64_t i = 0; i < COUNT; i++) {
    dc_tensor full = DC_TENSOR_INIT;
    int32_t dtype = dtypes == NULL ? DC_DTYPE_NONE : dtypes[i];
    OK(r, gather(r, GRAPH, &p[i], dtype, &full));
    CHECK(r, is_whole(r, &full, &p[i], dtype, 0));
    OK(r, dc_release_param(r->ctx, NULL, GRAPH, i, 1));
  }
}

static void one_group(rank *r) {
  param p[COUNT];
  int64_t ids[COUNT];
  register_all(r, p, ids, 40);
  CHECK(r, r->failure[0] == '\0');
  OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, NULL, COUNT));
  use_all(r, p, NULL);
  CHECK(r, r->failure[0] == '\0');
  dc_memory_stats s = stats_of(r);
  CHECK(r, s.gathers == COUNT && s.gather_hits == COUNT && s.gathered_bytes == 0);
  CHECK(r, traced(r, DC_OP_PREFETCH_PARAMS_FUSED, 1) == 1); /* one piece of work on the gather stream */
}

static void check_51_a_prefetch_is_one_group(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, one_group, NULL);
  on_ranks((setup){.world = 3}, one_group, NULL);
}

static void some_are_there(rank *r) {
  param p[COUNT];
  int64_t ids[COUNT];
  dc_tensor full = DC_TENSOR_INIT;
  register_all(r, p, ids, 40);
  CHECK(r, r->failure[0] == '\0');
  OK(r, gather(r, GRAPH, &p[2], DC_DTYPE_NONE, &full));
  OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, NULL, COUNT));
  CHECK(r, stats_of(r).gathers == COUNT && stats_of(r).gather_hits == 1);
  CHECK(r, traced(r, DC_OP_PREFETCH_PARAMS_FUSED, 1) <= 1);
  for (int64_t i = 0; i < COUNT; i++) { /* afterwards its work is done, and traced or dropped */
    OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, i));
  }
  (void)traced(r, DC_OP_PREFETCH_PARAMS_FUSED, 1);
  if (r->rank == 0) { /* rank 0 alone: all are gathered, so nothing is sent */
    OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, NULL, COUNT));
    CHECK(r, stats_of(r).gathers == COUNT && stats_of(r).gather_hits == 1 + COUNT);
    CHECK(r, traced(r, DC_OP_PREFETCH_PARAMS_FUSED, 1) == 0);
  }
  use_all(r, p, NULL);
}

static void check_52_what_is_there_is_skipped(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, some_are_there, NULL);
}

#ifndef ON_SIM
/* The same as the communicator sees it: one comparison and one all-gather for all parameters, and none if there is
 * nothing to gather. */
static void counted_groups(rank *r) {
  echo e = {0};
  dc_comm *comm;
  rank two = *r;
  param p[COUNT];
  int64_t ids[COUNT];
  two.world = 2;
  if (echo_is_without_cards(r)) {
    return;
  }
  OK(r, echo_comm(&e, &comm));
  OK(r, dc_context_create(r->device, NULL, &two.ctx));
  OK(r, dc_init(two.ctx, comm, NULL, 10));
  register_all(&two, p, ids, 40);
  CHECK(r, two.failure[0] == '\0');
  int before = atomic_load(&e.gathers);
  for (int round = 0; round < 2; round++) {
    OK(r, dc_prefetch_params_fused(two.ctx, GRAPH, ids, NULL, COUNT));
    for (int64_t i = 0; i < COUNT; i++) {
      OK(r, dc_wait_allgather(two.ctx, NULL, GRAPH, i));
    }
    CHECK(r, atomic_load(&e.gathers) == before + 2);
  }
  dc_context_destroy(two.ctx);
  dc_comm_destroy(comm);
}

static void check_51_52_groups_as_the_communicator_sees_them(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, counted_groups, NULL);
}
#endif

static void mixed_types(rank *r) {
  static const int32_t dtypes[COUNT] = {DC_BFLOAT16, DC_DTYPE_NONE, DC_FLOAT16, DC_BFLOAT16, DC_FLOAT64, DC_FLOAT32};
  param p[COUNT];
  int64_t ids[COUNT];
  register_all(r, p, ids, 64);
  CHECK(r, r->failure[0] == '\0');
  for (int step = 0; step < 3; step++) {
    OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, dtypes, COUNT));
    use_all(r, p, dtypes);
    CHECK(r, r->failure[0] == '\0');
  }
}

static void check_53_each_in_its_type(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, mixed_types, NULL);
  on_ranks((setup){.world = 3}, mixed_types, NULL);
}

static void empty_list(rank *r) {
  param p[COUNT];
  int64_t ids[COUNT];
  register_all(r, p, ids, 8);
  CHECK(r, r->failure[0] == '\0');
  if (r->rank == 0) {
    OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, NULL, NULL, 0));
    OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, NULL, 0));
    CHECK(r, stats_of(r).gathers == 0 && traced(r, DC_OP_PREFETCH_PARAMS_FUSED, 1) == 0);
  }
  use_all(r, p, NULL);
}

static void check_55_an_empty_prefetch_does_nothing(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, empty_list, NULL);
}

/* An unknown id, and memory that runs out at the first parameter or at the last: nothing is gathered and nothing stays
 * allocated. The next prefetch works, which it would not if a group had been left open. */
static void fails_in_the_middle(rank *r) {
  param p[COUNT];
  int64_t ids[COUNT], wrong[COUNT];
  register_all(r, p, ids, 64);
  CHECK(r, r->failure[0] == '\0');
  memcpy(wrong, ids, sizeof wrong);
  wrong[COUNT / 2] = 99;
  FAILS(r, dc_prefetch_params_fused(r->ctx, GRAPH, wrong, NULL, COUNT), DC_E_NOT_FOUND, "id = 99");
  CHECK(r, stats_of(r).gathers == 0 && stats_of(r).gathered_bytes == 0);
  watch *w = watch_device(r);
  atomic_store(&w->refuse[DC_MEMORY_DEVICE], 1); /* the first block of gathered weights needs a new chunk */
  FAILS(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, NULL, COUNT), DC_E_NO_MEMORY, "the test refuses");
  CHECK(r, stats_of(r).gathers == 0 && stats_of(r).gathered_bytes == 0);
  atomic_store(&w->refuse[DC_MEMORY_DEVICE], 0);
  OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, NULL, COUNT));
  use_all(r, p, NULL);
  CHECK(r, r->failure[0] == '\0' && stats_of(r).gathered_bytes == 0);
  /* By now the arena has a chunk, which a larger parameter behind the others overflows. */
  const int64_t large = INT64_C(3) << 20, chunk = ceil_div(large, r->world);
  array shard;
  OK(r, new_array(r, &shard, chunk, DC_FLOAT32));
  dc_tensor t = tensor_of(&shard);
  OK(r, dc_register_z3_param(r->ctx, 50, &large, 1, &t, NULL, 0, 0));
  memcpy(wrong, ids, sizeof wrong);
  wrong[COUNT - 1] = 50;
  OK(r, register_graph(r, GRAPH + 1, 3, wrong, COUNT));
  atomic_store(&w->refuse[DC_MEMORY_DEVICE], 1);
  FAILS(r, dc_prefetch_params_fused(r->ctx, GRAPH + 1, wrong, NULL, COUNT), DC_E_NO_MEMORY, "the test refuses");
  CHECK(r, stats_of(r).gathers == COUNT && stats_of(r).gathered_bytes == 0);
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 0), DC_E_STATE, "is not gathered");
  atomic_store(&w->refuse[DC_MEMORY_DEVICE], 0);
  OK(r, dc_prefetch_params_fused(r->ctx, GRAPH + 1, wrong, NULL, COUNT));
  for (int64_t i = 0; i < COUNT; i++) {
    OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH + 1, wrong[i]));
  }
}

static void check_56_a_prefetch_that_fails_leaves_nothing(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, fails_in_the_middle, NULL);
}

/* A group with two kinds of collectives cannot start: its end returns the error, closes the group, and has done
 * nothing. */
static void group_of_two_kinds(rank *r) {
  array own, whole, part;
  double values[2] = {r->rank + 1, 10 * (r->rank + 1)}, both[4] = {1, 10, 2, 20};
  OK(r, new_array(r, &own, 2, DC_FLOAT32));
  OK(r, new_array(r, &whole, 4, DC_FLOAT32));
  OK(r, new_array(r, &part, 2, DC_FLOAT32));
  OK(r, write_to(r, own.data, DC_FLOAT32, values, 2));
  dc_tensor m = tensor_of(&own), w = tensor_of(&whole), p = tensor_of(&part);
  dc_stream *stream; /* needed, since the calling thread cannot access every device's memory */
  OK(r, new_stream(r, &stream));
  OK(r, dc_comm_group_begin(r->comm));
  OK(r, dc_comm_all_gather(r->comm, &m, &w, NULL, stream));
  OK(r, dc_comm_reduce_scatter(r->comm, &w, &p, NULL, DC_SUM, stream));
  CHECK(r, dc_comm_group_end(r->comm, NULL) == DC_E_INVALID);
  CHECK(r, is_all(r, &whole, 0) && is_all(r, &part, 0));
  FAILS(r, dc_comm_group_end(r->comm, NULL), DC_E_STATE, "no group");
  OK(r, dc_comm_all_gather(r->comm, &m, &w, NULL, stream));
  OK(r, dc_stream_synchronize(stream, 0));
  CHECK(r, holds(r, whole.data, DC_FLOAT32, both, 4));
}

static void check_56_a_group_that_fails_is_closed(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, group_of_two_kinds, NULL);
}

/* The parameters are released while the gather is still in flight: their memory is freed when it is complete, not
 * before. */
static void released_unread(rank *r) {
  param p[COUNT];
  int64_t ids[COUNT];
  register_all(r, p, ids, 64);
  CHECK(r, r->failure[0] == '\0');
  if (r->rank != 0) {
    OK(r, await_flag());
  }
  OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, NULL, COUNT));
  for (int64_t i = 0; i < COUNT; i++) {
    OK(r, dc_release_param(r->ctx, NULL, GRAPH, i, 1));
  }
  if (r->rank == 0) {
    CHECK(r, stats_of(r).gathered_bytes >= COUNT * 256); /* the others have not begun yet */
    raise_flag();
  }
  for (int step = 0; step < 4; step++) {
    OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, NULL, COUNT));
    for (int64_t i = 0; i < COUNT; i++) {
      OK(r, dc_release_param(r->ctx, NULL, GRAPH, i, 1));
    }
  }
  use_all(r, p, NULL);
  CHECK(r, r->failure[0] == '\0');
}

static void check_57_memory_stays_until_the_gather_is_complete(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, released_unread, NULL);
  on_ranks((setup){.world = 3}, released_unread, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_51_a_prefetch_is_one_group),
      cmocka_unit_test(check_52_what_is_there_is_skipped),
#ifndef ON_SIM
      cmocka_unit_test(check_51_52_groups_as_the_communicator_sees_them),
#endif
      cmocka_unit_test(check_53_each_in_its_type),
      cmocka_unit_test(check_55_an_empty_prefetch_does_nothing),
      cmocka_unit_test(check_56_a_prefetch_that_fails_leaves_nothing),
      cmocka_unit_test(check_56_a_group_that_fails_is_closed),
      cmocka_unit_test(check_57_memory_stays_until_the_gather_is_complete),
  };
  return cmocka_run_group_tests_name("conformance: prefetch", tests, NULL, NULL);
}
