/* The state as bytes, and back. One walk over header, parameters and pieces defines the format; it measures, writes,
 * compares and restores. Numbers have eight bytes, little-endian as the platforms are. A checksum comes last. */
#include "optim/optim_internal.h"

enum { VERSION = 1, MAGIC_BYTES = 8, HEAD_BYTES = 24 }; /* magic, version, bytes in all */
static const char magic[MAGIC_BYTES] = "dcoptim";

enum checkpoint_mode { MEASURE, WRITE, COMPARE, RESTORE };

typedef struct checkpoint_walk {
  int32_t mode;
  const char *fn;
  dc_device *device;         /* of pieces in device memory */
  unsigned char *to;         /* WRITE */
  const unsigned char *from; /* COMPARE, RESTORE */
  size_t at, bytes;
} checkpoint_walk;

/* The next `bytes` of the saved state, for `data`. COMPARE returns false past the end. */
static bool walk_bytes(checkpoint_walk *w, void *data, size_t bytes) {
  if (w->mode == COMPARE && bytes > w->bytes - w->at) {
    return false;
  }
  if (w->mode == WRITE && bytes > 0) {
    memcpy(w->to + w->at, data, bytes);
  } else if (w->mode == RESTORE && bytes > 0) {
    memcpy(data, w->from + w->at, bytes);
  }
  w->at += bytes;
  return true;
}

/* The same for a piece's memory. */
static bool walk_piece_data(checkpoint_walk *w, const dc__optim_piece *piece, size_t bytes) {
  dc_stream *stream = piece->on_host ? NULL : w->device->internal_stream;
  if (w->mode == COMPARE && bytes > w->bytes - w->at) {
    return false;
  }
  if (w->mode == WRITE) {
    dc__stream_copy(stream, w->to + w->at, piece->data, bytes);
  } else if (w->mode == RESTORE) {
    dc__stream_copy(stream, piece->data, w->from + w->at, bytes);
  }
  dc__device_sync_internal(w->device, NULL);
  w->at += bytes;
  return true;
}

static dc_status fail_truncated(const checkpoint_walk *w) {
  return dc__fail(DC_E_CORRUPT, "%s: the state ends after %zu byte%s, before all of it was read", w->fn, w->bytes,
                  DC__PLURAL_S(w->bytes));
}

/* Bytes that must match the saved state. */
static dc_status walk_constant(checkpoint_walk *w, const void *data, size_t bytes, dc_status status, const char *what,
                               int64_t index) {
  if (w->mode == COMPARE && bytes <= w->bytes - w->at && memcmp(w->from + w->at, data, bytes) != 0) {
    return index < 0 ? dc__fail(status, "%s: the saved %s is not the optimizer's", w->fn, what)
                     : dc__fail(status, "%s: the saved %s of parameter %" PRId64 " is not the optimizer's", w->fn, what,
                                index);
  }
  unsigned char copy[64];
  memcpy(copy, data, bytes); /* RESTORE overwrites it with the same */
  return walk_bytes(w, copy, bytes) ? DC_OK : fail_truncated(w);
}

/* Checks that counters are far from overflow. */
static dc_status check_counts(const checkpoint_walk *w, const dc__optim_piece *piece, int64_t index) {
  for (int64_t i = 0; i < piece->numel; i++) {
    int64_t count;
    memcpy(&count, w->from + w->at + (size_t)i * sizeof count, sizeof count);
    if (count < 0 || count > INT64_C(1) << 53) {
      return dc__fail(DC_E_CORRUPT, "%s: the saved %s of parameter %" PRId64 " is %" PRId64 ", must be 0 to 2^53",
                      w->fn, piece->name, index, count);
    }
  }
  return DC_OK;
}

static dc_status walk_piece(checkpoint_walk *w, dc__optim_piece *piece, int64_t index) {
  static const unsigned char padding[8];
  const int64_t numbers[4] = {piece->dtype, piece->ndim, piece->shape[0], piece->shape[1]};
  size_t bytes = (size_t)piece->numel * dc_dtype_size(piece->dtype);
  DC__TRY(walk_constant(w, piece->name, sizeof piece->name, DC_E_SHAPE, "list of pieces", index));
  DC__TRY(walk_constant(w, numbers, sizeof numbers, DC_E_SHAPE, piece->name, index));
  if (w->mode == COMPARE && piece->dtype == DC_INT64 && bytes <= w->bytes - w->at) {
    DC__TRY(check_counts(w, piece, index));
  }
  if (!walk_piece_data(w, piece, bytes)) {
    return fail_truncated(w);
  }
  return walk_constant(w, padding, -bytes % sizeof padding, DC_E_CORRUPT, "padding", index);
}

