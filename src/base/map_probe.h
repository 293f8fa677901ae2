/* A key's slots in a map, one after the other. The first is its low bits: consecutive numbers then lie side by side,
 * and a walk through them in order reads each cache line once. The next ones are as CPython's dict has them
 * (Objects/dictobject.c): all bits of the key's hash decide, and once they are used up every slot is visited. */
#ifndef DC_BASE_MAP_PROBE_H
#define DC_BASE_MAP_PROBE_H

#include <stdint.h>

typedef struct dc__map_probe {
  uint64_t at;
  uint64_t rest; /* of the hash */
} dc__map_probe;

/* SplitMix64's finaliser (Steele, Lea, Flood 2014): each bit of a key reaches each bit of the result. */
static inline uint64_t dc__map_hash(int64_t key) {
  uint64_t x = (uint64_t)key;
  x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
  return x ^ (x >> 31);
}

static inline dc__map_probe dc__map_first_slot(int64_t slot_count, int64_t key) {
  return (dc__map_probe){.at = (uint64_t)key & ((uint64_t)slot_count - 1), .rest = dc__map_hash(key)};
}

static inline void dc__map_next_slot(int64_t slot_count, dc__map_probe *probe) {
  probe->at = (5 * probe->at + 1 + probe->rest) & ((uint64_t)slot_count - 1);
  probe->rest >>= 5;
}

#endif
