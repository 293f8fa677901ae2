/* Parts of communicators: ranks and their order on every transport, parts of parts, copies, contexts on them, ranks in
 * no part, and errors. */
#include "comm_checks.h"
#include "comm_trainer.h"

#include <errno.h>
#include <sys/mman.h>

#include "comm/shm/shm.h"
#include "comm/split.h"
#include "comm/tcp/tcp.h"

/* Splits odd from even ranks, each in reverse order; with more than three ranks the last is in no part. */
static int split_in_two(dc_comm *comm, dc_comm **part) {
  const int32_t rank = dc_comm_rank(comm), world = dc_comm_size(comm);
  const bool left_out = world > 3 && rank == world - 1;
  CHECK_OK(dc_comm_split(comm, left_out ? -1 : rank % 2, -rank, part));
  CHECK((*part == NULL) == left_out);
  return 0;
}

static int has_the_right_ranks(dc_comm *comm, dc_comm *part) {
  const int32_t rank = dc_comm_rank(comm), world = dc_comm_size(comm) - (dc_comm_size(comm) > 3);
  const int32_t members = (world + 1 - rank % 2) / 2;
  int64_t own = rank, one = 1, count = members, ranks[DC__COMM_MAX_WORLD];
  const dc_tensor from = flat(&own, &one, DC_INT64);
  dc_tensor to = flat(ranks, &count, DC_INT64);
  CHECK(dc_comm_size(part) == members);
  CHECK_OK(dc_comm_all_gather(part, &from, &to, NULL, NULL));
  for (int32_t r = 0; r < members; r++) {
    CHECK(ranks[r] % 2 == rank % 2 && (r == 0 || ranks[r] < ranks[r - 1]));
  }
  CHECK(ranks[dc_comm_rank(part)] == rank);
  return 0;
}

static int has_the_bits(dc_comm *part) {
  int64_t counts[DC__COMM_MAX_WORLD];
  for (int kind = 0; kind < SPLITS; kind++) {
    const int64_t total = split(kind, kind == 1 ? 200003 : 1001, dc_comm_size(part), counts);
    CHECK(gather_one(part, DC_FLOAT32, counts, total, kind == 0) == 0);
    CHECK(reduce_one(part, DC_BFLOAT16, counts, total, DC_MEAN) == 0);
  }
  return 0;
}

static int use_parts(dc_comm *comm, void *arg) {
  dc_comm *part = NULL, *copy = NULL, *alone = NULL;
  CHECK(split_in_two(comm, &part) == 0);
  if (part != NULL) {
    CHECK(has_the_right_ranks(comm, part) == 0 && has_the_bits(part) == 0);
    CHECK_OK(dc_comm_dup(part, &copy));
    CHECK(broadcast_all_roots(copy, arg) == 0);
    CHECK_OK(dc_comm_split(copy, dc_comm_rank(copy), 0, &alone)); /* a part of a part */
    CHECK(dc_comm_size(alone) == 1 && without_counts(alone, arg) == 0);
  }
  CHECK(without_counts(comm, arg) == 0); /* the communicator still works, beside its parts */
  dc_comm_destroy(alone);
  dc_comm_destroy(copy);
  dc_comm_destroy(part);
  return 0;
}

static void test_parts(void **state) {
  (void)state;
  on_all_groups(use_parts, NULL);
}

/* ---- contexts on parts ---- */

static int train_in_parts(dc_comm *comm, void *arg) {
  uint64_t *hashes = arg, own[2];
  dc_comm *part = NULL;
  CHECK_OK(dc_comm_split(comm, dc_comm_rank(comm) / 2, 0, &part));
  CHECK(train_and_hash(part, own) == 0);
  hashes[dc_comm_rank(comm)] = own[dc_comm_rank(part)];
  dc_comm_destroy(part);
  return 0;
}

/* Each part trains as a communicator of two ranks does. */
static void test_contexts_on_parts(void **state) {
  uint64_t alone[2], threads[4], tcp[4];
  (void)state;
  assert_int_equal(on_threads(2, 0, train_and_hash, alone), 0);
  assert_int_equal(on_threads(4, 0, train_in_parts, threads), 0);
  assert_int_equal(on_tcp(4, 0, train_in_parts, tcp), 0);
  for (int r = 0; r < 4; r++) {
    assert_true(threads[r] == alone[0] && tcp[r] == alone[0]);
  }
}

