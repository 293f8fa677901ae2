/* Muon: momentum, whose direction's singular values become 1, or near it. A matrix is a block, and nothing is kept but
 * its momentum. */
#include <math.h>

#include "optim/blocked.h"

/* ---- options, blocks and state ---- */

static dc__block_options read(const void *options) {
  const dc_muon_options *o = options;
  return (dc__block_options){.weight_decay = o->weight_decay, .temps = DC__POLAR_TEMPS};
}

static const char *refuse(const void *options, const void *old) {
  const dc_muon_options *a = options;
  const dc_muon_options *b = old;
  return a->num_splits != b->num_splits           ? "num_splits"
         : (a->momentum > 0) != (b->momentum > 0) ? "whether there is momentum"
                                                  : NULL;
}

static dc_status accept(const char *fn, const void *options, const int64_t *shape, int32_t ndim) {
  const dc_muon_options *o = options;
  if (ndim < 2) {
    return dc__fail(DC_E_SHAPE,
                    "%s: ndim = %" PRId32
                    ", must be at least 2: Muon is for matrices; give biases, gains and other "
                    "vectors to AdamW",
                    fn, ndim);
  }
  return shape[0] % o->num_splits == 0
             ? DC_OK
             : dc__fail(DC_E_SHAPE, "%s: shape[0] = %" PRId64 ", must be a multiple of options.num_splits = %" PRId64,
                        fn, shape[0], o->num_splits);
}

static void cut(const void *options, const dc__optim_param *p, dc__cut *to) {
  const dc_muon_options *o = options;
  dc__cut_rows(p->shape, p->ndim, o->num_splits, to);
}

/* Flops: half of two squares, and a product. */
static double cost(const void *options, const dc__box *box) {
  const dc_muon_options *o = options;
  const double rows = (double)box->size[0], cols = (double)box->size[1];
  const double least = fmin(rows, cols), most = fmax(rows, cols);
  return o->steps * least * least * (3 * most + least);
}

static bool add_elements(dc_optimizer *o, dc__optim_param *p, dc__block *b, const int64_t *shape, int32_t ndim) {
  const dc_muon_options *options = dc__optim_options(o, p);
  if (options->momentum > 0) {
    b->momentum = dc__block_piece(o, p, "momentum", b, -1, DC_FLOAT32, shape, ndim);
  }
  return options->momentum == 0 || b->momentum != NULL;
}

/* ---- a step ---- */

static double adjustment(int32_t adjust, int64_t rows, int64_t cols) {
  const double r = (double)rows, c = (double)cols;
  return adjust == DC_MUON_ORIGINAL ? sqrt(fmax(1, r / c)) : adjust == DC_MUON_MATCH_RMS ? 0.2 * sqrt(fmax(r, c)) : 1;
}

static void direct(const dc__block *b, const dc__block_step *s, dc__block_place *place) {
  const dc_muon_options *o = s->options;
  dc__graft g = {.data = b->data, .momentum = b->momentum, .rows = b->sides[0].n, .count = b->count};
  dc__polar p = {.rows = b->sides[0].n, .cols = b->sides[1].n, .dtype = o->precision, .steps = o->steps, .eps = o->eps};
  g.factors.momentum = (float)o->momentum;
  g.factors.nesterov = o->nesterov;
  p.express = o->polynomial == DC_ORTHOGONAL_EXPRESS;
  p.factor = adjustment(o->adjust, p.rows, p.cols);
  if (b->momentum != NULL) {
    place->work->graft_finish(place, &g, false);
  }
  place->work->polar(place, b, &p);
}

static void rule(const void *options, dc__update_rule *to) {
  to->weight_decay = ((const dc_muon_options *)options)->weight_decay;
}

/* ---- the kind ---- */

static const dc__block_rules rules = {
    .read = read, .cut = cut, .cost = cost, .add_elements = add_elements, .before = direct, .rule = rule};

const dc__optim_kind dc__muon_kind = {DC__BLOCKED_KIND,
                                      .name = "muon",
                                      .options_size = sizeof(dc_muon_options),
                                      .queue = dc__blocked_queue,
                                      .rules = &rules,
                                      .refuse = refuse,
                                      .accept = accept};
