/* The conversions of kernels/optim/update_tmpl.h in vectors: each function does whole vectors, and returns the number
 * of elements done. Compilers vectorize the rest of that source, but not float16. */
#include "kernels/x86/vector.h"

#define VECTORS

/* Runs `work` with dtype as a constant. */
#define OF_DTYPE(work)         \
  switch (dtype) {             \
    case DC_FLOAT16:           \
      work(DC_FLOAT16) break;  \
    case DC_BFLOAT16:          \
      work(DC_BFLOAT16) break; \
    default:                   \
      work(DC_FLOAT32)         \
  }

static int64_t read_vectors(float *x, const void *from, int32_t dtype, int64_t count, float scale) {
  const int64_t whole = count - count % WIDTH;
  const vector factor = set(scale);
#define READ(type)                                           \
  for (int64_t i = 0; i < whole; i += WIDTH) {               \
    store_f32(x + i, multiply(load(from, type, i), factor)); \
  }
  OF_DTYPE(READ)
  return whole;
}

static int64_t sync_master_vectors(float *master, const void *w, int32_t dtype, int64_t count) {
  const int64_t whole = count - count % WIDTH;
#define FOLLOW(type)                                                         \
  for (int64_t i = 0; i < whole; i += WIDTH) {                               \
    const vector own = load_f32(master + i);                                 \
    store_f32(master + i, where_same(as(own, type), load(w, type, i), own)); \
  }
  OF_DTYPE(FOLLOW)
  return whole;
}

static int64_t write_vectors(void *w, int32_t dtype, const float *master, int64_t count) {
  const int64_t whole = count - count % WIDTH;
#define WRITE(type)                            \
  for (int64_t i = 0; i < whole; i += WIDTH) { \
    store(w, type, i, load_f32(master + i));   \
  }
  OF_DTYPE(WRITE)
  return whole;
}
