/* Data that every rank of a communicator can compute for every other rank, and ways to split them. */
#ifndef DC_TESTS_COMM_DATA_H
#define DC_TESTS_COMM_DATA_H

#include "comm_ranks.h"

#include "kernels/kernels.h"

static const int32_t dtypes[] = {DC_FLOAT32, DC_FLOAT64, DC_FLOAT16, DC_BFLOAT16, DC_INT8, DC_INT32, DC_INT64};

/* Fractions whose sums are inexact, so that the order of additions shows. */
static inline float sample(int32_t rank, int64_t i) {
  uint32_t x = (uint32_t)((uint64_t)i * 2654435761u) ^ ((uint32_t)rank * 40503u + 77u);
  x = (x ^ (x >> 15)) * 2246822519u;
  x ^= x >> 13;
  return (float)(int32_t)(x & 0xffff) / 997.0f - 30.0f;
}

static inline void *make(int32_t dtype, int32_t rank, int64_t count) {
  float *values = malloc((size_t)count * sizeof *values + 1);
  void *data = malloc((size_t)count * dc_dtype_size(dtype) + 1);
  for (int64_t i = 0; i < count; i++) {
    values[i] = dtype == DC_INT8 ? (float)((i + rank) % 15) : sample(rank, i);
  }
  dc__cast(data, dtype, values, DC_FLOAT32, count);
  free(values);
  return data;
}

static inline void *make_reduced(int32_t dtype, int32_t world, int64_t count, bool mean) {
  void *ranks[DC__COMM_MAX_WORLD];
  const void *sources[DC__COMM_MAX_WORLD];
  for (int32_t r = 0; r < world; r++) {
    sources[r] = ranks[r] = make(dtype, r, count);
  }
  void *result = malloc((size_t)count * dc_dtype_size(dtype) + 1);
  dc__reduce(&(dc__reduction){
      .dst = result, .src = sources, .count = count, .dst_dtype = dtype, .src_dtype = dtype, .n = world, .mean = mean});
  for (int32_t r = 0; r < world; r++) {
    free(ranks[r]);
  }
  return result;
}

enum { SPLITS = 5 };

/* Ways to split about `size` elements over ranks: even, with a rest, ragged with empty ranks, all on one, prime. */
static inline int64_t split(int kind, int64_t size, int32_t world, int64_t *counts) {
  int64_t total = 0;
  for (int32_t r = 0; r < world; r++) {
    counts[r] = kind == 0   ? size / world
                : kind == 1 ? (r == world - 1 ? size % (size / world + 1) : size / world + 1)
                : kind == 2 ? (r % 2 == 0 ? size / (r + 2) : 0)
                : kind == 3 ? (r == world / 2 ? size : 0)
                            : 7 + r * 13 % 101;
    total += counts[r];
  }
  return total;
}

static inline int64_t begin_of(const int64_t *counts, int32_t rank) {
  int64_t begin = 0;
  for (int32_t r = 0; r < rank; r++) {
    begin += counts[r];
  }
  return begin;
}

#endif
