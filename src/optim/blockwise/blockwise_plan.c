/* The parameters' blocks, their owners, and their state. */
#include <stdio.h>

#include "kernels/cuda/kernels_cuda.h"
#include "optim/blockwise/blockwise.h"

static int32_t world_of(const dc_optimizer *o) {
  return o->comm != NULL ? o->comm->world : 1;
}

static int32_t rank_of(const dc_optimizer *o) {
  return o->comm != NULL ? o->comm->rank : 0;
}

static bool has_factor(const dc__block_options *options, const dc__partition *partition, int64_t n) {
  return n <= options->max_factor_dim && (partition->order > 1 || options->precondition_1d);
}

double dc__block_cost(const dc_optimizer *o, const dc__optim_param *p, const dc__partition *partition, int64_t block) {
  const dc__block_rules *rules = dc__block_rules_of(o);
  const dc__block_options options = dc__block_options_of(o, p);
  dc__box box;
  dc__partition_box(partition, block, &box);
  if (rules->cost != NULL) {
    return rules->cost(dc__optim_options(o, p), &box);
  }
  double cost = (double)box.count;
  for (int32_t d = 0; d < partition->order; d++) {
    double n = (double)box.size[d];
    cost += has_factor(&options, partition, box.size[d]) ? n * n * n + n * (double)box.count : 0;
  }
  return cost;
}

static dc_status cut_param(const dc_optimizer *o, const char *fn, const dc__optim_param *p, dc__partition *partition) {
  const dc__block_rules *rules = dc__block_rules_of(o);
  const dc__block_options options = dc__block_options_of(o, p);
  if (rules->partition != NULL) {
    rules->partition(dc__optim_options(o, p), p, partition);
    return DC_OK;
  }
  return dc__partition_merged(fn, p->shape, p->ndim, options.merge_below, options.max_block, partition);
}

/* Cuts a parameter and assigns its blocks to ranks. Parameters are assigned one by one, in order, so the result does
 * not depend on when a rank first asks. */
static dc_status plan_param(dc__blockwise *self, const char *fn, int64_t i) {
  const dc__optim_param *p = &self->head.params[i];
  dc__block_plan made = {.owners = NULL};
  DC__TRY(cut_param(&self->head, fn, p, &made.partition));
  size_t count = (size_t)made.partition.blocks;
  double *costs = dc__calloc(count + 1, sizeof *costs);
  int64_t *order = dc__calloc(count + 1, sizeof *order);
  made.owners = dc__calloc(count + 1, sizeof *made.owners);
  bool enough = costs != NULL && order != NULL && made.owners != NULL;
  if (enough) {
    for (int64_t b = 0; b < made.partition.blocks; b++) {
      costs[b] = dc__block_cost(&self->head, p, &made.partition, b);
    }
    dc__assign_owners(costs, made.partition.blocks, world_of(&self->head), self->load, order, made.owners);
    self->plans[i] = made;
    self->planned = i + 1;
  } else {
    dc__free(made.owners);
  }
  dc__free(costs);
  dc__free(order);
  return enough ? DC_OK : DC_E_NO_MEMORY;
}

void *dc__block_piece(dc_optimizer *o, dc__optim_param *p, const char *what, const dc__optim_block *b,
                      int32_t dimension, int32_t dtype, const int64_t shape[2], int32_t ndim) {
  char name[48];
  int used = snprintf(name, sizeof name, "%s.%" PRId64, what, b->index);
  if (dimension >= 0) {
    (void)snprintf(name + used, sizeof name - (size_t)used, ".%" PRId32, dimension);
  }
  if (!dc__optim_is_cuda(o) || dtype == DC_INT64 || dc__optim_find_piece(p, name) != NULL) {
    return dc__optim_add_piece(o, p, name, dtype, shape, ndim);
  }
  const int64_t elements = shape[0] * (ndim > 1 ? shape[1] : 1);
  void *memory = dc__block_group_piece(o, b, what, dimension, dc_dtype_size(dtype), elements);
  return memory == NULL ? NULL : dc__optim_add_borrowed_piece(p, name, dtype, shape, ndim, memory);
}

