/* Muon, Shampoo and SOAP, internal. A parameter is cut into blocks with one owner each, and each side of a block has a
 * factor. blockwise.c sends gradients to the owners and refreshes the matrices from the factors when due. It sends the
 * directions to every rank's part of the weights. A kind's rules define the work on a block. */
#ifndef DC_OPTIM_BLOCKWISE_H
#define DC_OPTIM_BLOCKWISE_H

#include "optim/optim_internal.h"
#include "optim/redistribute.h"

/* One dimension of a block. */
typedef struct dc__side {
  int64_t n;
  float *factor;         /* [n, n]; NULL if the side is not preconditioned */
  float *matrix;         /* [n, n]: Shampoo's root, or SOAP's eigenvectors in columns */
  double *basis;         /* Shampoo's [n, n]; NULL if every root is computed afresh */
  int64_t *order;        /* SOAP's [n]: column order of the latest refresh, not saved; on the device */
  int64_t *failures;     /* failed refreshes since the last success */
  dc_spectral_info info; /* of the latest refresh */
} dc__side;

/* A block that this rank owns. All pointers but `data` are into state pieces. */
typedef struct dc__optim_block {
  int64_t param, index;
  int64_t count; /* elements */
  int32_t order;
  int64_t block_group, at; /* on a device: its group, and its index there */
  dc__side *sides;
  float *exp_avg;  /* NULL without filtering */
  float *squares;  /* sum or mean of squares; NULL: none */
  float *momentum; /* NULL: none */
  int64_t *rooted; /* Shampoo's: 1 once a root was computed; NULL: none */
  float *data;     /* gradient, then intermediates, then direction; in the redistribution's buffers */
} dc__optim_block;

/* A block's element arrays for Shampoo. */
typedef struct dc__graft {
  float *data;
  float *exp_avg, *squares, *momentum; /* NULL: none */
  int64_t rows, count;
  dc__graft_factors factors;
} dc__graft;

/* The step in progress, for a block's parameter and its group. */
typedef struct dc__block_step {
  const void *options; /* the kind's */
  int64_t t;           /* from 1 */
  bool due;            /* matrices are refreshed */
  bool skip_update;    /* the weights stay unchanged */
} dc__block_step;

typedef struct dc__block_work dc__block_work;
typedef struct dc__block_context dc__block_context;
typedef struct dc__blockwise dc__blockwise;
typedef void (*dc__block_fn)(const dc__optim_block *b, const dc__block_step *s, dc__block_context *ctx);

/* Where a block's work runs: on the pool; with pool NULL on this thread; or queued on a device. */
struct dc__block_context {
  const dc__block_work *work;
  dc__threadpool *pool;
  void *scratch;       /* DC__SCRATCH_BYTES; pool NULL */
  float *temp;         /* temporaries, at least two, each of the block's elements (dc__block_options.temps): */
  int64_t temp_stride; /* between two temporaries */
  double graft_norm;   /* the graft's norm */
  /* On a device, `count` blocks of a group run together. Functions get the first one, whose data is in the stack: */
  int32_t count;
  dc__optim_block *const *blocks;
  float *stack;
  dc_linalg *linalg;              /* NULL on the host */
  const uint64_t *found;          /* momentum stays unchanged if *found is not 0; NULL if not checked */
  void *gemm_workspace;           /* for matrix products */
  dc__cuda_matrix_stats *lengths; /* [2, count] */
  double *sums;                   /* one for each row of the blocks */
};

/* The operations on blocks, on the host (blockwise_cpu.c) and on a device (blockwise_cuda.c). Matrices are dense and
 * row-major. */
