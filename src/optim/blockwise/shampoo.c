/* Shampoo: directions are filtered gradients times the factors' inverse roots, with a graft's norm. */
#include <math.h>

#include "optim/blockwise/blockwise.h"

static bool has_squares(int32_t graft) {
  return graft != DC_GRAFT_NONE && graft != DC_GRAFT_SGD;
}

/* ---- options and state ---- */

static dc__block_options shampoo_read_options(const void *options) {
  const dc_shampoo_options *o = options;
  return (dc__block_options){.max_block = o->max_block,
                             .merge_below = o->merge_below,
                             .max_factor_dim = o->max_block,
                             .precondition_1d = true,
                             .weight_decay = o->weight_decay,
                             .l2 = o->decay == DC_DECAY_L2,
                             .tolerated_failures = o->tolerated_failures,
                             .temps = 2};
}

static const char *shampoo_fixed_option_changed(const void *options, const void *old) {
  const dc_shampoo_options *a = options;
  const dc_shampoo_options *b = old;
  return a->max_block != b->max_block                     ? "max_block"
         : a->merge_below != b->merge_below               ? "merge_below"
         : (a->beta1 > 0) != (b->beta1 > 0)               ? "whether there is a first moment (beta1)"
         : (a->momentum > 0) != (b->momentum > 0)         ? "whether there is momentum"
         : (a->tolerance > 0) != (b->tolerance > 0)       ? "whether tolerance is 0"
         : has_squares(a->graft) != has_squares(b->graft) ? "whether graft has squares"
                                                          : NULL;
}

static bool shampoo_add_elements(dc_optimizer *o, dc__optim_param *p, dc__optim_block *b, const int64_t *shape,
                                 int32_t ndim) {
  const dc_shampoo_options *options = dc__optim_options(o, p);
  if (options->beta1 > 0) {
    b->exp_avg = dc__block_piece(o, p, "exp_avg", b, -1, DC_FLOAT32, shape, ndim);
  }
  if (has_squares(options->graft)) {
    b->squares = dc__block_piece(o, p, "graft", b, -1, DC_FLOAT32, shape, ndim);
  }
  if (options->momentum > 0) {
    b->momentum = dc__block_piece(o, p, "momentum", b, -1, DC_FLOAT32, shape, ndim);
  }
  b->rooted = dc__block_piece(o, p, "rooted", b, -1, DC_INT64, NULL, 0);
  return (options->beta1 == 0 || b->exp_avg != NULL) && (!has_squares(options->graft) || b->squares != NULL) &&
         (options->momentum == 0 || b->momentum != NULL) && b->rooted != NULL;
}

static bool shampoo_add_side(dc_optimizer *o, dc__optim_param *p, dc__optim_block *b, int32_t d) {
  const dc_shampoo_options *options = dc__optim_options(o, p);
  const int64_t shape[2] = {b->sides[d].n, b->sides[d].n};
  if (options->tolerance == 0) {
    return true;
  }
  b->sides[d].basis = dc__block_piece(o, p, "basis", b, d, DC_FLOAT64, shape, 2);
  return b->sides[d].basis != NULL;
}

/* ---- a step ---- */

static void shampoo_begin_step(dc__block_step *s) {
  const dc_shampoo_options *o = s->options;
  s->due = s->t == o->start_preconditioning_step ||
           (s->t > o->start_preconditioning_step && s->t % o->precondition_frequency == 0);
}

/* Bias correction of a factor; 1 for a plain sum. */
static double share_of(const dc_shampoo_options *o, int64_t t) {
  return o->beta2 < 1 ? 1 - pow(o->beta2, (double)t) : 1;
}

static int32_t root_of(const dc_shampoo_options *o, const dc__optim_block *b) {
  return o->root > 0 ? o->root : 2 * b->order;
}

