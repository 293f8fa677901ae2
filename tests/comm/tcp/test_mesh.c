/* Connections of a group over TCP while it forms and afterwards. Late ranks are refused, a failure ends the control
 * mesh, listeners close, and no other connection takes a rank's place. */
#include "comm/tcp/handshake_test.h"

#include <errno.h>
#include <sys/eventfd.h>

#include "leftovers.h"

/* ---- a rendezvous that this test plays by hand ---- */

typedef struct root {
  char address[64];
  int32_t world;
  int64_t timeout_ns;
  dc_status status;
  char text[512];
} root;

static void *run_root(void *arg) {
  root *r = arg;
  dc_comm *comm = NULL;
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = r->timeout_ns};
  r->status = dc_comm_create_tcp(r->address, "g", 0, r->world, &options, &comm);
  snprintf(r->text, sizeof r->text, "%s", dc_last_error());
  dc_comm_destroy(comm);
  return NULL;
}

static pthread_t start_root(root *r, int32_t world) {
  pthread_t thread;
  *r = (root){.world = world, .timeout_ns = limit};
  fresh_address(r->address);
  pthread_create(&thread, NULL, run_root, r);
  return thread;
}

/* Plays the other ranks until rank 0 has sent its table. They do not connect to rank 0 again. */
static void meet(dc__tcp_group *others, const root *r) {
  int fds[DC__COMM_MAX_WORLD];
  for (int32_t i = 1; i < r->world; i++) {
    others[i] = (dc__tcp_group){.rank = i, .world = r->world, .name = "g", .failure_event = -1};
    others[i].endpoints[i].port = 1;
    const dc__tcp_hello hello = dc__tcp_hello_make(&others[i], DC__TCP_RENDEZVOUS);
    fds[i] = connect_to(r->address);
    assert_true(prove(fds[i], &others[i], &hello));
  }
  for (int32_t i = 1; i < r->world; i++) {
    dc__tcp_welcome welcome = {.more = 1};
    while (welcome.more != 0) {
      assert_int_equal(recv(fds[i], &welcome, sizeof welcome, MSG_WAITALL), sizeof welcome);
      assert_int_equal(welcome.status, DC_OK);
    }
    memcpy(others[i].run, welcome.run, sizeof welcome.run);
    close(fds[i]);
  }
}

/* Opens the other rank's connection of the control mesh. */
static int join_control(const dc__tcp_group *other, const root *r) {
  const dc__tcp_hello hello = dc__tcp_hello_make(other, DC__TCP_CONTROL);
  const int fd = connect_to(r->address);
  assert_true(prove(fd, other, &hello));
  return fd;
}

static void come_late(const root *r, const char *name, const char *says) {
  dc_comm *comm = NULL;
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = limit};
  assert_int_equal(dc_comm_create_tcp(r->address, name, 1, 2, &options, &comm), DC_E_EXISTS);
  assert_non_null(strstr(dc_last_error(), says));
}

static void test_a_late_rank(void **state) {
  (void)state;
  root r;
  dc__tcp_group others[2];
  pthread_t thread = start_root(&r, 2);
  meet(others, &r);
  come_late(&r, "g", "s ago, with another rank 1; no rank can join it now");
  come_late(&r, "h", "another group meets at this address");
  close(join_control(&others[1], &r));
  pthread_join(thread, NULL);
  assert_int_equal(r.status, DC_E_PEER_DEAD);
}

/* Rank 1's watcher runs already, so a heartbeat precedes its failure; rank 2 never connects. */
static void test_a_failure_behind_a_heartbeat(void **state) {
  (void)state;
  root r;
  dc__tcp_group others[3];
  dc__tcp_control_msg messages[] = {{.kind = DC__TCP_HEARTBEAT},
                                    {.kind = DC__TCP_HEARTBEAT},
                                    {.kind = DC__TCP_FAILURE, .status = DC_E_SYSTEM, .rank = 1, .text = "as told"}};
  pthread_t thread = start_root(&r, 3);
  meet(others, &r);
  int fd = join_control(&others[1], &r);
  assert_int_equal(send(fd, messages, sizeof messages, MSG_NOSIGNAL), sizeof messages);
  pthread_join(thread, NULL);
  assert_string_equal(r.text, "as told");
  assert_int_equal(r.status, DC_E_SYSTEM);
  close(fd);
}

/* ---- after the rendezvous ---- */

static bool listens(const dc_comm *comm) {
  dc__tcp_group *group = ((const dc__tcp *)comm)->group;
  pthread_mutex_lock(&group->mesh_mutex);
  const bool is_open = group->listener >= 0;
  pthread_mutex_unlock(&group->mesh_mutex);
  return is_open;
}

static int closed_after(dc_comm *comm, void *arg) {
  const char *address = arg;
  CHECK_OK(dc_comm_barrier(comm));
  CHECK(!listens(comm));
  CHECK(!is_listening(address));
  for (int i = 0; i < 3; i++) {
    dc_comm *copy = NULL;
    CHECK_OK(dc_comm_dup(comm, &copy));
    CHECK(!listens(comm));
    CHECK_OK(dc_comm_barrier(copy));
    dc_comm_destroy(copy);
  }
  return 0;
}

