/* More ranks over TCP than a mesh can have; they connect on demand. Data and errors are those of a mesh. Small
 * collectives need few connections, and so do errors of calls that differ. */
#include "comm/tcp/overlay/overlay.h"
#include "comm_data.h"
#include "comm_failing.h"

#include <sys/resource.h>

enum {
  RANKS = DC__TCP_MAX_MESH + 6,
  DIGITS = 7,
  FEW = 2 * 7,
  UNKNOWN = 300,
  SMALL = 300,
  SUMMED = 8000,
  LARGE = 80000
};

static const int64_t limit = INT64_C(300000000000); /* three runs of `make test` at once took 120 s */

typedef struct reports {
  int variant;
  atomic_int arrived;
  dc_status status[RANKS];
  char text[RANKS][512];
} reports;

static int32_t count_connections(const dc_comm *comm) {
  int32_t count = 0;
  for (int32_t r = 0; r < comm->world; r++) {
    count += ((const dc__tcp *)comm)->fds[r] >= 0;
  }
  return count;
}

static bool is_probed(int fd) {
  int on = 0;
  socklen_t length = sizeof on;
  return getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, &length) == 0 && on != 0;
}

/* Only neighbours are probed, since keep-alive probes between all pairs of ranks would break connections of a busy
 * machine. */
static int neighbours_are_probed(const dc_comm *comm) {
  const dc__tcp *self = (const dc__tcp *)comm;
  for (int32_t r = 0; r < comm->world; r++) {
    CHECK(self->fds[r] < 0 || !is_probed(self->fds[r]));
    CHECK(self->group->control[r] < 0 || is_probed(self->group->control[r]));
  }
  return 0;
}

static int report(reports *t, const dc_comm *comm, dc_status status) {
  t->status[comm->rank] = status;
  snprintf(t->text[comm->rank], sizeof t->text[0], "%s", dc_last_error());
  return 0;
}

static void expect_reports(const reports *t, dc_status status, const char *says) {
  for (int32_t r = 0; r < RANKS; r++) {
    if (t->status[r] != status || strcmp(t->text[r], t->text[0]) != 0 || strstr(t->text[r], says) == NULL) {
      fail_msg("rank %d: %s: %s\nrank 0: %s: %s\nexpected: %s: ...%s...", r, dc_status_name(t->status[r]), t->text[r],
               dc_status_name(t->status[0]), t->text[0], dc_status_name(status), says);
    }
  }
}

/* ---- data ---- */

/* The sums of all ranks, which only one rank computes. */
static const float *sums_of(int32_t world, int64_t count) {
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  static float *known[DC__COMM_MAX_WORLD + 1][2];
  float **sums = &known[world][count == SUMMED];
  pthread_mutex_lock(&mutex);
  if (*sums == NULL) {
    *sums = make_reduced(DC_FLOAT32, world, count, true);
  }
  pthread_mutex_unlock(&mutex);
  return *sums;
}

static int sums_are_right(dc_comm *comm, int64_t count) {
  float *data = make(DC_FLOAT32, comm->rank, count);
  const float *sums = sums_of(comm->world, count);
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  CHECK_OK(dc_comm_all_reduce(comm, &tensor, DC_MEAN, NULL));
  CHECK(memcmp(data, sums, (size_t)count * sizeof *data) == 0);
  free(data);
  return 0;
}

/* Copies are used in another order than they were made, and some ranks use one before others have made it. */
static int use_copies(dc_comm *comm) {
  dc_comm *first = NULL, *second = NULL, *unused = NULL;
  if (comm->rank % 5 == 0) {
    sleep_ms(100);
  }
  CHECK_OK(dc_comm_dup(comm, &first));
  CHECK_OK(dc_comm_dup(comm, &second));
  CHECK_OK(dc_comm_dup(first, &unused));
  CHECK(count_connections(second) == 0);
  CHECK(sums_are_right(second, SMALL) == 0);
  dc_comm_destroy(second);
  CHECK(sums_are_right(first, SMALL) == 0);
  CHECK(count_connections(unused) == 0);
  dc_comm_destroy(unused);
  dc_comm_destroy(first);
  return 0;
}

