/* Blocks of one shape on a device with memory of its own. What each of them keeps lies in equal steps from the one
 * before, and a few at a time go through a step together: one product, or one launch of a kernel, for all of them.
 * Their gradients lie where the exchange has them, and are brought together first. */
#include <stdio.h>

#include "optim/blocked.h"

/* One piece of all blocks of a kin. */
struct dc__slab {
  dc__slab *next;
  char what[16];
  int32_t dimension;
  void *data;
};

/* ---- what they keep ---- */

static bool is_kin(const dc__blocked *self, const dc__kin *kin, const dc__cut *cut, int64_t param, const dc__box *box) {
  bool same = !kin->closed && kin->order == cut->order && kin->group == self->head.params[param].group;
  for (int32_t d = 0; d < cut->order && same; d++) {
    same = kin->size[d] == box->size[d];
  }
  return same;
}

/* A block's kin; as many as there are: none yet. */
static int64_t kin_of(const dc__blocked *self, const dc__cut *cut, int64_t param, const dc__box *box) {
  int64_t i = 0;
  while (i < self->kin_count && !is_kin(self, &self->kins[i], cut, param, box)) {
    i++;
  }
  return i;
}

dc_status dc__kin_expect(dc__blocked *self, int64_t param, int64_t index) {
  const dc__cut *cut = &self->plans[param].cut;
  dc__box box;
  dc__cut_box(cut, index, &box);
  const int64_t i = kin_of(self, cut, param, &box);
  if (i == self->kin_count) {
    if (!dc__grow((void **)&self->kins, &self->kin_capacity, self->kin_count + 1, sizeof *self->kins)) {
      return DC_E_NO_MEMORY;
    }
    dc__kin fresh = {.group = self->head.params[param].group, .count = box.count, .order = cut->order};
    memcpy(fresh.size, box.size, sizeof fresh.size);
    self->kins[self->kin_count++] = fresh;
  }
  self->kins[i].room++;
  return DC_OK;
}

void dc__kin_begin(dc__blocked *self) {
  for (int64_t i = 0; i < self->kin_count; i++) {
    dc__kin *kin = &self->kins[i];
    kin->closed = kin->closed || (kin->room > 0 && kin->room == kin->used);
    kin->room = kin->closed ? kin->room : kin->used;
  }
}

void dc__kin_join(dc__blocked *self, dc__block *b, const dc__cut *cut, const dc__box *box) {
  b->kin = kin_of(self, cut, b->param, box);
  b->at = self->kins[b->kin].used;
}

void *dc__kin_piece(dc_optimizer *o, const dc__block *b, const char *what, int32_t dimension, size_t size,
                    int64_t elements) {
  dc__kin *kin = &dc__blocked_of(o)->kins[b->kin];
  const size_t step = (size_t)dc__kin_stride(elements) * size;
  dc__slab *slab = kin->slabs;
  while (slab != NULL && (strcmp(slab->what, what) != 0 || slab->dimension != dimension)) {
    slab = slab->next;
  }
  if (slab == NULL) {
    slab = dc__calloc(1, sizeof *slab);
    if (slab == NULL || dc__arena_alloc(o->arena, NULL, (size_t)kin->room * step, &slab->data) != DC_OK) {
      dc__free(slab);
      return NULL;
    }
    (void)snprintf(slab->what, sizeof slab->what, "%s", what);
    slab->dimension = dimension;
    slab->next = kin->slabs;
    kin->slabs = slab;
    dc__stream_zero(o->linalg->device->here, slab->data, (size_t)kin->room * step);
    dc__here_done(o->linalg->device, NULL);
  }
  return (char *)slab->data + (size_t)b->at * step;
}

void dc__kin_end(dc__blocked *self) {
  for (int64_t i = 0; i < self->kin_count; i++) {
    for (dc__slab *slab = self->kins[i].slabs, *next; slab != NULL; slab = next) {
      next = slab->next;
      dc__arena_free(self->head.arena, slab->data, NULL, NULL);
      dc__free(slab);
    }
  }
  dc__free(self->kins);
}

/* ---- a step ---- */

/* Of which more hide no launch. */
static int32_t most_of(const dc__kin *kin) {
  return dc__flight_most(kin->room, 3 * (size_t)dc__kin_stride(kin->count) * sizeof(float));
}

void dc__kin_order(dc__blocked *self) {
  int64_t count = 0;
  self->most_elements = 0;
  self->most_rows = 0;
  for (int64_t i = 0; i < self->kin_count; i++) {
    const dc__kin *kin = &self->kins[i];
    const int64_t most = most_of(kin), elements = most * dc__kin_stride(kin->count);
    self->most_elements = elements > self->most_elements ? elements : self->most_elements;
    const int64_t rows = kin->order > 0 ? most * kin->size[0] : 0;
    self->most_rows = rows > self->most_rows ? rows : self->most_rows;
    for (int64_t b = 0; b < self->block_count; b++) {
      if (self->blocks[b].kin == i) {
        self->by_kin[count++] = &self->blocks[b];
      }
    }
  }
}

/* How many from `first` on go together: neighbours in memory, in one step of one kind. */
static int32_t together(const dc__blocked *self, int64_t first) {
  const dc__block *b = self->by_kin[first];
  const dc__block_step *s = &self->now[b->param];
  const int32_t most = most_of(&self->kins[b->kin]);
  int32_t count = 1;
  for (; count < most && first + count < self->block_count; count++) {
    const dc__block *next = self->by_kin[first + count];
    if (next->kin != b->kin || self->skip[next->param] || self->now[next->param].t != s->t) {
      break;
    }
  }
  return count;
}

/* The gradients of a place's blocks side by side, or with `give` what came of them back. */
static void stack(const dc__block_place *place, const dc__block *lead, bool give) {
  dc__cuda_stack_args args = {.stack = lead->data, .count = lead->count, .stride = dc__kin_stride(lead->count)};
  args.together = place->count;
  args.give = give;
  for (int32_t i = 0; i < place->count; i++) {
    args.blocks[i] = place->blocks[i]->data;
  }
  dc__cuda_stack(place->there->on, &args);
}

void dc__kin_each(dc__blocked *self, void *memory, dc__block_fn work) {
  dc__block_place place =
      dc__block_there_place(self->head.linalg, memory, self->most_elements, self->temps, self->most_rows);
  int32_t count = 1;
  for (int64_t first = 0; first < self->block_count; first += count) {
    dc__block lead = *self->by_kin[first];
    count = 1;
    if (self->skip[lead.param]) {
      continue;
    }
    count = together(self, first);
    place.count = count;
    place.found = self->found;
    place.blocks = &self->by_kin[first];
    if (count > 1) {
      lead.data = place.stack;
      stack(&place, &lead, false);
    }
    work(&lead, &self->now[lead.param], &place);
    if (count > 1) {
      stack(&place, &lead, true);
    }
  }
}
