/* Shampoo's work on single elements: the filtered gradient, the grafts and momentum. Sums are taken in a fixed number
 * of lanes, so their bits depend on the block alone. */
#include <math.h>

#include "optim/blocked.h"

enum { LANES = 8 };

static double norm(const float *x, int64_t count) {
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

static void learn_squares(const dc__graft *g) {
  const dc__graft_factors f = g->factors;
  for (int64_t i = 0; i < g->count; i++) {
    g->squares[i] = dc__graft_square(g->squares[i], g->data[i], &f);
  }
}

static void filter(const dc__graft *g) {
  const dc__graft_factors f = g->factors;
  for (int64_t i = 0; i < g->count; i++) {
    g->exp_avg[i] = dc__graft_mean(g->exp_avg[i], g->data[i], &f);
    g->data[i] = f.whole_m * g->exp_avg[i];
  }
}

void dc__graft_learn(const dc__block_place *place, const dc__graft *g) {
  (void)place;
  if (g->squares != NULL) {
    learn_squares(g);
  }
  if (g->exp_avg != NULL) {
    filter(g);
  }
}

/* What a graft makes of the filtered gradient, elements [from, from + count). */
static void take_part(const dc__graft *g, int64_t from, int64_t count, float *out) {
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

void dc__graft_take(const dc__block_place *place, const dc__graft *g) {
  (void)place;
  take_part(g, 0, g->count, g->data);
}

void dc__graft_measure(dc__block_place *place, const dc__graft *g) {
  enum { PART = 64 * LANES };
  float part[PART];
  double squares = 0;
  for (int64_t from = 0; from < g->count; from += PART) {
    int64_t count = g->count - from < PART ? g->count - from : PART;
    take_part(g, from, count, part);
    double length = norm(part, count);
    squares += length * length;
  }
  place->length = sqrt(squares);
}

void dc__graft_finish(const dc__block_place *place, const dc__graft *g, bool scaled) {
  const dc__graft_factors f = g->factors;
  if (scaled) {
    double own = norm(g->data, g->count);
    dc__update_read(g->data, g->data, DC_FLOAT32, g->count, own > 0 ? (float)(place->length / own) : 0);
  }
  for (int64_t i = 0; i < g->count && g->momentum != NULL; i++) {
    float u = g->data[i];
    g->momentum[i] = dc__graft_momentum(g->momentum[i], u, &f);
    g->data[i] = dc__graft_step(g->momentum[i], u, &f);
  }
}
