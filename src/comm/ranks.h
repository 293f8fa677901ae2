/* The ranks that an error names: "1, 3", or of many "1, 3, 4, ...". */
#ifndef DC_COMM_RANKS_H
#define DC_COMM_RANKS_H

#include "comm/comm.h"

typedef struct dc__ranks {
  char text[160]; /* the first ones, and that there are more, so that an error has room for what it is about */
  size_t used;
  int32_t count;
} dc__ranks;

void dc__ranks_add(dc__ranks *ranks, int32_t rank);

#endif
