/* Pieces of state: memory, names, views. */
#include "optim/optim_internal.h"

#include <stdio.h>

dc__optim_piece *dc__optim_find_piece(const dc__optim_param *p, const char *name) {
  for (dc__optim_piece *piece = p->pieces; piece != NULL; piece = piece->next) {
    if (strcmp(piece->name, name) == 0) {
      return piece;
    }
  }
  return NULL;
}

static dc__optim_piece *make_piece(const char *name, int32_t dtype, const int64_t *shape, int32_t ndim) {
  dc__optim_piece *piece = dc__calloc(1, sizeof *piece);
  if (piece != NULL) {
    (void)snprintf(piece->name, sizeof piece->name, "%s", name);
    piece->dtype = dtype;
    piece->ndim = ndim;
    piece->numel = 1;
    for (int32_t i = 0; i < ndim; i++) {
      piece->shape[i] = shape[i];
      piece->numel *= shape[i];
    }
  }
  return piece;
}

/* Allocates a piece's zeroed memory. On the host all pieces share one arena. */
static bool alloc_piece(dc_optimizer *o, dc__optim_piece *piece) {
  const bool record =
      piece->dtype == DC_INT64 && dc__optim_counts_on_device(o); /* with a step's factors behind the count */
  const size_t bytes = record ? sizeof(dc__update_step_state) : (size_t)piece->numel * dc_dtype_size(piece->dtype);
  dc_device *device = o->linalg->device;
  piece->on_host = piece->dtype == DC_INT64 && dc__optim_is_cuda(o) && !record;
  if (piece->on_host) {
    piece->data = dc__calloc(1, bytes);
    return piece->data != NULL;
  }
  if (dc__arena_alloc(o->arena, NULL, bytes, &piece->data) != DC_OK) {
    return false;
  }
  dc__stream_zero(device->internal_stream, piece->data, bytes);
  dc__device_sync_internal(device, NULL);
  return true;
}

static void state_append_piece(dc__optim_param *p, dc__optim_piece *piece) {
  dc__optim_piece **end = &p->pieces;
  while (*end != NULL) {
    end = &(*end)->next;
  }
  *end = piece;
}

void *dc__optim_add_piece(dc_optimizer *o, dc__optim_param *p, const char *name, int32_t dtype, const int64_t *shape,
                          int32_t ndim) {
  dc__optim_piece *piece = dc__optim_find_piece(p, name);
  if (piece != NULL) {
    return piece->data;
  }
  piece = make_piece(name, dtype, shape, ndim);
  if (piece == NULL) {
    return NULL;
  }
  if (!alloc_piece(o, piece)) {
    dc__free(piece);
    return NULL;
  }
  state_append_piece(p, piece);
  return piece->data;
}

void *dc__optim_add_borrowed_piece(dc__optim_param *p, const char *name, int32_t dtype, const int64_t *shape,
                                   int32_t ndim, void *memory) {
  dc__optim_piece *piece = make_piece(name, dtype, shape, ndim);
  if (piece == NULL) {
    return NULL;
  }
  piece->borrowed = true;
  piece->data = memory;
  state_append_piece(p, piece);
  return memory;
}

void dc__optim_free_pieces(dc_optimizer *o, dc__optim_param *p) {
  for (dc__optim_piece *piece = p->pieces, *next; piece != NULL; piece = next) {
    next = piece->next;
    if (piece->on_host) {
      dc__free(piece->data);
    } else if (!piece->borrowed) {
      dc__arena_free(o->arena, piece->data, NULL, NULL);
    }
    dc__free(piece);
  }
}

static dc_status find_param(dc_optimizer *o, const char *fn, int64_t index, dc__optim_param **p) {
  if (o->count == 0) {
    return dc__fail(DC_E_NOT_FOUND, "%s: index = %" PRId64 ", but no parameter was added", fn, index);
  }
  if (index < 0 || index >= o->count) {
    return dc__fail(DC_E_NOT_FOUND, "%s: index = %" PRId64 ", must be 0 to %" PRId64, fn, index, o->count - 1);
  }
  *p = &o->params[index];
  return dc__optim_prepare(o, fn);
}

dc_status dc__optim_state_name(dc_optimizer *o, const char *fn, int64_t index, int64_t piece, const char **name) {
  dc__optim_param *p = NULL;
  DC__TRY(find_param(o, fn, index, &p));
  if (piece < 0) {
    return dc__fail(DC_E_INVALID, "%s: piece = %" PRId64 ", must be >= 0", fn, piece);
  }
  const dc__optim_piece *at = p->pieces;
  for (int64_t i = 0; i < piece && at != NULL; i++) {
    at = at->next;
  }
  *name = at == NULL ? NULL : at->name;
  return DC_OK;
}

dc_status dc__optim_state(dc_optimizer *o, const char *fn, int64_t index, const char *name, dc_tensor *view) {
  dc__optim_param *p = NULL;
  DC__TRY(dc__optim_synchronize(o, fn));
  DC__TRY(find_param(o, fn, index, &p));
  const dc__optim_piece *piece = dc__optim_find_piece(p, name);
  if (piece == NULL) {
    return dc__fail(DC_E_NOT_FOUND, "%s: parameter %" PRId64 " of this %s has no state of the name %.24s", fn, index,
                    o->kind->name, name);
  }
  return dc__tensor_write(fn, "view", view, piece->data, piece->shape, piece->ndim, piece->dtype, NULL);
}
