/* Copies gradients of a rank's part to the redistribution, and applies directions to the weights. If a device counts
 * the steps, the direction's factor is in its memory. */
#include "optim/blockwise/blockwise.h"

/* Reads a part of the gradient, or applies the direction to the weight. */
typedef struct block_update_job {
  float *part;
  dc__block_factors factors;
} block_update_job;

static void run_update(dc__blockwise *self, const dc__optim_param *p, int32_t kind, dc__optim_tile_fn fn,
                       block_update_job *job) {
  if (dc__optim_is_cuda(&self->head)) {
    const bool recorded = kind == DC__UPDATE_STORE_BLOCK && dc__optim_counts_on_device(&self->head);
    dc__update_batch batch = {.recorded = recorded, .found = self->found, .scale = self->scale};
    batch.spans[0] = (dc__update_span){.state = {job->part}, .factors = {.part = job->factors}};
    if (recorded) {
      batch.spans[0].factors.record = dc__optim_step_record(p);
    }
    dc__optim_launch_param(&self->head, kind, p, &batch);
  } else {
    dc__optim_param_tiles(&self->head, p, fn, job);
  }
}

static void fill_tile(dc_optimizer *o, const dc__optim_tile *tile, void *arg) {
  (void)o;
  const block_update_job *job = arg;
  const dc__block_factors f = job->factors;
  float *to = job->part + tile->from;
  for (int64_t i = 0; i < tile->count; i++) {
    to[i] = dc__block_from_gradient(tile->grad[i], tile->weight[i], &f);
  }
}

void dc__blockwise_fill(void *user, int64_t entry, float *part) {
  dc__blockwise *self = user;
  const dc__optim_param *p = &self->head.params[entry];
  const dc__block_options options = dc__block_options_of(&self->head, p);
  block_update_job job = {.part = part, .factors = {.add = options.l2 ? (float)options.weight_decay : 0}};
  run_update(self, p, DC__UPDATE_LOAD_BLOCK, fill_tile, &job);
}

static void apply_tile(dc_optimizer *o, const dc__optim_tile *tile, void *arg) {
  (void)o;
  const block_update_job *job = arg;
  const dc__block_factors f = job->factors;
  const float *direction = job->part + tile->from;
  for (int64_t i = 0; i < tile->count; i++) {
    tile->weight[i] = dc__block_to_weight(tile->weight[i], direction[i], &f);
  }
}

void dc__blockwise_apply(void *user, int64_t entry, const float *part) {
  dc__blockwise *self = user;
  const dc__optim_param *p = &self->head.params[entry];
  const dc__block_options options = dc__block_options_of(&self->head, p);
  double lr = self->head.groups[p->group].lr;
  block_update_job job = {.part = (float *)(uintptr_t)part, /* is only read */
                          .factors = dc__block_factors_of(options.l2 ? 0 : options.weight_decay, lr)};
  run_update(self, p, DC__UPDATE_STORE_BLOCK, apply_tile, &job);
}
