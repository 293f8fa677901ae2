/* What goes wrong between ranks: every wait ends soon, on every rank with the same text, and nothing is left behind. */
#include "comm_ranks.h"
#include "entries.h"

#include <signal.h>
#include <sys/mman.h>

enum { N = 12, BIG = 300000, SOON = 30000 /* ms; the busiest machine is there before the deadline of 300 s */ };

/* The two collectives of a training step, with memory of their own. */
static dc_status gather(dc_comm *comm, int64_t id, int64_t total, int32_t dtype) {
  int32_t world = comm->world;
  dc__range ranges[DC__COMM_MAX_WORLD];
  int64_t each = (total + world - 1) / world;
  for (int32_t r = 0; r < world; r++) {
    int64_t begin = r * each < total ? r * each : total;
    ranges[r] = (dc__range){begin, total - begin < each ? total - begin : each};
  }
  char *send = calloc((size_t)each, 8);
  char *recv = calloc((size_t)total, 8);
  const dc__tag tag = {4, id, DC_OP_ALLGATHER_PARAM, NULL};
  const dc__coll_item item = {.send = send, .recv = recv, .ranges = ranges, .total = total, .id = id, .dtype = dtype};
  dc__comm_all_gather(comm, NULL, &tag, &item, 1);
  free(send);
  free(recv);
  return dc__comm_check(comm);
}

static dc_status reduce(dc_comm *comm, int64_t id, int64_t total) {
  dc__range ranges[DC__COMM_MAX_WORLD];
  for (int32_t r = 0; r < comm->world; r++) {
    ranges[r] = r == 0 ? (dc__range){0, total} : (dc__range){total, 0};
  }
  float *send = calloc((size_t)total, sizeof *send);
  float *recv = calloc((size_t)total, sizeof *recv);
  const dc__tag tag = {4, id, DC_OP_REDUCE_GRAD, NULL};
  const dc__coll_item item = {send, recv, ranges, total, id, DC_FLOAT32, DC_FLOAT32, 0, DC_MEAN};
  dc__comm_reduce_scatter(comm, NULL, &tag, &item, 1);
  free(send);
  free(recv);
  return dc__comm_check(comm);
}

/* A failed group refuses everything at once, with the same text. */
static int check_dead(dc_comm *comm, dc_status status) {
  char text[512];
  snprintf(text, sizeof text, "%s", dc_last_error());
  int64_t begin = dc__now_ns();
  CHECK(dc_comm_barrier(comm) == status);
  CHECK_SAYS(text);
  CHECK(gather(comm, 1, N, DC_FLOAT32) == status);
  CHECK(dc_comm_check(comm) == status);
  dc_comm *copy = NULL;
  CHECK(dc_comm_dup(comm, &copy) == status && copy == NULL);
  CHECK(within(begin, 0, SOON));
  return 0;
}

static void on_threads_and_processes(int32_t world, rank_fn fn, void *arg) {
  assert_int_equal(on_threads(world, 0, fn, arg), 0);
  assert_int_equal(on_processes(world, 0, fn, arg), 0);
}

/* For a rank that is to come too late, however late the others are. */
static void await_failure(dc_comm *comm) {
  while (dc_comm_check(comm) == DC_OK) { /* the test's own limit is the deadline */
    sleep_ms(1);
  }
}

/* ---- different calls ---- */

static int other_operator(dc_comm *comm, void *arg) {
  (void)arg;
  dc_status status = comm->rank == 1 ? reduce(comm, 3, BIG) : gather(comm, 5, N, DC_FLOAT32);
  CHECK(status == DC_E_MISMATCH);
  CHECK_SAYS("reduce_grad of parameter 3 (300000 elements, float32, mean)");
  CHECK_SAYS("allgather_param of parameter 5 (12 elements, float32)");
  CHECK_SAYS("rank 1 called");
  return check_dead(comm, DC_E_MISMATCH);
}

static void test_other_operator(void **state) {
  (void)state;
  on_threads_and_processes(2, other_operator, NULL);
  on_threads_and_processes(3, other_operator, NULL);
}

static int other_size(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK_OK(gather(comm, 5, N, DC_FLOAT32));
  CHECK(gather(comm, 6, N + (comm->rank == 1), DC_FLOAT32) == DC_E_MISMATCH);
  CHECK_SAYS(
      "rank 1 called allgather_param of parameter 6 (13 elements, float32) where rank 0 called "
      "allgather_param of parameter 6 (12 elements, float32)");
  return check_dead(comm, DC_E_MISMATCH);
}

static void test_other_size(void **state) {
  (void)state;
  on_threads_and_processes(2, other_size, NULL);
}

static int other_dtype(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK(gather(comm, 6, N, comm->rank == 1 ? DC_BFLOAT16 : DC_FLOAT32) == DC_E_MISMATCH);
  CHECK_SAYS("bfloat16");
  return check_dead(comm, DC_E_MISMATCH);
}

