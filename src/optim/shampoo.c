/* Shampoo's step, in phases: gradients go to the owners of blocks; there all factors take them in, then the roots that
 * are due are computed, then the directions; and these go to every rank's part of the weights. In each phase blocks run
 * side by side, each on one thread; a block that is more than a thread's share of all the work is cut up over the
 * threads instead. */
#include <stdatomic.h>

#include "optim/shampoo.h"

/* ---- what a step needs ---- */

static void unsettle(dc__shampoo *self) {
  dc__exchange_destroy(self->exchange);
  dc__free(self->flows);
  dc__free(self->now);
  dc__free(self->skip);
  dc__free(self->by_cost);
  dc__free(self->by_size);
  dc__free(self->requests);
  self->exchange = NULL;
  self->flows = NULL;
  self->now = NULL;
  self->skip = NULL;
  self->by_cost = NULL;
  self->by_size = NULL;
  self->requests = NULL;
  self->settled = 0;
}

/* Blocks by cost, and which are too large for one thread: more than their share of the work. */
static dc_status sort_blocks(dc__shampoo *self) {
  size_t count = (size_t)self->block_count;
  double *costs = dc__calloc(count + 1, sizeof *costs);
  int64_t *order = dc__calloc(count + 1, sizeof *order);
  int32_t *owners = dc__calloc(count + 1, sizeof *owners);
  bool enough = costs != NULL && order != NULL && owners != NULL;
  if (enough) {
    double sum = 0;
    for (int64_t i = 0; i < self->block_count; i++) {
      const dc__block *b = &self->blocks[i];
      costs[i] = dc__shampoo_cost(&self->plans[b->param].cut, b->index);
    }
    dc__assign(costs, self->block_count, 1, &sum, order, owners);
    self->large = 0;
    for (int64_t i = 0; i < self->block_count; i++) {
      self->by_cost[i] = &self->blocks[order[i]];
      self->large += costs[order[i]] * dc__pool_threads(self->head.linalg->pool) > sum && self->block_count > 0;
    }
  }
  dc__free(costs);
  dc__free(order);
  dc__free(owners);
  return enough ? DC_OK : DC_E_NO_MEMORY;
}

/* Sides by size; an insertion for each is cheap enough for what happens once. */
static void sort_sides(dc__shampoo *self) {
  self->side_count = 0;
  for (int64_t i = 0; i < self->block_count; i++) {
    for (int32_t d = 0; d < self->blocks[i].order; d++) {
      dc__side *side = &self->blocks[i].sides[d];
      int64_t at = self->side_count++;
      for (; at > 0 && self->by_size[at - 1].side->n < side->n; at--) {
        self->by_size[at] = self->by_size[at - 1];
      }
      self->by_size[at] = (dc__side_of){side, &self->blocks[i]};
    }
  }
}

/* The requests of the sides that are due, or of all. */
static int64_t list_requests(dc__shampoo *self, const char *fn, bool all) {
  int64_t count = 0;
  for (int64_t i = 0; i < self->side_count; i++) {
    const dc__side_of *at = &self->by_size[i];
    const dc__block_step *s = &self->now[at->block->param];
    if (all || (s->due && !self->skip[at->block->param])) {
      self->requests[count++] = dc__side_request(fn, at->side, at->block, s);
    }
  }
  return count;
}

static void begin(dc__shampoo *self) {
  for (int64_t i = 0; i < self->head.count; i++) {
    const dc__optim_param *p = &self->head.params[i];
    const dc_shampoo_options *options = dc__optim_options(&self->head, p);
    self->now[i] = (dc__block_step){options, *p->step + 1, dc__shampoo_due(options, *p->step + 1)};
    self->skip[i] = self->head.io[i].grad_dtype == DC_DTYPE_NONE;
  }
}

/* The handle's scratch memory grows now to what any step may want. */
static dc_status reserve(dc__shampoo *self, const char *fn) {
  dc_linalg *l = self->head.linalg;
  int64_t most = 0;
  void *memory;
  for (int64_t i = 0; i < self->block_count; i++) {
    most = self->blocks[i].count > most ? self->blocks[i].count : most;
  }
  self->slots_bytes = 0;
  if (!dc__slots_plan(&self->slots, l, self->block_count, 2 * (size_t)most * sizeof(float), &self->slots_bytes)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold a block of %" PRId64 " elements", fn, most);
  }
  l->query = true;
  l->most = 0;
  dc_status status = dc__spectral_each(l, self->requests, list_requests(self, fn, true));
  (void)dc__linalg_scratch(l, fn, self->slots_bytes, &memory);
  l->query = false;
  return status == DC_OK ? dc__linalg_scratch(l, fn, l->most, &memory) : status;
}

