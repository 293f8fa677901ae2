#include "comm/ranks.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char more[] = ", ...";

void dc__ranks_add(dc__ranks *ranks, int32_t rank) {
  char next[16];
  size_t bytes = (size_t)snprintf(next, sizeof next, "%s%" PRId32, ranks->count > 0 ? ", " : "", rank);
  ranks->count++;
  if (ranks->used + bytes + sizeof more <= sizeof ranks->text) {
    memcpy(ranks->text + ranks->used, next, bytes + 1);
    ranks->used += bytes;
  } else if (ranks->used + sizeof more <= sizeof ranks->text) {
    memcpy(ranks->text + ranks->used, more, sizeof more);
    ranks->used = sizeof ranks->text; /* nothing follows */
  }
}
