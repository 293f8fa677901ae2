/* More processes over TCP than a mesh can have: much data of every type and split, and trainings at each stage, with
 * replicas and on parts. With two levels, the columns are overlays too. */
#include "replica_trainer.h"

#include <sys/mman.h>

#include "comm/levels/levels.h"
#include "comm/tcp/tcp.h"
#include "leftovers.h"
#include "sanitized.h"

#ifdef SANITIZED
enum { COLUMN = 8, TRAININGS = 1, ALIKE = 1, ELEMENTS = 20011 };
#else
enum { COLUMN = DC__TCP_MAX_MESH + 1, TRAININGS = 3, ALIKE = 2, ELEMENTS = 40009 };
#endif
enum { RANKS = DC__TCP_MAX_MESH + 2, PART = DC__TCP_MAX_MESH + 1, MOST_RANKS = 2 * PART, KINDS = DC__COUNT(dtypes) };
enum { UNEVEN = 3 }; /* kind of split: one rank has everything */

static const int64_t limit = INT64_C(300000000000);

/* Stage and replicas of each training; the first ALIKE give the same bits. Stage 1 adds 16-bit gradients over
 * micro-batches before it reduces them, so its bits differ. */
static const int32_t trainings[][2] = {{3, 2}, {2, 1}, {1, 2}};

/* The sums are computed before the ranks start. All ranks read them, and write their results to shared memory. */
typedef struct crowd {
  int32_t world, per_node; /* ranks on a machine; 0: all on this one */
  void *sums[KINDS];
  uint64_t (*hashes)[MOST_RANKS]; /* of each training and rank */
} crowd;

static int run_rank(const crowd *c, const char *address, const char *name, int32_t rank, rank_fn fn) {
  dc_comm *comm = NULL;
  char node[32];
  snprintf(node, sizeof node, "node %d", c->per_node == 0 ? 0 : rank / c->per_node);
  const dc_comm_options options = {
      .struct_size = sizeof options, .timeout_ns = limit, .node = c->per_node == 0 ? NULL : node};
  CHECK_OK(dc_comm_create_tcp(address, name, rank, c->world, &options, &comm));
  const int result = fn(comm, (void *)(uintptr_t)c);
  dc_comm_destroy(comm);
  return result;
}

static void on_tcp_processes(const crowd *c, rank_fn fn) {
  char name[64], address[64];
  pid_t children[MOST_RANKS];
  int32_t failed = 0;
  fresh_name(name);
  fresh_address(address);
  fflush(NULL);
  for (int32_t r = 0; r < c->world; r++) {
    children[r] = fork();
    assert_true(children[r] >= 0);
    if (children[r] == 0) {
      alarm(900); /* a hang ends the child */
      _exit(run_rank(c, address, name, r, fn));
    }
  }
  for (int32_t r = 0; r < c->world; r++) {
    failed += end_rank(children[r]) != 0;
  }
  assert_int_equal(failed, 0);
}

