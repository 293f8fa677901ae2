/* Shared by attention's kernels: the heads of a batch, tiles in shared memory, a warp's own rows, dropout. Each warp of
 * a block has 16 rows, of queries or of keys, or ROW_TILES times as many. It sums their products with the other side's
 * tiles in registers, so each read of a tile serves all its rows. No two blocks add to the same memory, so the bits are
 * the same in every run. */
#ifndef DC_KERNELS_CUDA_ATTENTION_H
#define DC_KERNELS_CUDA_ATTENTION_H

#include <math.h>

#include "kernels/cuda/attention/attention_args.h"
#include "kernels/cuda/attention/mma.h"
#include "kernels/nn/philox.h"

namespace {

typedef dc__cuda_attention_args arguments;

constexpr float MAX_FLOAT = 3.402823466e38f;

enum { WARPS = DC__CUDA_ATTENTION_THREADS / DC_WARP, WARP_ROWS = 16 };

/* A warp's rows as a multiple of WARP_ROWS, limited by registers. */
template <int DTYPE, int D>
DC_CONSTANT int warp_row_tiles() {
  return DTYPE != DC_FLOAT32 && D == 64 ? DC__CUDA_ATTENTION_ROW_TILES : 1;
}
template <int ROW_TILES>
DC_CONSTANT int block_rows() {
  return WARPS * WARP_ROWS * ROW_TILES;
}

/* The other side's rows: as many as fit shared memory in all types. */
template <int DTYPE>
DC_CONSTANT int tile_rows() {
  return DTYPE == DC_FLOAT32 ? 32 : 64;
}

/* Buffers for tiles: two if shared memory has room for them. */
template <int D, bool WIDE>
DC_CONSTANT int tile_buffers() {
  return D == 64 && !WIDE ? 2 : 1;
}

/* A head has parts of D features: one, or several if it is wide. Then the grid's second axis is the part whose sums a
 * block makes, and all of a head's blocks compute the scores, part by part. */
template <int D, bool WIDE>
DC_DEVICE int parts_of(const arguments &args) {
  return WIDE ? (args.d + D - 1) / D : 1;
}
template <bool WIDE>
DC_DEVICE int block_part() {
  return WIDE ? static_cast<int>(dc_block(1)) : 0;
}

/* One head of one sample. */
template <typename T>
struct attention_head {
  const T *q, *k, *v; /* of the first token; the next one is `stride` elements further */
  int length;         /* tokens */
  int64_t out;        /* the first token's offset in [N, H] */
  int64_t statistics; /* and in [A, N] */
  int64_t mask;       /* the sample's row in [B, S] */
  uint32_t plane;     /* sample * A + head, for dropout */
};

/* An array of the device's memory. */
template <typename T>
DC_DEVICE T *device_array(T *data, int64_t count) {
  (void)count;
  return static_cast<T *>(DC_MEMORY(data, count * static_cast<int64_t>(sizeof(T)), alignof(T)));
}
template <typename T>
DC_DEVICE T *row_at(T *data, int row, int stride) {
  return data + static_cast<int64_t>(row) * stride;
}
template <typename T>
DC_DEVICE T *whole(T *data, const arguments &args, int64_t columns) {
  return device_array(data, args.tokens * columns);
}

template <typename T>
DC_DEVICE attention_head<T> head_of(const arguments &args, uint32_t plane) {
  attention_head<T> h;
  const int64_t sample = plane / static_cast<uint32_t>(args.heads), number = plane % static_cast<uint32_t>(args.heads);
  int64_t first = sample * args.longest;
  h.length = static_cast<int>(args.longest);
  if (args.offsets != nullptr) {
    const int32_t *offsets = device_array(args.offsets, args.batch + 1) + sample;
    first = offsets[0];
    h.length = offsets[1] - first;
  }
  const int64_t hidden = static_cast<int64_t>(args.heads) * args.d;
  const T *qkv = whole(static_cast<const T *>(args.qkv), args, 3 * hidden);
  h.q = qkv + first * 3 * hidden + number * args.d;
  h.k = h.q + hidden;
  h.v = h.k + hidden;
  h.out = first * hidden + number * args.d;
  h.statistics = number * args.tokens + first;
  h.mask = sample * args.longest;
  h.plane = plane;
  return h;
}

/* ---- loads into shared memory and registers ---- */

/* ROWS rows of a tile, `stride` elements apart, of which `rows` exist. Beyond them, and beyond feature d, the tile gets
 * zeros. The copies are complete after dc_wait_copies(). A thread has a column of 16 bytes, whose rows are one addition
 * apart: the cost of issuing copies counts in attention's inner loops. */
template <int DTYPE, int D, int ROWS, typename T>
DC_DEVICE void load_tile(T *tile, const T *from, int stride, int rows, int d) {
  typedef warp_math<DTYPE> math;
  enum { LD = D + math::PAD, STEP = math::VECTOR, ACROSS = D / STEP, DOWN = DC__CUDA_ATTENTION_THREADS / ACROSS };
  const int thread = static_cast<int>(dc_thread()), column = thread % ACROSS * STEP, row = thread / ACROSS;
  const int present = rows < ROWS ? rows : static_cast<int>(ROWS);
  const T *at = row_at(from, row, stride) + column;
  T *to = tile + row * LD + column;
  const int64_t step = DOWN * static_cast<int64_t>(stride);
  if (warp_row_tiles<DTYPE, D>() > 1 || d % STEP == 0) {
    const int copied = column < d ? present - row : 0;
    DC_UNROLL
    for (int i = 0; i < ROWS; i += DOWN, at += step) {
      if (ROWS % DOWN == 0 || row + i < ROWS) {
        dc_copy_async(to + i * LD, at, i >= copied);
      }
    }
  } else {
    DC_ROLLED
    for (int i = 0; row + i < ROWS; i += DOWN, at += step) {
      DC_ROLLED
      for (int j = 0; j < STEP; j++) {
        to[i * LD + j] = row + i < present && column + j < d ? at[j] : T(0);
      }
    }
  }
}

/* Waits for the tile from row `tile` on, `rows` of each, and returns its buffer. fetch(tile, buffer) starts to load
 * one. With two buffers the next tile loads while one is read, and the first one is fetched before the loop. */
template <int BUFFERS, typename FETCH>
DC_DEVICE int next_tile(int tile, int rows, int length, FETCH fetch) {
  const int buffer = BUFFERS == 1 ? 0 : tile / rows % 2;
  if (BUFFERS == 1) {
    dc_sync(); /* the last one has been read */
    fetch(tile, buffer);
  }
  dc_wait_copies();
  dc_sync();
  if (BUFFERS == 2 && tile + rows < length) {
    fetch(tile + rows, 1 - buffer);
  }
  return buffer;
}

/* Columns 16 k to 16 k + 15 of a warp's own rows as a left operand. */
template <int DTYPE, typename T>
DC_DEVICE typename warp_math<DTYPE>::fragment load_fragment(const T *from, int stride, int rows, int d, int k) {
  typename warp_math<DTYPE>::fragment f;
  DC_UNROLL
  for (int i = 0; i < 4; i++) {
    const int row = lane_row() + i / 2 * 8, column = 16 * k + lane_pair() + i % 2 * 8;
    T pair[2] = {0, 0};
    if (row < rows && column < d) {
      warp_math<DTYPE>::load_pair(pair, row_at(from, row, stride) + column, d - column);
    }
    warp_math<DTYPE>::set(f, i / 2, i % 2, pair[0], pair[1]);
  }
  return f;
}

/* All of them: in registers, or, if those are too few, read at each use from a tile of 16 bits or from the device's
 * memory. */
enum operand_location { IN_REGISTERS, IN_SHARED, IN_GLOBAL };
template <int DTYPE, int D, int ROW_TILES, operand_location WHERE>
struct warp_rows {
  typedef warp_math<DTYPE> math;
  typedef typename math::element T;
  typename math::fragment f[ROW_TILES][WHERE == IN_REGISTERS ? D / 16 : 1];
  const T *from;
  int stride, rows, d;