static int data_move(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK_OK(dc_comm_barrier(comm));
  CHECK(sums_are_right(comm, SMALL) == 0);
  CHECK(count_connections(comm) <= FEW);
  CHECK(use_copies(comm) == 0);
  CHECK(sums_are_right(comm, SUMMED) == 0);
  CHECK(count_connections(comm) == RANKS - 1 && neighbours_are_probed(comm) == 0);
  CHECK_OK(dc_comm_set_checksums(comm, 1));
  CHECK(sums_are_right(comm, SMALL) == 0);
  return sums_are_right(comm, SUMMED);
}

static void test_data(void **state) {
  (void)state;
  assert_int_equal(on_tcp(RANKS, limit, data_move, NULL), 0);
}

static int few_connect(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK_OK(dc_comm_barrier(comm));
  CHECK(sums_are_right(comm, SMALL) == 0);
  CHECK(count_connections(comm) == DIGITS);
  return 0;
}

static void test_data_of_two_to_the_k(void **state) {
  (void)state;
  assert_int_equal(on_tcp(1 << DIGITS, limit, few_connect, NULL), 0);
}

static void test_encrypted(void **state) {
  (void)state;
  const dc_comm_options options = {
      .struct_size = sizeof options, .timeout_ns = limit, .secret = "of a test, which has bytes", .tls = 1};
  assert_int_equal(on_tcp_with(RANKS, &options, data_move, NULL), 0);
}

/* ---- unknown processes ---- */

static int connect_silently(const dc_comm *comm, int32_t to) {
  const dc__tcp_endpoint *endpoint = &((const dc__tcp *)comm)->group->endpoints[to];
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  address.sin_port = htons((uint16_t)endpoint->port);
  return connect(fd, (const struct sockaddr *)&address, sizeof address) == 0 ? fd : -1;
}

/* More unknown processes than a rank handles at once connect to the ranks to which most others connect. */
static int among_unknown(dc_comm *comm, void *arg) {
  (void)arg;
  int fds[2 * UNKNOWN];
  CHECK_OK(dc_comm_barrier(comm));
  for (int32_t i = 0; i < 2 * UNKNOWN && comm->rank == RANKS - 1; i++) {
    fds[i] = connect_silently(comm, i % 2);
    CHECK(fds[i] >= 0);
    (void)!send(fds[i], "GET / HTTP/1.1", (size_t)(i % 14), MSG_NOSIGNAL);
  }
  CHECK_OK(dc_comm_barrier(comm));
  CHECK(sums_are_right(comm, SUMMED) == 0);
  CHECK(count_connections(comm) == RANKS - 1);
  for (int32_t i = 0; i < 2 * UNKNOWN && comm->rank == RANKS - 1; i++) {
    close(fds[i]);
  }
  return 0;
}

static void test_among_unknown(void **state) {
  (void)state;
  assert_int_equal(on_tcp(RANKS, limit, among_unknown, NULL), 0);
}

/* ---- parts ---- */

/* One part has 65 ranks and so is an overlay again; the other has 5. */
static int parts_sum(dc_comm *comm, void *arg) {
  (void)arg;
  dc_comm *part = NULL;
  CHECK_OK(dc_comm_split(comm, comm->rank < RANKS - 5, comm->rank, &part));
  CHECK(part->world == (comm->rank < RANKS - 5 ? RANKS - 5 : 5));
  CHECK(sums_are_right(part, SMALL) == 0);
  dc_comm_destroy(part);
  return 0;
}

static void test_parts(void **state) {
  (void)state;
  assert_int_equal(on_tcp(RANKS, limit, parts_sum, NULL), 0);
}

/* ---- calls that differ ---- */

static dc_status call(dc_comm *comm, int64_t count) {
  float *data = calloc((size_t)count, sizeof *data);
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  const dc_status status = dc_comm_broadcast(comm, &tensor, 0, NULL);
  free(data);
  return status;
}

