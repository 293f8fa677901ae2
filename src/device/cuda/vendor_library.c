/* Finds NVIDIA's libraries. */
#define _GNU_SOURCE /* dladdr, secure_getenv */
#include "device/cuda/vendor_library.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FLAGS = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE };

/* Why no library was found. One that exists but does not load, because it lacks another one for example, tells more
 * than those that do not exist. */
typedef struct search_reason {
  char text[256];
  bool tells;
} search_reason;

static void *open_path(const char *path, search_reason *reason) {
  void *found = dlopen(path, FLAGS);
  const char *why = found == NULL ? dlerror() : NULL;
  if (why != NULL && !reason->tells) {
    snprintf(reason->text, sizeof reason->text, "%s", why);
    reason->tells = strncmp(why, path, strlen(path)) != 0 || strstr(why, "No such file") == NULL;
  }
  return found;
}

static void *open_in(const char *folder, const char *name, search_reason *reason) {
  char path[PATH_MAX];
  int length = snprintf(path, sizeof path, "%s/%s", folder, name);
  if (length > 0 && length < PATH_MAX) {
    return open_path(path, reason);
  }
  if (!reason->tells) {
    snprintf(reason->text, sizeof reason->text, "%s: the folder's name is too long", name);
  }
  return NULL;
}

/* Opens a wheel's library, relative to the folder of this plug-in. */
static void *open_wheel(const dc__vendor_library *library, search_reason *reason) {
  Dl_info self;
  char folder[PATH_MAX];
  if (dladdr((void *)(uintptr_t)&dc__vendor_library_open, &self) == 0 || self.dli_fname == NULL) {
    return NULL;
  }
  const char *slash = strrchr(self.dli_fname, '/');
  int length = snprintf(folder, sizeof folder, "%.*s/../%s", slash == NULL ? 1 : (int)(slash - self.dli_fname),
                        slash == NULL ? "." : self.dli_fname, library->folder);
  return length > 0 && length < PATH_MAX ? open_in(folder, library->name, reason) : NULL;
}

void *dc__vendor_library_open(const dc__vendor_library *libraries, size_t count, int driver) {
  const char *chosen = secure_getenv("LIBDC_CUDA_LIB_DIR");
  search_reason reason = {.text = "the driver is older than all of them"};
  for (size_t i = 0; i < count; i++) {
    const dc__vendor_library *library = &libraries[i];
    if (driver < library->driver) {
      continue;
    }
    void *found = NULL;
    if (chosen != NULL && chosen[0] != '\0') {
      found = open_in(chosen, library->name, &reason);
    } else { /* without a path: the process's own copy, or the system's */
      found = open_path(library->name, &reason);
      found = found != NULL ? found : open_wheel(library, &reason);
    }
    if (found != NULL) {
      return found;
    }
  }
  (void)dc__fail(DC_E_UNSUPPORTED, "%s", reason.text);
  return NULL;
}

dc_status dc__cuda_vendor_library(dc__cuda_device *device, const dc__vendor_library *libraries, size_t count,
                                  const char *need, const char *package, void **library) {
  int version = 0;
  dc__cu_result error = device->driver.cuDriverGetVersion(&version);
  if (error != 0) {
    return dc__cuda_return_error(device, "cuDriverGetVersion", error);
  }
  *library = dc__vendor_library_open(libraries, count, version);
  return *library != NULL
             ? DC_OK
             : dc__fail(DC_E_UNSUPPORTED,
                        "CUDA: %s, and it was not found (%s); install the package %s%s, or name its folder in "
                        "LIBDC_CUDA_LIB_DIR",
                        need, dc_last_error(), package, version < 13000 ? "-cu12" : "");
}
