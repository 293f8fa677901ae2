/* NVIDIA's libraries other than the driver, which are loaded when they are first needed. */
#ifndef DC_CUDA_VENDOR_LIBRARY_H
#define DC_CUDA_VENDOR_LIBRARY_H

#include "device/cuda/cuda.h"

typedef struct dc__vendor_library {
  const char *name;   /* libfoo.so.13 */
  const char *folder; /* of its wheel, in the folder of Python's packages */
  int driver;         /* CUDA version of the oldest driver on which it runs, as 12000 for 12.0 */
} dc__vendor_library;

/* Opens the first of `count` libraries that loads and suits the driver. LIBDC_CUDA_LIB_DIR names the folder, if it is
 * set. Otherwise the process's own copy is tried, then the system's, then the wheel's beside the package libdc. The
 * library stays open even after dlclose. Returns NULL if there is none; the last error says why. */
void *dc__vendor_library_open(const dc__vendor_library *libraries, size_t count, int driver);

/* The same for the device's driver. `need` says for the error text which feature needs which library; `package` is the
 * package to install (for CUDA 12 with -cu12). The caller closes the library after looking up its functions. */
dc_status dc__cuda_vendor_library(dc__cuda_device *device, const dc__vendor_library *libraries, size_t count,
                                  const char *need, const char *package, void **library);

#endif
