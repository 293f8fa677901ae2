/* Sets of ranks, and their text in errors: "1, 3", or "1, 3, 4, ..." if there are many. */
#ifndef DC_COMM_RANK_SET_H
#define DC_COMM_RANK_SET_H

#include "comm/comm.h"

typedef struct dc__rank_list {
  char text[160]; /* truncated, so that an error has room for the rest */
  size_t used;
  int32_t count;
} dc__rank_list;

void dc__rank_list_add(dc__rank_list *ranks, int32_t rank);

enum { DC__RANK_WORDS = DC__COMM_MAX_WORLD / 64 };

typedef struct dc__rank_set {
  uint64_t words[DC__RANK_WORDS];
} dc__rank_set;

static inline bool dc__rank_set_has(const dc__rank_set *set, int32_t rank) {
  return (set->words[rank / 64] >> (rank % 64) & 1) != 0;
}

static inline void dc__rank_set_add(dc__rank_set *set, int32_t rank) {
  set->words[rank / 64] |= UINT64_C(1) << (rank % 64);
}

static inline void dc__rank_set_unite(dc__rank_set *set, const dc__rank_set *others) {
  for (int32_t i = 0; i < DC__RANK_WORDS; i++) {
    set->words[i] |= others->words[i];
  }
}

static inline bool dc__rank_set_is_empty(const dc__rank_set *set) {
  uint64_t any = 0;
  for (int32_t i = 0; i < DC__RANK_WORDS; i++) {
    any |= set->words[i];
  }
  return any == 0;
}

/* The ranks of a set below `world`. */
dc__rank_list dc__rank_list_of(const dc__rank_set *set, int32_t world);
/* The ranks that `rank` waits for; empty if none. */
typedef dc__rank_set (*dc__waits_for_fn)(const void *context, int32_t rank);
/* The ranks that delay rank `me`: follows the waits-for graph from the missing ranks to ranks that do not wait. If all
 * of them wait for each other, returns the missing ranks. */
dc__rank_set dc__rank_set_stragglers(int32_t me, int32_t world, const dc__rank_set *missing, dc__waits_for_fn waits_for,
                                     const void *context);

#endif
