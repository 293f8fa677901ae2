/* Muon, Shampoo and SOAP, inside the room: a parameter is cut into blocks, each block has one owner, and a factor for
 * each of its sides. The frame in blockwise.c brings gradients to the owners, refreshes what comes of the factors when
 * it is due, and takes the directions to every rank's part of the weights; a kind's rules say what a block does in
 * between. */
#ifndef DC_OPTIM_BLOCKWISE_H
#define DC_OPTIM_BLOCKWISE_H

#include "optim/optim_internal.h"
#include "optim/redistribute.h"

/* One dimension of a block. */
typedef struct dc__side {
  int64_t n;
  float *factor;         /* [n, n]; NULL: the side is left as it is, and there is nothing but n */
  float *matrix;         /* [n, n]: Shampoo's root, or SOAP's eigenvectors in columns */
  double *basis;         /* Shampoo's [n, n]; NULL: every root is computed afresh */
  int64_t *order;        /* SOAP's [n]: where the latest refresh had the matrix' columns from; not kept. The device's */
  int64_t *failures;     /* refreshes that failed since the last good one */
  dc_spectral_info info; /* of the latest refresh */
} dc__side;

/* A block that this rank owns. What it points to is in pieces of state, but for data. */
typedef struct dc__optim_block {
  int64_t param, index;
  int64_t count; /* elements */
  int32_t order;
  int64_t block_group, at; /* on a device: its kin, and which of them it is */
  dc__side *sides;
  float *exp_avg;  /* NULL: gradients are not filtered */
  float *squares;  /* sum or mean of squares; NULL: none */
  float *momentum; /* NULL: none */
  float *data;     /* gradient, then what the kind makes of it, then direction; another's in the exchange */
} dc__optim_block;

/* A block as Shampoo's work on its elements sees it. */
typedef struct dc__graft {
  float *data;
  float *exp_avg, *squares, *momentum; /* NULL: none */
  int64_t rows, count;
  dc__graft_factors factors;
} dc__graft;

/* What a block's parameter and its group say of the step under way. */
typedef struct dc__block_step {
  const void *options; /* the kind's */
  int64_t t;           /* from 1 */
  bool due;            /* what comes of the factors is refreshed */
  bool skip_update;    /* the weights stay as they are */
} dc__block_step;

typedef struct dc__block_work dc__block_work;

/* Where a block's work runs: on the pool, or with pool NULL on this thread; or queued on a device. */
typedef struct dc__block_context {
  const dc__block_work *work;
  dc__threadpool *pool;
  void *scratch;       /* DC__SCRATCH_BYTES; pool NULL */
  float *temp;         /* so many times the block's elements as the kind says, twice at least: */
  int64_t temp_stride; /* from the first ones to the others */
  double graft_norm;   /* that a graft has */
  /* On a device, where `count` blocks of a kin go together. Work is given the first one, whose data lie in the stack:
   */
  int32_t count;
  dc__optim_block *const *blocks;
  float *stack;
  dc_linalg *linalg;              /* NULL: the host computes */
  const uint64_t *found;          /* momentum stays as it is unless it is 0; NULL: nobody looked */
  void *gemm_workspace;           /* what products may use */
  dc__cuda_matrix_stats *lengths; /* [2, count] */
  double *sums;                   /* one for each row of the blocks */
} dc__block_context;

/* What a block's work is made of, on the host (blockwise_cpu.c) and on a device (blockwise_cuda.c). Matrices are dense,
 * by rows. */
