/* Muon: momentum, orthogonalised so that the direction's singular values are near 1. A matrix is a block, and
 * momentum is its only state. */
#include <math.h>

#include "optim/blockwise/blockwise.h"

/* ---- options, blocks and state ---- */

static dc__block_options muon_read_options(const void *options) {
  const dc_muon_options *o = options;
  return (dc__block_options){.weight_decay = o->weight_decay, .temps = DC__POLAR_TEMPS};
}

static const char *muon_fixed_option_changed(const void *options, const void *old) {
  const dc_muon_options *a = options;
  const dc_muon_options *b = old;
  return a->num_splits != b->num_splits           ? "num_splits"
         : (a->momentum > 0) != (b->momentum > 0) ? "whether there is momentum"
                                                  : NULL;
}

static dc_status muon_accept(const char *fn, const void *options, const int64_t *shape, int32_t ndim) {
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

static void muon_partition(const void *options, const dc__optim_param *p, dc__partition *to) {
  const dc_muon_options *o = options;
  dc__partition_rows(p->shape, p->ndim, o->num_splits, to);
}

/* Flops of a step of the polynomial: half of two squares, and a product. Owners must not depend on an option that may
 * change, such as the number of these steps: a saved state belongs to its owner. */
static double muon_cost(const void *options, const dc__box *box) {
  (void)options;
  const double rows = (double)box->size[0], cols = (double)box->size[1];
  const double min_dim = fmin(rows, cols), max_dim = fmax(rows, cols);
  return min_dim * min_dim * (3 * max_dim + min_dim);
}

static bool muon_add_elements(dc_optimizer *o, dc__optim_param *p, dc__optim_block *b, const int64_t *shape,
                              int32_t ndim) {
  const dc_muon_options *options = dc__optim_options(o, p);
  if (options->momentum > 0) {
    b->momentum = dc__block_piece(o, p, "momentum", b, -1, DC_FLOAT32, shape, ndim);
  }
  return options->momentum == 0 || b->momentum != NULL;
}

/* ---- a step ---- */

static double muon_adjustment(int32_t adjust, int64_t rows, int64_t cols) {
  const double r = (double)rows, c = (double)cols;
  return adjust == DC_MUON_ORIGINAL ? sqrt(fmax(1, r / c)) : adjust == DC_MUON_MATCH_RMS ? 0.2 * sqrt(fmax(r, c)) : 1;
}

static void muon_direction(const dc__optim_block *b, const dc__block_step *s, dc__block_context *ctx) {
  const dc_muon_options *o = s->options;
  dc__graft g = {.data = b->data, .momentum = b->momentum, .rows = b->sides[0].n, .count = b->count};
  dc__polar p = {.rows = b->sides[0].n, .cols = b->sides[1].n, .dtype = o->precision, .steps = o->steps, .eps = o->eps};
  g.factors.momentum = (float)o->momentum;
  g.factors.nesterov = o->nesterov;
  p.polar_express = o->polynomial == DC_ORTHOGONAL_EXPRESS;
  p.factor = muon_adjustment(o->adjust, p.rows, p.cols);
  if (b->momentum != NULL) {
    ctx->work->graft_finish(ctx, &g, false);
  }
  ctx->work->polar(ctx, b, &p);
}

static void muon_rule(const void *options, dc__update_rule *to) {
  to->weight_decay = ((const dc_muon_options *)options)->weight_decay;
}

/* ---- the kind ---- */

static const dc__block_rules rules = {.read_options = muon_read_options,
                                      .partition = muon_partition,
                                      .cost = muon_cost,
                                      .add_elements = muon_add_elements,
                                      .before_refresh = muon_direction,
                                      .rule = muon_rule};

const dc__optim_kind dc__muon_kind = {DC__BLOCKWISE_KIND,
                                      .name = "muon",
                                      .options_size = sizeof(dc_muon_options),
                                      .enqueue = dc__blockwise_enqueue,
                                      .rules = &rules,
                                      .fixed_option_changed = muon_fixed_option_changed,
                                      .accept = muon_accept};
