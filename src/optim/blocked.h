/* Muon, Shampoo and SOAP, inside the room: a parameter is cut into blocks, each block has one owner, and a factor for
 * each of its sides. The frame in blocked.c brings gradients to the owners, refreshes what comes of the factors when it
 * is due, and takes the directions to every rank's part of the weights; a kind's rules say what a block does in
 * between. */
#ifndef DC_OPTIM_BLOCKED_H
#define DC_OPTIM_BLOCKED_H

#include "optim/exchange.h"
#include "optim/inside.h"

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
typedef struct dc__block {
  int64_t param, index;
  int64_t count; /* elements */
  int32_t order;
  int64_t kin, at; /* on a device: its kin, and which of them it is */
  dc__side *sides;
  float *exp_avg;  /* NULL: gradients are not filtered */
  float *squares;  /* sum or mean of squares; NULL: none */
  float *momentum; /* NULL: none */
  float *data;     /* gradient, then what the kind makes of it, then direction; another's in the exchange */
} dc__block;

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
  bool still;          /* the weights stay as they are */
} dc__block_step;

typedef struct dc__block_work dc__block_work;

/* Where a block's work runs: on the pool, or with pool NULL on this thread; or queued on a device. */
typedef struct dc__block_place {
  const dc__block_work *work;
  dc__pool *pool;
  void *scratch; /* DC__SCRATCH_BYTES; pool NULL */
  float *temp;   /* so many times the block's elements as the kind says, twice at least: */
  int64_t half;  /* from the first ones to the others */
  double length; /* that a graft has */
  /* On a device, where `count` blocks of a kin go together. Work is given the first one, whose data lie in the stack:
   */
  int32_t count;
  dc__block *const *blocks;
  float *stack;
  dc_linalg *there;         /* NULL: the host computes */
  const uint64_t *found;    /* momentum stays as it is unless it is 0; NULL: nobody looked */
  void *product;            /* what products may use */
  dc__cuda_report *lengths; /* [2, count] */
  double *sums;             /* one for each row of the blocks */
} dc__block_place;

/* What a block's work is made of, on the host (blocked_here.c) and on a device (blocked_there.c). Matrices are dense,
 * by rows. */
struct dc__block_work {
  /* c = add a a^T + keep c, [n, n]; a is [n, k], or with trans stored as [k, n]. */
  void (*square)(const dc__block_place *place, bool trans, int64_t n, int64_t k, const float *a, double add,
                 double keep, float *c);
  void (*multiply)(const dc__block_place *place, const dc__gemm *g);
  /* to [cols, rows] = from [rows, cols], transposed. */
  void (*turn)(const dc__block_place *place, const float *from, int64_t rows, int64_t cols, float *to);
  void (*copy)(const dc__block_place *place, float *to, const float *from, int64_t count);
  /* The matrix of the block's side d times factor, where its latest refresh was a good one. */
  void (*scale)(const dc__block_place *place, const dc__block *b, int32_t d, float factor);
  /* Shampoo's: the graft's squares and the filtered gradient; the graft's direction, to data, or its length alone; that
   * length given to data where `scaled`, and momentum. */
  void (*graft_learn)(const dc__block_place *place, const dc__graft *g);
  void (*graft_take)(const dc__block_place *place, const dc__graft *g);
  void (*graft_measure)(dc__block_place *place, const dc__graft *g);
  void (*graft_finish)(const dc__block_place *place, const dc__graft *g, bool scaled);
  /* SOAP's: data becomes what a step of AdamW takes a weight of zero to; and the parts of the squares along dimension
   * d, `inner` elements each, come in the order of the latest refresh. */
  void (*adam)(const dc__block_place *place, const dc__block *b, const dc__adamw_factors *factors);
  void (*sort)(const dc__block_place *place, const dc__block *b, int32_t d, int64_t inner);
  /* Muon's: p says all but where matrices are, and data becomes what dc__polar makes of it. */
  void (*polar)(const dc__block_place *place, const dc__block *b, const dc__polar *p);
};
extern const dc__block_work dc__block_here, dc__block_there;
/* What a place on a device has of scratch memory, for at most so many elements, `temps` times in temp, and rows at a
 * time: added to *total, and placed. False: no memory is that large. */
bool dc__block_there_add(size_t *total, const dc_linalg *l, int64_t elements, int32_t temps, int64_t rows);
dc__block_place dc__block_there_place(dc_linalg *l, void *memory, int64_t elements, int32_t temps, int64_t rows);

/* What the frame wants to know of a kind's options. */
typedef struct dc__block_options {
  int64_t max_block, merge_below;
  int64_t longest; /* side that has a factor */
  bool vectors;    /* the side of a block of one dimension has one */
  double weight_decay;
  bool l2; /* else decoupled */
  int32_t tolerated_failures;
  int32_t temps; /* a place's temp has so many times the block's elements */
} dc__block_options;

