/* The kernels' images: loaded when the device is opened, so that no launch is the first to hear that one does not fit.
 */
#include "device/cuda/cuda.h"

/* Beyond this much shared memory a kernel has to say so beforehand. */
enum { SHARED_BYTES = 48 << 10 };

static dc_status load(dc__cuda_device *device, const dc__kernel_image *image, dc__cu_module *module,
                      dc__cu_function *to) {
  DC__CUDA_CALL(device, cuModuleLoadData, module, image->code);
  for (int32_t i = 0; i < image->count; i++) {
    DC__CUDA_CALL(device, cuModuleGetFunction, &to[i], *module, image->kernels[i].name);
    if (image->kernels[i].shared_bytes > SHARED_BYTES) {
      DC__CUDA_CALL(device, cuFuncSetAttribute, to[i], DC__CU_FUNCTION_SHARED_BYTES,
                    (int)image->kernels[i].shared_bytes);
    }
  }
  return DC_OK;
}

dc_status dc__cuda_kernels_load(dc__cuda_device *device) {
  int32_t images = 0;
  int32_t kernels = 0;
  for (; dc__kernel_images[images].code != NULL; images++) {
    kernels += dc__kernel_images[images].count;
  }
  device->modules = dc__calloc((size_t)images + 1, sizeof(dc__cu_module));
  device->kernels = dc__calloc((size_t)kernels, sizeof(dc__cu_function));
  if (device->modules == NULL || device->kernels == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc__cu_function *to = device->kernels;
  for (int32_t i = 0; i < images; i++) {
    DC__TRY(load(device, &dc__kernel_images[i], &device->modules[i], to));
    to += dc__kernel_images[i].count;
  }
  return DC_OK;
}

void dc__cuda_kernels_unload(dc__cuda_device *device) {
  for (dc__cu_module *module = device->modules; module != NULL && *module != NULL; module++) {
    (void)device->driver.cuModuleUnload(*module);
  }
  dc__free(device->modules);
  dc__free(device->kernels);
}
