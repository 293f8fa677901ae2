/* Many processes over TCP rendezvous, hold few connections, reduce in the same order as every other transport, and get
 * one error when one of them is killed. LIBDC_TEST_RANKS=1024 runs as many as a group may have. */
#include "comm_ranks.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "leftovers.h"
#include "sanitized.h"

#ifdef SANITIZED
enum { RANKS = 100 };
#else
enum { RANKS = 300 };
#endif
enum { FEWER = 80, FLOATS = 16, LIMIT_S = 90 };

/* Ranks wait this long for votes, and then take the best that they know; on an overloaded machine they may differ. */
static const double vote_s = 3.0;

static const int64_t limit = INT64_C(600000000000);      /* a busy machine with few cores starts a thousand processes */
static const int64_t deadline_ns = INT64_C(20000000000); /* of a collective with a stopped rank, which stays silent */

typedef struct crowd {
  char address[64], name[64];
  int32_t world, victim;
  int signal;
  pid_t children[DC__COMM_MAX_WORLD];
  struct shared {
    atomic_int working; /* number of ranks that have reduced once */
    atomic_int ready;   /* number of ranks that now wait no longer than the deadline */
    atomic_llong end;   /* time of the victim's end */
    struct {
      dc_status status;
      int32_t files;
      double seconds;
      float sum;
      char text[512];
    } ranks[DC__COMM_MAX_WORLD];
  } * shared;
} crowd;

/* Adds in the order of the runtime's tree over ranks: the left part has the largest power of two below the count. */
static float tree_sum(int32_t first, int32_t count) {
  int32_t left = 1;
  while (left * 2 < count) {
    left *= 2;
  }
  return count == 1 ? 1.0f / (float)(first + 1) : tree_sum(first, left) + tree_sum(first + left, count - left);
}

static dc_status sum(dc_comm *comm, float *result) {
  const int64_t count = FLOATS;
  float data[FLOATS];
  for (int i = 0; i < FLOATS; i++) {
    data[i] = 1.0f / (float)(comm->rank + 1);
  }
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  const dc_status status = dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL);
  *result = data[FLOATS - 1];
  return status;
}

static void run_rank(const crowd *c, int32_t rank) {
  struct shared *s = c->shared;
  dc_comm *comm = NULL;
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = limit};
  const int32_t files = count_entries("/proc/self/fd", "");
  float again;
  alarm(900); /* ends the child if it hangs */
  dc_status status = dc_comm_create_tcp(c->address, c->name, rank, c->world, &options, &comm);
  status = status == DC_OK ? sum(comm, &s->ranks[rank].sum) : status;
  s->ranks[rank].files = count_entries("/proc/self/fd", "") - files;
  atomic_fetch_add(&s->working, status == DC_OK);
  while (status == DC_OK && atomic_load(&s->working) < c->world) {
    status = sum(comm, &again);
  }
  if (status == DC_OK && c->signal == SIGSTOP) {
    comm->timeout_ns = deadline_ns;
  }
  atomic_fetch_add(&s->ready, 1);
  while (status == DC_OK) {
    status = sum(comm, &again);
  }
  s->ranks[rank].seconds = (double)(dc__now_ns() - atomic_load(&s->end)) / 1e9;
  s->ranks[rank].status = status;
  snprintf(s->ranks[rank].text, sizeof s->ranks[rank].text, "%s", dc_last_error());
  dc_comm_destroy(comm);
  _exit(0);
}

/* Rank 0 may be connected to all ranks at once. */
static void allow_files(void) {
  struct rlimit files;
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &files);
  }
}

