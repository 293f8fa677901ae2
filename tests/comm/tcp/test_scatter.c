/* Large broadcasts over TCP, in which ranks forward parts while more arrive. Each rank gets the root's bytes, each link
 * carries them once, and if the root stops, the others name it. */
#include "comm/tcp/tcp.h"
#include "comm_data.h"

#include <linux/tcp.h> /* bytes sent, which netinet's does not have */
#include <signal.h>
#include <sys/mman.h>

enum { MOST = 9, PART = 8 << 10, HEADS = 4096 /* of calls to all ranks */ };

static const int32_t worlds[] = {2, 3, 4, 5, 8, MOST};
static const int64_t limit = INT64_C(60000000000);

static dc_status broadcast(dc_comm *comm, unsigned char *data, int64_t bytes, int32_t root) {
  dc_tensor tensor = flat(data, &bytes, DC_INT8);
  return dc_comm_broadcast(comm, &tensor, root, NULL);
}

static unsigned char byte_at(int64_t i, int32_t root) {
  return (unsigned char)(i * 31 + (i >> 11) + root);
}

/* ---- data ---- */

static int broadcast_bytes(dc_comm *comm, int64_t bytes, int32_t root) {
  unsigned char *data = calloc((size_t)bytes + 1, 1);
  for (int64_t i = 0; i < bytes && comm->rank == root; i++) {
    data[i] = byte_at(i, root);
  }
  CHECK_OK(broadcast(comm, data, bytes, root));
  for (int64_t i = 0; i < bytes; i++) {
    CHECK(data[i] == byte_at(i, root));
  }
  CHECK(data[bytes] == 0);
  free(data);
  return 0;
}

static int all_sizes(dc_comm *comm, void *arg) {
  const int64_t least = (int64_t)PART * (comm->world - 1); /* the smallest size that is sent in parts */
  const int64_t sizes[] = {least - 1, least, least + 1, least + 63, 2 * least + 4097, 900001};
  const int32_t every = arg == NULL ? 0 : *(int32_t *)arg;
  CHECK_OK(dc_comm_set_checksums(comm, every != 0 && comm->rank % every == 0));
  for (size_t i = 0; i < DC__COUNT(sizes); i++) {
    for (int32_t root = 0; root < comm->world; root++) {
      CHECK(broadcast_bytes(comm, sizes[i], root) == 0);
    }
  }
  return 0;
}

static void test_sizes(void **state) {
  (void)state;
  int32_t all = 1, some = 2; /* every how many ranks one has checksums */
  dc_comm_options tls = DC_COMM_OPTIONS_INIT;
  tls.timeout_ns = limit;
  tls.secret = "0123456789abcdef";
  tls.tls = 1;
  for (size_t i = 0; i < DC__COUNT(worlds); i++) {
    assert_int_equal(on_tcp(worlds[i], limit, all_sizes, NULL), 0);
    assert_int_equal(on_tcp(worlds[i], limit, all_sizes, i % 2 == 0 ? &all : &some), 0);
  }
  assert_int_equal(on_tcp_with(4, &tls, all_sizes, NULL), 0);
  assert_int_equal(on_tcp_with(5, &tls, all_sizes, &some), 0);
}

/* ---- calls that differ ---- */

typedef struct reports {
  bool other_root;
  char text[MOST][512];
} reports;

/* One rank has another size or root: all ranks get an error, and nothing is written. */
static int differ(dc_comm *comm, void *arg) {
  reports *t = arg;
  const bool odd = comm->rank == comm->world - 1;
  const int64_t bytes = 100000 + (odd && !t->other_root);
  unsigned char *data = calloc((size_t)bytes, 1);
  const int32_t root = odd && t->other_root ? comm->rank : 0;
  memset(data, comm->rank + 1, (size_t)bytes);
  CHECK(broadcast(comm, data, bytes, root) == DC_E_MISMATCH);
  for (int64_t i = 0; i < bytes; i++) {
    CHECK(data[i] == comm->rank + 1);
  }
  snprintf(t->text[comm->rank], sizeof t->text[0], "%s", dc_last_error());
  free(data);
  return 0;
}

