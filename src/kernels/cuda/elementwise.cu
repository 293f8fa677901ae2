/* Casts, additions and the fixed-order reduction over ranks on a device: bit for bit what cast.c, accumulate.c and
 * reduce.c compute, for elements at multiples of their size. Compiled without contraction. */
#include "kernels/cuda/gpu.h"

#include "dc_api.h"
#include "kernels/convert.h"
#include "kernels/cuda/args.h"

namespace {

template <int DTYPE> struct stored;
template <> struct stored<DC_FLOAT32> { typedef float type; };
template <> struct stored<DC_FLOAT64> { typedef double type; };
template <> struct stored<DC_FLOAT16> { typedef uint16_t type; };
template <> struct stored<DC_BFLOAT16> { typedef uint16_t type; };
template <> struct stored<DC_INT8> { typedef int8_t type; };
template <> struct stored<DC_INT32> { typedef int32_t type; };
template <> struct stored<DC_INT64> { typedef int64_t type; };

template <int DTYPE> using stored_t = typename stored<DTYPE>::type;

DC_CONSTANT bool is_float(int dtype) {
  return dtype == DC_FLOAT32 || dtype == DC_FLOAT64 || dtype == DC_FLOAT16 || dtype == DC_BFLOAT16;
}

/* dc__compute_dtype(). */
DC_CONSTANT int middle(int a, int b) {
  return a == DC_FLOAT64 || b == DC_FLOAT64 ? DC_FLOAT64 : is_float(a) || is_float(b) ? DC_FLOAT32 : DC_INT64;
}

/* Into a middle type, and out of one. */
template <int M, int FROM> DC_DEVICE stored_t<M> widen(stored_t<FROM> x) {
  if constexpr (FROM == DC_FLOAT16) {
    return dc__f32_of_f16(x);
  } else if constexpr (FROM == DC_BFLOAT16) {
    return dc__f32_of_bf16(x);
  } else {
    return static_cast<stored_t<M>>(x);
  }
}

template <int TO, int M> DC_DEVICE stored_t<TO> narrow(stored_t<M> x) {
  if constexpr (TO == M) {
    return x;
  } else if constexpr (TO == DC_FLOAT16) {
    return dc__f16_of_f32(static_cast<float>(x));
  } else if constexpr (TO == DC_BFLOAT16) {
    return dc__bf16_of_f32(static_cast<float>(x));
  } else if constexpr (is_float(TO) || M == DC_INT64) {
    return static_cast<stored_t<TO>>(x);
  } else {
    constexpr int64_t high = static_cast<int64_t>(~UINT64_C(0) >> (65 - 8 * sizeof(stored_t<TO>)));
    return static_cast<stored_t<TO>>(dc__integer_of(static_cast<double>(x), -high - 1, high));
  }
}

template <int TO, int FROM> DC_DEVICE stored_t<TO> cast(stored_t<FROM> x) {
  if constexpr (TO == FROM) {
    return x;
  } else {
    return narrow<TO, middle(TO, FROM)>(widen<middle(TO, FROM), FROM>(x));
  }
}

DC_DEVICE float sum(float a, float b) {
  return a + b;
}
DC_DEVICE double sum(double a, double b) {
  return a + b;
}
DC_DEVICE int64_t sum(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); /* wraps */
}

template <int TO, int FROM> DC_DEVICE stored_t<TO> added(stored_t<TO> to, stored_t<FROM> from) {
  constexpr int m = middle(TO, FROM);
  return narrow<TO, m>(sum(widen<m, TO>(to), widen<m, FROM>(from)));
}

template <int DTYPE, typename T> DC_DEVICE auto array(T *data, int64_t count) {
  return DC_MEMORY(data, count * static_cast<int64_t>(sizeof(stored_t<DTYPE>)), sizeof(stored_t<DTYPE>));
}

template <int D, int S, bool ADD> DC_DEVICE void binary(const dc__cuda_binary_args &args) {
  auto *dst = static_cast<stored_t<D> *>(array<D>(args.dst, args.count));
  const auto *src = static_cast<const stored_t<S> *>(array<S>(args.src, args.count));
  for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
    if constexpr (ADD) {
      dst[i] = added<D, S>(dst[i], src[i]);
    } else {
      dst[i] = cast<D, S>(src[i]);
    }
  }
}

