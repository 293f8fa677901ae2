/* How the ranks of MPI find each other over TCP: each rank says on which machine it runs, and rank 0 sends the address
 * where it listens and a new secret. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <net/if.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "comm/machine.h"
#include "comm/mpi/mpi.h"

enum { ADDRESS = 80, SECRET_BYTES = 32 };

/* The message from each rank to the others. Plain data. */
typedef struct mpi_hello {
  char machine[DC__MACHINE_NAME];
} mpi_hello;

/* The message from rank 0 to the others. */
typedef struct mpi_invitation {
  char address[ADDRESS]; /* empty: it cannot listen */
  char secret[2 * SECRET_BYTES + 1];
} mpi_invitation;

/* ---- where ---- */

/* The address from which this machine sends to others. Connecting a datagram socket sends nothing. */
static bool find_sending_address(char host[INET6_ADDRSTRLEN]) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(9)}, own = {.sin_family = AF_INET};
  socklen_t length = sizeof own;
  (void)inet_pton(AF_INET, "192.0.2.1", &to.sin_addr); /* reserved for documentation */
  int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  bool found = fd >= 0 && connect(fd, (const struct sockaddr *)&to, sizeof to) == 0 &&
               getsockname(fd, (struct sockaddr *)&own, &length) == 0 &&
               inet_ntop(AF_INET, &own.sin_addr, host, INET6_ADDRSTRLEN) != NULL;
  if (fd >= 0) {
    close(fd);
  }
  return found;
}

/* Without a route: the address of the first interface that is up, has a link, and is not loopback. Other interfaces may
 * keep addresses that do not work. */
static bool find_first_address(char host[INET6_ADDRSTRLEN]) {
  struct ifaddrs *list = NULL;
  struct sockaddr_in four;
  bool found = false;
  if (getifaddrs(&list) != 0) {
    return false;
  }
  for (const struct ifaddrs *i = list; i != NULL && !found; i = i->ifa_next) {
    const bool works = (i->ifa_flags & (IFF_UP | IFF_RUNNING | IFF_LOOPBACK)) == (IFF_UP | IFF_RUNNING);
    if (works && i->ifa_addr != NULL && i->ifa_addr->sa_family == AF_INET) {
      memcpy(&four, i->ifa_addr, sizeof four);
      found = inet_ntop(AF_INET, &four.sin_addr, host, INET6_ADDRSTRLEN) != NULL;
    }
  }
  freeifaddrs(list);
  return found;
}

/* A container may have ::1 alone. */
static bool has_four_loopback(void) {
  const struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const bool has = fd < 0 || bind(fd, (const struct sockaddr *)&own, sizeof own) == 0 || errno != EADDRNOTAVAIL;
  if (fd >= 0) {
    close(fd);
  }
  return has;
}

/* Finds rank 0's address for the others. *at is where to listen; NULL: at all addresses. */
static dc_status find_host(const dc_comm_options *options, bool one_machine, char host[INET6_ADDRSTRLEN],
                           unsigned char bytes[16], const unsigned char **at) {
  static const unsigned char mapped[12] = {[10] = 0xff, [11] = 0xff};
  *at = NULL;
  if (options->network != NULL) {
    DC__TRY(dc__tcp_find_address("dc_comm_create_mpi", options->network, bytes));
    *at = bytes;
    bool four = memcmp(bytes, mapped, sizeof mapped) == 0;
    (void)inet_ntop(four ? AF_INET : AF_INET6, four ? bytes + 12 : bytes, host, INET6_ADDRSTRLEN);
    return DC_OK;
  }
  if (one_machine) {
    snprintf(host, INET6_ADDRSTRLEN, has_four_loopback() ? "127.0.0.1" : "::1");
    return DC_OK;
  }
  return find_sending_address(host) || find_first_address(host)
             ? DC_OK
             : dc__fail(DC_E_SYSTEM,
                        "dc_comm_create_mpi: rank 0's machine has no IPv4 address that other machines reach; name an "
                        "interface in options.network");
}

/* ---- the invitation ---- */

static dc_status listen_on_free_port(const dc_comm_options *options, const unsigned char *at, int32_t *port, int *fd) {
  dc_status status = DC_E_EXISTS;
  for (int32_t p = options->first_port; status == DC_E_EXISTS && p <= options->last_port; p++) {
    *port = p;
    status = dc__tcp_listen(at, port, fd);
  }
  return status;
}

static dc_status make_invitation(const dc_comm_options *options, bool one_machine, mpi_invitation *out, int *listener) {
  unsigned char secret[SECRET_BYTES], bytes[16];
  const unsigned char *at;
  char host[INET6_ADDRSTRLEN];
  int32_t port = 0;
  if (!dc__random_bytes(secret, sizeof secret)) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_mpi: no random bytes: %s", strerror(errno));
  }
  for (size_t i = 0; i < sizeof secret; i++) {
    snprintf(out->secret + 2 * i, 3, "%02x", secret[i]);
  }
  DC__TRY(find_host(options, one_machine, host, bytes, &at));
  DC__TRY(listen_on_free_port(options, at, &port, listener));
  snprintf(out->address, sizeof out->address, strchr(host, ':') == NULL ? "%s:%" PRId32 : "[%s]:%" PRId32, host, port);
  return DC_OK;
}