/* What a kind is: `rules` of its dc__optim_kind. */
typedef struct dc__block_rules {
  const char *matrix; /* its name, as a piece and in texts */
  bool sorts;         /* a refresh may change the order of its columns */
  dc__block_options (*read)(const void *options);
  /* How a parameter is cut. NULL: by max_block and merge_below. */
  void (*cut)(const void *options, const dc__optim_param *p, dc__cut *cut);
  /* What a step of a block costs. NULL: what decompositions and products of its sides do. */
  double (*cost)(const void *options, const dc__box *box);
  /* Adds the pieces that a block has beside its sides', and a side has beside factor, matrix and failures. NULL: none.
   */
  bool (*add_elements)(dc_optimizer *o, dc__optim_param *p, dc__block *b, const int64_t *shape, int32_t ndim);
  bool (*add_side)(dc_optimizer *o, dc__optim_param *p, dc__block *b, int32_t d);
  /* Sets due and still from options and t. NULL: neither ever. */
  void (*begin)(dc__block_step *s);
  /* A block's work before and after what is due is refreshed; after NULL: none. */
  void (*before)(const dc__block *b, const dc__block_step *s, dc__block_place *place);
  void (*after)(const dc__block *b, const dc__block_step *s, dc__block_place *place);
  /* What the weight's way is made of, of a kind that has steps queued. */
  dc__optim_rule_fn rule;
  /* How a side's matrix comes of its factor. */
  dc__spectral (*request)(const char *fn, dc__side *side, const dc__block *b, const dc__block_step *s);
} dc__block_rules;

/* Eigenvectors of a device's matrices (bases.c): zeros until dc__bases_make(). */
typedef struct dc__bases {
  bool queues; /* the device has a QR */
  int64_t sides;
  /* Of the device: */
  dc_device *device;
  void *there; /* all of it */
  size_t there_bytes;
  int64_t *orders; /* the sides' */
  void **places;
  int32_t *failed;
  /* Here: */
  dc__spectral *queued; /* of which the host does not know yet what became of them: */
  int64_t waiting;
  void **tables;
  int32_t *said;
  dc_linalg *host;
  dc__spectral *requests;
  char *memory;
  size_t bytes; /* of memory */
} dc__bases;
/* Memory for so many sides, which have so many rows; orders of the device for them. What fails is closed by its owner.
 */
dc_status dc__bases_make(dc__bases *b, const dc_linalg *l, int64_t sides, int64_t rows);
/* All that requests of the sides, which are all of them that there can be, want; l in a query. */
dc_status dc__bases_open(dc__bases *b, dc_linalg *l, const char *fn, const dc__spectral *requests, int64_t count);
/* As dc__spectral_each(); results are queued, orders too, and what is said of those that the device makes is there
 * after dc__bases_done(). */
dc_status dc__bases_run(dc__bases *b, dc_linalg *l, const dc__spectral *requests, int64_t count);
/* Before and after the host waits for the device. */
void dc__bases_look(const dc__bases *b);
void dc__bases_done(dc__bases *b);
void dc__bases_close(dc__bases *b);

/* A side and its block. */
typedef struct dc__side_of {
  dc__side *side;
  const dc__block *block;
} dc__side_of;

/* How a parameter is cut, and whose its blocks are. */
typedef struct dc__block_plan {
  dc__cut cut;
  int32_t *owners;
} dc__block_plan;

/* Blocks of a device that are alike, as far as memory goes. */
typedef struct dc__slab dc__slab;
typedef struct dc__kin {
  int64_t count; /* elements of each */
  int64_t size[DC__ORDER_MAX];
  int32_t order, group;
  bool closed;        /* all of them have their pieces */
  int64_t room, used; /* blocks */
  dc__slab *slabs;
} dc__kin;

typedef void (*dc__block_fn)(const dc__block *b, const dc__block_step *s, dc__block_place *place);

typedef struct dc__blocked {
  dc_optimizer head;
  dc__block_plan *plans; /* one a parameter */
  int64_t plan_capacity;
  int64_t planned; /* parameters that have a plan */
  double load[DC__COMM_MAX_WORLD];
  dc__block *blocks; /* this rank's, by parameter and index */
  int64_t block_count, block_capacity;
  dc__kin *kins; /* of a device */
  int64_t kin_count, kin_capacity;
  /* What a step needs; made again when parameters have come. */
  int64_t settled; /* parameters that it knows */
  dc__exchange *exchange;
  dc__flow *flows;      /* one a parameter */
  dc__block_step *now;  /* of each parameter */
  bool *skip;           /* parameters without a gradient */
  uint64_t *found;      /* of a step that is queued: what keeps it from happening; NULL: nothing does */
  const float *scale;   /* and what its gradients are multiplied with; NULL: the host says it */
  dc__block **by_cost;  /* the costliest first */
  dc__block **by_kin;   /* on a device: kin side by side */
  int64_t large;        /* how many of them are cut up over the threads */
  dc__side_of *by_size; /* those with a factor, the largest first */
  int64_t side_count;
  int64_t *orders; /* the sides', where the kind sorts */
  dc__spectral *requests;
  dc__bases bases; /* on a device, where the kind sorts */
  dc__slots slots;
  size_t slots_bytes;
  int64_t most_elements, most_rows; /* of a block; of what a place's sums are of */
  int32_t temps;                    /* of a place: the most of any group */
} dc__blocked;

