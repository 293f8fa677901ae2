/* The functions of libdc that the plug-in's files use, forwarded to the host library. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "device/cuda/cuda.h"

static const dc__plugin_host *_Atomic plugin_host;

void dc__cuda_set_host(const dc__plugin_host *host) {
  atomic_store(&plugin_host, host);
}

dc_device *dc__cuda_cpu_device(void) {
  dc_device *cpu = NULL;
  (void)atomic_load(&plugin_host)->cpu_open(NULL, &cpu);
  return cpu;
}

dc_status dc__fail(dc_status status, const char *format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return atomic_load(&plugin_host)->fail(status, text);
}

const char *dc_last_error(void) {
  return atomic_load(&plugin_host)->last_error();
}

void dc__failure_keep(dc__failure *failure, dc_status status) {
  if (failure->status == DC_OK) {
    snprintf(failure->text, sizeof failure->text, "%s", dc_last_error());
    failure->status = status;
  }
}

dc_status dc__failure_raise(const dc__failure *failure) {
  return dc__fail(failure->status, "%s", failure->text);
}
