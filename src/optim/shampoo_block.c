/* One block of Shampoo in a step. A block is seen as [n, rest], its first dimension and all others; turning it round,
 * [rest, n], brings the next dimension to the front. A product with a root turns it too, so that after one product for
 * each dimension everything is where it was. */
#include <math.h>

#include "optim/shampoo.h"

bool dc__shampoo_due(const dc_shampoo_options *o, int64_t t) {
  return t == o->start_preconditioning_step ||
         (t > o->start_preconditioning_step && t % o->precondition_frequency == 0);
}

double dc__shampoo_share(const dc_shampoo_options *o, int64_t t) {
  return o->beta2 < 1 ? 1 - pow(o->beta2, (double)t) : 1;
}

/* ---- factors ---- */

/* to [cols, rows] = from [rows, cols], transposed, in tiles that fit the first-level cache. */
static void turn(const float *from, int64_t rows, int64_t cols, float *to) {
  enum { TILE = 32 };
  for (int64_t i0 = 0; i0 < rows; i0 += TILE) {
    for (int64_t j0 = 0; j0 < cols; j0 += TILE) {
      for (int64_t i = i0; i < rows && i < i0 + TILE; i++) {
        for (int64_t j = j0; j < cols && j < j0 + TILE; j++) {
          to[j * rows + i] = from[i * cols + j];
        }
      }
    }
  }
}

void dc__block_learn(const dc__block *b, const dc__block_step *s, const dc__block_place *place) {
  double keep = s->options->beta2;
  double add = keep < 1 ? 1 - keep : 1;
  const float *turned = b->data;
  for (int32_t d = 0; d < b->order; d++) {
    const dc__side *side = &b->sides[d];
    int64_t rest = b->count / side->n;
    if (d > 0 && d == b->order - 1) { /* the last dimension is the columns of what came */
      dc__syrk(place->pool, place->scratch, true, side->n, rest, b->data, add, keep, side->factor);
      break;
    }
    dc__syrk(place->pool, place->scratch, false, side->n, rest, turned, add, keep, side->factor);
    if (d + 2 < b->order) {
      float *next = place->temp + (d % 2) * b->count;
      turn(turned, side->n, rest, next);
      turned = next;
    }
  }
  dc__graft_learn(b, s);
  dc__graft_filter(b, s);
}

/* ---- roots ---- */

static dc__mat square(void *data, int32_t dtype, int64_t n) {
  return (dc__mat){.data = data, .dtype = dtype, .batch = 1, .rows = n, .cols = n, .row_stride = n, .col_stride = 1};
}

/* The root of L / share + epsilon I is share^(1 / root) times that of L + share epsilon I: dc__block_direct() does the
 * scaling. A factor is positive but for rounding. */
dc__spectral dc__side_request(const char *fn, dc__side *side, const dc__block *b, const dc__block_step *s) {
  const dc_shampoo_options *o = s->options;
  dc__spectral r = {.fn = fn, .op = DC__SPECTRAL_ROOT, .options = DC_SPECTRAL_OPTIONS_INIT};
  r.root = o->root > 0 ? o->root : 2 * b->order;
  r.power = -1 / (double)r.root;
  r.options.eps_abs = o->eps_abs * dc__shampoo_share(o, s->t);
  r.options.eps_rel = o->eps_rel;
  r.options.symmetry = DC_SYMMETRY_LOWER;
  r.options.negative = DC_NEGATIVE_CLAMP;
  r.a = square(side->factor, DC_FLOAT32, side->n);
  r.out = square(side->root, DC_FLOAT32, side->n);
  if (side->basis != NULL) {
    r.basis = square(side->basis, DC_FLOAT64, side->n);
    r.options.tolerance = o->tolerance;
  }
  r.info = &side->info;
  r.info_size = sizeof side->info;
  return r;
}

/* ---- directions ---- */

static void scale_root(const dc__side *side, const dc__block *b, const dc__block_step *s) {
  double share = dc__shampoo_share(s->options, s->t);
  if (share == 1 || side->info.status != DC_OK) {
    return;
  }
  int32_t root = s->options->root > 0 ? s->options->root : 2 * b->order;
  const float scale = (float)pow(share, 1 / (double)root);
  for (int64_t i = 0; i < side->n * side->n; i++) {
    side->root[i] *= scale;
  }
}

/* The filtered gradient times all roots. */
static void precondition(const dc__block *b, const dc__block_place *place) {
  float *from = b->data;
  float *to = place->temp;
  for (int32_t d = 0; d < b->order; d++) {
    int64_t n = b->sides[d].n;
    int64_t rest = b->count / n;
    const dc__gemm g = {.dtype = DC_FLOAT32,
                        .out_dtype = DC_FLOAT32,
                        .trans_a = true,
                        .m = rest,
                        .n = n,
                        .k = n,
                        .a = from,
                        .b = b->sides[d].root,
                        .c = to,
                        .lda = rest,
                        .ldb = n,
                        .ldc = n,
                        .batch = 1,
                        .alpha = 1};
    dc__gemm_on(place->pool, &g, place->scratch);
    float *swap = from;
    from = to;
    to = swap;
  }
  if (from != b->data) {
    memcpy(b->data, from, (size_t)b->count * sizeof *from);
  }
}

void dc__block_direct(const dc__block *b, const dc__block_step *s, const dc__block_place *place) {
  for (int32_t d = 0; d < b->order && s->due; d++) {
    scale_root(&b->sides[d], b, s);
  }
  if (s->t < s->options->start_preconditioning_step) {
    dc__graft_take(b, s);
  } else if (s->options->graft == DC_GRAFT_NONE) {
    precondition(b, place);
  } else {
    double length = dc__graft_norm(b, s);
    precondition(b, place);
    double own = dc__block_norm(b->data, b->count);
    const float scale = own > 0 ? (float)(length / own) : 0;
    for (int64_t i = 0; i < b->count; i++) {
      b->data[i] *= scale;
    }
  }
  dc__block_momentum(b, s);
}
