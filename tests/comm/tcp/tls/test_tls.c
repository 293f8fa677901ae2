/* TLS between two ends whose bytes the test passes on, and between ranks. The bytes on the way are not readable, and an
 * end rejects them if they were changed. Groups with TLS give the same bits, and the same errors about ranks that leave
 * or differ. */
#define _GNU_SOURCE
#include "comm/tcp/tcp.h"
#include "comm/tcp/tls/tls.h"
#include "comm_data.h"

#include <dlfcn.h>
#include <errno.h>

static const int64_t limit = INT64_C(60000000000);
static const char secret[] = "0123456789abcdef0123456789abcdef";
static bool is_hidden;

void *__real_dlopen(const char *name, int flags);
void *__wrap_dlopen(const char *name, int flags);
void *__wrap_dlopen(const char *name, int flags) {
  return __real_dlopen(is_hidden && name != NULL && strstr(name, "libssl") != NULL ? "libssl.absent" : name, flags);
}

/* ---- two ends ---- */

enum { SEEN = 1 << 20 };

typedef struct path {
  int ends[2], ways[2]; /* the test holds ways, the other sides of the ends' sockets */
  char seen[SEEN];      /* all bytes that passed */
  size_t bytes;
  int64_t flip; /* index of a byte to change in what passes next; -1: none */
} path;

static void path_open(path *p, const unsigned char *key_0, const unsigned char *key_1) {
  p->bytes = 0;
  p->flip = -1;
  for (int i = 0; i < 2; i++) {
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    p->ends[i] = pair[0];
    p->ways[i] = pair[1];
    assert_true(dc__tls_begin(pair[0], i == 0, i == 0 ? key_0 : key_1));
  }
}

static void path_close(path *p) {
  for (int i = 0; i < 2; i++) {
    dc__tls_end(p->ends[i]);
    close(p->ends[i]);
    close(p->ways[i]);
  }
}

/* Passes on what one end has sent, at most as much as the other end's socket takes. */
static void path_pass(path *p, int from) {
  for (int pieces = 0; pieces < 8; pieces++) {
    char data[4096];
    const ssize_t got = recv(p->ways[from], data, sizeof data, MSG_DONTWAIT);
    if (got <= 0) {
      return;
    }
    if (p->flip >= 0 && p->flip < got) {
      data[p->flip] ^= 0x20;
    }
    p->flip = p->flip < got ? -1 : p->flip - got;
    const size_t kept = p->bytes + (size_t)got <= SEEN ? (size_t)got : SEEN - p->bytes;
    memcpy(p->seen + p->bytes, data, kept);
    p->bytes += kept;
    assert_int_equal(send(p->ways[!from], data, (size_t)got, MSG_NOSIGNAL), got);
  }
}

/* Returns 1, or the result of an end that could not complete the handshake. */
static int path_shake(path *p, int *error) {
  int done[2] = {-1, -1};
  for (int turn = 0; turn < 8 && (done[0] != 1 || done[1] != 1); turn++) {
    const int i = turn % 2;
    done[i] = done[i] == 1 ? 1 : dc__tls_handshake(dc__tls_of(p->ends[i]));
    *error = done[i] == 1 ? 0 : errno;
    path_pass(p, i);
    if (done[i] != 1 && *error != EAGAIN) {
      return done[i];
    }
  }
  return done[0] == 1 && done[1] == 1 ? 1 : -1;
}

static void path_open_shaken(path *p) {
  static const unsigned char key[DC__TLS_KEY] = {1, 2, 3};
  int error;
  path_open(p, key, key);
  assert_int_equal(path_shake(p, &error), 1);
}

static ssize_t say(const path *p, int from, const char *text) {
  const struct iovec all = {(void *)(uintptr_t)text, strlen(text)};
  return dc__tls_write(dc__tls_of(p->ends[from]), &all, 1);
}

