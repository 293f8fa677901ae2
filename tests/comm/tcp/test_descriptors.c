/* Ranks over TCP that run out of descriptors for their sockets: they and the others report that. A rank with just
 * enough descriptors works. */
#include "comm/tcp/handshake_test.h"
#include "comm_failing.h"

#include <errno.h>
#include <sys/resource.h>

typedef struct lacking {
  int32_t rank, world;
  int descriptors; /* limit beside the standard ones; 0: no limit */
  dc_status expected;
  const char *says, *or_says;
  int64_t timeout_ns; /* 0: limit */
} lacking;

static int limit_descriptors(int most) {
  const struct rlimit limit_of = {(rlim_t)most, (rlim_t)most};
  closefrom(3);
  return setrlimit(RLIMIT_NOFILE, &limit_of);
}

static pid_t start_lacking(const char *address, const lacking *l) {
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    dc_comm *comm = NULL;
    const dc_comm_options options = {.struct_size = sizeof options,
                                     .timeout_ns = l->timeout_ns != 0 ? l->timeout_ns : limit};
    bool right = l->descriptors == 0 || limit_descriptors(3 + l->descriptors) == 0;
    dc_status status = right ? dc_comm_create_tcp(address, "g", l->rank, l->world, &options, &comm) : DC_OK;
    right = right && (comm == NULL) == (l->expected != DC_OK) &&
            ((status == l->expected && strstr(dc_last_error(), l->says) != NULL) ||
             (l->or_says != NULL && strstr(dc_last_error(), l->or_says) != NULL));
    if (!right) {
      fprintf(stderr, "rank %d: %s: %s\n", l->rank, dc_status_name(status), dc_last_error());
    }
    fflush(NULL);
    _exit(!right);
  }
  return child;
}

/* Descriptors: alarm, wake, listener. None is left for a connection. */
static void test_rank_0_lacks_descriptors(void **state) {
  (void)state;
  const lacking host = {0,    2, 3, DC_E_SYSTEM, "group \"g\": rank 0 cannot accept a connection: Too many open files",
                        NULL, 0};
  dc__tcp_address at;
  char address[64];
  assert_int_equal(dc__tcp_parse_address("", fresh_address(address), &at), DC_OK);
  pid_t child = start_lacking(address, &host);
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)at.port)};
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = -1;
  do { /* rank 0 may not listen yet, or may have ended when this side connects */
    fd = dc__tcp_connect((const struct sockaddr *)&to, sizeof to, -1, dc__now_ns() + limit);
  } while (fd < 0 && errno == ECONNREFUSED);
  assert_int_equal(end_rank(child), 0);
  dc__tcp_close(&fd);
}

/* Descriptors: alarm, wake, rendezvous with rank 0 (later its control connection), listener. None is left for the first
 * communicator. */
static void test_another_rank_lacks_descriptors(void **state) {
  (void)state;
  static const char says[] = "group \"g\": rank 1 could not connect to rank 0: Too many open files";
  const lacking both[] = {{0, 2, 0, DC_E_SYSTEM, says, NULL, 0}, {1, 2, 4, DC_E_SYSTEM, says, NULL, 0}};
  const lacking alone = {1,    2, 2, DC_E_SYSTEM, "dc_comm_create_tcp: group \"g\": no socket: Too many open files",
                         NULL, 0};
  char address[64];
  pid_t children[2];
  fresh_address(address);
  for (int i = 0; i < 2; i++) {
    children[i] = start_lacking(address, &both[i]);
  }
  for (int i = 0; i < 2; i++) {
    assert_int_equal(end_rank(children[i]), 0);
  }
  assert_int_equal(end_rank(start_lacking(fresh_address(address), &alone)), 0);
}

/* Descriptors: alarm, wake, listener, control connection to rank 0. None is left for the one to rank 1, which waits for
 * it. Rank 0 reports the reason, unless it ends before rank 1 connects to it. */
static void test_a_rank_lacks_descriptors_for_the_control_mesh(void **state) {
  (void)state;
  static const char says[] = "group \"g\": rank 2 could not connect to rank 1: Too many open files";
  char address[64];
  pid_t children[3];
  fresh_address(address);
  for (int32_t r = 0; r < 3; r++) {
    const lacking l = {r, 3, r == 2 ? 4 : 0, DC_E_SYSTEM, says, r == 1 ? "rank 1 could not connect to rank 0" : NULL,
                       0};
    children[r] = start_lacking(address, &l);
  }
  for (int32_t r = 0; r < 3; r++) {
    assert_int_equal(end_rank(children[r]), 0);
  }
}

/* Descriptors: alarm, wake, listener, two of the control mesh, two of the first communicator. That is just enough. */
static void test_a_rank_has_just_enough_descriptors(void **state) {
  (void)state;
  char address[64];
  pid_t children[3];
  fresh_address(address);
  for (int32_t r = 0; r < 3; r++) {
    const lacking l = {r, 3, r == 1 ? 7 : 0, DC_OK, "", NULL, 0};
    children[r] = start_lacking(address, &l);
  }
  for (int32_t r = 0; r < 3; r++) {
    assert_int_equal(end_rank(children[r]), 0);
  }
}

/* Descriptors: alarm, wake, listener, and one for connections, so the second of two silent connections replaces the
 * first. */
static void test_the_deadline_s_text_names_the_lack(void **state) {
  (void)state;
  const lacking host = {
      0,    2,        4, DC_E_TIMEOUT, "rank 1 of 2 has not come after 2.0 s; sent away: 1 connection, the last from ",
      NULL, 2000 * MS};
  const lacking same = {0,
                        2,
                        4,
                        DC_E_TIMEOUT,
                        "; rank 0 could not keep all connections: Too many open files, its process has no descriptors "
                        "left (ulimit -n)",
                        NULL,
                        2000 * MS};
  const lacking *const both[] = {&host, &same};
  for (int i = 0; i < 2; i++) {
    char address[64];
    pid_t child = start_lacking(fresh_address(address), both[i]);
    int first = connect_to(address), second = connect_to(address);
    assert_int_equal(end_rank(child), 0);
    close(first);
    close(second);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_rank_0_lacks_descriptors),
      cmocka_unit_test(test_another_rank_lacks_descriptors),
      cmocka_unit_test(test_a_rank_lacks_descriptors_for_the_control_mesh),
      cmocka_unit_test(test_a_rank_has_just_enough_descriptors),
      cmocka_unit_test(test_the_deadline_s_text_names_the_lack),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