static dc__graft graft_of(const dc__optim_block *b, const dc__block_step *s) {
  const dc_shampoo_options *o = s->options;
  const bool sum = o->graft == DC_GRAFT_ADAGRAD;
  dc__graft g = {.data = b->data, .exp_avg = b->exp_avg, .squares = b->squares, .momentum = b->momentum};
  g.rows = b->sides[0].n;
  g.count = b->count;
  g.factors.beta2 = sum ? 1 : (float)o->graft_beta2;
  g.factors.one_minus_beta2 = sum ? 1 : (float)(1 - o->graft_beta2);
  g.factors.inv_bias_correction2 = o->graft == DC_GRAFT_ADAM ? (float)(1 / (1 - pow(o->graft_beta2, (double)s->t))) : 1;
  g.factors.eps = (float)o->graft_eps;
  g.factors.beta1 = (float)o->beta1;
  g.factors.one_minus_beta1 = (float)(1 - o->beta1);
  g.factors.inv_bias_correction1 = (float)(1 / (1 - pow(o->beta1, (double)s->t)));
  g.factors.momentum = (float)o->momentum;
  g.factors.nesterov = o->nesterov;
  return g;
}

/* Updates the factors with the gradient, then filters data. */
static void shampoo_before_refresh(const dc__optim_block *b, const dc__block_step *s, dc__block_context *ctx) {
  const dc_shampoo_options *o = s->options;
  const dc__graft g = graft_of(b, s);
  dc__block_update_factors(b, o->beta2, o->beta2 < 1 ? 1 - o->beta2 : 1, ctx);
  ctx->work->graft_accumulate(ctx, &g);
}

/* The root of L / share + epsilon I is share^(1 / root) times that of L + share epsilon I; scale_root() scales it. A
 * factor is positive semidefinite but for rounding. */
static dc__spectral_request shampoo_request(const char *fn, dc__side *side, const dc__optim_block *b,
                                            const dc__block_step *s) {
  const dc_shampoo_options *o = s->options;
  dc__spectral_request r = {.fn = fn, .op = DC__SPECTRAL_ROOT, .options = DC_SPECTRAL_OPTIONS_INIT};
  r.root = root_of(o, b);
  r.power = -1 / (double)r.root;
  r.options.eps_abs = o->eps_abs * share_of(o, s->t);
  r.options.eps_rel = o->eps_rel;
  r.options.symmetry = DC_SYMMETRY_LOWER;
  r.options.negative = DC_NEGATIVE_CLAMP;
  r.a = dc__side_mat(side->factor, DC_FLOAT32, side->n);
  r.out = dc__side_mat(side->matrix, DC_FLOAT32, side->n);
  if (side->basis != NULL) {
    r.basis = dc__side_mat(side->basis, DC_FLOAT64, side->n);
    r.options.tolerance = o->tolerance;
  }
  r.info = &side->info;
  r.info_size = sizeof side->info;
  return r;
}

static void scale_root(const dc__optim_block *b, int32_t d, const dc__block_step *s, const dc__block_context *ctx) {
  double share = share_of(s->options, s->t);
  if (b->sides[d].factor != NULL && share != 1) {
    ctx->work->scale(ctx, b, d, (float)pow(share, 1 / (double)root_of(s->options, b)));
  }
}

/* Turns the filtered gradient into the direction. */
static void shampoo_after_refresh(const dc__optim_block *b, const dc__block_step *s, dc__block_context *ctx) {
  const dc_shampoo_options *o = s->options;
  const dc__graft g = graft_of(b, s);
  const bool uses_roots = s->t >= o->start_preconditioning_step || *b->rooted != 0;
  const bool scaled = uses_roots && o->graft != DC_GRAFT_NONE;
  for (int32_t d = 0; d < b->order && s->due; d++) {
    scale_root(b, d, s, ctx);
  }
  if (scaled) {
    ctx->work->graft_measure_norm(ctx, &g);
  }
  if (uses_roots) {
    dc__block_multiply_sides(b, b->data, false, ctx);
  } else {
    ctx->work->graft_direction(ctx, &g);
  }
  ctx->work->graft_finish(ctx, &g, scaled);
}

/* ---- the kind ---- */

static const dc__block_rules rules = {.matrix = "root",
                                      .read_options = shampoo_read_options,
                                      .add_elements = shampoo_add_elements,
                                      .add_side = shampoo_add_side,
                                      .begin = shampoo_begin_step,
                                      .before_refresh = shampoo_before_refresh,
                                      .after_refresh = shampoo_after_refresh,
                                      .request = shampoo_request};

const dc__optim_kind dc__shampoo_kind = {DC__BLOCKWISE_KIND, .name = "shampoo",
                                         .options_size = sizeof(dc_shampoo_options), .rules = &rules,
                                         .fixed_option_changed = shampoo_fixed_option_changed};
