/* The plain version of update.h, and the choice of the version to use. */
#include "kernels/optim/update.h"

#define UPDATE dc__update_plain
#include "kernels/optim/update_tmpl.h"

static const dc__update *active_update(void) {
  const dc__update *chosen = dc__active_kernels()->update;
  return chosen != NULL ? chosen : &dc__update_plain;
}

void dc__update_cpu(int32_t kind, const dc__update_span *span, int64_t from, int64_t count, float scale) {
  (kind == DC__UPDATE_ADAMW ? active_update()->adamw : active_update()->sgd)(span, from, count, scale);
}
void dc__update_read(float *x, const void *from, int32_t dtype, int64_t count, float scale) {
  active_update()->read(x, from, dtype, count, scale);
}
bool dc__update_is_below(const float *x, int64_t count, int32_t exponent) {
  return active_update()->is_below(x, count, exponent);
}
void dc__update_sync_master(float *master, const void *w, int32_t dtype, int64_t count) {
  active_update()->sync_master(master, w, dtype, count);
}
