/* The sequence of slots that a map probes for a key. The first slot is the key's low bits: consecutive keys then lie
 * side by side, and a walk through them in order reads each cache line once. The later slots follow CPython's dict
 * (Objects/dictobject.c): they use up all bits of the key's hash, and then visit every slot. */
#ifndef DC_BASE_MAP_PROBE_H
#define DC_BASE_MAP_PROBE_H

#include <stdint.h>

typedef struct dc__map_probe {
  uint64_t at;
  uint64_t rest; /* bits of the hash that no slot has used yet */
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