static void setup_crowd(crowd *c, int32_t world, int32_t per_node) {
  int64_t counts[DC__COMM_MAX_WORLD];
  *c = (crowd){.world = world, .per_node = per_node};
  for (int32_t d = 0; d < KINDS; d++) {
    c->sums[d] = make_reduced(dtypes[d], world, split(d % SPLITS, ELEMENTS, world, counts), false);
  }
  c->hashes = mmap(NULL, TRAININGS * sizeof *c->hashes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(c->hashes != MAP_FAILED);
}

static void teardown_crowd(crowd *c) {
  for (int32_t d = 0; d < KINDS; d++) {
    free(c->sums[d]);
  }
  munmap(c->hashes, TRAININGS * sizeof *c->hashes);
}

/* ---- data ---- */

static int sums_are_right(dc_comm *comm, const crowd *c, int32_t d) {
  int64_t counts[DC__COMM_MAX_WORLD];
  const int64_t total = split(d % SPLITS, ELEMENTS, c->world, counts);
  const size_t size = dc_dtype_size(dtypes[d]), own = (size_t)counts[comm->rank] * size;
  char *send = make(dtypes[d], comm->rank, total), *part = malloc(own + 1);
  const char *sums = c->sums[d];
  const dc_tensor from = flat(send, &total, dtypes[d]);
  dc_tensor to = flat(part, &counts[comm->rank], dtypes[d]), whole = from;
  CHECK_OK(dc_comm_reduce_scatter(comm, &from, &to, counts, DC_SUM, NULL));
  CHECK(memcmp(part, sums + (size_t)begin_of(counts, comm->rank) * size, own) == 0);
  memset(send, 0, (size_t)total * size);
  CHECK_OK(dc_comm_all_gather(comm, &to, &whole, counts, NULL));
  CHECK(memcmp(send, sums, (size_t)total * size) == 0);
  CHECK_OK(dc_comm_broadcast(comm, &whole, comm->world / 3, NULL));
  CHECK(memcmp(send, sums, (size_t)total * size) == 0);
  free(send);
  free(part);
  return 0;
}

/* A broadcast in which each rank forwards a part. */
static int is_sent_on(dc_comm *comm) {
  const int64_t bytes = (INT64_C(8) << 10) * (comm->world - 1) + 5;
  char *sent = make(DC_INT8, 7, bytes), *got = calloc((size_t)bytes, 1);
  if (comm->rank == 2) {
    memcpy(got, sent, (size_t)bytes);
  }
  dc_tensor whole = flat(got, &bytes, DC_INT8);
  CHECK_OK(dc_comm_broadcast(comm, &whole, 2, NULL));
  CHECK(memcmp(got, sent, (size_t)bytes) == 0);
  free(sent);
  free(got);
  return 0;
}

/* ---- trainings ---- */

/* All ranks must have the same weights after each of these trainings. */
static void expect_one_hash(const crowd *c, int32_t world, int32_t first, int32_t last) {
  for (int32_t i = first; i <= last; i++) {
    for (int32_t r = 0; r < world; r++) {
      assert_true(c->hashes[i][r] == c->hashes[first][0] && c->hashes[i][r] != 0);
    }
  }
}

static int use_all(dc_comm *comm, void *arg) {
  const crowd *c = arg;
  for (int32_t d = 0; d < KINDS; d++) {
    CHECK(sums_are_right(comm, c, d) == 0);
  }
  CHECK(is_sent_on(comm) == 0);
  for (int32_t i = 0; i < TRAININGS; i++) {
    setting s = {.stage = trainings[i][0], .replicas = trainings[i][1], .hashes = c->hashes[i]};
    CHECK(train(comm, &s) == 0);
  }
  return 0;
}

static void test_data_and_trainings(void **state) {
  crowd c;
  (void)state;
  setup_crowd(&c, RANKS, 0);
  on_tcp_processes(&c, use_all);
  expect_one_hash(&c, RANKS, 0, ALIKE - 1);
  expect_one_hash(&c, RANKS, ALIKE, TRAININGS - 1);
  teardown_crowd(&c);
}

/* ---- two levels ---- */

static int use_levels(dc_comm *comm, void *arg) {
  CHECK(strcmp(comm->ops->name, "two levels") == 0 && ((const dc__levels *)comm)->length == 2);
  return sums_are_right(comm, arg, 0) != 0 || sums_are_right(comm, arg, UNEVEN) != 0;
}

/* With two ranks per machine, each column too has more ranks than a mesh can have. */
static void test_two_levels(void **state) {
  crowd c;
  (void)state;
  setup_crowd(&c, 2 * COLUMN, 2);
  on_tcp_processes(&c, use_levels);
  teardown_crowd(&c);
}

/* ---- parts ---- */

/* A large part with its ranks reversed, and a small one, train at once, while the whole group is used too. */
static int use_parts(dc_comm *comm, void *arg) {
  crowd own = *(const crowd *)arg;
  const bool large = comm->rank < PART;
  dc_comm *part = NULL;
  CHECK_OK(dc_comm_split(comm, large ? 0 : 1, -comm->rank, &part));
  CHECK(part->world == (large ? PART : comm->world - PART) &&
        part->rank == (large ? PART : comm->world) - 1 - comm->rank);
  setting s = {.stage = 3, .replicas = 1, .hashes = own.hashes[large ? 0 : 1]};
  CHECK(train(part, &s) == 0);
  CHECK(sums_are_right(comm, &own, 0) == 0);
  dc_comm_destroy(part);
  return 0;
}

static void test_parts(void **state) {
  crowd c;
  (void)state;
  setup_crowd(&c, RANKS + 3, 0);
  on_tcp_processes(&c, use_parts);
  expect_one_hash(&c, PART, 0, 0);
  expect_one_hash(&c, RANKS + 3 - PART, 1, 1);
  teardown_crowd(&c);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_data_and_trainings), cmocka_unit_test(test_two_levels),
                                     cmocka_unit_test(test_parts)};
  return cmocka_run_group_tests_name("tcp large group", tests, leftovers_note, leftovers_compare);
}