  DC_MEMBER warp_rows(const T *first, int step, int count, int features)
      : from(first), stride(step), rows(count), d(features) {
    if constexpr (WHERE == IN_REGISTERS) {
      DC_UNROLL
      for (int i = 0; i < ROW_TILES * D / 16; i++) {
        f[i % ROW_TILES][i / ROW_TILES] = load(0, i / ROW_TILES, i % ROW_TILES);
      }
    }
  }
  DC_MEMBER typename math::fragment load(int part, int k, int t) const {
    return load_fragment<DTYPE>(row_at(from, t * WARP_ROWS, stride) + part * D, stride, rows - t * WARP_ROWS,
                                d - part * D, k);
  }
  /* The fragment of a part; registers and tiles hold a single part. */
  DC_MEMBER typename math::fragment at(int part, int k, int t) const {
    if constexpr (WHERE == IN_REGISTERS) {
      return f[t][k];
    } else if constexpr (WHERE == IN_SHARED) {
      typename math::fragment tile;
      left_by_rows(tile.a, from + t * WARP_ROWS * stride + 16 * k, stride);
      return tile;
    } else {
      return load(part, k, t);
    }
  }
};

/* sums += left times 16 rows, or 16 columns, of a tile whose rows are LD elements apart. */
template <int DTYPE, int LD, int ROW_TILES, int N, typename T>
DC_DEVICE void multiply_rows(float (&sums)[ROW_TILES][N][4], const typename warp_math<DTYPE>::ready (&left)[ROW_TILES],
                             const T *tile) {
  DC_UNROLL
  for (int n = 0; n < N; n += 2) {
    const typename warp_math<DTYPE>::right right = warp_math<DTYPE>::by_rows(tile + 8 * n, LD);
    DC_UNROLL
    for (int t = 0; t < ROW_TILES; t++) {
      warp_math<DTYPE>::multiply(sums[t][n], sums[t][n + 1], left[t], right);
    }
  }
}
template <int DTYPE, int LD, int ROW_TILES, int N, typename T>
DC_DEVICE void multiply_columns(float (&sums)[ROW_TILES][N][4],
                                const typename warp_math<DTYPE>::ready (&left)[ROW_TILES], const T *tile) {
  DC_UNROLL
  for (int n = 0; n < N; n += 2) {
    const typename warp_math<DTYPE>::right right = warp_math<DTYPE>::by_columns(tile + 8 * n * LD, LD);
    DC_UNROLL
    for (int t = 0; t < ROW_TILES; t++) {
      warp_math<DTYPE>::multiply(sums[t][n], sums[t][n + 1], left[t], right);
    }
  }
}

/* Their sums times `factor`, into rows of [.., d]. */
template <int DTYPE, int D, int ROW_TILES, typename T>
DC_DEVICE void store_rows(T *to, int stride, int rows, int d, const float (&sums)[ROW_TILES][D / 8][4],
                          const float (&factor)[2 * ROW_TILES]) {
  DC_UNROLL
  for (int n = 0; n < D / 8; n++) {
    DC_UNROLL
    for (int i = 0; i < 2 * ROW_TILES; i++) {
      const int row = lane_row() + i * 8, column = 8 * n + lane_pair();
      const float x = sums[i / 2][n][i % 2 * 2] * factor[i], y = sums[i / 2][n][i % 2 * 2 + 1] * factor[i];
      T *at = row_at(to, row, stride) + column;
      if (row < rows && column < d && d % 2 == 0) {
        warp_math<DTYPE>::store_pair(at, x, y);
      } else if (row < rows && column < d) {
        at[0] = warp_math<DTYPE>::narrow(x);
        if (column + 1 < d) {
          at[1] = warp_math<DTYPE>::narrow(y);
        }
      }
    }
  }
}

/* The number that is added to a key's score; -infinity if the key does not exist. Scores are in units of log 2, so that
 * probabilities are powers of two. Finite masks stay finite: masks of the lowest float leave all keys alike. */
template <int DTYPE>
DC_DEVICE float mask_at(const arguments &args, int64_t row, int key, int length) {
  if (key >= length) {
    return -INFINITY;
  }
  if (args.mask == nullptr) {
    return 0;
  }
  const int64_t count = args.batch * args.longest;
  typedef warp_math<DTYPE> math;
  const float m =
      args.wide_mask != 0
          ? device_array(static_cast<const float *>(args.mask), count)[row + key]
          : math::wide(device_array(static_cast<const typename math::element *>(args.mask), count)[row + key]);
  return fabsf(m) <= MAX_FLOAT ? fminf(fmaxf(m * DC_LOG2_E, -MAX_FLOAT), MAX_FLOAT) : m;
}

/* The backward recomputes a row's probabilities as exp2(score - row_max) inverse. A single number, row_max + log2(sum),
 * would lose the sum for large scores. Rows without a key, and those beyond the last one, have probabilities of 0. */
DC_DEVICE void load_softmax(const arguments &args, int64_t first, int row, int rows, float &row_max, float &inverse) {
  const float *at = whole(args.softmax, args, 2 * args.heads) + first + row;
  row_max = row < rows ? at[0] : INFINITY;
  inverse = row < rows ? at[args.heads * args.tokens] : 0.0f;
}
DC_DEVICE void store_softmax(const arguments &args, int64_t row, float row_max, float sum) {
  float *at = whole(args.softmax, args, 2 * args.heads) + row;
  at[0] = sum != 0 ? row_max : INFINITY;
  at[args.heads * args.tokens] = sum != 0 ? 1.0f / sum : 0.0f;
}

/* The tile of keys from `key` on: one part of the keys, one of their values, and the numbers added to their scores. */
template <int DTYPE, int D, int ROWS, typename T>
DC_DEVICE void load_keys(const arguments &args, const attention_head<T> &h, int key, int part, int value_part, T *keys,
                         T *values, float *mask) {
  const int stride = 3 * args.heads * args.d;
  load_tile<DTYPE, D, ROWS>(keys, row_at(h.k, key, stride) + part * D, stride, h.length - key, args.d - part * D);
  load_tile<DTYPE, D, ROWS>(values, row_at(h.v, key, stride) + value_part * D, stride, h.length - key,
                            args.d - value_part * D);
  if (dc_thread() < ROWS) {
    mask[dc_thread()] = mask_at<DTYPE>(args, h.mask, key + static_cast<int>(dc_thread()), h.length);
  }
}

/* ---- dropout ---- */

/* Random words for 16 queries and 16 keys: one call of Philox a lane, for a query and 8 keys. */
struct dropout_words {
  uint32_t words[2][WARP_ROWS][4];
};

DC_DEVICE void generate_dropout_words(dropout_words &random, const arguments &args, int first_query, int first_key,
                                      uint32_t plane) {
  const uint32_t lane = dc_thread() % DC_WARP, keys = lane / WARP_ROWS, query = lane % WARP_ROWS;
  const uint32_t counter[4] = {static_cast<uint32_t>(first_key / 8) + keys, static_cast<uint32_t>(first_query) + query,
                               plane, 0};
  dc_sync_warp(); /* the last ones have been read */
  dc__philox_words(random.words[keys][query], counter, args.key);
  dc_sync_warp();
}

/* Whether a lane's 8 elements of 16 x 16 are kept. Rows are queries, and two neighbours share a word; transposed,
 * columns are queries. */
DC_DEVICE void dropout_mask(bool (&keep)[8], const dropout_words &random, const arguments &args) {
  const uint32_t threshold = args.threshold
                             << 16; /* threshold is below 2^16: bits of the word's other half do not count */
  DC_UNROLL
  for (int i = 0; i < 8; i += 2) {
    const uint32_t word = random.words[i / 4][lane_row() + i % 4 / 2 * 8][lane_pair() / 2];
    keep[i] = word << 16 >= threshold;
    keep[i + 1] = word >= threshold;
  }
}
DC_DEVICE void dropout_mask_transposed(bool (&keep)[8], const dropout_words &random, const arguments &args) {
  const uint32_t threshold = args.threshold << 16;
  const int shift = lane_row() % 2 == 0 ? 16 : 0;
  DC_UNROLL
  for (int i = 0; i < 8; i++) {
    const uint32_t word = random.words[i % 4 / 2][i / 4 * 8 + lane_pair() + i % 2][lane_row() / 2];
    keep[i] = word << shift >= threshold;
  }
}

/* ---- rows ---- */

/* Each block has BLOCK rows of one head; false if the sample is too short to have these. */
template <int BLOCK, typename T>
DC_DEVICE bool locate_rows(const arguments &args, attention_head<T> &h, int &first) {
  const uint32_t blocks = static_cast<uint32_t>((args.longest + BLOCK - 1) / BLOCK);
  h = head_of<T>(args, dc_block() / blocks);
  first = static_cast<int>(dc_block() % blocks) * BLOCK;
  return first < h.length;
}

/* A sum over the four lanes of a row. */
DC_DEVICE float sum_of_row(float x) {
  x += dc_shuffle_xor(x, 1);
  return x + dc_shuffle_xor(x, 2);
}

}  // namespace

