/* int64 keys to pointers: open addressing over arrays in insertion order, so that iteration is the same on every
 * rank. Lookups are on every operator's path; inserts and removals are rare and may cost a rebuild. */
#include <string.h>

#include "base/base.h"

static uint64_t map_hash(int64_t key) {
  uint64_t x = (uint64_t)key * UINT64_C(0x9E3779B97F4A7C15); /* ids are often consecutive, or addresses */
  return x ^ (x >> 32);
}

static int64_t map_find(const dc__map *map, int64_t key) {
  if (map->slot_count == 0) {
    return -1;
  }
  uint64_t mask = (uint64_t)map->slot_count - 1;
  for (uint64_t at = map_hash(key) & mask; map->slots[at] != 0; at = (at + 1) & mask) {
    int64_t index = map->slots[at] - 1;
    if (map->keys[index] == key) {
      return index;
    }
  }
  return -1;
}

static void map_fill_slot(dc__map *map, int64_t index) {
  uint64_t mask = (uint64_t)map->slot_count - 1;
  uint64_t at = map_hash(map->keys[index]) & mask;
  while (map->slots[at] != 0) {
    at = (at + 1) & mask;
  }
  map->slots[at] = (int32_t)(index + 1);
}

static bool map_reserve(dc__map *map) {
  int64_t keys_capacity = map->capacity;
  if (!dc__array_reserve((void **)&map->keys, &keys_capacity, map->count + 1, sizeof *map->keys) ||
      !dc__array_reserve((void **)&map->values, &map->capacity, map->count + 1, sizeof *map->values)) {
    return false;
  }
  if (2 * (map->count + 1) <= map->slot_count) {
    return true;
  }
  int64_t slot_count = map->slot_count > 0 ? 2 * map->slot_count : 16;
  int32_t *slots = dc__calloc((size_t)slot_count, sizeof *slots);
  if (slots == NULL) {
    return false;
  }
  dc__free(map->slots);
  map->slots = slots;
  map->slot_count = slot_count;
  for (int64_t i = 0; i < map->count; i++) {
    map_fill_slot(map, i);
  }
  return true;
}

void *dc__map_get(const dc__map *map, int64_t key) {
  int64_t index = map_find(map, key);
  return index < 0 ? NULL : map->values[index];
}

bool dc__map_put(dc__map *map, int64_t key, void *value) {
  int64_t index = map_find(map, key);
  if (index < 0) {
    if (!map_reserve(map)) {
      return false;
    }
    index = map->count++;
    map->keys[index] = key;
    map_fill_slot(map, index);
  }
  map->values[index] = value;
  return true;
}

void dc__map_remove(dc__map *map, int64_t key) {
  int64_t index = map_find(map, key);
  if (index < 0) {
    return;
  }
  size_t tail = (size_t)(map->count - index - 1);
  memmove(map->keys + index, map->keys + index + 1, tail * sizeof *map->keys);
  memmove(map->values + index, map->values + index + 1, tail * sizeof *map->values);
  map->count--;
  memset(map->slots, 0, (size_t)map->slot_count * sizeof *map->slots);
  for (int64_t i = 0; i < map->count; i++) {
    map_fill_slot(map, i);
  }
}

void dc__map_clear(dc__map *map) {
  dc__free(map->keys);
  dc__free(map->values);
  dc__free(map->slots);
  memset(map, 0, sizeof *map);
}
