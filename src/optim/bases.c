/* SOAP's eigenvectors on a device with memory of its own. A step of orthogonal iteration is the device's, which says in
 * its own memory whether it was a good one, and in which order the vectors are now: the host looks when it waits
 * anyway. First bases are the host's LAPACK's, and so is every one where the device has no QR; all matrices of a step
 * go there together, so that the threads share them as they share those of the host. */
#include "optim/blocked.h"

static size_t bytes_of(const dc__spectral *r) {
  return (size_t)(r->a.rows * r->a.rows) * sizeof(float);
}
static size_t order_bytes_of(const dc__spectral *r) {
  return (size_t)r->a.rows * sizeof(int64_t);
}

/* ---- memory ---- */

/* Of a step's matrices, in tables of the device: where each lies, its vectors and their order. */
enum { TABLE_A, TABLE_BASIS, TABLE_ORDER, TABLES };

void dc__bases_close(dc__bases *b) {
  if (b->host != NULL) {
    dc__linalg_destroy(b->host);
  }
  if (b->there != NULL) {
    b->device->ops->free(b->device, b->there, b->there_bytes, DC_MEMORY_DEVICE);
  }
  dc__free(b->requests);
  dc__free(b->queued);
  dc__free(b->tables);
  dc__free(b->said);
  dc__free(b->memory);
  *b = (dc__bases){.host = NULL};
}

static dc_status make_there(dc__bases *b, const dc_linalg *l, int64_t sides, int64_t rows) {
  const size_t orders = (size_t)rows * sizeof(int64_t), tables = TABLES * (size_t)sides * sizeof(void *);
  const size_t bytes = orders + tables + (size_t)sides * sizeof(int32_t) + 1;
  b->device = l->device;
  DC__TRY(l->device->ops->alloc(l->device, bytes, DC_MEMORY_DEVICE, &b->there));
  b->there_bytes = bytes;
  b->orders = b->there;
  b->places = (void **)(void *)((char *)b->there + orders);
  b->failed = (int32_t *)(void *)((char *)b->there + orders + tables);
  dc__stream_zero(l->device->here, b->there, bytes); /* orders lead nowhere else, whatever fails */
  dc__here_done(l->device, NULL);
  return dc__device_check(l->device);
}

dc_status dc__bases_make(dc__bases *b, const dc_linalg *l, int64_t sides, int64_t rows) {
  const size_t count = (size_t)sides + 1;
  b->sides = sides;
  b->requests = dc__calloc(count, sizeof *b->requests);
  b->queued = dc__calloc(count, sizeof *b->queued);
  b->tables = dc__calloc(TABLES * count, sizeof *b->tables);
  b->said = dc__calloc(count, sizeof *b->said);
  return b->requests == NULL || b->queued == NULL || b->tables == NULL || b->said == NULL
             ? DC_E_NO_MEMORY
             : make_there(b, l, sides, rows);
}

static dc_status make_host(const dc_linalg *l, dc_linalg **host) {
  dc_device *cpu;
  dc_linalg_options options = DC_LINALG_OPTIONS_INIT;
  options.threads = dc__pool_threads(l->pool);
  options.plain = l->blas == NULL ? 1 : 0;
  DC__TRY(dc__cpu_device_open(NULL, &cpu));
  dc_status status = dc__linalg_create(cpu, &options, host);
  dc__device_release(cpu);
  return status;
}

/* Scratch memory of the host's for any of them. */
static dc_status reserve_here(dc__bases *b, const char *fn, const dc__spectral *requests, int64_t count) {
  void *memory;
  b->host->query = true;
  dc_status status = dc__spectral_each(b->host, requests, count);
  b->host->query = false;
  return status == DC_OK ? dc__linalg_scratch(b->host, fn, b->host->most, &memory) : status;
}

/* ---- on the device ---- */

/* `count` neighbours of one size. */
static dc_status queue_some(const dc__bases *b, dc_linalg *l, const dc__spectral *requests, int64_t first,
                            int64_t count) {
  void **places = b->places + first;
  dc__basis_steps steps = {.fn = requests[0].fn, .a = requests[0].a, .basis = requests[0].out};
  steps.a.batch = steps.basis.batch = count;
  steps.a.places = places + TABLE_A * b->sides;
  steps.basis.places = places + TABLE_BASIS * b->sides;
  steps.orders = (int64_t *const *)(void *)(places + TABLE_ORDER * b->sides);
  steps.failed = b->failed + first;
  return dc__basis_there(l, &steps);
}

static dc_status queue_all(const dc__bases *b, dc_linalg *l, const dc__spectral *requests, int64_t count) {
  for (int64_t first = 0, end; first < count; first = end) {
    for (end = first + 1; end < count && requests[end].a.rows == requests[first].a.rows; end++) {
    }
    DC__TRY(queue_some(b, l, requests + first, first, end - first));
  }
  return DC_OK;
}