struct dc__block_work {
  /* c = add a a^T + keep c, [n, n]; a is [n, k], or with trans stored as [k, n]. */
  void (*syrk)(const dc__block_context *ctx, bool trans, int64_t n, int64_t k, const float *a, double add, double keep,
               float *c);
  void (*gemm)(const dc__block_context *ctx, const dc__gemm *g);
  /* to [cols, rows] = from [rows, cols], transposed. */
  void (*transpose)(const dc__block_context *ctx, const float *from, int64_t rows, int64_t cols, float *to);
  void (*copy)(const dc__block_context *ctx, float *to, const float *from, int64_t count);
  /* The matrix of the block's side d times factor, where its latest refresh was a good one. */
  void (*scale)(const dc__block_context *ctx, const dc__optim_block *b, int32_t d, float factor);
  /* Shampoo's: the graft's squares and the filtered gradient; the graft's direction, to data, or its length alone; that
   * length given to data where `scaled`, and momentum. */
  void (*graft_accumulate)(const dc__block_context *ctx, const dc__graft *g);
  void (*graft_direction)(const dc__block_context *ctx, const dc__graft *g);
  void (*graft_measure_norm)(dc__block_context *ctx, const dc__graft *g);
  void (*graft_finish)(const dc__block_context *ctx, const dc__graft *g, bool scaled);
  /* SOAP's: data becomes what a step of AdamW takes a weight of zero to; and the parts of the squares along dimension
   * d, `inner` elements each, come in the order of the latest refresh. */
  void (*adam)(const dc__block_context *ctx, const dc__optim_block *b, const dc__adamw_factors *factors);
  void (*permute)(const dc__block_context *ctx, const dc__optim_block *b, int32_t d, int64_t inner);
  /* Muon's: p says all but where matrices are, and data becomes what dc__polar makes of it. */
  void (*polar)(const dc__block_context *ctx, const dc__optim_block *b, const dc__polar *p);
};
extern const dc__block_work dc__block_work_cpu, dc__block_work_cuda;
/* What a place on a device has of scratch memory, for at most so many elements, `temps` times in temp, and rows at a
 * time: added to *total, and placed. False: no memory is that large. */
bool dc__block_context_size_cuda(size_t *total, const dc_linalg *l, int64_t elements, int32_t temps, int64_t rows);
dc__block_context dc__block_context_cuda(dc_linalg *l, void *memory, int64_t elements, int32_t temps, int64_t rows);

/* What the frame wants to know of a kind's options. */
typedef struct dc__block_options {
  int64_t max_block, merge_below;
  int64_t max_factor_dim; /* side that has a factor */
  bool precondition_1d;   /* the side of a block of one dimension has one */
  double weight_decay;
  bool l2; /* else decoupled */
  int32_t tolerated_failures;
  int32_t temps; /* a place's temp has so many times the block's elements */
} dc__block_options;

/* What a kind is: `rules` of its dc__optim_kind. */
typedef struct dc__block_rules {
  const char *matrix; /* its name, as a piece and in texts */
  bool sorts;         /* a refresh may change the order of its columns */
  dc__block_options (*read_options)(const void *options);
  /* How a parameter is cut. NULL: by max_block and merge_below. */
  void (*partition)(const void *options, const dc__optim_param *p, dc__partition *partition);
  /* What a step of a block costs. NULL: what decompositions and products of its sides do. */
  double (*cost)(const void *options, const dc__box *box);
  /* Adds the pieces that a block has beside its sides', and a side has beside factor, matrix and failures. NULL: none.
   */
  bool (*add_elements)(dc_optimizer *o, dc__optim_param *p, dc__optim_block *b, const int64_t *shape, int32_t ndim);
  bool (*add_side)(dc_optimizer *o, dc__optim_param *p, dc__optim_block *b, int32_t d);
  /* Sets due and still from options and t. NULL: neither ever. */
  void (*begin)(dc__block_step *s);
  /* A block's work before and after what is due is refreshed; after NULL: none. */
  void (*before_refresh)(const dc__optim_block *b, const dc__block_step *s, dc__block_context *ctx);
  void (*after_refresh)(const dc__optim_block *b, const dc__block_step *s, dc__block_context *ctx);
  /* What the weight's way is made of, of a kind that has steps queued. */
  dc__optim_rule_fn rule;
  /* How a side's matrix comes of its factor. */
  dc__spectral_request (*request)(const char *fn, dc__side *side, const dc__optim_block *b, const dc__block_step *s);
} dc__block_rules;

