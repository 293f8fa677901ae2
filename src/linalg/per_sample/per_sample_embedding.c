/* Embeddings and embedding bags: a sample's gradient is delta's rows, added up by index. */
#include <inttypes.h>
#include <string.h>

#include "linalg/per_sample/per_sample.h"

enum { BLOCK = 32 }; /* columns summed together */

static int64_t index_at(const dc__per_sample *s, int64_t place) {
  return s->x_dtype == DC_INT64 ? ((const int64_t *)s->x)[place] : ((const int32_t *)s->x)[place];
}

static bool is_not_padding(const dc__per_sample *s, int64_t id) {
  return s->layer.has_padding_row == 0 || id != s->layer.padding_row;
}

/* delta's row for a position; all positions of a bag share one. */
static int64_t embedding_row(const dc__per_sample *s, int64_t place) {
  return dc__is_embedding_bag(s->layer.kind) ? place / s->positions : place;
}

/* The factor of a sample's rows: for a mean 1 over the number of positions that are not padding, otherwise 1. */
static double mean_weight(const dc__per_sample *s, int64_t sample) {
  int64_t count = 0;
  for (int64_t t = sample * s->positions; s->layer.kind == DC_SAMPLE_BAG_MEAN && t < (sample + 1) * s->positions; t++) {
    count += is_not_padding(s, index_at(s, t));
  }
  return count > 0 ? 1 / (double)count : 1;
}

static dc_status check_indices(const dc__per_sample *s) {
  for (int64_t i = 0; i < s->samples * s->positions; i++) {
    int64_t id = index_at(s, i);
    if (id < 0 || id >= s->in) {
      return dc__fail(DC_E_INVALID, "%s: x[%" PRId64 "][%" PRId64 "] = %" PRId64 ", must be 0 to %" PRId64, s->fn,
                      i / s->positions, i % s->positions, id, s->in - 1);
    }
  }
  return DC_OK;
}

dc_status dc__per_sample_embedding_check(dc_linalg *l, const dc__per_sample *s) {
  const size_t bytes = (size_t)(s->samples * s->positions) * dc_dtype_size(s->x_dtype);
  dc__per_sample on_host = *s;
  if (!dc__linalg_is_cuda(l) || bytes == 0) {
    return check_indices(s);
  }
  void *host = dc__calloc(1, bytes);
  if (host == NULL) {
    return DC_E_NO_MEMORY;
  }
  on_host.x = host;
  dc_status status = dc__linalg_copy_to_host(l, host, s->x, bytes);
  status = status == DC_OK ? check_indices(&on_host) : status;
  dc__free(host);
  return status;
}

/* Adds columns [begin, end) of factor * delta's row to row `row` of the table. */
static void add_delta_row(const dc__per_sample *s, void *table, int64_t row, int64_t place, double factor,
                          int64_t begin, int64_t end) {
  bool wide = s->dtype == DC_FLOAT64;
  int64_t from = embedding_row(s, place) * s->out;
  for (int64_t i = begin; i < end; i++) {
    double sum = dc__load_element(table, wide, row * s->out + i) + factor * dc__load_element(s->delta, wide, from + i);
    dc__store_element(table, wide, row * s->out + i, sum);
  }
}

typedef struct embedding_job {
  const dc__per_sample *s;
  dc__slots slots;
  void *weight, *squares;
  const void *factors;
  bool accumulate;
} embedding_job;

static void embedding_grads_of(void *arg, int64_t sample, void *scratch) {
  (void)scratch;
  const embedding_job *job = arg;
  const dc__per_sample *s = job->s;
  void *table = dc__element_ptr(job->weight, s->dtype, sample * s->in * s->out);
  double share = mean_weight(s, sample);
  memset(table, 0, (size_t)(s->in * s->out) * dc_dtype_size(s->dtype));
  for (int64_t t = sample * s->positions; t < (sample + 1) * s->positions; t++) {
    if (is_not_padding(s, index_at(s, t))) {
      add_delta_row(s, table, index_at(s, t), t, share, 0, s->out);
    }
  }
}

dc_status dc__per_sample_embedding_grads(dc_linalg *l, const dc__per_sample *s, void *weight) {
  embedding_job job = {.s = s, .weight = weight};
  if (!l->query && weight != NULL) {
    dc__parallel_for(l->pool, s->samples, embedding_grads_of, &job);
  }
  return DC_OK;
}

/* ---- norms: positions sorted by index, so that equal indices are adjacent ---- */

static bool id_less(const dc__per_sample *s, int64_t a, int64_t b) {
  int64_t id_a = index_at(s, a);
  int64_t id_b = index_at(s, b);
  return id_a != id_b ? id_a < id_b : a < b;
}