static void hears(const path *p, int at, const char *text) {
  char got[256] = "";
  assert_int_equal(dc__tls_read(dc__tls_of(p->ends[at]), got, sizeof got, false), strlen(text));
  assert_string_equal(got, text);
}

static path shared_path; /* too large for a stack */

static void test_no_byte_is_readable(void **state) {
  (void)state;
  path *p = &shared_path;
  char text[] = "the weights of a model", first[4] = "";
  path_open_shaken(p);
  struct iovec parts[] = {{text, 4}, {text + 4, strlen(text) - 4}};
  assert_int_equal(dc__tls_write(dc__tls_of(p->ends[0]), parts, 2), strlen(text));
  path_pass(p, 0);
  assert_int_equal(dc__tls_read(dc__tls_of(p->ends[1]), first, 3, true), 3); /* peeks */
  assert_string_equal(first, "the");
  hears(p, 1, text);
  assert_int_equal(say(p, 1, text), strlen(text));
  path_pass(p, 1);
  hears(p, 0, text);
  assert_null(memmem(p->seen, p->bytes, "weights", 7));
  assert_true(dc__tls_read(dc__tls_of(p->ends[0]), first, 3, false) < 0 && errno == EAGAIN);
  path_close(p);
  assert_null(dc__tls_of(p->ends[0]));
}

static void test_another_key_is_refused(void **state) {
  (void)state;
  static const unsigned char keys[2][DC__TLS_KEY] = {{1}, {2}};
  int error;
  path_open(&shared_path, keys[0], keys[1]);
  assert_int_equal(path_shake(&shared_path, &error), -1);
  assert_int_equal(error, EBADMSG);
  path_close(&shared_path);
}

/* A changed byte is found in a record's header, its text, or its code. Nothing is read from then on, and both ends
 * know. */
static void test_a_changed_byte_is_found(void **state) {
  (void)state;
  path *p = &shared_path;
  for (int64_t at = 3; at < 40; at += 6) {
    char got[64];
    path_open_shaken(p);
    assert_int_equal(say(p, 0, "a record of 25 characters"), 25);
    p->flip = at;
    path_pass(p, 0);
    const ssize_t read = dc__tls_read(dc__tls_of(p->ends[1]), got, sizeof got, false);
    if (read < 0 && errno == EAGAIN) { /* the length in the header is larger now, so the record is still incomplete */
      assert_int_equal(say(p, 0, "a record of 25 characters"), 25);
      path_pass(p, 0);
      continue;
    }
    assert_true(read < 0 && errno == EBADMSG);
    path_pass(p, 1);
    assert_true(dc__tls_read(dc__tls_of(p->ends[0]), got, sizeof got, false) < 0 && errno == EBADMSG);
    assert_true(dc__tls_read(dc__tls_of(p->ends[1]), got, sizeof got, false) < 0);
    path_close(p);
  }
}

static void test_an_end_is_told(void **state) {
  (void)state;
  path *p = &shared_path;
  char got[8];
  path_open_shaken(p);
  assert_int_equal(say(p, 0, "last"), 4);
  path_pass(p, 0);
  close(p->ways[1]);
  hears(p, 1, "last");
  assert_int_equal(dc__tls_read(dc__tls_of(p->ends[1]), got, sizeof got, false), 0);
  assert_true(say(p, 1, "anyone?") < 0 && errno == EPIPE); /* and it raises no signal */
  p->ways[1] = -1;
  path_close(p);
}