/* Eigenvectors of a device's matrices (soap_basis_cuda.c): zeros until dc__soap_basis_create(). */
typedef struct dc__soap_basis {
  bool has_device_qr; /* the device has a QR */
  int64_t sides;
  /* Of the device: */
  dc_device *device;
  void *device_memory; /* all of it */
  size_t device_bytes;
  int64_t *orders; /* the sides' */
  void **places;
  int32_t *failed;
  /* Here: */
  dc__spectral_request *pending; /* of which the host does not know yet what became of them: */
  int64_t pending_count;
  void **tables;
  int32_t *host_failed;
  dc_linalg *host;
  dc__spectral_request *requests;
  char *memory;
  size_t bytes; /* of memory */
} dc__soap_basis;
/* Memory for so many sides, which have so many rows; orders of the device for them. What fails is closed by its owner.
 */
dc_status dc__soap_basis_create(dc__soap_basis *b, const dc_linalg *l, int64_t sides, int64_t rows);
/* All that requests of the sides, which are all of them that there can be, want; l in a query. */
dc_status dc__soap_basis_reserve(dc__soap_basis *b, dc_linalg *l, const char *fn, const dc__spectral_request *requests,
                                 int64_t count);
/* As dc__spectral_run_grouped(); results are queued, orders too, and what is said of those that the device makes is
 * there after dc__soap_basis_read_status(). */
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

/* How a parameter is cut, and whose its blocks are. */
typedef struct dc__block_plan {
  dc__partition partition;
  int32_t *owners;
} dc__block_plan;

/* Blocks of a device that are alike, as far as memory goes. */
typedef struct dc__slab dc__slab;
typedef struct dc__block_group {
  int64_t count; /* elements of each */
  int64_t size[DC__ORDER_MAX];
  int32_t order, group;
  bool closed;            /* all of them have their pieces */
  int64_t capacity, used; /* blocks */
  dc__slab *slabs;
} dc__block_group;

typedef void (*dc__block_fn)(const dc__optim_block *b, const dc__block_step *s, dc__block_context *ctx);

typedef struct dc__blockwise {
  dc_optimizer head;
  dc__block_plan *plans; /* one a parameter */
  int64_t plan_capacity;
  int64_t planned; /* parameters that have a plan */
  double load[DC__COMM_MAX_WORLD];
  dc__optim_block *blocks; /* this rank's, by parameter and index */
  int64_t block_count, block_capacity;
  dc__block_group *block_groups; /* of a device */
  int64_t block_group_count, block_group_capacity;
  /* What a step needs; made again when parameters have come. */
  int64_t set_up_params; /* parameters that it knows */
  dc__redistribute *redistribute;
  dc__redist_entry *entries;  /* one a parameter */
  dc__block_step *steps;      /* of each parameter */
  bool *skip;                 /* parameters without a gradient */
  uint64_t *found;            /* of a step that is queued: what keeps it from happening; NULL: nothing does */
  const float *scale;         /* and what its gradients are multiplied with; NULL: the host says it */
  dc__optim_block **by_cost;  /* the costliest first */
  dc__optim_block **by_group; /* on a device: kin side by side */
  int64_t large;              /* how many of them are cut up over the threads */
  dc__side_ref *by_size;      /* those with a factor, the largest first */
  int64_t side_count;
  int64_t *orders; /* the sides', where the kind sorts */
  dc__spectral_request *requests;
  dc__soap_basis bases; /* on a device, where the kind sorts */
  dc__slots slots;
  size_t slots_bytes;
  int64_t max_elements, max_rows; /* of a block; of what a place's sums are of */
  int32_t temps;                  /* of a place: the most of any group */
} dc__blockwise;

static inline dc__blockwise *dc__blockwise_of(dc_optimizer *o) {
  return (dc__blockwise *)(void *)o;
}
static inline const dc__block_rules *dc__block_rules_of(const dc_optimizer *o) {
  return o->kind->rules;
}
static inline dc__block_options dc__block_options_of(const dc_optimizer *o, const dc__optim_param *p) {
  return dc__block_rules_of(o)->read_options(dc__optim_options(o, p));
}