/* Adds a side's pieces. Its matrix starts as the identity. */
static bool add_side(dc_optimizer *o, dc__optim_param *p, dc__optim_block *b, int32_t d) {
  const dc__block_rules *rules = dc__block_rules_of(o);
  dc__side *side = &b->sides[d];
  const int64_t shape[2] = {side->n, side->n};
  side->factor = dc__block_piece(o, p, "factor", b, d, DC_FLOAT32, shape, 2);
  side->matrix = dc__block_piece(o, p, rules->matrix, b, d, DC_FLOAT32, shape, 2);
  side->failures = dc__block_piece(o, p, "failures", b, d, DC_INT64, NULL, 0);
  if (side->matrix != NULL) {
    dc__block_work_of(o)->set_identity(o->linalg, side->matrix, side->n);
  }
  return side->factor != NULL && side->matrix != NULL && side->failures != NULL &&
         (rules->add_side == NULL || rules->add_side(o, p, b, d));
}

static bool block_add_pieces(dc_optimizer *o, const dc__partition *partition, const dc__box *box, dc__optim_block *b) {
  dc__optim_param *p = &o->params[b->param];
  const dc__block_options options = dc__block_options_of(o, p);
  const int64_t shape[2] = {box->size[0], box->count / box->size[0]};
  bool enough = dc__block_rules_of(o)->add_elements(o, p, b, shape, b->order > 1 ? 2 : 1);
  for (int32_t d = 0; d < b->order && enough; d++) {
    b->sides[d].n = box->size[d];
    enough = !has_factor(&options, partition, box->size[d]) || add_side(o, p, b, d);
  }
  return enough;
}

static dc_status add_block(dc__blockwise *self, int64_t param, int64_t index) {
  const dc__partition *partition = &self->plans[param].partition;
  dc__box box;
  dc__partition_box(partition, index, &box);
  if (!dc__array_reserve((void **)&self->blocks, &self->block_capacity, self->block_count + 1, sizeof *self->blocks)) {
    return DC_E_NO_MEMORY;
  }
  dc__optim_block b = {.param = param, .index = index, .count = box.count, .order = partition->order};
  b.sides = dc__calloc((size_t)partition->order, sizeof *b.sides);
  if (dc__optim_is_cuda(&self->head)) {
    dc__block_group_add(self, &b, partition, &box);
  }
  if (b.sides == NULL || !block_add_pieces(&self->head, partition, &box, &b)) {
    dc__free(b.sides);
    return DC_E_NO_MEMORY;
  }
  if (dc__optim_is_cuda(&self->head)) {
    self->block_groups[b.block_group].used++;
  }
  self->blocks[self->block_count++] = b;
  return DC_OK;
}

static bool has_block(const dc__blockwise *self, int64_t param, int64_t index) {
  const dc__optim_block *last = self->block_count > 0 ? &self->blocks[self->block_count - 1] : NULL;
  return last != NULL && (last->param > param || (last->param == param && last->index >= index));
}

/* Calls fn for each new block of this rank, of the parameters from `first` on. */
static dc_status each_new(dc__blockwise *self, int64_t first,
                          dc_status (*fn)(dc__blockwise *self, int64_t param, int64_t index)) {
  for (int64_t i = first; i < self->head.count; i++) {
    const dc__block_plan *made = &self->plans[i];
    for (int64_t b = 0; b < made->partition.blocks; b++) {
      if (made->owners[b] == rank_of(&self->head) && !has_block(self, i, b)) {
        DC__TRY(fn(self, i, b));
      }
    }
  }
  return DC_OK;
}

dc_status dc__blockwise_prepare(dc_optimizer *o, const char *fn, int64_t first) {
  dc__blockwise *self = dc__blockwise_of(o);
  if (!dc__array_reserve((void **)&self->plans, &self->plan_capacity, o->count, sizeof *self->plans)) {
    return DC_E_NO_MEMORY;
  }
  for (int64_t i = self->planned > first ? self->planned : first; i < o->count; i++) {
    DC__TRY(plan_param(self, fn, i));
  }
  if (dc__optim_is_cuda(o)) {
    dc__block_group_open(self);
    DC__TRY(each_new(self, first, dc__block_group_reserve));
  }
  return each_new(self, first, add_block);
}
