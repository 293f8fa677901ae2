/* A context on a CUDA device tracks PyTorch's current stream: the work of an operator is ordered on the stream that is
 * current when the operator is called. Contexts on the CPU have no dct_stream_sync, and pay nothing. */
#ifndef DCT_STREAM_SYNC_H
#define DCT_STREAM_SYNC_H

#include "shim.h"

typedef struct dct_stream_sync dct_stream_sync;

/* Sets the context's stream to PyTorch's current one, for one operator. Until dct_stream_sync_end() no other thread's
 * operator runs on the context, whose calls are serialised anyway. *begun is NULL if the context is on the CPU. Returns
 * NULL or an error's text; then there is nothing to end. */
const char *dct_stream_sync_begin(dc_context *context, dct_stream_sync **begun);
void dct_stream_sync_end(dct_stream_sync *sync); /* takes NULL */

/* The number of its CUDA device. */
int32_t dct_stream_sync_index(const dct_stream_sync *sync);

/* ---- tensors that the offload stream still reads, between begin and end ---- */

typedef struct dct_held_tensor dct_held_tensor;

/* Allocates one; NULL and a text in *error if there is no memory. */
dct_held_tensor *dct_hold_begin(dct_stream_sync *sync, const char **error);
/* Takes over the tensor, until dct_hold_waited() and the current stream have passed; NULL frees the entry. */
void dct_hold_end(dct_stream_sync *sync, dct_held_tensor *held, dct_tensor tensor, int64_t graph_id, int64_t id);
/* The current stream waits for this copy. */
void dct_hold_waited(dct_stream_sync *sync, int64_t graph_id, int64_t id);

#endif
