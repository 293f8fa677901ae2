/* Shampoo's work on single elements: the filtered gradient, the grafts and momentum. Sums are taken in a fixed number
 * of lanes, so their bits depend on the block alone. */
#include <math.h>

#include "optim/blocked.h"

enum { LANES = 8 };

double dc__block_norm(const float *x, int64_t count) {
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

void dc__graft_learn(const dc__block *b, const dc__block_step *s) {
  const dc_shampoo_options *o = s->options;
  if (b->squares == NULL) {
    return;
  }
  const float keep = o->graft == DC_GRAFT_ADAGRAD ? 1 : (float)o->graft_beta2;
  const float add = o->graft == DC_GRAFT_ADAGRAD ? 1 : (float)(1 - o->graft_beta2);
  for (int64_t i = 0; i < b->count; i++) {
    b->squares[i] = keep * b->squares[i] + add * (b->data[i] * b->data[i]);
  }
}

void dc__graft_filter(const dc__block *b, const dc__block_step *s) {
  if (b->exp_avg == NULL) {
    return;
  }
  const dc_shampoo_options *o = s->options;
  const float keep = (float)o->beta1;
  const float add = (float)(1 - o->beta1);
  const float whole = (float)(1 / (1 - pow(o->beta1, (double)s->t)));
  for (int64_t i = 0; i < b->count; i++) {
    b->exp_avg[i] = keep * b->exp_avg[i] + add * b->data[i];
    b->data[i] = whole * b->exp_avg[i];
  }
}

/* What a graft makes of the filtered gradient, elements [from, from + count). */
static void graft_part(const dc__block *b, const dc__block_step *s, int64_t from, int64_t count, float *out) {
  const dc_shampoo_options *o = s->options;
  const float *g = b->data + from;
  if (b->squares == NULL) {
    memmove(out, g, (size_t)count * sizeof *out);
    return;
  }
  const float eps = (float)o->graft_eps;
  const float whole = o->graft == DC_GRAFT_ADAM ? (float)(1 / (1 - pow(o->graft_beta2, (double)s->t))) : 1;
  const float *v = b->squares + from;
  for (int64_t i = 0; i < count; i++) {
    out[i] = g[i] / (sqrtf(whole * v[i]) + eps);
  }
}

double dc__graft_norm(const dc__block *b, const dc__block_step *s) {
  enum { PART = 64 * LANES };
  float part[PART];
  double squares = 0;
  for (int64_t from = 0; from < b->count; from += PART) {
    int64_t count = b->count - from < PART ? b->count - from : PART;
    graft_part(b, s, from, count, part);
    double norm = dc__block_norm(part, count);
    squares += norm * norm;
  }
  return sqrt(squares);
}

void dc__graft_take(const dc__block *b, const dc__block_step *s) {
  graft_part(b, s, 0, b->count, b->data);
}

void dc__block_momentum(const dc__block *b, const dc__block_step *s) {
  if (b->momentum == NULL) {
    return;
  }
  const dc_shampoo_options *o = s->options;
  const float keep = (float)o->momentum;
  const bool nesterov = o->nesterov == 1;
  for (int64_t i = 0; i < b->count; i++) {
    float u = b->data[i];
    b->momentum[i] = keep * b->momentum[i] + u;
    b->data[i] = nesterov ? u + keep * b->momentum[i] : b->momentum[i];
  }
}
