/* Matrices in files, with exact sums, for the tests of out-of-core products. */
#ifndef TESTS_OUT_OF_CORE_TEST_H
#define TESTS_OUT_OF_CORE_TEST_H

#include <fcntl.h>
#include <unistd.h>

#include "linalg/linalg_test.h"

/* If the tensor has no data, it is in the file fd. */
static inline dc_matrix_source source_of(dc_tensor *tensor, int32_t fd, int64_t offset) {
  dc_matrix_source s = DC_MATRIX_SOURCE_INIT;
  s.tensor = tensor;
  if (fd >= 0 && tensor->data == NULL) {
    s.in_file = 1;
    s.fd = fd;
    s.offset = offset;
  }
  return s;
}

static inline int32_t file_of(const void *data, size_t bytes, int64_t offset) {
  char name[] = "/tmp/libdc-test-XXXXXX";
  int32_t fd = mkstemp(name);
  assert_true(fd >= 0);
  unlink(name);
  assert_true(pwrite(fd, data, bytes, offset) == (ssize_t)bytes);
  return fd;
}

/* Opens the same file, for writing only. */
static inline int32_t writer_of(int32_t fd) {
  char name[32];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  const int32_t writer = open(name, O_WRONLY);
  assert_true(writer >= 0);
  return writer;
}

/* A matrix of small integers in a type that holds them; sums of their products are exact in any order. */
static inline void *integers(int32_t dtype, int64_t count, uint64_t seed, double *values) {
  uint8_t *data = malloc((size_t)count * 8 + 1);
  for (int64_t i = 0; i < count; i++) {
    values[i] = floor(number(&seed) * 4);
    const float narrow = (float)values[i];
    if (dtype == DC_FLOAT64) {
      memcpy(data + i * 8, &values[i], 8);
    } else if (dtype == DC_FLOAT32) {
      memcpy(data + i * 4, &narrow, 4);
    } else { /* bfloat16: the upper half */
      memcpy(data + i * 2, (const char *)&narrow + 2, 2);
    }
  }
  return data;
}

#endif
