/* The checks of a caller's tensor: whatever it contains, an accepted tensor has the properties that the checks promise.
 * Shape and strides are in blocks of exactly their length. */
#include "base/base.h"
#include "fuzz.h"

/* Counts the elements of an accepted shape in the simplest way. */
static int64_t elements(const dc_tensor *t) {
  int64_t count = 1;
  for (int32_t i = 0; i < t->ndim; i++) {
    PROMISE(t->shape[i] >= 0);
    PROMISE(!__builtin_mul_overflow(count, t->shape[i], &count));
  }
  return count;
}

static void accepted(const dc_tensor *t, int64_t count) {
  PROMISE(t->ndim >= 0 && t->ndim <= 64 && dc_dtype_size(t->dtype) > 0);
  PROMISE(count == elements(t) && count <= INT64_C(1) << 56);
  PROMISE(count == 0 || t->data != NULL);
  int64_t expected = 1;
  for (int32_t i = t->ndim - 1; i >= 0 && t->strides != NULL && count > 0; i--) {
    PROMISE(t->shape[i] == 1 || t->strides[i] == expected);
    expected *= t->shape[i];
  }
}

static int64_t *lengths(bytes *b, int32_t ndim) {
  int64_t *values = malloc((size_t)ndim * sizeof *values + 1);
  for (int32_t i = 0; i < ndim; i++) {
    values[i] = read_count(b);
  }
  return values;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length) {
  bytes b = {data, length};
  static char somewhere;
  uint8_t shapes = read_u8(&b);
  int32_t ndim = (int32_t)read_count(&b);
  int32_t real = ndim < 0 ? 0 : ndim > 64 ? 64 : ndim;
  int64_t *shape = lengths(&b, real), *strides = lengths(&b, real);
  dc_tensor t = {.struct_size = shapes & 1 ? (size_t)read_count(&b) : sizeof t,
                 .data = shapes & 2 ? NULL : &somewhere,
                 .shape = shapes & 4 ? NULL : shape,
                 .strides = shapes & 8 ? strides : NULL,
                 .ndim = ndim,
                 .dtype = (int32_t)read_count(&b)};
  if (t.struct_size <= sizeof t || t.struct_size > 65536) { /* a larger one would need all bytes that it claims */
    dc_tensor read;
    int64_t count = -1;
    bool optional = (shapes & 16) != 0;
    dc_status status = dc__tensor_read("fuzz", "a", shapes & 32 ? NULL : &t, optional, &read, &count);
    PROMISE(status == DC_OK || dc_last_error()[0] != '\0');
    if (status == DC_OK && (shapes & 32) == 0) {
      accepted(&read, count);
    } else {
      PROMISE(status != DC_OK ? count == -1 : optional && count == 0);
    }
    (void)dc__tensor_write("fuzz", "out", &t, NULL, shape, real, DC_FLOAT32, NULL);
  }
  free(shape);
  free(strides);
  return 0;
}
