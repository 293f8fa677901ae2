/* The ranks that an error names: "1, 3". */
#ifndef DC_COMM_RANKS_H
#define DC_COMM_RANKS_H

#include "comm/comm.h"

typedef struct dc__ranks {
  char text[256]; /* all that there may be: two digits, a comma and a space each */
  size_t used;
  int32_t count;
} dc__ranks;

_Static_assert(DC__COMM_MAX_WORLD * 4 <= 256 && DC__COMM_MAX_WORLD <= 100, "dc__ranks.text");

void dc__ranks_add(dc__ranks *ranks, int32_t rank);

#endif
