/* The bodies of update.h. Included once for each instruction set, whose table UPDATE names. VECTORS is defined if the
 * set has functions of its own for loops that compilers do not vectorize (x86/optim/update_vector.h). */
#include "kernels/dispatch.h"
#include "kernels/elementwise/convert.h"
#include "kernels/optim/update.h"

/* ---- conversions: the set's own functions do whole vectors, and return the number of elements done ---- */

#ifndef VECTORS
static int64_t read_vectors(float *x, const void *from, int32_t dtype, int64_t count, float scale) {
  (void)x, (void)from, (void)dtype, (void)count, (void)scale;
  return 0;
}
static int64_t sync_master_vectors(float *master, const void *w, int32_t dtype, int64_t count) {
  (void)master, (void)w, (void)dtype, (void)count;
  return 0;
}
static int64_t write_vectors(void *w, int32_t dtype, const float *master, int64_t count) {
  (void)w, (void)dtype, (void)master, (void)count;
  return 0;
}
#endif

/* x may be `from`. */
static void read_to(float *x, const void *from, int32_t dtype, int64_t count, float scale) {
  const dc__half *half = from;
  const dc__f32 *whole = from;
  int64_t i = read_vectors(x, from, dtype, count, scale);
  if (dtype == DC_FLOAT16) {
    for (; i < count; i++) {
      x[i] = dc__f32_of_f16(half[i]) * scale;
    }
  } else if (dtype == DC_BFLOAT16) {
    for (; i < count; i++) {
      x[i] = dc__f32_of_bf16(half[i]) * scale;
    }
  } else {
    for (; i < count; i++) {
      x[i] = whole[i] * scale;
    }
  }
}

static void sync_master(float *restrict master, const void *w, int32_t dtype, int64_t count) {
  const dc__half *half = w;
  int64_t i = sync_master_vectors(master, w, dtype, count);
  if (dtype == DC_FLOAT16) {
    for (; i < count; i++) {
      master[i] = dc__synced_master(master[i], dc__f32_of_f16(dc__f16_of_f32(master[i])), dc__f32_of_f16(half[i]));
    }
  } else {
    for (; i < count; i++) {
      master[i] = dc__synced_master(master[i], dc__f32_of_bf16(dc__bf16_of_f32(master[i])), dc__f32_of_bf16(half[i]));
    }
  }
}

static void write_from(void *w, int32_t dtype, const float *restrict master, int64_t count) {
  dc__half *half = w;
  int64_t i = write_vectors(w, dtype, master, count);
  if (dtype == DC_FLOAT16) {
    for (; i < count; i++) {
      half[i] = dc__f16_of_f32(master[i]);
    }
  } else {
    for (; i < count; i++) {
      half[i] = dc__bf16_of_f32(master[i]);
    }
  }
}

/* ---- blocks ----
 *
 * Blocks are so small that all arrays of a span are walked side by side: hardware prefetchers follow all of them, and
 * conversions stay in the first-level cache. */

enum { BLOCK = 64 };

/* Runs a step for a block. The number of elements is a constant for whole blocks. */
#define STEP(step, ...) (b.count == BLOCK ? step(__VA_ARGS__, BLOCK, f) : step(__VA_ARGS__, b.count, f))
#define INLINE static inline __attribute__((always_inline))

typedef struct update_block {
  dc__f32 *w; /* float32 weights, or the master */
  const dc__f32 *g;
  int64_t count;
  float grad[BLOCK];
} update_block;

static int64_t size_of(int32_t dtype) {
  return dtype == DC_FLOAT32 ? 4 : 2;
}

/* Begins a block of at most `left` elements, from element i on. */
static void block_begin(update_block *b, const dc__update_span *s, int64_t i, int64_t left, float scale) {
  const bool in_place = s->grad_dtype == DC_FLOAT32 && scale == 1;
  b->count = left < BLOCK ? left : BLOCK;
  b->w = s->master != NULL ? (dc__f32 *)s->master + i : (dc__f32 *)s->weight + i;
  b->g = b->grad;
  if (in_place) {
    b->g = (const dc__f32 *)s->grad + i;
  } else {
    read_to(b->grad, (const char *)s->grad + size_of(s->grad_dtype) * i, s->grad_dtype, b->count, scale);
  }
  if (s->master != NULL) {
    sync_master(s->master + i, (char *)s->weight + 2 * i, s->dtype, b->count);
  }
}

