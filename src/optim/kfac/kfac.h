/* K-FAC's layers, internal: a layer's curvature is approximated by the Kronecker product of two matrices, A of its
 * inputs and G of its outputs' gradients. Each group of a convolution has its own pair. */
#ifndef DC_OPTIM_KFAC_H
#define DC_OPTIM_KFAC_H

#include "comm/comm.h"
#include "linalg/linalg.h"

enum { DC__FACTOR_A, DC__FACTOR_G, DC__FACTORS };

/* A or G: a matrix of `order` rows for each group. With a bias, A's last row is that of the constant input 1. */
typedef struct dc__factor {
  int64_t order;
  /* The sum of v v^T over the vectors v of batches since the last step: upper triangles without that last corner. */
  float *sum;
  /* Within a step, if `changed`: the diagonals of `sum`. Their place, and the lower triangles, have the new factor. */
  float *diagonal;
  int64_t count; /* the sum's divisor; 0 if nothing was added, with sum uninitialised */
  double bound;  /* bounds the sum's elements */
  /* The state, on the rank that owns the layer. */
  float *mean;                   /* [groups][order][order] */
  float *vectors, *values;       /* of the latest successful decomposition: columns, and eigenvalues >= 0 */
  int64_t *successes, *failures; /* successful decompositions; failures since the last of them */
  /* Within a step: */
  bool changed;                    /* mean has a new value, stored when the step succeeds */
  bool attempted, rejected;        /* decomposition attempted; and failed */
  float *new_vectors, *new_values; /* new values unless rejected */
} dc__factor;

typedef struct dc__kfac_layer {
  dc_sample_layer layer;
  int32_t approximation, groups;
  int64_t weight, bias; /* parameters; bias -1 for none */
  int64_t shape[5];     /* the weight's */
  int32_t ndim;
  int32_t owner;
  int64_t *updates; /* number of factor updates; NULL if another rank owns the layer */
  bool due;         /* to be decomposed in this step */
  int64_t tolerated;
  dc__factor factors[DC__FACTORS];
  void *memory; /* the factors' sums and diagonals */
  size_t bytes;
} dc__kfac_layer;

/* Results of a direction: its scalar product with the gradient, and whether a damped eigenvalue is not positive. */
typedef struct dc__kfac_direction_info {
  double product;
  uint64_t not_positive;
} dc__kfac_direction_info;

/* A layer's direction in progress. */
typedef struct dc__kfac_direction {
  const char *fn;
  const dc__kfac_layer *layer;
  const float *vectors[DC__FACTORS], *values[DC__FACTORS];
  double damping;
  bool factored;
  float *weight, *bias;           /* gradients, replaced by directions; NULL for none */
  dc__kfac_direction_info *found; /* added to zeros */
  void *memory;                   /* of direction_size() bytes */
} dc__kfac_direction;

/* K-FAC's operations on matrices and elements, in either memory space. */
typedef struct dc__kfac_work {
  /* The largest absolute value of x and of delta, or DC_E_NOT_FINITE. */
  dc_status (*scan)(dc_linalg *l, const dc__per_sample *s, double max_abs[DC__FACTORS]);
  /* Adds a batch of at least one sample and position to the layer's sums. */
  dc_status (*accumulate)(dc_linalg *l, dc__kfac_layer *layer, const dc__per_sample *s, double scale);
  /* Packs a factor's sums in float64, one row of the triangles after the other. */
  void (*pack)(dc_linalg *l, const dc__kfac_layer *layer, int32_t which, double *packed);
  /* Computes the new factor: decay mean + (1 - decay) packed / count. */
  void (*average)(dc_linalg *l, const dc__kfac_layer *layer, int32_t which, const double *packed, double decay,
                  double count);
  /* The mean takes its new value, or the sums' diagonals are restored. */
  void (*commit)(dc_linalg *l, const dc__kfac_layer *layer, int32_t which);
  void (*undo)(dc_linalg *l, const dc__kfac_layer *layer, int32_t which);
  /* Sets eigenvalues below 0, due to rounding, to 0. */
  void (*clamp_negative)(dc_linalg *l, float *values, int64_t count);
  /* Adds a direction's bytes of memory. Returns false on overflow. */
  bool (*direction_size)(const dc_linalg *l, const dc__kfac_layer *layer, size_t *bytes);
  dc_status (*precondition)(dc_linalg *l, const dc__kfac_direction *d);
  /* Sets the error of a rejected direction: DC_E_NOT_POSITIVE, with the eigenvalues. NULL if precondition() does so. */
  dc_status (*report_not_positive)(dc_linalg *l, const dc__kfac_direction *d);
} dc__kfac_work;
/* On the host (kfac_cpu.c), synchronous; on a device (kfac_cuda.c), queued. */
extern const dc__kfac_work dc__kfac_work_cpu, dc__kfac_work_cuda;
static inline const dc__kfac_work *dc__kfac_work_of(const dc_linalg *l) {
  return dc__linalg_is_cuda(l) ? &dc__kfac_work_cuda : &dc__kfac_work_cpu;
}

