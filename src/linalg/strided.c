/* The caller's tensors as matrices with strides. */
#include <float.h>
#include <inttypes.h>
#include <string.h>

#include "linalg/linalg.h"

double dc__epsilon(int32_t dtype) {
  return dtype == DC_FLOAT64 ? DBL_EPSILON : FLT_EPSILON;
}

dc_status dc__mat_check_real(const char *fn, const char *arg, int32_t dtype) {
  return dtype == DC_FLOAT32 || dtype == DC_FLOAT64
             ? DC_OK
             : dc__fail(DC_E_DTYPE, "%s: %s is %s, must be float32 or float64", fn, arg, dc_dtype_name(dtype));
}

dc_status dc__mat_check_dtype(const char *fn, const char *arg, int32_t dtype, const char *other, int32_t wanted) {
  return dtype == wanted ? DC_OK
                         : dc__fail(DC_E_DTYPE, "%s: %s is %s, must be %s as %s", fn, arg, dc_dtype_name(dtype),
                                    dc_dtype_name(wanted), other);
}

/* Sets the stride of a dimension of length 0 or 1 to the one that makes the matrix dense. */
static void normalise_strides(dc__mat *m) {
  bool by_rows = m->col_stride == 1 || m->cols <= 1;
  if (by_rows) {
    m->col_stride = 1;
    if (m->rows <= 1 || m->cols == 0) {
      m->row_stride = m->cols > 0 ? m->cols : 1;
    }
  } else if (m->row_stride == 1 || m->rows <= 1) {
    m->row_stride = 1;
  }
  if (m->batch <= 1) {
    m->batch_stride = 0;
  }
}

static bool mat_is_dense(const dc__mat *m) {
  return (m->col_stride == 1 && m->row_stride >= m->cols) || (m->row_stride == 1 && m->col_stride >= m->rows);
}

static bool mat_is_contiguous(const dc__mat *m) {
  return m->rows * m->cols == 0 ||
         (m->col_stride == 1 && m->row_stride == m->cols && (m->batch <= 1 || m->batch_stride == m->rows * m->cols));
}

dc_status dc__mat_read(const char *fn, const char *arg, const dc_tensor *tensor, int32_t layout, dc__mat *mat) {
  dc_tensor t = DC_TENSOR_INIT;
  int64_t count;
  if (tensor == NULL) {
    return dc__fail(DC_E_INVALID, "%s: %s is NULL", fn, arg);
  }
  DC__TRY(dc__read_options(fn, arg, &t, sizeof t, tensor, DC__TENSOR_SIZE_0_1));
  DC__TRY(dc__numel(fn, arg, t.shape, t.ndim, &count));
  if (dc_dtype_size(t.dtype) == 0) {
    return dc__fail(DC_E_DTYPE, "%s: %s.dtype = %" PRId32 " is no element type", fn, arg, t.dtype);
  }
  if (t.ndim != 2 && t.ndim != 3) {
    return dc__fail(DC_E_SHAPE, "%s: %s has %" PRId32 " dimension%s, must have 2, or 3 for a batch", fn, arg, t.ndim,
                    DC__PLURAL_S(t.ndim));
  }
  if (t.data == NULL && count > 0) {
    return dc__fail(DC_E_INVALID, "%s: %s.data is NULL, but it has %" PRId64 " element%s", fn, arg, count,
                    DC__PLURAL_S(count));
  }
  int64_t rows = t.shape[t.ndim - 2];
  int64_t cols = t.shape[t.ndim - 1];
  dc__mat m = {.data = t.data,
               .dtype = t.dtype,
               .batch = t.ndim == 3 ? t.shape[0] : 1,
               .rows = rows,
               .cols = cols,
               .batch_stride = rows * cols,
               .row_stride = cols,
               .col_stride = 1,
               .batched = t.ndim == 3};
  if (t.strides != NULL) {
    m.batch_stride = t.ndim == 3 ? t.strides[0] : 0;
    m.row_stride = t.strides[t.ndim - 2];
    m.col_stride = t.strides[t.ndim - 1];
  }
  normalise_strides(&m);
  if (layout == DC__MAT_OUT && !mat_is_contiguous(&m)) {
    return dc__fail(DC_E_SHAPE, "%s: %s is not contiguous; row-major strides are needed", fn, arg);
  }
  if (layout == DC__MAT_GEMM && !mat_is_dense(&m) && count > 0) {
    return dc__fail(DC_E_SHAPE,
                    "%s: %s has strides %" PRId64 " and %" PRId64
                    "; one must be 1, and the other at least "
                    "the length of the first's dimension",
                    fn, arg, m.row_stride, m.col_stride);
  }
  *mat = m;
  return DC_OK;
}

dc_status dc__mat_read_as(const char *fn, const char *arg, const dc_tensor *tensor, int32_t dtype, const int64_t *shape,
                          int32_t ndim, dc_tensor *read) {
  int64_t count;
  DC__TRY(dc__tensor_read(fn, arg, tensor, false, read, &count));
  DC__TRY(dc__mat_check_dtype(fn, arg, read->dtype, "the others", dtype));
  if (read->ndim != ndim) {
    return dc__fail(DC_E_SHAPE, "%s: %s has %" PRId32 " dimension%s, must have %" PRId32, fn, arg, read->ndim,
                    DC__PLURAL_S(read->ndim), ndim);
  }
  for (int32_t i = 0; i < ndim; i++) {
    if (read->shape[i] != shape[i]) {
      return dc__fail(DC_E_SHAPE, "%s: %s has length %" PRId64 " in dimension %" PRId32 ", must be %" PRId64, fn, arg,
                      read->shape[i], i, shape[i]);
    }
  }
  return DC_OK;
}

static void mat_gemm_operand(const dc__mat *m, bool *transposed, int64_t *stride) {
  *transposed = m->col_stride != 1;
  *stride = *transposed ? m->col_stride : m->row_stride;
}

dc__gemm dc__mat_gemm(const dc__mat *a, const dc__mat *b, double alpha, double beta, const dc__mat *out) {
  dc__gemm g = {.dtype = a->dtype,
                .out_dtype = out->dtype,
                .m = out->rows,
                .n = out->cols,
                .k = a->cols,
                .a = a->data,
                .b = b->data,
                .c = out->data,
                .ldc = out->row_stride,
                .batch = out->batch,
                .stride_a = a->batch_stride,
                .stride_b = b->batch_stride,
                .stride_c = out->batch_stride,
                .alpha = alpha,
                .beta = beta};
  mat_gemm_operand(a, &g.trans_a, &g.lda);
  mat_gemm_operand(b, &g.trans_b, &g.ldb);
  g.a = g.a != NULL ? g.a : out->data; /* an empty operand is never read, but offsets are added to its pointer */
  g.b = g.b != NULL ? g.b : out->data;
  return g;
}
