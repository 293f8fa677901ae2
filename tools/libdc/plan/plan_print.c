/* The results of libdc plan, as text or JSON. */
#include <inttypes.h>

#include "plan.h"

enum { LIBDC = DC_LAYER_INVENTORY_LIBDC, DEEPSPEED = DC_LAYER_INVENTORY_DEEPSPEED };

static const char *flag_names(int32_t flags) {
  static const char *const names[FLAGS] = {"-",    "inv",      "attn",      "inv attn",
                                           "gelu", "inv gelu", "attn gelu", "inv attn gelu"};
  return names[flags];
}

static double gigabytes(int64_t bytes) {
  return (double)bytes / 1e9;
}

/* ---- text ---- */

static void print_states(const plan_table *t) {
  const model *m = &t->m;
  const dc_layer_plan *p = &t->states;
  printf("%s: %" PRId64 " layer%s, hidden size %" PRId64 ", %" PRId64 " head%s, intermediate size %" PRId64
         ", %.1f million parameters\n",
         m->name, m->layers, plural_s(m->layers), m->hidden, m->heads, plural_s(m->heads), m->intermediate,
         (double)p->parameters / 1e6);
  printf("%s, ZeRO-%d, %" PRId64 " rank%s; GB a rank: weights %.2f, gradients %.2f, optimizer of %d moment%s %.2f",
         dc_dtype_name(t->q.dtype), t->q.stage, t->q.ranks, plural_s(t->q.ranks), gigabytes(p->weight_bytes),
         gigabytes(p->grad_bytes), t->q.moments, plural_s(t->q.moments), gigabytes(p->optimizer_bytes));
  if (p->working_bytes > 0) {
    printf(", whole for a while %.2f", gigabytes(p->working_bytes));
  }
  printf(", other %.2f\n", gigabytes(t->q.other));
}

static void print_rows(const plan_table *t) {
  printf("\n%-22s%-22s", "largest micro-batch", "kept a sample, MB");
  for (int i = 0; i < t->memories; i++) {
    printf("%11" PRId64 " GiB    ", t->memory[i]);
  }
  printf("\n  %4s %-15s", "S", "flags");
  for (int i = -1; i < t->memories; i++) {
    printf("%8s%11s", "libdc", "DeepSpeed");
  }
  putchar('\n');
  for (int i = 0; i < t->count; i++) {
    const plan_row *row = &t->rows[i];
    printf("  %4" PRId64 " %-15s%8.1f%11.1f", row->seq, flag_names(row->flags), gigabytes(row->kept[LIBDC]) * 1e3,
           gigabytes(row->kept[DEEPSPEED]) * 1e3);
    for (int k = 0; k < t->memories; k++) {
      printf("%8" PRId64 "%11" PRId64, row->max_batch[k][LIBDC], row->max_batch[k][DEEPSPEED]);
    }
    putchar('\n');
  }
  puts(
      "\ninv is normalize_invertible, attn attn_dropout_checkpoint, gelu gelu_checkpoint. Not counted: what "
      "embeddings\n"
      "and head keep, buckets, the driver, gaps of the allocator; --other takes them off. libdc keeps no S x S matrix\n"
      "and no dropout mask, so attn changes nothing there.");
}

static void print_difference(const tutorial_table *s, const tutorial_row *row) {
  printf("S = %" PRId64 ", %s: ", row->seq, row->flags == 0 ? "no flag" : flag_names(row->flags));
  if (row->more >= 0) {
    const tutorial_row *more = &s->rows[row->more];
    printf("the next batch that was tried, %" PRId64 ", counts %.2f GB, less than %" PRId64
           " samples with %s,\n"
           "which ran: memory was not the limit. The row is advice, or another set-up.\n",
           row->next, gigabytes(row->next_bytes), more->ran, flag_names(more->flags));
  } else {
    puts("the formula has no such limit.");
  }
}

