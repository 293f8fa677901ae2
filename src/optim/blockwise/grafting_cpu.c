/* Shampoo's element-wise work: the filtered gradient, grafts and momentum. Sums use a fixed number of lanes, so
 * their bits depend on the block alone. */
#include <math.h>

#include "optim/blockwise/blockwise.h"

enum { LANES = 8 };

static double graft_norm(const float *x, int64_t count) {
  double lanes[LANES] = {0};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (int64_t k = 0; k < LANES; k++) {
      lanes[k] += (double)x[i + k] * (double)x[i + k];
    }
  }
  for (int64_t k = 0; i < count; i++, k++) {
    lanes[k] += (double)x[i] * (double)x[i];
  }
  double sum = 0;
  for (int64_t k = 0; k < LANES; k++) {
    sum += lanes[k];
  }
  return sqrt(sum);
}

static void accumulate_squares(const dc__graft *g) {
  const dc__graft_factors f = g->factors;
  for (int64_t i = 0; i < g->count; i++) {
    g->squares[i] = dc__graft_square(g->squares[i], g->data[i], &f);
  }
}

static void update_exp_avg(const dc__graft *g) {
  const dc__graft_factors f = g->factors;
  for (int64_t i = 0; i < g->count; i++) {
    g->exp_avg[i] = dc__graft_exp_avg(g->exp_avg[i], g->data[i], &f);
    g->data[i] = f.inv_bias_correction1 * g->exp_avg[i];
  }
}

void dc__grafting_accumulate_cpu(const dc__block_context *ctx, const dc__graft *g) {
  (void)ctx;
  if (g->squares != NULL) {
    accumulate_squares(g);
  }
  if (g->exp_avg != NULL) {
    update_exp_avg(g);
  }
}

/* Applies a graft to the filtered gradient, elements [from, from + count). */
static void direction_part(const dc__graft *g, int64_t from, int64_t count, float *out) {
  const dc__graft_factors f = g->factors;
  const float *data = g->data + from;
  if (g->squares == NULL) {
    memmove(out, data, (size_t)count * sizeof *out);
    return;
  }
  const float *squares = g->squares + from;
  for (int64_t i = 0; i < count; i++) {
    out[i] = dc__graft_direction(data[i], squares[i], &f);
  }
}

void dc__grafting_direction_cpu(const dc__block_context *ctx, const dc__graft *g) {
  (void)ctx;
  direction_part(g, 0, g->count, g->data);
}

void dc__grafting_norm_cpu(dc__block_context *ctx, const dc__graft *g) {
  enum { PART = 64 * LANES };
  float part[PART];
  double squares = 0;
  for (int64_t from = 0; from < g->count; from += PART) {
    int64_t count = g->count - from < PART ? g->count - from : PART;
    direction_part(g, from, count, part);
    double norm = graft_norm(part, count);
    squares += norm * norm;
  }
  ctx->graft_norm = sqrt(squares);
}

void dc__grafting_finish_cpu(const dc__block_context *ctx, const dc__graft *g, bool scaled) {
  const dc__graft_factors f = g->factors;
  if (scaled) {
    double norm = graft_norm(g->data, g->count);
    dc__update_read(g->data, g->data, DC_FLOAT32, g->count, norm > 0 ? (float)(ctx->graft_norm / norm) : 0);
  }
  for (int64_t i = 0; i < g->count && g->momentum != NULL; i++) {
    float u = g->data[i];
    g->momentum[i] = dc__graft_momentum(g->momentum[i], u, &f);
    g->data[i] = dc__graft_step(g->momentum[i], u, &f);
  }
}
