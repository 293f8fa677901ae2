/* Chapter 13: handles, and what all its entry points check. */
#include "api/linalg/linalg_api.h"

#include <inttypes.h>
#include <stdlib.h>

/* The size of the struct in the version that introduced it; frozen from then on. */
enum { LINALG_OPTIONS_SIZE_0_1 = 16 };

_Static_assert(sizeof(void *) != 8 || sizeof(dc_linalg_options) >= LINALG_OPTIONS_SIZE_0_1, "0.1");

void dc_linalg_options_init(dc_linalg_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

/* ---- entering ---- */

static void linalg_lock(dc_linalg *l) {
  pthread_mutex_lock(&l->mutex);
  dc__device_begin(l->device);
}

static dc_status linalg_check_handle(const dc_linalg *l, const char *fn) {
  DC__TRY(dc__handle_check(fn, "linalg", l, DC__HANDLE_LINALG));
  return dc__owner_check(fn, "handle", &l->device->owner);
}

dc_status dc__linalg_enter(dc_linalg *linalg, const char *fn) {
  DC__TRY(linalg_check_handle(linalg, fn));
  linalg_lock(linalg);
  return DC_OK;
}

dc_status dc__linalg_enter_compute(dc_linalg *linalg, const char *fn) {
  DC__TRY(linalg_check_handle(linalg, fn));
  DC__TRY(dc__linalg_check_gemm(linalg, fn));
  linalg_lock(linalg);
  return DC_OK;
}

dc_status dc__linalg_leave(dc_linalg *linalg, dc_status status) {
  dc__device_end(linalg->device);
  pthread_mutex_unlock(&linalg->mutex);
  return status;
}

/* ---- handles ---- */

dc_status dc_linalg_create(dc_device *device, const dc_linalg_options *options, dc_linalg **linalg) {
  DC__WITHOUT_TRAPS;
  if (linalg == NULL) {
    return dc__fail(DC_E_INVALID, "%s: linalg is NULL", __func__);
  }
  *linalg = NULL;
  DC__TRY(dc__handle_check(__func__, "device", device, DC__HANDLE_DEVICE));
  DC__TRY(dc__owner_check(__func__, "device", &device->owner));
  dc_linalg_options read = DC_LINALG_OPTIONS_INIT;
  DC__TRY(dc__read_options(__func__, "options", &read, sizeof read, options, LINALG_OPTIONS_SIZE_0_1));
  if (read.plain != 0 && read.plain != 1) {
    return dc__fail(DC_E_INVALID, "%s: options.plain = %" PRId32 ", must be 0 or 1", __func__, read.plain);
  }
  dc_status status = dc__linalg_create(device, &read, linalg);
  return status == DC_OK ? DC_OK : dc__fail(status, "%s: %s", __func__, dc_last_error());
}

void dc_linalg_destroy(dc_linalg *linalg) {
  DC__WITHOUT_TRAPS;
  if (dc__handle_is(linalg, DC__HANDLE_LINALG) && !dc__owner_is_forked(&linalg->device->owner)) {
    dc__linalg_destroy(linalg);
  }
}

const char *dc_linalg_solver(const dc_linalg *linalg) {
  return dc__handle_is(linalg, DC__HANDLE_LINALG) ? linalg->solver : "";
}

static dc_status begin_query(const char *fn, dc_linalg *l) {
  if (l->query) {
    return dc__fail(DC_E_STATE, "%s: a query has begun and not ended", fn);
  }
  l->query = true;
  l->query_bytes = 0;
  return DC_OK;
}

dc_status dc_linalg_begin_query(dc_linalg *linalg) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter(linalg, __func__));
  return dc__linalg_leave(linalg, begin_query(__func__, linalg));
}

static dc_status end_query(const char *fn, dc_linalg *l, int64_t *bytes) {
  if (bytes == NULL) {
    return dc__fail(DC_E_INVALID, "%s: bytes is NULL", fn);
  }
  if (!l->query) {
    return dc__fail(DC_E_STATE, "%s: no query has begun", fn);
  }
  l->query = false;
  *bytes = (int64_t)l->query_bytes;
  return DC_OK;
}

dc_status dc_linalg_end_query(dc_linalg *linalg, int64_t *bytes) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter(linalg, __func__));
  return dc__linalg_leave(linalg, end_query(__func__, linalg, bytes));
}

static dc_status set_workspace(const char *fn, dc_linalg *l, void *memory, int64_t bytes) {
  if ((memory == NULL) != (bytes == 0) || bytes < 0 || (uintptr_t)memory % 64 != 0) {
    return dc__fail(DC_E_INVALID,
                    "%s: memory = %p of %" PRId64 " bytes, must be 64-byte aligned and not empty, or NULL of 0", fn,
                    memory, bytes);
  }
  l->user_workspace = memory;
  l->user_workspace_bytes = (size_t)bytes;
  return DC_OK;
}

dc_status dc_linalg_set_workspace(dc_linalg *linalg, void *memory, int64_t bytes) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter(linalg, __func__));
  return dc__linalg_leave(linalg, set_workspace(__func__, linalg, memory, bytes));
}

/* ---- what all entry points of the chapter check ---- */

dc_status dc__check_length(const char *fn, const char *arg, const char *what, int64_t length, int64_t wanted) {
  return length == wanted
             ? DC_OK
             : dc__fail(DC_E_SHAPE, "%s: %s has %" PRId64 " %s, must have %" PRId64, fn, arg, length, what, wanted);
}

