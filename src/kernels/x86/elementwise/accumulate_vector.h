/* Sums of the floating-point types of at most 32 bits. INIT names the function that puts them into a table. */
#include "kernels/x86/vector.h"

#define ACCUMULATE(name, to, from)                                  \
  static void name(void *dst, const void *src, int64_t count) {     \
    for (int64_t i = 0; i < count; i += WIDTH) {                    \
      store(dst, to, i, add(load(dst, to, i), load(src, from, i))); \
    }                                                               \
  }

ACCUMULATE(f32_f32, DC_FLOAT32, DC_FLOAT32)
ACCUMULATE(f32_f16, DC_FLOAT32, DC_FLOAT16)
ACCUMULATE(f32_bf16, DC_FLOAT32, DC_BFLOAT16)
ACCUMULATE(f16_f16, DC_FLOAT16, DC_FLOAT16)
ACCUMULATE(bf16_bf16, DC_BFLOAT16, DC_BFLOAT16)

void INIT(dc__kernel_table *table) {
  table->accumulate[DC_FLOAT32][DC_FLOAT32] = f32_f32;
  table->accumulate[DC_FLOAT32][DC_FLOAT16] = f32_f16;
  table->accumulate[DC_FLOAT32][DC_BFLOAT16] = f32_bf16;
  table->accumulate[DC_FLOAT16][DC_FLOAT16] = f16_f16;
  table->accumulate[DC_BFLOAT16][DC_BFLOAT16] = bf16_bf16;
}
