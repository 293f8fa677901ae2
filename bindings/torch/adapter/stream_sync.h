/* A context on a CUDA device follows PyTorch: whatever stream is current when an operator is called, the operator's
 * work is ordered on it. Contexts on the CPU have no follower, and pay nothing. */
#ifndef DCT_STREAM_SYNC_H
#define DCT_STREAM_SYNC_H

#include "shim.h"

typedef struct dct_follower dct_follower;

/* Puts the context's stream where PyTorch's is, for one operator: until dct_follow_end() no other thread's operator
 * runs on the context, whose calls are serialised anyway. *follower NULL: the context is on the CPU. Returns NULL or an
 * error's text; then there is nothing to end. */
const char *dct_follow_begin(dc_context *context, dct_follower **follower);
void dct_follow_end(dct_follower *follower); /* takes NULL */

/* The number of its CUDA device. */
int32_t dct_follower_index(const dct_follower *follower);

/* ---- tensors that the offload stream still reads, between begin and end ---- */

typedef struct dct_pinned dct_pinned;

/* Allocates one; NULL and a text in *error if there is no memory. */
dct_pinned *dct_pin_begin(dct_follower *follower, const char **error);
/* Takes over the tensor, until dct_pin_waited() and the current stream have passed; NULL frees the entry. */
void dct_pin_end(dct_follower *follower, dct_pinned *pinned, dct_tensor tensor, int64_t graph_id, int64_t id);
/* The current stream waits for this copy. */
void dct_pin_waited(dct_follower *follower, int64_t graph_id, int64_t id);

#endif
