/* NVIDIA's libraries beside the driver, which are looked for when they are needed. */
#ifndef DC_CUDA_VENDOR_LIBRARY_H
#define DC_CUDA_VENDOR_LIBRARY_H

#include "device/cuda/cuda.h"

typedef struct dc__vendor_library {
  const char *name;   /* libfoo.so.13 */
  const char *folder; /* of its wheel, in the folder of Python's packages */
  int driver;         /* the oldest driver on which it runs */
} dc__vendor_library;

/* The first of `count` libraries that the driver runs and that loads: from the folder DC_CUDA_LIB_DIR names, if it is
 * set; else the one that the process has already, the system's, or the wheel's beside the package libdc. It stays
 * open whatever dlclose says. NULL: last error says why. */
void *dc__vendor_library_open(const dc__vendor_library *libraries, size_t count, int driver);

/* The same for the device's driver; `need` is who needs what, `package` what to install (for CUDA 12 with -cu12). To be
 * closed when its functions are looked up. */
dc_status dc__cuda_vendor_library(dc__cuda_device *device, const dc__vendor_library *libraries, size_t count,
                                  const char *need, const char *package, void **library);

#endif
