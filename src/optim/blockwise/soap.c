/* SOAP: Adam in the eigenbasis of Shampoo's factors. The first moment is kept in the basis and rotated when it
 * changes. The second moment only follows the order of its columns. */
#include <math.h>

#include "optim/blockwise/blockwise.h"

/* ---- options and state ---- */

static dc__block_options soap_read_options(const void *options) {
  const dc_soap_options *o = options;
  return (dc__block_options){.max_block = o->max_block,
                             .merge_below = o->merge_below,
                             .max_factor_dim = o->max_precond_dim,
                             .weight_decay = o->weight_decay,
                             .tolerated_failures = o->tolerated_failures,
                             .temps = 2};
}

static const char *soap_fixed_option_changed(const void *options, const void *old) {
  const dc_soap_options *a = options;
  const dc_soap_options *b = old;
  return a->max_block != b->max_block               ? "max_block"
         : a->merge_below != b->merge_below         ? "merge_below"
         : a->max_precond_dim != b->max_precond_dim ? "max_precond_dim"
                                                    : NULL;
}

static bool soap_add_elements(dc_optimizer *o, dc__optim_param *p, dc__optim_block *b, const int64_t *shape,
                              int32_t ndim) {
  b->exp_avg = dc__block_piece(o, p, "exp_avg", b, -1, DC_FLOAT32, shape, ndim);
  b->squares = dc__block_piece(o, p, "exp_avg_sq", b, -1, DC_FLOAT32, shape, ndim);
  return b->exp_avg != NULL && b->squares != NULL;
}

/* ---- a step ---- */

/* The first step initialises the basis; the moments are still empty. */
static void soap_begin_step(dc__block_step *s) {
  const dc_soap_options *o = s->options;
  s->skip_update = s->t == 1;
  s->due = (s->t - 1) % o->precondition_frequency == 0;
}

/* Replaces data by Adam's direction: the change of a zero weight at a learning rate of -1. */
static void soap_adam(const dc__optim_block *b, const dc__block_step *s, const dc__block_context *ctx) {
  const dc_soap_options *o = s->options;
  const dc__adamw_rule rule = {.beta1 = o->beta1, .beta2 = o->beta2, .eps = o->eps};
  const dc__adamw_factors factors = dc__adamw_factors_of(&rule, -1, s->t - 1);
  ctx->work->adam(ctx, b, &factors);
}

/* Adam in the basis of earlier steps, so that a gradient does not influence its own basis. */
static void soap_before_refresh(const dc__optim_block *b, const dc__block_step *s, dc__block_context *ctx) {
  const dc_soap_options *o = s->options;
  dc__block_update_factors(b, o->shampoo_beta, 1 - o->shampoo_beta, ctx);
  if (s->skip_update) {
    return;
  }
  dc__block_multiply_sides(b, b->data, false, ctx);
  soap_adam(b, s, ctx);
  dc__block_multiply_sides(b, b->data, true, ctx);
  if (s->due) {
    dc__block_multiply_sides(b, b->exp_avg, true, ctx);
  }
}

/* Eigenvectors at first, and later one step of orthogonal iteration from the latest ones. */
static dc__spectral_request soap_request(const char *fn, dc__side *side, const dc__optim_block *b,
                                         const dc__block_step *s) {
  (void)b;
  dc__spectral_request r = {.fn = fn, .op = DC__SPECTRAL_ORTHOGONAL_ITERATION, .options = DC_SPECTRAL_OPTIONS_INIT};
  r.a = dc__side_mat(side->factor, DC_FLOAT32, side->n);
  r.out = dc__side_mat(side->matrix, DC_FLOAT32, side->n);
  r.options.symmetry = DC_SYMMETRY_LOWER;
  if (s->skip_update) {
    r.op = DC__SPECTRAL_EIGH;
    r.vectors = true;
    r.options.descending = 1;
    r.options.precision = DC_FLOAT64;
  } else {
    r.basis = r.out;
    r.order = side->order;
  }
  r.info = &side->info;
  r.info_size = sizeof side->info;
  return r;
}

static void soap_after_refresh(const dc__optim_block *b, const dc__block_step *s, dc__block_context *ctx) {
  if (s->skip_update || !s->due) {
    return;
  }
  int64_t inner = b->count;
  for (int32_t d = 0; d < b->order; d++) {
    inner /= b->sides[d].n;
    if (b->sides[d].factor != NULL) {
      ctx->work->permute(ctx, b, d, inner);
    }
  }
  dc__block_multiply_sides(b, b->exp_avg, false, ctx);
}

/* ---- the kind ---- */

static const dc__block_rules rules = {.matrix = "vectors",
                                      .sorts = true,
                                      .read_options = soap_read_options,
                                      .add_elements = soap_add_elements,
                                      .begin = soap_begin_step,
                                      .before_refresh = soap_before_refresh,
                                      .after_refresh = soap_after_refresh,
                                      .request = soap_request};

const dc__optim_kind dc__soap_kind = {DC__BLOCKWISE_KIND, .name = "soap", .options_size = sizeof(dc_soap_options),
                                      .rules = &rules, .fixed_option_changed = soap_fixed_option_changed};