/* kfac_factors.c: adds a batch, after checking its shapes and that it is finite; if not wanted, only checks it. The
 * gradients of the outputs are delta times scale. */
dc_status dc__kfac_accumulate(dc_linalg *l, dc__kfac_layer *layer, const dc__per_sample *sample, double scale,
                              bool wanted);
/* Elements of x or of delta; and DC_E_NOT_FINITE for the first nonfinite one. */
int64_t dc__kfac_elements(const dc__per_sample *s, int32_t which);
dc_status dc__kfac_not_finite(const dc__per_sample *s, int32_t which, int64_t at);
/* The first nonfinite element in host memory; count if there is none. */
int64_t dc__kfac_first_nonfinite(const void *data, int32_t dtype, int64_t count);

/* kfac_factors_cpu.c */
dc_status dc__kfac_scan_cpu(dc_linalg *l, const dc__per_sample *s, double max_abs[DC__FACTORS]);
dc_status dc__kfac_accumulate_cpu(dc_linalg *l, dc__kfac_layer *layer, const dc__per_sample *s, double scale);
/* kfac_factors_cuda.c */
dc_status dc__kfac_scan_cuda(dc_linalg *l, const dc__per_sample *s, double max_abs[DC__FACTORS]);
dc_status dc__kfac_accumulate_cuda(dc_linalg *l, dc__kfac_layer *layer, const dc__per_sample *s, double scale);

/* kfac_curvature.c: memory in the device's memory space, not zeroed. */
dc_status dc__kfac_alloc(dc_linalg *l, size_t bytes, void **memory);
void dc__kfac_free(dc_linalg *l, void *memory, size_t bytes);

/* kfac_curvature.c */

/* float64 elements of each of dc__kfac_update()'s two buffers. */
int64_t dc__kfac_packed_count(const dc__kfac_layer *layer);
static inline int64_t dc__kfac_triangle_count(const dc__kfac_layer *layer, int32_t which) {
  return layer->factors[which].order * (layer->factors[which].order + 1) / 2;
}
/* Reduces the ranks' sums to the layer's owner, which computes the new factors. counts: of all ranks together. comm:
 * NULL for one rank; its errors are returned. comm_stream: for collectives on device memory. Collective. */
dc_status dc__kfac_update(dc_linalg *l, dc_comm *comm, dc_stream *comm_stream, dc__kfac_layer *layer, double decay,
                          const int64_t counts[DC__FACTORS], double *memory);

/* One of a rank's matrices. */
typedef struct dc__kfac_matrix {
  dc__kfac_layer *layer;
  int32_t which; /* DC__FACTOR_A or DC__FACTOR_G */
  int32_t group;
} dc__kfac_matrix;

typedef struct dc__kfac_matrices {
  dc__kfac_matrix *list; /* descending size */
  int64_t count;
  dc__spectral_request *requests; /* [count], as are the next two */
  dc_spectral_info *infos;
  int64_t *list_index; /* index in `list` of each request's matrix */
} dc__kfac_matrices;

/* The matrices of the layers that this rank owns. */
dc_status dc__kfac_matrices_create(dc__kfac_layer *layers, int64_t count, dc__kfac_matrices *matrices);
void dc__kfac_matrices_destroy(dc__kfac_matrices *matrices);
/* Grows the handle's scratch memory for decomposing any of them, and loads the solver. */
dc_status dc__kfac_reserve(dc_linalg *l, const char *fn, dc__kfac_matrices *matrices);
/* Decomposes the matrices that are `due`. A failure leaves the old decomposition in use. It is an error once a layer
 * reaches its limit of consecutive failures. No communication. */
dc_status dc__kfac_decompose(dc_linalg *l, const char *fn, dc__kfac_matrices *matrices, dc_optimizer_stats *stats);
/* Commits the new factors and decompositions, and clears the sums. */
void dc__kfac_commit(dc_linalg *l, dc__kfac_layer *layer, dc_optimizer_stats *stats);
/* Discards them: all is as before the step. */
void dc__kfac_undo(dc_linalg *l, dc__kfac_layer *layer);

/* Finds the layer's latest decompositions. Returns false if there is none yet; then the direction is the gradient. */
bool dc__kfac_latest(const dc__kfac_layer *layer, dc__kfac_direction *d);

#endif