static dc_status queue(dc__bases *b, dc_linalg *l) {
  for (int64_t i = 0; i < b->waiting; i++) {
    b->tables[TABLE_A * b->sides + i] = b->queued[i].a.data;
    b->tables[TABLE_BASIS * b->sides + i] = b->queued[i].out.data;
    b->tables[TABLE_ORDER * b->sides + i] = b->queued[i].order;
  }
  dc__stream_copy(l->device->here, b->places, b->tables, TABLES * (size_t)b->sides * sizeof *b->tables);
  return queue_all(b, l, b->queued, b->waiting);
}

void dc__bases_look(const dc__bases *b) {
  if (b->waiting > 0) {
    dc__stream_copy(b->device->here, b->said, b->failed, (size_t)b->waiting * sizeof *b->said);
  }
}

void dc__bases_done(dc__bases *b) {
  for (int64_t i = 0; i < b->waiting; i++) {
    dc_spectral_info *info = b->queued[i].info;
    const bool good = b->said[i] == 0;
    *info = (dc_spectral_info){.status = good ? DC_OK : DC_E_NOT_CONVERGED, .path = good ? DC_PATH_WARM : DC_PATH_NONE};
  }
  b->waiting = 0;
}

/* ---- here ---- */

static bool is_queued(const dc__bases *b, const dc__spectral *r) {
  return b->queues && r->op == DC__SPECTRAL_BASIS;
}

/* Matrices and earlier bases come here. Returns how many of them there are. */
static int64_t bring(dc__bases *b, dc_stream *stream, const dc__spectral *requests, int64_t count) {
  char *at = b->memory;
  int64_t here = 0;
  for (int64_t i = 0; i < count; i++) {
    if (is_queued(b, &requests[i])) {
      continue;
    }
    const size_t bytes = bytes_of(&requests[i]);
    dc__spectral *r = &b->requests[here++];
    *r = requests[i];
    r->order = (int64_t *)(void *)at;
    r->a.data = at += order_bytes_of(r);
    r->out.data = at += bytes;
    at += bytes;
    dc__stream_copy(stream, r->a.data, requests[i].a.data, bytes);
    if (r->basis.data != NULL) {
      r->basis.data = r->out.data;
      dc__stream_copy(stream, r->out.data, requests[i].out.data, bytes);
    }
  }
  return here;
}

/* What is good goes back; where it is not, vectors stay and are in the order that they were in. */
static void give(const dc__bases *b, dc_stream *stream, const dc__spectral *requests, int64_t count) {
  int64_t here = 0;
  for (int64_t i = 0; i < count; i++) {
    if (is_queued(b, &requests[i])) {
      continue;
    }
    const dc__spectral *r = &b->requests[here++];
    const bool good = ((const dc_spectral_info *)r->info)->status == DC_OK;
    if (good) {
      dc__stream_copy(stream, requests[i].out.data, r->out.data, bytes_of(r));
    }
    for (int64_t k = 0; k < r->a.rows && !good; k++) {
      r->order[k] = k;
    }
    if (requests[i].order != NULL) {
      dc__stream_copy(stream, requests[i].order, r->order, order_bytes_of(r));
    }
  }
}

/* ---- all ---- */

dc_status dc__bases_open(dc__bases *b, dc_linalg *l, const char *fn, const dc__spectral *requests, int64_t count) {
  b->bytes = 0;
  for (int64_t i = 0; i < count; i++) {
    b->bytes += order_bytes_of(&requests[i]) + 2 * bytes_of(&requests[i]); /* a multiple of 8 */
  }
  b->memory = dc__calloc(1, b->bytes + 1);
  DC__TRY(b->memory == NULL ? DC_E_NO_MEMORY : make_host(l, &b->host));
  DC__TRY(reserve_here(b, fn, requests, count));
  const dc_status status = queue_all(b, l, requests, count);
  b->queues = status == DC_OK;
  return status == DC_E_UNSUPPORTED ? DC_OK : status;
}

dc_status dc__bases_run(dc__bases *b, dc_linalg *l, const dc__spectral *requests, int64_t count) {
  b->waiting = 0;
  for (int64_t i = 0; i < count; i++) {
    if (is_queued(b, &requests[i])) {
      b->queued[b->waiting++] = requests[i];
    }
  }
  if (b->waiting > 0) {
    DC__TRY(queue(b, l));
  }
  const int64_t here = bring(b, l->device->here, requests, count);
  if (here == 0) {
    return DC_OK;
  }
  DC__TRY(dc__linalg_done(l));
  DC__TRY(dc__spectral_each(b->host, b->requests, here));
  give(b, l->device->here, requests, count);
  return DC_OK;
}
