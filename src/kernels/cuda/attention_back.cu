/* Attention on a device, backward: probabilities come again from the scores and the kept log-sum-exp. The gradients of
 * queries and those of keys and values are two kernels, each of which computes the probabilities, so that no sum is
 * shared between blocks. */
#include "kernels/cuda/attention.h"

namespace {

/* A probability times its dropout m, and the score's gradient, from a score less its log-sum-exp and from the gradient of
 * the probability. */
DC_DEVICE void differentiate(float &s, float &dp, float delta, float m) {
  const float p = dc_exp2(s);
  dp = p * fmaf(dp, m, -delta);
  s = p * m;
}

/* The scores, and the gradients of the probabilities: products of a warp's own rows with 16 rows of two tiles. A wide
 * head's loop is not unrolled, which would take more registers than there are. */
template <int DTYPE, int D, bool WIDE, typename OWN_ROWS, typename T>
DC_DEVICE void multiply_both(int part, float (&s)[2][4], const OWN_ROWS &a, const T *with_a, float (&dp)[2][4],
                             const OWN_ROWS &b, const T *with_b) {
  typedef warp_math<DTYPE> math;
  enum { LD = D + math::PAD };
  const int left = a.d - part * D, steps = WIDE && left < D ? (left + 15) / 16 : D / 16;
  DC_UNROLL
  for (int k = 0; k < steps; k++) {
    const typename math::ready left_a = math::prepare(a.at(part, k)), left_b = math::prepare(b.at(part, k));
    math::multiply_columns(s[0], s[1], left_a, with_a + 16 * k, LD);
    math::multiply_columns(dp[0], dp[1], left_b, with_b + 16 * k, LD);
  }
}

/* The gradient of the queries; and delta, the sum of a row's output times its gradient, which the other kernel reads. */
template <int DTYPE, int D, bool WIDE>
DC_DEVICE void back_queries(const arguments &args) {
  typedef warp_math<DTYPE> math;
  typedef typename math::element T;
  enum { ROWS = WIDE ? 16 : tile_rows<DTYPE>(), LD = D + math::PAD, PLACES = places<D, WIDE>() };
  DC_SHARED(T, keys, [PLACES][ROWS][LD]);
  DC_SHARED(T, values, [PLACES][ROWS][LD]);
  DC_SHARED(float, mask, [PLACES][ROWS]);
  DC_SHARED(draws, drawn, [WARPS]);
  head<T> h;
  int64_t first;
  if (!place(args, h, first)) {
    return;
  }
  const int64_t hidden = static_cast<int64_t>(args.heads) * args.d, stride = 3 * hidden;
  const int warp = static_cast<int>(dc_thread() / DC_WARP);
  const int64_t row = first + warp * OWN, left_rows = h.length - row;
  const T *dc = whole(static_cast<const T *>(args.dc), args, hidden) + h.out + row * hidden;
  const T *out = whole(static_cast<const T *>(args.c), args, hidden) + h.out + row * hidden;
  const int parts = parts_of<D, WIDE>(args), part = own_part<WIDE>();
  const own_rows<DTYPE, D, DTYPE != DC_FLOAT32 && !WIDE> q(h.q + row * stride, stride, left_rows, args.d);
  const own_rows<DTYPE, D, DTYPE != DC_FLOAT32 && !WIDE> dout(dc, hidden, left_rows, args.d);
  float lse[2], delta[2] = {};
  for (int c = 0; c < parts; c++) {
    DC_UNROLL
    for (int k = 0; k < D / 16; k++) {
      const typename math::fragment dx = dout.at(c, k);
      const typename math::fragment x = load_own<DTYPE>(out + c * D, hidden, left_rows, args.d - c * D, k);
      DC_UNROLL
      for (int i = 0; i < 4; i++) {
        float a, b, da, db;
        math::get(x, i / 2, i % 2, a, b);
        math::get(dx, i / 2, i % 2, da, db);
        delta[i / 2] += a * da + b * db;
      }
    }
  }
  DC_UNROLL
  for (int half = 0; half < 2; half++) {
    delta[half] = sum_of_row(delta[half]);
    const int64_t at = row + lane_row() + 8 * half;
    lse[half] = at < h.length ? whole(args.lse, args, args.heads)[h.statistics + at] : INFINITY;
    if (part == 0 && lane_pair() == 0 && at < h.length) {
      whole(args.delta, args, args.heads)[h.statistics + at] = delta[half];
    }
  }
  const float to_log2 = args.factor * DC_LOG2_E;
  float dq[D / 8][4] = {};
  for (int64_t key = 0; key < h.length; key += ROWS) {
    int at = 0, c = 0;
    const auto fetch = [&](int64_t tile, int to) {
      load_keys<DTYPE, D, ROWS>(args, h, tile, c, c, &keys[to][0][0], &values[to][0][0], mask[to]);
    };
    if constexpr (!WIDE) {
      at = next_tile<PLACES>(key, ROWS, h.length, fetch);
    }
    DC_ROLLED
    for (int k16 = 0; k16 < ROWS; k16 += 16) {
      float s[2][4] = {}, dp[2][4] = {};
      for (int i = 1; i <= parts; i++) {
        if constexpr (WIDE) {
          c = (part + i) % parts; /* its own is the last, and stays */
          at = next_tile<PLACES>(key, ROWS, h.length, fetch);
        }
        multiply_both<DTYPE, D, WIDE>(c, s, q, &keys[at][k16][0], dp, dout, &values[at][k16][0]);
      }
      bool kept[8] = {};
      if (args.threshold != 0) {
        draw(drawn[warp], args, row, key + k16, h.plane);
        find_kept(kept, drawn[warp], args);
      }
      DC_UNROLL
      for (int i = 0; i < 8; i++) {
        const int half = i % 4 / 2, column = i / 4 * 8 + lane_pair() + i % 2;
        float &score = s[i / 4][i % 4];
        score = fmaf(score, to_log2, mask[at][k16 + column]) - lse[half];
        const float m = args.threshold == 0 ? 1.0f : kept[i] ? args.scale : 0.0f;
        differentiate(score, dp[i / 4][i % 4], delta[half], m);
      }
      const typename math::ready left = math::prepare(fragment_of<DTYPE>(dp[0], dp[1]));
      DC_UNROLL
      for (int n = 0; n < D / 8; n += 2) {
        math::multiply_rows(dq[n], dq[n + 1], left, &keys[at][k16][8 * n], LD);
      }
    }
  }
  const float factor[2] = {args.factor, args.factor};
  const int64_t to = h.q - whole(static_cast<const T *>(args.qkv), args, stride);
  store_own<DTYPE, D>(whole(static_cast<T *>(args.dqkv), args, stride) + to + row * stride + part * D, stride, left_rows,
                      args.d - part * D, dq, factor);
}

/* The tile of queries from `query` on: a part of them and of the gradients of their outputs, and their statistics. */
template <int DTYPE, int D, int ROWS, typename T>
DC_DEVICE void load_queries(const arguments &args, const head<T> &h, int64_t query, int part, T *queries, T *douts,
                            float *lse, float *delta) {
  const int64_t hidden = static_cast<int64_t>(args.heads) * args.d, stride = 3 * hidden, left = h.length - query;
  const T *dc = whole(static_cast<const T *>(args.dc), args, hidden) + h.out;
  load_tile<DTYPE, D, ROWS>(queries, h.q + query * stride + part * D, stride, left, args.d - part * D);
  load_tile<DTYPE, D, ROWS>(douts, dc + query * hidden + part * D, hidden, left, args.d - part * D);
  if (dc_thread() < ROWS) {
    const int64_t at = query + dc_thread();
    lse[dc_thread()] = at < h.length ? whole(args.lse, args, args.heads)[h.statistics + at] : INFINITY;
    delta[dc_thread()] = at < h.length ? whole(args.delta, args, args.heads)[h.statistics + at] : 0;
  }
}

/* The gradients of keys and values: rows are keys, columns queries. */
template <int DTYPE, int D, bool WIDE>
DC_DEVICE void back_keys(const arguments &args) {
  typedef warp_math<DTYPE> math;
  typedef typename math::element T;
  constexpr bool IN_BLOCK = DTYPE != DC_FLOAT32 && D > 64 && !WIDE;
  enum { ROWS = IN_BLOCK || WIDE ? 16 : tile_rows<DTYPE>(), LD = D + math::PAD, PLACES = places<D, WIDE>() };
  enum { COPIES = IN_BLOCK ? 2 : 1, KEPT = IN_BLOCK ? BLOCK : 1 };
  DC_SHARED(T, own, [COPIES][KEPT][LD]);
  DC_SHARED(T, queries, [PLACES][ROWS][LD]);
  DC_SHARED(T, douts, [PLACES][ROWS][LD]);
  DC_SHARED(float, lse, [PLACES][ROWS]);
  DC_SHARED(float, delta, [PLACES][ROWS]);
  DC_SHARED(draws, drawn, [WARPS]);
  head<T> h;
  int64_t first;
  if (!place(args, h, first)) {
    return;
  }
  const int64_t hidden = static_cast<int64_t>(args.heads) * args.d, stride = 3 * hidden;
  const int warp = static_cast<int>(dc_thread() / DC_WARP);
  const int64_t row = first + warp * OWN, left_rows = h.length - row;
  const int parts = parts_of<D, WIDE>(args), part = own_part<WIDE>();
  /* The sums of 128 features leave no registers for the rows: float32's, and those of wide heads, come from the caches.
   */
  if constexpr (IN_BLOCK) {
    load_tile<DTYPE, D, BLOCK>(&own[0][0][0], h.k + first * stride, stride, h.length - first, args.d);
    load_tile<DTYPE, D, BLOCK>(&own[COPIES - 1][0][0], h.v + first * stride, stride, h.length - first, args.d);
    dc_wait_copies();
    dc_sync();
  }
  typedef own_rows<DTYPE, D, DTYPE != DC_FLOAT32 && D == 64 && !WIDE> rows;
  const rows k_own = IN_BLOCK ? rows(&own[0][warp * OWN % KEPT][0], LD, OWN, D)
                              : rows(h.k + row * stride, stride, left_rows, args.d);
  const rows v_own = IN_BLOCK ? rows(&own[COPIES - 1][warp * OWN % KEPT][0], LD, OWN, D)
                              : rows(h.v + row * stride, stride, left_rows, args.d);
  const float mask[2] = {mask_at<DTYPE>(args, h.mask, row + lane_row(), h.length),
                         mask_at<DTYPE>(args, h.mask, row + lane_row() + 8, h.length)};
  const float to_log2 = args.factor * DC_LOG2_E;
  float dk[D / 8][4] = {}, dv[D / 8][4] = {};
  for (int64_t query = 0; query < h.length; query += ROWS) {
    int at = 0, c = 0;
    const auto fetch = [&](int64_t tile, int to) {
      load_queries<DTYPE, D, ROWS>(args, h, tile, c, &queries[to][0][0], &douts[to][0][0], lse[to], delta[to]);
    };
    if constexpr (!WIDE) {
      at = next_tile<PLACES>(query, ROWS, h.length, fetch);
    }
    DC_ROLLED
    for (int q16 = 0; q16 < ROWS; q16 += 16) {
      float s[2][4] = {}, dp[2][4] = {};
      for (int i = 1; i <= parts; i++) {
        if constexpr (WIDE) {
          c = (part + i) % parts;
          at = next_tile<PLACES>(query, ROWS, h.length, fetch);
        }
        multiply_both<DTYPE, D, WIDE>(c, s, k_own, &queries[at][q16][0], dp, v_own, &douts[at][q16][0]);
      }
      bool kept[8] = {};
      if (args.threshold != 0) {
        draw(drawn[warp], args, query + q16, row, h.plane);
        find_kept_turned(kept, drawn[warp], args);
      }
      DC_UNROLL
      for (int i = 0; i < 8; i++) {
        const int half = i % 4 / 2, column = q16 + i / 4 * 8 + lane_pair() + i % 2;
        float &score = s[i / 4][i % 4];
        score = fmaf(score, to_log2, mask[half]) - lse[at][column];
        const float m = args.threshold == 0 ? 1.0f : kept[i] ? args.scale : 0.0f;
        differentiate(score, dp[i / 4][i % 4], delta[at][column], m);
      }
      const typename math::ready left_p = math::prepare(fragment_of<DTYPE>(s[0], s[1]));
      const typename math::ready left_s = math::prepare(fragment_of<DTYPE>(dp[0], dp[1]));
      DC_UNROLL
      for (int n = 0; n < D / 8; n += 2) {
        math::multiply_rows(dv[n], dv[n + 1], left_p, &douts[at][q16][8 * n], LD);
        math::multiply_rows(dk[n], dk[n + 1], left_s, &queries[at][q16][8 * n], LD);
      }
    }
  }
  const float factor[2] = {args.factor, args.factor}, one[2] = {1, 1};
  T *to = whole(static_cast<T *>(args.dqkv), args, stride) + row * stride + part * D +
          (h.k - whole(static_cast<const T *>(args.qkv), args, stride));
  store_own<DTYPE, D>(to, stride, left_rows, args.d - part * D, dk, factor);
  store_own<DTYPE, D>(to + hidden, stride, left_rows, args.d - part * D, dv, one);
}

}  // namespace

DC_ATTENTION_KERNELS(back_queries, 3)
DC_ATTENTION_KERNELS(back_keys, 2)
