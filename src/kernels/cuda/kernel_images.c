/* The plug-in's table of kernels: each family's images and their kernels. */
#include "device/device.h"
#include "kernels/cuda/kernel_list.h"

#define X(number, name, shared) {#name, (shared)},
#define FAMILY(family)                                                                                      \
  extern const unsigned char dc__cuda_##family##_80[], dc__cuda_##family##_90[], dc__cuda_##family##_ptx[]; \
  static const dc__kernel_name family##_names[] = {DC__CUDA_##family(X)};
DC__CUDA_FAMILIES(FAMILY)
#undef FAMILY
#undef X

extern const dc__kernel_image dc__kernel_images[];
const dc__kernel_image dc__kernel_images[] = {
#define FAMILY(family)                                                        \
  {{dc__cuda_##family##_80, dc__cuda_##family##_90, dc__cuda_##family##_ptx}, \
   family##_names,                                                            \
   (int32_t)DC__COUNT(family##_names)},
    DC__CUDA_FAMILIES(FAMILY)
#undef FAMILY
        {{NULL}, NULL, 0},
};
