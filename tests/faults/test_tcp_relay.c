/* A relay on the path between two ranks with a secret, in a group of two or three. It delays, cuts, resets, swaps or
 * flips what it forwards, falls silent, or searches for data in it, with checksums or with TLS. Both ranks get an error
 * or the right sums, always within their deadlines. Each printed line has the fault, the ranks' statuses, the seconds
 * since the fault, and the text. */
#define _GNU_SOURCE
#include "comm_ranks.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>

#include "leftovers.h"

enum {
  MOST_LINKS = 8,
  MOST_RANKS = 3,
  ELEMENTS = 3000,
  CALLS = 6,
  MOST_CALLS = 10000000,
  LIMIT_S = 100,
  HEARTBEAT_MS = 100
};
enum { EXCHANGED = 1500 };               /* most bytes on a data connection before its first collective */
enum { RENDEZVOUS, CONTROL, DATA, ALL }; /* in the order in which rank 1 connects */

static const int64_t limit = INT64_C(60000000000);
static const char secret[] = "0123456789abcdef0123456789abcdef";
static const float known[] = {100, 101, 102, 103}; /* part of the first data that rank 0 sends */

typedef enum kind { NOTHING, DELAY, CUT, RESET, SWAP, FLIP, SILENCE } kind;
static const char *const kind_names[] = {"nothing", "delay", "cut", "reset", "swap", "flip", "silence"};

typedef struct fault {
  kind kind;
  int link, direction; /* direction 0: to rank 0 */
  int64_t at;          /* a byte of that direction, at or after which the fault happens */
  int64_t after;       /* bytes of data that must go to rank 0 before the fault */
} fault;

typedef struct relay {
  fault fault;
  bool read; /* the relay has seen the data that ranks sum */
  int listener, stop[2];
  int ends[MOST_LINKS][2]; /* sockets to rank 1 and to rank 0 */
  int64_t moved[MOST_LINKS][2];
  int links;
  bool silent;
  atomic_llong struck_ns;
  char to[64], address[64];
} relay;

static struct sockaddr_in address_of(const char *text) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  address.sin_port = htons((uint16_t)atoi(strrchr(text, ':') + 1));
  return address;
}

static void close_link(relay *r, int i, bool resets) {
  const struct linger now = {.l_onoff = 1, .l_linger = 0};
  for (int side = 0; side < 2; side++) {
    if (r->ends[i][side] >= 0) {
      (void)(resets && setsockopt(r->ends[i][side], SOL_SOCKET, SO_LINGER, &now, sizeof now));
      close(r->ends[i][side]);
      r->ends[i][side] = -1;
    }
  }
}