static dc_status walk_param(checkpoint_walk *w, dc__optim_param *p, int64_t index) {
  int64_t pieces = 0;
  for (dc__optim_piece *piece = p->pieces; piece != NULL; piece = piece->next) {
    pieces++;
  }
  const int64_t part[3] = {p->offset, p->count, p->dtype};
  const int64_t ndim = p->ndim;
  DC__TRY(walk_constant(w, &ndim, sizeof ndim, DC_E_SHAPE, "number of dimensions", index));
  for (int32_t i = 0; i < p->ndim; i++) {
    DC__TRY(walk_constant(w, &p->shape[i], sizeof p->shape[i], DC_E_SHAPE, "shape", index));
  }
  DC__TRY(walk_constant(w, part, sizeof part, DC_E_SHAPE, "part or dtype", index));
  DC__TRY(walk_constant(w, &pieces, sizeof pieces, DC_E_SHAPE, "number of pieces", index));
  for (dc__optim_piece *piece = p->pieces; piece != NULL; piece = piece->next) {
    DC__TRY(walk_piece(w, piece, index));
  }
  return DC_OK;
}

/* Everything between the head and the checksum. */
static dc_status walk_body(checkpoint_walk *w, dc_optimizer *o) {
  char kind[16] = {0};
  memcpy(kind, o->kind->name, strlen(o->kind->name));
  w->at = HEAD_BYTES;
  DC__TRY(walk_constant(w, kind, sizeof kind, DC_E_STATE, "kind of optimizer", -1));
  DC__TRY(walk_constant(w, &o->count, sizeof o->count, DC_E_SHAPE, "number of parameters", -1));
  for (int64_t i = 0; i < o->count; i++) {
    DC__TRY(walk_param(w, &o->params[i], i));
  }
  return DC_OK;
}

dc_status dc__optim_save_size(dc_optimizer *o, const char *fn, size_t *bytes) {
  checkpoint_walk w = {.mode = MEASURE, .fn = fn, .device = o->linalg->device};
  DC__TRY(dc__optim_prepare(o, fn));
  DC__TRY(walk_body(&w, o));
  *bytes = w.at + sizeof(uint64_t);
  return DC_OK;
}

dc_status dc__optim_save(dc_optimizer *o, const char *fn, void *memory, size_t bytes) {
  size_t need;
  DC__TRY(dc__optim_synchronize(o, fn));
  DC__TRY(dc__optim_save_size(o, fn, &need));
  if (bytes < need) {
    return dc__fail(DC_E_BUFFER_TOO_SMALL, "%s: bytes = %zu, must be at least %zu", fn, bytes, need);
  }
  checkpoint_walk w = {.mode = WRITE, .fn = fn, .device = o->linalg->device, .to = memory, .bytes = need};
  const uint64_t head[2] = {VERSION, need};
  memcpy(w.to, magic, sizeof magic);
  memcpy(w.to + sizeof magic, head, sizeof head);
  DC__TRY(walk_body(&w, o));
  DC__TRY(dc__device_check(w.device));
  uint64_t sum = dc__checksum(DC__CHECKSUM, memory, w.at);
  memcpy(w.to + w.at, &sum, sizeof sum);
  return DC_OK;
}

/* Checks that these bytes are a complete dc__optim_save(). */
static dc_status checkpoint_check_block(const char *fn, const unsigned char *from, size_t bytes) {
  uint64_t head[2];
  uint64_t sum;
  if (bytes < HEAD_BYTES + sizeof sum || memcmp(from, magic, sizeof magic) != 0) {
    return dc__fail(DC_E_CORRUPT, "%s: memory holds no saved state of an optimizer", fn);
  }
  memcpy(head, from + sizeof magic, sizeof head);
  if (head[0] != VERSION) {
    return dc__fail(DC_E_UNSUPPORTED, "%s: the state is of version %" PRIu64 ", this library reads %d", fn, head[0],
                    (int)VERSION);
  }
  if (head[1] != bytes) {
    return dc__fail(DC_E_CORRUPT, "%s: bytes = %zu, but the state has %" PRIu64, fn, bytes, head[1]);
  }
  memcpy(&sum, from + bytes - sizeof sum, sizeof sum);
  if (dc__checksum(DC__CHECKSUM, from, bytes - sizeof sum) != sum) {
    return dc__fail(DC_E_CORRUPT, "%s: the state is damaged: its checksum is another", fn);
  }
  return DC_OK;
}

dc_status dc__optim_load(dc_optimizer *o, const char *fn, const void *memory, size_t bytes) {
  DC__TRY(dc__optim_synchronize(o, fn));
  DC__TRY(dc__optim_prepare(o, fn));
  DC__TRY(checkpoint_check_block(fn, memory, bytes));
  checkpoint_walk w = {.mode = COMPARE, .fn = fn, .device = o->linalg->device};
  w.from = memory;
  w.bytes = bytes - sizeof(uint64_t);
  DC__TRY(walk_body(&w, o));
  if (w.at != w.bytes) {
    return dc__fail(DC_E_CORRUPT, "%s: the state has %zu byte%s too many", fn, w.bytes - w.at,
                    DC__PLURAL_S(w.bytes - w.at));
  }
  w.mode = RESTORE;
  DC__TRY(walk_body(&w, o));
  if (o->kind->drop_collected != NULL) {
    o->kind->drop_collected(o);
  }
  return dc__device_check(w.device);
}
