/* The fixed-order reduction with a loop for each number of sources, so that the sums stay in registers. INIT names the
 * function that puts it into a table. */
#include "kernels/x86/vector.h"

typedef struct reduce_epilogue {
  vector factor; /* 1 / n where that is exact, so that multiplying gives the bits of the division; 1 for a sum */
  vector n;
  bool divides;
  bool accumulate;
} reduce_epilogue;

/* ((0+1)+(2+3))+((4+5)+(6+7)); n is a constant. */
DC__INLINE vector reduce_tree(const void *const *src, int32_t n, int32_t dtype, int64_t i) {
  vector a = add(load(src[0], dtype, i), load(src[1], dtype, i));
  if (n == 2) {
    return a;
  }
  if (n == 3) {
    return add(a, load(src[2], dtype, i));
  }
  a = add(a, add(load(src[2], dtype, i), load(src[3], dtype, i)));
  if (n == 4) {
    return a;
  }
  if (n == 5) {
    return add(a, load(src[4], dtype, i));
  }
  vector b = add(load(src[4], dtype, i), load(src[5], dtype, i));
  if (n == 6) {
    return add(a, b);
  }
  if (n == 7) {
    return add(a, add(b, load(src[6], dtype, i)));
  }
  return add(a, add(b, add(load(src[6], dtype, i), load(src[7], dtype, i))));
}

DC__INLINE void loop(void *dst, int32_t dst_dtype, const void *const *src, int32_t n, int32_t src_dtype, int64_t begin,
                     int64_t count, const reduce_epilogue *end) {
  const void *in[DC__KERNELS_FAN_IN];
  for (int32_t k = 0; k < n; k++) {
    in[k] = dc__const_at(src[k], src_dtype, begin);
  }
  for (int64_t i = 0; i < count; i += WIDTH) {
    vector v = reduce_tree(in, n, src_dtype, i);
    v = end->divides ? divide(v, end->n) : multiply(v, end->factor);
    if (end->accumulate) {
      v = add(load(dst, dst_dtype, i), as(v, dst_dtype));
    }
    store(dst, dst_dtype, i, v);
  }
}

#define FAN_IN(k, to, from)                          \
  case k:                                            \
    loop(dst, to, src, k, from, begin, count, &end); \
    break;

#define REDUCE(name, to, from)                                                                            \
  static void name(void *dst, const void *const *src, int32_t n, int64_t begin, int64_t count, bool mean, \
                   bool accumulate) {                                                                     \
    bool exact = (n & (n - 1)) == 0;                                                                      \
    reduce_epilogue end = {.factor = set(mean && exact ? 1.0f / (float)n : 1.0f),                         \
                           .n = set((float)n),                                                            \
                           .divides = mean && !exact,                                                     \
                           .accumulate = accumulate};                                                     \
    switch (n) {                                                                                          \
      FAN_IN(2, to, from)                                                                                 \
      FAN_IN(3, to, from)                                                                                 \
      FAN_IN(4, to, from)                                                                                 \
      FAN_IN(5, to, from)                                                                                 \
      FAN_IN(6, to, from)                                                                                 \
      FAN_IN(7, to, from)                                                                                 \
      FAN_IN(8, to, from)                                                                                 \
    }                                                                                                     \
  }

REDUCE(f32_f32, DC_FLOAT32, DC_FLOAT32)
REDUCE(f32_f16, DC_FLOAT32, DC_FLOAT16)
REDUCE(f32_bf16, DC_FLOAT32, DC_BFLOAT16)
REDUCE(f16_f16, DC_FLOAT16, DC_FLOAT16)
REDUCE(bf16_bf16, DC_BFLOAT16, DC_BFLOAT16)

void INIT(dc__kernel_table *table) {
  table->reduce[DC_FLOAT32][DC_FLOAT32] = f32_f32;
  table->reduce[DC_FLOAT32][DC_FLOAT16] = f32_f16;
  table->reduce[DC_FLOAT32][DC_BFLOAT16] = f32_bf16;
  table->reduce[DC_FLOAT16][DC_FLOAT16] = f16_f16;
  table->reduce[DC_BFLOAT16][DC_BFLOAT16] = bf16_bf16;
}
