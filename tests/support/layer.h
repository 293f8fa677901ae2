/* A transformer layer with its tensors, for the tests in C. tests/python tests accuracy. */
#ifndef DC_TESTS_LAYER_H
#define DC_TESTS_LAYER_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dc_api.h"

#define OK(call) assert_int_equal((call), DC_OK)

/* The call must fail with this status and a text that has this fragment. */
#define REFUSED(status, text, call)                            \
  do {                                                         \
    assert_int_equal((call), (status));                        \
    if (strstr(dc_last_error(), (text)) == NULL) {             \
      fail_msg("\"%s\" has no \"%s\"", dc_last_error(), text); \
    }                                                          \
  } while (0)

enum { GUARD = 64, CANARY = 0x5a, MOST_DIMS = 3 };

/* A tensor that owns its memory, which is between guard bytes. */
typedef struct owned {
  dc_tensor t;
  int64_t shape[MOST_DIMS];
  size_t bytes;
  unsigned char *base;
} owned;

typedef struct rig {
  dc_device *device;
  dc_layer *layer;
  dc_layer_config config;
  dc_layer_call call;
  dc_layer_cost cost;
  owned x, out, dout, dx;
  owned w[DC_LAYER_WEIGHTS], g[DC_LAYER_WEIGHTS];
  dc_tensor weights[DC_LAYER_WEIGHTS];
  dc_tensor gradients[DC_LAYER_WEIGHTS];
  owned workspace, reserve;
} rig;

static owned make_owned(int32_t dtype, int32_t ndim, const int64_t *shape) {
  owned o = {.t = DC_TENSOR_INIT};
  size_t numel = 1;
  for (int32_t i = 0; i < ndim; i++) {
    o.shape[i] = shape[i];
    numel *= (size_t)shape[i];
  }
  o.bytes = numel * dc_dtype_size(dtype);
  o.base = aligned_alloc(GUARD, (o.bytes + GUARD - 1) / GUARD * GUARD + 2 * GUARD);
  assert_non_null(o.base);
  memset(o.base, CANARY, (o.bytes + GUARD - 1) / GUARD * GUARD + 2 * GUARD);
  o.t.data = o.base + GUARD;
  o.t.ndim = ndim;
  o.t.dtype = dtype;
  return o;
}

/* To be called once the struct is at its final address, where the shape is stored. */
static void set_shape(owned *o) {
  o->t.shape = o->shape;
}

static void check_guards(const owned *o) {
  for (size_t i = 0; i < GUARD; i++) {
    assert_int_equal(o->base[i], CANARY);
    assert_int_equal(o->base[GUARD + o->bytes + i], CANARY);
  }
}

static void drop(owned *o) {
  check_guards(o);
  free(o->base);
}

/* Fills with numbers from -1 to 1, from a seed. */
static void randomize(owned *o, uint64_t seed) {
  for (size_t i = 0; i < o->bytes / dc_dtype_size(o->t.dtype); i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    uint32_t draw = (uint32_t)(seed >> 32);
    if (o->t.dtype == DC_FLOAT32) {
      ((float *)o->t.data)[i] = (float)(int32_t)draw * 0x1p-31f;
    } else { /* any pattern from 2^-7 to below 1, with a sign */
      uint32_t low = o->t.dtype == DC_FLOAT16 ? 0x2000 : 0x3c00, high = o->t.dtype == DC_FLOAT16 ? 0x3c00 : 0x3f80;
      ((uint16_t *)o->t.data)[i] = (uint16_t)((draw & 0x8000) | (low + (draw >> 16) % (high - low)));
    }
  }
}

/* The weights, as arguments of a call. */
#define TWELVE(tensors) tensors, sizeof(dc_tensor), DC_LAYER_WEIGHTS

/* batch samples of seq tokens. */
static rig make_rig(dc_layer_config config, int64_t batch, int64_t seq) {
  int32_t dtype = config.dtype == DC_DTYPE_NONE ? DC_FLOAT32 : config.dtype;
  rig r = {.config = config, .call = DC_LAYER_CALL_INIT, .cost = DC_LAYER_COST_INIT};
  OK(dc_device_open("cpu", NULL, &r.device));
  OK(dc_layer_create(r.device, &config, &r.layer));
  r.call.batch = batch;
  r.call.seq_length = seq;
  OK(dc_layer_get_cost(r.layer, &r.call, &r.cost));
  const int64_t shape[] = {batch, seq, config.hidden_size};
  owned *tensors[] = {&r.x, &r.out, &r.dout, &r.dx};
  for (size_t i = 0; i < 4; i++) {
    *tensors[i] = make_owned(dtype, 3, shape);
  }
  for (int32_t i = 0; i < DC_LAYER_WEIGHTS; i++) {
    int64_t lengths[2];
    int32_t ndim;
    OK(dc_layer_get_weight_shape(r.layer, i, lengths, &ndim));
    r.w[i] = make_owned(dtype, ndim, lengths);
    r.g[i] = make_owned(dtype, ndim, lengths);
  }
  int64_t most = r.cost.forward_workspace_bytes;
  most = r.cost.backward_workspace_bytes > most ? r.cost.backward_workspace_bytes : most;
  most = r.cost.inference_workspace_bytes > most ? r.cost.inference_workspace_bytes : most;
  r.workspace = make_owned(DC_UINT8, 1, &most);
  r.reserve = make_owned(DC_UINT8, 1, &r.cost.reserve_bytes);
  return r;
}

/* Sets the rig's pointers to its own members, once it is at its final address. */
static void bind_rig(rig *r) {
  owned *tensors[] = {&r->x, &r->out, &r->dout, &r->dx, &r->workspace, &r->reserve};
  for (size_t i = 0; i < 6; i++) {
    set_shape(tensors[i]);
  }
  for (int32_t i = 0; i < DC_LAYER_WEIGHTS; i++) {
    set_shape(&r->w[i]);
    set_shape(&r->g[i]);
    r->weights[i] = r->w[i].t;
    r->gradients[i] = r->g[i].t;
  }
  r->call.workspace = r->workspace.t.data;
  r->call.workspace_bytes = (int64_t)r->workspace.bytes;
  r->call.reserve = r->reserve.t.data;
  r->call.reserve_bytes = (int64_t)r->reserve.bytes;
  OK(dc_layer_init_weights(r->layer, TWELVE(r->weights)));
  randomize(&r->x, 1);
  randomize(&r->dout, 2);
}

static void forward(rig *r) {
  OK(dc_layer_forward(r->layer, &r->call, TWELVE(r->weights), &r->x.t, &r->out.t));
}

static void backward(rig *r) {
  OK(dc_layer_backward(r->layer, &r->call, TWELVE(r->weights), &r->x.t, &r->out.t, &r->dout.t, &r->dx.t, r->gradients));
}

static void free_rig(rig *r) {
  owned *tensors[] = {&r->x, &r->out, &r->dout, &r->dx, &r->workspace, &r->reserve};
  for (size_t i = 0; i < 6; i++) {
    drop(tensors[i]);
  }
  for (int32_t i = 0; i < DC_LAYER_WEIGHTS; i++) {
    drop(&r->w[i]);
    drop(&r->g[i]);
  }
  dc_layer_destroy(r->layer);
  dc_device_destroy(r->device);
}

static dc_layer_config small_config(void) {
  dc_layer_config c = DC_LAYER_CONFIG_INIT;
  c.hidden_size = 48;
  c.heads = 3;
  c.intermediate_size = 80;
  c.attn_dropout_ratio = 0.1;
  c.hidden_dropout_ratio = 0.2;
  c.seed = 5;
  c.threads = 2;
  return c;
}

#endif
