/* The best fit of a tree, compared with a search through all blocks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device/block_list.h"

enum { BLOCKS = 400, STEPS = 40000 };

typedef struct model {
  dc__arena_block blocks[BLOCKS];
  int64_t came[BLOCKS]; /* when the block was added; 0: it is not in the tree */
} model;

static uint64_t next_random(uint64_t *seed) {
  *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return *seed >> 33;
}

/* kind: a few sizes, neighbours of powers of two, or any size. */
static size_t random_size(uint64_t *seed, int kind) {
  uint64_t units = 1 + next_random(seed) % 7;
  if (kind == 1) {
    units = (UINT64_C(1) << next_random(seed) % 40) + next_random(seed) % 3;
  } else if (kind == 2) {
    units = 1 + (next_random(seed) >> next_random(seed) % 30);
  }
  return (size_t)units * DC__BLOCK_ALIGNMENT;
}

static dc__arena_block *best_of_all(model *m, size_t bytes, bool last) {
  int64_t best = -1;
  for (int64_t i = 0; i < BLOCKS; i++) {
    if (m->came[i] == 0 || m->blocks[i].bytes < bytes) {
      continue;
    }
    bool smaller = best < 0 || m->blocks[i].bytes < m->blocks[best].bytes;
    bool same = best >= 0 && m->blocks[i].bytes == m->blocks[best].bytes;
    if (smaller || (same && (m->came[i] > m->came[best]) == last)) {
      best = i;
    }
  }
  return best < 0 ? NULL : &m->blocks[best];
}

static void test_best_fit(void **state) {
  (void)state;
  static model m;
  for (int kind = 0; kind < 3; kind++) {
    dc__block_tree tree = {0};
    uint64_t seed = 11 + (uint64_t)kind;
    memset(&m, 0, sizeof m);
    for (int64_t step = 1; step <= STEPS; step++) {
      uint64_t i = next_random(&seed) % BLOCKS;
      if (m.came[i] == 0) {
        m.blocks[i].bytes = random_size(&seed, kind);
        m.came[i] = step;
        dc__block_tree_add(&tree, &m.blocks[i]);
      } else {
        m.came[i] = 0;
        dc__block_tree_remove(&tree, &m.blocks[i]);
      }
      size_t bytes = random_size(&seed, kind);
      assert_ptr_equal(dc__block_tree_best_fit(&tree, bytes, true), best_of_all(&m, bytes, true));
      assert_ptr_equal(dc__block_tree_best_fit(&tree, bytes, false), best_of_all(&m, bytes, false));
    }
    for (int64_t i = 0; i < BLOCKS; i++) {
      if (m.came[i] != 0) {
        dc__block_tree_remove(&tree, &m.blocks[i]);
      }
    }
    assert_true(tree.filled == 0);
    assert_null(dc__block_tree_best_fit(&tree, DC__BLOCK_ALIGNMENT, true));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_best_fit)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