/* ---- over MPI ---- */

/* Buffers of the meeting. MPI may use them even after an error; then they are leaked. */
typedef struct mpi_meeting {
  mpi_hello hellos[DC__COMM_MAX_WORLD];
  mpi_invitation invitation;
  int counts[DC__COMM_MAX_WORLD], at[DC__COMM_MAX_WORLD];
} mpi_meeting;

static dc__mpi_wait begin_wait(int64_t timeout_ns) {
  const dc__mpi_runtime *runtime = &dc__mpi_runtime_state;
  return (dc__mpi_wait){.mpi = runtime->library,
                        .rank = runtime->rank,
                        .timeout_ns = timeout_ns,
                        .what = "dc_comm_create_mpi",
                        .count = 1};
}

static dc_status exchange_hellos(mpi_meeting *meeting, int64_t timeout_ns) {
  const dc__mpi_runtime *runtime = &dc__mpi_runtime_state;
  dc__mpi_wait wait = begin_wait(timeout_ns);
  dc__machine_name(meeting->hellos[runtime->rank].machine);
  for (int32_t r = 0; r < runtime->size; r++) {
    meeting->counts[r] = (int)sizeof(mpi_hello);
    meeting->at[r] = r * (int)sizeof(mpi_hello);
  }
  DC__TRY(dc__mpi_check_result(&wait, "MPI_Iallgatherv",
                               wait.mpi->calls->iallgatherv(wait.mpi, meeting->hellos, meeting->counts, meeting->at,
                                                            runtime->world, &wait.requests[0])));
  return dc__mpi_wait_all(&wait);
}

static bool is_one_machine(const mpi_meeting *meeting) {
  bool one = true;
  for (int32_t r = 1; r < dc__mpi_runtime_state.size; r++) {
    one = one && memcmp(meeting->hellos[r].machine, meeting->hellos[0].machine, sizeof meeting->hellos[0].machine) == 0;
  }
  return one;
}

static dc_status broadcast_invitation(mpi_meeting *meeting, int64_t timeout_ns) {
  const dc__mpi_runtime *runtime = &dc__mpi_runtime_state;
  dc__mpi_wait wait = begin_wait(timeout_ns);
  DC__TRY(dc__mpi_check_result(&wait, "MPI_Ibcast",
                               wait.mpi->calls->ibcast(wait.mpi, &meeting->invitation, (int)sizeof meeting->invitation,
                                                       0, runtime->world, &wait.requests[0])));
  return dc__mpi_wait_all(&wait);
}

static dc_status accept_invitation(const mpi_invitation *invitation, const dc_comm_options *options, int listener,
                                   dc_comm **control) {
  const dc__mpi_runtime *runtime = &dc__mpi_runtime_state;
  dc_comm_options tcp = *options;
  tcp.secret = invitation->secret;
  dc__mpi_progress_join(); /* so that MPI delivers the invitation: no communicator does this yet */
  dc__mpi_progress_begin();
  const dc_status status =
      dc__comm_create_tcp_at(listener, invitation->address, "mpi", runtime->rank, runtime->size, &tcp, control);
  dc__mpi_progress_end();
  dc__mpi_progress_leave();
  return status;
}

static dc_status run_meeting(mpi_meeting *meeting, const dc_comm_options *options, dc_comm **control) {
  const dc__mpi_runtime *runtime = &dc__mpi_runtime_state;
  int listener = -1;
  dc__failure failure = {DC_OK, ""};
  DC__TRY(exchange_hellos(meeting, options->timeout_ns));
  if (runtime->rank == 0) { /* a failure is told to the others, which would wait */
    dc__failure_keep(&failure, make_invitation(options, is_one_machine(meeting), &meeting->invitation, &listener));
  }
  dc_status status = broadcast_invitation(meeting, options->timeout_ns);
  if (status == DC_OK && failure.status == DC_OK && meeting->invitation.address[0] != '\0') {
    return accept_invitation(&meeting->invitation, options, listener, control);
  }
  dc__tcp_close(&listener);
  DC__TRY(status);
  return failure.status != DC_OK
             ? dc__failure_raise(&failure)
             : dc__fail(DC_E_SYSTEM, "dc_comm_create_mpi: rank 0 cannot listen for the others; its error says why");
}

dc_status dc__mpi_meet(const dc_comm_options *options, dc_comm **control) {
  int before = atomic_load(&dc__mpi_runtime_state.abandoned);
  mpi_meeting *meeting = dc__calloc(1, sizeof *meeting);
  if (meeting == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = run_meeting(meeting, options, control);
  explicit_bzero(meeting->invitation.secret, sizeof meeting->invitation.secret);
  if (atomic_load(&dc__mpi_runtime_state.abandoned) == before) {
    dc__free(meeting);
  }
  return status;
}
