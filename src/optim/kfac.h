/* K-FAC's layers, inside the room: a layer's curvature is approximated by the Kronecker product of two matrices, A of
 * its inputs and G of its outputs' gradients, for each group of a convolution its own two. */
#ifndef DC_OPTIM_KFAC_H
#define DC_OPTIM_KFAC_H

#include "comm/comm.h"
#include "linalg/linalg.h"

enum { DC__FACTOR_A, DC__FACTOR_G, DC__FACTORS };

/* A or G: a matrix of `order` rows for each group. Where the layer has a bias, A's last row is that of its one. */
typedef struct dc__factor {
  int64_t order;
  /* What was seen since the last step, the sum of v v^T over the vectors v: upper triangles without that last corner.
   */
  float *sum;
  /* Within a step, where `changed`: the factor as it will be is in the lower triangles of sum and on its diagonals,
   * which are kept here. */
  float *diagonal;
  int64_t count; /* what the sum is divided by; 0: nothing was seen, and sum holds anything */
  double bound;  /* no element of the sum is larger */
  /* The state, on the rank that owns the layer. */
  float *mean;             /* [groups][order][order] */
  float *vectors, *values; /* of the latest decomposition that succeeded: columns, and eigenvalues >= 0 */
  int64_t *good, *failed;  /* decompositions that succeeded; failures since the last of them */
  /* Within a step: */
  bool changed;                        /* there is what mean becomes when the step succeeds */
  bool tried, bad;                     /* a decomposition was made, and has failed */
  float *fresh_vectors, *fresh_values; /* what those become if it has not */
} dc__factor;

typedef struct dc__kfac_layer {
  dc_sample_layer layer;
  int32_t approximation, groups;
  int64_t weight, bias; /* parameters; bias -1: none */
  int64_t shape[5];     /* the weight's */
  int32_t ndim;
  int32_t owner;
  int64_t *updates; /* of the factors; NULL: another rank owns the layer */
  bool due;         /* to be decomposed in this step */
  int64_t tolerated;
  dc__factor factors[DC__FACTORS];
} dc__kfac_layer;

/* kfac_factors.c: adds a batch, checked against the layer's weight and found finite before anything changes; only
 * checks it where it is not wanted. The gradients of the outputs are delta times scale. */
dc_status dc__kfac_accumulate(dc_linalg *l, dc__kfac_layer *layer, const dc__sample *sample, double scale, bool wanted);

/* kfac_curvature.c */

/* How many float64 dc__kfac_update() wants of memory, twice. */
int64_t dc__kfac_packed(const dc__kfac_layer *layer);
/* Brings the ranks' sums to the layer's owner, who prepares the new factors; errors are the communicator's, which may
 * be NULL. Collective. */
dc_status dc__kfac_update(dc_linalg *l, dc_comm *comm, dc__kfac_layer *layer, double decay, double *memory);

/* One of a rank's matrices. */
typedef struct dc__kfac_matrix {
  dc__kfac_layer *layer;
  int32_t which; /* DC__FACTOR_A or DC__FACTOR_G */
  int32_t group;
} dc__kfac_matrix;

typedef struct dc__kfac_matrices {
  dc__kfac_matrix *list; /* the largest first */
  int64_t count;
  dc__spectral *requests; /* as many, as are the next */
  dc_spectral_info *infos;
  int64_t *places; /* of the requests' matrices in the list */
} dc__kfac_matrices;

/* The matrices of the layers that this rank owns. */
dc_status dc__kfac_matrices_create(dc__kfac_layer *layers, int64_t count, dc__kfac_matrices *matrices);
void dc__kfac_matrices_destroy(dc__kfac_matrices *matrices);
/* Decomposes what is `due` of them. A failure leaves the old decomposition in use; where a layer has had as many in a
 * row as it tolerates, it is an error. No communication. */
dc_status dc__kfac_decompose(dc_linalg *l, const char *fn, dc__kfac_matrices *matrices, dc_optimizer_stats *stats);
/* Factors and decompositions become what was prepared, and what was seen is used up. */
void dc__kfac_commit(dc_linalg *l, dc__kfac_layer *layer, dc_optimizer_stats *stats);
/* Forgets what was prepared: all is as before the step. */
void dc__kfac_undo(dc__kfac_layer *layer);

/* Turns a whole gradient into the direction in place, and tells their scalar product. weight and bias as stored; NULL:
 * none. memory: dc__kfac_direction_room() float32. Before the first decomposition the direction is the gradient, and
 * the product 0. */
int64_t dc__kfac_direction_room(const dc__kfac_layer *layer);
dc_status dc__kfac_direction(dc_linalg *l, const char *fn, const dc__kfac_layer *layer, double damping, bool factored,
                             float *weight, float *bias, float *memory, double *product);

#endif