/* ---- groups of their own ---- */

/* The odd ranks' part is aborted; the even ranks' part and the whole group go on. */
static int abort_one_part(dc_comm *comm, void *arg) {
  dc_comm *part = NULL;
  (void)arg;
  CHECK_OK(dc_comm_split(comm, dc_comm_rank(comm) % 2, 0, &part));
  if (dc_comm_rank(comm) == 1) {
    dc_comm_abort(part, "a test");
  }
  CHECK_OK(dc_comm_barrier(comm));
  CHECK(dc_comm_barrier(part) == (dc_comm_rank(comm) % 2 == 1 ? DC_E_ABORTED : DC_OK));
  CHECK_OK(dc_comm_barrier(comm));
  dc_comm_destroy(part);
  return 0;
}

static void test_a_part_fails_alone(void **state) {
  (void)state;
  assert_int_equal(on_threads(4, 0, abort_one_part, NULL), 0);
  assert_int_equal(on_processes(4, 0, abort_one_part, NULL), 0);
  assert_int_equal(on_tcp(4, 0, abort_one_part, NULL), 0);
}

/* ---- errors ---- */

/* The leader's exchange fails, since the other rank has aborted. The part's control block lives as long as the
 * group. */
static int fail_in_the_exchange(dc_comm *comm, void *arg) {
  dc__shm_control **kept = arg;
  const int32_t members[] = {0, 1};
  const dc__split split = {.rank = 0, .world = 2, .leader = 0, .members = members};
  dc_comm *part = NULL;
  if (dc_comm_rank(comm) == 1) {
    dc_comm_abort(comm, "a test");
    return 0;
  }
  CHECK(comm->ops->split(comm, &split, &part) == DC_E_ABORTED && part == NULL);
  *kept = atomic_load(&((dc__shm *)comm)->group->control->unused);
  CHECK(*kept != NULL && (*kept)->world == 2);
  return 0;
}

static void test_a_failed_exchange_leaves_nothing(void **state) {
  dc__shm_control *control = NULL;
  (void)state;
  assert_int_equal(on_threads(2, 60000 * MS, fail_in_the_exchange, &control), 0);
  assert_true(msync(control, 1, MS_ASYNC) == -1 && errno == ENOMEM); /* no longer mapped */
}

static int refuse_bad_arguments(dc_comm *comm, void *arg) {
  dc_comm *part = comm;
  (void)arg;
  CHECK(dc_comm_split(comm, 0, 0, NULL) == DC_E_INVALID);
  CHECK(dc_comm_split(NULL, 0, 0, &part) == DC_E_INVALID && part == NULL);
  CHECK(dc_comm_split(comm, -2, 0, &part) == DC_E_INVALID && part == NULL);
  CHECK_SAYS("dc_comm_split: color = -2, must be >= 0, or -1 for no communicator");
  return 0;
}

static void test_bad_arguments(void **state) {
  (void)state;
  assert_int_equal(on_threads(1, 0, refuse_bad_arguments, NULL), 0);
}

/* Rank 1's bad argument is an error on every rank; only rank 1's text does not name the rank. The next split works. */
static int refuse_one_rank_s_arguments(dc_comm *comm, void *arg) {
  const bool is_bad = dc_comm_rank(comm) == 1;
  dc_comm *part = comm;
  (void)arg;
  CHECK(dc_comm_split(comm, is_bad ? -2 : 0, 0, &part) == DC_E_INVALID && part == NULL);
  CHECK_SAYS(is_bad ? "dc_comm_split: color = -2, must be >= 0, or -1 for no communicator"
                    : "dc_comm_split: rank 1's color = -2, must be >= 0, or -1 for no communicator");
  CHECK(dc_comm_split(comm, 0, 0, is_bad ? NULL : &part) == DC_E_INVALID && part == NULL);
  CHECK_SAYS(is_bad ? "dc_comm_split: part is NULL" : "dc_comm_split: rank 1's part is NULL");
  CHECK_OK(dc_comm_split(comm, 0, 0, &part));
  CHECK(dc_comm_size(part) == dc_comm_size(comm) && without_counts(part, arg) == 0);
  dc_comm_destroy(part);
  return 0;
}

