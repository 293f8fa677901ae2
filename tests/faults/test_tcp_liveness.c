/* Ranks over TCP, one of which dies while a child holds its sockets, is stopped, or loses the network. Each survivor
 * gets an error that names it. If the rank is dead, they get it long before the collective's deadline. */
#define _GNU_SOURCE
#include "comm/tcp/tcp.h"
#include "comm_ranks.h"

#include <net/if.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "leftovers.h"

enum { WORLD = 3, LIMIT_S = 60 /* in seconds; a quiet machine needs 4, but watchers run late on a busy one */ };

static const int64_t far_deadline = INT64_C(170000000000); /* the test's own limit comes before */

typedef struct shared {
  atomic_int formed, go;
  int64_t struck_ns, end_ns[WORLD];
  dc_status status[WORLD];
  char text[WORLD][512];
} shared;

typedef struct group {
  char address[64];
  int64_t deadline_ns, heartbeat_ns;
  bool tls;
  pid_t children[WORLD];
  shared *shared;
} group;

static void run_rank(const group *g, int32_t rank, void (*fault)(void)) {
  dc_comm *comm = NULL;
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  options.timeout_ns = far_deadline;
  options.heartbeat_ns = g->heartbeat_ns;
  options.secret = g->tls ? "0123456789abcdef" : NULL;
  options.tls = g->tls;
  dc_status status = dc_comm_create_tcp(g->address, "alive", rank, WORLD, &options, &comm);
  status = status == DC_OK ? dc_comm_barrier(comm) : status;
  atomic_fetch_add(&g->shared->formed, 1);
  while (status == DC_OK && atomic_load(&g->shared->go) == 0) {
    sleep_ms(1);
  }
  if (rank == 1 && fault != NULL) {
    fault();
  }
  if (status == DC_OK) {
    comm->timeout_ns = g->deadline_ns;
    status = dc_comm_barrier(comm);
  }
  g->shared->end_ns[rank] = dc__now_ns();
  g->shared->status[rank] = status;
  snprintf(g->shared->text[rank], sizeof g->shared->text[0], "%s", dc_last_error());
  dc_comm_destroy(comm);
  _exit(0);
}