static void test_other_dtype(void **state) {
  (void)state;
  on_threads_and_processes(2, other_dtype, NULL);
}

static int other_split(dc_comm *comm, void *arg) {
  (void)arg;
  int64_t counts[2] = {3, 5};
  int64_t own = comm->rank == 0 ? 3 : 4;
  int64_t total = 8;
  if (comm->rank == 1) {
    counts[0] = counts[1] = 4;
  }
  float send[8] = {0};
  float recv[8];
  const dc_tensor from = flat(send, &own, DC_FLOAT32);
  dc_tensor to = flat(recv, &total, DC_FLOAT32);
  CHECK(dc_comm_all_gather(comm, &from, &to, counts, NULL) == DC_E_MISMATCH);
  CHECK_SAYS("all_gather (8 elements, float32), split differently");
  return check_dead(comm, DC_E_MISMATCH);
}

static void test_other_split(void **state) {
  (void)state;
  on_threads_and_processes(2, other_split, NULL);
}

static int other_root(dc_comm *comm, void *arg) {
  (void)arg;
  int64_t count = 3;
  float data[3] = {0};
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  CHECK(dc_comm_broadcast(comm, &tensor, comm->rank, NULL) == DC_E_MISMATCH);
  CHECK_SAYS("12 bytes from rank 1");
  return check_dead(comm, DC_E_MISMATCH);
}

static void test_other_root(void **state) {
  (void)state;
  on_threads_and_processes(2, other_root, NULL);
}

/* ---- too late ---- */

static int late(dc_comm *comm, void *arg) {
  (void)arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK_OK(reduce(comm, 2, N));
  int64_t begin = dc__now_ns(); /* on every rank before the first of those that wait begins, who ends it for all */
  CHECK_OK(gather(copy, 9, N, DC_FLOAT32));
  comm->timeout_ns = 500 * MS;
  if (comm->rank == 1) {
    await_failure(comm);
  }
  CHECK(gather(comm, 5, BIG, DC_FLOAT32) == DC_E_TIMEOUT);
  CHECK(within(begin, 500, SOON));
  CHECK_SAYS("waited 0.5 s at allgather_param of parameter 5");
  CHECK_SAYS("for rank 1 of 3 to come");
  CHECK_SAYS(
      "rank 1 last started reduce_grad of parameter 2 on channel 0, allgather_param of parameter 9 on channel 1");
  CHECK(dc_comm_check(copy) == DC_E_TIMEOUT); /* the group's failure */
  dc_comm_destroy(copy);
  return check_dead(comm, DC_E_TIMEOUT);
}

static void test_late(void **state) {
  (void)state;
  on_threads_and_processes(3, late, NULL);
}

/* ---- killed ---- */

/* Ranks 0 and 1 work on until rank 2 is gone. */
static int killed(dc_comm *comm, void *arg) {
  atomic_llong *death = arg;
  for (int i = 0;; i++) {
    dc_status status = i % 2 == 0 ? gather(comm, 5, BIG, DC_FLOAT32) : reduce(comm, 3, N);
    if (comm->rank == 2 && i == 21) {
      atomic_store(death, dc__now_ns());
      raise(SIGKILL);
    }
    if (status != DC_OK) {
      CHECK(status == DC_E_PEER_DEAD);
      CHECK(within(atomic_load(death), 0, SOON));
      CHECK_SAYS("rank 2 died");
      CHECK_SAYS("allgather_param of parameter 5");
      return check_dead(comm, DC_E_PEER_DEAD);
    }
  }
}

static void test_killed(void **state) {
  (void)state;
  atomic_llong *death = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  char name[64];
  pid_t children[3];
  fresh_name(name);
  for (int32_t r = 0; r < 3; r++) {
    children[r] = start_rank(name, r, 3, NULL, killed, death);
  }
  assert_int_equal(end_rank(children[2]), -SIGKILL);
  assert_int_equal(end_rank(children[0]), 0);
  assert_int_equal(end_rank(children[1]), 0);
  munmap(death, 4096);
}

static int work_until_failure(dc_comm *comm, void *arg) {
  atomic_int *working = arg;
  dc_status status = gather(comm, 5, N, DC_FLOAT32);
  atomic_fetch_add(working, 1);
  while (status == DC_OK) {
    status = gather(comm, 5, BIG * 4, DC_FLOAT32);
  }
  CHECK(status == DC_E_PEER_DEAD);
  CHECK_SAYS("rank 1");
  return 0;
}

