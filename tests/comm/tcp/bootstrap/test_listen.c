/* Where the ranks of a group over TCP listen: an interface by name or by addresses, and a range of ports. */
#include "address.h"
#include "comm_ranks.h"

#include <netinet/in.h>
#include <pthread.h>

typedef struct member {
  dc_comm_options options;
  const char *address;
  int32_t rank;
  dc_status status;
  char text[512];
} member;

static void *join_group(void *arg) {
  member *m = arg;
  dc_comm *comm = NULL;
  m->status = dc_comm_create_tcp(m->address, "listeners", m->rank, 2, &m->options, &comm);
  m->status = m->status == DC_OK ? dc_comm_barrier(comm) : m->status;
  snprintf(m->text, sizeof m->text, "%s", m->status == DC_OK ? "" : dc_last_error());
  dc_comm_destroy(comm);
  return NULL;
}

/* Two ranks meet, and rank 1 has these options. Returns rank 1's result. */
static member meet_with(dc_comm_options options, int64_t timeout_ns) {
  char address[64];
  pthread_t threads[2];
  member both[2];
  options.timeout_ns = timeout_ns;
  for (int32_t r = 0; r < 2; r++) {
    both[r] = (member){.address = address, .rank = r, .options = options};
  }
  both[0].options.network = NULL;
  both[0].options.first_port = both[0].options.last_port = 0;
  (void)fresh_address(address);
  for (int32_t r = 0; r < 2; r++) {
    assert_int_equal(pthread_create(&threads[r], NULL, join_group, &both[r]), 0);
  }
  for (int32_t r = 0; r < 2; r++) {
    assert_int_equal(pthread_join(threads[r], NULL), 0);
  }
  return both[1];
}

static void refused(const dc_comm_options *options, dc_status status, const char *text) {
  const member m = meet_with(*options, INT64_C(3000000000));
  if (m.status != status || strstr(m.text, text) == NULL) {
    fail_msg("%s: \"%s\", must be %s: \"... %s ...\"", dc_status_name(m.status), m.text, dc_status_name(status), text);
  }
}

static void test_interfaces(void **state) {
  (void)state;
  static const char *const good[] = {"lo", "127.0.0.0/8", "127.0.0.1/32"};
  static const char *const bad[] = {"no-such-one", "198.51.100.0/24", "127.0.0.0/33", "127.0.0.0/x", "2001:db8::/32"};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    dc_comm_options options = DC_COMM_OPTIONS_INIT;
    options.network = good[i];
    const member m = meet_with(options, INT64_C(60000000000));
    if (m.status != DC_OK) {
      fail_msg("%s: %s", good[i], m.text);
    }
  }
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    dc_comm_options options = DC_COMM_OPTIONS_INIT;
    options.network = bad[i];
    refused(&options, DC_E_INVALID, "options.network");
  }
}

/* Makes a socket listen at the loopback address, on a port that the system chooses. Returns that port. */
static int32_t occupy(int *fd) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof at;
  *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  assert_int_equal(bind(*fd, (struct sockaddr *)&at, length), 0);
  assert_int_equal(listen(*fd, 1), 0);
  assert_int_equal(getsockname(*fd, (struct sockaddr *)&at, &length), 0);
  return ntohs(at.sin_port);
}

static void test_ports(void **state) {
  (void)state;
  int fd;
  const int32_t port = occupy(&fd);
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  options.first_port = options.last_port = port;
  refused(&options, DC_E_EXISTS, "are in use");
  close(fd);
  options.last_port = port < 65000 ? port + 100 : port; /* the port is free again */
  const member m = meet_with(options, INT64_C(60000000000));
  if (m.status != DC_OK) {
    fail_msg("ports from %d: %s", (int)port, m.text);
  }
}

static void test_wrong_ranges(void **state) {
  (void)state;
  static const int32_t ranges[][2] = {{5000, 4999}, {-1, 10}, {0, 5000}, {5000, 0}, {1, 65536}};
  for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
    dc_comm_options options = DC_COMM_OPTIONS_INIT;
    dc_comm *comm = NULL;
    options.first_port = ranges[i][0];
    options.last_port = ranges[i][1];
    assert_int_equal(dc_comm_create_tcp("127.0.0.1:1", "ranges", 0, 2, &options, &comm), DC_E_INVALID);
    assert_non_null(strstr(dc_last_error(), "_port"));
    assert_null(comm);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_interfaces),
      cmocka_unit_test(test_ports),
      cmocka_unit_test(test_wrong_ranges),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
