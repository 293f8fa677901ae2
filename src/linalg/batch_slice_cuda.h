/* The operators on a device whose memory the host cannot touch, inside the room. Work is queued on the device's own
 * stream by the calling thread; what the host wants to know comes back in one copy of a few hundred bytes a matrix. */
#ifndef DC_LINALG_BATCH_SLICE_CUDA_H
#define DC_LINALG_BATCH_SLICE_CUDA_H

#include "kernels/cuda/kernels_cuda.h"
#include "linalg/linalg.h"

enum { DC__BATCH_SLICE_BYTES = 256 << 20 }; /* beyond that one matrix or sample more hides no launch */

/* A few matrices of a batch that go through an operator together, in memory of the device. */
typedef struct dc__batch_slice {
  dc_linalg *l;
  dc_stream *stream;
  void *gemm_workspace; /* what products may use */
  dc__cuda_matrix_stats *reports;
  dc__cuda_matrix_stats host_reports[DC__CUDA_BATCH_SLICE]; /* reports, as they came last */
  double *sums;                                             /* [count, rows] */
  char *matrices;                                           /* the operator's own, 256-byte aligned */
  int64_t first;                                            /* matrix of the batch */
  int32_t count, max_count;                                 /* matrices now; in any flight of the batch */
} dc__batch_slice;

/* Takes scratch for flights through a batch: `bytes` of squares and `rows` sums a matrix, and `more` behind all of the
 * squares. max_count 0: nothing to compute. */
dc_status dc__batch_slice_init(dc__batch_slice *f, dc_linalg *l, const char *fn, int64_t batch, int64_t rows,
                               size_t bytes, size_t more);
/* `count` matrices of the flight, from its matrix `begin` on, as a flight. */
dc__batch_slice dc__batch_slice_subslice(const dc__batch_slice *f, int32_t begin, int32_t count);
/* On to the matrices from `first`; false: there are none. Reports become zeros. */
bool dc__batch_slice_advance(dc__batch_slice *f, int64_t first, int64_t batch);
/* Waits, and brings the reports here. */
void dc__batch_slice_sync_reports(dc__batch_slice *f);
void dc__batch_slice_clear_reports(dc__batch_slice *f); /* reports become zeros */

/* One matrix as kernels take it; the flight's alone, and dense ones of the flight's own. */
dc__cuda_matrices dc__mat_cuda_view(const dc__mat *mat);
dc__cuda_matrices dc__batch_slice_view(const dc__batch_slice *f, const dc__mat *mat);
dc__cuda_matrices dc__batch_slice_dense_view(const dc__batch_slice *f, void *data, int32_t dtype, int64_t rows,
                                             int64_t cols);

/* reports: the largest entry of each matrix and, where `mirrored`, how far it is from symmetric. */
void dc__batch_slice_measure(dc__batch_slice *f, const dc__cuda_matrices *from, bool mirrored);
/* reports: the largest sum of a row, or the sum of squares. */
void dc__batch_slice_reduce(dc__batch_slice *f, const dc__cuda_matrices *from, bool squares);
/* Matrix i of the flight into memory here, dense, which is the caller's to free, by way of as much of the device's at
 * `through`; false: there is no memory. */
bool dc__batch_slice_copy_to_host(dc__batch_slice *f, const dc__mat *mat, int32_t i, void *staging, dc__mat *host);
/* The bits of a magnitude, as a number. */
double dc__double_from_bits(uint64_t bits);

#endif
