/* Attention on a device, forward, in tiles: keys come block by block, and the softmax is kept up to a factor (Milakov and
 * Gimelshein 2018; Dao et al. 2022). */
#include "kernels/cuda/attention.h"

namespace {

/* Over the four lanes of a row. */
DC_DEVICE float most_of_row(float x) {
  x = fmaxf(x, dc_shuffle_xor(x, 1));
  return fmaxf(x, dc_shuffle_xor(x, 2));
}

/* A row's state: the scores' maximum so far, and this lane's part of the sum. */
struct softmax {
  float most[2], sum[2];
};

/* Scores become probabilities up to a factor, and what was summed before is brought to the same factor. Before the first
 * key all of that is zeros. */
template <int N, int D>
DC_DEVICE void soften(float (&s)[N][4], float (&out)[D / 8][4], softmax &state) {
  DC_UNROLL
  for (int half = 0; half < 2; half++) {
    float found = -INFINITY;
    DC_UNROLL
    for (int n = 0; n < N; n++) {
      found = fmaxf(found, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    }
    const float next = fmaxf(most_of_row(found), state.most[half]);
    const float base = next == -INFINITY ? 0.0f : next;
    const float factor = dc_exp2(state.most[half] - base);
    state.sum[half] *= factor;
    DC_UNROLL
    for (int n = 0; n < N; n++) {
      DC_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; i++) {
        s[n][i] = dc_exp2(s[n][i] - base);
        state.sum[half] += s[n][i];
      }
    }
    DC_UNROLL
    for (int n = 0; n < D / 8; n++) {
      out[n][2 * half] *= factor;
      out[n][2 * half + 1] *= factor;
    }
    state.most[half] = next;
  }
}

template <int DTYPE, int D, bool WIDE>
DC_DEVICE void forward(const arguments &args) {
  typedef warp_math<DTYPE> math;
  typedef typename math::element T;
  enum { ROWS = tile_rows<DTYPE>(), LD = D + math::PAD, PLACES = places<D, WIDE>() };
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
  const int64_t row = first + warp * OWN;
  const int parts = parts_of<D, WIDE>(args), part = own_part<WIDE>();
  const own_rows<DTYPE, D, !WIDE> q(h.q + row * stride, stride, h.length - row, args.d);
  const float to_log2 = args.factor * DC_LOG2_E;
  float out[D / 8][4] = {};
  softmax state = {{-INFINITY, -INFINITY}, {0, 0}};
  for (int64_t key = 0; key < h.length; key += ROWS) {
    float s[ROWS / 8][4] = {};
    int at = 0;
    for (int c = 0; c < parts; c++) {
      at = next_tile<PLACES>(key, ROWS, h.length, [&](int64_t tile, int to) {
        load_keys<DTYPE, D, ROWS>(args, h, tile, c, part, &keys[to][0][0], &values[to][0][0], mask[to]);
      });
      DC_UNROLL
      for (int k = 0; k < D / 16; k++) {
        const typename math::ready left = math::prepare(q.at(c, k));
        DC_UNROLL
        for (int n = 0; n < ROWS / 8; n += 2) {
          math::multiply_columns(s[n], s[n + 1], left, &keys[at][8 * n][16 * k], LD);
        }
      }
    }
    DC_UNROLL
    for (int n = 0; n < ROWS / 8; n++) {
      DC_UNROLL
      for (int i = 0; i < 4; i++) {
        s[n][i] = fmaf(s[n][i], to_log2, mask[at][8 * n + lane_pair() + i % 2]);
      }
    }
    soften<ROWS / 8, D>(s, out, state);
    DC_UNROLL
    for (int k = 0; k < ROWS / 16; k++) {
      if (args.threshold != 0) {
        bool kept[8] = {};
        draw(drawn[warp], args, row, key + 16 * k, h.plane);
        find_kept(kept, drawn[warp], args);
        DC_UNROLL
        for (int i = 0; i < 8; i++) {
          s[2 * k + i / 4][i % 4] = kept[i] ? s[2 * k + i / 4][i % 4] : 0.0f;
        }
      }
      const typename math::ready left = math::prepare(fragment_of<DTYPE>(s[2 * k], s[2 * k + 1]));
      DC_UNROLL
      for (int n = 0; n < D / 8; n += 2) {
        math::multiply_rows(out[n], out[n + 1], left, &values[at][16 * k][8 * n], LD);
      }
    }
  }
  float factor[2];
  for (int half = 0; half < 2; half++) {
    const float sum = sum_of_row(state.sum[half]);
    const int64_t at = row + lane_row() + 8 * half;
    factor[half] = sum != 0 ? args.scale / sum : 1.0f; /* NaN is divided by, too */
    /* Without any key: +infinity, then zeros. */
    if (args.lse != nullptr && part == 0 && lane_pair() == 0 && at < h.length) {
      whole(args.lse, args, args.heads)[h.statistics + at] = sum != 0 ? state.most[half] + log2f(sum) : INFINITY;
    }
  }
  store_own<DTYPE, D>(whole(static_cast<T *>(args.c), args, hidden) + h.out + row * hidden + part * D, hidden,
                      h.length - row, args.d - part * D, out, factor);
}

}  // namespace

DC_ATTENTION_KERNELS(forward, 3)