static inline dc__blocked *dc__blocked_of(dc_optimizer *o) {
  return (dc__blocked *)(void *)o;
}
static inline const dc__block_rules *dc__block_rules_of(const dc_optimizer *o) {
  return o->kind->rules;
}
static inline dc__block_options dc__block_options_of(const dc_optimizer *o, const dc__optim_param *p) {
  return dc__block_rules_of(o)->read(dc__optim_options(o, p));
}

/* blocked.c: functions of a kind. */
dc_status dc__blocked_ready(dc_optimizer *o, const char *fn);
dc_status dc__blocked_step(dc_optimizer *o, const char *fn);
dc_status dc__blocked_queue(dc_optimizer *o, const char *fn);
void dc__blocked_stats(const dc_optimizer *o, dc_optimizer_stats *stats);
void dc__blocked_destroy(dc_optimizer *o);

/* What the kinds have in common. Squares of gradients, and sums of them, fit float32. */
#define DC__BLOCKED_KIND                                                                         \
  .size = sizeof(dc__blocked), .matrices = true, .exponent = 50, .prepare = dc__blocked_prepare, \
  .ready = dc__blocked_ready, .step = dc__blocked_step, .stats = dc__blocked_stats, .destroy = dc__blocked_destroy

/* blocked_parts.c: a dc__exchange_fill and a dc__exchange_apply. */
void dc__blocked_fill(void *user, int64_t flow, float *part);
void dc__blocked_apply(void *user, int64_t flow, const float *part);

/* blocked_plan.c */
dc_status dc__blocked_prepare(dc_optimizer *o, const char *fn, int64_t first);
/* What a block of a parameter costs. */
double dc__block_cost(const dc_optimizer *o, const dc__optim_param *p, const dc__cut *cut, int64_t block);
/* A piece of a block, or with dimension >= 0 of a side. NULL: no memory. */
void *dc__block_piece(dc_optimizer *o, dc__optim_param *p, const char *what, const dc__block *b, int32_t dimension,
                      int32_t dtype, const int64_t shape[2], int32_t ndim);

/* blocked_kin.c: blocks that go together. From one of a kin to the next, in elements; all begin at 256 bytes. */
static inline int64_t dc__kin_stride(int64_t elements) {
  return (elements + 63) / 64 * 64;
}
/* Before blocks are made: all of them are expected, then each one joins, and takes its pieces. */
void dc__kin_begin(dc__blocked *self);
dc_status dc__kin_expect(dc__blocked *self, int64_t param, int64_t index);
void dc__kin_join(dc__blocked *self, dc__block *b, const dc__cut *cut, const dc__box *box);
/* NULL: no memory. */
void *dc__kin_piece(dc_optimizer *o, const dc__block *b, const char *what, int32_t dimension, size_t size,
                    int64_t elements);
void dc__kin_end(dc__blocked *self);
/* by_kin, and the most that a place is asked to hold. */
void dc__kin_order(dc__blocked *self);
/* Queues the work of all blocks. */
void dc__kin_each(dc__blocked *self, void *memory, dc__block_fn work);

/* blocked_work.c: what Shampoo and SOAP have in common. */

/* The factors take data in: keep of themselves and add of its products with itself. */
void dc__block_learn(const dc__block *b, double keep, double add, const dc__block_place *place);
/* x times the matrix of each side that has one, along that side; back: times its transpose. */
void dc__block_multiply(const dc__block *b, float *x, bool back, const dc__block_place *place);
/* Whether its latest refresh changed the order of the matrix' columns. */
bool dc__side_moved(const dc__side *side);
/* A side's matrix as a request of it has it. */
dc__mat dc__side_mat(void *data, int32_t dtype, int64_t n);

/* graft.c: Shampoo's work on all elements of a block, on the host. */
void dc__graft_learn(const dc__block_place *place, const dc__graft *g);
void dc__graft_take(const dc__block_place *place, const dc__graft *g);
void dc__graft_measure(dc__block_place *place, const dc__graft *g);
void dc__graft_finish(const dc__block_place *place, const dc__graft *g, bool scaled);

#endif
