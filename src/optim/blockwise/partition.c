/* Cuts parameters into blocks and assigns them to ranks. Nothing depends on a rank's own data, so all ranks get the
 * same result. */
#include <inttypes.h>
#include <string.h>

#include "kernels/cuda/kernels_cuda.h"
#include "kernels/kernels.h"
#include "optim/redistribute.h"

/* ---- cutting ---- */

static void count_blocks(dc__partition *partition) {
  partition->numel = 1;
  partition->blocks = 1;
  for (int32_t d = 0; d < partition->order; d++) {
    partition->numel *= partition->shape[d];
    partition->blocks *= partition->shape[d] / partition->sides[d] + (partition->shape[d] % partition->sides[d] != 0);
  }
}

dc_status dc__partition_merged(const char *fn, const int64_t *shape, int32_t ndim, int64_t merge, int64_t side,
                               dc__partition *partition) {
  int64_t reversed[DC__ORDER_MAX] = {1};
  int32_t order = 0;
  int32_t longer = 0; /* dimensions longer than 1 that are still to visit */
  for (int32_t d = 0; d < ndim; d++) {
    longer += shape[d] != 1;
    if (shape[d] == 0) {
      dc__partition_whole(0, partition);
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
  partition->order = order > 0 ? order : 1;
  for (int32_t d = 0; d < partition->order; d++) {
    partition->shape[d] = reversed[partition->order - 1 - d];
    partition->sides[d] = side;
  }
  count_blocks(partition);
  return DC_OK;
}

void dc__partition_rows(const int64_t *shape, int32_t ndim, int64_t splits, dc__partition *partition) {
  int64_t cols = 1;
  for (int32_t d = 1; d < ndim; d++) {
    cols *= shape[d];
  }
  if (shape[0] == 0 || cols == 0) {
    dc__partition_whole(0, partition);
    return;
  }
  partition->order = 2;
  partition->shape[0] = shape[0];
  partition->shape[1] = partition->sides[1] = cols;
  partition->sides[0] = shape[0] / splits;
  count_blocks(partition);
}

void dc__partition_whole(int64_t numel, dc__partition *partition) {
  partition->order = 1;
  partition->shape[0] = numel;
  partition->sides[0] = numel > 0 ? numel : 1;
  count_blocks(partition);
}

void dc__partition_box(const dc__partition *partition, int64_t block, dc__box *box) {
  box->count = 1;
  for (int32_t d = partition->order - 1; d >= 0; d--) {
    int64_t pieces = partition->shape[d] / partition->sides[d] + (partition->shape[d] % partition->sides[d] != 0);
    box->begin[d] = block % pieces * partition->sides[d];
    block /= pieces;
    int64_t rest = partition->shape[d] - box->begin[d];
    box->size[d] = rest < partition->sides[d] ? rest : partition->sides[d];
    box->count *= box->size[d];
  }
}

/* ---- copying ---- */

_Static_assert((int)DC__ORDER_MAX <= (int)DC__CUDA_BOX_DIMS, "a box must fit a kernel's argument");

/* A block's runs: elements contiguous in block and parameter. */
typedef struct partition_runs {
  const dc__partition *partition;
  const dc__box *box;
  int64_t length;
  int32_t dims; /* dimensions before the run's */
  int64_t at[DC__ORDER_MAX];
} partition_runs;

static partition_runs partition_runs_of(const dc__partition *partition, const dc__box *box) {
  partition_runs r = {.partition = partition, .box = box, .length = 1, .dims = partition->order};
  bool full = true;
  while (r.dims > 0 && full) {
    r.dims--;
    r.length *= box->size[r.dims];
    full = box->size[r.dims] == partition->shape[r.dims];
  }
  return r;
}

/* The run's offset in the whole parameter. */
static int64_t run_begin(const partition_runs *r) {
  int64_t offset = 0;
  for (int32_t d = 0; d < r->partition->order; d++) {
    offset = offset * r->partition->shape[d] + r->box->begin[d] + (d < r->dims ? r->at[d] : 0);
  }
  return offset;
}

static void run_next(partition_runs *r) {
  for (int32_t d = r->dims - 1; d >= 0; d--) {
    if (++r->at[d] < r->box->size[d]) {
      return;
    }
    r->at[d] = 0;
  }
}

/* Copies elements [first, first + length) by a kernel, whose threads compute the elements' offsets. */
static void copy_box_cuda(dc_stream *stream, const dc__partition *partition, const dc__box *box, const float *block,
                          int64_t first, int64_t length, const float *part, bool unpack) {
  dc__cuda_box_copy_args args = {.count = box->count, .first = first, .length = length};
  args.block = (float *)(uintptr_t)block; /* read if `unpack`, else written */
  args.part = (float *)(uintptr_t)part;
  int64_t stride = 1;
  args.dims = partition->order;
  args.unpack = unpack;
  for (int32_t d = partition->order - 1; d >= 0; d--) {
    args.begin += box->begin[d] * stride;
    args.size[d] = box->size[d];
    args.stride[d] = stride;
    stride *= partition->shape[d];
  }
  dc__cuda_box_copy(stream, &args);
}

void dc__box_pack(dc_stream *stream, const dc__partition *partition, const dc__box *box, const float *whole,
                  float *block) {
  if (stream != NULL) {
    copy_box_cuda(stream, partition, box, block, 0, partition->numel, whole, false);
    return;
  }
  partition_runs r = partition_runs_of(partition, box);
  for (int64_t done = 0; done < box->count; done += r.length) {
    memcpy(block + done, whole + run_begin(&r), (size_t)r.length * sizeof *block);
    run_next(&r);
  }
}

void dc__box_unpack(dc_stream *stream, const dc__partition *partition, const dc__box *box, const float *block,
                    int64_t first, int64_t count, float *part) {
  if (stream != NULL) {
    copy_box_cuda(stream, partition, box, block, first, count, part, true);
    return;
  }
  partition_runs r = partition_runs_of(partition, box);
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

static bool is_costlier(const double *costs, int64_t a, int64_t b) {
  return costs[a] > costs[b] || (!(costs[a] < costs[b]) && a < b);
}

/* Sifts node `at` down in a heap whose root is the cheapest item. */
static void sift_down(const double *costs, int64_t *order, int64_t at, int64_t count) {
  int64_t child;
  while ((child = 2 * at + 1) < count) {
    if (child + 1 < count && is_costlier(costs, order[child], order[child + 1])) {
      child++;
    }
    if (!is_costlier(costs, order[at], order[child])) {
      return;
    }
    int64_t swap = order[at];
    order[at] = order[child];
    order[child] = swap;
    at = child;
  }
}

/* Heapsort: the same result with every C library, and no memory. */
static void sort_by_cost(const double *costs, int64_t *order, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    order[i] = i;
  }
  for (int64_t i = count / 2 - 1; i >= 0; i--) {
    sift_down(costs, order, i, count);
  }
  for (int64_t end = count - 1; end > 0; end--) {
    int64_t swap = order[0];
    order[0] = order[end];
    order[end] = swap;
    sift_down(costs, order, 0, end);
  }
}

void dc__assign_owners(const double *costs, int64_t count, int32_t world, double *load, int64_t *order,
                       int32_t *owners) {
  sort_by_cost(costs, order, count);
  for (int64_t i = 0; i < count; i++) {
    int32_t lightest = 0;
    for (int32_t r = 1; r < world; r++) {
      lightest = load[r] < load[lightest] ? r : lightest;
    }
    owners[order[i]] = lightest;
    load[lightest] += costs[order[i]];
  }
}
