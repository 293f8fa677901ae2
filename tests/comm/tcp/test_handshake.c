/* Over TCP a rank finds something else than it looked for: another service at rank 0's address, a group that has formed
 * already, a connection that takes a rank's place. The error names what it found. */
#include "comm/tcp/auth.h"
#include "comm_ranks.h"

#include <errno.h>

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

/* ---- a group that has formed ---- */

typedef struct formed {
  char address[64];
  atomic_int step;
} formed;

static void reach(formed *f, int step) {
  while (atomic_load(&f->step) < step) {
    sleep_ms(1);
  }
}

static int rank_of_formed(dc_comm *comm, formed *f) {
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_barrier(comm));
  atomic_fetch_add(&f->step, 1); /* 2: both are here, and call nothing */
  reach(f, 3);
  if (comm->rank == 1) {
    reach(f, 4); /* while rank 0 waits for it to make a copy */
  }
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK_OK(dc_comm_barrier(copy));
  atomic_fetch_add(&f->step, 1); /* 6 */
  reach(f, 7);
  dc_comm_destroy(copy);
  return 0;
}

typedef struct member {
  formed *group;
  int32_t rank;
  int result;
} member;

static void *join_formed(void *arg) {
  member *m = arg;
  dc_comm *comm = NULL;
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = limit};
  m->result = dc_comm_create_tcp(m->group->address, "g", m->rank, 2, &options, &comm) == DC_OK
                  ? rank_of_formed(comm, m->group)
                  : 1;
  dc_comm_destroy(comm);
  return NULL;
}

static void come_late(const formed *f, const char *name, const char *says) {
  dc_comm *comm = NULL;
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = limit / 3};
  assert_int_equal(dc_comm_create_tcp(f->address, name, 1, 2, &options, &comm), DC_E_EXISTS);
  assert_non_null(strstr(dc_last_error(), says));
}

static void test_a_late_rank(void **state) {
  (void)state;
  static const char formed_already[] = "s ago, with another rank 1; no rank can join it now";
  formed f = {.step = 0};
  member ms[] = {{&f, 0, 0}, {&f, 1, 0}};
  pthread_t threads[2];
  fresh_address(f.address);
  for (int i = 0; i < 2; i++) {
    pthread_create(&threads[i], NULL, join_formed, &ms[i]);
  }
  reach(&f, 2);
  for (int i = 0; i < 3; i++) {
    come_late(&f, "g", formed_already);
    come_late(&f, "h", "another group meets at this address");
  }
  atomic_store(&f.step, 3);
  for (int i = 0; i < 20; i++) { /* one of them at least when rank 0 waits itself */
    come_late(&f, "g", formed_already);
    sleep_ms(5);
  }
  atomic_store(&f.step, 4);
  reach(&f, 6);
  come_late(&f, "g", formed_already);
  atomic_store(&f.step, 7);
  for (int i = 0; i < 2; i++) {
    pthread_join(threads[i], NULL);
    assert_int_equal(ms[i].result, 0);
  }
}

/* ---- a place that is taken ---- */

typedef struct squat {
  char text[2][512];
  atomic_int here;
  bool early; /* the foreign connection comes before the rank, else after it */
} squat;

static int connect_as_stranger(const dc_comm *comm) {
  const dc__tcp_group *group = ((const dc__tcp *)comm)->group;
  char address[64];
  dc__tcp_hello hello = dc__tcp_hello_make(group, 2);
  hello.rank = 1;
  snprintf(address, sizeof address, ":%d", group->endpoints[0].port);
  int fd = connect_to(address);
  if (!prove(fd, group, &hello)) {
    fprintf(stderr, "knock: %s\n", dc_last_error());
  }
  return fd;
}

/* Waits for rank 1's connection for a communicator that this rank has not made yet. */
static void await_early(const dc_comm *comm) {
  dc__tcp_group *group = ((const dc__tcp *)comm)->group;
  for (bool there = false; !there; sleep_ms(1)) {
    pthread_mutex_lock(&group->mesh_mutex);
    there = group->early_count > 0;
    pthread_mutex_unlock(&group->mesh_mutex);
  }
}

static int taken(dc_comm *comm, void *arg) {
  squat *s = arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_barrier(comm));
  if (comm->rank == 0) {
    int fd = s->early ? connect_as_stranger(comm) : -1;
    if (s->early) {
      await_early(comm);
    }
    atomic_store(&s->here, 1);
    if (!s->early) {
      await_early(comm);
      fd = connect_as_stranger(comm);
    }
    while (dc_comm_check(comm) == DC_OK) {
      sleep_ms(1);
    }
    close(fd);
  }
  while (atomic_load(&s->here) == 0) {
    sleep_ms(1);
  }
  dc_status status = dc_comm_dup(comm, &copy);
  if (status == DC_OK) { /* rank 1 waits for no rank there */
    status = dc_comm_barrier(copy);
  }
  snprintf(s->text[comm->rank], sizeof s->text[0], "%s", dc_last_error());
  CHECK(status == DC_E_EXISTS);
  CHECK_SAYS("two connections to rank 0 say that they are rank 1's for communicator 2: from 127.0.0.1:");
  dc_comm_destroy(copy);
  return 0;
}

static void test_a_place_is_taken(void **state) {
  (void)state;
  for (int early = 0; early < 2; early++) {
    squat s = {.early = early != 0};
    assert_int_equal(on_tcp(2, limit, taken, &s), 0);
    assert_string_equal(s.text[0], s.text[1]);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_another_service),          cmocka_unit_test(test_text_from_the_wire),
      cmocka_unit_test(test_rejected_ranks_learn_why), cmocka_unit_test(test_a_late_rank),
      cmocka_unit_test(test_a_place_is_taken),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