/* After EAGAIN the same bytes are written again, and all arrive once and in order. */
static void test_a_full_socket(void **state) {
  (void)state;
  path *p = &shared_path;
  enum { BYTES = 2 << 20 };
  unsigned char *data = malloc(BYTES), *copy = malloc(BYTES);
  size_t sent = 0, received = 0;
  int waits = 0;
  for (size_t i = 0; i < BYTES; i++) {
    data[i] = (unsigned char)(i * 2654435761u >> 24);
  }
  path_open_shaken(p);
  while (received < BYTES) {
    struct iovec parts[] = {{data + sent, (BYTES - sent) / 3}, {data + sent + (BYTES - sent) / 3, 0}};
    parts[1].iov_len = BYTES - sent - parts[0].iov_len;
    const ssize_t n = sent == BYTES ? 0 : dc__tls_write(dc__tls_of(p->ends[0]), parts, 2);
    assert_true(n >= 0 || errno == EAGAIN);
    sent += n > 0 ? (size_t)n : 0;
    if (n <= 0) {
      waits++;
      path_pass(p, 0);
      ssize_t got;
      do {
        got = dc__tls_read(dc__tls_of(p->ends[1]), copy + received, BYTES - received, false);
        received += got > 0 ? (size_t)got : 0;
        path_pass(p, 0);
      } while (got > 0 && received < BYTES);
    }
  }
  assert_true(waits > 1);
  assert_memory_equal(data, copy, BYTES);
  path_close(p);
  free(data);
  free(copy);
}

/* Both ends have the new key; otherwise the next text could not be read. */
static void test_keys_are_renewed(void **state) {
  (void)state;
  const uint64_t before = atomic_exchange(&dc__tls_records_per_key, 2);
  path *p = &shared_path;
  path_open_shaken(p);
  for (int i = 0; i < 9; i++) {
    const size_t bytes = p->bytes;
    assert_int_equal(say(p, i % 2, "text"), 4);
    path_pass(p, i % 2);
    hears(p, !(i % 2), "text");
    /* A record has 4 bytes of text, 1 of type, 16 of code and 5 of header. A record with a new key has 5 bytes instead
     * of 4. */
    assert_int_equal(p->bytes - bytes, i >= 4 && i / 2 % 2 == 0 ? 26 + 27 : 26);
  }
  path_close(p);
  atomic_store(&dc__tls_records_per_key, before);
}

/* ---- ranks ---- */

enum { LARGE = 300000 };

typedef struct sums {
  float of[3][LARGE];
} sums;

static dc_comm_options with_tls(bool tls) {
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  options.timeout_ns = limit;
  options.secret = secret;
  options.tls = tls;
  return options;
}

static int reduce(dc_comm *comm, float *data, int64_t count) {
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  for (int64_t i = 0; i < count; i++) {
    data[i] = 1.0f / (float)(1 + comm->rank + i % 1000);
  }
  CHECK_OK(dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL));
  return 0;
}

/* Keeps rank 0's sums of a small and a large reduction, and of one in another communicator. */
static int work(dc_comm *comm, void *arg) {
  sums *s = comm->rank == 0 ? arg : calloc(1, sizeof *s);
  dc_comm *copy = NULL, *part = NULL;
  CHECK(reduce(comm, s->of[0], 10) == 0 && reduce(comm, s->of[1], LARGE) == 0);
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK(reduce(copy, s->of[2], 5000) == 0);
  CHECK_OK(dc_comm_split(comm, comm->rank % 2, comm->rank, &part));
  CHECK_OK(dc_comm_barrier(part));
  CHECK(((dc__tcp *)part)->group->tls == ((dc__tcp *)comm)->group->tls);
  dc_comm_destroy(part);
  dc_comm_destroy(copy);
  if (comm->rank != 0) {
    free(s);
  }
  return 0;
}

static void test_the_bits_are_the_same(void **state) {
  (void)state;
  sums *plain = calloc(1, sizeof *plain), *encrypted = calloc(1, sizeof *encrypted);
  for (int32_t world = 2; world <= 5; world += 3) {
    const dc_comm_options off = with_tls(false), on = with_tls(true);
    assert_int_equal(on_tcp_with(world, &off, work, plain), 0);
    assert_int_equal(on_tcp_with(world, &on, work, encrypted), 0);
    assert_memory_equal(plain, encrypted, sizeof *plain);
  }
  free(plain);
  free(encrypted);
}

