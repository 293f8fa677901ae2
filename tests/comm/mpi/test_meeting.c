/* Ranks over MPI that seem to be on different machines without a route to other networks, or on one that has no
 * 127.0.0.1: at which address they meet. This program is both the test and, started by mpirun, a rank. */
#include "comm_ranks.h"
#include "mpi_launchers.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>

#include "comm/machine.h"

enum { RANKS = 2 };

static const char right_address[] = "192.0.2.79";
static char met_at[64];
static bool has_six_alone;

/* ---- a simulated machine ---- */

void __wrap_dc__machine_name(char name[DC__MACHINE_NAME]);
void __wrap_dc__machine_name(char name[DC__MACHINE_NAME]) {
  memset(name, 0, DC__MACHINE_NAME);
  snprintf(name, DC__MACHINE_NAME, "machine %d", has_six_alone ? 0 : (int)getpid());
}

int __real_bind(int fd, const struct sockaddr *to, socklen_t length);
int __wrap_bind(int fd, const struct sockaddr *to, socklen_t length);
int __wrap_bind(int fd, const struct sockaddr *to, socklen_t length) {
  if (has_six_alone && to->sa_family == AF_INET) {
    errno = EADDRNOTAVAIL;
    return -1;
  }
  return __real_bind(fd, to, length);
}

int __real_connect(int fd, const struct sockaddr *to, socklen_t length);
int __wrap_connect(int fd, const struct sockaddr *to, socklen_t length);
int __wrap_connect(int fd, const struct sockaddr *to, socklen_t length) {
  struct sockaddr_in four = {.sin_family = AF_UNSPEC};
  memcpy(&four, to, length < sizeof four ? length : sizeof four);
  if (four.sin_family == AF_INET && four.sin_port == htons(9)) {
    errno = ENETUNREACH;
    return -1;
  }
  return __real_connect(fd, to, length);
}

static void add_interface(struct ifaddrs **list, const char *address, unsigned flags) {
  static struct ifaddrs entries[4];
  static struct sockaddr_in addresses[4];
  static int count;
  struct ifaddrs *entry = &entries[count];
  addresses[count].sin_family = AF_INET;
  (void)inet_pton(AF_INET, address, &addresses[count].sin_addr);
  *entry = (struct ifaddrs){.ifa_next = *list, .ifa_flags = flags, .ifa_addr = (struct sockaddr *)&addresses[count]};
  *list = entry;
  count++;
}

/* add_interface() prepends, so the right address is the last in the list. */
int __wrap_getifaddrs(struct ifaddrs **list);
int __wrap_getifaddrs(struct ifaddrs **list) {
  *list = NULL;
  add_interface(list, right_address, IFF_UP | IFF_RUNNING);
  add_interface(list, "192.0.2.78", IFF_UP);
  add_interface(list, "192.0.2.77", 0);
  add_interface(list, "127.0.0.1", IFF_UP | IFF_RUNNING | IFF_LOOPBACK);
  return 0;
}

void __wrap_freeifaddrs(struct ifaddrs *list);
void __wrap_freeifaddrs(struct ifaddrs *list) {
  (void)list;
}

/* Rank 0 listens at all addresses, so the others can connect by the loopback address, which exists on this machine. */
dc_status __real_dc__comm_create_tcp_at(int listener, const char *address, const char *name, int32_t rank,
                                        int32_t world, const dc_comm_options *options, dc_comm **comm);
dc_status __wrap_dc__comm_create_tcp_at(int listener, const char *address, const char *name, int32_t rank,
                                        int32_t world, const dc_comm_options *options, dc_comm **comm);
dc_status __wrap_dc__comm_create_tcp_at(int listener, const char *address, const char *name, int32_t rank,
                                        int32_t world, const dc_comm_options *options, dc_comm **comm) {
  char there[64];
  snprintf(met_at, sizeof met_at, "%s", address);
  snprintf(there, sizeof there, "127.0.0.1%s", strrchr(address, ':'));
  return __real_dc__comm_create_tcp_at(listener, has_six_alone ? address : there, name, rank, world, options, comm);
}

static int meet(void) {
  dc_comm *comm = open_comm(60000 * MS);
  CHECK(comm != NULL);
  CHECK_OK(dc_comm_barrier(comm));
  dc_comm_destroy(comm);
  printf("met at %s\n", met_at);
  return 0;
}

/* ---- the launchers ---- */

static void check_meeting(const char *role, const char *address) {
  char output[OUTPUT], expected[64];
  skip_without_launchers();
  snprintf(expected, sizeof expected, "met at %s:", address);
  for (size_t i = 0; i < DC__COUNT(launchers); i++) {
    const bool here = is_there(&launchers[i]);
    const int status = here ? launch_ranks(&launchers[i], RANKS, role, false, output) : 0;
    if (here && (status != 0 || strstr(output, expected) == NULL)) {
      fail_msg("%s: status %d, expected \"%s\", said: %s", launchers[i].program, status, expected, output);
    }
  }
}

static void test_ranks_meet_at_an_interface_that_works(void **state) {
  (void)state;
  check_meeting("meet", right_address);
}

static void test_ranks_of_one_machine_meet_without_ipv4(void **state) {
  (void)state;
  check_meeting("six", "[::1]");
}

int main(int argc, char **argv) {
  if (argc > 1) {
    has_six_alone = strcmp(argv[1], "six") == 0;
    return meet();
  }
  set_own_path(argv[0]);
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_ranks_meet_at_an_interface_that_works),
                                     cmocka_unit_test(test_ranks_of_one_machine_meet_without_ipv4)};
  return cmocka_run_group_tests_name("mpi meeting", tests, NULL, NULL);
}
