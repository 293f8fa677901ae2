/* Finds the driver, and translates its errors. */
#include <dlfcn.h>
#include <stdio.h>

#include "device/cuda/cuda.h"

/* The driver stays loaded until the process ends, since threads of its own run its code. */
static dc_status driver_load(dc__cuda_driver *driver) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == NULL) {
    return dc__fail(DC_E_NO_DEVICE, "CUDA: no NVIDIA driver on this machine: %s", dlerror());
  }
  const char *missing = NULL;
#define X(name, arguments) DC__DLSYM(library, driver, name, missing)
  DC__CU_FUNCTIONS(X)
#undef X
  dlclose(library);
  if (missing != NULL) {
    return dc__fail(DC_E_NO_DEVICE, "CUDA: the NVIDIA driver is too old: it has no %s; CUDA %d.0 or later is needed",
                    missing, DC__CU_OLDEST_DRIVER / 1000);
  }
  return DC_OK;
}

dc_status dc__cuda_driver_open(dc__cuda_driver *driver) {
  DC__TRY(driver_load(driver));
  int version = 0;
  dc__cu_result error = driver->cuInit(0);
  if (error != 0) {
    (void)dc__cuda_error(driver, "CUDA", "cuInit", error);
    return dc__fail(DC_E_NO_DEVICE, "%s", dc_last_error());
  }
  error = driver->cuDriverGetVersion(&version);
  if (error != 0 || version < DC__CU_OLDEST_DRIVER) {
    return dc__fail(DC_E_NO_DEVICE, "CUDA: the NVIDIA driver is too old: it knows CUDA %d.%d, %d.0 or later is needed",
                    version / 1000, version % 1000 / 10, DC__CU_OLDEST_DRIVER / 1000);
  }
  return DC_OK;
}

/* The driver's sticky errors: a kernel, a copy or the device itself has failed. */
bool dc__cuda_is_lost(dc__cu_result error) {
  static const dc__cu_result sticky[] = {4,   46,  214, 220, 226, 700, 702, 709, 710, 714,
                                         715, 716, 717, 718, 719, 721, 810, 911, 999};
  for (size_t i = 0; i < DC__COUNT(sticky); i++) {
    if (sticky[i] == error) {
      return true;
    }
  }
  return false;
}

dc_status dc__cuda_error(const dc__cuda_driver *driver, const char *name, const char *call, dc__cu_result error) {
  const char *id = NULL;
  const char *text = NULL;
  if (driver->cuGetErrorName(error, &id) != 0 || id == NULL) {
    id = "an unknown error";
  }
  if (driver->cuGetErrorString(error, &text) != 0 || text == NULL) {
    text = "no text";
  }
  const char *advice = error == DC__CU_DEVICE_UNAVAILABLE ? "; its compute mode may keep it for another process"
                       : dc__cuda_is_lost(error) ? "; the device is lost to this process, which must be started again"
                                                 : "";
  return dc__fail(error == DC__CU_OUT_OF_MEMORY ? DC_E_NO_MEMORY : DC_E_DEVICE, "%s: %s: %s (%s, %d)%s", name, call,
                  text, id, error, advice);
}