static void start(group *g, int64_t deadline_ns, void (*fault)(void)) {
  g->deadline_ns = deadline_ns;
  fresh_address(g->address);
  g->shared = mmap(NULL, sizeof *g->shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true((void *)g->shared != MAP_FAILED);
  fflush(NULL);
  for (int32_t r = 0; r < WORLD; r++) {
    g->children[r] = fork();
    if (g->children[r] == 0) {
      run_rank(g, r, fault);
    }
  }
  while (atomic_load(&g->shared->formed) < WORLD) {
    sleep_ms(1);
  }
}

static void strike(const group *g) {
  g->shared->struck_ns = dc__now_ns();
  atomic_store(&g->shared->go, 1);
}

/* Prints what a survivor got, and how long after the fault. Returns false if that was late. */
static bool tell(const group *g, int32_t rank) {
  const double seconds = (double)(g->shared->end_ns[rank] - g->shared->struck_ns) / 1e9;
  print_message("heartbeats each %.1f s, deadline %.0f s: rank %d after %.2f s: %s: %s\n",
                g->heartbeat_ns == 0 ? 1.0 : (double)g->heartbeat_ns / 1e9, (double)g->deadline_ns / 1e9, rank, seconds,
                dc_status_name(g->shared->status[rank]), g->shared->text[rank]);
  return seconds < LIMIT_S;
}

static void expect(group *g, int32_t rank, dc_status status, const char *says) {
  assert_int_equal(waitpid(g->children[rank], NULL, 0), g->children[rank]);
  if (g->shared->status[rank] != status || strstr(g->shared->text[rank], says) == NULL) {
    fail_msg("rank %d: %s: %s; expected: %s", rank, dc_status_name(g->shared->status[rank]), g->shared->text[rank],
             says);
  }
  assert_true(tell(g, rank));
}

static _Atomic pid_t *holder; /* shared by the ranks: the child that outlives rank 1 */

/* The child lives on, as a data loader or a shell command may. */
static void die_with_a_child(void) {
  const pid_t child = fork();
  if (child == 0) {
    sleep_ms(60000);
    _exit(0);
  }
  atomic_store(holder, child);
  raise(SIGKILL);
}

static void test_held_sockets(void **state) {
  (void)state;
  group g = {.heartbeat_ns = 0};
  holder = mmap(NULL, sizeof *holder, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(holder != MAP_FAILED);
  start(&g, far_deadline, die_with_a_child);
  strike(&g);
  assert_int_equal(waitpid(g.children[1], NULL, 0), g.children[1]);
  expect(&g, 0, DC_E_PEER_DEAD, "rank 1 died");
  expect(&g, 2, DC_E_PEER_DEAD, "rank 1 died");
  assert_int_equal(kill(atomic_load(holder), SIGKILL), 0); /* until now it held the sockets */
  munmap((void *)holder, sizeof *holder);
  munmap(g.shared, sizeof *g.shared);
}

static void stop_oneself(void) {
  raise(SIGSTOP);
}

/* The machine says that the process lives, so the deadline ends the wait. Two groups at once, one with TLS. */
static void test_stopped(void **state) {
  (void)state;
  group groups[2] = {{.heartbeat_ns = 100 * MS}, {.heartbeat_ns = 100 * MS, .tls = true}};
  for (int i = 0; i < 2; i++) {
    start(&groups[i], 6000 * MS, stop_oneself);
    strike(&groups[i]);
  }
  for (int i = 0; i < 2; i++) {
    group *g = &groups[i];
    expect(g, 0, DC_E_TIMEOUT, "but its machine, 127.0.0.1, does: the process is alive but has been late for ");
    expect(g, 2, DC_E_TIMEOUT, "the process is alive but has been late for ");
    kill(g->children[1], SIGKILL);
    assert_int_equal(waitpid(g->children[1], NULL, 0), g->children[1]);
    munmap(g->shared, sizeof *g->shared);
  }
}

/* Returns false if the system does not allow a network namespace. */
static bool set_loopback(bool up) {
  struct ifreq request = {.ifr_name = "lo"};
  int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  request.ifr_flags = up ? IFF_UP : 0;
  bool done = ioctl(fd, SIOCSIFFLAGS, &request) == 0;
  close(fd);
  return done;
}

/* In a network namespace whose only link goes down, every rank is cut off from all others. */
static int cut_off(void) {
  group g = {.heartbeat_ns = 0};
  if ((unshare(CLONE_NEWNET) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) || !set_loopback(true)) {
    return 2;
  }
  start(&g, far_deadline, NULL);
  bool down = set_loopback(false);
  strike(&g);
  for (int32_t r = 0; r < WORLD; r++) {
    CHECK(waitpid(g.children[r], NULL, 0) == g.children[r]);
    CHECK(tell(&g, r));
    CHECK(down && g.shared->status[r] == DC_E_PEER_DEAD);
    CHECK(strstr(g.shared->text[r], "is dead or cut off: its machine, 127.0.0.1, has not answered rank ") != NULL);
  }
  return 0;
}

static void test_link_goes_down(void **state) {
  (void)state;
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    _exit(cut_off());
  }
  int result = end_rank(child);
  if (result == 2) {
    print_message("SKIP: the system refuses a network namespace, so that no link can go down\n");
    skip();
  }
  assert_int_equal(result, 0);
}

static void connect_pair(int ends[2]) {
  struct sockaddr_in at;
  int listener = listen_on_loopback(&at);
  ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  assert_int_equal(connect(ends[0], (struct sockaddr *)&at, sizeof at), 0);
  ends[1] = accept(listener, NULL, NULL);
  close(listener);
}

enum { SILENT_MS = 3200 /* longer than a machine may leave a probe unanswered */ };

static int64_t silence_ms(int fd) {
  struct tcp_info info = {0};
  socklen_t length = sizeof info;
  assert_int_equal(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length), 0);
  return info.tcpi_last_ack_recv;
}

/* Rank 0 of two, whose watcher has heard nothing from rank 1 and has waited as long for its machine to answer; its
 * heartbeats go over fd. */
static void begin_silence(dc__tcp_group *tcp, int fd) {
  *tcp = (dc__tcp_group){.world = 2, .heartbeat_ns = INT64_C(1000000000), .failure_event = -1};
  pthread_mutex_init(&tcp->mutex, NULL);
  tcp->control[0] = -1;
  tcp->control[1] = fd;
  tcp->asked_ns[1] = dc__now_ns() - INT64_C(1000000) * SILENT_MS;
  atomic_store(&tcp->heard_ns[1], tcp->asked_ns[1]);
}

/* On an overloaded machine a watcher sends nothing for seconds, and the kernel no probe. But a machine that was not
 * asked owes no answer. */
