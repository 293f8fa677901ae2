/* Shampoo of one parameter in float64, written from the definition: index by index, with eigenvalues by Jacobi's
 * method. */
#ifndef DC_TESTS_SHAMPOO_REFERENCE_H
#define DC_TESTS_SHAMPOO_REFERENCE_H

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "dc_api.h"

enum { REFERENCE_ORDER = 4, REFERENCE_BLOCKS = 512 };

typedef struct reference_block {
  int64_t begin[REFERENCE_ORDER], size[REFERENCE_ORDER], count;
  double *factor[REFERENCE_ORDER], *root[REFERENCE_ORDER];
  double *average, *squares, *momentum;
} reference_block;

typedef struct reference {
  dc_shampoo_options o; /* with defaults filled in */
  int32_t order;
  int64_t shape[REFERENCE_ORDER], numel, step;
  double weights[512];
  int64_t block_count;
  reference_block blocks[REFERENCE_BLOCKS];
} reference;

static double reference_default(double value, double fallback) {
  return value == 0 ? fallback : value == -1 ? 0 : value;
}

static void reference_options(dc_shampoo_options *o) {
  o->beta1 = reference_default(o->beta1, 0.9);
  o->beta2 = reference_default(o->beta2, 1);
  o->eps_abs = reference_default(o->eps_abs, 1e-12);
  o->eps_rel = reference_default(o->eps_rel, 1e-6);
  o->graft_beta2 = reference_default(o->graft_beta2, 0.999);
  o->graft_eps = reference_default(o->graft_eps, 1e-8);
  o->max_block = o->max_block == 0 ? 1024 : o->max_block;
  o->merge_below = o->merge_below == 0 ? o->max_block : o->merge_below;
  o->precondition_frequency = o->precondition_frequency == 0 ? 1 : o->precondition_frequency;
  o->start_preconditioning_step =
      o->start_preconditioning_step == 0 ? o->precondition_frequency : o->start_preconditioning_step;
}

/* Drops dimensions of length 1, then merges from the end while the product is small enough and two dimensions
 * remain. */
static void reference_merge(reference *r, const int64_t *shape, int32_t ndim) {
  for (int32_t d = 0; d < ndim; d++) {
    if (shape[d] != 1) {
      r->shape[r->order++] = shape[d];
    }
  }
  if (r->order == 0) {
    r->shape[r->order++] = 1;
  }
  for (int32_t d = r->order - 2; d >= 0 && r->order > 2; d--) {
    if (r->shape[d] * r->shape[d + 1] <= r->o.merge_below) {
      r->shape[d] *= r->shape[d + 1];
      memmove(&r->shape[d + 1], &r->shape[d + 2], (size_t)(r->order - d - 2) * sizeof *r->shape);
      r->order--;
    }
  }
}

static void reference_add_block(reference *r, const int64_t *begin) {
  reference_block *b = &r->blocks[r->block_count++];
  b->count = 1;
  for (int32_t d = 0; d < r->order; d++) {
    b->begin[d] = begin[d];
    b->size[d] = r->shape[d] - begin[d] < r->o.max_block ? r->shape[d] - begin[d] : r->o.max_block;
    b->count *= b->size[d];
  }
  for (int32_t d = 0; d < r->order; d++) {
    int64_t n = b->size[d];
    b->factor[d] = calloc((size_t)(n * n), sizeof(double));
    b->root[d] = calloc((size_t)(n * n), sizeof(double));
    for (int64_t i = 0; i < n; i++) {
      b->root[d][i * n + i] = 1;
    }
  }
  b->average = calloc((size_t)b->count, sizeof(double));
  b->squares = calloc((size_t)b->count, sizeof(double));
  b->momentum = calloc((size_t)b->count, sizeof(double));
}

static void reference_cut(reference *r, int64_t *begin, int32_t d) {
  if (d == r->order) {
    reference_add_block(r, begin);
    return;
  }
  for (begin[d] = 0; begin[d] < r->shape[d]; begin[d] += r->o.max_block) {
    reference_cut(r, begin, d + 1);
  }
}

static void reference_open(reference *r, const dc_shampoo_options *options, const int64_t *shape, int32_t ndim,
                           const float *weights) {
  int64_t begin[REFERENCE_ORDER];
  memset(r, 0, sizeof *r);
  r->o = *options;
  reference_options(&r->o);
  reference_merge(r, shape, ndim);
  r->numel = 1;
  for (int32_t d = 0; d < r->order; d++) {
    r->numel *= r->shape[d];
  }
  for (int64_t i = 0; i < r->numel; i++) {
    r->weights[i] = (double)weights[i];
  }
  reference_cut(r, begin, 0);
}

