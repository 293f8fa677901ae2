/* Embeddings, and bags of them: a sample's gradient is delta's rows, added up by index. */
#include <inttypes.h>
#include <string.h>

#include "linalg/sample.h"

enum { BLOCK = 32 }; /* columns that are summed together */

static int64_t id_of(const dc__sample *s, int64_t place) {
  return s->x_dtype == DC_INT64 ? ((const int64_t *)s->x)[place] : ((const int32_t *)s->x)[place];
}

static bool counts(const dc__sample *s, int64_t id) {
  return id != s->layer.padding_row - 1;
}

/* delta's row for a place: a bag has one for all of its places. */
static int64_t row_of(const dc__sample *s, int64_t place) {
  return dc__is_bag(s->layer.kind) ? place / s->positions : place;
}

/* What a row counts in a sample: in a mean, one over the number of those that count. */
static double share_of(const dc__sample *s, int64_t sample) {
  int64_t count = 0;
  for (int64_t t = sample * s->positions; s->layer.kind == DC_SAMPLE_BAG_MEAN && t < (sample + 1) * s->positions; t++) {
    count += counts(s, id_of(s, t));
  }
  return count > 0 ? 1 / (double)count : 1;
}

static dc_status check_here(const dc__sample *s) {
  for (int64_t i = 0; i < s->samples * s->positions; i++) {
    int64_t id = id_of(s, i);
    if (id < 0 || id >= s->in) {
      return dc__fail(DC_E_INVALID, "%s: x[%" PRId64 "][%" PRId64 "] = %" PRId64 ", must be 0 to %" PRId64, s->fn,
                      i / s->positions, i % s->positions, id, s->in - 1);
    }
  }
  return DC_OK;
}

dc_status dc__embedding_check(dc_linalg *l, const dc__sample *s) {
  const size_t bytes = (size_t)(s->samples * s->positions) * dc_dtype_size(s->x_dtype);
  dc__sample brought = *s;
  if (!dc__linalg_is_there(l) || bytes == 0) {
    return check_here(s);
  }
  void *here = dc__calloc(1, bytes);
  if (here == NULL) {
    return DC_E_NO_MEMORY;
  }
  brought.x = here;
  dc_status status = dc__linalg_bring(l, here, s->x, bytes);
  status = status == DC_OK ? check_here(&brought) : status;
  dc__free(here);
  return status;
}

/* row += factor * delta's row, columns [begin, end). */
static void add_row(const dc__sample *s, void *table, int64_t row, int64_t place, double factor, int64_t begin,
                    int64_t end) {
  bool wide = s->dtype == DC_FLOAT64;
  int64_t from = row_of(s, place) * s->out;
  for (int64_t i = begin; i < end; i++) {
    double sum = dc__get(table, wide, row * s->out + i) + factor * dc__get(s->delta, wide, from + i);
    dc__put(table, wide, row * s->out + i, sum);
  }
}

typedef struct embedding_job {
  const dc__sample *s;
  dc__slots slots;
  void *weight, *squares;
  const void *factors;
  bool accumulate;
} embedding_job;

static void grads_of(void *arg, int64_t sample, void *scratch) {
  (void)scratch;
  const embedding_job *job = arg;
  const dc__sample *s = job->s;
  void *table = dc__element(job->weight, s->dtype, sample * s->in * s->out);
  double share = share_of(s, sample);
  memset(table, 0, (size_t)(s->in * s->out) * dc_dtype_size(s->dtype));
  for (int64_t t = sample * s->positions; t < (sample + 1) * s->positions; t++) {
    if (counts(s, id_of(s, t))) {
      add_row(s, table, id_of(s, t), t, share, 0, s->out);
    }
  }
}

dc_status dc__embedding_grads(dc_linalg *l, const dc__sample *s, void *weight) {
  embedding_job job = {.s = s, .weight = weight};
  if (!l->query && weight != NULL) {
    dc__parallel(l->pool, s->samples, grads_of, &job);
  }
  return DC_OK;
}

/* ---- norms: places sorted by index, so that equal ones are neighbours ---- */

static bool before(const dc__sample *s, int64_t a, int64_t b) {
  int64_t id_a = id_of(s, a);
  int64_t id_b = id_of(s, b);
  return id_a != id_b ? id_a < id_b : a < b;
}

