/* Attention on a device, backward. Probabilities are recomputed from the scores and each row's maximum and sum. The
 * gradients of queries and those of keys and values are two kernels, each of which computes the probabilities, so that
 * blocks share no sum. */
#include "kernels/cuda/attention/attention.h"

namespace {

/* Computes a probability times its dropout m, and the score's gradient. Input: a score less its row's maximum, the
 * inverse of the row's sum, and the gradient of the probability. */
DC_DEVICE void softmax_grad(float &s, float &dp, float inverse, float delta, float m) {
  const float p = dc_exp2(s) * inverse;
  dp = p * fmaf(dp, m, -delta);
  s = p * m;
}

/* The scores and the gradients of the probabilities: products of a warp's own rows with 16 rows of two tiles. A wide
 * head's loop is not unrolled, since it would need too many registers. */
template <int DTYPE, int D, bool WIDE, int ROW_TILES, typename LEFT_S, typename LEFT_DP, typename T>
DC_DEVICE void multiply_s_and_dp(int part, float (&s)[ROW_TILES][2][4], const LEFT_S &a, const T *with_a,
                                 float (&dp)[ROW_TILES][2][4], const LEFT_DP &b, const T *with_b) {
  typedef warp_math<DTYPE> math;
  enum { LD = D + math::PAD };
  const int left = a.d - part * D, steps = WIDE && left < D ? (left + 15) / 16 : D / 16;
  DC_UNROLL
  for (int k = 0; k < steps; k++) {
    typename math::ready left[ROW_TILES];
    DC_UNROLL
    for (int t = 0; t < ROW_TILES; t++) {
      left[t] = math::prepare(a.at(part, k, t));
    }
    multiply_columns<DTYPE, LD>(s, left, with_a + 16 * k);
    DC_UNROLL
    for (int t = 0; t < ROW_TILES; t++) {
      left[t] = math::prepare(b.at(part, k, t));
    }
    multiply_columns<DTYPE, LD>(dp, left, with_b + 16 * k);
  }
}

/* A block's shared memory for the gradient of its queries. */
template <int DTYPE, int D, bool WIDE>
struct alignas(16) dq_shared {
  typedef typename warp_math<DTYPE>::element T;
  enum { ROWS = WIDE ? 16 : tile_rows<DTYPE>(), LD = D + warp_math<DTYPE>::PAD, BUFFERS = tile_buffers<D, WIDE>() };
  T keys[BUFFERS][ROWS][LD], values[BUFFERS][ROWS][LD];
  float mask[BUFFERS][ROWS];
  dropout_words random[WARPS];
};

/* The gradient of the queries; and delta, the sum of a row's output times its gradient, which the other kernel reads.
 */
template <int DTYPE, int D, bool WIDE>
DC_DEVICE void compute_dq(const arguments &args, dq_shared<DTYPE, D, WIDE> &shared) {
  typedef warp_math<DTYPE> math;
  typedef typename math::element T;
  typedef dq_shared<DTYPE, D, WIDE> memory;
  enum { ROWS = memory::ROWS, LD = memory::LD, BUFFERS = memory::BUFFERS, ROW_TILES = warp_row_tiles<DTYPE, D>() };
  auto &keys = shared.keys, &values = shared.values;
  auto &mask = shared.mask;
  dropout_words(&random)[WARPS] = shared.random;
  attention_head<T> h;
  int first;
  if (!locate_rows<block_rows<ROW_TILES>()>(args, h, first)) {
    return;
  }
  const int hidden = args.heads * args.d, stride = 3 * hidden;
  const int warp = static_cast<int>(dc_thread() / DC_WARP);
  const int row = first + warp * ROW_TILES * WARP_ROWS, left_rows = h.length - row;
  const T *dc = row_at(whole(static_cast<const T *>(args.dc), args, hidden) + h.out, row, hidden);
  const T *out = row_at(whole(static_cast<const T *>(args.c), args, hidden) + h.out, row, hidden);
  const int parts = parts_of<D, WIDE>(args), part = block_part<WIDE>();
  typedef warp_rows<DTYPE, D, ROW_TILES, DTYPE != DC_FLOAT32 && !WIDE ? IN_REGISTERS : IN_GLOBAL> rows;
  const rows q(row_at(h.q, row, stride), stride, left_rows, args.d);
  const rows dout(dc, hidden, left_rows, args.d);
  float row_max[2 * ROW_TILES], inverse[2 * ROW_TILES], delta[2 * ROW_TILES] = {};
  for (int c = 0; c < parts; c++) {
    DC_UNROLL
    for (int k = 0; k < ROW_TILES * D / 16; k++) {
      const int t = k % ROW_TILES;
      const typename math::fragment dx = dout.at(c, k / ROW_TILES, t);
      const typename math::fragment x = load_fragment<DTYPE>(row_at(out, t * WARP_ROWS, hidden) + c * D, hidden,
                                                             left_rows - t * WARP_ROWS, args.d - c * D, k / ROW_TILES);
      DC_UNROLL
      for (int i = 0; i < 4; i++) {
        float a, b, da, db;
        math::get(x, i / 2, i % 2, a, b);
        math::get(dx, i / 2, i % 2, da, db);
        delta[2 * t + i / 2] += a * da + b * db;
      }
    }
  }
  DC_UNROLL
  for (int i = 0; i < 2 * ROW_TILES; i++) {
    delta[i] = sum_of_row(delta[i]);
    const int at = row + lane_row() + 8 * i;
    load_softmax(args, h.statistics, at, h.length, row_max[i], inverse[i]);
    if (part == 0 && lane_pair() == 0 && at < h.length) {
      whole(args.delta, args, args.heads)[h.statistics + at] = delta[i];
    }
  }
  const float to_log2 = args.factor * DC_LOG2_E;
  float dq[ROW_TILES][D / 8][4] = {};
  int c = 0;
  const auto fetch = [&](int tile, int to) {
    load_keys<DTYPE, D, ROWS>(args, h, tile, c, c, &keys[to][0][0], &values[to][0][0], mask[to]);
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
    for (int k16 = 0; k16 < ROWS; k16 += 16) {
      float s[ROW_TILES][2][4] = {}, dp[ROW_TILES][2][4] = {};
      for (int i = 1; i <= parts; i++) {
        if constexpr (WIDE) {
          c = (part + i) % parts; /* the block's own part comes last, and stays loaded */
          at = next_tile<BUFFERS>(key, ROWS, h.length, fetch);
        }
        multiply_s_and_dp<DTYPE, D, WIDE>(c, s, q, &keys[at][k16][0], dp, dout, &values[at][k16][0]);
      }
      typename math::ready left[ROW_TILES];
      DC_UNROLL
      for (int t = 0; t < ROW_TILES; t++) {
        bool keep[8] = {};
        if (args.threshold != 0) {
          generate_dropout_words(random[warp], args, row + t * WARP_ROWS, key + k16, h.plane);
          dropout_mask(keep, random[warp], args);
        }
        DC_UNROLL
        for (int i = 0; i < 8; i++) {
          const int half = 2 * t + i % 4 / 2, column = i / 4 * 8 + lane_pair() + i % 2;
          float &score = s[t][i / 4][i % 4];
          score = fmaf(score, to_log2, mask[at][k16 + column]) - row_max[half];
          const float m = args.threshold == 0 ? 1.0f : keep[i] ? args.scale : 0.0f;
          softmax_grad(score, dp[t][i / 4][i % 4], inverse[half], delta[half], m);
        }
        left[t] = math::prepare(fragment_of<DTYPE>(dp[t][0], dp[t][1]));
      }
      multiply_rows<DTYPE, LD>(dq, left, &keys[at][k16][0]);
    }
  }
  float factor[2 * ROW_TILES];
  DC_UNROLL
  for (int i = 0; i < 2 * ROW_TILES; i++) {
    factor[i] = args.factor;
  }
  const int64_t to = h.q - whole(static_cast<const T *>(args.qkv), args, stride);
  store_rows<DTYPE, D, ROW_TILES>(row_at(whole(static_cast<T *>(args.dqkv), args, stride) + to, row, stride) + part * D,
                                  stride, left_rows, args.d - part * D, dq, factor);
}

/* The tile of queries from `query` on: a part of them and of the gradients of their outputs, and their statistics. */
template <int DTYPE, int D, int ROWS, typename T>
DC_DEVICE void load_queries(const arguments &args, const attention_head<T> &h, int query, int part, T *queries,
                            T *douts, float *row_max, float *inverse, float *delta) {
  const int hidden = args.heads * args.d, stride = 3 * hidden;
  const int left = h.length - query;
  const T *dc = whole(static_cast<const T *>(args.dc), args, hidden) + h.out;
  load_tile<DTYPE, D, ROWS>(queries, row_at(h.q, query, stride) + part * D, stride, left, args.d - part * D);
  load_tile<DTYPE, D, ROWS>(douts, row_at(dc, query, hidden) + part * D, hidden, left, args.d - part * D);
  if (dc_thread() < ROWS) {
    const int at = query + static_cast<int>(dc_thread());
    load_softmax(args, h.statistics, at, h.length, row_max[dc_thread()], inverse[dc_thread()]);
    delta[dc_thread()] = at < h.length ? whole(args.delta, args, args.heads)[h.statistics + at] : 0;
  }
}

/* A block's shared memory for the gradients of its keys and values. Narrow heads of 16 bits keep their keys in
 * registers. Their values, and both of wider heads, are kept here. float32 has no room for them, and heads in parts
 * keep none. */
template <int DTYPE, int D, bool WIDE>
struct alignas(16) dk_dv_shared {
  typedef typename warp_math<DTYPE>::element T;
  static constexpr bool IN_BLOCK = DTYPE != DC_FLOAT32 && !WIDE;
  static constexpr operand_location VALUES = IN_BLOCK ? IN_SHARED : IN_GLOBAL,
                                    KEYS = IN_BLOCK && D == 64 ? IN_REGISTERS : VALUES;
  enum {
    ROWS = WIDE || (IN_BLOCK && D > 64) ? 16 : 32,
    LD = D + warp_math<DTYPE>::PAD,
    BUFFERS = tile_buffers<D, WIDE>()
  };
  enum { COPIES = KEYS == IN_SHARED ? 2 : 1, STORED_ROWS = IN_BLOCK ? block_rows<warp_row_tiles<DTYPE, D>()>() : 1 };
  T own[COPIES][STORED_ROWS][LD];
  T queries[BUFFERS][ROWS][LD], douts[BUFFERS][ROWS][LD];
  float row_max[BUFFERS][ROWS], inverse[BUFFERS][ROWS], delta[BUFFERS][ROWS];
  dropout_words random[WARPS];
};

/* The gradients of keys and values: rows are keys, columns queries. */
template <int DTYPE, int D, bool WIDE>
DC_DEVICE void compute_dk_dv(const arguments &args, dk_dv_shared<DTYPE, D, WIDE> &shared) {
  typedef warp_math<DTYPE> math;
  typedef typename math::element T;
  typedef dk_dv_shared<DTYPE, D, WIDE> memory;
  constexpr operand_location VALUES = memory::VALUES, KEYS = memory::KEYS;
  enum {
    ROWS = memory::ROWS,
    LD = memory::LD,
    BUFFERS = memory::BUFFERS,
    COPIES = memory::COPIES,
    STORED_ROWS = memory::STORED_ROWS
  };
  enum { ROW_TILES = warp_row_tiles<DTYPE, D>(), BLOCK = block_rows<ROW_TILES>() };
  auto &own = shared.own;
  auto &queries = shared.queries, &douts = shared.douts;
  auto &row_max = shared.row_max, &inverse = shared.inverse, &delta = shared.delta;
  dropout_words(&random)[WARPS] = shared.random;
  attention_head<T> h;
  int first;
  if (!locate_rows<block_rows<ROW_TILES>()>(args, h, first)) {
    return;
  }
  const int hidden = args.heads * args.d, stride = 3 * hidden;
  const int warp = static_cast<int>(dc_thread() / DC_WARP);
  const int row = first + warp * ROW_TILES * WARP_ROWS, left_rows = h.length - row;
  const int parts = parts_of<D, WIDE>(args), part = block_part<WIDE>();
  if constexpr (VALUES == IN_SHARED) {
    load_tile<DTYPE, D, BLOCK>(&own[0][0][0], row_at(h.v, first, stride), stride, h.length - first, args.d);
  }
  if constexpr (KEYS == IN_SHARED) {
    load_tile<DTYPE, D, BLOCK>(&own[1][0][0], row_at(h.k, first, stride), stride, h.length - first, args.d);
  }
  const auto rows_of = [&](operand_location where, const T *from, int copy) {
    return where == IN_SHARED ? &own[copy % COPIES][warp * ROW_TILES * WARP_ROWS % STORED_ROWS][0]
                              : row_at(from, row, stride);
  };
  const warp_rows<DTYPE, D, ROW_TILES, KEYS> k_rows(rows_of(KEYS, h.k, 1), KEYS == IN_SHARED ? LD : stride, left_rows,
                                                    args.d);
  const warp_rows<DTYPE, D, ROW_TILES, VALUES> v_rows(rows_of(VALUES, h.v, 0), VALUES == IN_SHARED ? LD : stride,
                                                      left_rows, args.d);
  float mask[2 * ROW_TILES];
  DC_UNROLL
  for (int i = 0; i < 2 * ROW_TILES; i++) {
    mask[i] = mask_at<DTYPE>(args, h.mask, row + lane_row() + 8 * i, h.length);
  }
  const float to_log2 = args.factor * DC_LOG2_E;
  float dk[ROW_TILES][D / 8][4] = {}, dv[ROW_TILES][D / 8][4] = {};
  int c = 0;
  const auto fetch = [&](int tile, int to) {
    load_queries<DTYPE, D, ROWS>(args, h, tile, c, &queries[to][0][0], &douts[to][0][0], row_max[to], inverse[to],
                                 delta[to]);
  };
  if (BUFFERS == 2) {
    fetch(0, 0);
  }
  for (int query = 0; query < h.length; query += ROWS) {
    int at = 0;
    if constexpr (!WIDE) {
      at = next_tile<BUFFERS>(query, ROWS, h.length, fetch);
    }
    DC_ROLLED
    for (int q16 = 0; q16 < ROWS; q16 += 16) {
      float s[ROW_TILES][2][4] = {}, dp[ROW_TILES][2][4] = {};
      for (int i = 1; i <= parts; i++) {
        if constexpr (WIDE) {
          c = (part + i) % parts;
          at = next_tile<BUFFERS>(query, ROWS, h.length, fetch);
        }
        multiply_s_and_dp<DTYPE, D, WIDE>(c, s, k_rows, &queries[at][q16][0], dp, v_rows, &douts[at][q16][0]);
      }
      typename math::ready left_p[ROW_TILES], left_s[ROW_TILES];
      DC_UNROLL
      for (int t = 0; t < ROW_TILES; t++) {
        bool keep[8] = {};
        if (args.threshold != 0) {
          generate_dropout_words(random[warp], args, query + q16, row + t * WARP_ROWS, h.plane);
          dropout_mask_transposed(keep, random[warp], args);
        }
        DC_UNROLL
        for (int i = 0; i < 8; i++) {
          const int half = 2 * t + i % 4 / 2, column = q16 + i / 4 * 8 + lane_pair() + i % 2;
          float &score = s[t][i / 4][i % 4];
          score = fmaf(score, to_log2, mask[half]) - row_max[at][column];
          const float m = args.threshold == 0 ? 1.0f : keep[i] ? args.scale : 0.0f;
          softmax_grad(score, dp[t][i / 4][i % 4], inverse[at][column], delta[at][column], m);
        }
        left_p[t] = math::prepare(fragment_of<DTYPE>(s[t][0], s[t][1]));
        left_s[t] = math::prepare(fragment_of<DTYPE>(dp[t][0], dp[t][1]));
      }
      multiply_rows<DTYPE, LD>(dv, left_p, &douts[at][q16][0]);
      multiply_rows<DTYPE, LD>(dk, left_s, &queries[at][q16][0]);
    }
  }
  float factor[2 * ROW_TILES], one[2 * ROW_TILES];
  DC_UNROLL
  for (int i = 0; i < 2 * ROW_TILES; i++) {
    factor[i] = args.factor;
    one[i] = 1;
  }
  const int64_t at = h.k - whole(static_cast<const T *>(args.qkv), args, stride);
  T *to = row_at(whole(static_cast<T *>(args.dqkv), args, stride) + at, row, stride) + part * D;
  store_rows<DTYPE, D, ROW_TILES>(to, stride, left_rows, args.d - part * D, dk, factor);
  store_rows<DTYPE, D, ROW_TILES>(to + hidden, stride, left_rows, args.d - part * D, dv, one);
}

template <int DTYPE, int D, bool WIDE>
DC_DEVICE void backward_dq(const arguments &args) {
  typedef dq_shared<DTYPE, D, WIDE> memory;
  DC_SHARED(memory, shared, );
  compute_dq<DTYPE, D, WIDE>(args, shared);
}

template <int DTYPE, int D, bool WIDE>
DC_DEVICE void backward_dk_dv(const arguments &args) {
  typedef dk_dv_shared<DTYPE, D, WIDE> memory;
  DC_SHARED(memory, shared, );
  compute_dk_dv<DTYPE, D, WIDE>(args, shared);
}

/* Both, if a block has a whole head: the caches still hold the second pass's input, and delta is the block's own. */
template <int DTYPE, int D, bool WIDE>
DC_DEVICE void backward_dqkv(const arguments &args) {
  union memory {
    dq_shared<DTYPE, D, WIDE> dq;
    dk_dv_shared<DTYPE, D, WIDE> dk_dv;
  };
  DC_SHARED(memory, shared, );
  compute_dq<DTYPE, D, WIDE>(args, shared.dq);
  dc_sync();
  compute_dk_dv<DTYPE, D, WIDE>(args, shared.dk_dv);
}

}  // namespace

DC_ATTENTION_KERNELS(backward_dq, 2)
DC_ATTENTION_KERNELS(backward_dk_dv, 2)
DC_ATTENTION_KERNEL(backward_dqkv, DC_FLOAT16, float16_64, 64, false, 2)
DC_ATTENTION_KERNEL(backward_dqkv, DC_BFLOAT16, bfloat16_64, 64, false, 2)
