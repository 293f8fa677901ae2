/* Failures of communicators in two levels: all ranks get one error, from whichever part it comes. */
#include "comm_checks.h"
#include "leftovers.h"
#include "nodes.h"

#include <signal.h>

#include "comm/split.h"

/* ---- failures ---- */

/* Rank 3 aborts between two reductions: all ranks get its reason. */
static int learns_of_an_abort(dc_comm *comm, void *arg) {
  const int64_t count = 400000;
  float *data = calloc((size_t)count, sizeof *data);
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  dc_status status = DC_OK;
  (void)arg;
  for (int i = 0; status == DC_OK; i++) {
    if (i == 3 && dc_comm_rank(comm) == 3) {
      dc_comm_abort(comm, "rank 3 has enough");
    }
    status = dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL);
  }
  free(data);
  CHECK(status == DC_E_ABORTED);
  CHECK_SAYS("rank 3 aborted the group: rank 3 has enough");
  return 0;
}

static int learns_of_a_mismatch(dc_comm *comm, void *arg) {
  const int64_t count = 100000 + (dc_comm_rank(comm) == 3);
  float *data = calloc((size_t)count, sizeof *data);
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  (void)arg;
  CHECK(dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL) == DC_E_MISMATCH);
  CHECK_SAYS("rank 3 called all_reduce (100001 elements, float32, sum)");
  free(data);
  return 0;
}

/* Rank 3 aborts its column, though all ranks live: the whole group and the other column fail with the same reason. */
static int learns_of_a_column(dc_comm *comm, void *arg) {
  const int64_t count = 100000;
  float *data = calloc((size_t)count, sizeof *data);
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  dc_comm *column = ((const dc__levels *)comm)->column;
  (void)arg;
  if (dc_comm_rank(comm) == 3) {
    dc_comm_abort(column, "the cable is out");
  }
  CHECK(dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL) == DC_E_ABORTED);
  CHECK_SAYS("the cable is out");
  free(data);
  return 0;
}

static void test_failures(void **state) {
  static const layout two_by_two = {4, 2, 2};
  (void)state;
  assert_int_equal(on_nodes(&two_by_two, learns_of_an_abort, NULL), 0);
  assert_int_equal(on_nodes(&two_by_two, learns_of_a_mismatch, NULL), 0);
  assert_int_equal(on_nodes(&two_by_two, learns_of_a_column, NULL), 0);
}

static atomic_int begins, ends;

/* Rank 0 waits in its block or column for ranks that do not come. Rank 3, which is in neither, aborts meanwhile. */
static int waits_in_a_part(dc_comm *comm, void *arg) {
  const bool *in_block = arg;
  const dc__levels *self = (const dc__levels *)comm;
  const int32_t rank = dc_comm_rank(comm);
  dc_status status = dc_comm_barrier(comm); /* rank 3's abort may already end it on other ranks, but not on rank 0 */
  if (rank == 0) {
    atomic_store(&begins, 1);
    status = status != DC_OK ? status : dc_comm_barrier(*in_block ? self->block : self->column);
    atomic_store(&ends, 1);
  }
  while (rank == 3 && atomic_load(&begins) == 0) {
    sleep_ms(1);
  }
  if (rank == 3) {
    dc_comm_abort(comm, "the cable is out");
  }
  CHECK(rank != 0 || status == DC_E_ABORTED);
  while (atomic_load(&ends) == 0 || dc_comm_check(comm) == DC_OK) {
    sleep_ms(1);
  }
  CHECK(dc_comm_check(comm) == DC_E_ABORTED);
  CHECK_SAYS("rank 3 aborted the group: the cable is out");
  return 0;
}

static void test_an_abort_ends_a_parts_wait(void **state) {
  static const layout two_by_two = {4, 2, 2};
  (void)state;
  for (int i = 0; i < 2; i++) {
    bool in_block = i == 0;
    atomic_store(&begins, 0);
    atomic_store(&ends, 0);
    assert_int_equal(on_nodes(&two_by_two, waits_in_a_part, &in_block), 0);
  }
}

static dc_comm *parent_of_rank_0; /* belongs to another group, which fails alone */

/* Rank 1 has agreed with the others, but does not join its block until rank 0 has ended. */
static void comes_too_late(dc_comm *block, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                           int32_t count) {
  (void)block, (void)stream, (void)tag, (void)items, (void)count;
  dc_comm_abort(parent_of_rank_0, "the building is on fire");
  while (atomic_load(&ends) == 0) {
    sleep_ms(1);
  }
}

