/* Finds NCCL and checks its version. */
#define _GNU_SOURCE /* dladdr */
#include "comm/nccl/library.h"

#include <dlfcn.h>

#include "device/device.h"

/* Loads both window functions, or sets ncclCommWindowRegister to NULL. */
static void load_optional(void *found, dc__nccl_library *library) {
  const char *missing = NULL;
#define X(name, result, arguments) DC__DLSYM(found, library, name, missing)
  DC__NCCL_OPTIONAL_FUNCTIONS(X)
#undef X
  if (library->version < DC__NCCL_WINDOWS_VERSION || missing != NULL) {
    library->ncclCommWindowRegister = NULL;
  }
}

static dc_status load_functions(void *found, dc__nccl_library *library) {
  const char *missing = NULL;
#define X(name, result, arguments) DC__DLSYM(found, library, name, missing)
  DC__NCCL_FUNCTIONS(X)
#undef X
  Dl_info where = {.dli_fname = "libnccl.so.2"};
  if (library->ncclGetVersion == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "NCCL: what is named libnccl.so.2 is something else: it has no ncclGetVersion");
  }
  (void)dladdr(*(void **)&library->ncclGetVersion, &where);
  dc__nccl_result error = library->ncclGetVersion(&library->version);
  if (error != DC__NCCL_OK) {
    return dc__fail(DC_E_UNSUPPORTED, "NCCL: ncclGetVersion of %s fails (%d)", where.dli_fname, error);
  }
  int version = library->version;
  if (version < DC__NCCL_MIN_VERSION) { /* before 2.9 versions had four digits */
    return dc__fail(DC_E_UNSUPPORTED, "NCCL: %s is version %d.%d.%d, %d.%d or later is needed", where.dli_fname,
                    version < 10000 ? version / 1000 : version / 10000,
                    version % (version < 10000 ? 1000 : 10000) / 100, version % 100, DC__NCCL_MIN_VERSION / 10000,
                    DC__NCCL_MIN_VERSION / 100 % 100);
  }
  load_optional(found, library);
  return missing == NULL ? DC_OK : dc__fail(DC_E_UNSUPPORTED, "NCCL: %s has no %s", where.dli_fname, missing);
}

dc_status dc__nccl_open(dc__nccl_library *library) {
  void *found;
  if (dc__cuda_library_open("libnccl.so.2", "nvidia/nccl/lib", &found) != DC_OK) {
    return dc__fail(DC_E_UNSUPPORTED, "NCCL: there is none: %s", dc_last_error());
  }
  dc_status status = load_functions(found, library);
  dlclose(found);
  return status;
}
