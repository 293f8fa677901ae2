/* Over TCP a rank finds something else than it looked for: another service at rank 0's address, a group that has formed
 * already, a connection that takes a rank's place. The error names what it found. */
#include "comm/tcp/auth.h"
#include "comm_ranks.h"

#include <errno.h>

#include "leftovers.h"

static const int64_t limit = INT64_C(60000000000);

static int connect_to(const char *address) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  to.sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
  for (int64_t end = dc__now_ns() + limit; dc__now_ns() < end;) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) == 0) {
      return fd;
    }
    close(fd);
    sleep_ms(1);
  }
  return -1;
}

/* Rank 1's side of the handshake, in a group of two without a secret. */
static bool prove(int fd, const dc__tcp_group *group, const dc__tcp_hello *hello) {
  dc__tcp_call call = {.fd = fd, .hello = *hello};
  int64_t deadline = dc__now_ns() + limit;
  return dc__tcp_call_open(group, &call, deadline) == DC__TCP_CALL_OK &&
         dc__tcp_call_prove(group, &call, deadline, "here") == DC__TCP_CALL_OK &&
         dc__tcp_call_finish(group, &call, deadline, "here") == DC__TCP_CALL_OK;
}

/* Until the other side has closed the connection. */
static void await_end(int fd) {
  char byte;
  while (recv(fd, &byte, 1, 0) > 0) {
  }
  close(fd);
}

/* ---- another service at the address ---- */

typedef struct service {
  int listener;
  const void *says;
  size_t bytes;
  bool closes; /* else it keeps the connection */
  bool proves; /* it is libdc up to there */
} service;

/* As rank 0 does, for the opening that came. */
static void answer_rank_1(int fd, const char *came) {
  const dc__tcp_group group = {.sealed = false};
  dc__tcp_opening theirs, own;
  dc__tcp_proof proof;
  dc__tcp_answer answer = {.status = DC_OK};
  memcpy(&theirs, came, sizeof theirs);
  (void)dc__tcp_opening_make(&group, &own);
  (void)!send(fd, &own, sizeof own, MSG_NOSIGNAL);
  (void)!recv(fd, &proof, sizeof proof, MSG_WAITALL);
  dc__tcp_mac(&group, &theirs, &own, &proof.hello, &answer, answer.mac);
  (void)!send(fd, &answer, sizeof answer, MSG_NOSIGNAL);
}

static void *serve(void *arg) {
  const service *s = arg;
  char hello[4096];
  int fd = accept(s->listener, NULL, NULL);
  ssize_t got = recv(fd, hello, sizeof hello, 0);
  if (s->proves) {
    answer_rank_1(fd, hello);
  }
  if (got > 0 && s->bytes > 0) {
    (void)!send(fd, s->says, s->bytes, MSG_NOSIGNAL);
  }
  if (s->closes) {
    close(fd);
  } else {
    await_end(fd);
  }
  return NULL;
}

static pthread_t open_service(service *s, char address[64]) {
  struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof any;
  pthread_t thread;
  s->listener = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(bind(s->listener, (struct sockaddr *)&any, sizeof any), 0);
  assert_int_equal(listen(s->listener, 1), 0);
  assert_int_equal(getsockname(s->listener, (struct sockaddr *)&any, &length), 0);
  snprintf(address, 64, "127.0.0.1:%d", ntohs(any.sin_port));
  pthread_create(&thread, NULL, serve, s);
  return thread;
}

static void close_service(service *s, pthread_t thread) {
  pthread_join(thread, NULL);
  close(s->listener);
}

/* The error of a rank 1 that looks for rank 0 there. */
static void look_for_rank_0(service *s, int64_t timeout_ns, dc_status expected, const char *says) {
  char address[64];
  dc_comm *comm = NULL;
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = timeout_ns};
  pthread_t thread = open_service(s, address);
  dc_status status = dc_comm_create_tcp(address, "g", 1, 2, &options, &comm);
  if (status != expected || strstr(dc_last_error(), says) == NULL || strstr(dc_last_error(), address) == NULL) {
    fail_msg("%s: %s; expected %s: %s", dc_status_name(status), dc_last_error(), dc_status_name(expected), says);
  }
  close_service(s, thread);
}

static void test_another_service(void **state) {
  (void)state;
  static const char http[] = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";
  static const char zeros[6664] = {0};
  const dc__tcp_group none = {.sealed = false};
  dc__tcp_opening half;
  assert_true(dc__tcp_opening_make(&none, &half));
  service web = {.says = http, .bytes = sizeof http - 1, .closes = true};
  look_for_rank_0(&web, limit, DC_E_EXISTS,
                  "is not libdc, or another version of it; it sent \"HTTP/1.1 400 Bad Request\\r\\nConnection: close");
  service null = {.says = zeros, .bytes = sizeof zeros};
  look_for_rank_0(&null, limit, DC_E_EXISTS, "it sent \"\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00");
  service silent = {.bytes = 0};
  look_for_rank_0(&silent, 200 * MS, DC_E_TIMEOUT, "took the connection and said nothing for 0.2 s");
  service closes = {.closes = true};
  look_for_rank_0(&closes, limit, DC_E_PEER_DEAD, "closed the connection");
  service ends = {.says = &half, .bytes = 20, .closes = true};
  look_for_rank_0(&ends, limit, DC_E_PEER_DEAD, "closed the connection");
}