static void add_link(relay *r) {
  const struct sockaddr_in to = address_of(r->to);
  const int on = 1, near = accept4(r->listener, NULL, NULL, SOCK_CLOEXEC);
  const int far = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (near < 0 || far < 0 || r->links == MOST_LINKS || connect(far, (const struct sockaddr *)&to, sizeof to) != 0) {
    close(near); /* rank 0 does not listen yet, or no longer */
    close(far);
    return;
  }
  (void)setsockopt(near, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  (void)setsockopt(far, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  r->ends[r->links][0] = near;
  r->ends[r->links++][1] = far;
}

/* Changes the bytes or the link. Returns false if they must not be forwarded. */
static bool strike(relay *r, int i, int direction, char *data, int64_t bytes) {
  const fault *f = &r->fault;
  const int64_t passed = r->moved[i][direction], at = f->at > passed ? f->at - passed : 0;
  r->moved[i][direction] += bytes;
  r->read = r->read || memmem(data, (size_t)bytes, known, sizeof known) != NULL;
  if (f->kind == DELAY) {
    sleep_ms(5);
  }
  if (f->link != i || f->direction != direction || at >= bytes || r->moved[DATA][0] < f->after ||
      atomic_load(&r->struck_ns) != 0) {
    return true;
  }
  atomic_store(&r->struck_ns, dc__now_ns());
  if (f->kind == FLIP) {
    data[at] ^= 0x10;
  } else if (f->kind == SWAP) {
    char first[64];
    const size_t half = (size_t)(bytes / 2 < 64 ? bytes / 2 : 64);
    memcpy(first, data, half);
    memmove(data, data + half, half);
    memcpy(data + half, first, half);
    data[at] ^= half == 0 || memcmp(data, first, half) == 0 ? 0x10 : 0; /* equal halves: swapping changes nothing */
  } else if (f->kind == CUT || f->kind == RESET) {
    close_link(r, i, f->kind == RESET);
  }
  r->silent = f->kind == SILENCE;
  return f->kind == FLIP || f->kind == SWAP || f->kind == NOTHING || f->kind == DELAY;
}

static void forward(relay *r, int i, int direction) {
  char data[4096];
  const ssize_t got = recv(r->ends[i][direction], data, sizeof data, MSG_DONTWAIT);
  if (got <= 0 && r->silent && errno != EAGAIN) {
    close(r->ends[i][direction]); /* the other end is not told */
    r->ends[i][direction] = -1;
  } else if (got == 0 || (got < 0 && errno != EAGAIN)) {
    close_link(r, i, got < 0);
  } else if (got > 0 && !r->silent && strike(r, i, direction, data, got)) {
    for (ssize_t sent = 0, n = 0; sent < got && n >= 0; sent += n) {
      n = send(r->ends[i][!direction], data + sent, (size_t)(got - sent), MSG_NOSIGNAL);
    }
  }
}

static void *run_relay(void *arg) {
  relay *r = arg;
  for (;;) {
    struct pollfd polls[2 + 2 * MOST_LINKS] = {{.fd = r->stop[0], .events = POLLIN},
                                               {.fd = r->listener, .events = POLLIN}};
    const int links = r->links;
    for (int i = 0; i < 2 * links; i++) {
      polls[2 + i] = (struct pollfd){.fd = r->ends[i / 2][i % 2], .events = POLLIN};
    }
    (void)poll(polls, (nfds_t)(2 + 2 * links), -1);
    if (polls[0].revents != 0) {
      return NULL;
    }
    for (int i = 0; i < 2 * links; i++) {
      if (polls[2 + i].revents != 0 && r->ends[i / 2][i % 2] >= 0) {
        forward(r, i / 2, i % 2);
      }
    }
    if (polls[1].revents != 0) {
      add_link(r);
    }
  }
}

typedef struct member {
  const char *address;
  int32_t rank, world;
  int64_t meeting_ns, deadline_ns;
  bool until_failure; /* makes at most MOST_CALLS collectives, otherwise CALLS */
  bool tls;           /* with TLS and without checksums */
  dc_status status;
  bool wrong;
  int64_t end_ns;
  char text[512];
  atomic_bool ended;
} member;

static dc_status sum(member *m, dc_comm *comm) {
  float data[ELEMENTS] = {0};
  const int64_t count = ELEMENTS;
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  dc_status status = dc_comm_set_checksums(comm, !m->tls);
  comm->timeout_ns = m->deadline_ns;
  for (int call = 0; status == DC_OK && call < (m->until_failure ? MOST_CALLS : CALLS); call++) {
    for (int i = 0; i < ELEMENTS; i++) {
      data[i] = (float)(i + m->rank + call % CALLS);
    }
    status = dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL);
    for (int i = 0; status == DC_OK && i < ELEMENTS; i++) {
      m->wrong = m->wrong || data[i] != (float)(m->world * (i + call % CALLS) + m->world * (m->world - 1) / 2);
    }
  }
  return status;
}

static void *join(void *arg) {
  member *m = arg;
  dc_comm *comm = NULL;
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  options.timeout_ns = m->meeting_ns;
  options.secret = secret;
  options.tls = m->tls;
  options.heartbeat_ns = HEARTBEAT_MS * MS;
  m->status = dc_comm_create_tcp(m->address, "g", m->rank, m->world, &options, &comm);
  m->status = m->status == DC_OK ? sum(m, comm) : m->status;
  m->end_ns = dc__now_ns();
  snprintf(m->text, sizeof m->text, "%s", dc_last_error());
  atomic_store(&m->ended, true);
  dc_comm_destroy(comm);
  return NULL;
}

/* Waits until rank 0 listens, so that the first link is the rendezvous's. Returns false if rank 0 has ended. */
static bool await_rank_0(const relay *r, member *rank_0) {
  while (!is_listening(r->to)) {
    if (atomic_load(&rank_0->ended)) {
      return false;
    }
    sleep_ms(1);
  }
  return true;
}

static void close_relay(relay *r) {
  close(r->listener);
  close(r->stop[0]);
  close(r->stop[1]);
}

/* Runs all ranks; rank 1 knows only the relay's address. Returns whether the relay could read data. */
static bool meet(fault f, bool tls, int32_t world, int64_t meeting_ns, int64_t deadline_ns, member ms[]) {
  relay r = {.fault = f};
  pthread_t threads[MOST_RANKS], relays;
  fresh_address(r.to);
  fresh_address(r.address);
  struct sockaddr_in at = address_of(r.address);
  const int on = 1;
  r.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  assert_int_equal(setsockopt(r.listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), 0);
  assert_int_equal(bind(r.listener, (struct sockaddr *)&at, sizeof at), 0);
  assert_int_equal(pipe2(r.stop, O_CLOEXEC), 0);
  for (int32_t i = 0; i < world; i++) {
    ms[i] = (member){.address = i == 1 ? r.address : r.to,
                     .rank = i,
                     .world = world,
                     .meeting_ns = meeting_ns,
                     .deadline_ns = deadline_ns,
                     .tls = tls};
    ms[i].until_failure = f.kind > DELAY && meeting_ns == limit;
    pthread_create(&threads[i], NULL, join, &ms[i]);
    if (i == 0 && !await_rank_0(&r, &ms[0])) {
      pthread_join(threads[0], NULL);
      close_relay(&r);
      const bool was_slow = ms[0].status == DC_E_TIMEOUT && meeting_ns < limit; /* rank 0's thread got no processor */
      assert_true(was_slow || ms[0].status == DC_E_EXISTS);                     /* another program took the port */
      return meet(f, tls, world, meeting_ns, deadline_ns, ms);
    }
    if (i == 0) {
      assert_int_equal(listen(r.listener, 16), 0);
      pthread_create(&relays, NULL, run_relay, &r);
    }
  }
  for (int32_t i = 0; i < world; i++) {
    pthread_join(threads[i], NULL);
  }
  assert_int_equal(write(r.stop[1], "", 1), 1);
  pthread_join(relays, NULL);
  for (int i = 0; i < r.links; i++) {
    close_link(&r, i, false);
  }
  close_relay(&r);
  const int64_t struck = atomic_load(&r.struck_ns);
  for (int i = 0; i < world; i++) {
    const double seconds = struck == 0 ? 0 : (double)(ms[i].end_ns - struck) / 1e9;
    print_message("%-8s%s link %d byte %6lld  rank %d: %-15s %5.2f s  %s\n", kind_names[f.kind], tls ? " TLS" : "",
                  f.link, (long long)f.at, i, dc_status_name(ms[i].status), seconds, ms[i].text);
    assert_false(ms[i].wrong);
    assert_true(seconds < LIMIT_S);
  }
  return r.read;
}

/* agreed: the ranks can still agree on one text. */
static void expect_with(bool tls, fault f, int64_t deadline_ns, dc_status status, const char *says, bool agreed) {
  member ms[2];
  meet(f, tls, 2, limit, deadline_ns, ms);
  for (int i = 0; i < 2; i++) {
    if (ms[i].status != status || strstr(ms[i].text, says) == NULL || (agreed && strcmp(ms[i].text, ms[0].text) != 0)) {
      fail_msg("%s on link %d: rank %d: %s: %s; expected %s: %s", kind_names[f.kind], f.link, i,
               dc_status_name(ms[i].status), ms[i].text, dc_status_name(status), says);
    }
  }
}

static void expect(fault f, int64_t deadline_ns, dc_status status, const char *says, bool agreed) {
  expect_with(false, f, deadline_ns, status, says, agreed);
}

static void test_what_does_not_matter(void **state) {
  (void)state;
  expect((fault){NOTHING, ALL, 0, 0, 0}, limit, DC_OK, "", true);
  expect((fault){DELAY, ALL, 0, 0, 0}, limit, DC_OK, "", true);
}

/* Without a control connection, a rank would not notice that the other rank's machine vanishes. A rank that first sees
 * the other's connection end reports that it died. */
static void expect_cut(kind what, int direction, int32_t world, bool tls) {
  member ms[MOST_RANKS];
  int says_cut = 0;
  meet((fault){what, CONTROL, direction, 0, 9000}, tls, world, limit, limit, ms);
  for (int i = 0; i < world; i++) {
    assert_int_equal(ms[i].status, DC_E_PEER_DEAD);
    assert_true(strncmp(ms[i].text, "rank 0 ", 7) == 0 || strncmp(ms[i].text, "rank 1 ", 7) == 0);
    says_cut += strstr(ms[i].text, "is cut off") != NULL;
  }
  assert_true(says_cut > 0);
}

static void test_broken_control(void **state) {
  (void)state;
  for (int32_t world = 2; world <= MOST_RANKS; world++) {
    expect_cut(CUT, 0, world, world == 3);
    expect_cut(RESET, 1, world, world == 2);
  }
}

static void test_broken_connections(void **state) {
  (void)state;
  expect((fault){CUT, DATA, 0, 9000, 0}, limit, DC_E_SYSTEM, "the connection to rank ", true);
  expect((fault){RESET, DATA, 1, 9000, 0}, limit, DC_E_SYSTEM, "the connection to rank ", true);
}

/* The relay's own machine still acknowledges, so only the deadline ends the wait. */
static void test_silence(void **state) {
  (void)state;
  expect((fault){SILENCE, DATA, 0, 9000, 0}, 2000 * MS, DC_E_TIMEOUT, "the process is alive but has been late for ",
         false);
}

/* Damage in what collectives send gives an error, and never a wrong sum. On the data connection the handshake and the
 * exchange of machine names come first, before checksums are set. */
static void test_damaged_data(void **state) {
  (void)state;
  for (int64_t at = EXCHANGED; at < 60000; at += 2971) {
    member ms[2];
    meet((fault){at % 2 == 0 ? FLIP : SWAP, DATA, (int)(at / 2 % 2), at, 0}, false, 2, limit, limit, ms);
    assert_true(ms[0].status != DC_OK && ms[1].status != DC_OK);
    assert_string_equal(ms[0].text, ms[1].text);
  }
}

/* Damage in the handshakes, in the tables of endpoints and machines, and on the control connection gives an error on
 * both ranks, or the right sums. Some bytes are padding, and some flips hit nothing. A refused rank leaves the other
 * one waiting, so the rendezvous has a short deadline. */
static void test_damaged_meeting(void **state) {
  (void)state;
  for (int64_t at = 3; at < 900; at += 61) {
    member ms[2];
    const int link = at % 2 == 0 ? RENDEZVOUS : at % 4 == 1 ? CONTROL : DATA;
    meet((fault){FLIP, link, (int)(at / 4 % 2), at, 0}, false, 2, 1500 * MS, 1500 * MS, ms);
  }
}

/* The relay can read the data without TLS, but not with it. With TLS, an error about changed data names both ranks, and
 * a change on the control connection looks like its end. */
static void test_tls(void **state) {
  (void)state;
  member ms[2];
  assert_true(meet((fault){NOTHING, ALL, 0, 0, 0}, false, 2, limit, limit, ms));
  assert_false(meet((fault){NOTHING, ALL, 0, 0, 0}, true, 2, limit, limit, ms));
  assert_true(ms[0].status == DC_OK && ms[1].status == DC_OK);
  for (int64_t at = EXCHANGED + 1000; at < 60000; at += 9001) {
    expect_with(true, (fault){at % 2 == 0 ? FLIP : SWAP, DATA, (int)(at / 2 % 2), at, 0}, limit, DC_E_CORRUPT,
                "were changed on the way", true);
  }
  expect_with(true, (fault){FLIP, CONTROL, 0, 0, 9000}, limit, DC_E_PEER_DEAD, "is cut off", false);
  expect_with(true, (fault){CUT, DATA, 0, 9000, 0}, limit, DC_E_SYSTEM, "the connection to rank ", true);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_what_does_not_matter),
                                     cmocka_unit_test(test_broken_connections),
                                     cmocka_unit_test(test_broken_control),
                                     cmocka_unit_test(test_silence),
                                     cmocka_unit_test(test_damaged_data),
                                     cmocka_unit_test(test_damaged_meeting),
                                     cmocka_unit_test(test_tls)};
  print_message("heartbeats each %d ms, checksums\n", HEARTBEAT_MS);
  return cmocka_run_group_tests_name("tcp relay", tests, leftovers_note, leftovers_compare);
}