static dc_status settle_here(dc__shampoo *self, const char *fn) {
  size_t params = (size_t)self->head.count;
  size_t sides = 0;
  for (int64_t i = 0; i < self->block_count; i++) {
    sides += (size_t)self->blocks[i].order;
  }
  self->flows = dc__calloc(params + 1, sizeof *self->flows);
  self->now = dc__calloc(params + 1, sizeof *self->now);
  self->skip = dc__calloc(params + 1, sizeof *self->skip);
  self->by_cost = dc__calloc((size_t)self->block_count + 1, sizeof *self->by_cost);
  self->by_size = dc__calloc(sides + 1, sizeof *self->by_size);
  self->requests = dc__calloc(sides + 1, sizeof *self->requests);
  if (self->flows == NULL || self->now == NULL || self->skip == NULL || self->by_cost == NULL ||
      self->by_size == NULL || self->requests == NULL) {
    return DC_E_NO_MEMORY;
  }
  for (int64_t i = 0; i < self->head.count; i++) {
    const dc__optim_param *p = &self->head.params[i];
    self->flows[i] = (dc__flow){i, &self->plans[i].cut, self->plans[i].owners, p->offset, p->count};
  }
  DC__TRY(sort_blocks(self));
  sort_sides(self);
  begin(self);
  return reserve(self, fn);
}

/* Collective where parameters have come since the last step. */
static dc_status settle(dc__shampoo *self, const char *fn) {
  dc_optimizer *o = &self->head;
  if (self->settled == o->count && self->exchange != NULL) {
    return DC_OK;
  }
  unsettle(self);
  dc_status status = dc__agree(fn, o->comm, settle_here(self, fn));
  if (status == DC_OK) {
    status = dc__exchange_create(fn, o->linalg->device, o->comm, self->flows, o->count, &self->exchange);
  }
  if (status != DC_OK) {
    unsettle(self);
    return status;
  }
  for (int64_t i = 0; i < self->block_count; i++) {
    self->blocks[i].data = dc__exchange_block(self->exchange, self->blocks[i].param, self->blocks[i].index);
  }
  self->settled = o->count;
  return DC_OK;
}

/* ---- phases ---- */

typedef void (*block_fn)(const dc__block *b, const dc__block_step *s, const dc__block_place *place);

typedef struct phase {
  dc__shampoo *self;
  block_fn fn;
} phase;

static void run_block(const phase *p, int64_t index, dc__pool *pool, void *scratch) {
  dc__shampoo *self = p->self;
  const dc__block *b = self->by_cost[index];
  if (self->skip[b->param]) {
    return;
  }
  int64_t slot = dc__slots_take(&self->slots);
  const dc__block_place place = {pool, scratch, dc__slots_memory(&self->slots, slot)};
  p->fn(b, &self->now[b->param], &place);
  dc__slots_give(&self->slots, slot);
}

static void run_small(void *arg, int64_t index, void *scratch) {
  const phase *p = arg;
  run_block(p, p->self->large + index, NULL, scratch);
}

static dc_status each_block(dc__shampoo *self, const char *fn, block_fn work) {
  phase p = {self, work};
  dc_linalg *l = self->head.linalg;
  void *memory;
  size_t offset = 0;
  DC__TRY(dc__linalg_scratch(l, fn, self->slots_bytes, &memory));
  dc__slots_place(&self->slots, memory, &offset);
  for (int64_t i = 0; i < self->large; i++) {
    run_block(&p, i, l->pool, NULL);
  }
  dc__parallel(l->pool, self->block_count - self->large, run_small, &p);
  return DC_OK;
}

/* The roots that are due. One that fails stays what it was. */
static dc_status refresh(dc__shampoo *self, const char *fn) {
  dc_optimizer_stats *stats = &self->head.stats;
  int64_t started = dc__now_ns();
  DC__TRY(dc__spectral_each(self->head.linalg, self->requests, list_requests(self, fn, false)));
  for (int64_t i = 0; i < self->side_count; i++) {
    const dc__side_of *at = &self->by_size[i];
    if (self->now[at->block->param].due && !self->skip[at->block->param]) {
      bool good = at->side->info.status == DC_OK;
      *at->side->failures = good ? 0 : *at->side->failures + 1;
      stats->refreshes++;
      stats->failed_refreshes += !good;
      stats->warm_refreshes += at->side->info.path == DC_PATH_WARM;
    }
  }
  stats->refresh_ns += dc__now_ns() - started;
  return DC_OK;
}

/* ---- weights ---- */

typedef struct part_job {
  float *in;
  const float *out;
  float keep, add; /* of the weight */
} part_job;

static void fill_tile(dc_optimizer *o, const dc__optim_tile *tile, void *arg) {
  (void)o;
  const part_job *job = arg;
  float *to = job->in + tile->from;
  for (int64_t i = 0; i < tile->count; i++) {
    to[i] = job->add != 0 ? tile->grad[i] + job->add * tile->weight[i] : tile->grad[i];
  }
}

