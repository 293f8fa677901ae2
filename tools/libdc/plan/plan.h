/* libdc plan: queries and results.
 *
 *   plan.c       reads the command line and counts
 *   plan_tutorial.c  the same under the conditions of the tutorial's table
 *   plan_print.c  prints it, as text or JSON */
#ifndef DC_TOOL_PLAN_H
#define DC_TOOL_PLAN_H

#include "../tool.h"

enum { FLAG_INVERTIBLE = 1, FLAG_ATTENTION = 2, FLAG_GELU = 4, FLAGS = 8 };
enum { PLAN_COLUMNS = MAX_NUMBERS }; /* lengths and memories of one table */
enum { KINDS = 2 };                  /* enum dc_layer_inventory */

typedef struct model {
  const char *name;
  int64_t layers, hidden, heads, intermediate;
  int64_t vocabulary, places; /* 0: layers alone */
} model;

typedef struct plan_query {
  int64_t memory; /* bytes */
  int64_t other;
  int64_t batch; /* 0: as many as fit */
  int64_t ranks;
  int32_t stage, moments, dtype;
} plan_query;

typedef struct plan_row {
  int64_t seq;
  int32_t flags;
  int64_t kept[KINDS]; /* bytes of one sample, all layers */
  int64_t max_batch[PLAN_COLUMNS][KINDS];
} plan_row;

typedef struct plan_table {
  model m;
  plan_query q;
  int64_t memory[PLAN_COLUMNS]; /* GiB */
  int memories;
  dc_layer_plan states;
  plan_row rows[PLAN_COLUMNS * FLAGS];
  int count;
} plan_table;

/* A limit of the tutorial's table: so many samples ran with these flags, and more needed others. */
typedef struct tutorial_row {
  int64_t seq;
  int32_t flags;
  int64_t ran;   /* 0: the table has no limit */
  int64_t up_to; /* 0, or that more did not run with any flags */
  int64_t max_batch[KINDS];
  int64_t tried; /* the largest batch of DeepSpeed's figures that its formula lets in */
  bool agrees;
  int64_t next;       /* where not: the next one that was tried, and its bytes, */
  int64_t next_bytes; /* which are fewer than those of */
  int more;           /* this row, which ran; -1: none */
} tutorial_row;

enum { TUTORIAL_ROWS = 7 };

typedef struct tutorial_table {
  tutorial_row rows[TUTORIAL_ROWS];
  int largest;        /* the row that took most */
  int64_t ran_bytes;  /* what was counted of it */
  int64_t rest_bytes; /* of the card, then */
} tutorial_table;

/* False: the reason has been printed. */
bool plan_one(const plan_query *q, const model *m, int32_t flags, int64_t seq, int32_t kind, dc_layer_plan *plan);
bool plan_tutorial(const model *m, tutorial_table *tutorial);

/* tutorial: NULL for a model that it does not have. */
void plan_print(const plan_table *t, const tutorial_table *tutorial);
void plan_json(const plan_table *t, const tutorial_table *tutorial);

#endif
