/* The interface between libdc.so and libdc_cuda.so, which is opened at run time and must come from the same build. The
 * plug-in does not link to libdc; libdc passes it the functions that it needs. */
#ifndef DC_DEVICE_PLUGIN_H
#define DC_DEVICE_PLUGIN_H

#include "device/device.h"

typedef struct dc__plugin_host {
  dc_status (*fail)(dc_status status, const char *text); /* dc__fail(): libdc keeps each thread's last error */
  const char *(*last_error)(void);
  dc_status (*cpu_open)(const dc_allocator *allocator, dc_device **device);
} dc__plugin_host;

typedef struct dc__plugin {
  uint32_t version; /* DC_API_VERSION of its build */
  size_t device_ops_bytes;
  dc_status (*count)(int32_t *count); /* devices that can be opened; if there is none, the error says why */
  /* Opens one of NVIDIA's libraries. dlclose() ends its use, but it stays loaded. If it returns NULL, the last error
   * says why. `folder` is where the library's Python wheel has it, relative to site-packages. */
  void *(*library)(const char *name, const char *folder);
  dc_status (*open)(int32_t number, const char *name, const dc_device_options *options, dc_device **device);
} dc__plugin;

/* The one name that libdc_cuda.so exports. The host's table must live as long as the process. */
#define DC__PLUGIN_ENTRY "dc_plugin_entry"
typedef const dc__plugin *(*dc__plugin_entry_fn)(const dc__plugin_host *host);

#endif