struct dc__block_work {
  /* c = alpha a a^T + beta c, [n, n]; a is [n, k], or with trans stored as [k, n]. */
  void (*syrk)(const dc__block_context *ctx, bool trans, int64_t n, int64_t k, const float *a, double alpha,
               double beta, float *c);
  void (*gemm)(const dc__block_context *ctx, const dc__gemm *g);
  /* to [cols, rows] = from [rows, cols], transposed. */
  void (*transpose)(const dc__block_context *ctx, const float *from, int64_t rows, int64_t cols, float *to);
  void (*copy)(const dc__block_context *ctx, float *to, const float *from, int64_t count);
  /* Multiplies the matrix of the block's side d by factor, if its latest refresh succeeded. */
  void (*scale)(const dc__block_context *ctx, const dc__optim_block *b, int32_t d, float factor);
  /* Shampoo's. The first updates the graft's squares and filters the gradient. The second replaces data by the graft's
   * direction; the third only measures its norm. The last gives data that norm if `scaled`, and adds momentum. */
  void (*graft_accumulate)(const dc__block_context *ctx, const dc__graft *g);
  void (*graft_direction)(const dc__block_context *ctx, const dc__graft *g);
  void (*graft_measure_norm)(dc__block_context *ctx, const dc__graft *g);
  void (*graft_finish)(const dc__block_context *ctx, const dc__graft *g, bool scaled);
  /* SOAP's. adam replaces data by the weights after a step of AdamW from zero. permute puts the squares along dimension
   * d, in parts of `inner` elements, in the order of the latest refresh. */
  void (*adam)(const dc__block_context *ctx, const dc__optim_block *b, const dc__adamw_factors *factors);
  void (*permute)(const dc__block_context *ctx, const dc__optim_block *b, int32_t d, int64_t inner);
  /* Muon's: replaces data by the result of dc__polar; p has all arguments but the matrices. */
  void (*polar)(const dc__block_context *ctx, const dc__optim_block *b, const dc__polar *p);
  /* Adds ones to the diagonal of a new matrix of zeros. */
  void (*set_identity)(const dc_linalg *l, float *a, int64_t n);
  /* Sets slots_bytes and the maxima over the blocks. Returns false on overflow. */
  bool (*plan_scratch)(dc__blockwise *self);
  /* Runs `work` on all blocks whose parameters have gradients; `memory` has slots_bytes. */
  void (*run)(dc__blockwise *self, void *memory, dc__block_fn work);
};
extern const dc__block_work dc__block_work_cpu, dc__block_work_cuda;
static inline const dc__block_work *dc__block_work_of(const dc_optimizer *o) {
  return dc__linalg_is_cuda(o->linalg) ? &dc__block_work_cuda : &dc__block_work_cpu;
}
/* Makes a context on a device. Its parts of memory are in the order of plan_scratch(). */
dc__block_context dc__block_context_cuda(dc_linalg *l, void *memory, int64_t elements, int32_t temps, int64_t rows);

/* The part of a kind's options that blockwise.c needs. */
typedef struct dc__block_options {
  int64_t max_block, merge_below;
  int64_t max_factor_dim; /* maximum length of a side with a factor */
  bool precondition_1d;   /* the side of a one-dimensional block has a factor */
  double weight_decay;
  bool l2; /* else decoupled */
  int32_t tolerated_failures;
  int32_t temps; /* size of temp, in multiples of the block's elements */
} dc__block_options;

/* A kind: `rules` of its dc__optim_kind. */
typedef struct dc__block_rules {
  const char *matrix; /* its name as a state piece and in error texts */
  bool sorts;         /* a refresh may permute its columns */
  dc__block_options (*read_options)(const void *options);
  /* Cuts a parameter. NULL for the default, by max_block and merge_below. */
  void (*partition)(const void *options, const dc__optim_param *p, dc__partition *partition);
  /* The cost of a block's step. NULL for that of its sides' decompositions and products. */
  double (*cost)(const void *options, const dc__box *box);
  /* Add a block's own pieces, and those of a side beside factor, matrix and failures. NULL: none. */
  bool (*add_elements)(dc_optimizer *o, dc__optim_param *p, dc__optim_block *b, const int64_t *shape, int32_t ndim);
  bool (*add_side)(dc_optimizer *o, dc__optim_param *p, dc__optim_block *b, int32_t d);
  /* Sets due and skip_update for step t. If NULL, both are always false. */
  void (*begin)(dc__block_step *s);
  /* A block's work before and after the refresh; after may be NULL. */
  void (*before_refresh)(const dc__optim_block *b, const dc__block_step *s, dc__block_context *ctx);
  void (*after_refresh)(const dc__optim_block *b, const dc__block_step *s, dc__block_context *ctx);
  /* Arguments of the weight update, for kinds with queued steps. */
  dc__optim_rule_fn rule;
  /* How a side's matrix is computed from its factor. */
  dc__spectral_request (*request)(const char *fn, dc__side *side, const dc__optim_block *b, const dc__block_step *s);
} dc__block_rules;

