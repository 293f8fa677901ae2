/* Ranks over TCP that wait in vain. Every rank gets the same error. It names the rank or connection that is the cause,
 * not the ranks that wait for the same one. */
#include "comm/tcp/collective.h"
#include "comm_failing.h"

enum { MOST = 8, BROKEN_ELEMENTS = 100000 };

static const int64_t limit = INT64_C(60000000000);

/* ---- ranks as threads, and their errors ---- */

typedef struct reports {
  dc_status status[MOST];
  char text[MOST][512];
  atomic_int arrived;
  int variant;
  int64_t limit_ms;
} reports;

static int report(reports *t, const dc_comm *comm, dc_status status) {
  t->status[comm->rank] = status;
  snprintf(t->text[comm->rank], sizeof t->text[0], "%s", dc_last_error());
  return 0;
}

/* Does nothing until the group has failed, and reports the failure. */
static int report_failure(reports *t, dc_comm *comm) {
  await_failure(comm);
  return report(t, comm, dc_comm_check(comm));
}

static bool is_expected(const reports *t, int32_t r, dc_status status, const char *says) {
  return t->status[r] == status && strcmp(t->text[r], t->text[0]) == 0 && strstr(t->text[r], says) != NULL;
}

static void expect_reports(const reports *t, int32_t world, dc_status status, const char *says) {
  for (int32_t r = 0; r < world; r++) {
    if (!is_expected(t, r, status, says)) {
      fail_msg("rank %d: %s: %s\nrank 0: %s: %s\nexpected: %s: ...%s...", r, dc_status_name(t->status[r]), t->text[r],
               dc_status_name(t->status[0]), t->text[0], dc_status_name(status), says);
    }
  }
}

static dc_status collective(dc_comm *comm, int variant) {
  int64_t count = variant == 1 ? 300000 : 1000;
  float *data = calloc((size_t)count, sizeof *data);
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  dc_status status = variant == 0   ? dc_comm_barrier(comm)
                     : variant == 3 ? dc_comm_broadcast(comm, &tensor, 0, NULL)
                                    : dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL);
  free(data);
  return status;
}

/* ---- deadlines ---- */

static int last_is_late(dc_comm *comm, void *arg) {
  reports *t = arg;
  CHECK_OK(dc_comm_barrier(comm));
  meet_all_ranks(&t->arrived, comm);
  if (comm->rank == comm->world - 1) {
    return report_failure(t, comm);
  }
  comm->timeout_ns = 1500 * MS; /* the same on all ranks, whose deadlines then expire together */
  return report(t, comm, collective(comm, t->variant));
}

static void test_a_late_rank_is_named_by_all(void **state) {
  (void)state;
  for (int variant = 0; variant < 4; variant++) {
    reports t = {.variant = variant};
    assert_int_equal(on_tcp(5, limit, last_is_late, &t), 0);
    expect_reports(&t, 5, DC_E_TIMEOUT, "for rank 4 of 5 to come; rank 4 last started barrier");
  }
}

/* With different deadlines, the first one to expire applies to every rank. */
static int deadlines_differ(dc_comm *comm, void *arg) {
  reports *t = arg;
  static const int64_t ms[] = {700, 60000, 900, 701, 700};
  CHECK_OK(dc_comm_barrier(comm));
  meet_all_ranks(&t->arrived, comm);
  if (comm->rank == 3) {
    return report_failure(t, comm);
  }
  comm->timeout_ns = ms[comm->rank] * MS;
  return report(t, comm, collective(comm, 2));
}

/* The deadlines expire before any rank comes: all ranks must name the same rank. */
static int deadlines_are_tiny(dc_comm *comm, void *arg) {
  reports *t = arg;
  CHECK_OK(dc_comm_barrier(comm));
  meet_all_ranks(&t->arrived, comm);
  if (comm->rank == 3) {
    return report_failure(t, comm);
  }
  comm->timeout_ns = 1;
  return report(t, comm, collective(comm, t->variant));
}

static void test_deadlines_differ(void **state) {
  (void)state;
  reports t = {.variant = 0};
  assert_int_equal(on_tcp(5, limit, deadlines_differ, &t), 0);
  expect_reports(&t, 5, DC_E_TIMEOUT, "for rank 3 of 5 to come");
  for (int i = 0; i < 20; i++) {
    reports tiny = {.variant = i % 4};
    assert_int_equal(on_tcp(4, limit, deadlines_are_tiny, &tiny), 0);
    expect_reports(&tiny, 4, DC_E_TIMEOUT, "of 4 to");
  }
}

/* Rank 1 waits for rank 2 in a communicator to which rank 0 has not come: rank 0 names rank 2. */
static int held_up(dc_comm *comm, void *arg) {
  reports *t = arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK_OK(dc_comm_barrier(copy));
  meet_all_ranks(&t->arrived, comm);
  if (comm->rank == 2) {
    report_failure(t, comm);
  } else if (comm->rank == 1) {
    report(t, comm, collective(copy, 2));
  } else {
    struct pollfd called = {.fd = ((const dc__tcp *)copy)->transfers[1].fd, .events = POLLIN};
    while (poll(&called, 1, -1) < 1) {
    }
    comm->timeout_ns = 300 * MS;
    report(t, comm, dc_comm_barrier(comm));
  }
  dc_comm_destroy(copy);
  return 0;
}