static void test_text_from_the_wire(void **state) {
  (void)state;
  dc__tcp_welcome evil = {.magic = DC__TCP_MAGIC, .status = DC_E_EXISTS};
  char address[64];
  dc_comm *comm = NULL;
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = limit};
  snprintf(evil.text, sizeof evil.text, "\x1b]0;pwn\x07\x1b[2J\xff\xfe\r\nrank 0 ok %%s%%n \xc3\xa9");
  service s = {.says = &evil, .bytes = sizeof evil, .proves = true};
  pthread_t thread = open_service(&s, address);
  assert_int_equal(dc_comm_create_tcp(address, "g", 1, 2, &options, &comm), DC_E_EXISTS);
  assert_string_equal(dc_last_error(), "\\x1b]0;pwn\\x07\\x1b[2J\\xff\\xfe\\r\\nrank 0 ok %s%n \xc3\xa9");
  close_service(&s, thread);
}

/* Reports of connections that rank 0 rejected, while it waited for a rank that did not come. */
typedef struct waiting {
  char address[64];
  const char *says;
  bool right;
} waiting;

static void *wait_for_rank_1(void *arg) {
  waiting *w = arg;
  dc_comm *comm = NULL;
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = 3000 * MS};
  dc_status status = dc_comm_create_tcp(w->address, "g", 0, 2, &options, &comm);
  w->right = status == DC_E_TIMEOUT && strstr(dc_last_error(), "rank 1 of 2 has not come after 3.0 s; ") != NULL &&
             strstr(dc_last_error(), w->says) != NULL;
  if (!w->right) {
    fprintf(stderr, "%s: %s; expected: %s\n", dc_status_name(status), dc_last_error(), w->says);
  }
  return NULL;
}

static void test_rejected_ranks_learn_why(void **state) {
  (void)state;
  static const char get[] = "GET / HTTP/1.0\r\n\r\n";
  const dc__tcp_opening old = {.magic = DC__TCP_MAGIC, .byte_order = 1, .protocol = 1};
  const void *const says[] = {get, &old};
  const size_t bytes[] = {sizeof get - 1, sizeof old};
  waiting ws[] = {{.says = "which sent \"GET / HTTP/1.0\\r\\n\\r\\n\""},
                  {.says = "a rank of another version of libdc"}};
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) {
    fresh_address(ws[i].address);
    pthread_create(&threads[i], NULL, wait_for_rank_1, &ws[i]);
    int fd = connect_to(ws[i].address);
    assert_int_equal(send(fd, says[i], bytes[i], MSG_NOSIGNAL), bytes[i]);
    await_end(fd);
  }
  for (int i = 0; i < 2; i++) {
    pthread_join(threads[i], NULL);
    assert_true(ws[i].right);
  }
}

/* ---- a meeting that this test leads by hand ---- */

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

/* Plays the other ranks until rank 0 has sent its table. They do not connect to it again. */
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

/* Its connection of the control mesh. */
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

/* Rank 1's watcher runs already, so that a heartbeat comes before its failure; rank 2 never connects. */
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

/* ---- after the meeting ---- */

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

/* Not at the meeting's address, and nowhere else. */
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

/* ---- a place that is taken ---- */

typedef struct squat {
  char text[2][512];
} squat;

/* Rank 1's place in communicator 2, for which rank 0 listens. */
static int connect_as_stranger(const dc_comm *comm) {
  dc__tcp_group *group = ((const dc__tcp *)comm)->group;
  char address[64];
  const dc__tcp_hello hello = dc__tcp_hello_make(group, 2);
  for (bool there = false; !there; sleep_ms(1)) {
    pthread_mutex_lock(&group->mutex);
    there = group->listens_for[0] == 2;
    pthread_mutex_unlock(&group->mutex);
  }
  snprintf(address, sizeof address, ":%d", group->endpoints[0].port);
  int fd = connect_to(address);
  if (!prove(fd, group, &hello)) {
    fprintf(stderr, "knock: %s\n", dc_last_error());
  }
  return fd;
}

/* Rank 2 does not come before the group has failed, so that rank 0 still listens. */
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
  int fd = comm->rank == 1 ? connect_as_stranger(comm) : -1;
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

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_another_service),
      cmocka_unit_test(test_text_from_the_wire),
      cmocka_unit_test(test_rejected_ranks_learn_why),
      cmocka_unit_test(test_a_late_rank),
      cmocka_unit_test(test_a_failure_behind_a_heartbeat),
      cmocka_unit_test(test_listeners_close),
      cmocka_unit_test(test_a_place_is_taken),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
