/* Attention on a device, forward, in tiles: keys come block by block, and the softmax is kept up to a factor (Milakov
 * and Gimelshein 2018; Dao et al. 2022). */
#include "kernels/cuda/attention/attention.h"

namespace {

/* The maximum over the four lanes of a row. */
DC_DEVICE float max_of_row(float x) {
  x = fmaxf(x, dc_shuffle_xor(x, 1));
  return fmaxf(x, dc_shuffle_xor(x, 2));
}

/* A row's state: the scores' maximum so far, and this lane's part of the sum. */
struct softmax_state {
  float row_max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
};

/* Scores become probabilities up to a factor, and earlier sums are scaled to the same factor. Before the first key all
 * sums are zeros. */
template <int N, int D, int ROW_TILES>
DC_DEVICE void online_softmax_rows(float (&s)[ROW_TILES][N][4], float (&out)[ROW_TILES][D / 8][4],
                                   softmax_state (&state)[ROW_TILES], const float *mask, float to_log2) {
  DC_UNROLL
  for (int row = 0; row < 2 * ROW_TILES; row++) {
    const int t = row / 2, first = row % 2 * 2;
    float tile_max = -INFINITY;
    DC_UNROLL
    for (int n = 0; n < N; n++) {
      float *x = &s[t][n][first];
      x[0] = fmaf(x[0], to_log2, mask[8 * n + lane_pair()]);
      x[1] = fmaf(x[1], to_log2, mask[8 * n + lane_pair() + 1]);
      tile_max = fmaxf(tile_max, fmaxf(x[0], x[1]));
    }
    float &row_max = state[t].row_max[row % 2], &sum = state[t].sum[row % 2];
    const float next = fmaxf(max_of_row(tile_max), row_max);
    const float base = next == -INFINITY ? 0.0f : next;
    const float factor = dc_exp2(row_max - base);
    sum *= factor;
    DC_UNROLL
    for (int n = 0; n < 2 * N; n++) {
      float &x = s[t][n / 2][first + n % 2];
      x = dc_exp2(x - base);
      sum += x;
    }
    DC_UNROLL
    for (int n = 0; n < D / 8; n++) {
      out[t][n][first] *= factor;
      out[t][n][first + 1] *= factor;
    }
    row_max = next;
  }
}

/* Applies dropout to the probabilities of 16 rows, from `row` on, and 16 keys. */
template <int DTYPE>
DC_DEVICE void apply_dropout(float (&first)[4], float (&second)[4], dropout_words &random, const arguments &args,
                             int row, int key, uint32_t plane) {
  bool keep[8] = {};
  generate_dropout_words(random, args, row, key, plane);
  dropout_mask(keep, random, args);
  DC_UNROLL
  for (int i = 0; i < 4; i++) {
    first[i] = keep[i] ? first[i] : 0.0f;
    second[i] = keep[4 + i] ? second[i] : 0.0f;
  }
}

template <int DTYPE, int D, bool WIDE>
DC_DEVICE void forward(const arguments &args) {
  typedef warp_math<DTYPE> math;
  typedef typename math::element T;
  enum {
    ROWS = tile_rows<DTYPE>(),
    LD = D + math::PAD,
    BUFFERS = tile_buffers<D, WIDE>(),
    ROW_TILES = warp_row_tiles<DTYPE, D>()
  };
  enum { SCORED = ROWS / ROW_TILES }; /* keys whose scores registers hold */
  DC_SHARED(T, keys, [BUFFERS][ROWS][LD]);
  DC_SHARED(T, values, [BUFFERS][ROWS][LD]);
  DC_SHARED(float, mask, [BUFFERS][ROWS]);
  DC_SHARED(dropout_words, random, [WARPS]);
  attention_head<T> h;
  int first;
  if (!locate_rows<block_rows<ROW_TILES>()>(args, h, first)) {
    return;
  }
  const int hidden = args.heads * args.d, stride = 3 * hidden;
  const int warp = static_cast<int>(dc_thread() / DC_WARP);
  const int row = first + warp * ROW_TILES * WARP_ROWS;
  const int parts = parts_of<D, WIDE>(args), part = block_part<WIDE>();
  const warp_rows<DTYPE, D, ROW_TILES, WIDE ? IN_GLOBAL : IN_REGISTERS> q(row_at(h.q, row, stride), stride,
                                                                          h.length - row, args.d);
  const float to_log2 = args.factor * DC_LOG2_E;
  float out[ROW_TILES][D / 8][4] = {};
  softmax_state state[ROW_TILES];
  int c = 0;
  const auto fetch = [&](int tile, int to) {
    load_keys<DTYPE, D, ROWS>(args, h, tile, c, part, &keys[to][0][0], &values[to][0][0], mask[to]);
  };
  if (BUFFERS == 2) {
    fetch(0, 0);
  }
  for (int key = 0; key < h.length; key += ROWS) {
    int at = 0;
    if constexpr (!WIDE) {
      at = next_tile<BUFFERS>(key, ROWS, h.length, fetch);
    }
    DC_ROLLED
    for (int from = 0; from < ROWS; from += SCORED) {
      float s[ROW_TILES][SCORED / 8][4] = {};
      for (int i = 0; i < parts; i++) {
        if constexpr (WIDE) {
          c = i;
          at = next_tile<BUFFERS>(key, ROWS, h.length, fetch);
        }
        DC_UNROLL
        for (int k = 0; k < D / 16; k++) {
          typename math::ready left[ROW_TILES];
          DC_UNROLL
          for (int t = 0; t < ROW_TILES; t++) {
            left[t] = math::prepare(q.at(c, k, t));
          }
          multiply_columns<DTYPE, LD>(s, left, &keys[at][from][16 * k]);
        }
      }
      online_softmax_rows<SCORED / 8, D>(s, out, state, &mask[at][from], to_log2);
      DC_UNROLL
      for (int k = 0; k < SCORED / 16; k++) {
        typename math::ready left[ROW_TILES];
        DC_UNROLL
        for (int t = 0; t < ROW_TILES; t++) {
          if (args.threshold != 0) {
            apply_dropout<DTYPE>(s[t][2 * k], s[t][2 * k + 1], random[warp], args, row + t * WARP_ROWS,
                                 key + from + 16 * k, h.plane);
          }
          left[t] = math::prepare(fragment_of<DTYPE>(s[t][2 * k], s[t][2 * k + 1]));
        }
        multiply_rows<DTYPE, LD>(out, left, &values[at][from + 16 * k][0]);
      }
    }
  }
  float factor[2 * ROW_TILES];
  DC_UNROLL
  for (int i = 0; i < 2 * ROW_TILES; i++) {
    const float sum = sum_of_row(state[i / 2].sum[i % 2]);
    const int at = row + lane_row() + 8 * i;
    factor[i] = sum != 0 ? args.scale / sum : 1.0f; /* a NaN sum is a divisor too */
    if (args.softmax != nullptr && part == 0 && lane_pair() == 0 && at < h.length) {
      store_softmax(args, h.statistics + at, state[i / 2].row_max[i % 2], sum);
    }
  }
  store_rows<DTYPE, D, ROW_TILES>(row_at(whole(static_cast<T *>(args.c), args, hidden) + h.out, row, hidden) + part * D,
                                  hidden, h.length - row, args.d - part * D, out, factor);
}

}  // namespace

DC_ATTENTION_KERNELS(forward, 2)