/* At any moment, also in the middle of copying. */
static void test_killed_any_time(void **state) {
  (void)state;
  atomic_int *working = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  for (int i = 0; i < 8; i++) {
    char name[64];
    fresh_name(name);
    atomic_store(working, 0);
    pid_t stays = start_rank(name, 0, 2, NULL, work_until_failure, working);
    pid_t dies = start_rank(name, 1, 2, NULL, work_until_failure, working);
    while (atomic_load(working) < 2) {
      sleep_ms(1);
    }
    sleep_ms(i * 3);
    kill(dies, SIGKILL);
    int64_t begin = dc__now_ns();
    assert_int_equal(end_rank(dies), -SIGKILL);
    assert_int_equal(end_rank(stays), 0);
    assert_true(within(begin, 0, SOON));
  }
  munmap(working, 4096);
}

/* A process that ends without a word is as dead as one that was killed. */
static int ends_early(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK_OK(gather(comm, 5, N, DC_FLOAT32));
  if (comm->rank == 1) {
    _exit(0);
  }
  CHECK(gather(comm, 6, N, DC_FLOAT32) == DC_E_PEER_DEAD);
  CHECK_SAYS("rank 1 died (its process ended) while rank 0 waited for it at allgather_param of parameter 6");
  return 0;
}

static void test_ends_early(void **state) {
  (void)state;
  assert_int_equal(on_processes(2, 0, ends_early, NULL), 0);
}

/* ---- aborted ---- */

static void *abort_later(void *arg) {
  sleep_ms(100);
  dc_comm_abort(arg, "the loss is not a number");
  return NULL;
}

static int aborted(dc_comm *comm, void *arg) {
  (void)arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy)); /* which waits for nobody */
  int64_t begin = dc__now_ns();       /* on every rank before any has passed the barrier */
  CHECK_OK(dc_comm_barrier(comm));
  if (comm->rank == 1) {
    pthread_t thread;
    pthread_create(&thread, NULL, abort_later, copy);
    pthread_join(thread, NULL);
  } else {
    CHECK(gather(comm, 5, N, DC_FLOAT32) == DC_E_ABORTED);
  }
  CHECK(within(begin, 100, SOON));
  CHECK(dc_comm_check(copy) == DC_E_ABORTED);
  CHECK(dc_comm_check(comm) == DC_E_ABORTED);
  CHECK_SAYS("rank 1 aborted the group: the loss is not a number");
  dc_comm_destroy(copy);
  return check_dead(comm, DC_E_ABORTED);
}

static void test_aborted(void **state) {
  (void)state;
  on_threads_and_processes(3, aborted, NULL);
}

/* An abort lets nobody read memory that its owner has freed (under the address sanitizer). */
static int abort_while_reading(dc_comm *comm, void *arg) {
  (void)arg;
  pthread_t thread;
  if (comm->rank == 0) {
    pthread_create(&thread, NULL, abort_later, comm);
  }
  while (gather(comm, 5, BIG, DC_FLOAT64) == DC_OK) {
  }
  if (comm->rank == 0) {
    pthread_join(thread, NULL);
  }
  CHECK(dc_comm_check(comm) == DC_E_ABORTED);
  return 0;
}

static void test_abort_while_reading(void **state) {
  (void)state;
  on_threads_and_processes(3, abort_while_reading, NULL);
}

static void wait_until(void *flag) {
  while (!atomic_load((atomic_bool *)flag)) {
    sleep_ms(1);
  }
}

/* On streams the failure stays with the communicator, and queued work is dropped. */
static int failure_on_stream(dc_comm *comm, void *arg) {
  (void)arg;
  dc_device *device = NULL;
  dc_stream *stream = NULL;
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  CHECK_OK(dc_stream_create(device, &stream));
  int64_t count = BIG;
  float *data = calloc(BIG, sizeof *data);
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  atomic_bool all_queued = false;
  comm->timeout_ns = 400 * MS;
  CHECK_OK(dc_stream_call(stream, wait_until, &all_queued));
  for (int i = 0; i < 20 && comm->rank != 1; i++) {
    CHECK_OK(dc_comm_all_reduce(comm, &tensor, DC_SUM, stream));
  }
  atomic_store(&all_queued, true);
  CHECK_OK(dc_stream_synchronize(stream, 0));
  if (comm->rank == 1) {
    await_failure(comm);
  }
  CHECK(dc_comm_check(comm) == DC_E_TIMEOUT);
  CHECK_SAYS("all_reduce");
  CHECK(dc_comm_all_reduce(comm, &tensor, DC_SUM, stream) == DC_E_TIMEOUT);
  dc_stream_destroy(stream);
  dc_device_destroy(device);
  free(data);
  return 0;
}

static void test_failure_on_stream(void **state) {
  (void)state;
  on_threads_and_processes(2, failure_on_stream, NULL);
}

/* ---- leaving ---- */