enum { LEVELS = 7 }; /* 64 sources */

/* ((0+1)+(2+3))+…, a lone last one moves up: level l holds a whole tree of 2^l sources, like the digits of a number to
 * which one is added for each source. */
template <int S> DC_DEVICE stored_t<middle(S, S)> tree(const dc__cuda_reduce_args &args, int64_t i) {
  typedef stored_t<middle(S, S)> wide;
  const int32_t n = args.n;
  wide level[LEVELS] = {};
  for (int32_t r = 0; r < n; r++) {
    wide carry = widen<middle(S, S), S>(static_cast<const stored_t<S> *>(array<S>(args.src[r], args.count))[i]);
    bool placed = false; /* no break: the levels are registers only when the loop is unrolled */
DC_UNROLL
    for (int l = 0; l < LEVELS; l++) {
      if (!placed && (r >> l & 1) == 0) {
        level[l] = carry;
        placed = true;
      } else if (!placed) {
        carry = sum(level[l], carry);
      }
    }
  }
  wide total = {};
  bool any = false;
DC_UNROLL
  for (int l = 0; l < LEVELS; l++) {
    if ((n >> l & 1) != 0) {
      total = any ? sum(level[l], total) : level[l];
      any = true;
    }
  }
  return total;
}

template <int D, int S> DC_DEVICE void reduce(const dc__cuda_reduce_args &args) {
  constexpr int m = middle(S, S);
  auto *dst = static_cast<stored_t<D> *>(array<D>(args.dst, args.count));
  for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
    stored_t<m> total = tree<S>(args, i);
    if constexpr (is_float(m)) {
      total = args.mean != 0 ? total / static_cast<stored_t<m>>(args.n) : total;
    } else {
      total = cast<m, S>(cast<S, m>(total)); /* integers wrap in their own type */
    }
    const stored_t<D> result = cast<D, m>(total);
    dst[i] = args.accumulate != 0 ? added<D, D>(dst[i], result) : result;
  }
}

} // namespace

/* Every pair of the seven types: PAIRS(dst, src, X) calls X(D, S). */
#define SOURCES(D, src, X)                                                                                   \
  switch (src) {                                                                                             \
    case DC_FLOAT32: X(D, DC_FLOAT32); break;                                                                \
    case DC_FLOAT64: X(D, DC_FLOAT64); break;                                                                \
    case DC_FLOAT16: X(D, DC_FLOAT16); break;                                                                \
    case DC_BFLOAT16: X(D, DC_BFLOAT16); break;                                                              \
    case DC_INT8: X(D, DC_INT8); break;                                                                      \
    case DC_INT32: X(D, DC_INT32); break;                                                                    \
    default: X(D, DC_INT64); break;                                                                          \
  }
#define PAIRS(dst, src, X)                                 \
  switch (dst) {                                           \
    case DC_FLOAT32: SOURCES(DC_FLOAT32, src, X); break;   \
    case DC_FLOAT64: SOURCES(DC_FLOAT64, src, X); break;   \
    case DC_FLOAT16: SOURCES(DC_FLOAT16, src, X); break;   \
    case DC_BFLOAT16: SOURCES(DC_BFLOAT16, src, X); break; \
    case DC_INT8: SOURCES(DC_INT8, src, X); break;         \
    case DC_INT32: SOURCES(DC_INT32, src, X); break;       \
    default: SOURCES(DC_INT64, src, X); break;             \
  }

#define CAST(D, S) binary<D, S, false>(args)
#define ACCUMULATE(D, S) binary<D, S, true>(args)
#define REDUCE(D, S) reduce<D, S>(args)

DC_KERNEL(dc__cast_kernel, dc__cuda_binary_args, DC__CUDA_THREADS) {
  PAIRS(args.dst_dtype, args.src_dtype, CAST)
}

DC_KERNEL(dc__accumulate_kernel, dc__cuda_binary_args, DC__CUDA_THREADS) {
  PAIRS(args.dst_dtype, args.src_dtype, ACCUMULATE)
}

DC_KERNEL(dc__reduce_kernel, dc__cuda_reduce_args, DC__CUDA_THREADS) {
  PAIRS(args.dst_dtype, args.src_dtype, REDUCE)
}
