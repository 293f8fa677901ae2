/* cuSOLVER without a card: libcusolver.so.12 as the CUDA device of libdc uses it, on libdc's own eigensolver and the
 * simulated driver's streams. It refuses what the library refuses, reads the triangle that it was told to read, and can
 * be made to fail as the driver's functions can; the name of a call for one matrix that does not converge is
 * "cusolver: convergence". */
#include <stdlib.h>
#include <string.h>

#include "device/cuda/cusolver.h"
#include "inside.h"
#include "linalg/spectral.h"

#define X(name, arguments) CUDASIM_API int name arguments;
DC__SOLVER_FUNCTIONS(X)
DC__SOLVER_BATCH_FUNCTIONS(X)
#undef X

enum { INVALID = 3, VERSION = 12004 };

struct cusolverDnContext {
  dc__cu_stream stream;
};
struct cusolverDnParams {
  int nothing;
};

/* ---- handles ---- */

int cusolverGetVersion(int *version) {
  *version = VERSION;
  const int other = enter(__func__, false); /* an error is the version that a test wants */
  *version = other != 0 ? other : VERSION;
  return 0;
}

int cusolverDnCreate(dc__solver_handle *handle) {
  ENTER(true);
  return make_object((void **)handle, NULL, sizeof **handle);
}

int cusolverDnDestroy(dc__solver_handle handle) {
  return end_object(handle, enter(__func__, true));
}

int cusolverDnSetStream(dc__solver_handle handle, dc__cu_stream stream) {
  ENTER(true);
  handle->stream = stream;
  return stream == NULL ? INVALID : 0;
}

int cusolverDnCreateParams(dc__solver_params *params) {
  ENTER(false);
  return make_object((void **)params, NULL, sizeof **params);
}

int cusolverDnDestroyParams(dc__solver_params params) {
  return end_object(params, enter(__func__, false));
}

/* ---- decompositions ---- */

typedef struct work {
  int64_t n, lda, count;
  int wide, vectors, triangle;
  char *a, *values;
  int *info;
  char *device, *host;
  size_t device_bytes, host_bytes;
} work;

/* Batches of an odd number want more than those of one matrix more. */
static void room(const work *w, size_t *device_bytes, size_t *host_bytes) {
  const size_t square = (size_t)(w->n * w->n) * (w->wide ? 8 : 4);
  *device_bytes = (size_t)w->count * (square + 256) * (w->count % 2 == 1 && w->count > 1 ? 2 : 1);
  *host_bytes = w->count > 1 ? 0 : (size_t)w->n * 16 + 100;
}

static bool valid(dc__solver_handle handle, dc__solver_params params, const work *w, int a_type, int w_type,
                  int compute_type) {
  return handle != NULL && params != NULL && w->n >= 0 && w->lda >= (w->n > 1 ? w->n : 1) && w->count >= 1 &&
         (w->vectors == DC__SOLVER_VECTORS || w->vectors == DC__SOLVER_VALUES) &&
         (w->triangle == DC__SOLVER_LOWER || w->triangle == 1) && a_type == w_type && a_type == compute_type &&
         (a_type == DC__SOLVER_R_32F || a_type == DC__SOLVER_R_64F) &&
         (w->count == 1 || w->n * w->n * w->count <= INT32_MAX / 8);
}

static double read(const void *from, int wide, int64_t i) {
  return wide ? ((const double *)from)[i] : (double)((const float *)from)[i];
}

static void write(void *to, int wide, int64_t i, double value) {
  if (wide) {
    ((double *)to)[i] = value;
  } else {
    ((float *)to)[i] = (float)value;
  }
}

/* One matrix by columns, and its eigenvalues. */
static int solve(const work *w, void *a, void *values) {
  const int64_t n = w->n;
  double *full = calloc((size_t)(n * n + 4 * n) + 1, sizeof *full);
  double *found = full + n * n;
  for (int64_t j = 0; j < n; j++) {
    for (int64_t i = j; i < n; i++) {
      full[i * n + j] = full[j * n + i] =
          read(a, w->wide, w->triangle == DC__SOLVER_LOWER ? j * w->lda + i : i * w->lda + j);
    }
  }
  int info = enter("cusolver: convergence", false);
  info = info != 0 || dc__eigen_plain(n, full, found, found + n) ? info : 1;
  for (int64_t j = 0; j < n; j++) {
    write(values, w->wide, j, info == 0 ? found[j] : NAN);
    for (int64_t i = 0; i < n; i++) { /* a vector a column */
      write(a, w->wide, j * w->lda + i, info == 0 && w->vectors ? full[j * n + i] : NAN);
    }
  }
  free(full);
  return info;
}

