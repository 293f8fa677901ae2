/* How ranks over TCP find each other, and which connections they reject. comm_ranks.h tests what every kind of group
 * computes (on_all_groups). */
#include "comm/tcp/handshake_test.h"
#include "comm/tcp/socket.h"
#include "comm_data.h"

/* ---- meeting ---- */

typedef struct meeting {
  char address[64], name[64];
  int32_t rank, world;
  int64_t timeout_ns;
  dc_status expected;
  const char *says; /* part of the error's text; NULL: any */
} meeting;

static void *meet(void *arg) {
  const meeting *m = arg;
  dc_comm *comm = NULL;
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = m->timeout_ns};
  dc_status status = dc_comm_create_tcp(m->address, m->name, m->rank, m->world, &options, &comm);
  bool right = status == m->expected && (m->says == NULL || strstr(dc_last_error(), m->says) != NULL) &&
               (comm != NULL) == (status == DC_OK);
  if (!right) {
    fprintf(stderr, "rank %d: %s: %s\n", m->rank, dc_status_name(status), dc_last_error());
  }
  if (status == DC_OK && dc_comm_barrier(comm) != DC_OK) {
    right = false;
  }
  dc_comm_destroy(comm);
  return right ? arg : NULL;
}

/* Runs all of them at once. Returns whether each ended as expected. */
static bool meet_all(meeting *ms, size_t count) {
  pthread_t threads[8];
  bool right = true;
  for (size_t i = 0; i < count; i++) {
    pthread_create(&threads[i], NULL, meet, &ms[i]);
  }
  for (size_t i = 0; i < count; i++) {
    void *result;
    pthread_join(threads[i], &result);
    right = right && result != NULL;
  }
  return right;
}

static meeting of(const char *address, const char *name, int32_t rank, int32_t world, int64_t timeout_ns,
                  dc_status expected, const char *says) {
  meeting m = {.rank = rank, .world = world, .timeout_ns = timeout_ns, .expected = expected, .says = says};
  snprintf(m.address, sizeof m.address, "%s", address);
  snprintf(m.name, sizeof m.name, "%s", name);
  return m;
}

static void test_addresses(void **state) {
  (void)state;
  static const char *const wrong[] = {
      "",        "host",   "host:", ":1",      "host:0", "host:65536", "host:1x",
      "host: 1", "::1:80", "[::1]", "[::1:80", "[]:80",  "host:-1",    "host:99999999999999999999"};
  dc_comm *comm = NULL;
  for (size_t i = 0; i < DC__COUNT(wrong); i++) {
    assert_int_equal(dc_comm_create_tcp(wrong[i], "x", 0, 1, NULL, &comm), DC_E_INVALID);
    assert_non_null(strstr(dc_last_error(), "must be HOST:PORT or [ADDRESS]:PORT"));
    assert_null(comm);
  }
  assert_int_equal(dc_comm_create_tcp(NULL, "x", 0, 1, NULL, &comm), DC_E_INVALID);
  assert_int_equal(dc_comm_create_tcp("a:1", NULL, 0, 1, NULL, &comm), DC_E_INVALID);
  assert_int_equal(dc_comm_create_tcp("a:1", "x", 2, 2, NULL, &comm), DC_E_INVALID);
  assert_int_equal(dc_comm_create_tcp("a:1", "x", 0, 1, NULL, NULL), DC_E_INVALID);
  assert_int_equal(dc_comm_create_tcp("[::1]:80", "x", 0, 1, NULL, &comm), DC_OK); /* no rank to meet: not used */
  dc_comm_destroy(comm);
  meeting nowhere = of("no.such.host.invalid:4000", "x", 1, 2, limit, DC_E_SYSTEM, "no.such.host.invalid");
  assert_true(meet_all(&nowhere, 1));
}

static void test_names_of_hosts(void **state) {
  (void)state;
  char address[64], name[64];
  int probe = socket(AF_INET6, SOCK_STREAM, 0);
  struct sockaddr_in6 loopback = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
  bool has_six = probe >= 0 && bind(probe, (struct sockaddr *)&loopback, sizeof loopback) == 0;
  close(probe);
  const char *hosts[] = {"localhost", "127.0.0.1", "[::1]"};
  for (size_t i = 0; i < DC__COUNT(hosts) - (has_six ? 0 : 1); i++) {
    int port = atoi(strrchr(fresh_address(address), ':') + 1);
    snprintf(address, sizeof address, "%s:%d", hosts[i], port);
    fresh_name(name);
    meeting ms[3];
    for (int32_t r = 0; r < 3; r++) {
      ms[r] = of(address, name, r, 3, limit, DC_OK, NULL);
    }
    assert_true(meet_all(ms, 3));
  }
}

