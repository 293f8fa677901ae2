/* libdc plan layer: the largest micro-batch of a stack of transformer layers, by memory flags, sequence length and
 * memory, for libdc's layer and for DeepSpeed's. All bytes are dc_layer_get_plan()'s. */
#include <inttypes.h>
#include <string.h>

#include "plan.h"

static const model models[] = {
    {"bert-base", 12, 768, 12, 3072, 30522, 512},
    {"bert-large", 24, 1024, 16, 4096, 30522, 512},
};

/* Parameters outside the layers of a BERT with its heads for pre-training: embeddings of words, places and two kinds
 * with their LN, and the pooler. The heads have a transform with its LN, a bias, and the two classes of the next
 * sentence. */
static int64_t model_other_parameters(const model *m) {
  int64_t h = m->hidden;
  return m->vocabulary == 0 ? 0 : (m->vocabulary + m->places + 4) * h + 2 * (h * h + h) + 4 * h + m->vocabulary + 2;
}

bool plan_one(const plan_query *q, const model *m, int32_t flags, int64_t seq, int32_t kind, dc_layer_plan *plan) {
  dc_layer_config config = DC_LAYER_CONFIG_INIT;
  dc_layer_plan_options options = DC_LAYER_PLAN_OPTIONS_INIT;
  config.hidden_size = m->hidden;
  config.heads = m->heads;
  config.intermediate_size = m->intermediate;
  config.num_hidden_layers = m->layers;
  config.dtype = q->dtype;
  config.normalize_invertible = flags & FLAG_INVERTIBLE ? 1 : 0;
  config.attn_dropout_checkpoint = flags & FLAG_ATTENTION ? 1 : 0;
  config.gelu_checkpoint = flags & FLAG_GELU ? 1 : 0;
  options.seq_length = seq;
  options.micro_batch = q->batch;
  options.memory_bytes = q->memory;
  options.other_bytes = q->other;
  options.other_parameters = model_other_parameters(m);
  options.ranks = q->ranks;
  options.stage = q->stage;
  options.moments = q->moments;
  options.inventory = kind;
  if (dc_layer_get_plan(&config, &options, plan) == DC_OK) {
    return true;
  }
  fprintf(stderr, "libdc plan: %s\n", dc_last_error());
  return false;
}

/* ---- the command line ---- */

static bool read_model(const args *a, model *m) {
  *m = models[COUNT(models) - 1];
  for (size_t i = 0; i < COUNT(models) && has_option(a, "--model"); i++) {
    if (strcmp(value_of(a, "--model"), models[i].name) == 0) {
      *m = models[i];
    }
  }
  const model named = *m;
  m->layers = number_of(a, "--layers", named.layers);
  m->hidden = number_of(a, "--hidden", named.hidden);
  m->heads = number_of(a, "--heads", named.heads);
  m->intermediate = number_of(a, "--intermediate", m->hidden == named.hidden ? named.intermediate : 4 * m->hidden);
  if (m->hidden % m->heads != 0) {
    report_error(a, EXIT_USAGE, "--heads = %" PRId64 ", must divide --hidden = %" PRId64, m->heads, m->hidden);
    return false;
  }
  if (m->layers != named.layers || m->hidden != named.hidden || m->heads != named.heads ||
      m->intermediate != named.intermediate) {
    m->name = "layers"; /* the parameters around them are unknown */
    m->vocabulary = m->places = 0;
  }
  return true;
}

static void read_kinds(const args *a, plan_query *q) {
  static const char *const optimizers[] = {"sgd", "momentum", "adam"}; /* by their moments */
  static const int32_t dtypes[] = {DC_FLOAT32, DC_FLOAT16, DC_BFLOAT16};
  q->dtype = DC_FLOAT16;
  q->moments = 2;
  for (int32_t i = 0; i < (int32_t)COUNT(optimizers) && has_option(a, "--optimizer"); i++) {
    q->moments = strcmp(value_of(a, "--optimizer"), optimizers[i]) == 0 ? i : q->moments;
  }
  for (size_t i = 0; i < COUNT(dtypes) && has_option(a, "--dtype"); i++) {
    q->dtype = strcmp(value_of(a, "--dtype"), dc_dtype_name(dtypes[i])) == 0 ? dtypes[i] : q->dtype;
  }
}

static bool read_table(const args *a, plan_table *t, int64_t *seq, int *seqs) {
  if (!read_model(a, &t->m)) {
    return false;
  }
  t->q.ranks = number_of(a, "--ranks", 1);
  t->q.stage = (int32_t)number_of(a, "--stage", 0);
  t->q.other = number_of(a, "--other", 0) << 30;
  t->memories = numbers_of(a, "--memory", "16,32", t->memory);
  *seqs = numbers_of(a, "--seq", "128,512", seq);
  read_kinds(a, &t->q);
  return true;
}

/* ---- counting ---- */

static bool count_row(const plan_table *t, plan_row *row) {
  for (int32_t kind = 0; kind < KINDS; kind++) {
    dc_layer_plan plan = DC_LAYER_PLAN_INIT;
    plan_query q = t->q;
    q.memory = 1;
    q.batch = 1;
    if (!plan_one(&q, &t->m, row->flags, row->seq, kind, &plan)) {
      return false;
    }
    row->kept[kind] = plan.kept_bytes;
    q.batch = 0;
    for (int i = 0; i < t->memories; i++) {
      q.memory = t->memory[i] << 30;
      if (!plan_one(&q, &t->m, row->flags, row->seq, kind, &plan)) {
        return false;
      }
      row->max_batch[i][kind] = plan.micro_batch;
    }
  }
  return true;
}

static bool count_table(plan_table *t, const int64_t *seq, int seqs) {
  plan_query q = t->q;
  q.memory = 1;
  if (!plan_one(&q, &t->m, 0, seq[0], DC_LAYER_INVENTORY_LIBDC, &t->states)) {
    return false;
  }
  for (int s = 0; s < seqs; s++) {
    for (int32_t flags = 0; flags < FLAGS; flags++) {
      plan_row *row = &t->rows[t->count++];
      row->seq = seq[s];
      row->flags = flags;
      if (!count_row(t, row)) {
        return false;
      }
    }
  }
  return true;
}

int run_plan(const args *a) {
  static plan_table t; /* some KiB */
  t = (plan_table){.states = DC_LAYER_PLAN_INIT};
  int64_t seq[PLAN_COLUMNS];
  int seqs;
  tutorial_table tutorial;
  if (!read_table(a, &t, seq, &seqs) || !count_table(&t, seq, seqs)) {
    return EXIT_USAGE;
  }
  bool known = strcmp(t.m.name, "bert-large") == 0;
  if (known && !plan_tutorial(&t.m, &tutorial)) {
    return EXIT_USAGE;
  }
  (has_option(a, "--json") ? plan_json : plan_print)(&t, known ? &tutorial : NULL);
  return EXIT_OK;
}