static void start(crowd *c, int32_t world, int signal) {
  const char *asked = getenv("LIBDC_TEST_RANKS");
  c->world = asked == NULL ? world : atoi(asked);
  c->signal = signal;
  assert_true(c->world > 3 && c->world <= DC__COMM_MAX_WORLD);
  c->victim = c->world / 3;
  fresh_address(c->address);
  fresh_name(c->name);
  c->shared = mmap(NULL, sizeof *c->shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(c->shared != MAP_FAILED);
  fflush(NULL);
  for (int32_t r = 0; r < c->world; r++) {
    c->children[r] = fork();
    assert_true(c->children[r] >= 0);
    if (c->children[r] == 0) {
      run_rank(c, r);
    }
  }
}

/* Each rank has 2 log2(N) neighbours on the control connections, and as many ranks with which it exchanges data. */
static void expect_few_files(const crowd *c) {
  int32_t digits = 1, most = 0;
  while (1 << digits < c->world) {
    digits++;
  }
  for (int32_t r = 0; r < c->world; r++) {
    most = c->shared->ranks[r].files > most ? c->shared->ranks[r].files : most;
  }
  print_message("%d ranks: at most %d descriptors each\n", c->world, most);
  assert_true(most <= 4 * digits + 8);
}

static void expect_one_error(const crowd *c, dc_status status, const char *says) {
  const struct shared *s = c->shared;
  const int32_t first = c->victim == 0;
  double slowest = 0;
  char named[64];
  snprintf(named, sizeof named, says, c->victim);
  for (int32_t r = 0; r < c->world; r++) {
    if (r == c->victim) {
      continue;
    }
    slowest = s->ranks[r].seconds > slowest ? s->ranks[r].seconds : slowest;
    if (s->ranks[r].status != status || strstr(s->ranks[r].text, named) == NULL || s->ranks[r].seconds > LIMIT_S) {
      fail_msg("rank %d: %s after %.1f s: %s\nrank %d: %s\nexpected: %s", r, dc_status_name(s->ranks[r].status),
               s->ranks[r].seconds, s->ranks[r].text, first, s->ranks[first].text, named);
    }
  }
  for (int32_t r = 0; r < c->world && slowest < vote_s; r++) {
    assert_true(r == c->victim || strcmp(s->ranks[r].text, s->ranks[first].text) == 0);
  }
  print_message("rank %d of %d was %s: others after at most %.2f s: %s\n", c->victim, c->world,
                c->signal == SIGKILL ? "killed" : "stopped", slowest, s->ranks[first].text);
}

static void lose_one(int32_t world, int signal, dc_status status, const char *says) {
  crowd c;
  start(&c, world, signal);
  while (atomic_load(&c.shared->working) < c.world && waitpid(-1, NULL, WNOHANG) == 0) { /* while all ranks live */
    sleep_ms(5);
  }
  for (int32_t r = 0; r < c.world; r++) {
    if (atomic_load(&c.shared->working) < c.world && c.shared->ranks[r].status != DC_OK) {
      fail_msg("rank %d: %s", r, c.shared->ranks[r].text);
    }
    assert_true(c.shared->ranks[r].sum == tree_sum(0, c.world));
  }
  expect_few_files(&c);
  while (atomic_load(&c.shared->ready) < c.world && waitpid(-1, NULL, WNOHANG) == 0) {
    sleep_ms(5); /* a rank still in a collective has the first limit */
  }
  atomic_store(&c.shared->end, dc__now_ns());
  assert_int_equal(kill(c.children[c.victim], signal), 0);
  for (int32_t r = 0; r < c.world; r++) {
    assert_true(r == c.victim || end_rank(c.children[r]) == 0);
  }
  kill(c.children[c.victim], SIGKILL);
  assert_int_equal(end_rank(c.children[c.victim]), -SIGKILL);
  expect_one_error(&c, status, says);
  munmap(c.shared, sizeof *c.shared);
}

static void test_killed(void **state) {
  (void)state;
  lose_one(RANKS, SIGKILL, DC_E_PEER_DEAD, "rank %d died");
}

/* The stopped rank is a neighbour of many, and does not forward what it should. */
static void test_stopped(void **state) {
  (void)state;
  lose_one(FEWER, SIGSTOP, DC_E_TIMEOUT, "for rank %d of ");
}

int main(void) {
  allow_files();
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_killed), cmocka_unit_test(test_stopped)};
  return cmocka_run_group_tests_name("tcp many ranks", tests, leftovers_note, leftovers_compare);
}
