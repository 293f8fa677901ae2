/* The host's side of the plug-in: host.c has dc__fail and its kin, which here lead into libdc. */
#ifndef DC_CUDA_PLUGIN_HOST_H
#define DC_CUDA_PLUGIN_HOST_H

#include "device/plugin.h"

void dc__cuda_set_host(const dc__plugin_host *given);
/* A CPU device, whose streams are the workers; NULL: no memory, last error set. */
dc_device *dc__cuda_cpu_device(void);

#endif
