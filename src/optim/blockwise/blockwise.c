/* A step over blocks, in phases. Gradients go to the owners of blocks. There each block runs its kind's functions
 * before and after matrices that are due are refreshed. Directions go to every rank's part of the weights. In each
 * phase blocks run in parallel, each on one thread. A block larger than a thread's share of all work is split over the
 * threads. On a device, batches of equal blocks run one after the other. */
#include <stdatomic.h>

#include "optim/blockwise/blockwise.h"

/* ---- resources of a step ---- */

/* Whether matrices are eigenvectors on a device, which soap_basis_cuda.c computes. */
static bool has_bases(const dc__blockwise *self) {
  return dc__block_rules_of(&self->head)->sorts && dc__optim_is_cuda(&self->head);
}

static void tear_down(dc__blockwise *self) {
  dc__redistribute_destroy(self->redistribute);
  dc__free(self->entries);
  dc__free(self->steps);
  dc__free(self->skip);
  dc__free(self->by_cost);
  dc__free(self->by_group);
  dc__free(self->by_size);
  dc__free(self->orders);
  dc__free(self->requests);
  dc__soap_basis_destroy(&self->bases);
  self->redistribute = NULL;
  self->entries = NULL;
  self->steps = NULL;
  self->skip = NULL;
  self->by_cost = NULL;
  self->by_group = NULL;
  self->by_size = NULL;
  self->orders = NULL;
  self->requests = NULL;
  self->set_up_params = 0;
}

/* Sorts blocks by cost and counts those that exceed one thread's share. */
static dc_status sort_blocks(dc__blockwise *self) {
  size_t count = (size_t)self->block_count;
  double *costs = dc__calloc(count + 1, sizeof *costs);
  int64_t *order = dc__calloc(count + 1, sizeof *order);
  int32_t *owners = dc__calloc(count + 1, sizeof *owners);
  bool enough = costs != NULL && order != NULL && owners != NULL;
  if (enough) {
    double sum = 0;
    for (int64_t i = 0; i < self->block_count; i++) {
      const dc__optim_block *b = &self->blocks[i];
      costs[i] = dc__block_cost(&self->head, &self->head.params[b->param], &self->plans[b->param].partition, b->index);
    }
    dc__assign_owners(costs, self->block_count, 1, &sum, order, owners);
    self->large = 0;
    for (int64_t i = 0; i < self->block_count; i++) {
      self->by_cost[i] = &self->blocks[order[i]];
      self->large += costs[order[i]] * dc__threadpool_threads(self->head.linalg->pool) > sum && self->block_count > 0;
    }
  }
  dc__free(costs);
  dc__free(order);
  dc__free(owners);
  return enough ? DC_OK : DC_E_NO_MEMORY;
}

/* The largest first; of one size, those with the same root (by order) side by side. */
static bool side_precedes(const dc__side_ref *a, const dc__side_ref *b) {
  return a->side->n != b->side->n ? a->side->n > b->side->n : a->block->order > b->block->order;
}

/* Sorts sides by size. Insertion sort is cheap enough for a one-time setup. */
static void sort_sides(dc__blockwise *self) {
  int64_t *order = has_bases(self) ? self->bases.orders : self->orders;
  self->side_count = 0;
  for (int64_t i = 0; i < self->block_count; i++) {
    for (int32_t d = 0; d < self->blocks[i].order; d++) {
      dc__side *side = &self->blocks[i].sides[d];
      if (side->factor == NULL) {
        continue;
      }
      side->order = order;
      order += dc__block_rules_of(&self->head)->sorts ? side->n : 0;
      const dc__side_ref ref = {side, &self->blocks[i]};
      int64_t at = self->side_count++;
      for (; at > 0 && side_precedes(&ref, &self->by_size[at - 1]); at--) {
        self->by_size[at] = self->by_size[at - 1];
      }
      self->by_size[at] = ref;
    }
  }
}

