/* Before a step: reads the caller's loss scale and found_inf in the step's order, so that the caller need not wait
 * for them; and makes the ranks agree. */
#include "optim/optim_internal.h"

/* ---- loss scale and found_inf ---- */

void dc__optim_set_loss_scale(dc_optimizer *o, const float *loss_scale, const float *found_inf) {
  o->loss_scale = loss_scale;
  o->found_inf = found_inf;
}

static bool has_grad_scaler(const dc_optimizer *o) {
  return o->loss_scale != NULL || o->found_inf != NULL;
}

dc_status dc__optim_read_grad_scaler(dc_optimizer *o) {
  dc_device *device = o->linalg->device;
  dc_stream *on = dc__optim_is_cuda(o) ? device->internal_stream : NULL;
  float loss_scale = 1;
  float found_inf = 0;
  if (!has_grad_scaler(o)) {
    return DC_OK;
  }
  if (o->loss_scale != NULL) {
    dc__stream_copy(on, &loss_scale, o->loss_scale, sizeof loss_scale);
  }
  if (o->found_inf != NULL) {
    dc__stream_copy(on, &found_inf, o->found_inf, sizeof found_inf);
  }
  if (on != NULL) {
    dc__device_sync_internal(device, NULL);
    DC__TRY(dc__device_check(device));
  }
  o->grad_scale = dc__update_scale(o->grad_scale, loss_scale);
  o->found_nonfinite = found_inf != 0;
  return DC_OK;
}

const float *dc__optim_read_grad_scaler_cuda(const dc_optimizer *o, dc_stream *on) {
  const dc__update_read_scaler scaler = {
      .status = o->device_state, .loss_scale = o->loss_scale, .found_inf = o->found_inf, .grad_scale = o->grad_scale};
  if (!has_grad_scaler(o)) {
    return NULL;
  }
  dc__update_read_scaler_cuda(on, &scaler);
  return &o->device_state->scale;
}

/* ---- ranks ---- */

/* A hash of a rank's parameters and which of them have gradients. */
static int64_t consensus_fingerprint(const dc_optimizer *o) {
  uint64_t hash = dc__checksum(DC__CHECKSUM, o->kind->name, strlen(o->kind->name));
  for (int64_t i = 0; i < o->count; i++) {
    const dc__optim_param *p = &o->params[i];
    const int64_t head[4] = {p->group, p->dtype, p->ndim, o->io[i].grad_dtype != DC_DTYPE_NONE};
    hash = dc__checksum(hash, head, sizeof head);
    hash = dc__checksum(hash, p->shape, (size_t)p->ndim * sizeof *p->shape);
  }
  return (int64_t)hash;
}

/* A rank's message before a step. */
enum { MESSAGE_STATUS, MESSAGE_BAD_PARAM, MESSAGE_NONFINITE, MESSAGE_FINGERPRINT, MESSAGE_WORDS };

/* Compares the ranks. Returns one status on all of them, except on a rank that failed itself. */
static dc_status consensus_compare_ranks(dc_optimizer *o, const char *fn, const int64_t *table) {
  const int64_t *own = table + o->comm->rank * MESSAGE_WORDS;
  for (int32_t r = 0; r < o->comm->world; r++) {
    const int64_t *message = table + r * MESSAGE_WORDS;
    if (message[MESSAGE_STATUS] == DC_E_NOT_FINITE) {
      return dc__fail(DC_E_NOT_FINITE, "%s: rank %" PRId32 ": the gradient of parameter %" PRId64 " is not finite%s",
                      fn, r, message[MESSAGE_BAD_PARAM], dc__optim_limit(o));
    }
    if (message[MESSAGE_STATUS] != DC_OK) {
      return dc__fail(DC_E_MISMATCH, "%s: rank %" PRId32 " does not take the step, for its own reason: %s", fn, r,
                      dc_status_name((dc_status)message[MESSAGE_STATUS]));
    }
  }
  for (int32_t r = 0; r < o->comm->world; r++) {
    if (table[r * MESSAGE_WORDS + MESSAGE_FINGERPRINT] != own[MESSAGE_FINGERPRINT]) {
      return dc__fail(DC_E_MISMATCH,
                      "%s: rank %" PRId32 " has other parameters, or gradients of other parameters, than rank %" PRId32,
                      fn, r, o->comm->rank);
    }
    o->found_nonfinite = o->found_nonfinite || table[r * MESSAGE_WORDS + MESSAGE_NONFINITE] != 0;
  }
  return DC_OK;
}

dc_status dc__optim_step_consensus(dc_optimizer *o, const char *fn, dc_status status, int64_t bad) {
  if (o->comm == NULL) {
    return status;
  }
  const dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_COMM_ALL_GATHER};
  const int64_t own[MESSAGE_WORDS] = {status, bad, o->found_nonfinite, consensus_fingerprint(o)};
  int64_t table[DC__COMM_MAX_WORLD * MESSAGE_WORDS];
  dc_status sent = dc__comm_all_gather_int64(o->comm, &tag, own, MESSAGE_WORDS, table);
  if (status != DC_OK) {
    return status;
  }
  return sent != DC_OK ? sent : consensus_compare_ranks(o, fn, table);
}
