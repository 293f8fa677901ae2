/* Products of 16 x 16 by 16 x 8 tiles by a warp, on tensor cores: each of the 32 lanes has some elements of every
 * matrix. Let row = lane / 4 and pair = 2 (lane % 4). A lane's sums c are (row, pair), (row, pair + 1), (row + 8,
 * pair), (row + 8, pair + 1). A fragment is a left operand, 16 x 16: two neighbouring tiles of sums become one without
 * a shuffle. The right operand lies in shared memory, by rows or by columns.
 *
 * 16-bit types: mma.m16n8k16 with sums in float32; on the CPU, the same sums from all lanes' elements. float32: plain
 * products, since tensor cores would round the operands. */
#ifndef DC_KERNELS_CUDA_MMA_H
#define DC_KERNELS_CUDA_MMA_H

#include "kernels/cuda/half.h"

namespace {

DC_DEVICE int lane_row() {
  return static_cast<int>(dc_thread() % DC_WARP / 4);
}
DC_DEVICE int lane_pair() {
  return static_cast<int>(2 * (dc_thread() % 4));
}

typedef uint32_t dc_word __attribute__((may_alias)); /* two halves that lie at a multiple of 4 bytes */

#ifdef __CUDACC__

template <int DTYPE>
DC_DEVICE void dc_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (DTYPE == DC_FLOAT16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/* Two neighbours' right operands, 16 x 16 in all: from 16 rows of 16 columns, and from 16 columns of 16. Rows in memory
 * lie `ld` elements apart, at multiples of 16 bytes. */
DC_DEVICE void right_by_rows(uint32_t (&b)[4], const uint16_t *tile, int ld) {
  const int lane = static_cast<int>(dc_thread() % DC_WARP);
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(tile + lane % 16 * ld + lane / 16 * 8));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(at));
}
DC_DEVICE void right_by_columns(uint32_t (&b)[4], const uint16_t *tile, int ld) {
  const int lane = static_cast<int>(dc_thread() % DC_WARP);
  const int row = lane % 8 + lane / 16 * 8, column = lane / 8 % 2 * 8;
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(tile + row * ld + column));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(at));
}

/* A left operand, 16 x 16. */
DC_DEVICE void left_by_rows(uint32_t (&a)[4], const uint16_t *tile, int ld) {
  const int lane = static_cast<int>(dc_thread() % DC_WARP);
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(tile + lane % 16 * ld + lane / 16 * 8));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(at));
}

#else

template <int DTYPE>
DC_DEVICE void dc_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t own_words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const unsigned char *all = cudasim_exchange(own_words, sizeof own_words);
  const auto element = [&](int lane, int index) { /* half `index` of a lane's words */
                                                  uint16_t half;
                                                  std::memcpy(&half, all + CUDASIM_SLOT * lane + 2 * index,
                                                              sizeof half);
                                                  return f32_of<DTYPE>(half);
  };
  for (int i = 0; i < 4; i++) {
    const int m = lane_row() + i / 2 * 8, n = lane_pair() + i % 2;
    for (int k = 0; k < 16; k++) { /* element k of a row lies at the lane of its pair; beyond 8, in the next words */
      c[i] += element(m % 8 * 4 + k % 8 / 2, m / 8 * 2 + k / 8 * 4 + k % 2) *
              element(n * 4 + k % 8 / 2, 8 + k / 8 * 2 + k % 2);
    }
  }
}

DC_DEVICE void right_by_rows(uint32_t (&b)[4], const uint16_t *tile, int ld) {
  for (int i = 0; i < 4; i++) {
    const uint16_t *at = tile + (lane_pair() + i % 2 * 8) * ld + lane_row() + i / 2 * 8;
    b[i] = two_halves(at[0], at[ld]);
  }
}
DC_DEVICE void right_by_columns(uint32_t (&b)[4], const uint16_t *tile, int ld) {
  for (int i = 0; i < 4; i++) {
    const uint16_t *at = tile + (lane_row() + i / 2 * 8) * ld + lane_pair() + i % 2 * 8;
    b[i] = two_halves(at[0], at[1]);
  }
}
DC_DEVICE void left_by_rows(uint32_t (&a)[4], const uint16_t *tile, int ld) {
  for (int i = 0; i < 4; i++) {
    const uint16_t *at = tile + (lane_row() + i % 2 * 8) * ld + lane_pair() + i / 2 * 8;
    a[i] = two_halves(at[0], at[1]);
  }
}

#endif

/* The types for a dtype: an element, a fragment, one that is ready for a product, and a right operand of 16 x 16. PAD
 * elements after each row of a tile keep the lanes' reads in different banks. */
template <int DTYPE>
struct warp_math {
  typedef uint16_t element;
  struct fragment {
    uint32_t a[4];
  };
  typedef fragment ready;
  struct right {
    uint32_t b[4];
  };
  enum { PAD = 8, VECTOR = 8 };

