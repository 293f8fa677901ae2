/* Other processes connect to the ranks' listeners: with and without the group's name, with another secret or none. They
 * send a recorded handshake, garbage at each byte, or nothing, or leave connections half open by the hundred. The group
 * forms, and its sums are right. */
#include "comm/tcp/bootstrap/auth.h"
#include "comm_ranks.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "leftovers.h"

static const int64_t limit = INT64_C(60000000000);
static const char secret[] = "0123456789abcdef0123456789abcdef";

static int connect_to(const char *address) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  to.sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
  for (int64_t end = dc__now_ns() + limit; dc__now_ns() < end;) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) == 0) {
      return fd;
    }
    close(fd);
    sleep_ms(1);
  }
  return -1;
}

typedef struct member {
  const char *address, *secret;
  int32_t rank, world;
  int64_t timeout_ns;
  dc_status status;
  float sum;
  char text[512];
} member;

static void *join(void *arg) {
  member *m = arg;
  const int64_t count = 1;
  dc_comm *comm = NULL;
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  options.timeout_ns = m->timeout_ns;
  options.secret = m->secret;
  m->sum = (float)(m->rank + 1);
  m->status = dc_comm_create_tcp(m->address, "g", m->rank, m->world, &options, &comm);
  if (m->status == DC_OK) {
    dc_tensor tensor = DC_TENSOR_INIT;
    tensor.data = &m->sum;
    tensor.shape = &count;
    tensor.ndim = 1;
    tensor.dtype = DC_FLOAT32;
    m->status = dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL);
  }
  snprintf(m->text, sizeof m->text, "%s", dc_last_error());
  dc_comm_destroy(comm);
  return NULL;
}

static pthread_t start(member *m, const char *address, int32_t rank, const char *its_secret) {
  pthread_t thread;
  *m = (member){.address = address, .secret = its_secret, .rank = rank, .world = 2, .timeout_ns = limit};
  pthread_create(&thread, NULL, join, m);
  return thread;
}

/* Rank 1 joins, and the group of two reduces. */
static void complete(const char *address, pthread_t root, member *rank_0) {
  member rank_1;
  pthread_t thread = start(&rank_1, address, 1, secret);
  pthread_join(thread, NULL);
  pthread_join(root, NULL);
  if (rank_0->status != DC_OK || rank_1.status != DC_OK) {
    fail_msg("%s; %s", rank_0->text, rank_1.text);
  }
  assert_true(rank_0->sum == 3 && rank_1.sum == 3);
}

static void refused(const char *address, const char *its_secret, dc_status status, const char *says) {
  member m;
  pthread_join(start(&m, address, 1, its_secret), NULL);
  if (m.status != status || strstr(m.text, says) == NULL) {
    fail_msg("%s: %s; expected: %s", dc_status_name(m.status), m.text, says);
  }
}

/* The process knows the address, the name, the rank and the world. */
static void test_wrong_secrets(void **state) {
  (void)state;
  char address[64];
  member root;
  pthread_t thread = start(&root, fresh_address(address), 0, secret);
  refused(address, "another secret of 32 bytes in all", DC_E_EXISTS, "have different secrets");
  refused(address, NULL, DC_E_MISMATCH, "rank 1 has no secret, but the group at ");
  complete(address, thread, &root);
  thread = start(&root, fresh_address(address), 0, NULL);
  refused(address, secret, DC_E_MISMATCH, "rank 1 has a secret, but the group at ");
  member rank_1;
  pthread_join(start(&rank_1, address, 1, NULL), NULL);
  pthread_join(thread, NULL);
  assert_true(rank_1.status == DC_OK && rank_1.sum == 3);
}

static void test_secrets_of_wrong_length(void **state) {
  (void)state;
  char address[64], longer[1026];
  memset(longer, 'x', sizeof longer - 1);
  longer[sizeof longer - 1] = '\0';
  refused(fresh_address(address), "short", DC_E_INVALID, "options.secret has too few bytes, must have 16 to 1024");
  refused(address, longer, DC_E_INVALID, "options.secret has too many bytes");
}

/* Without a secret the address must be loopback, on rank 0 and on the others. No machine has 192.0.2.1. */
static void test_no_secret(void **state) {
  (void)state;
  member m;
  pthread_join(start(&m, "192.0.2.1:4000", 0, NULL), NULL);
  assert_int_equal(m.status, DC_E_INVALID);
  assert_non_null(strstr(m.text, "has no options.secret, and the address is not this machine's loopback"));
}

/* A group in which a thread of the test plays rank 1. */
static dc__tcp_group fake_rank_1(void) {
  dc__tcp_group group = {.rank = 1, .world = 2, .name = "g", .failure_event = -1};
  dc__tcp_set_secret(&group, secret);
  return group;
}

/* Starts rank 0 of a group of three, which waits for rank 1 and another rank. */
static pthread_t start_root_of_three(member *root, char address[64], dc__tcp_group *rank_1) {
  pthread_t thread;
  *rank_1 = fake_rank_1();
  rank_1->world = 3;
  *root = (member){.address = fresh_address(address), .secret = secret, .world = 3, .timeout_ns = limit};
  pthread_create(&thread, NULL, join, root);
  return thread;
}