/* The parent's reason is passed on unchanged, since its ranks are not numbered as the block's. */
static int learns_of_a_parent(dc_comm *comm, void *arg) {
  const int64_t count = 400000;
  float *data = calloc((size_t)count, sizeof *data);
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  dc_comm *block = ((const dc__levels *)comm)->block;
  const dc__comm_ops *ops = block->ops;
  dc__comm_ops late = *ops;
  const int32_t rank = dc_comm_rank(comm);
  (void)arg;
  late.reduce_scatter = comes_too_late;
  if (rank == 0) {
    dc__comm_set_parent(comm, parent_of_rank_0);
  } else if (rank == 1) {
    block->ops = &late;
  }
  CHECK(dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL) == DC_E_ABORTED);
  CHECK_SAYS("rank 0 aborted the group: the building is on fire");
  CHECK(strstr(dc_last_error(), "among ranks") == NULL);
  if (rank == 0) {
    atomic_store(&ends, 1);
  }
  block->ops = ops;
  free(data);
  return 0;
}

static void test_a_parents_reason(void **state) {
  static const layout two_by_two = {4, 2, 2};
  (void)state;
  atomic_store(&ends, 0);
  assert_int_equal(dc__comm_create_self(&parent_of_rank_0), DC_OK);
  assert_int_equal(on_nodes(&two_by_two, learns_of_a_parent, NULL), 0);
  dc_comm_destroy(parent_of_rank_0);
}

/* ---- errors of a part ---- */

typedef struct part_error {
  bool in_block;
  dc_status status;
} part_error;

/* A block or column fails, which the whole group does not notice by itself. */
static int learns_of_the_error(dc_comm *comm, void *arg) {
  const part_error *error = arg;
  const int64_t count = 100000;
  float *data = calloc((size_t)count, sizeof *data);
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  const dc__levels *self = (const dc__levels *)comm;
  if (dc_comm_rank(comm) == 3) {
    dc_comm *part = error->in_block ? self->block : self->column;
    part->ops->fail_group(part, dc__fail(error->status, "one part is not well"));
  }
  CHECK(dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL) == error->status);
  CHECK_SAYS(error->in_block ? "among ranks 2 to 3 of one machine: one part is not well"
                             : "among ranks 1, 3, ... of all machines: one part is not well");
  CHECK(dc_comm_check(comm) == error->status && dc_comm_check(self->whole) == error->status);
  free(data);
  return 0;
}

static void test_a_parts_error_is_all_ranks(void **state) {
  static const layout two_by_two = {4, 2, 2};
  static const dc_status statuses[] = {DC_E_TIMEOUT, DC_E_CORRUPT, DC_E_PEER_DEAD};
  (void)state;
  for (size_t i = 0; i < DC__COUNT(statuses); i++) {
    for (int in_block = 0; in_block < 2; in_block++) {
      part_error error = {in_block == 1, statuses[i]};
      assert_int_equal(on_nodes(&two_by_two, learns_of_the_error, &error), 0);
    }
  }
}

static dc_status (*real_split)(dc_comm *comm, const dc__split *split, dc_comm **part);

static dc_status fail_to_split(dc_comm *comm, const dc__split *split, dc_comm **part) {
  dc_status status = real_split(comm, split, part);
  dc__comm_release(*part);
  *part = NULL;
  return status != DC_OK ? status : dc__fail(DC_E_SYSTEM, "no more descriptors");
}

/* Rank 3 is alone in a part and fails; by then the others have made their part. */
static int fails_to_split(dc_comm *comm, void *arg) {
  dc_comm *whole = ((dc__levels *)comm)->whole, *part = NULL;
  const bool fails = dc_comm_rank(comm) == 3;
  const dc__comm_ops *ops = whole->ops;
  dc__comm_ops failing = *ops;
  (void)arg;
  failing.split = fail_to_split;
  if (fails) {
    real_split = ops->split;
    whole->ops = &failing;
  }
  for (int i = 0; i < 3; i++) {
    CHECK(dc_comm_split(comm, fails, 0, &part) == DC_E_SYSTEM && part == NULL);
    CHECK_SAYS(fails ? "no more descriptors" : "rank 3 could not make its communicator");
  }
  whole->ops = ops;
  CHECK_OK(dc_comm_barrier(comm));
  return 0;
}

