/* Per-sample gradients on a device, internal. An operator lays out its scratch memory by layer type and outputs, and
 * queues its work. A slice has as many samples as go through products together. */
#ifndef DC_LINALG_PER_SAMPLE_CUDA_H
#define DC_LINALG_PER_SAMPLE_CUDA_H

#include "linalg/batch_slice_cuda.h"
#include "linalg/per_sample/per_sample.h"

/* A call in progress: device memory, NULL if not needed. */
typedef struct dc__per_sample_cuda {
  dc_linalg *l;
  const dc__per_sample *s;
  const dc__per_sample_call *call;
  dc_stream *stream;
  void *product;
  double *mean, *rstd;      /* norms: of normalised rows */
  double *weights, *biases; /* [N, out]: a norm's and any bias' gradients */
  double *parts;            /* [N, width]: partial sums of a sample's squares */
  int64_t width;
  double *sample_weights; /* embeddings: [N], weight of each row */
  int64_t *sorted;        /* embeddings: [N, T], positions by index */
  int64_t groups;         /* pairs per sample, with weights [out, in] each: */
  int64_t in, out;
  int64_t max_samples; /* samples in a slice */
  void *patches, *own; /* a slice's patches and other matrices */
  double *sums;        /* row sums of a slice */
} dc__per_sample_cuda;

/* per_sample_linear_cuda.c. Elements of a sample's patches and other matrices in a slice, and row sums. Returns
 * false on overflow. */
typedef struct dc__per_sample_linear_sizes {
  int64_t patches, own, sums;
} dc__per_sample_linear_sizes;
bool dc__per_sample_linear_sizes_cuda(const dc__per_sample_cuda *w, dc__per_sample_linear_sizes *needs);
void dc__per_sample_linear_grads_cuda(const dc__per_sample_cuda *w);
void dc__per_sample_linear_norms_cuda(const dc__per_sample_cuda *w); /* to parts */
void dc__per_sample_linear_sum_cuda(const dc__per_sample_cuda *w);

#endif