static void sift(const dc__sample *s, int64_t *heap, int64_t root, int64_t count) {
  for (int64_t child; (child = 2 * root + 1) < count; root = child) {
    child += child + 1 < count && before(s, heap[child], heap[child + 1]);
    if (!before(s, heap[root], heap[child])) {
      return;
    }
    int64_t swap = heap[root];
    heap[root] = heap[child];
    heap[child] = swap;
  }
}

static void sort_places(const dc__sample *s, int64_t *places, int64_t count) {
  for (int64_t i = count / 2 - 1; i >= 0; i--) {
    sift(s, places, i, count);
  }
  for (int64_t end = count - 1; end > 0; end--) {
    int64_t swap = places[0];
    places[0] = places[end];
    places[end] = swap;
    sift(s, places, 0, end);
  }
}

static void norm_of(void *arg, int64_t sample, void *scratch) {
  (void)scratch;
  embedding_job *job = arg;
  const dc__sample *s = job->s;
  bool wide = s->dtype == DC_FLOAT64;
  int64_t slot = dc__slots_take(&job->slots);
  int64_t *places = dc__slots_memory(&job->slots, slot);
  for (int64_t t = 0; t < s->positions; t++) {
    places[t] = sample * s->positions + t;
  }
  sort_places(s, places, s->positions);
  double share = share_of(s, sample);
  double square = 0;
  for (int64_t begin = 0, end; begin < s->positions; begin = end) {
    int64_t id = id_of(s, places[begin]);
    for (end = begin + 1; end < s->positions && id_of(s, places[end]) == id;) {
      end++;
    }
    for (int64_t i = 0; i < s->out && counts(s, id); i++) {
      double sum = 0;
      for (int64_t t = begin; t < end; t++) {
        sum += share * dc__get(s->delta, wide, row_of(s, places[t]) * s->out + i);
      }
      square += sum * sum;
    }
  }
  dc__put_square(s, job->squares, sample, square, job->accumulate);
  dc__slots_give(&job->slots, slot);
}

dc_status dc__embedding_norms(dc_linalg *l, const dc__sample *s, bool accumulate, void *squares) {
  embedding_job job = {.s = s, .squares = squares, .accumulate = accumulate};
  size_t slot = 0;
  size_t total = 0;
  void *memory;
  if (!dc__linalg_add(&slot, s->positions, sizeof(int64_t)) ||
      !dc__slots_plan(&job.slots, l, s->samples, slot, &total)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold a sample's indices", s->fn);
  }
  DC__TRY(dc__linalg_scratch(l, s->fn, total, &memory));
  if (memory != NULL) {
    size_t offset = 0;
    dc__slots_place(&job.slots, memory, &offset);
    dc__parallel(l->pool, s->samples, norm_of, &job);
  }
  return DC_OK;
}

/* ---- sums: each piece of work has its own columns, so the order of additions is fixed ---- */

static void sum_columns(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const embedding_job *job = arg;
  const dc__sample *s = job->s;
  int64_t begin = index * BLOCK;
  int64_t end = begin + BLOCK < s->out ? begin + BLOCK : s->out;
  for (int64_t row = 0; row < s->in && !job->accumulate; row++) {
    memset(dc__element(job->weight, s->dtype, row * s->out + begin), 0,
           (size_t)(end - begin) * dc_dtype_size(s->dtype));
  }
  for (int64_t sample = 0; sample < s->samples; sample++) {
    double factor = dc__factor(s, job->factors, sample) * share_of(s, sample);
    for (int64_t t = sample * s->positions; factor != 0 && t < (sample + 1) * s->positions; t++) {
      if (counts(s, id_of(s, t))) {
        add_row(s, job->weight, id_of(s, t), t, factor, begin, end);
      }
    }
  }
}

dc_status dc__embedding_sum(dc_linalg *l, const dc__sample *s, const void *factors, bool accumulate, void *weight) {
  embedding_job job = {.s = s, .factors = factors, .accumulate = accumulate, .weight = weight};
  if (!l->query && weight != NULL) {
    dc__parallel(l->pool, (s->out + BLOCK - 1) / BLOCK, sum_columns, &job);
  }
  return DC_OK;
}
