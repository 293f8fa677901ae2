/* Element types, and reading and writing the caller's tensor views. */
#include <inttypes.h>
#include <string.h>

#include "base/base.h"

static const struct {
  const char *name;
  uint8_t size;
  bool is_float;
  bool castable;
} dtypes[] = {
    [DC_DTYPE_NONE] = {"none", 0, false, false}, [DC_FLOAT32] = {"float32", 4, true, true},
    [DC_FLOAT64] = {"float64", 8, true, true},   [DC_FLOAT16] = {"float16", 2, true, true},
    [DC_BFLOAT16] = {"bfloat16", 2, true, true}, [DC_INT8] = {"int8", 1, false, true},
    [DC_INT32] = {"int32", 4, false, true},      [DC_INT64] = {"int64", 8, false, true},
    [DC_UINT8] = {"uint8", 1, false, false},     [DC_INT16] = {"int16", 2, false, false},
    [DC_BOOL] = {"bool", 1, false, false},
};

static bool dtype_is_known(int32_t dtype) {
  return dtype >= 0 && dtype < (int32_t)DC__COUNT(dtypes);
}

size_t dc_dtype_size(int32_t dtype) {
  return dtype_is_known(dtype) ? dtypes[dtype].size : 0;
}

const char *dc_dtype_name(int32_t dtype) {
  return dtype_is_known(dtype) ? dtypes[dtype].name : "unknown";
}

bool dc__dtype_is_float(int32_t dtype) {
  return dtype_is_known(dtype) && dtypes[dtype].is_float;
}

bool dc__dtype_is_castable(int32_t dtype) {
  return dtype_is_known(dtype) && dtypes[dtype].castable;
}

bool dc__dtype_can_represent(int32_t wide, int32_t narrow) {
  return wide == narrow ||
         (dc__dtype_is_float(wide) == dc__dtype_is_float(narrow) && dc_dtype_size(wide) > dc_dtype_size(narrow));
}

void dc_tensor_init(dc_tensor *tensor, size_t struct_size) {
  dc__init_sized(tensor, struct_size, sizeof *tensor);
}

dc_status dc__numel(const char *function, const char *argument, const int64_t *shape, int32_t ndim, int64_t *numel) {
  if (ndim < 0 || ndim > 64) {
    return dc__fail(DC_E_INVALID, "%s: %s has %" PRId32 " dimensions, must be 0 to 64", function, argument, ndim);
  }
  if (ndim > 0 && shape == NULL) {
    return dc__fail(DC_E_INVALID, "%s: %s has %" PRId32 " dimension%s, but its shape is NULL", function, argument, ndim,
                    DC__PLURAL_S(ndim));
  }
  int64_t product = 1; /* of all lengths but 0, since later code multiplies an empty tensor's other lengths too */
  bool empty = false;
  for (int32_t i = 0; i < ndim; i++) {
    if (shape[i] < 0) {
      return dc__fail(DC_E_SHAPE, "%s: %s has length %" PRId64 " in dimension %" PRId32 ", must be >= 0", function,
                      argument, shape[i], i);
    }
    /* 2^56 elements leave room for element sizes and padding in all later arithmetic. */
    empty = empty || shape[i] == 0;
    if (shape[i] > 0 && (__builtin_mul_overflow(product, shape[i], &product) || product > INT64_C(1) << 56)) {
      return dc__fail(DC_E_SHAPE, "%s: %s has more than 2^56 elements", function, argument);
    }
  }
  *numel = empty ? 0 : product;
  return DC_OK;
}

static bool tensor_is_contiguous(const dc_tensor *t, int64_t numel) {
  if (t->strides == NULL || numel == 0) {
    return true;
  }
  int64_t expected = 1;
  for (int32_t i = t->ndim - 1; i >= 0; i--) {
    if (t->shape[i] != 1 && t->strides[i] != expected) {
      return false;
    }
    expected *= t->shape[i];
  }
  return true;
}

dc_status dc__tensor_read(const char *function, const char *argument, const dc_tensor *src, bool optional,
                          dc_tensor *dst, int64_t *numel) {
  dc_tensor t = DC_TENSOR_INIT;
  int64_t count = 0;
  if (src != NULL) {
    DC__TRY(dc__read_options(function, argument, &t, sizeof t, src, DC__TENSOR_SIZE_0_1));
    DC__TRY(dc__numel(function, argument, t.shape, t.ndim, &count));
    if (dc_dtype_size(t.dtype) == 0) {
      return dc__fail(DC_E_DTYPE, "%s: %s.dtype = %" PRId32 " is no element type", function, argument, t.dtype);
    }
    if (!tensor_is_contiguous(&t, count)) {
      return dc__fail(DC_E_SHAPE, "%s: %s is not contiguous; row-major strides are needed", function, argument);
    }
    if (t.data == NULL && count > 0) {
      return dc__fail(DC_E_INVALID, "%s: %s.data is NULL, but it has %" PRId64 " element%s", function, argument, count,
                      DC__PLURAL_S(count));
    }
  } else if (!optional) {
    return dc__fail(DC_E_INVALID, "%s: %s is NULL", function, argument);
  }
  *dst = t;
  *numel = count;
  return DC_OK;
}

dc_status dc__tensor_check_output(const char *function, const char *argument, const dc_tensor *dst) {
  if (dst == NULL) {
    return dc__fail(DC_E_INVALID, "%s: %s is NULL", function, argument);
  }
  size_t size;
  memcpy(&size, dst, sizeof size); /* dst may be misaligned */
  return dc__check_size(function, argument, size, DC__TENSOR_SIZE_0_1);
}

dc_status dc__tensors_check(const char *function, const char *argument, const dc_tensor *tensors, size_t tensor_size,
                            int64_t count) {
  if (count > 0 && tensors == NULL) {
    return dc__fail(DC_E_INVALID, "%s: %s is NULL, must have count = %" PRId64 " entr%s", function, argument, count,
                    count == 1 ? "y" : "ies");
  }
  if (count > 0 && tensor_size < DC__TENSOR_SIZE_0_1) {
    return dc__fail(DC_E_INVALID, "%s: tensor_size = %zu, must be at least %d", function, tensor_size,
                    (int)DC__TENSOR_SIZE_0_1);
  }
  return DC_OK;
}

const dc_tensor *dc__tensors_at(const dc_tensor *tensors, size_t tensor_size, int64_t i) {
  return (const dc_tensor *)(const void *)((const char *)(const void *)tensors + (size_t)i * tensor_size);
}

dc_status dc__tensor_write(const char *function, const char *argument, dc_tensor *dst, void *data, const int64_t *shape,
                           int32_t ndim, int32_t dtype, dc_buffer *buffer) {
  dc_tensor t = {.struct_size = sizeof t,
                 .data = data,
                 .shape = ndim > 0 ? shape : NULL,
                 .ndim = ndim,
                 .dtype = dtype,
                 .buffer = buffer};
  return dc__write_sized(function, argument, dst, &t, sizeof t, DC__TENSOR_SIZE_0_1);
}
