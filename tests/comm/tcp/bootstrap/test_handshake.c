/* Over TCP a rank may find something else at rank 0's address: another service. The error names what it found. A rank
 * that is slow in its handshake keeps its connection. */
#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>

#include "comm/tcp/handshake_test.h"
#include "comm/tcp/tls/tls.h"

/* Waits until the other side has closed the connection. */
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
  bool closes; /* otherwise it keeps the connection open */
  bool proves; /* it behaves as libdc in the handshake */
  int drops;   /* number of connections that it drops first, as libdc does when flooded */
} service;

/* Answers the received opening as rank 0 does. */
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

static void drop(int fd) {
  const dc__tcp_group group = {.sealed = false};
  dc__tcp_opening own;
  (void)dc__tcp_opening_make(&group, &own);
  (void)!send(fd, &own, sizeof own, MSG_NOSIGNAL);
  close(fd);
}

static void serve_one(service *s, int fd) {
  char hello[4096];
  ssize_t got = recv(fd, hello, sizeof hello, 0);
  if (s->drops-- > 0) {
    drop(fd);
    return;
  }
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
}

/* Accepts repeatedly, as a rank whose connection was dropped connects again. */
static void *serve(void *arg) {
  service *s = arg;
  int fd;
  while ((fd = accept(s->listener, NULL, NULL)) >= 0) {
    serve_one(s, fd);
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
  shutdown(s->listener, SHUT_RDWR); /* ends accept() */
  pthread_join(thread, NULL);
  close(s->listener);
}

/* Rank 1 looks for rank 0 at the service's address, and must get this error. */
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

/* Rank 1's error must be rank 0's answer. */
static void hear_rank_0(service *s, const char *answer) {
  char address[64];
  dc_comm *comm = NULL;
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = limit};
  pthread_t thread = open_service(s, address);
  assert_int_equal(dc_comm_create_tcp(address, "g", 1, 2, &options, &comm), DC_E_EXISTS);
  assert_string_equal(dc_last_error(), answer);
  close_service(s, thread);
}

static void test_text_from_the_wire(void **state) {
  (void)state;
  dc__tcp_welcome evil = {.magic = DC__TCP_MAGIC, .status = DC_E_EXISTS};
  snprintf(evil.text, sizeof evil.text, "\x1b]0;pwn\x07\x1b[2J\xff\xfe\r\nrank 0 ok %%s%%n \xc3\xa9");
  service s = {.says = &evil, .bytes = sizeof evil, .proves = true};
  hear_rank_0(&s, "\\x1b]0;pwn\\x07\\x1b[2J\\xff\\xfe\\r\\nrank 0 ok %s%n \xc3\xa9");
}

/* Rank 1 connects again until its deadline. */
static void test_a_flooded_rank_0(void **state) {
  (void)state;
  dc__tcp_welcome welcome = {.magic = DC__TCP_MAGIC, .status = DC_E_EXISTS, .text = "heard at last"};
  service s = {.says = &welcome, .bytes = sizeof welcome, .proves = true, .drops = 2 * DC__TCP_ATTEMPTS};
  hear_rank_0(&s, "heard at last");
}

/* Rank 0 waits for a rank that does not come, and its error reports the connections that it rejected. */
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

/* ---- a busy machine ---- */

/* Rank 1 begins TLS with rank 0, and then pauses. */
typedef struct late_rank {
  dc__tcp_group group;
  char address[64];
  atomic_int goes_on;
  bool accepted, encrypted;
} late_rank;

static void prepare(dc__tcp_group *group, int32_t rank) {
  group->world = 2;
  group->rank = rank;
  group->tls = true;
  group->failure_event = -1;
  dc__tcp_set_secret(group, "of a test, which has bytes");
}

static void *begin_tls(void *arg) {
  late_rank *late = arg;
  dc__tcp_call call = {.fd = connect_to(late->address), .hello = dc__tcp_hello_make(&late->group, DC__TCP_FIRST)};
  const int64_t deadline = dc__now_ns() + limit;
  late->accepted = dc__tcp_call_open(&late->group, &call, deadline) == DC__TCP_CALL_OK &&
                   dc__tcp_call_prove(&late->group, &call, deadline, "there") == DC__TCP_CALL_OK &&
                   dc__tcp_call_finish(&late->group, &call, deadline, "there") == DC__TCP_CALL_OK;
  while (atomic_load(&late->goes_on) == 0) {
    sleep_ms(1);
  }
  late->encrypted = late->accepted && dc__tcp_call_encrypt(&late->group, &call, deadline, "there") == DC__TCP_CALL_OK;
  dc__tcp_close(&call.fd);
  return NULL;
}

/* Returns true once a handshake is complete. */
static bool poll_pending(dc__tcp_group *group) {
  dc__tcp_hello hello;
  dc_status status;
  int fd;
  const bool complete = dc__tcp_poll_hello(group, true, &hello, &fd, &status);
  assert_int_equal(status, DC_OK);
  if (complete) {
    assert_int_equal(hello.rank, 1);
    dc__tcp_close(&fd);
  }
  return complete;
}

/* The other rank considers the connection complete, so this one must not drop it. */
static void test_a_rank_that_is_late_with_tls(void **state) {
  (void)state;
  static dc__tcp_group group;
  static late_rank late;
  int32_t port = 0;
  pthread_t thread;
  assert_int_equal(dc__tls_load("test"), DC_OK);
  prepare(&group, 0);
  prepare(&late.group, 1);
  assert_int_equal(dc__tcp_listen(NULL, &port, &group.listener), DC_OK);
  snprintf(late.address, sizeof late.address, "127.0.0.1:%d", port);
  pthread_create(&thread, NULL, begin_tls, &late);
  while (group.pending.count == 0 || !group.pending.candidates[0].encrypts) {
    assert_false(poll_pending(&group));
    sleep_ms(1);
  }
  group.pending.candidates[0].since_ns -= limit;
  assert_false(dc__tcp_drop_pending(&group));
  while (atomic_exchange(&late.goes_on, 1) == 0 || group.pending.count > 0) {
    if (poll_pending(&group)) {
      break;
    }
    sleep_ms(1);
  }
  pthread_join(thread, NULL);
  assert_true(late.encrypted);
  dc__tcp_close(&group.listener);
}

/* ---- the flags of a socket ---- */

static _Thread_local int accept_flags;

/* Replaces the C library's, and records the flags. */
int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags);
int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags) {
  accept_flags = flags;
  return (int)syscall(SYS_accept4, fd, address, length, flags);
}

/* A program that another thread starts at that moment must not inherit the connection. */
static void test_accepted_with_its_flags(void **state) {
  (void)state;
  int32_t port = 0;
  int listener, fd;
  char address[64];
  assert_int_equal(dc__tcp_listen(NULL, &port, &listener), DC_OK);
  snprintf(address, sizeof address, "127.0.0.1:%d", port);
  int other = connect_to(address);
  do {
    fd = dc__tcp_accept(listener);
  } while (fd < 0);
  assert_int_equal(accept_flags, SOCK_CLOEXEC | SOCK_NONBLOCK);
  assert_true((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0 && (fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
  close(other);
  dc__tcp_close(&fd);
  dc__tcp_close(&listener);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_another_service),
                                     cmocka_unit_test(test_text_from_the_wire),
                                     cmocka_unit_test(test_a_flooded_rank_0),
                                     cmocka_unit_test(test_rejected_ranks_learn_why),
                                     cmocka_unit_test(test_a_rank_that_is_late_with_tls),
                                     cmocka_unit_test(test_accepted_with_its_flags)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