typedef struct member {
  const char *address;
  int32_t rank;
  int result;
} member;

static void *join(void *arg) {
  member *m = arg;
  dc_comm *comm = NULL;
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = limit};
  m->result = 1;
  if (dc_comm_create_tcp(m->address, "g", m->rank, 3, &options, &comm) == DC_OK) {
    m->result = closed_after(comm, (void *)(uintptr_t)m->address);
  }
  dc_comm_destroy(comm);
  return NULL;
}

/* After the rendezvous no rank listens, neither at the rendezvous's address nor elsewhere. */
static void test_listeners_close(void **state) {
  (void)state;
  char address[64];
  member ms[3];
  pthread_t threads[3];
  fresh_address(address);
  for (int32_t i = 0; i < 3; i++) {
    ms[i] = (member){address, i, 0};
    pthread_create(&threads[i], NULL, join, &ms[i]);
  }
  for (int32_t i = 0; i < 3; i++) {
    pthread_join(threads[i], NULL);
    assert_int_equal(ms[i].result, 0);
  }
}

/* ---- a rank's place that is already taken ---- */

typedef struct squat {
  char text[2][512];
} squat;

/* Takes rank 1's place in communicator 2, for which rank 0 listens. */
static int connect_unknown(const dc_comm *comm) {
  dc__tcp_group *group = ((const dc__tcp *)comm)->group;
  char address[64];
  const dc__tcp_hello hello = dc__tcp_hello_make(group, 2);
  for (bool there = false; !there; sleep_ms(1)) {
    pthread_mutex_lock(&group->mutex);
    there = group->listens_for[0] == 2;
    snprintf(address, sizeof address, ":%d", group->listens_on[0]);
    pthread_mutex_unlock(&group->mutex);
  }
  int fd = connect_to(address);
  if (!prove(fd, group, &hello)) {
    fprintf(stderr, "knock: %s\n", dc_last_error());
  }
  return fd;
}

/* Rank 2 does not join before the group has failed, so rank 0 still listens. */
static int taken(dc_comm *comm, void *arg) {
  squat *s = arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_barrier(comm));
  if (comm->rank == 2) {
    while (dc_comm_check(comm) == DC_OK) {
      sleep_ms(1);
    }
    return 0;
  }
  int fd = comm->rank == 1 ? connect_unknown(comm) : -1;
  dc_status status = dc_comm_dup(comm, &copy);
  snprintf(s->text[comm->rank], sizeof s->text[0], "%s", dc_last_error());
  if (fd >= 0) {
    close(fd);
  }
  CHECK(status == DC_E_EXISTS);
  CHECK_SAYS("two connections to rank 0 say that they are rank 1's for communicator 2: from 127.0.0.1:");
  return 0;
}

static void test_a_place_is_taken(void **state) {
  (void)state;
  squat s;
  assert_int_equal(on_tcp(3, limit, taken, &s), 0);
  assert_string_equal(s.text[0], s.text[1]);
}

/* ---- a machine that does not answer ---- */

typedef struct caller {
  struct sockaddr_in to;
  int failure_event, error;
} caller;

static void *connect_unanswered(void *arg) {
  caller *c = arg;
  int fd = dc__tcp_connect((const struct sockaddr *)&c->to, sizeof c->to, c->failure_event, dc__now_ns() + limit);
  c->error = fd < 0 ? errno : 0;
  dc__tcp_close(&fd);
  return NULL;
}

/* A listener with a full backlog drops further connections, as a machine that vanished does. */
static void test_a_failure_ends_a_connect(void **state) {
  (void)state;
  caller c = {.failure_event = eventfd(0, EFD_CLOEXEC)};
  socklen_t length = sizeof c.to;
  pthread_t thread;
  int listener = socket(AF_INET, SOCK_STREAM, 0), fillers[3];
  c.to = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  assert_int_equal(bind(listener, (struct sockaddr *)&c.to, sizeof c.to), 0);
  assert_int_equal(listen(listener, 0), 0);
  assert_int_equal(getsockname(listener, (struct sockaddr *)&c.to, &length), 0);
  for (int i = 0; i < 3; i++) {
    fillers[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    (void)connect(fillers[i], (const struct sockaddr *)&c.to, sizeof c.to);
  }
  sleep_ms(100);
  const int64_t begun = dc__now_ns();
  pthread_create(&thread, NULL, connect_unanswered, &c);
  sleep_ms(100);
  assert_int_equal(eventfd_write(c.failure_event, 1), 0);
  pthread_join(thread, NULL);
  assert_int_equal(c.error, ECANCELED);
  assert_true(dc__now_ns() - begun < limit / 4);
  for (int i = 0; i < 3; i++) {
    close(fillers[i]);
  }
  close(listener);
  close(c.failure_event);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_late_rank),
                                     cmocka_unit_test(test_a_failure_behind_a_heartbeat),
                                     cmocka_unit_test(test_listeners_close), cmocka_unit_test(test_a_place_is_taken),
                                     cmocka_unit_test(test_a_failure_ends_a_connect)};
  return cmocka_run_group_tests_name("tcp mesh", tests, leftovers_note, leftovers_compare);
}
