/* Attention on a device, backward. Probabilities are recomputed from the scores and each row's maximum and sum. The
 * gradients of queries and those of keys and values are two kernels, each of which computes the probabilities, so that
 * blocks share no sum. */
#include "kernels/cuda/attention/attention.h"

namespace {

/* Computes a probability times its dropout m, and the score's gradient. Input: a score less its row's maximum, the
 * inverse of the row's sum, and the gradient of the probability. */
DC_DEVICE void differentiate(float &s, float &dp, float inverse, float delta, float m) {
  const float p = dc_exp2(s) * inverse;
  dp = p * fmaf(dp, m, -delta);
  s = p * m;
}

/* The scores and the gradients of the probabilities: products of a warp's own rows with 16 rows of two tiles. A wide
 * head's loop is not unrolled, since it would need too many registers. */
template <int DTYPE, int D, bool WIDE, int TALL, typename OWN_A, typename OWN_B, typename T>
DC_DEVICE void multiply_both(int part, float (&s)[TALL][2][4], const OWN_A &a, const T *with_a, float (&dp)[TALL][2][4],
                             const OWN_B &b, const T *with_b) {
  typedef warp_math<DTYPE> math;
  enum { LD = D + math::PAD };
  const int left = a.d - part * D, steps = WIDE && left < D ? (left + 15) / 16 : D / 16;
  DC_UNROLL
  for (int k = 0; k < steps; k++) {
    typename math::ready left[TALL];
    DC_UNROLL
    for (int t = 0; t < TALL; t++) {
      left[t] = math::prepare(a.at(part, k, t));
    }
    multiply_columns<DTYPE, LD>(s, left, with_a + 16 * k);
    DC_UNROLL
    for (int t = 0; t < TALL; t++) {
      left[t] = math::prepare(b.at(part, k, t));
    }
    multiply_columns<DTYPE, LD>(dp, left, with_b + 16 * k);
  }
}

/* A block's shared memory for the gradient of its queries. */
template <int DTYPE, int D, bool WIDE>
struct alignas(16) queries_memory {
  typedef typename warp_math<DTYPE>::element T;
  enum { ROWS = WIDE ? 16 : tile_rows<DTYPE>(), LD = D + warp_math<DTYPE>::PAD, PLACES = places<D, WIDE>() };
  T keys[PLACES][ROWS][LD], values[PLACES][ROWS][LD];
  float mask[PLACES][ROWS];
  draws drawn[WARPS];
};

/* The gradient of the queries; and delta, the sum of a row's output times its gradient, which the other kernel reads.
 */
template <int DTYPE, int D, bool WIDE>
DC_DEVICE void sum_queries(const arguments &args, queries_memory<DTYPE, D, WIDE> &shared) {
  typedef warp_math<DTYPE> math;
  typedef typename math::element T;
  typedef queries_memory<DTYPE, D, WIDE> memory;
  enum { ROWS = memory::ROWS, LD = memory::LD, PLACES = memory::PLACES, TALL = tall_rows<DTYPE, D>() };
  auto &keys = shared.keys, &values = shared.values;
  auto &mask = shared.mask;
  draws(&drawn)[WARPS] = shared.drawn;
  head<T> h;
  int first;
  if (!place<block_rows<TALL>()>(args, h, first)) {
    return;
  }
  const int hidden = args.heads * args.d, stride = 3 * hidden;
  const int warp = static_cast<int>(dc_thread() / DC_WARP);
  const int row = first + warp * TALL * OWN, left_rows = h.length - row;
  const T *dc = row_at(whole(static_cast<const T *>(args.dc), args, hidden) + h.out, row, hidden);
  const T *out = row_at(whole(static_cast<const T *>(args.c), args, hidden) + h.out, row, hidden);
  const int parts = parts_of<D, WIDE>(args), part = own_part<WIDE>();
  typedef own_rows<DTYPE, D, TALL, DTYPE != DC_FLOAT32 && !WIDE ? IN_REGISTERS : ELSEWHERE> rows;
  const rows q(row_at(h.q, row, stride), stride, left_rows, args.d);
  const rows dout(dc, hidden, left_rows, args.d);
  float row_max[2 * TALL], inverse[2 * TALL], delta[2 * TALL] = {};
  for (int c = 0; c < parts; c++) {
    DC_UNROLL
    for (int k = 0; k < TALL * D / 16; k++) {
      const int t = k % TALL;
      const typename math::fragment dx = dout.at(c, k / TALL, t);
      const typename math::fragment x =
          load_own<DTYPE>(row_at(out, t * OWN, hidden) + c * D, hidden, left_rows - t * OWN, args.d - c * D, k / TALL);
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
  for (int i = 0; i < 2 * TALL; i++) {
    delta[i] = sum_of_row(delta[i]);
    const int at = row + lane_row() + 8 * i;
    load_softmax(args, h.statistics, at, h.length, row_max[i], inverse[i]);
    if (part == 0 && lane_pair() == 0 && at < h.length) {
      whole(args.delta, args, args.heads)[h.statistics + at] = delta[i];
    }
  }
  const float to_log2 = args.factor * DC_LOG2_E;
  float dq[TALL][D / 8][4] = {};
  int c = 0;
  const auto fetch = [&](int tile, int to) {
    load_keys<DTYPE, D, ROWS>(args, h, tile, c, c, &keys[to][0][0], &values[to][0][0], mask[to]);
  };
  if (PLACES == 2) {
    fetch(0, 0);
  }
  for (int key = 0; key < h.length; key += ROWS) {
    int at = 0;
    if constexpr (!WIDE) {
      at = next_tile<PLACES>(key, ROWS, h.length, fetch);
    }
    DC_ROLLED
    for (int k16 = 0; k16 < ROWS; k16 += 16) {
      float s[TALL][2][4] = {}, dp[TALL][2][4] = {};
      for (int i = 1; i <= parts; i++) {
        if constexpr (WIDE) {
          c = (part + i) % parts; /* the block's own part comes last, and stays loaded */
          at = next_tile<PLACES>(key, ROWS, h.length, fetch);
        }
        multiply_both<DTYPE, D, WIDE>(c, s, q, &keys[at][k16][0], dp, dout, &values[at][k16][0]);
      }
      typename math::ready left[TALL];
      DC_UNROLL
      for (int t = 0; t < TALL; t++) {
        bool kept[8] = {};
        if (args.threshold != 0) {
          draw(drawn[warp], args, row + t * OWN, key + k16, h.plane);
          dropout_keep(kept, drawn[warp], args);
        }
        DC_UNROLL
        for (int i = 0; i < 8; i++) {
          const int half = 2 * t + i % 4 / 2, column = i / 4 * 8 + lane_pair() + i % 2;
          float &score = s[t][i / 4][i % 4];
          score = fmaf(score, to_log2, mask[at][k16 + column]) - row_max[half];
          const float m = args.threshold == 0 ? 1.0f : kept[i] ? args.scale : 0.0f;
          differentiate(score, dp[t][i / 4][i % 4], inverse[half], delta[half], m);
        }
        left[t] = math::prepare(fragment_of<DTYPE>(dp[t][0], dp[t][1]));
      }
      multiply_rows<DTYPE, LD>(dq, left, &keys[at][k16][0]);
    }
  }
  float factor[2 * TALL];
  DC_UNROLL
  for (int i = 0; i < 2 * TALL; i++) {
    factor[i] = args.factor;
  }
  const int64_t to = h.q - whole(static_cast<const T *>(args.qkv), args, stride);
  store_own<DTYPE, D, TALL>(row_at(whole(static_cast<T *>(args.dqkv), args, stride) + to, row, stride) + part * D,
                            stride, left_rows, args.d - part * D, dq, factor);
}

/* The tile of queries from `query` on: a part of them and of the gradients of their outputs, and their statistics. */
template <int DTYPE, int D, int ROWS, typename T>
DC_DEVICE void load_queries(const arguments &args, const head<T> &h, int query, int part, T *queries, T *douts,
                            float *row_max, float *inverse, float *delta) {
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
struct alignas(16) keys_memory {
  typedef typename warp_math<DTYPE>::element T;
  static constexpr bool IN_BLOCK = DTYPE != DC_FLOAT32 && !WIDE;
  static constexpr kept VALUES = IN_BLOCK ? IN_TILE : ELSEWHERE, KEYS = IN_BLOCK && D == 64 ? IN_REGISTERS : VALUES;
  enum { ROWS = WIDE || (IN_BLOCK && D > 64) ? 16 : 32, LD = D + warp_math<DTYPE>::PAD, PLACES = places<D, WIDE>() };
  enum { COPIES = KEYS == IN_TILE ? 2 : 1, KEPT = IN_BLOCK ? block_rows<tall_rows<DTYPE, D>()>() : 1 };
  T own[COPIES][KEPT][LD];
  T queries[PLACES][ROWS][LD], douts[PLACES][ROWS][LD];
  float row_max[PLACES][ROWS], inverse[PLACES][ROWS], delta[PLACES][ROWS];
  draws drawn[WARPS];
};

/* The gradients of keys and values: rows are keys, columns queries. */
template <int DTYPE, int D, bool WIDE>
DC_DEVICE void sum_keys(const arguments &args, keys_memory<DTYPE, D, WIDE> &shared) {
  typedef warp_math<DTYPE> math;
  typedef typename math::element T;
  typedef keys_memory<DTYPE, D, WIDE> memory;
  constexpr kept VALUES = memory::VALUES, KEYS = memory::KEYS;
  enum { ROWS = memory::ROWS, LD = memory::LD, PLACES = memory::PLACES, COPIES = memory::COPIES, KEPT = memory::KEPT };
  enum { TALL = tall_rows<DTYPE, D>(), BLOCK = block_rows<TALL>() };
  auto &own = shared.own;
  auto &queries = shared.queries, &douts = shared.douts;
  auto &row_max = shared.row_max, &inverse = shared.inverse, &delta = shared.delta;
  draws(&drawn)[WARPS] = shared.drawn;
  head<T> h;
  int first;
  if (!place<block_rows<TALL>()>(args, h, first)) {
    return;
  }
  const int hidden = args.heads * args.d, stride = 3 * hidden;
  const int warp = static_cast<int>(dc_thread() / DC_WARP);
  const int row = first + warp * TALL * OWN, left_rows = h.length - row;
  const int parts = parts_of<D, WIDE>(args), part = own_part<WIDE>();
  if constexpr (VALUES == IN_TILE) {
    load_tile<DTYPE, D, BLOCK>(&own[0][0][0], row_at(h.v, first, stride), stride, h.length - first, args.d);
  }
  if constexpr (KEYS == IN_TILE) {
    load_tile<DTYPE, D, BLOCK>(&own[1][0][0], row_at(h.k, first, stride), stride, h.length - first, args.d);
  }
  const auto rows_of = [&](kept where, const T *from, int copy) {
    return where == IN_TILE ? &own[copy % COPIES][warp * TALL * OWN % KEPT][0] : row_at(from, row, stride);
  };
  const own_rows<DTYPE, D, TALL, KEYS> k_own(rows_of(KEYS, h.k, 1), KEYS == IN_TILE ? LD : stride, left_rows, args.d);
  const own_rows<DTYPE, D, TALL, VALUES> v_own(rows_of(VALUES, h.v, 0), VALUES == IN_TILE ? LD : stride, left_rows,
                                               args.d);
  float mask[2 * TALL];
  DC_UNROLL
  for (int i = 0; i < 2 * TALL; i++) {
    mask[i] = mask_at<DTYPE>(args, h.mask, row + lane_row() + 8 * i, h.length);
  }
  const float to_log2 = args.factor * DC_LOG2_E;
  float dk[TALL][D / 8][4] = {}, dv[TALL][D / 8][4] = {};
  int c = 0;
  const auto fetch = [&](int tile, int to) {
    load_queries<DTYPE, D, ROWS>(args, h, tile, c, &queries[to][0][0], &douts[to][0][0], row_max[to], inverse[to],
                                 delta[to]);
  };
  if (PLACES == 2) {
    fetch(0, 0);
  }
  for (int query = 0; query < h.length; query += ROWS) {
    int at = 0;
    if constexpr (!WIDE) {
      at = next_tile<PLACES>(query, ROWS, h.length, fetch);
    }
    DC_ROLLED
    for (int q16 = 0; q16 < ROWS; q16 += 16) {
      float s[TALL][2][4] = {}, dp[TALL][2][4] = {};
      for (int i = 1; i <= parts; i++) {
        if constexpr (WIDE) {
          c = (part + i) % parts;
          at = next_tile<PLACES>(query, ROWS, h.length, fetch);
        }
        multiply_both<DTYPE, D, WIDE>(c, s, k_own, &queries[at][q16][0], dp, v_own, &douts[at][q16][0]);
      }
      typename math::ready left_p[TALL], left_s[TALL];
      DC_UNROLL
      for (int t = 0; t < TALL; t++) {
        bool kept[8] = {};
        if (args.threshold != 0) {
          draw(drawn[warp], args, query + q16, row + t * OWN, h.plane);
          dropout_keep_transposed(kept, drawn[warp], args);
        }
        DC_UNROLL
        for (int i = 0; i < 8; i++) {
          const int half = 2 * t + i % 4 / 2, column = q16 + i / 4 * 8 + lane_pair() + i % 2;
          float &score = s[t][i / 4][i % 4];
          score = fmaf(score, to_log2, mask[half]) - row_max[at][column];
          const float m = args.threshold == 0 ? 1.0f : kept[i] ? args.scale : 0.0f;
          differentiate(score, dp[t][i / 4][i % 4], inverse[at][column], delta[at][column], m);
        }
        left_p[t] = math::prepare(fragment_of<DTYPE>(s[t][0], s[t][1]));
        left_s[t] = math::prepare(fragment_of<DTYPE>(dp[t][0], dp[t][1]));
      }
      multiply_rows<DTYPE, LD>(dv, left_p, &douts[at][q16][0]);
      multiply_rows<DTYPE, LD>(dk, left_s, &queries[at][q16][0]);
    }
  }
  float factor[2 * TALL], one[2 * TALL];
  DC_UNROLL
  for (int i = 0; i < 2 * TALL; i++) {
    factor[i] = args.factor;
    one[i] = 1;
  }
  const int64_t at = h.k - whole(static_cast<const T *>(args.qkv), args, stride);
  T *to = row_at(whole(static_cast<T *>(args.dqkv), args, stride) + at, row, stride) + part * D;
  store_own<DTYPE, D, TALL>(to, stride, left_rows, args.d - part * D, dk, factor);
  store_own<DTYPE, D, TALL>(to + hidden, stride, left_rows, args.d - part * D, dv, one);
}

template <int DTYPE, int D, bool WIDE>
DC_DEVICE void back_queries(const arguments &args) {
  typedef queries_memory<DTYPE, D, WIDE> memory;
  DC_SHARED(memory, shared, );
  sum_queries<DTYPE, D, WIDE>(args, shared);
}

template <int DTYPE, int D, bool WIDE>
DC_DEVICE void back_keys(const arguments &args) {
  typedef keys_memory<DTYPE, D, WIDE> memory;
  DC_SHARED(memory, shared, );
  sum_keys<DTYPE, D, WIDE>(args, shared);
}

/* Both, if a block has a whole head: the caches still hold the second pass's input, and delta is the block's own. */
template <int DTYPE, int D, bool WIDE>
DC_DEVICE void back_both(const arguments &args) {
  union memory {
    queries_memory<DTYPE, D, WIDE> of_queries;
    keys_memory<DTYPE, D, WIDE> of_keys;
  };
  DC_SHARED(memory, shared, );
  sum_queries<DTYPE, D, WIDE>(args, shared.of_queries);
  dc_sync();
  sum_keys<DTYPE, D, WIDE>(args, shared.of_keys);
}

}  // namespace

DC_ATTENTION_KERNELS(back_queries, 2)
DC_ATTENTION_KERNELS(back_keys, 2)
DC_ATTENTION_KERNEL(back_both, DC_FLOAT16, float16_64, 64, false, 2)
DC_ATTENTION_KERNEL(back_both, DC_BFLOAT16, bfloat16_64, 64, false, 2)