dc_status dc__check_matrix(const char *fn, const char *arg, const dc__mat *mat, int64_t batch, int64_t rows,
                           int64_t cols) {
  DC__TRY(dc__check_length(fn, arg, "rows", mat->rows, rows));
  DC__TRY(dc__check_length(fn, arg, "columns", mat->cols, cols));
  if (batch < 0) {
    return mat->batched ? dc__fail(DC_E_SHAPE, "%s: %s has 3 dimensions, must have 2", fn, arg) : DC_OK;
  }
  return dc__check_length(fn, arg, "matrices", mat->batch, batch);
}

dc_status dc__read_matrix(const dc_linalg *l, const char *fn, const char *arg, const dc_tensor *tensor, int32_t layout,
                          dc__mat *mat) {
  DC__TRY(dc__mat_read(fn, arg, tensor, layout, mat));
  return dc__linalg_check_alignment(l, fn, arg, mat->data, mat->dtype);
}

dc_status dc__read_vector(const dc_linalg *l, const char *fn, const char *arg, const dc_tensor *tensor, int32_t dtype,
                          const int64_t *shape, int32_t ndim, void **data) {
  dc_tensor read;
  DC__TRY(dc__mat_read_as(fn, arg, tensor, dtype, shape, ndim, &read));
  *data = read.data;
  return dc__linalg_check_alignment(l, fn, arg, read.data, dtype);
}

dc_status dc__read_output(const dc_linalg *l, const char *fn, const char *arg, const dc_tensor *tensor, int32_t dtype,
                          const dc__mat *like, dc__mat *out) {
  DC__TRY(dc__read_matrix(l, fn, arg, tensor, DC__MAT_OUT, out));
  DC__TRY(dc__mat_check_dtype(fn, arg, out->dtype, "a", dtype));
  if (out->batched != like->batched) {
    return dc__fail(DC_E_SHAPE, "%s: %s has %d dimensions, must have %d", fn, arg, out->batched ? 3 : 2,
                    like->batched ? 3 : 2);
  }
  return dc__check_matrix(fn, arg, out, like->batch, like->rows, like->cols);
}

/* The address of the element at offset i, which may be negative. */
static uintptr_t address_of(const dc__mat *m, int64_t i) {
  return (uintptr_t)m->data + (uintptr_t)i * dc_dtype_size(m->dtype);
}

/* Whether the memory from the first to the last of `count` elements, `stride` apart, overlaps [begin, end). */
static bool run_touches(const dc__mat *in, int64_t first, int64_t stride, int64_t count, uintptr_t begin,
                        uintptr_t end) {
  const int64_t last = first + (count - 1) * stride;
  const uintptr_t low = address_of(in, first < last ? first : last);
  const uintptr_t high = address_of(in, (first < last ? last : first) + 1);
  return low < end && begin < high;
}

/* Whether the memory from the lowest to the highest element of a matrix overlaps [begin, end). */
static bool span_touches(const dc__mat *in, uintptr_t begin, uintptr_t end) {
  const int64_t steps[3] = {(in->batch - 1) * in->batch_stride, (in->rows - 1) * in->row_stride,
                            (in->cols - 1) * in->col_stride};
  int64_t low = 0, high = 0;
  for (int i = 0; i < 3; i++) {
    *(steps[i] < 0 ? &low : &high) += steps[i];
  }
  return run_touches(in, low, high - low, 2, begin, end);
}

/* Checks line by line, so that an output between the rows of an input does not count as an overlap. */
dc_status dc__check_apart(const dc_linalg *l, const char *fn, const char *out_arg, const dc__mat *out, const char *arg,
                          const dc__mat *in) {
  const int64_t numel = out->batch * out->rows * out->cols;
  const bool by_rows = in->cols > 1 && (in->rows == 1 || llabs(in->col_stride) <= llabs(in->row_stride));
  const int64_t lines = by_rows ? in->rows : in->cols;
  const int64_t line = by_rows ? in->cols : in->rows;
  if (l->query || numel == 0 || lines == 0 || line == 0 || in->batch == 0) {
    return DC_OK;
  }
  const uintptr_t begin = (uintptr_t)out->data;
  const uintptr_t end = address_of(out, numel);
  if (!span_touches(in, begin, end)) {
    return DC_OK;
  }
  for (int64_t b = 0; b < (in->batch_stride == 0 ? 1 : in->batch); b++) {
    for (int64_t i = 0; i < lines; i++) {
      const int64_t first = by_rows ? dc__mat_offset(in, b, i, 0) : dc__mat_offset(in, b, 0, i);
      if (run_touches(in, first, by_rows ? in->col_stride : in->row_stride, line, begin, end)) {
        return dc__fail(DC_E_INVALID, "%s: %s, which is written, overlaps %s", fn, out_arg, arg);
      }
    }
  }
  return DC_OK;
}

dc__mat dc__elements(const void *data, int32_t dtype, int64_t count) {
  return (dc__mat){.data = (void *)(uintptr_t)data,
                   .dtype = dtype,
                   .batch = 1,
                   .rows = 1,
                   .cols = data == NULL ? 0 : count,
                   .row_stride = 1,
                   .col_stride = 1};
}
