/* The exports of libdc_torch.so. Python calls these by ctypes; everything else goes through the operators. */
#ifndef DCT_ADAPTER_H
#define DCT_ADAPTER_H

#include "dc_api.h"

/** Registers the operators `dc::*` and `dc_rt::*` with the PyTorch that this process has loaded. Idempotent.
 *  Returns 0, or a negative number with the reason in dct_error(); then nothing is registered. */
DC_API int dct_register(void);

/** Why dct_register() failed; "" if it did not. */
DC_API const char *dct_error(void);

/** The context that the operators, which have no handle among their arguments, work on. NULL: none. The caller keeps
 *  it alive until another one is set and no operator runs. */
DC_API void dct_set_context(dc_context *context);
DC_API dc_context *dct_get_context(void);

/** Lets the operators that name this graph work on another context than the default one; NULL ends that. The caller
 *  keeps it alive as above. Returns 0, or -1 if there is no memory. */
DC_API int dct_bind(int64_t graph_id, dc_context *context);

/** For a context on a CUDA device, before it is bound or set. From now on its operators work on PyTorch's current
 * stream of that device, and on its tensors alone. dc_context_set_stream() is then the adapter's. A second call does
 * nothing.
 *  device  the context's, which is PyTorch's cuda:index; it and the context live until dct_untrack_stream() has
 * returned Returns NULL, or an error's text, which stays valid. */
DC_API const char *dct_track_stream(dc_context *context, dc_device *device, int32_t index);

/** Sets the context's stream as an operator does, for calls of the library that are none. Returns NULL, or an
 * error's text that stays valid until the thread's next call. A context that is not tracked stays as it is. */
DC_API const char *dct_update_stream(dc_context *context);

/** Ends the tracking, and waits until the context no longer reads PyTorch's tensors. */
DC_API void dct_untrack_stream(dc_context *context);

#endif
