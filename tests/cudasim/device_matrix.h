/* Matrices in the memory of any device, for tests that compare two devices. */
#ifndef TESTS_CUDASIM_TENSORS_H
#define TESTS_CUDASIM_TENSORS_H

#include "harness.h"

#include "device/device.h"
#include "kernels/kernels.h"

enum { MOST_BLOCKS = 64 };

static struct {
  dc_device *device;
  void *ptr;
  size_t bytes;
} blocks[MOST_BLOCKS];
static int block_count;
static int64_t shapes[MOST_BLOCKS][2];

static void *device_alloc(dc_device *dev, size_t bytes) {
  void *ptr;
  assert_true(block_count < MOST_BLOCKS);
  assert_int_equal(dev->ops->alloc(dev, bytes, DC_MEMORY_DEVICE, &ptr), DC_OK);
  blocks[block_count].device = dev;
  blocks[block_count].ptr = ptr;
  blocks[block_count++].bytes = bytes;
  return ptr;
}

static dc_tensor tensor(dc_device *dev, int32_t dtype, int64_t rows, int64_t columns) {
  dc_tensor t = DC_TENSOR_INIT;
  t.data = device_alloc(dev, (size_t)(rows * columns) * dc_dtype_size(dtype));
  t.dtype = dtype;
  t.ndim = 2;
  int64_t *shape = shapes[block_count - 1];
  shape[0] = rows;
  shape[1] = columns;
  t.shape = shape;
  return t;
}

/* Copies to or from a device's memory. The caller has waited for work on streams. */
static void copy(dc_device *dev, void *dst, const void *src, size_t bytes) {
  dc__stream_copy(dev->internal_stream, dst, src, bytes);
  dc__device_sync_internal(dev, NULL);
  assert_int_equal(dc__device_check(dev), DC_OK);
}

static size_t bytes_of(const dc_tensor *t) {
  return (size_t)(t->shape[0] * t->shape[1]) * dc_dtype_size(t->dtype);
}

/* Returns the tensor's elements in memory that the caller frees. */
static inline void *elements(dc_device *dev, const dc_tensor *t) {
  void *host = malloc(bytes_of(t));
  copy(dev, host, t->data, bytes_of(t));
  return host;
}

static inline void randomize(dc_device *dev, const dc_tensor *t, uint64_t seed, float scale, float base) {
  int64_t count = t->shape[0] * t->shape[1];
  float *values = malloc((size_t)count * sizeof *values);
  for (int64_t i = 0; i < count; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    values[i] = base + (float)(int32_t)(seed >> 32) * 0x1p-31f * scale;
  }
  void *host = malloc(bytes_of(t));
  dc__cast(host, t->dtype, values, DC_FLOAT32, count);
  copy(dev, t->data, host, bytes_of(t));
  free(host);
  free(values);
}

#endif
