/* First and last phase of K-FAC's steps: gradients as float32, and SGD along the directions; in tiles on the CPU, by
 * kernels on a device. */
#include "optim/kfac/kfac_internal.h"

/* ---- gradients ---- */

/* Reads a gradient alone; the span's weight is unused. */
static void fill_gradient_cuda(const dc_optimizer *o, const dc__optim_param *p, float *part) {
  const dc__optim_io *io = &o->io[p - o->params];
  dc__update_batch batch = {.spans_used = 1, .grad_scale = (float)o->grad_scale};
  batch.spans[0] = (dc__update_span){.weight = part,
                                     .grad = io->grad,
                                     .state = {part},
                                     .count = p->count,
                                     .dtype = DC_FLOAT32,
                                     .grad_dtype = io->grad_dtype};
  dc__update_cuda(o->linalg->device->internal_stream, DC__UPDATE_LOAD_BLOCK, &batch);
}

void dc__kfac_fill_gradient(void *user, int64_t entry, float *part) {
  const dc__kfac *k = user;
  const dc__optim_param *p = &k->head.params[k->entries[entry].id];
  float tile[DC__OPTIM_TILE];
  if (dc__optim_is_cuda(&k->head)) {
    fill_gradient_cuda(&k->head, p, part);
    return;
  }
  for (int64_t from = 0; from < p->count; from += DC__OPTIM_TILE) {
    int64_t count = p->count - from < DC__OPTIM_TILE ? p->count - from : DC__OPTIM_TILE;
    memcpy(part + from, dc__optim_grad(&k->head, p, from, count, tile), (size_t)count * sizeof *part);
  }
}

/* ---- weights ---- */

static dc__sgd_factors kfac_sgd_factors(const dc_kfac_options *options, double lr, bool first) {
  dc__sgd_factors f = {
      .lr = (float)lr, .weight_decay = (float)options->weight_decay, .sign = 1, .one_minus_dampening = 1};
  f.momentum = first ? 0 : (float)options->momentum;
  f.nesterov = options->nesterov == 1 ? (float)options->momentum : 0;
  return f;
}

/* A parameter's direction and its scale: the direction of its layer, or its gradient. */
static dc__update_span span_of(const dc__kfac *k, const dc__optim_param *p, float *scale) {
  const dc__kfac_param *own = &k->params[p - k->head.params];
  dc__update_span span = {.state = {own->momentum}, .factors = {.sgd = own->factors}};
  dc__optim_fill_span(&k->head, p, &span);
  *scale = (float)k->head.grad_scale;
  if (own->entry >= 0) {
    span.grad = own->direction;
    span.grad_dtype = DC_FLOAT32;
    *scale = own->nu;
  }
  return span;
}

static void update_chunk(dc_optimizer *o, const dc__optim_param *p, int64_t from, int64_t count, void *arg) {
  (void)arg;
  float scale;
  const dc__update_span span = span_of(dc__kfac_of(o), p, &scale);
  dc__update_cpu(DC__UPDATE_SGD, &span, from, count, scale);
}

static void kfac_launch_batch(const dc__kfac *k, dc__update_batch *batch) {
  if (batch->spans_used > 0) {
    dc__update_cuda(k->head.linalg->device->internal_stream, DC__UPDATE_SGD, batch);
    batch->spans_used = 0;
  }
}

/* A few parameters per launch, which share one scale. */
static void update_weights_cuda(const dc__kfac *k) {
  dc__update_batch batch = {.spans_used = 0};
  for (int64_t i = 0; i < k->head.count; i++) {
    const dc__optim_param *p = &k->head.params[i];
    float scale;
    const dc__update_span span = span_of(k, p, &scale);
    if (!dc__optim_has_grad(&k->head, p) || p->count == 0) {
      continue;
    }
    if (batch.spans_used == DC__UPDATE_SPANS || batch.grad_scale != scale) {
      kfac_launch_batch(k, &batch);
    }
    batch.grad_scale = scale;
    batch.spans[batch.spans_used++] = span;
  }
  kfac_launch_batch(k, &batch);
}

dc_status dc__kfac_update_weights(dc__kfac *k) {
  dc_optimizer *o = &k->head;
  for (int64_t i = 0; i < o->count; i++) {
    const dc__optim_param *p = &o->params[i];
    k->params[i].factors = kfac_sgd_factors(dc__optim_options(o, p), o->groups[p->group].lr, *p->step == 0);
  }
  if (dc__optim_is_cuda(o)) {
    update_weights_cuda(k);
  } else {
    dc__optim_each_part(o, update_chunk, NULL);
  }
  return dc__linalg_synchronize(o->linalg);
}
