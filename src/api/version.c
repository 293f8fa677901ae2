/* Chapter 1: version and features, and the checksum. */
#include <string.h>

#include "api/api_internal.h"
#include "kernels/kernels.h"

uint32_t dc_api_version(void) {
  return DC_API_VERSION;
}

const char *dc_version_string(void) {
  return "0.1.0";
}

uint32_t dc_crc32c(uint32_t crc, const void *data, int64_t bytes) {
  return data == NULL || bytes <= 0 ? crc : dc__crc32c(crc, data, (size_t)bytes);
}

int32_t dc_has_feature(const char *name) {
  static const char *const always[] = {"cpu",      "comm.threads",  "comm.processes",
                                       "comm.tcp", "comm.external", "comm.mpi"};
  if (name == NULL) {
    return 0;
  }
  for (size_t i = 0; i < DC__COUNT(always); i++) {
    if (strcmp(name, always[i]) == 0) {
      return 1;
    }
  }
  for (int32_t i = 1; i < DC__KERNELS_LEVELS; i++) {
    if (strcmp(name, dc__kernels_names[i]) == 0) {
      return dc__kernels_level() >= i;
    }
  }
  return 0;
}
