/* Maps compared with a list: any order of puts and removals, the order of insertion, unfavourable keys. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "base/map_probe.h"

static uint64_t next_random(uint64_t *seed) {
  *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return *seed >> 33;
}

/* ---- compared with a list ---- */

enum { KEYS = 300, STEPS = 60000 };

typedef struct entry {
  int64_t key;
  void *value;
} entry;

typedef struct list {
  entry entries[KEYS];
  int64_t count;
} list;

static int64_t list_find(const list *l, int64_t key) {
  int64_t i = 0;
  while (i < l->count && l->entries[i].key != key) {
    i++;
  }
  return i;
}

static void list_insert(list *l, int64_t key, void *value) {
  int64_t i = list_find(l, key);
  l->count += i == l->count;
  l->entries[i] = (entry){key, value};
}

static void list_remove(list *l, int64_t key) {
  int64_t i = list_find(l, key);
  if (i < l->count) {
    l->count--;
    memmove(&l->entries[i], &l->entries[i + 1], (size_t)(l->count - i) * sizeof *l->entries);
  }
}

static void assert_same(const dc__map *map, const list *l) {
  int64_t seen = 0;
  assert_int_equal(map->count, l->count);
  assert_true(map->used <= 2 * map->count + 16 || map->used <= map->slot_count / 2); /* an iteration visits few slots */
  DC__MAP_EACH (map, i) {
    assert_true(seen < l->count);
    assert_int_equal(map->keys[i], l->entries[seen].key);
    assert_ptr_equal(map->values[i], l->entries[seen].value);
    seen++;
  }
  assert_int_equal(seen, l->count);
}

/* Phases that mostly put and phases that mostly remove. */
static void test_any_order(void **state) {
  (void)state;
  static list model;
  static char values[STEPS];
  dc__map map = {0};
  uint64_t seed = 7;
  for (int step = 0; step < STEPS; step++) {
    int64_t key = (int64_t)(next_random(&seed) % KEYS) - 20;
    bool puts = next_random(&seed) % 100 < (step / 3000 % 2 == 0 ? 80U : 20U);
    if (puts) {
      assert_true(dc__map_put(&map, key, &values[step]));
      list_insert(&model, key, &values[step]);
    } else {
      dc__map_remove(&map, key);
      list_remove(&model, key);
    }
    int64_t asked = (int64_t)(next_random(&seed) % KEYS) - 20;
    int64_t at = list_find(&model, asked);
    assert_ptr_equal(dc__map_get(&map, asked), at < model.count ? model.entries[at].value : NULL);
    if (step % 50 == 0) {
      assert_same(&map, &model);
    }
  }
  while (model.count > 0) {
    int64_t key = model.entries[model.count / 2].key;
    dc__map_remove(&map, key);
    list_remove(&model, key);
    assert_same(&map, &model);
  }
  dc__map_clear(&map);
}

/* ---- costs, in numbers of slots and moves ---- */

enum { MANY = 10000 };

/* The longest run of filled slots bounds how far a search goes. */
/* The number of slots that searches for all keys read. */
static int64_t slots_read(const dc__map *map) {
  int64_t read = 0;
  DC__MAP_EACH (map, i) {
    dc__map_probe probe = dc__map_first_slot(map->slot_count, map->keys[i]);
    for (read++; map->slots[probe.at] != i + 1; read++) {
      dc__map_next_slot(map->slot_count, &probe);
    }
  }
  return read;
}

static void test_unfavourable_keys(void **state) {
  (void)state;
  char value;
  for (int shift = 0; shift <= 50; shift++) {
    dc__map map = {0};
    for (int64_t i = 0; i < MANY; i++) {
      assert_true(dc__map_put(&map, (int64_t)((uint64_t)i << shift), &value));
    }
    assert_int_equal(map.count, MANY);
    assert_true(slots_read(&map) < 4 * map.count);
    assert_true(shift > 0 || slots_read(&map) == map.count);
    for (int64_t i = 0; i < MANY; i++) {
      assert_ptr_equal(dc__map_get(&map, (int64_t)((uint64_t)i << shift)), &value);
    }
    dc__map_clear(&map);
  }
}

/* Keys that hash into a run of consecutive numbers do not form one long chain with them. */
static void test_distant_keys_among_consecutive_ones(void **state) {
  (void)state;
  char value;
  dc__map map = {0};
  for (int64_t i = 0; i < MANY; i++) {
    assert_true(dc__map_put(&map, i, &value));
    assert_true(dc__map_put(&map, INT64_MIN + (i << 20), &value));
  }
  assert_true(slots_read(&map) < 6 * map.count);
  dc__map_clear(&map);
}

/* A rebuild moves every entry that remains. All rebuilds together move each entry only a few times. */
static void test_removals_move_little(void **state) {
  (void)state;
  char value;
  dc__map map = {0};
  int64_t moved = 0;
  for (int64_t i = 0; i < MANY; i++) {
    assert_true(dc__map_put(&map, i, &value));
  }
  for (int64_t i = 0; i < MANY; i++) {
    int64_t used = map.used;
    dc__map_remove(&map, i);
    moved += map.used == used ? 0 : map.used;
  }
  assert_int_equal(map.count, 0);
  assert_true(moved <= 2 * MANY);
  for (int64_t i = 0; i < MANY; i++) { /* one entry is added, one removed */
    int64_t used = map.used;
    assert_true(dc__map_put(&map, i, &value));
    moved += map.used == used + 1 ? 0 : map.used;
    dc__map_remove(&map, i);
  }
  assert_true(moved <= 4 * MANY);
  assert_true(map.used <= 16);
  dc__map_clear(&map);
}

static void test_maps(void **state) {
  (void)state;
  enum { ALL = 500 };
  static int values[ALL];
  dc__map map = {0};
  for (int64_t i = 0; i < ALL; i++) {
    assert_true(dc__map_put(&map, i * 4096 - 1000, &values[i])); /* like addresses */
  }
  for (int64_t i = 0; i < ALL; i += 2) {
    dc__map_remove(&map, i * 4096 - 1000);
  }
  dc__map_remove(&map, 12345); /* absent */
  assert_int_equal(map.count, ALL / 2);
  for (int64_t i = 0; i < ALL; i++) {
    assert_ptr_equal(dc__map_get(&map, i * 4096 - 1000), i % 2 == 0 ? NULL : &values[i]);
  }
  int64_t seen = 0;
  DC__MAP_EACH (&map, i) {
    assert_int_equal(map.keys[i], (2 * seen++ + 1) * 4096 - 1000); /* iteration is in the order of insertion */
  }
  assert_true(dc__map_put(&map, INT64_MIN, &values[0]));
  assert_true(dc__map_put(&map, INT64_MIN, &values[1])); /* replaces */
  assert_ptr_equal(dc__map_get(&map, INT64_MIN), &values[1]);
  dc__map_clear(&map);
  assert_null(dc__map_get(&map, 4096));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_maps),
      cmocka_unit_test(test_any_order),
      cmocka_unit_test(test_unfavourable_keys),
      cmocka_unit_test(test_distant_keys_among_consecutive_ones),
      cmocka_unit_test(test_removals_move_little),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
