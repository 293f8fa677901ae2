/* How parameters are cut into blocks, and which rank has which. Nothing here depends on a rank's own data, so that all
 * ranks come to the same. */
#include <inttypes.h>
#include <string.h>

#include "kernels/kernels.h"
#include "optim/exchange.h"

/* ---- cutting ---- */

static void count_blocks(dc__cut *cut) {
  cut->numel = 1;
  cut->blocks = 1;
  for (int32_t d = 0; d < cut->order; d++) {
    cut->numel *= cut->shape[d];
    cut->blocks *= cut->shape[d] / cut->sides[d] + (cut->shape[d] % cut->sides[d] != 0);
  }
}

dc_status dc__cut_make(const char *fn, const int64_t *shape, int32_t ndim, int64_t merge, int64_t side, dc__cut *cut) {
  int64_t reversed[DC__ORDER_MAX] = {1};
  int32_t order = 0;
  int32_t longer = 0; /* dimensions longer than 1 that were not looked at yet */
  for (int32_t d = 0; d < ndim; d++) {
    longer += shape[d] != 1;
    if (shape[d] == 0) {
      dc__cut_whole(0, cut);
      return DC_OK;
    }
  }
  for (int32_t d = ndim - 1; d >= 0; d--) {
    if (shape[d] == 1) {
      continue;
    }
    longer--;
    /* Merging leaves order + longer dimensions; a product that fits `merge` cannot overflow before it is compared. */
    if (order > 0 && order + longer >= 2 && shape[d] <= merge / reversed[order - 1]) {
      reversed[order - 1] *= shape[d];
    } else if (order == DC__ORDER_MAX) {
      return dc__fail(DC_E_UNSUPPORTED, "%s: shape has more than %d dimensions longer than 1", fn, (int)DC__ORDER_MAX);
    } else {
      reversed[order++] = shape[d];
    }
  }
  cut->order = order > 0 ? order : 1;
  for (int32_t d = 0; d < cut->order; d++) {
    cut->shape[d] = reversed[cut->order - 1 - d];
    cut->sides[d] = side;
  }
  count_blocks(cut);
  return DC_OK;
}

void dc__cut_rows(const int64_t *shape, int32_t ndim, int64_t splits, dc__cut *cut) {
  int64_t cols = 1;
  for (int32_t d = 1; d < ndim; d++) {
    cols *= shape[d];
  }
  if (shape[0] == 0 || cols == 0) {
    dc__cut_whole(0, cut);
    return;
  }
  cut->order = 2;
  cut->shape[0] = shape[0];
  cut->shape[1] = cut->sides[1] = cols;
  cut->sides[0] = shape[0] / splits;
  count_blocks(cut);
}

void dc__cut_whole(int64_t numel, dc__cut *cut) {
  cut->order = 1;
  cut->shape[0] = numel;
  cut->sides[0] = numel > 0 ? numel : 1;
  count_blocks(cut);
}

void dc__cut_box(const dc__cut *cut, int64_t block, dc__box *box) {
  box->count = 1;
  for (int32_t d = cut->order - 1; d >= 0; d--) {
    int64_t pieces = cut->shape[d] / cut->sides[d] + (cut->shape[d] % cut->sides[d] != 0);
    box->begin[d] = block % pieces * cut->sides[d];
    block /= pieces;
    int64_t rest = cut->shape[d] - box->begin[d];
    box->size[d] = rest < cut->sides[d] ? rest : cut->sides[d];
    box->count *= box->size[d];
  }
}

/* ---- moving ---- */

_Static_assert((int)DC__ORDER_MAX <= (int)DC__CUDA_BOX_DIMS, "a box must fit a kernel's argument");

/* A block's runs: what lies side by side in the whole parameter too. */
typedef struct runs {
  const dc__cut *cut;
  const dc__box *box;
  int64_t length;
  int32_t dims; /* those before the run's */
  int64_t at[DC__ORDER_MAX];
} runs;

static runs runs_of(const dc__cut *cut, const dc__box *box) {
  runs r = {.cut = cut, .box = box, .length = 1, .dims = cut->order};
  bool full = true;
  while (r.dims > 0 && full) {
    r.dims--;
    r.length *= box->size[r.dims];
    full = box->size[r.dims] == cut->shape[r.dims];
  }
  return r;
}

