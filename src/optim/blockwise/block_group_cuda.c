/* Block groups: blocks of one shape in device memory. Each state tensor of a group is strided, and a few blocks go
 * through a step together, in one product or kernel launch. Their gradients are gathered first from the
 * redistribution's buffers. */
#include <stdio.h>

#include "kernels/cuda/kernels_cuda.h"
#include "optim/blockwise/blockwise.h"

/* One state tensor of all blocks of a group. */
struct dc__slab {
  dc__slab *next;
  char what[16];
  int32_t dimension;
  void *data;
};

/* ---- state ---- */

static bool group_matches(const dc__blockwise *self, const dc__block_group *block_group, const dc__partition *partition,
                          int64_t param, const dc__box *box) {
  bool same = !block_group->closed && block_group->order == partition->order &&
              block_group->group == self->head.params[param].group;
  for (int32_t d = 0; d < partition->order && same; d++) {
    same = block_group->size[d] == box->size[d];
  }
  return same;
}

/* Finds a block's group; returns the number of groups if there is none yet. */
static int64_t find_group(const dc__blockwise *self, const dc__partition *partition, int64_t param,
                          const dc__box *box) {
  int64_t i = 0;
  while (i < self->block_group_count && !group_matches(self, &self->block_groups[i], partition, param, box)) {
    i++;
  }
  return i;
}

dc_status dc__block_group_reserve(dc__blockwise *self, int64_t param, int64_t index) {
  const dc__partition *partition = &self->plans[param].partition;
  dc__box box;
  dc__partition_box(partition, index, &box);
  const int64_t i = find_group(self, partition, param, &box);
  if (i == self->block_group_count) {
    if (!dc__array_reserve((void **)&self->block_groups, &self->block_group_capacity, self->block_group_count + 1,
                           sizeof *self->block_groups)) {
      return DC_E_NO_MEMORY;
    }
    dc__block_group group = {.group = self->head.params[param].group, .count = box.count, .order = partition->order};
    memcpy(group.size, box.size, sizeof group.size);
    self->block_groups[self->block_group_count++] = group;
  }
  self->block_groups[i].capacity++;
  return DC_OK;
}

void dc__block_group_open(dc__blockwise *self) {
  for (int64_t i = 0; i < self->block_group_count; i++) {
    dc__block_group *block_group = &self->block_groups[i];
    block_group->closed =
        block_group->closed || (block_group->capacity > 0 && block_group->capacity == block_group->used);
    block_group->capacity = block_group->closed ? block_group->capacity : block_group->used;
  }
}

void dc__block_group_add(dc__blockwise *self, dc__optim_block *b, const dc__partition *partition, const dc__box *box) {
  b->block_group = find_group(self, partition, b->param, box);
  b->at = self->block_groups[b->block_group].used;
}

void *dc__block_group_piece(dc_optimizer *o, const dc__optim_block *b, const char *what, int32_t dimension, size_t size,
                            int64_t elements) {
  dc__block_group *block_group = &dc__blockwise_of(o)->block_groups[b->block_group];
  const size_t step = (size_t)dc__block_group_stride(elements) * size;
  dc__slab *slab = block_group->slabs;
  while (slab != NULL && (strcmp(slab->what, what) != 0 || slab->dimension != dimension)) {
    slab = slab->next;
  }
  if (slab == NULL) {
    slab = dc__calloc(1, sizeof *slab);
    if (slab == NULL || dc__arena_alloc(o->arena, NULL, (size_t)block_group->capacity * step, &slab->data) != DC_OK) {
      dc__free(slab);
      return NULL;
    }
    (void)snprintf(slab->what, sizeof slab->what, "%s", what);
    slab->dimension = dimension;
    slab->next = block_group->slabs;
    block_group->slabs = slab;
    dc__stream_zero(o->linalg->device->internal_stream, slab->data, (size_t)block_group->capacity * step);
    dc__device_sync_internal(o->linalg->device, NULL);
  }
  return (char *)slab->data + (size_t)b->at * step;
}