/* blockwise.c: functions of a kind. */
dc_status dc__blockwise_ready(dc_optimizer *o, const char *fn);
dc_status dc__blockwise_step(dc_optimizer *o, const char *fn);
dc_status dc__blockwise_enqueue(dc_optimizer *o, const char *fn);
void dc__blockwise_stats(const dc_optimizer *o, dc_optimizer_stats *stats);
void dc__blockwise_destroy(dc_optimizer *o);

/* What the kinds have in common. Squares of gradients, and sums of them, fit float32. */
#define DC__BLOCKWISE_KIND                                                                           \
  .size = sizeof(dc__blockwise), .matrices = true, .exponent = 50, .prepare = dc__blockwise_prepare, \
  .ready = dc__blockwise_ready, .step = dc__blockwise_step, .stats = dc__blockwise_stats,            \
  .destroy = dc__blockwise_destroy

/* blockwise_update.c: a dc__fill_fn and a dc__apply_fn. */
void dc__blockwise_fill(void *user, int64_t entry, float *part);
void dc__blockwise_apply(void *user, int64_t entry, const float *part);

/* blockwise_plan.c */
dc_status dc__blockwise_prepare(dc_optimizer *o, const char *fn, int64_t first);
/* What a block of a parameter costs. */
double dc__block_cost(const dc_optimizer *o, const dc__optim_param *p, const dc__partition *partition, int64_t block);
/* A piece of a block, or with dimension >= 0 of a side. NULL: no memory. */
void *dc__block_piece(dc_optimizer *o, dc__optim_param *p, const char *what, const dc__optim_block *b,
                      int32_t dimension, int32_t dtype, const int64_t shape[2], int32_t ndim);

/* block_group_cuda.c: blocks that go together. From one of a kin to the next, in elements; all begin at 256 bytes. */
static inline int64_t dc__block_group_stride(int64_t elements) {
  return (elements + 63) / 64 * 64;
}
/* Before blocks are made: all of them are expected, then each one joins, and takes its pieces. */
void dc__block_group_open(dc__blockwise *self);
dc_status dc__block_group_reserve(dc__blockwise *self, int64_t param, int64_t index);
void dc__block_group_add(dc__blockwise *self, dc__optim_block *b, const dc__partition *partition, const dc__box *box);
/* NULL: no memory. */
void *dc__block_group_piece(dc_optimizer *o, const dc__optim_block *b, const char *what, int32_t dimension, size_t size,
                            int64_t elements);
void dc__block_group_destroy(dc__blockwise *self);
/* by_group, and the most that a place is asked to hold. */
void dc__block_group_sort(dc__blockwise *self);
/* Queues the work of all blocks. */
void dc__block_group_run(dc__blockwise *self, void *memory, dc__block_fn work);

/* precondition.c: what Shampoo and SOAP have in common. */

/* The factors take data in: keep of themselves and add of its products with itself. */
void dc__block_update_factors(const dc__optim_block *b, double keep, double add, const dc__block_context *ctx);
/* x times the matrix of each side that has one, along that side; back: times its transpose. */
void dc__block_multiply_sides(const dc__optim_block *b, float *x, bool back, const dc__block_context *ctx);
/* Whether its latest refresh changed the order of the matrix' columns. */
bool dc__side_is_permuted(const dc__side *side);
/* A side's matrix as a request of it has it. */
dc__mat dc__side_mat(void *data, int32_t dtype, int64_t n);

/* grafting_cpu.c: Shampoo's work on all elements of a block, on the host. */
void dc__grafting_accumulate_cpu(const dc__block_context *ctx, const dc__graft *g);
void dc__grafting_direction_cpu(const dc__block_context *ctx, const dc__graft *g);
void dc__grafting_norm_cpu(dc__block_context *ctx, const dc__graft *g);
void dc__grafting_finish_cpu(const dc__block_context *ctx, const dc__graft *g, bool scaled);

#endif
