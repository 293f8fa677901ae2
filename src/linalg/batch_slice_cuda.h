/* Slices of a batch on CUDA: an operator computes one slice at a time. The calling thread queues work on the device's
 * internal stream. One copy, of a few hundred bytes per matrix, brings the results to the host. */
#ifndef DC_LINALG_BATCH_SLICE_CUDA_H
#define DC_LINALG_BATCH_SLICE_CUDA_H

#include "kernels/cuda/kernels_cuda.h"
#include "linalg/linalg.h"

enum { DC__BATCH_SLICE_BYTES = 256 << 20 }; /* larger slices no longer hide launch latency */

/* Matrices of a batch that an operator computes together, and its scratch memory on the device. */
typedef struct dc__batch_slice {
  dc_linalg *l;
  dc_stream *stream;
  void *gemm_workspace;                                     /* for matrix products */
  dc__cuda_matrix_stats *reports;                           /* on the device, [max_count] */
  dc__cuda_matrix_stats host_reports[DC__CUDA_BATCH_SLICE]; /* `reports` as of the latest sync */
  double *sums;                                             /* on the device, [max_count, rows] */
  char *matrices;                                           /* the operator's own memory, 256-byte aligned */
  int64_t first;                                            /* the first matrix's index in the batch */
  int32_t count, max_count;                                 /* matrices in this slice; in any slice of the batch */
} dc__batch_slice;

/* Allocates scratch for the slices of a batch: `bytes` bytes and `rows` sums per matrix, and `more` bytes behind all
 * matrices. max_count is 0 in a query and for an empty batch. */
dc_status dc__batch_slice_init(dc__batch_slice *f, dc_linalg *l, const char *fn, int64_t batch, int64_t rows,
                               size_t bytes, size_t more);
/* Returns the part of a slice with `count` matrices from its matrix `begin` on. */
dc__batch_slice dc__batch_slice_subslice(const dc__batch_slice *f, int32_t begin, int32_t count);
/* Moves on to the matrices from `first` and clears the reports. Returns false at the end of the batch. */
bool dc__batch_slice_advance(dc__batch_slice *f, int64_t first, int64_t batch);
/* Copies the reports to host_reports and waits. */
void dc__batch_slice_sync_reports(dc__batch_slice *f);
void dc__batch_slice_clear_reports(dc__batch_slice *f); /* sets reports to zero */

/* Views for kernels: one matrix, the slice's part of a batch, and dense matrices in the slice's own memory. */
dc__cuda_matrices dc__mat_cuda_view(const dc__mat *mat);
dc__cuda_matrices dc__batch_slice_view(const dc__batch_slice *f, const dc__mat *mat);
dc__cuda_matrices dc__batch_slice_dense_view(const dc__batch_slice *f, void *data, int32_t dtype, int64_t rows,
                                             int64_t cols);

/* Sets reports to each matrix's largest entry. */
void dc__batch_slice_measure(dc__batch_slice *f, const dc__cuda_matrices *from);
/* Sets reports of square matrices: the largest entry, the asymmetry, and the largest entry of low times the lower
 * triangle plus high times the upper one. */
void dc__batch_slice_measure_symmetric(dc__batch_slice *f, const dc__cuda_matrices *from, double low, double high);
/* Sets `norm` in the reports: the largest sum of a row's magnitudes, or with `squares` the sum of all squares. */
void dc__batch_slice_reduce(dc__batch_slice *f, const dc__cuda_matrices *from, bool squares);
/* Copies matrix i of the slice to dense host memory, which the caller frees. `staging` is device memory of the same
 * size. Returns false if out of memory. */
bool dc__batch_slice_copy_to_host(dc__batch_slice *f, const dc__mat *mat, int32_t i, void *staging, dc__mat *host);
/* Reinterprets the bits of a magnitude as a double. */
double dc__double_from_bits(uint64_t bits);

#endif
