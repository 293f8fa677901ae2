/* Gradients per sample on a device, inside the room. An operator lays out its scratch memory by what the layer's kind
 * and its results need, and queues its work; flights are as many samples as go through products together. */
#ifndef DC_LINALG_SAMPLE_THERE_H
#define DC_LINALG_SAMPLE_THERE_H

#include "linalg/sample.h"
#include "linalg/there.h"

/* What is asked for: each sample's gradients, their squared norms, or their sum. */
enum dc__sample_use { DC__SAMPLE_GRADS, DC__SAMPLE_SQUARES, DC__SAMPLE_SUM };
typedef struct dc__sample_call {
  int32_t use;
  bool weight, bias; /* which parts */
  bool accumulate;
  const void *factors;       /* SUM; NULL: all 1 */
  void *to_weight, *to_bias; /* GRADS, SUM */
  void *squares;             /* SQUARES */
} dc__sample_call;

/* A call under way: memory of the device, NULL where nothing is needed. */
typedef struct dc__sample_there {
  dc_linalg *l;
  const dc__sample *s;
  const dc__sample_call *call;
  dc_stream *stream;
  void *product;
  double *mean, *rate;      /* norms: of rows that are normalised together */
  double *weights, *biases; /* [N, out]: a norm's and any bias' gradients */
  double *parts;            /* [N, width]: squares that make up a sample's */
  int64_t width;
  double *shares;  /* embeddings: [N], what a row counts */
  int64_t *places; /* embeddings: [N, T] */
  int64_t groups;  /* pairs of a sample, whose weights are [out, in] each: */
  int64_t in, out;
  int64_t most;        /* samples of a flight */
  void *patches, *own; /* a flight's patches and other matrices */
  double *sums;        /* of a flight's rows */
} dc__sample_there;

dc_status dc__sample_there_run(dc_linalg *l, const dc__sample *s, const dc__sample_call *call);

/* sample_pair_there.c. Elements of a sample's patches and other matrices in a flight, and sums of rows; false: too
 * many. */
typedef struct dc__pair_needs {
  int64_t patches, own, sums;
} dc__pair_needs;
bool dc__pair_needs_there(const dc__sample_there *w, dc__pair_needs *needs);
void dc__pair_grads_there(const dc__sample_there *w);
void dc__pair_squares_there(const dc__sample_there *w); /* to parts */
void dc__pair_sum_there(const dc__sample_there *w);

#endif
