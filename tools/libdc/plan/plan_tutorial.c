/* A table of DeepSpeed's tutorial, "which memory optimization flags need to be turned on when running BERT-Large on
 * NVIDIA V100 GPU with 32GB of memory", against DeepSpeed's own formula. The table says what ran on a card; the formula
 * counts bytes. The memory beside the counted bytes on that card is taken from the row that needs most. */
#include "plan.h"

static const tutorial_row table[TUTORIAL_ROWS] = {
    {.seq = 128, .flags = 0, .ran = 80},
    {.seq = 128, .flags = FLAG_INVERTIBLE, .ran = 112},
    {.seq = 128, .flags = FLAG_INVERTIBLE | FLAG_ATTENTION, .ran = 128},
    {.seq = 128, .flags = FLAG_INVERTIBLE | FLAG_ATTENTION | FLAG_GELU},
    {.seq = 512, .flags = 0, .ran = 12},
    {.seq = 512, .flags = FLAG_ATTENTION, .ran = 16},
    {.seq = 512, .flags = FLAG_INVERTIBLE | FLAG_ATTENTION | FLAG_GELU, .up_to = 80},
};

/* The micro-batches in the figures of DeepSpeed's post of 2020-05-28, from which such a table can be made. */
static const int64_t tried_128[] = {8, 16, 32, 48, 64, 80, 86, 96, 112, 120, 128, 132, 140, 144};
static const int64_t tried_512[] = {8, 12, 16, 20, 22};

/* The largest that was tried and is at most `most`; next: the one after it, 0 if there is none. */
static int64_t largest_tried_batch(int64_t seq, int64_t max_batch, int64_t *next) {
  const int64_t *tried = seq == 128 ? tried_128 : tried_512;
  size_t count = seq == 128 ? COUNT(tried_128) : COUNT(tried_512);
  int64_t found = 0;
  *next = 0;
  for (size_t i = 0; i < count && *next == 0; i++) {
    if (tried[i] <= max_batch) {
      found = tried[i];
    } else {
      *next = tried[i];
    }
  }
  return found;
}

/* float16, Adam's two moments as LAMB has them, data parallel: nothing is sharded. */
static const plan_query tutorial_device = {.memory = INT64_C(32) << 30, .ranks = 1, .moments = 2, .dtype = DC_FLOAT16};

static bool tutorial_bytes(const model *m, const tutorial_row *row, int64_t batch, int64_t *bytes) {
  plan_query q = tutorial_device;
  dc_layer_plan plan = DC_LAYER_PLAN_INIT;
  q.batch = batch;
  if (!plan_one(&q, m, row->flags, row->seq, DC_LAYER_INVENTORY_DEEPSPEED, &plan)) {
    return false;
  }
  *bytes = plan.total_bytes;
  return true;
}

/* Where the formula lets in more than the table: a row that needs more, and ran, shows that memory was not the limit.
 */
static bool compare_row(const model *m, tutorial_table *s, tutorial_row *row) {
  int64_t after;
  row->more = -1;
  row->tried = largest_tried_batch(row->seq, row->max_batch[DC_LAYER_INVENTORY_DEEPSPEED], &after);
  row->agrees = row->ran > 0
                    ? row->tried == row->ran
                    : row->tried > 0 && (row->up_to == 0 || row->max_batch[DC_LAYER_INVENTORY_DEEPSPEED] <= row->up_to);
  if (row->agrees || row->ran == 0) {
    return true;
  }
  (void)largest_tried_batch(row->seq, row->ran, &row->next);
  if (!tutorial_bytes(m, row, row->next, &row->next_bytes)) {
    return false;
  }
  for (int i = 0; i < TUTORIAL_ROWS; i++) {
    int64_t bytes = 0;
    if (s->rows[i].ran > 0 && !tutorial_bytes(m, &s->rows[i], s->rows[i].ran, &bytes)) {
      return false;
    }
    row->more = row->more < 0 && bytes > row->next_bytes ? i : row->more;
  }
  return true;
}

bool plan_tutorial(const model *m, tutorial_table *s) {
  *s = (tutorial_table){.largest = 0};
  for (int i = 0; i < TUTORIAL_ROWS; i++) {
    int64_t bytes = 0;
    s->rows[i] = table[i];
    if (table[i].ran > 0 && !tutorial_bytes(m, &table[i], table[i].ran, &bytes)) {
      return false;
    }
    if (bytes > s->ran_bytes) {
      s->ran_bytes = bytes;
      s->largest = i;
    }
  }
  plan_query q = tutorial_device;
  s->rest_bytes = q.other = tutorial_device.memory - s->ran_bytes;
  for (int i = 0; i < TUTORIAL_ROWS; i++) {
    tutorial_row *row = &s->rows[i];
    for (int32_t kind = 0; kind < KINDS; kind++) {
      dc_layer_plan plan = DC_LAYER_PLAN_INIT;
      if (!plan_one(&q, m, row->flags, row->seq, kind, &plan)) {
        return false;
      }
      row->max_batch[kind] = plan.micro_batch;
    }
    if (!compare_row(m, s, row)) {
      return false;
    }
  }
  return true;
}
