/* The sequential model: where values are gathered, reduced and stored, and what they must be. */
#include "program.h"

uint64_t pick(program *p, uint64_t below) {
  *p->state += UINT64_C(0x9e3779b97f4a7c15);
  uint64_t z = (*p->state ^ (*p->state >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return (z ^ (z >> 31)) % below;
}

double rounded(double x, int32_t dtype) {
  bool small = x > -256 && x < 256 && x == (double)(int)x; /* exact in every floating-point type */
  if (!small || dtype == DC_INT8) {
    double raw;
    ground_cast(&raw, dtype, &x, DC_FLOAT64, 1);
    ground_cast(&x, DC_FLOAT64, &raw, dtype, 1);
  }
  return x;
}

/* The values fit int8, and have a third that each type rounds differently. */
double weight(int64_t id, int64_t version, int64_t i) {
  return (double)((id * 31 + version * 13 + i * 7) % 61 - 30) + 1.0 / 3;
}

/* Multiples of the world size, so that most means are integers. Some are large, so that 16-bit sums round. */
double gradient(const program *p, int32_t by, int64_t id, int64_t i) {
  int64_t scale = INT64_C(1) << (p->reductions * 5 + id) % 7;
  return (double)(((by * 5 + id * 3 + p->reductions * 11 + i * 2) % 5 - 2) * p->r->world * scale);
}

double content(int64_t which, int64_t i) {
  return (double)((which * 17 + i * 3) % 50);
}

/* ---- weights ---- */

bool has_copy(const param *a) {
  return a->copies[0].state != NONE || a->copies[1].state != NONE || a->copies[2].state != NONE;
}

static bool is_float(int32_t dtype) {
  return dtype == DC_FLOAT32 || dtype == DC_FLOAT64 || dtype == DC_FLOAT16 || dtype == DC_BFLOAT16;
}

/* Whether a copy in that type has every value of the shard's. */
static bool holds_shard(const param *a, int t) {
  return t == 0 ||
         (is_float(a->types[t]) == is_float(a->types[0]) && dc_dtype_size(a->types[t]) > dc_dtype_size(a->types[0]));
}

void model_gather(program *p, param *a, int t) {
  copy *c = &a->copies[t];
  if (c->state == NONE || c->version != a->version) {
    c->from_shard = true;
    for (int other = 0; other < TYPES; other++) {
      const copy *from = &a->copies[other];
      c->from_shard = c->from_shard && (from->state == NONE || from->version != a->version || !holds_shard(a, other));
    }
    c->state = COMING;
    c->version = a->version;
    c->gather = ++p->gathers;
  }
}

void model_drop(program *p, param *a) {
  for (int t = 0; t < TYPES; t++) {
    if (a->copies[t].state == COMING) {
      p->lost = p->gathers; /* may be in flight until a later gather was waited for */
    }
    a->copies[t].state = NONE;
  }
  a->users = a->released = 0;
  a->in_use = false;
}

void model_wait(program *p, param *a) {
  a->in_use = true;
  for (int t = 0; t < TYPES; t++) {
    copy *c = &a->copies[t];
    if (c->state == COMING) {
      c->state = READY;
      p->waited = c->gather > p->waited ? c->gather : p->waited;
      if (c->from_shard && a->reloaded && c->gather > a->reloading) {
        a->reloading = -1;
      }
    }
  }
}

/* ---- gradients ---- */

/* A type that holds the values of both. */
static int32_t type_of_both(int32_t a, int32_t b) {
  return a == b ? a : a == DC_FLOAT64 || b == DC_FLOAT64 ? DC_FLOAT64 : DC_FLOAT32;
}

/* Averages the ranks' values in `local`, which have this type, into the buffer. Sums over ranks are exact. */
static void average(program *p, param *a, int32_t dtype) {
  for (int64_t i = 0; i < a->numel; i++) {
    double sum = 0;
    for (int32_t by = 0; by < p->r->world; by++) {
      sum += a->local[by * a->numel + i];
    }
    double mean = rounded(sum / p->r->world, dtype == DC_FLOAT64 ? DC_FLOAT64 : DC_FLOAT32);
    mean = rounded(mean, a->buffer_type);
    a->expected[i] = a->has_grad ? rounded(a->expected[i] + mean, a->buffer_type) : mean;
  }
  a->unknown = a->unknown && a->has_grad;
  a->has_grad = a->pending = true;
  a->has_local = false;
}

void model_reduce(program *p, param *a, int32_t dtype) {
  bool later = p->stage == 1 && !p->update;
  dtype = a->expected_type != DC_DTYPE_NONE ? a->expected_type
          : a->has_local                    ? type_of_both(a->local_type, dtype)
                                            : dtype;
  for (int64_t i = 0; i < a->numel; i++) {
    for (int32_t by = 0; by < p->r->world; by++) {
      double *own = &a->local[by * a->numel + i];
      *own = rounded((a->has_local ? *own : 0.0) + gradient(p, by, a->id, i), dtype);
    }
  }
  a->has_local = true;
  a->local_type = dtype;
  if (!later) {
    average(p, a, dtype);
  }
}

/* The end of a step averages the sums that its last backward has not averaged. */
void model_end(program *p) {
  for (int64_t i = 0; i < p->count && p->update; i++) {
    param *a = &p->params[i];
    if (a->has_local) {
      average(p, a, a->local_type);
    }
  }
}

/* An aborted step drops weights that are not persistent. Only the library knows which buckets were flushed. */
void model_abort(program *p) {
  for (int64_t i = 0; i < p->count; i++) {
    param *a = &p->params[i];
    a->users = a->released = 0;
    a->in_use = false;
    if (!a->persistent) {
      model_drop(p, a);
    }
    a->unknown = true;
    a->has_grad = a->keeps_grad = a->has_local = a->pending = false;
    a->reloading = -1;
  }
  for (int i = 0; i < VALUES; i++) {
    p->values[i].device = -1;
  }
  p->waited = p->gathers; /* all streams have been drained */
}