/* A later run gets all that rank 1, with the secret, said in the handshake of an earlier run. */
static void test_replay(void **state) {
  (void)state;
  char address[64];
  member root;
  dc__tcp_group own;
  const int64_t deadline = dc__now_ns() + limit;
  pthread_t thread = start_root_of_three(&root, address, &own);
  dc__tcp_call call = {.fd = connect_to(address), .hello = dc__tcp_hello_make(&own, DC__TCP_RENDEZVOUS)};
  assert_int_equal(dc__tcp_call_open(&own, &call, deadline), DC__TCP_CALL_OK);
  assert_int_equal(dc__tcp_call_prove(&own, &call, deadline, address), DC__TCP_CALL_OK);
  assert_int_equal(dc__tcp_call_finish(&own, &call, deadline, address), DC__TCP_CALL_OK);
  dc__tcp_proof proof = {.hello = call.hello};
  dc__tcp_mac(&own, &call.own, &call.theirs, &call.hello, NULL, proof.mac);
  close(call.fd);
  pthread_join(thread, NULL);
  assert_int_equal(root.status, DC_E_PEER_DEAD);

  thread = start(&root, fresh_address(address), 0, secret);
  dc__tcp_opening theirs;
  dc__tcp_answer answer;
  int fd = connect_to(address);
  assert_int_equal(send(fd, &call.own, sizeof call.own, MSG_NOSIGNAL), sizeof call.own);
  assert_int_equal(send(fd, &proof, sizeof proof, MSG_NOSIGNAL), sizeof proof);
  assert_int_equal(recv(fd, &theirs, sizeof theirs, MSG_WAITALL), sizeof theirs);
  assert_int_equal(recv(fd, &answer, sizeof answer, MSG_WAITALL), sizeof answer);
  assert_int_equal(answer.status, DC__TCP_DENIED);
  assert_int_equal(recv(fd, &answer, 1, 0), 0);
  close(fd);
  complete(address, thread, &root);
}

/* Sends a rank its own messages back, at another address than rank 0's. */
static void *reflect(void *arg) {
  dc__tcp_opening opening;
  dc__tcp_proof proof;
  dc__tcp_answer answer = {.status = DC_OK};
  const int listener = *(int *)arg, fd = accept(listener, NULL, NULL);
  if (recv(fd, &opening, sizeof opening, MSG_WAITALL) == (ssize_t)sizeof opening) {
    (void)!send(fd, &opening, sizeof opening, MSG_NOSIGNAL);
    if (recv(fd, &proof, sizeof proof, MSG_WAITALL) == (ssize_t)sizeof proof) {
      memcpy(answer.mac, proof.mac, sizeof answer.mac);
      (void)!send(fd, &answer, sizeof answer, MSG_NOSIGNAL);
    }
  }
  close(fd);
  return NULL;
}

static void test_reflection(void **state) {
  (void)state;
  char address[64];
  pthread_t thread;
  struct sockaddr_in at;
  int listener = listen_on_loopback(&at);
  snprintf(address, sizeof address, "127.0.0.1:%d", ntohs(at.sin_port));
  pthread_create(&thread, NULL, reflect, &listener);
  refused(address, secret, DC_E_EXISTS, "have different secrets");
  pthread_join(thread, NULL);
  close(listener);
}

/* A machine on the path may change the ranks' addresses. */
static void test_another_rank_answers(void **state) {
  (void)state;
  char address[64];
  member root;
  dc__tcp_group own;
  const int64_t deadline = dc__now_ns() + limit;
  const pthread_t thread = start_root_of_three(&root, address, &own);
  dc__tcp_call call = {.fd = connect_to(address), .to = 1, .hello = dc__tcp_hello_make(&own, DC__TCP_RENDEZVOUS)};
  assert_int_equal(dc__tcp_call_open(&own, &call, deadline), DC__TCP_CALL_OK);
  assert_int_equal(dc__tcp_call_prove(&own, &call, deadline, address), DC__TCP_CALL_OK);
  assert_int_equal(dc__tcp_call_finish(&own, &call, deadline, "here"), DC__TCP_CALL_FAILED);
  assert_int_equal(call.status, DC_E_CORRUPT);
  assert_non_null(strstr(dc_last_error(), "rank 1 wants rank 1 at here, but rank 0 is there"));
  close(call.fd);
  pthread_join(thread, NULL);
  assert_int_equal(root.status, DC_E_PEER_DEAD);
}