static int differ(dc_comm *comm, void *arg) {
  reports *t = arg;
  const bool odd = comm->rank == RANKS - 2;
  const dc_status status = t->variant == 0 && odd   ? dc_comm_barrier(comm)
                           : t->variant == 1 && odd ? call(comm, LARGE)
                           : t->variant == 1        ? call(comm, SMALL)
                                                    : call(comm, LARGE + odd);
  CHECK(count_connections(comm) <= FEW);
  return report(t, comm, status);
}

static void test_calls_that_differ(void **state) {
  (void)state;
  for (int variant = 0; variant < 3; variant++) {
    reports t = {.variant = variant};
    assert_int_equal(on_tcp(RANKS, limit, differ, &t), 0);
    expect_reports(&t, DC_E_MISMATCH, "rank 68");
  }
}

/* ---- ranks that do not come ---- */

static int await_all(reports *t, dc_comm *comm) {
  CHECK_OK(dc_comm_barrier(comm));
  atomic_fetch_add(&t->arrived, 1);
  while (atomic_load(&t->arrived) < RANKS) {
    sleep_ms(1);
  }
  return 0;
}

static int one_is_late(dc_comm *comm, void *arg) {
  reports *t = arg;
  CHECK(await_all(t, comm) == 0);
  if (comm->rank == 40) {
    await_failure(comm);
    return report(t, comm, dc_comm_check(comm));
  }
  comm->timeout_ns = 1500 * MS;
  return report(t, comm, call(comm, t->variant == 0 ? SMALL : LARGE));
}

static void test_a_late_rank(void **state) {
  (void)state;
  for (int variant = 0; variant < 2; variant++) {
    reports t = {.variant = variant};
    assert_int_equal(on_tcp(RANKS, limit, one_is_late, &t), 0);
    expect_reports(&t, DC_E_TIMEOUT, "for rank 40 of 70 to come; rank 40 last started barrier");
  }
}

/* Rank 40's copy has no connections, so it cannot tell the others by them that it left. */
static int one_leaves(dc_comm *comm, void *arg) {
  reports *t = arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  if (comm->rank == 40) {
    dc_comm_destroy(copy);
  }
  CHECK(await_all(t, comm) == 0);
  if (comm->rank == 40) {
    await_failure(comm);
    return report(t, comm, dc_comm_check(comm));
  }
  CHECK(dc_comm_barrier(copy) != DC_OK);
  report(t, comm, dc_comm_check(copy));
  dc_comm_destroy(copy);
  return 0;
}

static void test_a_rank_that_left(void **state) {
  (void)state;
  reports t = {.variant = 0};
  assert_int_equal(on_tcp(RANKS, limit, one_leaves, &t), 0);
  expect_reports(&t, DC_E_PEER_DEAD, "rank 40 destroyed its communicator while rank ");
}

static int crossed(dc_comm *comm, void *arg) {
  reports *t = arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK(await_all(t, comm) == 0);
  const dc_status status = dc_comm_barrier(comm->rank == 7 ? copy : comm);
  report(t, comm, status);
  dc_comm_destroy(copy);
  return 0;
}

static void test_a_deadlock(void **state) {
  (void)state;
  reports t = {.variant = 0};
  assert_int_equal(on_tcp(RANKS, limit, crossed, &t), 0);
  expect_reports(&t, DC_E_MISMATCH, "wait for each other");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_data),        cmocka_unit_test(test_data_of_two_to_the_k),
                                     cmocka_unit_test(test_encrypted),   cmocka_unit_test(test_among_unknown),
                                     cmocka_unit_test(test_parts),       cmocka_unit_test(test_calls_that_differ),
                                     cmocka_unit_test(test_a_late_rank), cmocka_unit_test(test_a_rank_that_left),
                                     cmocka_unit_test(test_a_deadlock)};
  struct rlimit files; /* each thread may connect to any other */
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &files);
  }
  return cmocka_run_group_tests_name("tcp demand", tests, NULL, NULL);
}
