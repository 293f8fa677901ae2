/* Sets of ranks, and how an error names them: "1, 3", or of many "1, 3, 4, ...". */
#ifndef DC_COMM_RANKS_H
#define DC_COMM_RANKS_H

#include "comm/comm.h"

typedef struct dc__ranks {
  char text[160]; /* the first ones, and that there are more, so that an error has room for what it is about */
  size_t used;
  int32_t count;
} dc__ranks;

void dc__ranks_add(dc__ranks *ranks, int32_t rank);

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

static inline bool dc__rank_set_is_empty(const dc__rank_set *set) {
  uint64_t any = 0;
  for (int32_t i = 0; i < DC__RANK_WORDS; i++) {
    any |= set->words[i];
  }
  return any == 0;
}

/* The ranks of a set below `world`. */
dc__ranks dc__ranks_of(const dc__rank_set *set, int32_t world);
/* Whom a rank waits for: empty, if for nobody. */
typedef dc__rank_set (*dc__waits_fn)(const void *context, int32_t rank);
/* The ranks that are the reason why rank `me` lacks others: those that it lacks; in place of one that itself waits,
 * those for whom that one waits, and so on. Where that leads to nobody, since ranks wait for each other: those that it
 * lacks. */
dc__rank_set dc__ranks_late(int32_t me, int32_t world, const dc__rank_set *lacking, dc__waits_fn waits,
                            const void *context);

#endif