/* In an otherwise correct opening and proof, one byte is wrong. */
static void test_garbage_at_each_byte(void **state) {
  (void)state;
  static const unsigned char zeros[sizeof(dc__tcp_answer)];
  char address[64];
  member root;
  const dc__tcp_group own = fake_rank_1();
  pthread_t thread = start(&root, fresh_address(address), 0, secret);
  for (size_t at = 0; at < sizeof(dc__tcp_opening) + sizeof(dc__tcp_proof); at++) {
    dc__tcp_opening opening, sent, theirs;
    dc__tcp_proof proof = {.hello = dc__tcp_hello_make(&own, DC__TCP_RENDEZVOUS)};
    dc__tcp_answer answer = {.status = DC__TCP_DENIED};
    int fd = connect_to(address);
    assert_true(dc__tcp_opening_make(&own, &opening));
    sent = opening;
    if (at < sizeof sent) {
      ((unsigned char *)&sent)[at] ^= 0x40;
    }
    assert_int_equal(send(fd, &sent, sizeof sent, MSG_NOSIGNAL), sizeof sent);
    bool answered = recv(fd, &theirs, sizeof theirs, MSG_WAITALL) == (ssize_t)sizeof theirs;
    if (answered && dc__tcp_opening_is_known(&theirs)) {
      dc__tcp_mac(&own, &opening, &theirs, &proof.hello, NULL, proof.mac);
      if (at >= sizeof sent) {
        ((unsigned char *)&proof)[at - sizeof sent] ^= 0x40;
      }
      (void)!send(fd, &proof, sizeof proof, MSG_NOSIGNAL);
      (void)!recv(fd, &answer, sizeof answer, MSG_WAITALL);
    }
    assert_int_equal(answer.status, DC__TCP_DENIED);
    assert_memory_equal(answer.text, zeros, sizeof answer.text);
    close(fd);
  }
  complete(address, thread, &root);
}

/* A rank of an earlier run, with the secret and a valid rank, gets the reason why it may not connect. Meanwhile rank 0
 * listens for another communicator. */
static int stale(dc_comm *comm, void *arg) {
  (void)arg;
  dc__tcp_group *group = ((dc__tcp *)comm)->group;
  dc_comm *copy = NULL;
  if (comm->rank == 1) {
    char address[64];
    dc__tcp_call call = {.hello = dc__tcp_hello_make(group, 2)};
    for (bool there = false; !there; sleep_ms(1)) {
      pthread_mutex_lock(&group->mutex);
      there = group->listens_for[0] == 2;
      snprintf(address, sizeof address, ":%d", group->listens_on[0]);
      pthread_mutex_unlock(&group->mutex);
    }
    call.hello.run[0] ^= 1;
    call.fd = connect_to(address);
    CHECK(dc__tcp_call_open(group, &call, dc__now_ns() + limit) == DC__TCP_CALL_OK);
    CHECK(dc__tcp_call_prove(group, &call, dc__now_ns() + limit, "here") == DC__TCP_CALL_OK);
    CHECK(dc__tcp_call_finish(group, &call, dc__now_ns() + limit, "here") == DC__TCP_CALL_FAILED);
    CHECK_SAYS("rank 1 is of another run than rank 0, which listens at this address");
    close(call.fd);
  }
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK_OK(dc_comm_barrier(copy));
  dc_comm_destroy(copy);
  return 0;
}

static void test_stale_rank(void **state) {
  (void)state;
  assert_int_equal(on_tcp(2, limit, stale, NULL), 0);
}

/* More half-open connections than the process may have files. Both ranks are in this process, so the bound on pending
 * connections must leave files for rank 1. */
static void flood(size_t count, rlim_t files) {
  char address[64];
  member root;
  struct rlimit before, lower;
  int *fds = calloc(count, sizeof *fds);
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
  lower = before;
  lower.rlim_cur = files;
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &lower), 0); /* a group reads the limit when it is made */
  pthread_t thread = start(&root, fresh_address(address), 0, secret);
  int first = connect_to(address); /* waits until rank 0 listens */
  fflush(NULL);
  pid_t stranger = fork();
  if (stranger == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)setrlimit(RLIMIT_NOFILE, &before);
    dc__tcp_opening opening;
    const dc__tcp_group none = {.sealed = true};
    for (size_t i = 0; i < count; i++) {
      fds[i] = connect_to(address);
      (void)dc__tcp_opening_make(&none, &opening);
      (void)!send(fds[i], &opening, i % sizeof opening, MSG_NOSIGNAL);
    }
    pause();
  }
  complete(address, thread, &root);
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
  kill(stranger, SIGKILL);
  assert_int_equal(waitpid(stranger, NULL, 0), stranger);
  close(first);
  free(fds);
}

static void test_floods(void **state) {
  (void)state;
  flood(600, 64);
  flood(600, 1024);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_wrong_secrets), cmocka_unit_test(test_secrets_of_wrong_length),
      cmocka_unit_test(test_no_secret),     cmocka_unit_test(test_replay),
      cmocka_unit_test(test_reflection),    cmocka_unit_test(test_another_rank_answers),
      cmocka_unit_test(test_stale_rank),    cmocka_unit_test(test_garbage_at_each_byte),
      cmocka_unit_test(test_floods),
  };
  return cmocka_run_group_tests_name("tcp trust", tests, leftovers_note, leftovers_compare);
}
