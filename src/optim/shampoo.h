/* Shampoo, inside the room: blocks with their factors, and one block's work in a step. */
#ifndef DC_OPTIM_SHAMPOO_H
#define DC_OPTIM_SHAMPOO_H

#include "optim/exchange.h"
#include "optim/inside.h"

/* One dimension of a block. */
typedef struct dc__side {
  int64_t n;
  float *factor, *root;  /* [n, n] */
  double *basis;         /* [n, n]; NULL: every root is computed afresh */
  int64_t *failures;     /* refreshes that failed since the last good one */
  dc_spectral_info info; /* of the latest refresh */
} dc__side;

/* A block that this rank owns. What it points to is in pieces of state, but for data. */
typedef struct dc__block {
  int64_t param, index;
  int64_t count; /* elements */
  int32_t order;
  dc__side *sides;
  float *exp_avg;  /* NULL: gradients are not filtered */
  float *graft;    /* sum or mean of squares; NULL: the graft has none */
  float *momentum; /* NULL: none */
  float *data;     /* gradient, then filtered gradient, then direction; another's in the exchange */
} dc__block;

/* What a block's parameter and its group say of the step under way. */
typedef struct dc__block_step {
  const dc_shampoo_options *options;
  int64_t t; /* from 1 */
  bool due;  /* roots are refreshed */
} dc__block_step;

/* Where a block's work runs: on the pool, or with pool NULL on this thread. */
typedef struct dc__block_place {
  dc__pool *pool;
  void *scratch; /* DC__SCRATCH_BYTES; pool NULL */
  float *temp;   /* twice the block's elements */
} dc__block_place;

/* A side and its block. */
typedef struct dc__side_of {
  dc__side *side;
  const dc__block *block;
} dc__side_of;

/* How a parameter is cut, and whose its blocks are. */
typedef struct dc__shampoo_plan {
  dc__cut cut;
  int32_t *owners;
} dc__shampoo_plan;

typedef struct dc__shampoo {
  dc_optimizer head;
  dc__shampoo_plan *plans; /* one a parameter */
  int64_t plan_capacity;
  int64_t planned; /* parameters that have a plan */
  double load[DC__COMM_MAX_WORLD];
  dc__block *blocks; /* this rank's, by parameter and index */
  int64_t block_count, block_capacity;
  /* What a step needs; made again when parameters have come. */
  int64_t settled; /* parameters that it knows */
  dc__exchange *exchange;
  dc__flow *flows;      /* one a parameter */
  dc__block_step *now;  /* of each parameter */
  bool *skip;           /* parameters without a gradient */
  dc__block **by_cost;  /* the costliest first */
  int64_t large;        /* how many of them are cut up over the threads */
  dc__side_of *by_size; /* the largest first */
  int64_t side_count;
  dc__spectral *requests;
  dc__slots slots;
  size_t slots_bytes;
} dc__shampoo;

static inline dc__shampoo *dc__shampoo_of(dc_optimizer *o) {
  return (dc__shampoo *)(void *)o;
}

/* shampoo_blocks.c */
dc_status dc__shampoo_prepare(dc_optimizer *o, const char *fn, int64_t first);
/* What a block's roots and products cost. */
double dc__shampoo_cost(const dc__cut *cut, int64_t block);

bool dc__shampoo_due(const dc_shampoo_options *options, int64_t t);
/* What the sum in a factor falls short of its mean by; 1 for a plain sum. */
double dc__shampoo_share(const dc_shampoo_options *options, int64_t t);

/* shampoo_block.c: the factors take the gradient in; then data becomes the filtered gradient. */
void dc__block_learn(const dc__block *b, const dc__block_step *s, const dc__block_place *place);
/* The root that a refresh computes. */
dc__spectral dc__side_request(const char *fn, dc__side *side, const dc__block *b, const dc__block_step *s);
/* From the filtered gradient to the direction. */
void dc__block_direct(const dc__block *b, const dc__block_step *s, const dc__block_place *place);

/* graft.c: work on all elements of a block. */
void dc__graft_learn(const dc__block *b, const dc__block_step *s);
void dc__graft_filter(const dc__block *b, const dc__block_step *s);
double dc__graft_norm(const dc__block *b, const dc__block_step *s);
/* data becomes the graft's direction. */
void dc__graft_take(const dc__block *b, const dc__block_step *s);
double dc__block_norm(const float *x, int64_t count);
void dc__block_momentum(const dc__block *b, const dc__block_step *s);

#endif