static void reference_close(reference *r) {
  for (int64_t i = 0; i < r->block_count; i++) {
    for (int32_t d = 0; d < r->order; d++) {
      free(r->blocks[i].factor[d]);
      free(r->blocks[i].root[d]);
    }
    free(r->blocks[i].average);
    free(r->blocks[i].squares);
    free(r->blocks[i].momentum);
  }
}

/* ---- indices ---- */

/* The position of a block's element i along each of its dimensions. */
static void reference_position(const reference *r, const reference_block *b, int64_t i, int64_t *at) {
  for (int32_t d = r->order - 1; d >= 0; d--) {
    at[d] = i % b->size[d];
    i /= b->size[d];
  }
}

static int64_t reference_index(const reference *r, const int64_t *size, const int64_t *at) {
  int64_t i = 0;
  for (int32_t d = 0; d < r->order; d++) {
    i = i * size[d] + at[d];
  }
  return i;
}

/* ---- the mathematics ---- */

/* a becomes diagonal, and the columns of v its eigenvectors. */
static void reference_jacobi(int64_t n, double *a, double *v) {
  for (int64_t i = 0; i < n * n; i++) {
    v[i] = i % (n + 1) == 0;
  }
  for (int sweep = 0; sweep < 60; sweep++) {
    for (int64_t p = 0; p < n; p++) {
      for (int64_t q = p + 1; q < n; q++) {
        if (a[p * n + q] == 0) {
          continue;
        }
        double theta = (a[q * n + q] - a[p * n + p]) / (2 * a[p * n + q]);
        double t = (theta >= 0 ? 1 : -1) / (fabs(theta) + sqrt(theta * theta + 1));
        double c = 1 / sqrt(t * t + 1), s = t * c;
        for (int64_t k = 0; k < n; k++) {
          double x = a[k * n + p], y = a[k * n + q];
          a[k * n + p] = c * x - s * y;
          a[k * n + q] = s * x + c * y;
        }
        for (int64_t k = 0; k < n; k++) {
          double x = a[p * n + k], y = a[q * n + k];
          a[p * n + k] = c * x - s * y;
          a[q * n + k] = s * x + c * y;
          x = v[k * n + p], y = v[k * n + q];
          v[k * n + p] = c * x - s * y;
          v[k * n + q] = s * x + c * y;
        }
      }
    }
  }
}

static void reference_root(const reference *r, int64_t n, const double *factor, double *root) {
  double *a = calloc((size_t)(n * n), sizeof *a), *v = calloc((size_t)(n * n), sizeof *v);
  double share = r->o.beta2 < 1 ? 1 - pow(r->o.beta2, (double)r->step) : 1;
  double power = -1.0 / (r->o.root > 0 ? r->o.root : 2 * r->order);
  double largest = 0;
  for (int64_t i = 0; i < n * n; i++) {
    a[i] = factor[i] / share;
  }
  reference_jacobi(n, a, v);
  for (int64_t i = 0; i < n; i++) {
    largest = fmax(largest, a[i * n + i]);
  }
  double eps = fmax(r->o.eps_abs, r->o.eps_rel * largest);
  memset(root, 0, (size_t)(n * n) * sizeof *root);
  for (int64_t k = 0; k < n; k++) {
    double f = pow(fmax(a[k * n + k], 0) + eps, power);
    for (int64_t i = 0; i < n; i++) {
      for (int64_t j = 0; j < n; j++) {
        root[i * n + j] += f * v[i * n + k] * v[j * n + k];
      }
    }
  }
  free(a);
  free(v);
}

/* out[…, i, …] = sum over j of root[i, j] x[…, j, …] */
static void reference_multiply(const reference *r, const reference_block *b, int32_t d, const double *x, double *out) {
  for (int64_t i = 0; i < b->count; i++) {
    int64_t at[REFERENCE_ORDER];
    reference_position(r, b, i, at);
    int64_t row = at[d];
    out[i] = 0;
    for (at[d] = 0; at[d] < b->size[d]; at[d]++) {
      out[i] += b->root[d][row * b->size[d] + at[d]] * x[reference_index(r, b->size, at)];
    }
  }
}

static void reference_learn(const reference *r, const reference_block *b, const double *g) {
  double add = r->o.beta2 < 1 ? 1 - r->o.beta2 : 1;
  for (int32_t d = 0; d < r->order; d++) {
    int64_t n = b->size[d];
    for (int64_t i = 0; i < n * n; i++) {
      b->factor[d][i] *= r->o.beta2;
    }
    for (int64_t i = 0; i < b->count; i++) {
      int64_t at[REFERENCE_ORDER];
      reference_position(r, b, i, at);
      int64_t row = at[d];
      for (at[d] = 0; at[d] < n; at[d]++) {
        b->factor[d][row * n + at[d]] += add * g[i] * g[reference_index(r, b->size, at)];
      }
    }
  }
}