static void fill(void *user, int64_t flow, float *part) {
  dc__shampoo *self = user;
  const dc_shampoo_options *options = self->now[flow].options;
  part_job job = {.in = part, .add = options->decay == DC_DECAY_L2 ? (float)options->weight_decay : 0};
  dc__optim_param_tiles(&self->head, &self->head.params[flow], fill_tile, &job);
}

static void apply_tile(dc_optimizer *o, const dc__optim_tile *tile, void *arg) {
  (void)o;
  const part_job *job = arg;
  const float *direction = job->out + tile->from;
  for (int64_t i = 0; i < tile->count; i++) {
    tile->weight[i] = job->keep * tile->weight[i] + job->add * direction[i];
  }
}

static void apply(void *user, int64_t flow, const float *part) {
  dc__shampoo *self = user;
  const dc__optim_param *p = &self->head.params[flow];
  const dc_shampoo_options *options = self->now[flow].options;
  double lr = self->head.groups[p->group].lr;
  part_job job = {.out = part, .keep = 1, .add = (float)-lr};
  if (options->decay == DC_DECAY_DECOUPLED) {
    job.keep = (float)(1 - lr * options->weight_decay);
  }
  dc__optim_param_tiles(&self->head, p, apply_tile, &job);
}

/* ---- the kind ---- */

static dc_status step(dc_optimizer *o, const char *fn) {
  dc__shampoo *self = dc__shampoo_of(o);
  DC__TRY(settle(self, fn));
  begin(self);
  DC__TRY(dc__exchange_in(self->exchange, self->skip, fill, self));
  DC__TRY(each_block(self, fn, dc__block_learn));
  DC__TRY(refresh(self, fn));
  DC__TRY(each_block(self, fn, dc__block_direct));
  return dc__exchange_out(self->exchange, self->skip, apply, self);
}

/* A root that has failed too often ends the steps of its parameter before anything changes. */
static dc_status ready(dc_optimizer *o, const char *fn) {
  const dc__shampoo *self = dc__shampoo_of(o);
  for (int64_t i = 0; i < self->block_count; i++) {
    const dc__block *b = &self->blocks[i];
    const dc_shampoo_options *options = dc__optim_options(o, &o->params[b->param]);
    for (int32_t d = 0; d < b->order && o->io[b->param].grad_dtype != DC_DTYPE_NONE; d++) {
      if (*b->sides[d].failures > options->tolerated_failures) {
        return dc__fail(DC_E_NOT_CONVERGED,
                        "%s: the root of factor.%" PRId64 ".%" PRId32 " of parameter %" PRId64 " failed %" PRId64
                        " times in a row; options.tolerated_failures = %" PRId32,
                        fn, b->index, d, b->param, *b->sides[d].failures, options->tolerated_failures);
      }
    }
  }
  return DC_OK;
}

static bool has_squares(int32_t graft) {
  return graft != DC_GRAFT_NONE && graft != DC_GRAFT_SGD;
}

static const char *refuse(const void *options, const void *old) {
  const dc_shampoo_options *a = options;
  const dc_shampoo_options *b = old;
  return a->max_block != b->max_block                     ? "max_block"
         : a->merge_below != b->merge_below               ? "merge_below"
         : (a->beta1 > 0) != (b->beta1 > 0)               ? "beta1 = -1"
         : (a->momentum > 0) != (b->momentum > 0)         ? "momentum = 0"
         : (a->tolerance > 0) != (b->tolerance > 0)       ? "tolerance = -1"
         : has_squares(a->graft) != has_squares(b->graft) ? "whether graft has squares"
                                                          : NULL;
}

static void stats(const dc_optimizer *o, dc_optimizer_stats *stats) {
  const dc__shampoo *self = (const dc__shampoo *)(const void *)o;
  for (int64_t i = 0; i < self->planned; i++) {
    stats->blocks += self->plans[i].cut.blocks;
  }
  stats->owned_blocks = self->block_count;
  stats->scratch_bytes += self->exchange != NULL ? dc__exchange_bytes(self->exchange) : 0;
}

static void destroy(dc_optimizer *o) {
  dc__shampoo *self = dc__shampoo_of(o);
  unsettle(self);
  for (int64_t i = 0; i < self->planned; i++) {
    dc__free(self->plans[i].owners);
  }
  for (int64_t i = 0; i < self->block_count; i++) {
    dc__free(self->blocks[i].sides);
  }
  dc__free(self->plans);
  dc__free(self->blocks);
}

const dc__optim_kind dc__shampoo_kind = {.name = "shampoo",
                                         .size = sizeof(dc__shampoo),
                                         .options_size = sizeof(dc_shampoo_options),
                                         .exponent = 50, /* squares of gradients, and sums of them, fit float32 */
                                         .refuse = refuse,
                                         .prepare = dc__shampoo_prepare,
                                         .ready = ready,
                                         .step = step,
                                         .stats = stats,
                                         .destroy = destroy};
