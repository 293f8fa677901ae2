/* Errors between ranks: every wait ends soon, on every rank with the same text, and nothing leaks. */
#include "comm_failing.h"
#include "entries.h"
#include "shm_calls.h"

#include <signal.h>
#include <sys/mman.h>

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

/* A process that ends without a message is as dead as one that was killed. */
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

static int aborted(dc_comm *comm, void *arrived) {
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy)); /* which waits for no rank */
  CHECK_OK(dc_comm_barrier(comm));
  int64_t begin = dc__now_ns(); /* on every rank before any aborts */
  meet_all_ranks(arrived, comm);
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
  atomic_int *arrived = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  on_threads_and_processes(3, aborted, arrived);
  munmap(arrived, 4096);
}

/* After an abort no rank reads memory that its owner has freed, which the address sanitizer would find. */
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

/* On streams the communicator keeps the failure, and queued work is dropped. */
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

static void *gather_beside(void *copy) {
  (void)gather(copy, 6, N, DC_FLOAT32);
  return NULL;
}

/* Rank 1 waits for rank 2 in a communicator that another thread of rank 0 has joined: rank 0 names only rank 2. */
static int held_up(dc_comm *comm, void *arg) {
  (void)arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK_OK(gather(copy, 5, N, DC_FLOAT32));
  if (comm->rank == 2) {
    await_failure(comm);
  } else if (comm->rank == 1) {
    CHECK(gather(copy, 6, N, DC_FLOAT32) == DC_E_TIMEOUT);
  } else {
    pthread_t thread;
    const uint32_t calls = calls_of(copy, 0);
    CHECK(pthread_create(&thread, NULL, gather_beside, copy) == 0);
    await_call(copy, 0, calls);
    await_call(copy, 1, calls);
    comm->timeout_ns = 200 * MS;
    dc_status status = gather(comm, 7, N, DC_FLOAT32);
    pthread_join(thread, NULL);
    CHECK(status == DC_E_TIMEOUT);
  }
  CHECK(dc_comm_check(comm) == DC_E_TIMEOUT);
  CHECK_SAYS("rank 0 waited 0.2 s at allgather_param of parameter 7 (channel 0) for rank 2 of 3 to come; rank 2 last");
  dc_comm_destroy(copy);
  return 0;
}

static void test_delayed_rank(void **state) {
  (void)state;
  on_threads_and_processes(3, held_up, NULL);
}

/* ---- leaving ---- */

/* A rank that is done may leave before the others have read its data. */
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

/* Ranks also miss one that left the group without having joined their channel. */
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

static void test_missing_rank(void **state) {
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
  const dc_comm_options hurried = {.struct_size = sizeof hurried, .timeout_ns = 20 * MS};
  CHECK(dc_comm_create_processes(name, round % 2, 2, &hurried, &comm) == DC_E_TIMEOUT);
  return 0;
}

/* In a child, making and destroying a group of two leaks no descriptor; the peers' heaps and pidfds are closed. */
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
      cmocka_unit_test(test_killed),
      cmocka_unit_test(test_killed_any_time),
      cmocka_unit_test(test_ends_early),
      cmocka_unit_test(test_aborted),
      cmocka_unit_test(test_abort_while_reading),
      cmocka_unit_test(test_failure_on_stream),
      cmocka_unit_test(test_delayed_rank),
      cmocka_unit_test(test_leaves_early),
      cmocka_unit_test(test_waits_for_left),
      cmocka_unit_test(test_missing_rank),
      cmocka_unit_test(test_nothing_left),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