/* Lists the requests of the sides that are due, or of all. */
static int64_t list_requests(dc__blockwise *self, const char *fn, bool all) {
  int64_t count = 0;
  for (int64_t i = 0; i < self->side_count; i++) {
    const dc__side_ref *at = &self->by_size[i];
    const dc__block_step *s = &self->steps[at->block->param];
    if (all || (s->due && !self->skip[at->block->param])) {
      self->requests[count++] = dc__block_rules_of(&self->head)->request(fn, at->side, at->block, s);
    }
  }
  return count;
}

/* With step counts on the device, nothing on the host depends on them. */
static void begin_step(dc__blockwise *self) {
  const bool counts = !dc__optim_counts_on_device(&self->head);
  for (int64_t i = 0; i < self->head.count; i++) {
    const dc__optim_param *p = &self->head.params[i];
    self->steps[i] = (dc__block_step){.options = dc__optim_options(&self->head, p), .t = counts ? *p->step + 1 : 1};
    if (dc__block_rules_of(&self->head)->begin != NULL) {
      dc__block_rules_of(&self->head)->begin(&self->steps[i]);
    }
    self->skip[i] = self->head.io[i].grad_dtype == DC_DTYPE_NONE;
  }
}

/* Memory of the contexts: slots, or the single one on a device. */
static bool blockwise_plan_scratch(dc__blockwise *self) {
  self->slots_bytes = 0;
  self->temps = 0;
  for (int64_t i = 0; i < self->head.count; i++) {
    const int32_t temps = dc__block_options_of(&self->head, &self->head.params[i]).temps;
    self->temps = temps > self->temps ? temps : self->temps;
  }
  return dc__block_work_of(&self->head)->plan_scratch(self);
}

/* Grows the handle's scratch memory to what any step may need. */
static dc_status blockwise_reserve(dc__blockwise *self, const char *fn) {
  dc_linalg *l = self->head.linalg;
  void *memory;
  if (!blockwise_plan_scratch(self)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold a block of %" PRId64 " elements", fn, self->max_elements);
  }
  const int64_t count = list_requests(self, fn, true);
  l->query = true;
  l->query_bytes = 0;
  dc_status status = has_bases(self) ? dc__soap_basis_reserve(&self->bases, l, fn, self->requests, count)
                                     : dc__spectral_run_grouped(l, self->requests, count);
  (void)dc__linalg_scratch(l, fn, self->slots_bytes, &memory);
  l->query = false;
  return status == DC_OK ? dc__linalg_scratch(l, fn, l->query_bytes, &memory) : status;
}

static dc_status set_up_local(dc__blockwise *self, const char *fn) {
  size_t params = (size_t)self->head.count;
  size_t sides = 0;
  size_t rows = 0;
  for (int64_t i = 0; i < self->block_count; i++) {
    for (int32_t d = 0; d < self->blocks[i].order; d++) {
      sides++;
      rows += dc__block_rules_of(&self->head)->sorts ? (size_t)self->blocks[i].sides[d].n : 0;
    }
  }
  self->entries = dc__calloc(params + 1, sizeof *self->entries);
  self->steps = dc__calloc(params + 1, sizeof *self->steps);
  self->skip = dc__calloc(params + 1, sizeof *self->skip);
  self->by_cost = dc__calloc((size_t)self->block_count + 1, sizeof *self->by_cost);
  self->by_group = dc__calloc((size_t)self->block_count + 1, sizeof *self->by_group);
  self->by_size = dc__calloc(sides + 1, sizeof *self->by_size);
  self->orders = dc__calloc(has_bases(self) ? 1 : rows + 1, sizeof *self->orders);
  self->requests = dc__calloc(sides + 1, sizeof *self->requests);
  if (self->entries == NULL || self->steps == NULL || self->skip == NULL || self->by_cost == NULL ||
      self->by_group == NULL || self->by_size == NULL || self->orders == NULL || self->requests == NULL) {
    return DC_E_NO_MEMORY;
  }
  for (int64_t i = 0; i < self->head.count; i++) {
    const dc__optim_param *p = &self->head.params[i];
    self->entries[i] = (dc__redist_entry){.id = i,
                                          .partition = &self->plans[i].partition,
                                          .owners = self->plans[i].owners,
                                          .offset = p->offset,
                                          .count = p->count};
  }
  DC__TRY(sort_blocks(self));
  if (has_bases(self)) {
    DC__TRY(dc__soap_basis_create(&self->bases, self->head.linalg, (int64_t)sides, (int64_t)rows));
  }
  sort_sides(self);
  begin_step(self);
  return blockwise_reserve(self, fn);
}