/* Where the run lies in the whole parameter. */
static int64_t run_begin(const runs *r) {
  int64_t place = 0;
  for (int32_t d = 0; d < r->cut->order; d++) {
    place = place * r->cut->shape[d] + r->box->begin[d] + (d < r->dims ? r->at[d] : 0);
  }
  return place;
}

static void run_next(runs *r) {
  for (int32_t d = r->dims - 1; d >= 0; d--) {
    if (++r->at[d] < r->box->size[d]) {
      return;
    }
    r->at[d] = 0;
  }
}

/* By a kernel, whose threads find the places of elements; moves elements [first, first + length). */
static void box_there(dc_stream *here, const dc__cut *cut, const dc__box *box, const float *block, int64_t first,
                      int64_t length, const float *part, bool give) {
  dc__cuda_box_args args = {.count = box->count, .first = first, .length = length};
  args.block = (float *)(uintptr_t)block; /* one of the two is written */
  args.part = (float *)(uintptr_t)part;
  int64_t stride = 1;
  args.dims = cut->order;
  args.give = give;
  for (int32_t d = cut->order - 1; d >= 0; d--) {
    args.begin += box->begin[d] * stride;
    args.size[d] = box->size[d];
    args.stride[d] = stride;
    stride *= cut->shape[d];
  }
  dc__cuda_box(here, &args);
}

void dc__box_take(dc_stream *here, const dc__cut *cut, const dc__box *box, const float *whole, float *block) {
  if (here != NULL) {
    box_there(here, cut, box, block, 0, cut->numel, whole, false);
    return;
  }
  runs r = runs_of(cut, box);
  for (int64_t done = 0; done < box->count; done += r.length) {
    memcpy(block + done, whole + run_begin(&r), (size_t)r.length * sizeof *block);
    run_next(&r);
  }
}

void dc__box_give(dc_stream *here, const dc__cut *cut, const dc__box *box, const float *block, int64_t first,
                  int64_t count, float *part) {
  if (here != NULL) {
    box_there(here, cut, box, block, first, count, part, true);
    return;
  }
  runs r = runs_of(cut, box);
  for (int64_t done = 0; done < box->count; done += r.length) {
    int64_t begin = run_begin(&r);
    int64_t from = begin > first ? begin : first;
    int64_t to = begin + r.length < first + count ? begin + r.length : first + count;
    if (from < to) {
      memcpy(part + (from - first), block + done + (from - begin), (size_t)(to - from) * sizeof *part);
    }
    run_next(&r);
  }
}

/* ---- owners ---- */

static bool before(const double *costs, int64_t a, int64_t b) {
  return costs[a] > costs[b] || (!(costs[a] < costs[b]) && a < b);
}

/* The heap whose root comes last, from node `at` down. */
static void sift(const double *costs, int64_t *order, int64_t at, int64_t count) {
  int64_t child;
  while ((child = 2 * at + 1) < count) {
    if (child + 1 < count && before(costs, order[child], order[child + 1])) {
      child++;
    }
    if (!before(costs, order[at], order[child])) {
      return;
    }
    int64_t swap = order[at];
    order[at] = order[child];
    order[child] = swap;
    at = child;
  }
}

/* Heapsort: the same on every C library, and no memory. */
static void sort(const double *costs, int64_t *order, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    order[i] = i;
  }
  for (int64_t i = count / 2 - 1; i >= 0; i--) {
    sift(costs, order, i, count);
  }
  for (int64_t end = count - 1; end > 0; end--) {
    int64_t swap = order[0];
    order[0] = order[end];
    order[end] = swap;
    sift(costs, order, 0, end);
  }
}

void dc__assign(const double *costs, int64_t count, int32_t world, double *load, int64_t *order, int32_t *owners) {
  sort(costs, order, count);
  for (int64_t i = 0; i < count; i++) {
    int32_t least = 0;
    for (int32_t r = 1; r < world; r++) {
      least = load[r] < load[least] ? r : least;
    }
    owners[order[i]] = least;
    load[least] += costs[order[i]];
  }
}