typedef struct member {
  const char *address;
  dc_comm_options options;
  int32_t rank;
  dc_status status;
  char text[512];
} member;

static void *join(void *arg) {
  member *m = arg;
  dc_comm *comm = NULL;
  m->status = dc_comm_create_tcp(m->address, "g", m->rank, 2, &m->options, &comm);
  snprintf(m->text, sizeof m->text, "%s", dc_last_error());
  dc_comm_destroy(comm);
  return NULL;
}

static pthread_t start_member(member *m, const char *address, int32_t rank, bool tls) {
  pthread_t thread;
  *m = (member){.address = address, .options = with_tls(tls), .rank = rank};
  pthread_create(&thread, NULL, join, m);
  return thread;
}

/* Rank 0 refuses a rank with the other setting of TLS, and waits for another one. */
static void test_both_ends_want_the_same(void **state) {
  (void)state;
  for (int wants = 0; wants < 2; wants++) {
    char address[64], text[200];
    member root, other, right;
    const pthread_t thread = start_member(&root, fresh_address(address), 0, wants == 0);
    pthread_join(start_member(&other, address, 1, wants == 1), NULL);
    snprintf(text, sizeof text, "rank 1 %s TLS, but the group at %s %s it", wants == 1 ? "wants" : "does not want",
             address, wants == 1 ? "does not want" : "wants");
    assert_int_equal(other.status, DC_E_MISMATCH);
    assert_non_null(strstr(other.text, text));
    member stranger = {.address = address, .options = with_tls(wants == 0), .rank = 1};
    stranger.options.secret = "another secret of 32 bytes in all";
    (void)join(&stranger);
    assert_int_equal(stranger.status, DC_E_EXISTS);
    assert_non_null(strstr(stranger.text, "have different secrets"));
    pthread_join(start_member(&right, address, 1, wants == 0), NULL);
    pthread_join(thread, NULL);
    assert_true(root.status == DC_OK && right.status == DC_OK);
  }
}

static void test_options(void **state) {
  (void)state;
  member m = {.address = "127.0.0.1:1", .options = with_tls(true), .rank = 1};
  m.options.secret = NULL;
  (void)join(&m);
  assert_int_equal(m.status, DC_E_INVALID);
  assert_non_null(strstr(m.text, "options.tls = 1 needs options.secret"));
  m.options.tls = 2;
  (void)join(&m);
  assert_int_equal(m.status, DC_E_INVALID);
  assert_non_null(strstr(m.text, "options.tls = 2, must be 0 or 1"));
}

/* Runs in a process that has not loaded the library yet. */
static void test_no_library(void **state) {
  (void)state;
  fflush(NULL);
  const pid_t child = fork();
  if (child == 0) {
    member m = {.address = "127.0.0.1:1", .options = with_tls(true), .rank = 1};
    is_hidden = true;
    (void)join(&m);
    _exit(m.status == DC_E_UNSUPPORTED && strstr(m.text, "libssl.so.3 of OpenSSL 3 (Debian's package libssl3)") != NULL
              ? 0
              : 1);
  }
  assert_int_equal(end_rank(child), 0);
}

static int open_library(void **state) {
  (void)state;
  return dc__tls_load("test") == DC_OK ? 0 : -1;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_no_library),
      cmocka_unit_test_setup(test_no_byte_is_readable, open_library),
      cmocka_unit_test(test_another_key_is_refused),
      cmocka_unit_test(test_a_changed_byte_is_found),
      cmocka_unit_test(test_an_end_is_told),
      cmocka_unit_test(test_a_full_socket),
      cmocka_unit_test(test_keys_are_renewed),
      cmocka_unit_test(test_the_bits_are_the_same),
      cmocka_unit_test(test_both_ends_want_the_same),
      cmocka_unit_test(test_options),
  };
  return cmocka_run_group_tests_name("tcp tls", tests, NULL, NULL);
}
