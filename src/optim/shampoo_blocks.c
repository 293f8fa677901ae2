/* Which blocks parameters have, which rank owns them, and their state. */
#include <stdio.h>

#include "optim/shampoo.h"

static int32_t world_of(const dc_optimizer *o) {
  return o->comm != NULL ? o->comm->world : 1;
}

static int32_t rank_of(const dc_optimizer *o) {
  return o->comm != NULL ? o->comm->rank : 0;
}

double dc__shampoo_cost(const dc__cut *cut, int64_t block) {
  dc__box box;
  double cost = 0;
  dc__cut_box(cut, block, &box);
  for (int32_t d = 0; d < cut->order; d++) {
    double n = (double)box.size[d];
    cost += n * n * n + n * (double)box.count;
  }
  return cost;
}

/* Cuts a parameter and gives its blocks to ranks. Parameters get their owners one by one, in their order: so it does
 * not matter when a rank first asks for some of them. */
static dc_status plan_param(dc__shampoo *self, const char *fn, int64_t i) {
  const dc__optim_param *p = &self->head.params[i];
  const dc_shampoo_options *options = dc__optim_options(&self->head, p);
  dc__shampoo_plan made = {.owners = NULL};
  DC__TRY(dc__cut_make(fn, p->shape, p->ndim, options->merge_below, options->max_block, &made.cut));
  size_t count = (size_t)made.cut.blocks;
  double *costs = dc__calloc(count + 1, sizeof *costs);
  int64_t *order = dc__calloc(count + 1, sizeof *order);
  made.owners = dc__calloc(count + 1, sizeof *made.owners);
  bool enough = costs != NULL && order != NULL && made.owners != NULL;
  if (enough) {
    for (int64_t b = 0; b < made.cut.blocks; b++) {
      costs[b] = dc__shampoo_cost(&made.cut, b);
    }
    dc__assign(costs, made.cut.blocks, world_of(&self->head), self->load, order, made.owners);
    self->plans[i] = made;
    self->planned = i + 1;
  } else {
    dc__free(made.owners);
  }
  dc__free(costs);
  dc__free(order);
  return enough ? DC_OK : DC_E_NO_MEMORY;
}

static void *piece(dc_optimizer *o, dc__optim_param *p, const char *what, int64_t block, int32_t dimension,
                   int32_t dtype, const int64_t shape[2], int32_t ndim) {
  char name[48];
  int used = snprintf(name, sizeof name, "%s.%" PRId64, what, block);
  if (dimension >= 0) {
    (void)snprintf(name + used, sizeof name - (size_t)used, ".%" PRId32, dimension);
  }
  return dc__optim_add_piece(o, p, name, dtype, shape, ndim);
}

/* The identity is as good as any root until there is one. */
static bool add_side(dc_optimizer *o, dc__optim_param *p, const dc__block *b, int32_t d, int64_t n) {
  const dc_shampoo_options *options = dc__optim_options(o, p);
  const int64_t shape[2] = {n, n};
  dc__side *side = &b->sides[d];
  side->n = n;
  side->factor = piece(o, p, "factor", b->index, d, DC_FLOAT32, shape, 2);
  side->root = piece(o, p, "root", b->index, d, DC_FLOAT32, shape, 2);
  side->failures = piece(o, p, "failures", b->index, d, DC_INT64, NULL, 0);
  if (options->tolerance > 0) {
    side->basis = piece(o, p, "basis", b->index, d, DC_FLOAT64, shape, 2);
  }
  for (int64_t i = 0; i < n && side->root != NULL; i++) {
    side->root[i * n + i] = 1;
  }
  return side->factor != NULL && side->root != NULL && side->failures != NULL &&
         (options->tolerance == 0 || side->basis != NULL);
}

static bool add_elements(dc_optimizer *o, dc__optim_param *p, dc__block *b, int64_t first) {
  const dc_shampoo_options *options = dc__optim_options(o, p);
  const int64_t shape[2] = {first, b->count / first};
  const int32_t ndim = b->order > 1 ? 2 : 1;
  const bool squares = options->graft != DC_GRAFT_NONE && options->graft != DC_GRAFT_SGD;
  if (options->beta1 > 0) {
    b->exp_avg = piece(o, p, "exp_avg", b->index, -1, DC_FLOAT32, shape, ndim);
  }
  if (squares) {
    b->graft = piece(o, p, "graft", b->index, -1, DC_FLOAT32, shape, ndim);
  }
  if (options->momentum > 0) {
    b->momentum = piece(o, p, "momentum", b->index, -1, DC_FLOAT32, shape, ndim);
  }
  return (options->beta1 == 0 || b->exp_avg != NULL) && (!squares || b->graft != NULL) &&
         (options->momentum == 0 || b->momentum != NULL);
}

static dc_status add_block(dc__shampoo *self, int64_t param, int64_t index) {
  dc_optimizer *o = &self->head;
  const dc__cut *cut = &self->plans[param].cut;
  dc__box box;
  dc__cut_box(cut, index, &box);
  if (!dc__grow((void **)&self->blocks, &self->block_capacity, self->block_count + 1, sizeof *self->blocks)) {
    return DC_E_NO_MEMORY;
  }
  dc__block b = {.param = param, .index = index, .count = box.count, .order = cut->order};
  b.sides = dc__calloc((size_t)cut->order, sizeof *b.sides);
  bool enough = b.sides != NULL && add_elements(o, &o->params[param], &b, box.size[0]);
  for (int32_t d = 0; d < cut->order && enough; d++) {
    enough = add_side(o, &o->params[param], &b, d, box.size[d]);
  }
  if (!enough) {
    dc__free(b.sides);
    return DC_E_NO_MEMORY;
  }
  self->blocks[self->block_count++] = b;
  return DC_OK;
}

static bool has_block(const dc__shampoo *self, int64_t param, int64_t index) {
  const dc__block *last = self->block_count > 0 ? &self->blocks[self->block_count - 1] : NULL;
  return last != NULL && (last->param > param || (last->param == param && last->index >= index));
}

dc_status dc__shampoo_prepare(dc_optimizer *o, const char *fn, int64_t first) {
  dc__shampoo *self = dc__shampoo_of(o);
  if (!dc__grow((void **)&self->plans, &self->plan_capacity, o->count, sizeof *self->plans)) {
    return DC_E_NO_MEMORY;
  }
  for (int64_t i = first; i < o->count; i++) {
    if (i >= self->planned) {
      DC__TRY(plan_param(self, fn, i));
    }
    const dc__shampoo_plan *made = &self->plans[i];
    for (int64_t b = 0; b < made->cut.blocks; b++) {
      if (made->owners[b] == rank_of(o) && !has_block(self, i, b)) {
        DC__TRY(add_block(self, i, b));
      }
    }
  }
  return DC_OK;
}
