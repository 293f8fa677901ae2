/* Processes over TCP, one of which is killed, stopped or late at any moment of its collectives. All others get the same
 * error, which names it. Every second group has small collectives of more ranks, which go in rounds. */
#include "comm_failing.h"

#include <signal.h>
#include <sys/mman.h>

#include "leftovers.h"

enum { MOST = 7, GROUPS = 6, LIMIT_S = 60 };

static const int32_t worlds[2] = {4, MOST};
static const int64_t elements[2] = {400000, 500};

static const int64_t deadline_ns = INT64_C(8000000000); /* on the busiest machine, living ranks move something before */

typedef struct group {
  char address[64], name[64];
  int32_t victim, world;
  int64_t elements;
  pid_t children[MOST];
  struct shared {
    atomic_int working, late; /* late 1: the victim starts nothing more */
    atomic_llong end;         /* time of the victim's end */
    dc_status status[MOST];
    double seconds[MOST];
    char text[MOST][512];
  } * shared;
} group;

/* Makes three collectives in turn, of which two move data. */
static dc_status work(dc_comm *comm, const group *g) {
  int64_t count = g->elements;
  float *data = calloc((size_t)count, sizeof *data);
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  dc_status status = dc_comm_barrier(comm);
  comm->timeout_ns = deadline_ns;
  atomic_fetch_add(&g->shared->working, 1);
  for (int i = 0; status == DC_OK; i++) {
    while (comm->rank == g->victim && atomic_load(&g->shared->late) != 0) { /* until it is killed */
      sleep_ms(10);
    }
    status = i % 3 == 0   ? dc_comm_all_reduce(comm, &tensor, DC_MEAN, NULL)
             : i % 3 == 1 ? dc_comm_broadcast(comm, &tensor, i % g->world, NULL)
                          : dc_comm_barrier(comm);
  }
  free(data);
  return status;
}

static void run_rank(const group *g, int32_t rank) {
  dc_comm *comm = NULL;
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = INT64_C(60000000000)};
  alarm(150); /* ends the child if it hangs */
  dc_status status = dc_comm_create_tcp(g->address, g->name, rank, g->world, &options, &comm);
  status = status == DC_OK ? work(comm, g) : status;
  g->shared->seconds[rank] = (double)(dc__now_ns() - atomic_load(&g->shared->end)) / 1e9;
  g->shared->status[rank] = status;
  snprintf(g->shared->text[rank], sizeof g->shared->text[0], "%s", dc_last_error());
  dc_comm_destroy(comm);
  _exit(0);
}

static void start(group *g, int i) {
  g->world = worlds[i % 2];
  g->elements = elements[i % 2];
  g->victim = i % g->world;
  fresh_address(g->address);
  fresh_name(g->name);
  void *shared = mmap(NULL, sizeof *g->shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(shared != MAP_FAILED);
  g->shared = shared;
  fflush(NULL);
  for (int32_t r = 0; r < g->world; r++) {
    g->children[r] = fork();
    assert_true(g->children[r] >= 0);
    if (g->children[r] == 0) {
      run_rank(g, r);
    }
  }
}

/* signal 0: the victim comes late. */
static void strike(group *g, int signal, int64_t after_ms) {
  while (atomic_load(&g->shared->working) < g->world) {
    sleep_ms(1);
  }
  sleep_ms(after_ms);
  atomic_store(&g->shared->end, dc__now_ns());
  atomic_store(&g->shared->late, signal == 0);
  assert_int_equal(kill(g->children[g->victim], signal), 0);
}

static void compare(const group *g, dc_status expected, const char *says) {
  const struct shared *s = g->shared;
  int32_t first = g->victim == 0;
  double slowest = 0;
  char named[64];
  snprintf(named, sizeof named, says, g->victim, g->world, g->victim);
  for (int32_t r = 0; r < g->world; r++) {
    slowest = r != g->victim && s->seconds[r] > slowest ? s->seconds[r] : slowest;
    if (r != g->victim && (s->status[r] != expected || strstr(s->text[r], named) == NULL || s->seconds[r] > LIMIT_S ||
                           (expected == DC_E_PEER_DEAD && strstr(s->text[r], "from 127.0.0.1 ") == NULL) ||
                           strcmp(s->text[r], s->text[first]) != 0)) {
      fail_msg("victim %d: rank %d: %s after %.1f s: %s\nrank %d: %s\nexpected: %s", g->victim, r,
               dc_status_name(s->status[r]), s->seconds[r], s->text[r], first, s->text[first], named);
    }
  }
  print_message("rank %d of %d: others after at most %.2f s: %s: %s\n", g->victim, g->world, slowest,
                dc_status_name(expected), s->text[first]);
}

static void all_moments(int signal, dc_status expected, const char *says) {
  group groups[GROUPS];
  for (int i = 0; i < GROUPS; i++) {
    start(&groups[i], i);
  }
  for (int i = 0; i < GROUPS; i++) {
    strike(&groups[i], signal, i * 7 % 23);
  }
  for (int i = 0; i < GROUPS; i++) {
    for (int32_t r = 0; r < groups[i].world; r++) {
      if (r != groups[i].victim) {
        assert_int_equal(end_rank(groups[i].children[r]), 0);
      }
    }
    kill(groups[i].children[groups[i].victim], SIGKILL);
    assert_int_equal(end_rank(groups[i].children[groups[i].victim]), -SIGKILL);
  }
  for (int i = 0; i < GROUPS; i++) {
    compare(&groups[i], expected, says);
    munmap(groups[i].shared, sizeof *groups[i].shared);
  }
}

static void test_killed(void **state) {
  (void)state;
  all_moments(SIGKILL, DC_E_PEER_DEAD, "rank %d died");
}

/* Survivors may be stuck in different collectives, since the victim may have sent something to only one of them. */
static void test_stopped(void **state) {
  (void)state;
  all_moments(SIGSTOP, DC_E_TIMEOUT, "for rank %d of %d to ");
}

static void test_late(void **state) {
  (void)state;
  all_moments(0, DC_E_TIMEOUT, "for rank %d of %d to come; rank %d last started ");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_killed), cmocka_unit_test(test_stopped),
                                     cmocka_unit_test(test_late)};
  return cmocka_run_group_tests_name("tcp_rank_death", tests, leftovers_note, leftovers_compare);
}