static void spoil(char *memory, size_t bytes) {
  const size_t ends = bytes < 8192 ? bytes : 8192;
  memset(memory, 0xa5, ends);
  memset(memory + bytes - ends, 0xa5, ends);
}

static void run_work(void *args) {
  const work *w = args;
  const size_t size = w->wide ? 8 : 4, square = (size_t)(w->n * w->lda) * size, row = (size_t)w->n * size;
  char *a = place_of(w->a, (size_t)w->count * square, false);
  char *values = place_of(w->values, (size_t)w->count * row, false);
  int *info = place_of(w->info, (size_t)w->count * sizeof *info, false);
  char *device = place_of(w->device, w->device_bytes, false);
  if (a == NULL || values == NULL || info == NULL || device == NULL || (uintptr_t)w->device % 256 != 0) {
    lose_device(ILLEGAL_ADDRESS);
  }
  if (lost() != 0) {
    return;
  }
  spoil(device, w->device_bytes);
  if (w->host_bytes > 0) { /* it must live until now */
    spoil(w->host, w->host_bytes);
  }
  for (int64_t i = 0; i < w->count; i++) {
    info[i] = solve(w, a + (size_t)i * square, values + (size_t)i * row);
  }
}

static int begin(dc__solver_handle handle, dc__solver_params params, const work *w, int a_type, int w_type,
                 int compute_type) {
  size_t device_bytes, host_bytes;
  room(w, &device_bytes, &host_bytes);
  if (!valid(handle, params, w, a_type, w_type, compute_type) || handle->stream == NULL || w->a == NULL ||
      w->values == NULL || w->info == NULL || w->device_bytes < device_bytes || w->host_bytes < host_bytes ||
      (w->host_bytes > 0 && w->host == NULL)) {
    return INVALID;
  }
  push(handle->stream, run_work, w, sizeof *w);
  return 0;
}

static int size_up(dc__solver_handle handle, dc__solver_params params, const work *w, int a_type, int w_type,
                   int compute_type, size_t *device_bytes, size_t *host_bytes) {
  room(w, device_bytes, host_bytes);
  return valid(handle, params, w, a_type, w_type, compute_type) ? 0 : INVALID;
}

#define WORK(number)                                                                               \
  {                                                                                                \
    .n = n, .lda = lda, .count = (number), .wide = a_type == DC__SOLVER_R_64F, .vectors = vectors, \
    .triangle = triangle                                                                           \
  }

int cusolverDnXsyevd_bufferSize(dc__solver_handle handle, dc__solver_params params, int vectors, int triangle,
                                int64_t n, int a_type, const void *a, int64_t lda, int w_type, const void *w,
                                int compute_type, size_t *device_bytes, size_t *host_bytes) {
  ENTER(true);
  const work all = WORK(1);
  (void)a, (void)w;
  return size_up(handle, params, &all, a_type, w_type, compute_type, device_bytes, host_bytes);
}

int cusolverDnXsyevBatched_bufferSize(dc__solver_handle handle, dc__solver_params params, int vectors, int triangle,
                                      int64_t n, int a_type, const void *a, int64_t lda, int w_type, const void *w,
                                      int compute_type, size_t *device_bytes, size_t *host_bytes, int64_t count) {
  ENTER(true);
  const work all = WORK(count);
  (void)a, (void)w;
  return size_up(handle, params, &all, a_type, w_type, compute_type, device_bytes, host_bytes);
}

int cusolverDnXsyevd(dc__solver_handle handle, dc__solver_params params, int vectors, int triangle, int64_t n,
                     int a_type, void *a, int64_t lda, int w_type, void *w, int compute_type, void *device,
                     size_t device_bytes, void *host, size_t host_bytes, int *info) {
  return cusolverDnXsyevBatched(handle, params, vectors, triangle, n, a_type, a, lda, w_type, w, compute_type, device,
                                device_bytes, host, host_bytes, info, 1);
}

int cusolverDnXsyevBatched(dc__solver_handle handle, dc__solver_params params, int vectors, int triangle, int64_t n,
                           int a_type, void *a, int64_t lda, int w_type, void *w, int compute_type, void *device,
                           size_t device_bytes, void *host, size_t host_bytes, int *info, int64_t count) {
  const int error = enter(count > 1 ? __func__ : "cusolverDnXsyevd", true);
  work all = WORK(count);
  all.a = a;
  all.values = w;
  all.info = info;
  all.device = device;
  all.device_bytes = device_bytes;
  all.host = host;
  all.host_bytes = host_bytes;
  return error != 0 ? error : begin(handle, params, &all, a_type, w_type, compute_type);
}