static void test_missing_ranks_are_named(void **state) {
  (void)state;
  char address[64];
  fresh_address(address);
  meeting peer =
      of(address, "g", 1, 3, 300 * MS, DC_E_TIMEOUT, "rank 0 of 3 has not come there, or its group has formed already");
  assert_true(meet_all(&peer, 1));
  /* Rank 0 waits for as long as the busiest machine may take for rank 2 to come. */
  meeting two[] = {of(address, "g", 0, 4, 10000 * MS, DC_E_TIMEOUT, "ranks 1, 3 of 4 have not come after 10.0 s"),
                   of(address, "g", 2, 4, limit, DC_E_TIMEOUT, "ranks 1, 3 of 4 have not come after 10.0 s")};
  assert_true(meet_all(two, 2));
}

static void test_ranks_that_do_not_fit(void **state) {
  (void)state;
  char address[64];
  fresh_address(address);
  meeting worlds[] = {of(address, "g", 0, 2, limit, DC_E_MISMATCH, "rank 1 has world_size 3, but rank 0 has 2"),
                      of(address, "g", 1, 3, limit, DC_E_MISMATCH, "rank 1 has world_size 3, but rank 0 has 2")};
  assert_true(meet_all(worlds, 2));
  meeting twice[] = {of(address, "g", 0, 3, limit, DC_E_EXISTS, "rank 1 came twice"),
                     of(address, "g", 1, 3, limit, DC_E_EXISTS, "rank 1 came twice"),
                     of(address, "g", 1, 3, limit, DC_E_EXISTS, "rank 1 came twice")};
  assert_true(meet_all(twice, 3));
  meeting host = of(address, "g", 0, 2, limit, DC_OK, NULL), peer = of(address, "g", 1, 2, limit, DC_OK, NULL);
  meeting other = of(address, "h", 1, 2, limit, DC_E_EXISTS, "another group meets at this address");
  pthread_t waits;
  void *right;
  pthread_create(&waits, NULL, meet, &host);
  assert_non_null(meet(&other));
  assert_non_null(meet(&peer));
  pthread_join(waits, &right);
  assert_non_null(right);
  char taken[64];
  struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_ANY_INIT};
  struct sockaddr_in four = {.sin_family = AF_INET};
  socklen_t length = sizeof any;
  int fd = socket(AF_INET6, SOCK_STREAM, 0);
  if (fd >= 0) {
    assert_int_equal(bind(fd, (struct sockaddr *)&any, sizeof any), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&any, &length), 0);
    four.sin_port = any.sin6_port;
  } else {
    length = sizeof four;
    fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&four, sizeof four), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&four, &length), 0);
  }
  assert_int_equal(listen(fd, 1), 0);
  snprintf(taken, sizeof taken, "127.0.0.1:%d", ntohs(four.sin_port));
  meeting late = of(taken, "g", 0, 2, limit, DC_E_EXISTS, "can't listen at 127.0.0.1:");
  assert_true(meet_all(&late, 1));
  close(fd);
}

/* ---- connections that are not a rank's ---- */

/* Other processes connect while rank 0 waits. Some send nothing, some random bytes, some half a hello, and some claim
 * to be ranks. */
static void test_strangers(void **state) {
  (void)state;
  char address[64];
  fresh_address(address);
  meeting ms[] = {of(address, "g", 0, 2, limit, DC_OK, NULL), of(address, "g", 1, 2, limit, DC_OK, NULL)};
  pthread_t host;
  void *result;
  pthread_create(&host, NULL, meet, &ms[0]);
  int fds[300];
  for (int i = 0; i < 300; i++) {
    char bytes[600];
    fds[i] = connect_to(address);
    assert_true(fds[i] >= 0);
    for (size_t b = 0; b < sizeof bytes; b++) {
      bytes[b] = (char)(rand() >> 4);
    }
    if (i % 3 > 0) {
      memcpy(bytes, "libdc/t", i % 3 == 1 ? 8 : 5);
      (void)!send(fds[i], bytes, i % 2 ? sizeof bytes : 20, MSG_NOSIGNAL);
    }
  }
  assert_non_null(meet(&ms[1]));
  pthread_join(host, &result);
  assert_non_null(result);
  for (int i = 0; i < 300; i++) {
    close(fds[i]);
  }
}