/* Ranks 0 and 1 wait for each other in two communicators. */
static int in_a_circle(dc_comm *comm, void *arg) {
  reports *t = arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK_OK(dc_comm_barrier(copy));
  meet_all_ranks(&t->arrived, comm);
  if (comm->rank == 1) {
    report(t, comm, collective(copy, 2));
  } else {
    struct pollfd called = {.fd = ((const dc__tcp *)copy)->transfers[1].fd, .events = POLLIN};
    while (poll(&called, 1, -1) < 1) {
    }
    comm->timeout_ns = 300 * MS;
    report(t, comm, dc_comm_barrier(comm));
  }
  dc_comm_destroy(copy);
  return 0;
}

static void test_waiting_ranks_are_not_blamed(void **state) {
  (void)state;
  reports t = {.variant = 0}, circle = {.variant = 0};
  assert_int_equal(on_tcp(3, limit, held_up, &t), 0);
  expect_reports(&t, 3, DC_E_TIMEOUT,
                 "rank 0 waited 0.3 s at barrier for rank 2 of 3 to come; rank 2 last started barrier");
  assert_int_equal(on_tcp(2, limit, in_a_circle, &circle), 0);
  expect_reports(&circle, 2, DC_E_TIMEOUT,
                 "rank 0 waited 0.3 s at barrier for rank 1 of 2 to come; rank 1 waits at all_reduce for rank 0");
}

/* Rank 2 does not join in a copy: the ranks below it wait for its connection, and rank 3 for its listener. */
static int uncopied(dc_comm *comm, void *arg) {
  reports *t = arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_barrier(comm));
  meet_all_ranks(&t->arrived, comm);
  if (comm->rank == 2) {
    return report_failure(t, comm);
  }
  ((dc__tcp *)comm)->group->timeout_ns = comm->rank == t->variant ? t->limit_ms * MS : limit;
  report(t, comm, dc_comm_dup(comm, &copy));
  CHECK(copy == NULL);
  return 0;
}

/* On a busy machine other ranks come too late as well: they get more time in another group. */
static void expect_uncopied(int variant, const char *says) {
  bool last = false;
  for (int64_t ms = 300; !last; ms *= 10) {
    reports t = {.variant = variant, .limit_ms = ms};
    assert_int_equal(on_tcp(4, limit, uncopied, &t), 0);
    last = ms > 20000 || is_expected(&t, 0, DC_E_TIMEOUT, says);
    if (last) {
      expect_reports(&t, 4, DC_E_TIMEOUT, says);
    }
  }
}

static void test_a_rank_without_a_copy_is_named(void **state) {
  (void)state;
  expect_uncopied(0, " s for rank 2 of 4 to connect");
  expect_uncopied(3, " s for rank 2 of 4 to connect");
}

/* ---- failures of several ranks at once ---- */

static int all_abort(dc_comm *comm, void *arg) {
  reports *t = arg;
  char reason[64];
  CHECK_OK(dc_comm_barrier(comm));
  snprintf(reason, sizeof reason, "reason %d:\n\x1b[2J\xff\xc3\xa9", comm->rank);
  meet_all_ranks(&t->arrived, comm);
  dc_comm_abort(comm, reason);
  return report(t, comm, dc_comm_check(comm));
}

static void test_all_abort(void **state) {
  (void)state;
  for (int i = 0; i < 20; i++) {
    reports t = {.variant = 0};
    assert_int_equal(on_tcp(5, limit, all_abort, &t), 0);
    expect_reports(&t, 5, DC_E_ABORTED, ":\\n\\x1b[2J\\xff\xc3\xa9");
  }
}

/* ---- connections that break ---- */

enum broken { RESET, CLOSED, BROKEN };

/* Rank 1's connection to rank 0 breaks, though all processes live. */
static int breaks(dc_comm *comm, void *arg) {
  reports *t = arg;
  CHECK_OK(dc_comm_barrier(comm));
  meet_all_ranks(&t->arrived, comm);
  if (comm->rank != 1) {
    float data[BROKEN_ELEMENTS] = {0};
    int64_t count = BROKEN_ELEMENTS, begin = dc__now_ns();
    dc_tensor tensor = flat(data, &count, DC_FLOAT32);
    report(t, comm, dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL));
    CHECK(within(begin, 0, SOON));
    return 0;
  }
  int fd = ((const dc__tcp *)comm)->transfers[0].fd;
  const struct sockaddr none = {.sa_family = AF_UNSPEC};
  if (t->variant == RESET) {
    CHECK(connect(fd, &none, sizeof none) == 0); /* Linux sends a reset */
  } else {
    CHECK(shutdown(fd, SHUT_WR) == 0);
  }
  return report_failure(t, comm);
}

static void test_a_connection_breaks(void **state) {
  (void)state;
  static const char *const says[BROKEN] = {
      "rank 0 at all_reduce: the connection to rank 1 broke: ECONNRESET (Connection reset by peer)",
      "rank 0 at all_reduce: the connection to rank 1 broke: it was closed on the way"};
  for (int i = 0; i < BROKEN; i++) {
    reports t = {.variant = i};
    assert_int_equal(on_tcp(3, limit, breaks, &t), 0);
    expect_reports(&t, 3, DC_E_SYSTEM, says[i]);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_late_rank_is_named_by_all),
      cmocka_unit_test(test_deadlines_differ),
      cmocka_unit_test(test_waiting_ranks_are_not_blamed),
      cmocka_unit_test(test_a_rank_without_a_copy_is_named),
      cmocka_unit_test(test_all_abort),
      cmocka_unit_test(test_a_connection_breaks),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