static void sift_positions(const dc__per_sample *s, int64_t *heap, int64_t root, int64_t count) {
  for (int64_t child; (child = 2 * root + 1) < count; root = child) {
    child += child + 1 < count && id_less(s, heap[child], heap[child + 1]);
    if (!id_less(s, heap[root], heap[child])) {
      return;
    }
    int64_t swap = heap[root];
    heap[root] = heap[child];
    heap[child] = swap;
  }
}

static void sort_positions(const dc__per_sample *s, int64_t *sorted, int64_t count) {
  for (int64_t i = count / 2 - 1; i >= 0; i--) {
    sift_positions(s, sorted, i, count);
  }
  for (int64_t end = count - 1; end > 0; end--) {
    int64_t swap = sorted[0];
    sorted[0] = sorted[end];
    sorted[end] = swap;
    sift_positions(s, sorted, 0, end);
  }
}

static void embedding_norm_of(void *arg, int64_t sample, void *scratch) {
  (void)scratch;
  embedding_job *job = arg;
  const dc__per_sample *s = job->s;
  bool wide = s->dtype == DC_FLOAT64;
  int64_t slot = dc__slots_acquire(&job->slots);
  int64_t *sorted = dc__slots_memory(&job->slots, slot);
  for (int64_t t = 0; t < s->positions; t++) {
    sorted[t] = sample * s->positions + t;
  }
  sort_positions(s, sorted, s->positions);
  double share = mean_weight(s, sample);
  double square = 0;
  for (int64_t begin = 0, end; begin < s->positions; begin = end) {
    int64_t id = index_at(s, sorted[begin]);
    for (end = begin + 1; end < s->positions && index_at(s, sorted[end]) == id;) {
      end++;
    }
    for (int64_t i = 0; i < s->out && is_not_padding(s, id); i++) {
      double sum = 0;
      for (int64_t t = begin; t < end; t++) {
        sum += share * dc__load_element(s->delta, wide, embedding_row(s, sorted[t]) * s->out + i);
      }
      square += sum * sum;
    }
  }
  dc__store_squared_norm(s, job->squares, sample, square, job->accumulate);
  dc__slots_release(&job->slots, slot);
}

dc_status dc__per_sample_embedding_norms(dc_linalg *l, const dc__per_sample *s, bool accumulate, void *squares) {
  embedding_job job = {.s = s, .squares = squares, .accumulate = accumulate};
  size_t slot = 0;
  size_t total = 0;
  void *memory;
  if (!dc__linalg_add_bytes(&slot, s->positions, sizeof(int64_t)) ||
      !dc__slots_plan(&job.slots, l, s->samples, slot, &total)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold a sample's indices", s->fn);
  }
  DC__TRY(dc__linalg_scratch(l, s->fn, total, &memory));
  if (memory != NULL) {
    size_t offset = 0;
    dc__slots_init(&job.slots, memory, &offset);
    dc__parallel_for(l->pool, s->samples, embedding_norm_of, &job);
  }
  return DC_OK;
}

/* ---- sums: each task has its own columns, so the order of additions is fixed ---- */

static void embedding_sum_columns(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const embedding_job *job = arg;
  const dc__per_sample *s = job->s;
  int64_t begin = index * BLOCK;
  int64_t end = begin + BLOCK < s->out ? begin + BLOCK : s->out;
  for (int64_t row = 0; row < s->in && !job->accumulate; row++) {
    memset(dc__element_ptr(job->weight, s->dtype, row * s->out + begin), 0,
           (size_t)(end - begin) * dc_dtype_size(s->dtype));
  }
  for (int64_t sample = 0; sample < s->samples; sample++) {
    double factor = dc__per_sample_factor(s, job->factors, sample) * mean_weight(s, sample);
    for (int64_t t = sample * s->positions; factor != 0 && t < (sample + 1) * s->positions; t++) {
      if (is_not_padding(s, index_at(s, t))) {
        add_delta_row(s, job->weight, index_at(s, t), t, factor, begin, end);
      }
    }
  }
}

dc_status dc__per_sample_embedding_sum(dc_linalg *l, const dc__per_sample *s, const void *factors, bool accumulate,
                                       void *weight) {
  embedding_job job = {.s = s, .factors = factors, .accumulate = accumulate, .weight = weight};
  if (!l->query && weight != NULL) {
    dc__parallel_for(l->pool, (s->out + BLOCK - 1) / BLOCK, embedding_sum_columns, &job);
  }
  return DC_OK;
}