static void test_differences(void **state) {
  (void)state;
  for (int i = 0; i < 6; i++) {
    reports t = {.other_root = i % 2 != 0};
    const int32_t world = 3 + i / 2;
    assert_int_equal(on_tcp(world, limit, differ, &t), 0);
    for (int32_t r = 0; r < world; r++) {
      assert_string_equal(t.text[r], t.text[0]);
    }
  }
}

/* ---- links ---- */

static int64_t bytes_sent(const dc_comm *comm) {
  int64_t sum = 0;
  for (int32_t r = 0; r < comm->world; r++) {
    struct tcp_info info = {0};
    socklen_t length = sizeof info;
    if (r != comm->rank && getsockopt(((const dc__tcp *)comm)->fds[r], IPPROTO_TCP, TCP_INFO, &info, &length) == 0) {
      sum += (int64_t)info.tcpi_bytes_sent - (int64_t)info.tcpi_bytes_retrans;
    }
  }
  return sum;
}

static int count_bytes(dc_comm *comm, void *arg) {
  const int64_t bytes = INT64_C(3) << 20, before = bytes_sent(comm);
  (void)arg;
  CHECK(broadcast_bytes(comm, bytes, 1) == 0);
  CHECK_OK(dc_comm_barrier(comm)); /* now all ranks have left the broadcast */
  const int64_t others = comm->world - 1, sent = bytes_sent(comm) - before;
  const int64_t expected = comm->rank == 1 ? bytes : bytes / others * (others - 1);
  CHECK(sent >= expected - 64 * others && sent <= expected + 64 * others + HEADS);
  return 0;
}

static void test_each_link_carries_the_data_once(void **state) {
  (void)state;
  for (int32_t world = 3; world <= 6; world++) {
    assert_int_equal(on_tcp(world, limit, count_bytes, NULL), 0);
  }
}

/* ---- a root that stops ---- */

typedef struct shared {
  atomic_int go, ready; /* ready: ranks that are about to wait, until the deadline at the latest */
  dc_status status[4];
  char text[4][512];
} shared;

static void run_rank(const char *address, int32_t rank, shared *s) {
  dc_comm *comm = NULL;
  const int64_t bytes = INT64_C(16) << 20;
  alarm(300); /* a hang ends the child */
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = limit};
  dc_status status = dc_comm_create_tcp(address, "stops", rank, 4, &options, &comm);
  unsigned char *data = calloc((size_t)bytes, 1);
  while (status == DC_OK) {
    if (atomic_load(&s->go) && comm->timeout_ns == limit) {
      comm->timeout_ns = INT64_C(8000000000);
      atomic_fetch_add(&s->ready, 1);
    }
    status = broadcast(comm, data, bytes, 2);
    atomic_store(&s->go, 1);
  }
  s->status[rank] = status;
  snprintf(s->text[rank], sizeof s->text[0], "%s", dc_last_error());
  dc_comm_destroy(comm);
  free(data);
  _exit(0);
}

static void test_a_root_that_stops(void **state) {
  (void)state;
  char address[64];
  pid_t children[4];
  shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true((void *)s != MAP_FAILED);
  fresh_address(address);
  fflush(NULL);
  for (int32_t r = 0; r < 4; r++) {
    children[r] = fork();
    if (children[r] == 0) {
      run_rank(address, r, s);
    }
  }
  while (atomic_load(&s->ready) < 4 && waitpid(-1, NULL, WNOHANG) == 0) { /* as long as no rank has failed */
    sleep_ms(1);
  }
  assert_int_equal(kill(children[2], SIGSTOP), 0);
  for (int32_t r = 0; r < 4; r++) {
    if (r != 2) {
      (void)end_rank(children[r]);
    }
  }
  kill(children[2], SIGKILL);
  (void)end_rank(children[2]);
  for (int32_t r = 0; r < 4; r++) {
    if (r != 2 && (s->status[r] != DC_E_TIMEOUT || strstr(s->text[r], "for rank 2 of 4 to ") == NULL)) {
      fail_msg("rank %d: %s: %s", r, dc_status_name(s->status[r]), s->text[r]);
    }
  }
  print_message("%s\n", s->text[0]);
  munmap(s, sizeof *s);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_sizes), cmocka_unit_test(test_differences),
                                     cmocka_unit_test(test_each_link_carries_the_data_once),
                                     cmocka_unit_test(test_a_root_that_stops)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