/* The graft for the filtered gradient; out need not be written. */
static double reference_graft(const reference *r, const reference_block *b, const double *filtered, double *out) {
  double sum = 0;
  double whole = r->o.graft == DC_GRAFT_ADAM ? 1 - pow(r->o.graft_beta2, (double)r->step) : 1;
  bool plain = r->o.graft == DC_GRAFT_NONE || r->o.graft == DC_GRAFT_SGD;
  for (int64_t i = 0; i < b->count; i++) {
    out[i] = plain ? filtered[i] : filtered[i] / (sqrt(b->squares[i] / whole) + r->o.graft_eps);
    sum += out[i] * out[i];
  }
  return sqrt(sum);
}

static void reference_direct(const reference *r, const reference_block *b, const double *filtered, double *u) {
  double *next = calloc((size_t)b->count, sizeof *next);
  double norm = reference_graft(r, b, filtered, u);
  if (r->step >= r->o.start_preconditioning_step) {
    memcpy(u, filtered, (size_t)b->count * sizeof *u);
    for (int32_t d = 0; d < r->order; d++) {
      reference_multiply(r, b, d, u, next);
      memcpy(u, next, (size_t)b->count * sizeof *u);
    }
    double own = 0;
    for (int64_t i = 0; i < b->count; i++) {
      own += u[i] * u[i];
    }
    for (int64_t i = 0; i < b->count && r->o.graft != DC_GRAFT_NONE; i++) {
      u[i] *= own > 0 ? norm / sqrt(own) : 0;
    }
  }
  free(next);
}

static void reference_block_step(reference *r, reference_block *b, const double *g, double lr) {
  double *filtered = calloc((size_t)b->count, sizeof *filtered), *u = calloc((size_t)b->count, sizeof *u);
  const dc_shampoo_options *o = &r->o;
  bool due = r->step == o->start_preconditioning_step ||
             (r->step > o->start_preconditioning_step && r->step % o->precondition_frequency == 0);
  reference_learn(r, b, g);
  for (int64_t i = 0; i < b->count; i++) {
    b->average[i] = o->beta1 * b->average[i] + (1 - o->beta1) * g[i];
    filtered[i] = b->average[i] / (1 - pow(o->beta1, (double)r->step));
    bool sum = o->graft == DC_GRAFT_ADAGRAD;
    b->squares[i] = (sum ? 1 : o->graft_beta2) * b->squares[i] + (sum ? 1 : 1 - o->graft_beta2) * g[i] * g[i];
  }
  for (int32_t d = 0; d < r->order && due; d++) {
    reference_root(r, b->size[d], b->factor[d], b->root[d]);
  }
  reference_direct(r, b, filtered, u);
  for (int64_t i = 0; i < b->count; i++) {
    int64_t at[REFERENCE_ORDER];
    reference_position(r, b, i, at);
    for (int32_t d = 0; d < r->order; d++) {
      at[d] += b->begin[d];
    }
    double *w = &r->weights[reference_index(r, r->shape, at)];
    b->momentum[i] = o->momentum * b->momentum[i] + u[i];
    double direction = o->nesterov == 1 ? u[i] + o->momentum * b->momentum[i] : b->momentum[i];
    *w = (o->decay == DC_DECAY_DECOUPLED ? 1 - lr * o->weight_decay : 1) * *w - lr * direction;
  }
  free(filtered);
  free(u);
}

static void reference_step(reference *r, const float *grad, double grad_scale, double lr) {
  double whole[512], block[512];
  r->step++;
  for (int64_t i = 0; i < r->numel; i++) {
    whole[i] = grad_scale * (double)grad[i] + (r->o.decay == DC_DECAY_L2 ? r->o.weight_decay * r->weights[i] : 0);
  }
  for (int64_t k = 0; k < r->block_count; k++) {
    reference_block *b = &r->blocks[k];
    for (int64_t i = 0; i < b->count; i++) {
      int64_t at[REFERENCE_ORDER];
      reference_position(r, b, i, at);
      for (int32_t d = 0; d < r->order; d++) {
        at[d] += b->begin[d];
      }
      block[i] = whole[reference_index(r, r->shape, at)];
    }
    reference_block_step(r, b, block, lr);
  }
}

#endif