static void test_bad_arguments_are_all_ranks(void **state) {
  (void)state;
  assert_int_equal(on_threads(3, 0, refuse_one_rank_s_arguments, NULL), 0);
  assert_int_equal(on_processes(2, 0, refuse_one_rank_s_arguments, NULL), 0);
  assert_int_equal(on_tcp(3, 0, refuse_one_rank_s_arguments, NULL), 0);
}

/* Rank 1's step fails: all ranks learn that it was rank 1's, and rank 1 learns why. */
static int agree_on_a_failure(dc_comm *comm, void *arg) {
  (void)arg;
  const bool fails = dc_comm_rank(comm) == 1;
  CHECK_OK(dc__split_agree("dc_comm_split", comm, DC_OK));
  CHECK(dc__split_agree("dc_comm_split", comm, fails ? dc__fail(DC_E_SYSTEM, "no more descriptors") : DC_OK) ==
        DC_E_SYSTEM);
  if (fails) {
    CHECK_SAYS("no more descriptors");
  } else {
    CHECK_SAYS("dc_comm_split: rank 1 could not make its communicator");
  }
  CHECK_OK(dc_comm_barrier(comm));
  return 0;
}

static void test_a_failure_is_all_ranks(void **state) {
  (void)state;
  assert_int_equal(on_threads(3, 0, agree_on_a_failure, NULL), 0);
}

/* Some ranks call a barrier instead. */
static int split_beside_a_barrier(dc_comm *comm, void *arg) {
  dc_comm *part = NULL;
  (void)arg;
  CHECK((dc_comm_rank(comm) == 0 ? dc_comm_split(comm, 0, 0, &part) : dc_comm_barrier(comm)) == DC_E_MISMATCH);
  CHECK_SAYS("split");
  return 0;
}

static void test_a_mismatch(void **state) {
  (void)state;
  assert_int_equal(on_threads(2, 0, split_beside_a_barrier, NULL), 0);
  assert_int_equal(on_tcp(2, 0, split_beside_a_barrier, NULL), 0);
}

/* ---- TCP ---- */

/* A part listens where its group does: without a secret, at loopback. A part of a group with a secret has its own
 * key. */
static int keeps_what_the_group_has(dc_comm *comm, void *arg) {
  const dc__tcp_group *group = ((dc__tcp *)comm)->group, *own;
  dc_comm *part = NULL, *copy = NULL;
  CHECK_OK(dc_comm_split(comm, 0, -dc_comm_rank(comm), &part));
  own = ((dc__tcp *)part)->group;
  CHECK(own->sealed == (arg != NULL) && own->heartbeat_ns == group->heartbeat_ns);
  CHECK(!own->sealed || memcmp(own->key, group->key, sizeof own->key) != 0);
  CHECK(own->sealed || dc__tcp_is_loopback(own->listens_at));
  CHECK_OK(dc_comm_dup(part, &copy));
  CHECK_OK(dc_comm_barrier(copy));
  dc_comm_destroy(copy);
  dc_comm_destroy(part);
  return 0;
}

static void test_secret_and_place(void **state) {
  char name[64], address[64];
  const dc_comm_options options = {.struct_size = sizeof options, .secret = "a secret of the test"};
  tcp_job jobs[3];
  pthread_t threads[3];
  (void)state;
  assert_int_equal(on_tcp(3, 0, keeps_what_the_group_has, NULL), 0);
  fresh_name(name);
  fresh_address(address);
  for (int32_t r = 0; r < 3; r++) {
    jobs[r] = (tcp_job){address, name, r, 3, &options, keeps_what_the_group_has, address, 0};
    pthread_create(&threads[r], NULL, tcp_rank, &jobs[r]);
  }
  for (int32_t r = 0; r < 3; r++) {
    pthread_join(threads[r], NULL);
    assert_int_equal(jobs[r].result, 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_parts),
      cmocka_unit_test(test_contexts_on_parts),
      cmocka_unit_test(test_bad_arguments),
      cmocka_unit_test(test_bad_arguments_are_all_ranks),
      cmocka_unit_test(test_a_part_fails_alone),
      cmocka_unit_test(test_a_failed_exchange_leaves_nothing),
      cmocka_unit_test(test_a_mismatch),
      cmocka_unit_test(test_a_failure_is_all_ranks),
      cmocka_unit_test(test_secret_and_place),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