static void print_tutorial(const tutorial_table *s) {
  const tutorial_row *largest = &s->rows[s->largest];
  printf("\nDeepSpeed's tutorial: BERT-large on a V100 of 32 GB, float16. Of what ran there, %" PRId64
         " samples of S = %" PRId64
         " with %s\ncount most by DeepSpeed's formula, %.2f GB. So %.2f GB of the card were "
         "taken by what is not counted; then fit:\n\n  %4s %-15s%10s%11s%11s%8s\n",
         largest->ran, largest->seq, flag_names(largest->flags), gigabytes(s->ran_bytes), gigabytes(s->rest_bytes), "S",
         "flags", "tutorial", "DeepSpeed", "and tried", "libdc");
  for (int i = 0; i < TUTORIAL_ROWS; i++) {
    const tutorial_row *row = &s->rows[i];
    char tutorial[24];
    snprintf(tutorial, sizeof tutorial,
             row->ran > 0     ? "%" PRId64
             : row->up_to > 0 ? "<= %" PRId64
                              : "more",
             row->ran > 0 ? row->ran : row->up_to);
    printf("  %4" PRId64 " %-15s%10s%11" PRId64 "%11" PRId64 "%8" PRId64 "  %s\n", row->seq, flag_names(row->flags),
           tutorial, row->max_batch[DEEPSPEED], row->tried, row->max_batch[LIBDC], row->agrees ? "agrees" : "differs");
  }
  puts("\n\"and tried\" is the largest batch in DeepSpeed's figures that fits by the formula.");
  for (int i = 0; i < TUTORIAL_ROWS; i++) {
    if (!s->rows[i].agrees) {
      print_difference(s, &s->rows[i]);
    }
  }
}

void plan_print(const plan_table *t, const tutorial_table *tutorial) {
  print_states(t);
  print_rows(t);
  if (tutorial != NULL) {
    print_tutorial(tutorial);
  }
}

/* ---- JSON ---- */

static void json_flags(json *j, int64_t seq, int32_t flags) {
  json_int(j, "seq", seq);
  json_bool(j, "normalize_invertible", flags & FLAG_INVERTIBLE);
  json_bool(j, "attn_dropout_checkpoint", flags & FLAG_ATTENTION);
  json_bool(j, "gelu_checkpoint", flags & FLAG_GELU);
}

/* {"libdc": …, "deepspeed": …} */
static void json_pair(json *j, const char *key, const int64_t *pair) {
  json_open(j, key, '{');
  json_int(j, "libdc", pair[LIBDC]);
  json_int(j, "deepspeed", pair[DEEPSPEED]);
  json_close(j, '}');
}

static void json_states(json *j, const plan_table *t) {
  json_open(j, "model", '{');
  json_text(j, "name", t->m.name);
  json_int(j, "layers", t->m.layers);
  json_int(j, "hidden", t->m.hidden);
  json_int(j, "heads", t->m.heads);
  json_int(j, "intermediate", t->m.intermediate);
  json_int(j, "parameters", t->states.parameters);
  json_close(j, '}');
  json_open(j, "rank", '{');
  json_text(j, "dtype", dc_dtype_name(t->q.dtype));
  json_int(j, "stage", t->q.stage);
  json_int(j, "ranks", t->q.ranks);
  json_int(j, "moments", t->q.moments);
  json_int(j, "weight_bytes", t->states.weight_bytes);
  json_int(j, "grad_bytes", t->states.grad_bytes);
  json_int(j, "optimizer_bytes", t->states.optimizer_bytes);
  json_int(j, "working_bytes", t->states.working_bytes);
  json_int(j, "other_bytes", t->q.other);
  json_close(j, '}');
}

static void json_rows(json *j, const plan_table *t) {
  json_open(j, "rows", '[');
  for (int i = 0; i < t->count; i++) {
    const plan_row *row = &t->rows[i];
    json_open(j, NULL, '{');
    json_flags(j, row->seq, row->flags);
    json_pair(j, "kept_bytes", row->kept);
    json_open(j, "largest", '{');
    for (int k = 0; k < t->memories; k++) {
      char gib[24];
      snprintf(gib, sizeof gib, "%" PRId64, t->memory[k]);
      json_pair(j, gib, row->max_batch[k]);
    }
    json_close(j, '}');
    json_close(j, '}');
  }
  json_close(j, ']');
}

static void json_tutorial(json *j, const tutorial_table *s) {
  json_open(j, "tutorial", '{');
  json_int(j, "counted_bytes", s->ran_bytes);
  json_int(j, "rest_bytes", s->rest_bytes);
  json_open(j, "rows", '[');
  for (int i = 0; i < TUTORIAL_ROWS; i++) {
    const tutorial_row *row = &s->rows[i];
    json_open(j, NULL, '{');
    json_flags(j, row->seq, row->flags);
    json_int(j, "ran", row->ran);
    json_int(j, "up_to", row->up_to);
    json_pair(j, "largest", row->max_batch);
    json_int(j, "tried", row->tried);
    json_bool(j, "agrees", row->agrees);
    json_close(j, '}');
  }
  json_close(j, ']');
  json_close(j, '}');
}

void plan_json(const plan_table *t, const tutorial_table *tutorial) {
  json j = {.file = stdout};
  json_open(&j, NULL, '{');
  json_states(&j, t);
  json_rows(&j, t);
  if (tutorial != NULL) {
    json_tutorial(&j, tutorial);
  }
  json_close(&j, '}');
}
