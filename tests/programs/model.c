/* The sequential model: what is gathered, reduced and held where, and which values there must be. */
#include "program.h"

uint64_t pick(program *p, uint64_t below) {
  *p->state += UINT64_C(0x9e3779b97f4a7c15);
  uint64_t z = (*p->state ^ (*p->state >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return (z ^ (z >> 31)) % below;
}

/* Whole numbers that are exact in all types, int8 too. */
double weight(int64_t id, int64_t version, int64_t i) {
  return (double)((id * 31 + version * 13 + i * 7) % 61 - 30);
}

/* Multiples of the world size, so that means are whole too. */
double gradient(const program *p, int32_t by, int64_t id, int64_t i) {
  return (double)(((by * 5 + id * 3 + p->reductions * 11 + i * 2) % 5 - 2) * p->r->world);
}

double content(int64_t which, int64_t i) {
  return (double)((which * 17 + i * 3) % 50);
}

/* ---- weights ---- */

bool has_copy(const param *a) {
  return a->copies[0].state != NONE || a->copies[1].state != NONE || a->copies[2].state != NONE;
}

void model_gather(program *p, param *a, int t) {
  copy *c = &a->copies[t];
  if (c->state == NONE || c->version != a->version) {
    c->from_shard = true;
    for (int other = 0; other < TYPES; other++) {
      c->from_shard = c->from_shard && (a->copies[other].state == NONE || a->copies[other].version != a->version);
    }
    c->state = COMING;
    c->version = a->version;
    c->gather = ++p->gathers;
  }
}

void model_drop(program *p, param *a) {
  for (int t = 0; t < TYPES; t++) {
    if (a->copies[t].state == COMING) {
      p->lost = p->gathers; /* nobody knows when it is done, until a later one was waited for */
    }
    a->copies[t].state = NONE;
  }
  a->users = a->released = 0;
}

void model_wait(program *p, param *a) {
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

/* Up to which whole numbers a type has them all. */
static double exact_to(int32_t dtype) {
  return dtype == DC_BFLOAT16 ? 256 : dtype == DC_FLOAT16 ? 2048 : 16777216;
}

void model_reduce(program *p, param *a) {
  bool locally = p->stage == 1 && !p->update;
  int32_t world = p->r->world;
  int32_t middle = a->expected_type == DC_DTYPE_NONE ? a->grad_type : a->expected_type;
  bool rounded = a->has_local && a->local_rounded;
  for (int64_t i = 0; i < a->numel; i++) {
    double sum = 0;
    for (int32_t by = 0; by < world; by++) {
      double *own = &a->local[by * a->numel + i];
      *own = (a->has_local ? *own : 0.0) + gradient(p, by, a->id, i);
      rounded = rounded || *own > exact_to(middle) || *own < -exact_to(middle);
      sum += *own;
    }
    double mean = sum / world;
    if (!locally) {
      a->expected[i] = a->has_grad ? a->expected[i] + mean : mean;
      rounded = rounded || a->expected[i] > exact_to(a->buffer_type) || a->expected[i] < -exact_to(a->buffer_type);
    }
  }
  a->unknown = (a->unknown && (locally || a->has_grad)) || rounded; /* the model does not round */
  a->has_grad = a->has_grad || !locally;
  a->has_local = locally;
  a->local_rounded = rounded;
  a->pending = a->pending || !locally;
}

/* The step is left: what is not persistent is gone, and of gradients only the library knows which buckets were full. */
void model_abort(program *p) {
  for (int64_t i = 0; i < p->count; i++) {
    param *a = &p->params[i];
    a->users = a->released = 0;
    if (!a->persistent) {
      model_drop(p, a);
    }
    a->unknown = true;
    a->has_grad = a->has_local = a->pending = false;
    a->reloading = -1;
  }
  for (int i = 0; i < VALUES; i++) {
    p->values[i].device = -1;
  }
  p->waited = p->gathers; /* the streams are drained */
}
