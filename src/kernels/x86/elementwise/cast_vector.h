/* Casts between the floating-point types of at most 32 bits. INIT names the function that puts them into a table. */
#include "kernels/x86/vector.h"

#define CAST(name, to, from)                                    \
  static void name(void *dst, const void *src, int64_t count) { \
    for (int64_t i = 0; i < count; i += WIDTH) {                \
      store(dst, to, i, load(src, from, i));                    \
    }                                                           \
  }

CAST(f32_of_f16, DC_FLOAT32, DC_FLOAT16)
CAST(f32_of_bf16, DC_FLOAT32, DC_BFLOAT16)
CAST(f16_of_f32, DC_FLOAT16, DC_FLOAT32)
CAST(f16_of_bf16, DC_FLOAT16, DC_BFLOAT16)
CAST(bf16_of_f32, DC_BFLOAT16, DC_FLOAT32)
CAST(bf16_of_f16, DC_BFLOAT16, DC_FLOAT16)

void INIT(dc__kernel_table *table) {
  table->cast[DC_FLOAT32][DC_FLOAT16] = f32_of_f16;
  table->cast[DC_FLOAT32][DC_BFLOAT16] = f32_of_bf16;
  table->cast[DC_FLOAT16][DC_FLOAT32] = f16_of_f32;
  table->cast[DC_FLOAT16][DC_BFLOAT16] = f16_of_bf16;
  table->cast[DC_BFLOAT16][DC_FLOAT32] = bf16_of_f32;
  table->cast[DC_BFLOAT16][DC_FLOAT16] = bf16_of_f16;
}