static void block_end(const update_block *b, const dc__update_span *s, int64_t i) {
  if (s->master != NULL) {
    write_from((char *)s->weight + 2 * i, s->dtype, s->master + i, b->count);
  }
}

/* ---- steps ---- */

INLINE void adamw_block(dc__f32 *restrict w, float *restrict m, float *restrict v, const dc__f32 *restrict g,
                        int64_t count, const dc__adamw_factors *factors) {
  const dc__adamw_factors f = *factors;
  for (int64_t i = 0; i < count; i++) {
    float mi = dc__adamw_mean(m[i], g[i], &f);
    float vi = dc__adamw_square(v[i], g[i], &f);
    m[i] = mi;
    v[i] = vi;
    w[i] = dc__adamw_weight(w[i], mi, vi, &f);
  }
}

INLINE void amsgrad_block(dc__f32 *restrict w, float *restrict m, float *restrict v, float *restrict max_v,
                          const dc__f32 *restrict g, int64_t count, const dc__adamw_factors *factors) {
  const dc__adamw_factors f = *factors;
  for (int64_t i = 0; i < count; i++) {
    m[i] = dc__adamw_mean(m[i], g[i], &f);
    v[i] = dc__adamw_square(v[i], g[i], &f);
    max_v[i] = dc__adamw_max(max_v[i], v[i]);
    w[i] = dc__adamw_weight(w[i], m[i], max_v[i], &f);
  }
}

static void update_adamw(const dc__update_span *s, int64_t from, int64_t count, float scale) {
  const dc__adamw_factors *f = &s->factors.adamw;
  update_block b;
  for (int64_t i = from; i < from + count; i += b.count) {
    block_begin(&b, s, i, from + count - i, scale);
    if (s->state[2] == NULL) {
      STEP(adamw_block, b.w, s->state[0] + i, s->state[1] + i, b.g);
    } else {
      STEP(amsgrad_block, b.w, s->state[0] + i, s->state[1] + i, s->state[2] + i, b.g);
    }
    block_end(&b, s, i);
  }
}

INLINE void sgd_block(dc__f32 *restrict w, const dc__f32 *restrict g, int64_t count, const dc__sgd_factors *factors) {
  const dc__sgd_factors f = *factors;
  for (int64_t i = 0; i < count; i++) {
    w[i] = w[i] - f.lr * dc__sgd_direction(w[i], g[i], &f);
  }
}

INLINE void momentum_block(dc__f32 *restrict w, float *restrict b, const dc__f32 *restrict g, int64_t count,
                           const dc__sgd_factors *factors) {
  const dc__sgd_factors f = *factors;
  for (int64_t i = 0; i < count; i++) {
    float d = dc__sgd_direction(w[i], g[i], &f);
    float bi = dc__sgd_momentum(b[i], d, &f);
    b[i] = bi;
    w[i] = dc__sgd_weight(w[i], d, bi, &f);
  }
}

static void update_sgd(const dc__update_span *s, int64_t from, int64_t count, float scale) {
  const dc__sgd_factors *f = &s->factors.sgd;
  update_block b;
  for (int64_t i = from; i < from + count; i += b.count) {
    block_begin(&b, s, i, from + count - i, scale);
    if (s->state[0] == NULL) {
      STEP(sgd_block, b.w, b.g);
    } else {
      STEP(momentum_block, b.w, s->state[0] + i, b.g);
    }
    block_end(&b, s, i);
  }
}

/* ---- checks ---- */

static bool all_below(const float *x, int64_t count, int32_t exponent) {
  uint32_t worst = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits = dc__exponent_bits(x[i]);
    worst = bits > worst ? bits : worst;
  }
  return worst < dc__exponent_limit(exponent);
}

const dc__update UPDATE = {
    .adamw = update_adamw, .sgd = update_sgd, .read = read_to, .is_below = all_below, .sync_master = sync_master};