/* Who is done may go before the others have read his data. */
static int leaves_early(dc_comm *comm, void *arg) {
  (void)arg;
  for (int i = 0; i < 30; i++) {
    CHECK_OK(gather(comm, i, i % 2 == 0 ? N : BIG, DC_FLOAT32));
  }
  return 0;
}

static void test_leaves_early(void **state) {
  (void)state;
  for (int i = 0; i < 5; i++) {
    on_threads_and_processes(3, leaves_early, NULL);
  }
}

static int waits_for_left(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK_OK(gather(comm, 5, N, DC_FLOAT32));
  if (comm->rank == 0) {
    int64_t begin = dc__now_ns();
    CHECK(gather(comm, 6, N, DC_FLOAT32) == DC_E_PEER_DEAD);
    CHECK(within(begin, 0, SOON));
    CHECK_SAYS("rank 1 destroyed its communicator while rank 0 waited for it at allgather_param of parameter 6");
  }
  return 0;
}

static void test_waits_for_left(void **state) {
  (void)state;
  on_threads_and_processes(2, waits_for_left, NULL);
}

/* Who leaves the group without having come to a channel is missed there too. */
static int never_came(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK_OK(gather(comm, 5, N, DC_FLOAT32));
  if (comm->rank == 0) {
    dc_comm *copy = NULL;
    CHECK_OK(dc_comm_dup(comm, &copy));
    int64_t begin = dc__now_ns();
    CHECK(gather(copy, 6, N, DC_FLOAT32) == DC_E_PEER_DEAD);
    CHECK(within(begin, 0, SOON));
    CHECK_SAYS("rank 1 destroyed its communicator while rank 0 waited for it at allgather_param of parameter 6");
    dc_comm_destroy(copy);
  }
  return 0;
}

static void test_never_came(void **state) {
  (void)state;
  on_threads_and_processes(2, never_came, NULL);
}

/* ---- nothing left behind ---- */

static int group_of_one(int round) {
  char name[64];
  dc_comm *comm = NULL;
  dc_comm *copy = NULL;
  snprintf(name, sizeof name, "leak-%ld-%d", (long)getpid(), round);
  CHECK_OK(dc_comm_create_processes(name, 0, 1, NULL, &comm));
  CHECK_OK(dc_comm_dup(comm, &copy));
  dc_comm_destroy(comm);
  CHECK_OK(gather(copy, 5, BIG, DC_FLOAT32));
  dc_comm_destroy(copy);
  const dc_comm_options hurried = {sizeof hurried, 20 * MS, 0};
  CHECK(dc_comm_create_processes(name, round % 2, 2, &hurried, &comm) == DC_E_TIMEOUT);
  return 0;
}

/* In a child: a group of two, made and destroyed, costs no descriptor; the peers' heaps and pidfds are closed. */
static pid_t repeat_groups(const char *name, int32_t rank) {
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    int descriptors = entries("/proc/self/fd");
    bool right = true;
    for (int round = 0; round < 5 && right; round++) {
      dc_comm *comm = NULL;
      right = dc_comm_create_processes(name, rank, 2, NULL, &comm) == DC_OK &&
              gather(comm, 5, BIG, DC_FLOAT32) == DC_OK && dc_comm_barrier(comm) == DC_OK;
      dc_comm_destroy(comm);
    }
    _exit(right && entries("/proc/self/fd") == descriptors ? 0 : 1);
  }
  return child;
}

static void test_nothing_left(void **state) {
  (void)state;
  assert_int_equal(group_of_one(0), 0);
  int descriptors = entries("/proc/self/fd");
  for (int round = 1; round <= 10; round++) {
    assert_int_equal(group_of_one(round), 0);
  }
  char name[64];
  fresh_name(name);
  pid_t ranks[2] = {repeat_groups(name, 0), repeat_groups(name, 1)};
  assert_int_equal(end_rank(ranks[0]), 0);
  assert_int_equal(end_rank(ranks[1]), 0);
  assert_int_equal(entries("/proc/self/fd"), descriptors);
  snprintf(name, sizeof name, "-%ld-", (long)getpid());
  assert_int_equal(entries_with("/dev/shm", name), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_other_operator),
      cmocka_unit_test(test_other_size),
      cmocka_unit_test(test_other_dtype),
      cmocka_unit_test(test_other_split),
      cmocka_unit_test(test_other_root),
      cmocka_unit_test(test_late),
      cmocka_unit_test(test_killed),
      cmocka_unit_test(test_killed_any_time),
      cmocka_unit_test(test_ends_early),
      cmocka_unit_test(test_aborted),
      cmocka_unit_test(test_abort_while_reading),
      cmocka_unit_test(test_failure_on_stream),
      cmocka_unit_test(test_leaves_early),
      cmocka_unit_test(test_waits_for_left),
      cmocka_unit_test(test_never_came),
      cmocka_unit_test(test_nothing_left),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
