/* Per-sample gradients on a device, internal. An operator lays out its scratch memory by layer type and outputs, and
 * queues its work. A slice is the samples whose products run together. */
#ifndef DC_LINALG_PER_SAMPLE_CUDA_H
#define DC_LINALG_PER_SAMPLE_CUDA_H

#include "linalg/batch_slice_cuda.h"
#include "linalg/per_sample/per_sample.h"

/* A call in progress. Pointers are to device memory, NULL if not needed. */
typedef struct dc__per_sample_cuda {
  dc_linalg *l;
  const dc__per_sample *s;
  const dc__per_sample_call *call;
  dc_stream *stream;
  void *product;            /* workspace for products */
  double *mean, *rstd;      /* norm layers: of each normalised row */
  double *weights, *biases; /* [N, out]: gradients of a norm layer's weight, and of any layer's bias */
  double *parts;            /* [N, width]: partial sums of a sample's squares */
  int64_t width;
  double *sample_weights; /* embeddings: [N], factor of each of a sample's rows */
  int64_t *sorted;        /* embeddings: [N, T], positions sorted by index */
  int64_t groups;         /* pairs per sample, with weights [out, in] each: */
  int64_t in, out;
  int64_t max_samples; /* samples in a slice */
  void *patches, *own; /* a slice's patches, and its other temporary matrices */
  double *sums;        /* row sums of a slice */
} dc__per_sample_cuda;

/* per_sample_linear_cuda.c. Elements per sample of patches, of other temporary matrices, and of row sums. Returns false
 * on overflow. */
typedef struct dc__per_sample_linear_sizes {
  int64_t patches, own, sums;
} dc__per_sample_linear_sizes;
bool dc__per_sample_linear_sizes_cuda(const dc__per_sample_cuda *w, dc__per_sample_linear_sizes *needs);
void dc__per_sample_linear_grads_cuda(const dc__per_sample_cuda *w);
void dc__per_sample_linear_norms_cuda(const dc__per_sample_cuda *w); /* to parts */
void dc__per_sample_linear_sum_cuda(const dc__per_sample_cuda *w);

#endif