static void test_a_machine_that_was_asked_nothing(void **state) {
  (void)state;
  static dc__tcp_group idle;
  int ends[2];
  connect_pair(ends);
  while (silence_ms(ends[0]) < SILENT_MS) {
    sleep_ms(10);
  }
  begin_silence(&idle, ends[0]);
  dc__tcp_send_heartbeats(&idle, false);
  assert_int_equal(atomic_load(&idle.closed[1]), 0);
  pthread_mutex_destroy(&idle.mutex);
  close(ends[0]);
  close(ends[1]);
}

/* While the receiver's buffer is full, bytes of the control connection stay unacknowledged, and the kernel sends probes
 * at ever longer intervals. The same happens behind a slow link's queue. */
static void fill(int fd) {
  static const char bytes[65536];
  while (send(fd, bytes, sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
  }
}

/* A busy system sends a probe late, and receives its answer late. */
static void test_a_machine_that_was_asked_just_now(void **state) {
  (void)state;
  static dc__tcp_group tcp;
  int ends[2];
  connect_pair(ends);
  fill(ends[0]);
  while (silence_ms(ends[0]) < SILENT_MS) {
    sleep_ms(10);
  }
  begin_silence(&tcp, ends[0]);
  tcp.unreachable[1] = true; /* a heartbeat's bytes no longer fit */
  tcp.asked_ns[1] = 0;
  dc__tcp_send_heartbeats(&tcp, false);
  assert_int_equal(atomic_load(&tcp.closed[1]), 0);
  while (atomic_load(&tcp.closed[1]) == 0) { /* a probe may be answered, and then the next one comes later */
    tcp.asked_ns[1] = dc__now_ns() - INT64_C(1000000) * SILENT_MS;
    dc__tcp_send_heartbeats(&tcp, false);
    sleep_ms(10);
  }
  assert_int_equal(atomic_load(&tcp.closed[1]), DC__TCP_DISCONNECTED);
  pthread_mutex_destroy(&tcp.mutex);
  close(ends[0]);
  close(ends[1]);
}

/* Acknowledged data show that the machine is there, whatever is missing on the control connection. */
static void test_a_machine_that_answers_for_data(void **state) {
  (void)state;
  static dc__tcp_group tcp;
  int control[2], data[2], fds[2] = {-1, -1};
  dc__tcp comm = {.fds = fds};
  connect_pair(control);
  connect_pair(data);
  fill(control[0]);
  while (silence_ms(control[0]) < SILENT_MS) {
    sleep_ms(10);
  }
  begin_silence(&tcp, control[0]);
  tcp.members = &comm;
  fds[1] = data[0];
  assert_int_equal(send(data[1], "data", 4, MSG_NOSIGNAL), 4);
  while (silence_ms(data[0]) >= SILENT_MS) {
    sleep_ms(1);
  }
  dc__tcp_send_heartbeats(&tcp, false);
  assert_int_equal(atomic_load(&tcp.closed[1]), 0);
  tcp.members = NULL;
  pthread_mutex_destroy(&tcp.mutex);
  for (int i = 0; i < 2; i++) {
    close(control[i]);
    close(data[i]);
  }
}

static int sleeps(dc_comm *comm, void *arg) {
  struct timespec begun, ended;
  (void)arg;
  CHECK_OK(dc_comm_barrier(comm));
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begun);
  sleep_ms(500);
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ended);
  const int64_t used_ns = (ended.tv_sec - begun.tv_sec) * INT64_C(1000000000) + ended.tv_nsec - begun.tv_nsec;
  CHECK(used_ns < INT64_C(400000000)); /* busy-waiting watchers would use all free processors */
  return 0;
}

/* The heartbeat's interval is Rust's Duration::MAX. */
static void test_heartbeats_that_never_come(void **state) {
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  (void)state;
  options.heartbeat_ns = INT64_MAX;
  assert_int_equal(on_tcp_with(2, &options, sleeps, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_held_sockets),
                                     cmocka_unit_test(test_stopped),
                                     cmocka_unit_test(test_link_goes_down),
                                     cmocka_unit_test(test_a_machine_that_was_asked_nothing),
                                     cmocka_unit_test(test_a_machine_that_was_asked_just_now),
                                     cmocka_unit_test(test_a_machine_that_answers_for_data),
                                     cmocka_unit_test(test_heartbeats_that_never_come)};
  return cmocka_run_group_tests_name("tcp liveness", tests, leftovers_note, leftovers_compare);
}
