/* A product's epilogue on a device, if cuBLASLt does not do it: gemm_epilogue.c's results within rounding. A block has
 * a row at a time; compiled without contraction. */
#include "kernels/cuda/gemm/gelu.h"
#include "kernels/cuda/gemm/gemm_epilogue_args.h"
#include "kernels/cuda/vec8.h"

namespace {

enum { EPILOGUE_GELU = 2, EPILOGUE_GELU_BACK = 3, GELU_ERF = 1 }; /* enum dc__epilogue, enum dc__gelu_form */

/* aux may be x, and so may out. */
template <int DTYPE>
DC_DEVICE void finish(const dc__cuda_epilogue_args &args) {
  const int64_t columns = args.columns, count = args.rows * columns;
  const void *from = device_array<DTYPE>(args.x, count), *bias = device_array<DTYPE>(args.bias, columns);
  void *to = device_array<DTYPE>(args.out, count), *aux = device_array<DTYPE>(args.aux, count);
  const bool erf = args.gelu == GELU_ERF;
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks()) {
    for (int64_t j = first_piece(); j < columns; j += piece_stride()) {
      const int64_t at = row * columns + j, left = columns - j;
      vec8 x = load<DTYPE>(from, at, left);
      if (args.epilogue == EPILOGUE_GELU_BACK) {
        const vec8 input = load<DTYPE>(aux, at, left);
        DC_UNROLL
        for (int i = 0; i < VEC8; i++) {
          x.at[i] *= gelu_slope(input.at[i], erf);
        }
      } else if (bias != nullptr) {
        add(x, load<DTYPE>(bias, j, left));
        x = rounded<DTYPE>(x);
      }
      if (args.epilogue == EPILOGUE_GELU) {
        if (aux != nullptr) {
          store<DTYPE>(aux, at, left, x);
        }
        DC_UNROLL
        for (int i = 0; i < VEC8; i++) {
          x.at[i] = gelu(x.at[i], erf);
        }
      }
      store<DTYPE>(to, at, left, x);
    }
  }
}

}  // namespace

DC_KERNEL(dc__epilogue_kernel, dc__cuda_epilogue_args, DC__CUDA_ROW_THREADS) {
  DC_BY_TYPE(args.dtype, finish, args);
}