/* A socket without a listener may be given the very port that it connects to, and so connect to itself. */
static void test_a_rank_does_not_connect_to_itself(void **state) {
  (void)state;
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof to;
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(bind(fd, (struct sockaddr *)&to, sizeof to), 0);
  assert_int_equal(getsockname(fd, (struct sockaddr *)&to, &length), 0);
  close(fd);
  int port = ntohs(to.sin_port);
  for (int i = 0; i < 65536; i++) {
    struct sockaddr_in own;
    length = sizeof own;
    to.sin_port = htons((uint16_t)(port ^ (i & 1))); /* the system tries even, or odd, ports first */
    fd = dc__tcp_connect((struct sockaddr *)&to, sizeof to, -1, dc__now_ns() + limit);
    if (fd >= 0) { /* another process listens there by now */
      assert_int_equal(getsockname(fd, (struct sockaddr *)&own, &length), 0);
      assert_int_not_equal(own.sin_port, to.sin_port);
      close(fd);
    }
  }
}

/* ---- more ranks than one machine has with other transports ---- */

enum { MANY = 72 };

/* Every rank receives the sums over all ranks, and then gathers them. */
static bool exchange(dc_comm *comm, int32_t rank) {
  int64_t one = 1, all = MANY;
  float whole[MANY], own = 0, heard[MANY];
  float *expected = make_reduced(DC_FLOAT32, MANY, MANY, true), *mine = make(DC_FLOAT32, rank, MANY);
  memcpy(whole, mine, sizeof whole);
  dc_tensor from = flat(whole, &all, DC_FLOAT32), sum = flat(&own, &one, DC_FLOAT32),
            to = flat(heard, &all, DC_FLOAT32);
  bool right = dc_comm_reduce_scatter(comm, &from, &sum, NULL, DC_MEAN, NULL) == DC_OK &&
               dc_comm_all_gather(comm, &sum, &to, NULL, NULL) == DC_OK && dc_comm_barrier(comm) == DC_OK &&
               memcmp(heard, expected, sizeof heard) == 0;
  free(expected);
  free(mine);
  return right;
}

static int one_of_many(const char *address, int32_t rank) {
  enum { COPIES = 5 };
  dc_comm *comm = NULL, *copies[COPIES] = {NULL};
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = 2 * limit};
  bool right = dc_comm_create_tcp(address, "many", rank, MANY, &options, &comm) == DC_OK;
  if (rank == 1) {
    usleep(500000); /* rank 0 waits for it, and keeps the connections for copies that others make meanwhile */
  }
  for (int i = 0; i < COPIES; i++) {
    right = right && dc_comm_dup(comm, &copies[i]) == DC_OK;
  }
  right = right && exchange(comm, rank) && exchange(copies[0], rank) && exchange(copies[COPIES - 1], rank);
  if (!right) {
    fprintf(stderr, "rank %d: %s\n", rank, dc_last_error());
  }
  for (int i = 0; i < COPIES; i++) {
    dc_comm_destroy(copies[i]);
  }
  dc_comm_destroy(comm);
  return right ? 0 : 1;
}

static void test_many_processes(void **state) {
  (void)state;
  char address[64];
  pid_t ranks[MANY];
  int failed = 0;
  fresh_address(address);
  for (int32_t r = 0; r < MANY; r++) {
    ranks[r] = fork();
    if (ranks[r] == 0) {
      _exit(one_of_many(address, r));
    }
  }
  for (int32_t r = 0; r < MANY; r++) {
    int status = 1;
    failed += waitpid(ranks[r], &status, 0) != ranks[r] || status != 0;
  }
  assert_int_equal(failed, 0);
}

static void test_how_many(void **state) {
  (void)state;
  dc_comm *comm = NULL;
  assert_int_equal(dc_comm_create_tcp("a:1", "x", 0, DC__COMM_MAX_WORLD + 1, NULL, &comm), DC_E_INVALID);
  assert_non_null(strstr(dc_last_error(), "world_size = 1025, must be 1 to 1024"));
  assert_int_equal(dc_comm_create_processes("x", 0, DC__COMM_MAX_LOCAL + 1, NULL, &comm), DC_E_INVALID);
  assert_non_null(strstr(dc_last_error(), "world_size = 65, must be 1 to 64"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_many_processes),
      cmocka_unit_test(test_how_many),
      cmocka_unit_test(test_addresses),
      cmocka_unit_test(test_names_of_hosts),
      cmocka_unit_test(test_missing_ranks_are_named),
      cmocka_unit_test(test_ranks_that_do_not_fit),
      cmocka_unit_test(test_strangers),
      cmocka_unit_test(test_a_rank_does_not_connect_to_itself),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
