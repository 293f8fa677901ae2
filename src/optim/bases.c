/* Eigenvectors of a device's matrices, computed here: a step of orthogonal iteration wants a QR, which is the host's
 * LAPACK's. All matrices that are due come together, so that the threads share them as they share those of the host. */
#include "optim/blocked.h"

static size_t bytes_of(const dc__spectral *r) {
  return (size_t)(r->a.rows * r->a.rows) * sizeof(float);
}

void dc__bases_close(dc__bases *b) {
  if (b->host != NULL) {
    dc__linalg_destroy(b->host);
  }
  dc__free(b->requests);
  dc__free(b->memory);
  *b = (dc__bases){.host = NULL};
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

/* Scratch memory for any of them. */
static dc_status reserve(dc__bases *b, const char *fn, const dc__spectral *requests, int64_t count) {
  void *memory;
  b->host->query = true;
  dc_status status = dc__spectral_each(b->host, requests, count);
  b->host->query = false;
  return status == DC_OK ? dc__linalg_scratch(b->host, fn, b->host->most, &memory) : status;
}

dc_status dc__bases_open(dc__bases *b, const dc_linalg *l, const char *fn, const dc__spectral *requests,
                         int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    b->bytes += 2 * bytes_of(&requests[i]);
  }
  b->memory = dc__calloc(1, b->bytes + 1);
  b->requests = dc__calloc((size_t)count + 1, sizeof *b->requests);
  dc_status status = b->memory == NULL || b->requests == NULL ? DC_E_NO_MEMORY : make_host(l, &b->host);
  status = status == DC_OK ? reserve(b, fn, requests, count) : status;
  if (status != DC_OK) {
    dc__bases_close(b);
  }
  return status;
}

dc_status dc__bases_run(dc__bases *b, dc_linalg *l, const dc__spectral *requests, int64_t count) {
  dc_stream *stream = l->device->here;
  char *at = b->memory;
  for (int64_t i = 0; i < count; i++) {
    const size_t bytes = bytes_of(&requests[i]);
    dc__spectral *r = &b->requests[i];
    *r = requests[i];
    r->a.data = at;
    r->out.data = at + bytes;
    dc__stream_copy(stream, r->a.data, requests[i].a.data, bytes);
    if (r->basis.data != NULL) {
      r->basis.data = r->out.data;
      dc__stream_copy(stream, r->out.data, requests[i].out.data, bytes);
    }
    at += 2 * bytes;
  }
  DC__TRY(dc__linalg_done(l));
  DC__TRY(dc__spectral_each(b->host, b->requests, count));
  for (int64_t i = 0; i < count; i++) {
    const dc_spectral_info *info = requests[i].info;
    if (info->status == DC_OK) {
      dc__stream_copy(stream, requests[i].out.data, b->requests[i].out.data, bytes_of(&requests[i]));
    }
  }
  return DC_OK;
}
