/* Casts, additions and the fixed-order reduction over ranks on a device, for elements aligned to their size: bit for
 * bit the results of cast.c, accumulate.c and reduce.c. Compiled without contraction. */
#include "kernels/cuda/gpu.h"

#include "dc_api.h"
#include "kernels/cuda/elementwise/elementwise_args.h"
#include "kernels/cuda/vec.h"
#include "kernels/elementwise/convert.h"

namespace {

template <int DTYPE>
struct element;
template <>
struct element<DC_FLOAT32> {
  typedef float type;
};
template <>
struct element<DC_FLOAT64> {
  typedef double type;
};
template <>
struct element<DC_FLOAT16> {
  typedef uint16_t type;
};
template <>
struct element<DC_BFLOAT16> {
  typedef uint16_t type;
};
template <>
struct element<DC_INT8> {
  typedef int8_t type;
};
template <>
struct element<DC_INT32> {
  typedef int32_t type;
};
template <>
struct element<DC_INT64> {
  typedef int64_t type;
};

template <int DTYPE>
using element_t = typename element<DTYPE>::type;

DC_CONSTANT bool is_float(int dtype) {
  return dtype == DC_FLOAT32 || dtype == DC_FLOAT64 || dtype == DC_FLOAT16 || dtype == DC_BFLOAT16;
}

/* dc__compute_dtype(). */
DC_CONSTANT int compute_dtype(int a, int b) {
  return a == DC_FLOAT64 || b == DC_FLOAT64 ? DC_FLOAT64 : is_float(a) || is_float(b) ? DC_FLOAT32 : DC_INT64;
}

/* Conversion to a middle type, and from it. */
template <int M, int FROM>
DC_DEVICE element_t<M> widen(element_t<FROM> x) {
  if constexpr (FROM == DC_FLOAT16) {
    return dc__f32_of_f16(x);
  } else if constexpr (FROM == DC_BFLOAT16) {
    return dc__f32_of_bf16(x);
  } else {
    return static_cast<element_t<M>>(x);
  }
}

template <int TO, int M>
DC_DEVICE element_t<TO> narrow(element_t<M> x) {
  if constexpr (TO == M) {
    return x;
  } else if constexpr (TO == DC_FLOAT16) {
    return dc__f16_of_f32(static_cast<float>(x));
  } else if constexpr (TO == DC_BFLOAT16) {
    return dc__bf16_of_f32(static_cast<float>(x));
  } else if constexpr (is_float(TO) || M == DC_INT64) {
    return static_cast<element_t<TO>>(x);
  } else {
    constexpr int64_t high = static_cast<int64_t>(~UINT64_C(0) >> (65 - 8 * sizeof(element_t<TO>)));
    return static_cast<element_t<TO>>(dc__integer_of(static_cast<double>(x), -high - 1, high));
  }
}

template <int TO, int FROM>
DC_DEVICE element_t<TO> cast(element_t<FROM> x) {
  if constexpr (TO == FROM) {
    return x;
  } else {
    return narrow<TO, compute_dtype(TO, FROM)>(widen<compute_dtype(TO, FROM), FROM>(x));
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

template <int TO, int FROM>
DC_DEVICE element_t<TO> added(element_t<TO> to, element_t<FROM> from) {
  constexpr int m = compute_dtype(TO, FROM);
  return narrow<TO, m>(sum(widen<m, TO>(to), widen<m, FROM>(from)));
}

template <int DTYPE, typename T>
DC_DEVICE auto array(T *data, int64_t count) {
  return DC_MEMORY(data, count * static_cast<int64_t>(sizeof(element_t<DTYPE>)), sizeof(element_t<DTYPE>));
}

/* A thread's elements at a time, to move 16 bytes of the widest type: between the floating-point types of weights and
 * gradients. */
DC_CONSTANT int64_t vector_width(int dst, int src, size_t widest) {
  return widest > 4 || !is_float(dst) || !is_float(src) ? 1 : 16 / static_cast<int64_t>(widest);
}

template <int DTYPE, int64_t N>
using pack = dc_pack<element_t<DTYPE>, N>;

template <int DTYPE>
DC_DEVICE bool is_finite(element_t<DTYPE> x) {
  if constexpr (DTYPE == DC_FLOAT16) {
    return (x & 0x7c00u) != 0x7c00u;
  } else if constexpr (DTYPE == DC_BFLOAT16) {
    return (x & 0x7f80u) != 0x7f80u;
  } else if constexpr (is_float(DTYPE)) {
    return x - x == 0; /* neither an infinity nor NaN */
  } else {
    return true;
  }
}

/* Elements i to i + N - 1; returns whether they are finite then. */
template <int D, int S, bool ADD, int64_t N>
DC_DEVICE bool binary_at(void *dst, const void *src, int64_t i) {
  const pack<S, N> from = dc_load<element_t<S>, N>(src, i);
  pack<D, N> to = {};
  bool finite = true;
  if constexpr (ADD) {
    to = dc_load<element_t<D>, N>(dst, i);
  }
  DC_UNROLL
  for (int64_t j = 0; j < N; j++) {
    if constexpr (ADD) {
      to.at[j] = added<D, S>(to.at[j], from.at[j]);
    } else {
      to.at[j] = cast<D, S>(from.at[j]);
    }
    finite = finite && is_finite<D>(to.at[j]);
  }
  dc_store(dst, i, to);
  return finite;
}

DC_DEVICE void record_nonfinite(const dc__cuda_binary_args &args) {
  dc__nonfinite *record = DC_MEMORY(args.nonfinite, sizeof *args.nonfinite, alignof(dc__nonfinite));
  dc_atomic_max(&record->found, 1);
  dc_atomic_max(&record->key, args.key);
}

template <int D, int S, bool ADD>
DC_DEVICE void binary(const dc__cuda_binary_args &args) {
  constexpr size_t widest = sizeof(element_t<D>) > sizeof(element_t<S>) ? sizeof(element_t<D>) : sizeof(element_t<S>);
  constexpr int64_t n = vector_width(D, S, widest);
  void *dst = array<D>(args.dst, args.count);
  const void *src = array<S>(args.src, args.count);
  bool finite = true;
  const int64_t whole =
      dc_is_aligned<element_t<D>, n>(dst) && dc_is_aligned<element_t<S>, n>(src) ? args.count / n * n : 0;
  for (int64_t i = dc_first() * n; i < whole; i += dc_step() * n) {
    finite = binary_at<D, S, ADD, n>(dst, src, i) && finite;
  }
  for (int64_t i = whole + dc_first(); i < args.count; i += dc_step()) {
    finite = binary_at<D, S, ADD, 1>(dst, src, i) && finite;
  }
  if (!finite && args.nonfinite != nullptr) {
    record_nonfinite(args);
  }
}

/* With several elements at a time at most FEW sources, so that a thread's registers leave room for other threads. */
enum { MAX_VECTOR_SOURCES = 64 };

/* ((0+1)+(2+3))+…, a lone last one moves up. Level l holds a whole tree of 2^l sources, like a digit of a binary
 * counter that each source increments. */
template <int S, int64_t N>
DC_DEVICE pack<compute_dtype(S, S), N> tree(const dc__cuda_reduce_args &args, int64_t i) {
  constexpr int m = compute_dtype(S, S);
  constexpr int levels = N > 1 ? 7 : 9; /* FEW and DC__CUDA_SOURCES are 2^6 and 2^8 */
  const int32_t n = args.n;
  pack<m, N> level[levels] = {};
  for (int32_t r = 0; r < n; r++) {
    const pack<S, N> from = dc_load<element_t<S>, N>(array<S>(args.src[r], args.count), i);
    pack<m, N> carry;
    DC_UNROLL
    for (int64_t j = 0; j < N; j++) {
      carry.at[j] = widen<m, S>(from.at[j]);
    }
    bool placed = false; /* no break: the levels are registers only when the loop is unrolled */
    DC_UNROLL
    for (int l = 0; l < levels; l++) {
      if (!placed && (r >> l & 1) == 0) {
        level[l] = carry;
        placed = true;
      } else if (!placed) {
        DC_UNROLL
        for (int64_t j = 0; j < N; j++) {
          carry.at[j] = sum(level[l].at[j], carry.at[j]);
        }
      }
    }
  }
  pack<m, N> total = {};
  bool any = false;
  DC_UNROLL
  for (int l = 0; l < levels; l++) {
    if ((n >> l & 1) != 0) {
      DC_UNROLL
      for (int64_t j = 0; j < N; j++) {
        total.at[j] = any ? sum(level[l].at[j], total.at[j]) : level[l].at[j];
      }
      any = true;
    }
  }
  return total;
}

template <int D, int S, int64_t N>
DC_DEVICE void reduce_at(const dc__cuda_reduce_args &args, void *dst, int64_t i) {
  constexpr int m = compute_dtype(S, S);
  const pack<m, N> totals = tree<S, N>(args, i);
  pack<D, N> to = {};
  if (args.accumulate != 0) {
    to = dc_load<element_t<D>, N>(dst, i);
  }
  DC_UNROLL
  for (int64_t j = 0; j < N; j++) {
    element_t<m> total = totals.at[j];
    if constexpr (is_float(m)) {
      total = args.mean != 0 ? total / static_cast<element_t<m>>(args.n) : total;
    } else {
      total = cast<m, S>(cast<S, m>(total)); /* integers wrap in their own type */
    }
    const element_t<D> result = cast<D, m>(total);
    to.at[j] = args.accumulate != 0 ? added<D, D>(to.at[j], result) : result;
  }
  dc_store(dst, i, to);
}

template <int D, int S>
DC_DEVICE void reduce(const dc__cuda_reduce_args &args) {
  constexpr int64_t n =
      vector_width(D, S, sizeof(element_t<D>) > 4 || sizeof(element_t<S>) > 4 ? 8 : 4); /* the sums' */
  void *dst = array<D>(args.dst, args.count);
  bool aligned = args.n <= MAX_VECTOR_SOURCES && dc_is_aligned<element_t<D>, n>(dst);
  for (int32_t r = 0; r < args.n; r++) {
    aligned = aligned && dc_is_aligned<element_t<S>, n>(args.src[r]);
  }
  const int64_t whole = aligned ? args.count / n * n : 0;
  for (int64_t i = dc_first() * n; i < whole; i += dc_step() * n) {
    reduce_at<D, S, n>(args, dst, i);
  }
  for (int64_t i = whole + dc_first(); i < args.count; i += dc_step()) {
    reduce_at<D, S, 1>(args, dst, i);
  }
}

}  // namespace

/* Every pair of the seven types: PAIRS(dst, src, X) calls X(D, S). */
#define SOURCES(D, src, X) \
  switch (src) {           \
    case DC_FLOAT32:       \
      X(D, DC_FLOAT32);    \
      break;               \
    case DC_FLOAT64:       \
      X(D, DC_FLOAT64);    \
      break;               \
    case DC_FLOAT16:       \
      X(D, DC_FLOAT16);    \
      break;               \
    case DC_BFLOAT16:      \
      X(D, DC_BFLOAT16);   \
      break;               \
    case DC_INT8:          \
      X(D, DC_INT8);       \
      break;               \
    case DC_INT32:         \
      X(D, DC_INT32);      \
      break;               \
    default:               \
      X(D, DC_INT64);      \
      break;               \
  }
#define PAIRS(dst, src, X)          \
  switch (dst) {                    \
    case DC_FLOAT32:                \
      SOURCES(DC_FLOAT32, src, X);  \
      break;                        \
    case DC_FLOAT64:                \
      SOURCES(DC_FLOAT64, src, X);  \
      break;                        \
    case DC_FLOAT16:                \
      SOURCES(DC_FLOAT16, src, X);  \
      break;                        \
    case DC_BFLOAT16:               \
      SOURCES(DC_BFLOAT16, src, X); \
      break;                        \
    case DC_INT8:                   \
      SOURCES(DC_INT8, src, X);     \
      break;                        \
    case DC_INT32:                  \
      SOURCES(DC_INT32, src, X);    \
      break;                        \
    default:                        \
      SOURCES(DC_INT64, src, X);    \
      break;                        \
  }

#define CAST(D, S) binary<D, S, false>(args)
#define ACCUMULATE(D, S) binary<D, S, true>(args)
#define REDUCE(D, S) reduce<D, S>(args)

DC_KERNEL(dc__cast_kernel, dc__cuda_binary_args, DC__CUDA_THREADS){PAIRS(args.dst_dtype, args.src_dtype, CAST)}

DC_KERNEL(dc__accumulate_kernel, dc__cuda_binary_args,
          DC__CUDA_THREADS){PAIRS(args.dst_dtype, args.src_dtype, ACCUMULATE)}

DC_KERNEL(dc__reduce_kernel, dc__cuda_reduce_args, DC__CUDA_THREADS) {
  PAIRS(args.dst_dtype, args.src_dtype, REDUCE)
}
