/* The plain version of rows.h, and the choice between it and the others. */
#include "kernels/rows.h"

#define ROWS dc__rows_plain
#include "kernels/rows_loops.h"

static const dc__rows *rows(void) {
  const dc__rows *chosen = dc__kernels_table()->rows;
  return chosen != NULL ? chosen : &dc__rows_plain;
}

void dc__gelu(float *y, const float *x, int64_t count, int32_t form) {
  rows()->gelu(y, x, count, form);
}

void dc__gelu_back(float *g, const float *x, int64_t count, int32_t form) {
  rows()->gelu_back(g, x, count, form);
}
