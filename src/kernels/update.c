/* The plain version of update.h, and the choice between it and the others. */
#include "kernels/update.h"

#define UPDATE dc__update_plain
#include "kernels/update_loops.h"

static const dc__update *update(void) {
  const dc__update *chosen = dc__kernels_table()->update;
  return chosen != NULL ? chosen : &dc__update_plain;
}

void dc__update_adamw(float *w, float *m, float *v, float *most, const float *g, int64_t count,
                      const dc__adamw_factors *factors) {
  update()->adamw(w, m, v, most, g, count, factors);
}
void dc__update_sgd(float *w, float *b, const float *g, int64_t count, const dc__sgd_factors *factors) {
  update()->sgd(w, b, g, count, factors);
}
void dc__update_scale(float *y, const float *x, int64_t count, float scale) {
  update()->scale(y, x, count, scale);
}
bool dc__update_below(const float *x, int64_t count, int32_t exponent) {
  return update()->below(x, count, exponent);
}
void dc__update_follow(float *master, const float *rounded, const float *w, int64_t count) {
  update()->follow(master, rounded, w, count);
}