  DC_DEVICE float wide(element x) {
    return f32_of<DTYPE>(x);
  }
  DC_DEVICE element narrow(float x) {
    return half_of<DTYPE>(x);
  }
  /* Two neighbours of a row with `left` remaining elements: one load if rows begin at multiples of two. */
  DC_DEVICE void load_pair(element (&pair)[2], const element *from, int left) {
    if (left % 2 == 0) {
      const uint32_t halves = *reinterpret_cast<const dc_word *>(from);
      pair[0] = static_cast<element>(halves);
      pair[1] = static_cast<element>(halves >> 16);
    } else {
      pair[0] = from[0];
      pair[1] = left > 1 ? from[1] : 0;
    }
  }
  /* Elements 0 and 1 of row `row + 8 half` at columns pair and pair + 1, or 8 further. */
  DC_DEVICE void set(fragment &f, int half, int column_half, element x, element y) {
    f.a[half + 2 * column_half] = two_halves(x, y);
  }
  DC_DEVICE void set_sums(fragment &f, int half, int column_half, float x, float y) {
    f.a[half + 2 * column_half] = halves_of<DTYPE>(x, y);
  }
  DC_DEVICE void get(const fragment &f, int half, int column_half, float &x, float &y) {
    x = wide(static_cast<element>(f.a[half + 2 * column_half]));
    y = wide(static_cast<element>(f.a[half + 2 * column_half] >> 16));
  }
  DC_DEVICE const ready &prepare(const fragment &f) {
    return f;
  }
  /* By columns: element (k, n) of the right operand lies at tile[n ld + k]; by rows at tile[k ld + n]. */
  DC_DEVICE right by_columns(const element *tile, int ld) {
    right r;
    right_by_columns(r.b, tile, ld);
    return r;
  }
  DC_DEVICE right by_rows(const element *tile, int ld) {
    right r;
    right_by_rows(r.b, tile, ld);
    return r;
  }
  /* c and d, neighbours, += left right. */
  DC_DEVICE void multiply(float (&c)[4], float (&d)[4], const ready &left, const right &r) {
    dc_mma<DTYPE>(c, left.a, r.b[0], r.b[1]);
    dc_mma<DTYPE>(d, left.a, r.b[2], r.b[3]);
  }
  /* Two neighbours of a row, at a multiple of their size. */
  DC_DEVICE void store_pair(element *to, float x, float y) {
    *reinterpret_cast<dc_word *>(to) = halves_of<DTYPE>(x, y);
  }
};

template <>
struct warp_math<DC_FLOAT32> {
  typedef float element;
  struct fragment {
    float c[2][4];
  };
  struct ready { /* both whole rows */
    float row[2][16];
  };
  struct right { /* `left` is not copied: element (k, n) at at[k down + n across] */
    const element *at;
    int down, across;
  };
  enum { PAD = 4, VECTOR = 4 };

  DC_DEVICE float wide(element x) {
    return x;
  }
  DC_DEVICE element narrow(float x) {
    return x;
  }
  DC_DEVICE void load_pair(element (&pair)[2], const element *from, int left) {
    pair[0] = from[0];
    pair[1] = left > 1 ? from[1] : 0;
  }
  DC_DEVICE void set(fragment &f, int half, int column_half, element x, element y) {
    f.c[column_half][2 * half] = x;
    f.c[column_half][2 * half + 1] = y;
  }
  DC_DEVICE void set_sums(fragment &f, int half, int column_half, float x, float y) {
    set(f, half, column_half, x, y);
  }
  DC_DEVICE void get(const fragment &f, int half, int column_half, float &x, float &y) {
    x = f.c[column_half][2 * half];
    y = f.c[column_half][2 * half + 1];
  }
  DC_DEVICE ready prepare(const fragment &f) {
    ready r;
    const uint32_t first = dc_thread() % DC_WARP / 4 * 4;
    DC_UNROLL
    for (int k = 0; k < 16; k++) {
      DC_UNROLL
      for (int half = 0; half < 2; half++) {
        r.row[half][k] = dc_shuffle(f.c[k / 8][2 * half + k % 2], first + static_cast<uint32_t>(k % 8 / 2));
      }
    }
    return r;
  }
  DC_DEVICE void add(float (&c)[4], const ready &left, int k, float x, float y) {
    c[0] = fmaf(left.row[0][k], x, c[0]);
    c[1] = fmaf(left.row[0][k], y, c[1]);
    c[2] = fmaf(left.row[1][k], x, c[2]);
    c[3] = fmaf(left.row[1][k], y, c[3]);
  }
  DC_DEVICE right by_columns(const element *tile, int ld) {
    return {tile + lane_pair() * ld, 1, ld};
  }
  DC_DEVICE right by_rows(const element *tile, int ld) {
    return {tile + lane_pair(), ld, 1};
  }
  DC_DEVICE void multiply(float (&c)[4], float (&d)[4], const ready &left, const right &r) {
    DC_UNROLL
    for (int k = 0; k < 16; k++) {
      const element *at = r.at + k * r.down;
      add(c, left, k, at[0], at[r.across]);
      add(d, left, k, at[8 * r.across], at[9 * r.across]);
    }
  }
  DC_DEVICE void store_pair(element *to, float x, float y) {
    to[0] = x;
    to[1] = y;
  }
};

/* The left operand that two neighbouring tiles of sums are. */
template <int DTYPE>
DC_DEVICE typename warp_math<DTYPE>::fragment fragment_of(const float (&first)[4], const float (&second)[4]) {
  typedef warp_math<DTYPE> math;
  typename math::fragment f;
  DC_UNROLL
  for (int half = 0; half < 2; half++) {
    math::set_sums(f, half, 0, first[2 * half], first[2 * half + 1]);
    math::set_sums(f, half, 1, second[2 * half], second[2 * half + 1]);
  }
  return f;
}

}  // namespace

#endif