static void test_a_failed_split_leaves_nothing(void **state) {
  static const layout two_by_two = {4, 2, 2};
  (void)state;
  const int threads = count_entries("/proc/self/task", "");
  assert_int_equal(on_nodes(&two_by_two, fails_to_split, NULL), 0);
  assert_int_equal(count_entries("/proc/self/task", ""), threads);
}

static dc_status fail_to_copy(dc_comm *comm, dc_comm **copy) {
  (void)comm, (void)copy;
  return dc__fail(DC_E_SYSTEM, "no more channels");
}

/* Rank 2 cannot copy its block; rank 0 waits for it in the copy of their column. */
static int fails_to_copy(dc_comm *comm, void *arg) {
  dc_comm *block = ((const dc__levels *)comm)->block, *copy = NULL;
  const bool fails = dc_comm_rank(comm) == 2;
  const dc__comm_ops *ops = block->ops;
  dc__comm_ops failing = *ops;
  (void)arg;
  failing.dup = fail_to_copy;
  block->ops = fails ? &failing : ops;
  const dc_status status = dc_comm_dup(comm, &copy); /* the other column's ranks may finish before the failure */
  CHECK(status == (fails ? DC_E_SYSTEM : DC_E_ABORTED) || (status == DC_OK && dc_comm_rank(comm) % 2 == 1));
  block->ops = ops;
  while (dc_comm_check(comm) == DC_OK) {
    sleep_ms(1);
  }
  CHECK_SAYS("no more channels");
  dc_comm_destroy(copy);
  return 0;
}

static void test_a_failed_copy_is_all_ranks(void **state) {
  static const layout two_by_two = {4, 2, 2};
  (void)state;
  assert_int_equal(on_nodes(&two_by_two, fails_to_copy, NULL), 0);
}

/* ---- checksums ---- */

/* The column has no checksums, as MPI has none because libdc does not see its data. Then no part is verified. */
static int refuses_checksums(dc_comm *comm, void *arg) {
  dc__levels *self = (dc__levels *)comm;
  const dc__comm_ops *ops = self->column->ops;
  dc__comm_ops unseen = *ops;
  (void)arg;
  unseen.set_checksums = NULL;
  self->column->ops = &unseen;
  CHECK(dc_comm_set_checksums(comm, 1) == DC_E_UNSUPPORTED);
  CHECK_SAYS("dc_comm_set_checksums: ranks of several machines exchange data over");
  self->column->ops = ops;
  CHECK_OK(dc_comm_set_checksums(comm, 1));
  return 0;
}

static void test_unverified_parts(void **state) {
  static const layout two_by_two = {4, 2, 2};
  (void)state;
  assert_int_equal(on_nodes(&two_by_two, refuses_checksums, NULL), 0);
}

/* Rank 3's process is killed between two reductions. */
static int loses_a_rank(dc_comm *comm, void *arg) {
  const int64_t count = 400000, begun = dc__now_ns();
  float *data = calloc((size_t)count, sizeof *data);
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  dc_status status = DC_OK;
  (void)arg;
  for (int i = 0; status == DC_OK; i++) {
    if (i == 3 && dc_comm_rank(comm) == 3) {
      raise(SIGKILL);
    }
    status = dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL);
  }
  free(data);
  CHECK(status == DC_E_PEER_DEAD && within(begun, 0, 20000));
  CHECK_SAYS("rank 3 died");
  return 0;
}

static void test_a_killed_rank(void **state) {
  static const layout two_by_two = {4, 2, 2};
  char name[64], address[64];
  pid_t children[4];
  (void)state;
  fresh_name(name);
  fresh_address(address);
  for (int32_t r = 0; r < 4; r++) {
    node_job job = {&two_by_two, name, address, r, loses_a_rank, NULL, 0};
    fflush(NULL);
    children[r] = fork();
    if (children[r] == 0) {
      run_on_node(&job);
      _exit(job.result);
    }
  }
  for (int32_t r = 0; r < 4; r++) {
    assert_int_equal(end_rank(children[r]), r == 3 ? -SIGKILL : 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_failures),
      cmocka_unit_test(test_an_abort_ends_a_parts_wait),
      cmocka_unit_test(test_a_parents_reason),
      cmocka_unit_test(test_a_parts_error_is_all_ranks),
      cmocka_unit_test_setup_teardown(test_a_failed_split_leaves_nothing, leftovers_note, leftovers_compare),
      cmocka_unit_test(test_a_failed_copy_is_all_ranks),
      cmocka_unit_test(test_unverified_parts),
      cmocka_unit_test(test_a_killed_rank),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