static bool is_set_up(const dc__blockwise *self) {
  return self->set_up_params == self->head.count && self->redistribute != NULL;
}

/* Collective if parameters were added since the last step. */
static dc_status set_up(dc__blockwise *self, const char *fn) {
  dc_optimizer *o = &self->head;
  if (is_set_up(self)) {
    return DC_OK;
  }
  tear_down(self);
  dc_status status = dc__optim_agree_status(fn, o->comm, set_up_local(self, fn));
  if (status == DC_OK) {
    status = dc__redistribute_create(fn, o->linalg->device, o->comm, self->entries, o->count, &self->redistribute);
  }
  if (status != DC_OK) {
    tear_down(self);
    return status;
  }
  for (int64_t i = 0; i < self->block_count; i++) {
    self->blocks[i].data = dc__redistribute_block(self->redistribute, self->blocks[i].param, self->blocks[i].index);
  }
  self->set_up_params = o->count;
  return DC_OK;
}

/* ---- phases ---- */

static dc_status each_block(dc__blockwise *self, const char *fn, dc__block_fn work) {
  void *memory;
  DC__TRY(dc__linalg_scratch(self->head.linalg, fn, self->slots_bytes, &memory));
  dc__block_work_of(&self->head)->run(self, memory, work);
  return DC_OK;
}

/* Refreshes the matrices that are due. One that fails stays as it was. */
static dc_status blockwise_refresh(dc__blockwise *self, const char *fn) {
  int64_t started = dc__now_ns();
  const int64_t count = list_requests(self, fn, false);
  DC__TRY(has_bases(self) ? dc__soap_basis_refresh(&self->bases, self->head.linalg, self->requests, count)
                          : dc__spectral_run_grouped(self->head.linalg, self->requests, count));
  self->head.stats.refresh_ns += dc__now_ns() - started;
  return DC_OK;
}

/* Ends a step: reads the status of the refreshed matrices. */
static dc_status finish_step(dc__blockwise *self) {
  dc_optimizer_stats *stats = &self->head.stats;
  dc__soap_basis_copy_status(&self->bases);
  DC__TRY(dc__linalg_synchronize(self->head.linalg));
  dc__soap_basis_read_status(&self->bases);
  for (int64_t i = 0; i < self->side_count; i++) {
    const dc__side_ref *at = &self->by_size[i];
    if (self->steps[at->block->param].due && dc__optim_has_grad(&self->head, &self->head.params[at->block->param])) {
      bool good = at->side->info.status == DC_OK;
      *at->side->failures = good ? 0 : *at->side->failures + 1;
      if (good && at->block->rooted != NULL) {
        *at->block->rooted = 1;
      }
      stats->refreshes++;
      stats->failed_refreshes += !good;
      stats->warm_refreshes += at->side->info.path == DC_PATH_WARM;
    }
  }
  return DC_OK;
}

/* ---- functions of the kinds ---- */

static dc_status each_phase(dc__blockwise *self, const char *fn) {
  const dc__block_rules *rules = dc__block_rules_of(&self->head);
  DC__TRY(dc__redistribute_to_owners(self->redistribute, self->skip, dc__blockwise_fill, self));
  DC__TRY(each_block(self, fn, rules->before_refresh));
  DC__TRY(blockwise_refresh(self, fn));
  if (rules->after_refresh != NULL) {
    DC__TRY(each_block(self, fn, rules->after_refresh));
  }
  for (int64_t i = 0; i < self->head.count; i++) {
    self->skip[i] = self->skip[i] || self->steps[i].skip_update;
  }
  return dc__redistribute_from_owners(self->redistribute, self->skip, dc__blockwise_apply, self);
}

