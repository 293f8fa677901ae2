/* Gradients per sample on a device, inside the room. An operator lays out its scratch memory by what the layer's kind
 * and its results need, and queues its work; flights are as many samples as go through products together. */
#ifndef DC_LINALG_PER_SAMPLE_CUDA_H
#define DC_LINALG_PER_SAMPLE_CUDA_H

#include "linalg/batch_slice_cuda.h"
#include "linalg/per_sample/per_sample.h"

/* What is asked for: each sample's gradients, their squared norms, or their sum. */
enum dc__per_sample_op { DC__PER_SAMPLE_GRADS, DC__PER_SAMPLE_NORMS, DC__PER_SAMPLE_SUM };
typedef struct dc__per_sample_call {
  int32_t op;
  bool weight, bias; /* which parts */
  bool accumulate;
  const void *factors;       /* SUM; NULL: all 1 */
  void *to_weight, *to_bias; /* GRADS, SUM */
  void *squares;             /* SQUARES */
} dc__per_sample_call;

/* A call under way: memory of the device, NULL where nothing is needed. */
typedef struct dc__per_sample_cuda {
  dc_linalg *l;
  const dc__per_sample *s;
  const dc__per_sample_call *call;
  dc_stream *stream;
  void *product;
  double *mean, *rstd;      /* norms: of rows that are normalised together */
  double *weights, *biases; /* [N, out]: a norm's and any bias' gradients */
  double *parts;            /* [N, width]: squares that make up a sample's */
  int64_t width;
  double *shares;  /* embeddings: [N], what a row counts */
  int64_t *places; /* embeddings: [N, T] */
  int64_t groups;  /* pairs of a sample, whose weights are [out, in] each: */
  int64_t in, out;
  int64_t max_samples; /* samples of a flight */
  void *patches, *own; /* a flight's patches and other matrices */
  double *sums;        /* of a flight's rows */
} dc__per_sample_cuda;

dc_status dc__per_sample_cuda_run(dc_linalg *l, const dc__per_sample *s, const dc__per_sample_call *call);

/* per_sample_linear_cuda.c. Elements of a sample's patches and other matrices in a flight, and sums of rows; false: too
 * many. */
typedef struct dc__per_sample_linear_sizes {
  int64_t patches, own, sums;
} dc__per_sample_linear_sizes;
bool dc__per_sample_linear_sizes_cuda(const dc__per_sample_cuda *w, dc__per_sample_linear_sizes *needs);
void dc__per_sample_linear_grads_cuda(const dc__per_sample_cuda *w);
void dc__per_sample_linear_norms_cuda(const dc__per_sample_cuda *w); /* to parts */
void dc__per_sample_linear_sum_cuda(const dc__per_sample_cuda *w);

#endif
