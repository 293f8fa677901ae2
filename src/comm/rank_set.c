#include "comm/rank_set.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char more[] = ", ...";

void dc__rank_list_add(dc__rank_list *ranks, int32_t rank) {
  char next[16];
  size_t bytes = (size_t)snprintf(next, sizeof next, "%s%" PRId32, ranks->count > 0 ? ", " : "", rank);
  ranks->count++;
  if (ranks->used + bytes + sizeof more <= sizeof ranks->text) {
    memcpy(ranks->text + ranks->used, next, bytes + 1);
    ranks->used += bytes;
  } else if (ranks->used + sizeof more <= sizeof ranks->text) {
    memcpy(ranks->text + ranks->used, more, sizeof more);
    ranks->used = sizeof ranks->text; /* full */
  }
}

dc__rank_list dc__rank_list_of(const dc__rank_set *set, int32_t world) {
  dc__rank_list ranks = {.count = 0};
  for (int32_t r = 0; r < world; r++) {
    if (dc__rank_set_has(set, r)) {
      dc__rank_list_add(&ranks, r);
    }
  }
  return ranks;
}

dc__rank_set dc__rank_set_stragglers(int32_t me, int32_t world, const dc__rank_set *missing, dc__waits_for_fn waits_for,
                                     const void *context) {
  dc__rank_set stragglers = {{0}}, visited = *missing, next = *missing;
  while (!dc__rank_set_is_empty(&next)) {
    dc__rank_set now = next;
    next = (dc__rank_set){{0}};
    for (int32_t r = 0; r < world; r++) {
      if (r == me || !dc__rank_set_has(&now, r)) {
        continue;
      }
      const dc__rank_set others = waits_for(context, r);
      if (dc__rank_set_is_empty(&others)) {
        dc__rank_set_add(&stragglers, r);
      }
      for (int32_t i = 0; i < DC__RANK_WORDS; i++) {
        next.words[i] |= others.words[i] & ~visited.words[i];
        visited.words[i] |= others.words[i];
      }
    }
  }
  return dc__rank_set_is_empty(&stragglers) ? *missing : stragglers;
}