/* Eigenvectors on a device (soap_basis_cuda.c); zeroed until dc__soap_basis_create(). */
typedef struct dc__soap_basis {
  bool has_device_qr; /* the device has a QR */
  int64_t sides;
  /* On the device: */
  dc_device *device;
  void *device_memory; /* all of it */
  size_t device_bytes;
  int64_t *orders; /* column orders of all sides */
  void **pointers;
  int32_t *failed;
  /* On the host: */
  dc__spectral_request *pending; /* requests whose status has not been read yet: */
  int64_t pending_count;
  void **tables;
  int32_t *host_failed;
  dc_linalg *host;
  dc__spectral_request *requests;
  char *memory;
  size_t bytes; /* of memory */
} dc__soap_basis;
/* Allocates memory for this many sides and rows in all, on the device for orders. On failure the owner destroys it. */
dc_status dc__soap_basis_create(dc__soap_basis *b, const dc_linalg *l, int64_t sides, int64_t rows);
/* Allocates memory for requests of all sides at once; l is in a query. */
dc_status dc__soap_basis_reserve(dc__soap_basis *b, dc_linalg *l, const char *fn, const dc__spectral_request *requests,
                                 int64_t count);
/* As dc__spectral_run_grouped(), but results and orders are queued. The status of those computed on the device is
 * known after dc__soap_basis_read_status(). */
dc_status dc__soap_basis_refresh(dc__soap_basis *b, dc_linalg *l, const dc__spectral_request *requests, int64_t count);
/* Before and after the host waits for the device. */
void dc__soap_basis_copy_status(const dc__soap_basis *b);
void dc__soap_basis_read_status(dc__soap_basis *b);
void dc__soap_basis_destroy(dc__soap_basis *b);

/* A side and its block. */
typedef struct dc__side_ref {
  dc__side *side;
  const dc__optim_block *block;
} dc__side_ref;

/* How a parameter is cut, and the owners of its blocks. */
typedef struct dc__block_plan {
  dc__partition partition;
  int32_t *owners;
} dc__block_plan;

/* Blocks of one shape and layout on a device. */
typedef struct dc__slab dc__slab;
typedef struct dc__block_group {
  int64_t count; /* elements of each */
  int64_t size[DC__ORDER_MAX];
  int32_t order, group;
  bool closed;            /* all blocks have their pieces */
  int64_t capacity, used; /* blocks */
  dc__slab *slabs;
} dc__block_group;

struct dc__blockwise {
  dc_optimizer head;
  dc__block_plan *plans; /* one per parameter */
  int64_t plan_capacity;
  int64_t planned; /* parameters that have a plan */
  double load[DC__COMM_MAX_WORLD];
  dc__optim_block *blocks; /* this rank's, by parameter and index */
  int64_t block_count, block_capacity;
  dc__block_group *block_groups; /* of a device */
  int64_t block_group_count, block_group_capacity;
  /* Resources of a step, rebuilt when parameters were added. */
  int64_t set_up_params; /* parameters included so far */
  dc__redistribute *redistribute;
  dc__redist_entry *entries;  /* one per parameter */
  dc__block_step *steps;      /* of each parameter */
  bool *skip;                 /* parameters without a gradient */
  uint64_t *found;            /* of a queued step: flag that skips it; NULL without */
  const float *scale;         /* the factor of its gradients; NULL if the host sets it */
  dc__optim_block **by_cost;  /* descending cost */
  dc__optim_block **by_group; /* on a device: ordered by group */
  int64_t large;              /* so many first blocks of by_cost are split over the threads */
  dc__side_ref *by_size;      /* sides with a factor, descending size */
  int64_t side_count;
  int64_t *orders; /* orders of the sides, if the kind sorts */
  dc__spectral_request *requests;
  dc__soap_basis bases; /* on a device, if the kind sorts */
  dc__slots slots;
  size_t slots_bytes;
  int64_t max_elements, max_rows; /* maxima over the blocks */
  int32_t temps;                  /* maximum of the groups' `temps` */
};

