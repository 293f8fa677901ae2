/* Second-order updates over ranks, internal: a parameter is cut into blocks with one owner each. Gradients go to the
 * owners, directions come back. Shampoo and K-FAC share this; a layer of K-FAC is one owner's whole parameters. */
#ifndef DC_OPTIM_REDISTRIBUTE_H
#define DC_OPTIM_REDISTRIBUTE_H

#include "comm/comm.h"

/* ---- blocks (partition.c) ---- */

enum { DC__ORDER_MAX = 32 };

/* A parameter's shape for blocks: without lengths of 1, small neighbours merged, and cut at `sides`; or several
 * matrices below each other. */
typedef struct dc__partition {
  int32_t order; /* 1 to DC__ORDER_MAX; a scalar is [1] */
  int64_t shape[DC__ORDER_MAX];
  int64_t sides[DC__ORDER_MAX];
  int64_t numel;
  int64_t blocks; /* 0 for an empty tensor */
} dc__partition;

/* Merges neighbours, from the last dimension on, as long as their product is at most `merge` and more than two
 * dimensions are left; 0 merges nothing. Then cuts every dimension into pieces of `side` and a rest. The product of the
 * shape must fit int64_t. DC_E_UNSUPPORTED for more than DC__ORDER_MAX dimensions longer than 1. */
dc_status dc__partition_merged(const char *fn, const int64_t *shape, int32_t ndim, int64_t merge, int64_t side,
                               dc__partition *partition);
/* [d0, rest] as `splits` matrices, one below the other; ndim is at least 2, and splits divides d0. */
void dc__partition_rows(const int64_t *shape, int32_t ndim, int64_t splits, dc__partition *partition);
/* The parameter as one block. */
void dc__partition_whole(int64_t numel, dc__partition *partition);

/* A block's position in the merged shape. */
typedef struct dc__box {
  int64_t begin[DC__ORDER_MAX];
  int64_t size[DC__ORDER_MAX];
  int64_t count;
} dc__box;

void dc__partition_box(const dc__partition *partition, int64_t block, dc__box *box);
/* Copies a block of the whole parameter to dense memory. stream: NULL on a CPU, else one of the memory's device. */
void dc__box_pack(dc_stream *stream, const dc__partition *partition, const dc__box *box, const float *whole,
                  float *block);
/* Copies the part of the dense block in elements [first, first + count) of the parameter to its position there. */
void dc__box_unpack(dc_stream *stream, const dc__partition *partition, const dc__box *box, const float *block,
                    int64_t first, int64_t count, float *part);

/* Longest processing time first: each item, the costliest first, goes to the rank with the least load so far, which
 * grows by its cost. Ties go to the lower index and the lower rank, so that every rank finds the same. load: of each
 * rank, zeros at first. order: set to the items' order. */
void dc__assign_owners(const double *costs, int64_t count, int32_t world, double *load, int64_t *order,
                       int32_t *owners);

/* ---- gradients in, directions out (redistribute.c) ---- */

/* A participating parameter. Its pointers must outlive the redistribution. */
typedef struct dc__redist_entry {
  int64_t id; /* the parameter's index, for texts */
  const dc__partition *partition;
  const int32_t *owners; /* of each block, the same on every rank */
  int64_t offset, count; /* this rank's part, in elements of the flattened parameter */
} dc__redist_entry;

typedef struct dc__redistribute dc__redistribute;

/* Succeeds on every rank or on none: the ranks exchange statuses. A failed rank keeps its own status and text; the
 * others get DC_E_ABORTED with that rank and status. comm NULL for one rank. */
dc_status dc__optim_agree_status(const char *fn, dc_comm *comm, dc_status own_status);

/* Exchanges the ranks' parts and allocates everything, in the device's memory space; collective. The parts of a
 * parameter are whole on every rank, or lie one after the other in any rank order without gap or overlap; else
 * DC_E_MISMATCH on every rank. comm: NULL for one rank; else it must outlive the redistribution. */
dc_status dc__redistribute_create(const char *fn, dc_device *device, dc_comm *comm, const dc__redist_entry *entries,
                                  int64_t count, dc__redistribute **redistribute);
void dc__redistribute_destroy(dc__redistribute *x); /* NULL does nothing */
/* Sets the stream for queued work of one rank, instead of dc_device.internal_stream. */
void dc__redistribute_set_stream(dc__redistribute *x, dc_stream *stream);

/* This rank's copy of an owned block, dense: the gradient after dc__redistribute_to_owners(), the direction's buffer
 * before dc__redistribute_from_owners(). An entry's blocks are contiguous. NULL if another rank owns the block. */
float *dc__redistribute_block(const dc__redistribute *x, int64_t of_flow, int64_t block);

/* Writes this rank's part of an entry's gradient, or queues that on dc_device.internal_stream. */
typedef void (*dc__fill_fn)(void *user, int64_t entry, float *part);
/* Reads this rank's part of an entry's direction, or queues that. */
typedef void (*dc__apply_fn)(void *user, int64_t entry, const float *part);

/* Sends the gradients to the owners of their blocks. skip: NULL, or flags of skipped entries, the same on every rank.
 * Collective; a few entries at a time, so that no rank holds a whole model. Errors are the communicator's. */
dc_status dc__redistribute_to_owners(dc__redistribute *x, const bool *skip, dc__fill_fn fill, void *user);
/* Sends the directions from the owners to every rank's part. Collective. */
dc_status dc__redistribute_from_owners(dc__redistribute *x, const bool *skip, dc__apply_fn apply, void *user);

/* The stream for collectives on the device's memory; NULL for this thread. */
dc_stream *dc__redistribute_comm_stream(const dc__redistribute *x);

/* Bytes of the buffers. */
int64_t dc__redistribute_bytes(const dc__redistribute *x);

#endif