void dc__block_group_destroy(dc__blockwise *self) {
  for (int64_t i = 0; i < self->block_group_count; i++) {
    for (dc__slab *slab = self->block_groups[i].slabs, *next; slab != NULL; slab = next) {
      next = slab->next;
      dc__arena_free(self->head.arena, slab->data, NULL, NULL);
      dc__free(slab);
    }
  }
  dc__free(self->block_groups);
}

/* ---- a step ---- */

/* The maximum batch. Larger ones would not hide more launch latency. */
static int32_t group_max_batch(const dc__block_group *block_group) {
  return dc__batch_slice_max_count(block_group->capacity,
                                   3 * (size_t)dc__block_group_stride(block_group->count) * sizeof(float));
}

void dc__block_group_sort(dc__blockwise *self) {
  int64_t count = 0;
  self->max_elements = 0;
  self->max_rows = 0;
  for (int64_t i = 0; i < self->block_group_count; i++) {
    const dc__block_group *block_group = &self->block_groups[i];
    const int64_t max_batch = group_max_batch(block_group),
                  elements = max_batch * dc__block_group_stride(block_group->count);
    self->max_elements = elements > self->max_elements ? elements : self->max_elements;
    const int64_t rows = block_group->order > 0 ? max_batch * block_group->size[0] : 0;
    self->max_rows = rows > self->max_rows ? rows : self->max_rows;
    for (int64_t b = 0; b < self->block_count; b++) {
      if (self->blocks[b].block_group == i) {
        self->by_group[count++] = &self->blocks[b];
      }
    }
  }
}

static bool is_rooted(const dc__optim_block *b) {
  return b->rooted != NULL && *b->rooted != 0;
}

/* Counts the blocks from `first` on that run together: adjacent in memory, with the same step and options. */
static int32_t batch_count(const dc__blockwise *self, int64_t first) {
  const dc__optim_block *b = self->by_group[first];
  const dc__block_step *s = &self->steps[b->param];
  const int32_t max_batch = group_max_batch(&self->block_groups[b->block_group]);
  int32_t count = 1;
  for (; count < max_batch && first + count < self->block_count; count++) {
    const dc__optim_block *next = self->by_group[first + count];
    if (next->block_group != b->block_group || self->skip[next->param] || self->steps[next->param].t != s->t ||
        is_rooted(next) != is_rooted(b)) {
      break;
    }
  }
  return count;
}

/* Gathers the blocks' gradients into a stack, or with `unpack` scatters the results back. */
static void stack_blocks(const dc__block_context *ctx, const dc__optim_block *lead, bool unpack) {
  dc__cuda_stack_args args = {.stack = lead->data, .count = lead->count, .stride = dc__block_group_stride(lead->count)};
  args.batch = ctx->count;
  args.unpack = unpack;
  for (int32_t i = 0; i < ctx->count; i++) {
    args.blocks[i] = ctx->blocks[i]->data;
  }
  dc__cuda_stack(ctx->linalg->stream, &args);
}

void dc__block_group_run(dc__blockwise *self, void *memory, dc__block_fn work) {
  dc__block_context ctx =
      dc__block_context_cuda(self->head.linalg, memory, self->max_elements, self->temps, self->max_rows);
  int32_t count = 1;
  for (int64_t first = 0; first < self->block_count; first += count) {
    dc__optim_block lead = *self->by_group[first];
    count = 1;
    if (self->skip[lead.param]) {
      continue;
    }
    count = batch_count(self, first);
    ctx.count = count;
    ctx.found = self->found;
    ctx.blocks = &self->by_group[first];
    if (count > 1) {
      lead.data = ctx.stack;
      stack_blocks(&ctx, &lead, false);
    }
    work(&lead, &self->steps[lead.param], &ctx);
    if (count > 1) {
      stack_blocks(&ctx, &lead, true);
    }
  }
}