/* Aborts the communicator on failure: this rank has agreed to the step, so the others wait for its blocks. */
static dc_status run_phases(dc__blockwise *self, const char *fn) {
  dc_comm *comm = self->head.comm;
  dc__failure failure = {DC_OK, ""};
  dc__failure_keep(&failure, each_phase(self, fn));
  if (failure.status != DC_OK && comm != NULL) {
    comm->ops->abort(comm, failure.text);
  }
  return dc__failure_raise(&failure);
}

dc_status dc__blockwise_step(dc_optimizer *o, const char *fn) {
  dc__blockwise *self = dc__blockwise_of(o);
  DC__TRY(set_up(self, fn));
  begin_step(self);
  DC__TRY(run_phases(self, fn));
  return finish_step(self);
}

/* For kinds without refreshes. Memory is allocated, and grown, only between steps. */
dc_status dc__blockwise_enqueue(dc_optimizer *o, const char *fn) {
  dc__blockwise *self = dc__blockwise_of(o);
  if (!is_set_up(self)) {
    DC__TRY(dc__optim_synchronize(o, fn));
    DC__TRY(set_up(self, fn));
  }
  begin_step(self);
  dc__update_batch batch = {0};
  dc__optim_begin_step_cuda(o, DC__UPDATE_STORE_BLOCK, dc__block_rules_of(o)->rule, &batch);
  self->found = batch.found;
  self->scale = batch.scale;
  dc__redistribute_set_stream(self->redistribute, o->linalg->stream);
  return run_phases(self, fn);
}

/* A matrix that failed too often fails its parameter's step before anything changes. */
dc_status dc__blockwise_ready(dc_optimizer *o, const char *fn) {
  const dc__blockwise *self = dc__blockwise_of(o);
  for (int64_t i = 0; i < self->block_count; i++) {
    const dc__optim_block *b = &self->blocks[i];
    int32_t tolerated = dc__block_options_of(o, &o->params[b->param]).tolerated_failures;
    for (int32_t d = 0; d < b->order && o->io[b->param].grad_dtype != DC_DTYPE_NONE; d++) {
      if (b->sides[d].factor != NULL && *b->sides[d].failures > tolerated) {
        return dc__fail(DC_E_NOT_CONVERGED,
                        "%s: the %s of factor.%" PRId64 ".%" PRId32 " of parameter %" PRId64 " failed %" PRId64
                        " time%s in a row; options.tolerated_failures = %" PRId32,
                        fn, dc__block_rules_of(o)->matrix, b->index, d, b->param, *b->sides[d].failures,
                        DC__PLURAL_S(*b->sides[d].failures), tolerated);
      }
    }
  }
  return DC_OK;
}

void dc__blockwise_stats(const dc_optimizer *o, dc_optimizer_stats *stats) {
  const dc__blockwise *self = (const dc__blockwise *)(const void *)o;
  for (int64_t i = 0; i < self->planned; i++) {
    stats->blocks += self->plans[i].partition.blocks;
  }
  stats->owned_blocks = self->block_count;
  stats->scratch_bytes += self->redistribute != NULL ? dc__redistribute_bytes(self->redistribute) : 0;
  stats->scratch_bytes += self->bases.host != NULL ? (int64_t)(self->bases.bytes + self->bases.host->scratch_bytes) : 0;
}

void dc__blockwise_destroy(dc_optimizer *o) {
  dc__blockwise *self = dc__blockwise_of(o);
  tear_down(self);
  for (int64_t i = 0; i < self->planned; i++) {
    dc__free(self->plans[i].owners);
  }
  for (int64_t i = 0; i < self->block_count; i++) {
    dc__free(self->blocks[i].sides);
  }
  dc__block_group_destroy(self);
  dc__free(self->plans);
  dc__free(self->blocks);
}
