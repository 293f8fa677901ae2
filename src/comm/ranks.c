#include "comm/ranks.h"

#include <inttypes.h>
#include <stdio.h>

void dc__ranks_add(dc__ranks *ranks, int32_t rank) {
  ranks->used += (size_t)snprintf(ranks->text + ranks->used, sizeof ranks->text - ranks->used, "%s%" PRId32,
                                  ranks->count > 0 ? ", " : "", rank);
  ranks->count++;
}