#define DC_ATTENTION_KERNEL(pass, DTYPE, name, D, WIDE, blocks)                                                  \
  DC_BLOCKS_KERNEL(dc__attention_##pass##_##name, dc__cuda_attention_args, DC__CUDA_ATTENTION_THREADS, blocks) { \
    pass<DTYPE, D, WIDE>(args);                                                                                  \
  }
/* Kernels for all types and widths of a head; `blocks` of a processor for narrow heads of 16 bits. */
#define DC_ATTENTION_KERNELS(pass, blocks)                                                        \
  DC_ATTENTION_KERNEL(pass, DC_FLOAT32, float32_64, 64, false, 1)                                 \
  DC_ATTENTION_KERNEL(pass, DC_FLOAT32, float32_128, 128, false, 1)                               \
  DC_ATTENTION_KERNEL(pass, DC_FLOAT32, float32_wide, DC__CUDA_ATTENTION_PART_OF_FLOATS, true, 1) \
  DC_ATTENTION_KERNEL(pass, DC_FLOAT16, float16_64, 64, false, blocks)                            \
  DC_ATTENTION_KERNEL(pass, DC_FLOAT16, float16_128, 128, false, 1)                               \
  DC_ATTENTION_KERNEL(pass, DC_FLOAT16, float16_wide, DC__CUDA_ATTENTION_PART_OF_HALVES, true, 1) \
  DC_ATTENTION_KERNEL(pass, DC_BFLOAT16, bfloat16_64, 64, false, blocks)                          \
  DC_ATTENTION_KERNEL(pass, DC_BFLOAT16, bfloat16_128, 128, false, 1)                             \
  DC_ATTENTION_KERNEL(pass, DC_BFLOAT16, bfloat16_wide, DC__CUDA_ATTENTION_PART_OF_HALVES, true, 1)

#endif
