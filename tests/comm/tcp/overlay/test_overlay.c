/* Routes through an overlay: neighbours know each other, and all ranks are reached in few steps, also around ranks that
 * have ended. */
#include "comm/tcp/overlay/overlay.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

static const int32_t worlds[] = {65, 66, 100, 127, 128, 129, 300, 1000, 1023, 1024};

/* Sets the group up as rank r sees it. */
static void be_rank(dc__tcp_group *group, int32_t r) {
  group->rank = r;
  for (int32_t i = 0; i < group->world; i++) {
    group->control[i] = i != r && dc__tcp_is_neighbour(group, i) ? 1 : -1;
  }
}

/* Returns the number of steps from one rank to another; -1: there is no route. */
static int32_t count_steps(dc__tcp_group *group, int32_t from, int32_t to) {
  int32_t steps = 0, last = -1;
  for (int32_t at = from; at != to; steps++) {
    be_rank(group, at);
    const int32_t next = dc__tcp_next_hop(group, to, last);
    if (next < 0 || steps > 2 * group->world) {
      return -1;
    }
    last = at;
    at = next;
  }
  return steps;
}

static int32_t binary_digits(int32_t world) {
  int32_t digits = 0;
  while (1 << digits < world) {
    digits++;
  }
  return digits;
}

static void test_neighbours(void **state) {
  (void)state;
  dc__tcp_group *group = calloc(1, sizeof *group);
  group->overlay = true;
  for (size_t w = 0; w < DC__COUNT(worlds); w++) {
    group->world = worlds[w];
    for (int32_t r = 0; r < group->world; r++) {
      int32_t count = 0;
      for (int32_t other = 0; other < group->world; other++) {
        group->rank = r;
        const bool knows = other != r && dc__tcp_is_neighbour(group, other);
        group->rank = other;
        assert_true(other == r || knows == dc__tcp_is_neighbour(group, r));
        count += knows;
      }
      assert_true(count <= 2 * binary_digits(group->world) && count >= binary_digits(group->world));
    }
  }
  free(group);
}

static void test_ways_are_short(void **state) {
  (void)state;
  dc__tcp_group *group = calloc(1, sizeof *group);
  group->overlay = true;
  for (size_t w = 0; w < DC__COUNT(worlds); w++) {
    group->world = worlds[w];
    for (int32_t to = 1; to < group->world; to++) { /* by symmetry, rank 0 stands for every rank */
      const int32_t steps = count_steps(group, 0, to);
      assert_true(steps >= 1 && steps <= binary_digits(group->world) / 2 + 1);
    }
  }
  free(group);
}

/* Eight ranks on one machine, the others alone on theirs. */
static void test_ways_around_ended_ranks(void **state) {
  (void)state;
  dc__tcp_group *group = calloc(1, sizeof *group);
  group->overlay = true;
  group->world = 300;
  for (int32_t r = 96; r < 104; r++) {
    atomic_store(&group->closed[r], DC__TCP_DISCONNECTED);
  }
  atomic_store(&group->closed[7], DC__TCP_CLOSED);
  atomic_store(&group->closed[200], DC__TCP_DISCONNECTED);
  for (int32_t from = 0; from < group->world; from++) {
    for (int32_t to = 0; to < group->world; to++) {
      const bool live = atomic_load(&group->closed[from]) == 0 && atomic_load(&group->closed[to]) == 0;
      if (live && from != to) {
        const int32_t steps = count_steps(group, from, to);
        if (steps < 1 || steps > 12) {
          fail_msg("from %d to %d: %d steps", from, to, steps);
        }
      }
    }
  }
  free(group);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_neighbours), cmocka_unit_test(test_ways_are_short),
                                     cmocka_unit_test(test_ways_around_ended_ranks)};
  return cmocka_run_group_tests_name("tcp overlay", tests, NULL, NULL);
}
