/* Opens libdc_cuda.so, which lies beside this library. */
#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/plugin.h"

static dc_status host_fail(dc_status status, const char *text) {
  return dc__fail(status, "%s", text);
}

static const dc__plugin_host host = {host_fail, dc_last_error, dc__cpu_device_open};

/* The plug-in's path; false if this library's own path is unknown or too long. */
static bool path_beside(char path[PATH_MAX]) {
  Dl_info self;
  if (dladdr(&host, &self) == 0 || self.dli_fname == NULL) {
    return false;
  }
  const char *slash = strrchr(self.dli_fname, '/');
  int folder = slash == NULL ? 1 : (int)(slash - self.dli_fname);
  int length = snprintf(path, PATH_MAX, "%.*s/libdc_cuda.so", folder, slash == NULL ? "." : self.dli_fname);
  return length > 0 && length < PATH_MAX;
}

/* The plug-in is never unloaded (RTLD_NODELETE), since devices and their threads run its code. So its handle is not
 * kept. */
static dc_status open_plugin(const dc__plugin **plugin) {
  char path[PATH_MAX];
  if (!path_beside(path)) {
    return dc__fail(DC_E_NO_DEVICE, "CUDA: this library does not know its own folder, where libdc_cuda.so would be");
  }
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == NULL) {
    return dc__fail(DC_E_NO_DEVICE, "CUDA: this installation has no libdc_cuda.so that loads: %s", dlerror());
  }
  dc__plugin_entry_fn entry;
  *(void **)&entry = dlsym(library, DC__PLUGIN_ENTRY);
  *plugin = entry == NULL ? NULL : entry(&host);
  dlclose(library);
  if (*plugin == NULL || (*plugin)->version != DC_API_VERSION ||
      (*plugin)->device_ops_bytes != sizeof(dc__device_ops)) {
    return dc__fail(DC_E_NO_DEVICE, "CUDA: %s is of another build than this library; install both from one", path);
  }
  return DC_OK;
}

/* The device's number: "cuda" is device 0; -1 if this is no CUDA device's name. */
static int32_t number_of(const char *name) {
  if (strcmp(name, "cuda") == 0) {
    return 0;
  }
  if (strncmp(name, "cuda:", 5) != 0 || name[5] < '0' || name[5] > '9' || strlen(name) > 8) {
    return -1;
  }
  char *end;
  long number = strtol(name + 5, &end, 10);
  return *end == '\0' ? (int32_t)number : -1;
}

bool dc__cuda_is_name(const char *name) {
  return number_of(name) >= 0;
}

dc_status dc__cuda_device_open(const char *name, const dc_device_options *options, dc_device **device) {
  const dc__plugin *plugin;
  DC__TRY(open_plugin(&plugin));
  return plugin->open(number_of(name), name, options, device);
}

dc_status dc__cuda_device_count(int32_t *count) {
  const dc__plugin *plugin;
  DC__TRY(open_plugin(&plugin));
  return plugin->count(count);
}

dc_status dc__cuda_library_open(const char *name, const char *folder, void **library) {
  const dc__plugin *plugin;
  DC__TRY(open_plugin(&plugin));
  *library = plugin->library(name, folder);
  return *library != NULL ? DC_OK : DC_E_UNSUPPORTED;
}