static inline dc__blockwise *dc__blockwise_of(dc_optimizer *o) {
  return (dc__blockwise *)(void *)o;
}
static inline const dc__block_rules *dc__block_rules_of(const dc_optimizer *o) {
  return o->kind->rules;
}
static inline dc__block_options dc__block_options_of(const dc_optimizer *o, const dc__optim_param *p) {
  return dc__block_rules_of(o)->read_options(dc__optim_options(o, p));
}

/* blockwise.c: functions common to the kinds. */
dc_status dc__blockwise_ready(dc_optimizer *o, const char *fn);
dc_status dc__blockwise_step(dc_optimizer *o, const char *fn);
dc_status dc__blockwise_enqueue(dc_optimizer *o, const char *fn);
void dc__blockwise_stats(const dc_optimizer *o, dc_optimizer_stats *stats);
void dc__blockwise_destroy(dc_optimizer *o);

/* Members common to the kinds. Below 2^50, squares of gradients, and sums of them, fit float32. */
#define DC__BLOCKWISE_KIND                                                                    \
  .size = sizeof(dc__blockwise), .matrices = true, .exponent = 50, .fixed_by_params = true,   \
  .prepare = dc__blockwise_prepare, .ready = dc__blockwise_ready, .step = dc__blockwise_step, \
  .stats = dc__blockwise_stats, .destroy = dc__blockwise_destroy

/* blockwise_update.c: a dc__fill_fn and a dc__apply_fn. */
void dc__blockwise_fill(void *user, int64_t entry, float *part);
void dc__blockwise_apply(void *user, int64_t entry, const float *part);

/* blockwise_plan.c */
dc_status dc__blockwise_prepare(dc_optimizer *o, const char *fn, int64_t first);
/* The cost of a block of a parameter. */
double dc__block_cost(const dc_optimizer *o, const dc__optim_param *p, const dc__partition *partition, int64_t block);
/* A piece of a block, or with dimension >= 0 of a side. NULL if out of memory. */
void *dc__block_piece(dc_optimizer *o, dc__optim_param *p, const char *what, const dc__optim_block *b,
                      int32_t dimension, int32_t dtype, const int64_t shape[2], int32_t ndim);

/* block_group_cuda.c: blocks that run together. The stride between a group's blocks, in elements, is a multiple of 256
 * bytes. */
static inline int64_t dc__block_group_stride(int64_t elements) {
  return (elements + 63) / 64 * 64;
}
/* Call the first before blocks are created, and reserve all blocks. Then add each, and take its pieces. */
void dc__block_group_open(dc__blockwise *self);
dc_status dc__block_group_reserve(dc__blockwise *self, int64_t param, int64_t index);
void dc__block_group_add(dc__blockwise *self, dc__optim_block *b, const dc__partition *partition, const dc__box *box);
/* NULL if out of memory. */
void *dc__block_group_piece(dc_optimizer *o, const dc__optim_block *b, const char *what, int32_t dimension, size_t size,
                            int64_t elements);
void dc__block_group_destroy(dc__blockwise *self);
/* Sets by_group and the maxima of a context. */
void dc__block_group_sort(dc__blockwise *self);
/* Queues the work of all blocks. */
void dc__block_group_run(dc__blockwise *self, void *memory, dc__block_fn work);

/* precondition.c: shared by Shampoo and SOAP. */

/* Updates the factors: beta times themselves plus alpha times data's products with itself. */
void dc__block_update_factors(const dc__optim_block *b, double beta, double alpha, const dc__block_context *ctx);
/* Multiplies x by each side's matrix along that side; back: by its transpose. */
void dc__block_multiply_sides(const dc__optim_block *b, float *x, bool back, const dc__block_context *ctx);
/* Whether its latest refresh changed the order of the matrix's columns. */
bool dc__side_is_permuted(const dc__side *side);
/* A side's matrix for a request. */
dc__mat dc__side_mat(void *data, int32_t dtype, int64_t n);

/* grafting_cpu.c: Shampoo's element-wise work on the host. */
void dc__grafting_accumulate_cpu(const dc__block_context *ctx, const dc__graft *g);
void dc__grafting_direction_cpu(const dc__block_context *ctx, const dc__graft *g);
void dc__grafting_norm_cpu(dc__block_context *ctx, const dc__graft *g);
void dc__grafting_finish_cpu(const dc__block_context *ctx, const dc__graft *g, bool scaled);

#endif
