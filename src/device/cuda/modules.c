/* The kernels' images. They are loaded when the device is opened, so that an image that does not fit is found then, and
 * not by a launch. */
#include "device/cuda/cuda.h"

/* A kernel that uses more bytes of shared memory than this must declare them in advance. */
enum { SHARED_BYTES = 48 << 10 };

/* Machine code runs on devices of one major compute capability. For later devices the driver compiles the PTX. It also
 * does so if it is too old for the CUDA version that made the machine code. */
static dc_status load_code(dc__cuda_device *device, const dc__kernel_image *image, dc__cu_module *module) {
  const int code = DC__CODE_SM8 + device->major - 8;
  if (code < DC__CODE_PTX) {
    const dc__cu_result error = device->driver.cuModuleLoadData(module, image->code[code]);
    if (error != DC__CU_INVALID_IMAGE && error != DC__CU_NO_BINARY) {
      return error == 0 ? DC_OK : dc__cuda_error(&device->driver, device->model, "cuModuleLoadData", error);
    }
  }
  DC__TRY(DC__CUDA_OPEN(device, cuModuleLoadData, module, image->code[DC__CODE_PTX]));
  return DC_OK;
}

static dc_status load_image(dc__cuda_device *device, const dc__kernel_image *image, dc__cu_module *module,
                            dc__cu_function *to) {
  DC__TRY(load_code(device, image, module));
  for (int32_t i = 0; i < image->count; i++) {
    DC__TRY(DC__CUDA_OPEN(device, cuModuleGetFunction, &to[i], *module, image->kernels[i].name));
    if (image->kernels[i].shared_bytes > SHARED_BYTES) {
      DC__TRY(DC__CUDA_OPEN(device, cuFuncSetAttribute, to[i], DC__CU_FUNCTION_SHARED_BYTES,
                            (int)image->kernels[i].shared_bytes));
    }
  }
  return DC_OK;
}

dc_status dc__cuda_kernels_load(dc__cuda_device *device) {
  int32_t images = 0;
  int32_t kernels = 0;
  for (; dc__kernel_images[images].count != 0; images++) {
    kernels += dc__kernel_images[images].count;
  }
  device->modules = dc__calloc((size_t)images + 1, sizeof(dc__cu_module));
  device->kernels = dc__calloc((size_t)kernels, sizeof(dc__cu_function));
  if (device->modules == NULL || device->kernels == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc__cu_function *to = device->kernels;
  for (int32_t i = 0; i < images; i++) {
    DC__TRY(load_image(device, &dc__kernel_images[i], &device->modules[i], to));
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
