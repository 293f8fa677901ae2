/* int64 keys to pointers: open addressing over arrays in insertion order, so that iteration is the same on every rank.
 * A removed entry keeps its place and its slot until a rebuild. Rebuilds are rare enough for constant time on
 * average. */
#include <string.h>

#include "base/base.h"
#include "base/map_probe.h"

enum { MIN_SLOTS = 16 };

static int64_t map_find(const dc__map *map, int64_t key) {
  if (map->slot_count == 0) {
    return -1;
  }
  for (dc__map_probe probe = dc__map_first_slot(map->slot_count, key); map->slots[probe.at] != 0;
       dc__map_next_slot(map->slot_count, &probe)) {
    int64_t index = map->slots[probe.at] - 1;
    if (map->keys[index] == key && map->values[index] != NULL) {
      return index;
    }
  }
  return -1;
}

static void map_fill_slot(dc__map *map, int64_t index) {
  dc__map_probe probe = dc__map_first_slot(map->slot_count, map->keys[index]);
  while (map->slots[probe.at] != 0) {
    dc__map_next_slot(map->slot_count, &probe);
  }
  map->slots[probe.at] = (int32_t)(index + 1);
}

/* Drops removed entries and fills the slots again. slot_count is at most the number of allocated slots. */
static void map_rebuild(dc__map *map, int64_t slot_count) {
  int64_t kept = 0;
  DC__MAP_EACH (map, i) {
    map->keys[kept] = map->keys[i];
    map->values[kept++] = map->values[i];
  }
  map->used = kept;
  map->slot_count = slot_count;
  memset(map->slots, 0, (size_t)slot_count * sizeof *map->slots);
  for (int64_t i = 0; i < kept; i++) {
    map_fill_slot(map, i);
  }
}

/* At least half of the slots stay empty. After a rebuild at least a quarter of them can be filled before the next
 * one. */
bool dc__map_reserve(dc__map *map) {
  if (2 * (map->used + 1) > map->slot_count) {
    int64_t slot_count = map->slot_count;
    if (4 * (map->count + 1) > slot_count) {
      slot_count = slot_count > 0 ? 2 * slot_count : MIN_SLOTS;
      int32_t *slots = dc__calloc((size_t)slot_count, sizeof *slots);
      if (slots == NULL) {
        return false;
      }
      dc__free(map->slots);
      map->slots = slots;
    }
    map_rebuild(map, slot_count);
  }
  int64_t keys_capacity = map->capacity;
  return dc__array_reserve((void **)&map->keys, &keys_capacity, map->used + 1, sizeof *map->keys) &&
         dc__array_reserve((void **)&map->values, &map->capacity, map->used + 1, sizeof *map->values);
}

void *dc__map_get(const dc__map *map, int64_t key) {
  int64_t index = map_find(map, key);
  return index < 0 ? NULL : map->values[index];
}

bool dc__map_put(dc__map *map, int64_t key, void *value) {
  int64_t index = map_find(map, key);
  if (index < 0) {
    if (!dc__map_reserve(map)) {
      return false;
    }
    index = map->used++;
    map->count++;
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
  map->values[index] = NULL;
  map->count--;
  if (map->used > 2 * map->count + MIN_SLOTS) { /* so that an iteration does not pass many removed ones */
    int64_t slot_count = map->slot_count;
    while (slot_count > MIN_SLOTS && slot_count > 8 * (map->count + 1)) {
      slot_count /= 2;
    }
    map_rebuild(map, slot_count);
  }
}

void dc__map_clear(dc__map *map) {
  dc__free(map->keys);
  dc__free(map->values);
  dc__free(map->slots);
  memset(map, 0, sizeof *map);
}
