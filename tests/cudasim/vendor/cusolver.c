/* cuSOLVER without a card: it provides what libdc's CUDA device uses of libcusolver.so.12, on libdc's own eigensolver,
 * a plain QR and the simulated driver's streams. It refuses arguments that the library refuses, and reads only the
 * triangle that the caller names. It also refuses a host workspace that queued work still uses. It can be made to fail
 * as the driver's functions can. The name of a call for one matrix that does not converge is "cusolver:
 * convergence". */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cudasim_internal.h"
#include "device/cuda/cusolver.h"
#include "linalg/eigh/eigh.h"

#define X(name, arguments) CUDASIM_API int name arguments;
DC__CUSOLVER_FUNCTIONS(X)
DC__CUSOLVER_BATCH_FUNCTIONS(X)
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
  const int other = enter(__func__, false); /* an injected error is the version that a test wants */
  *version = other != 0 ? other : VERSION;
  return 0;
}

int cusolverDnCreate(dc__cusolver_handle *handle) {
  ENTER(true);
  return make_object((void **)handle, NULL, sizeof **handle);
}

int cusolverDnDestroy(dc__cusolver_handle handle) {
  return end_object(handle, enter(__func__, true));
}

int cusolverDnSetStream(dc__cusolver_handle handle, dc__cu_stream stream) {
  ENTER(true);
  handle->stream = stream;
  return stream == NULL ? INVALID : 0;
}

int cusolverDnCreateParams(dc__cusolver_params *params) {
  ENTER(false);
  return make_object((void **)params, NULL, sizeof **params);
}

int cusolverDnDestroyParams(dc__cusolver_params params) {
  return end_object(params, enter(__func__, false));
}

/* ---- the host's workspace: it belongs to queued work until the stream has executed that ---- */

enum { IN_USE = 64 };

static pthread_mutex_t in_use_mutex = PTHREAD_MUTEX_INITIALIZER;
static const char *in_use[IN_USE];

static bool replace_in_use(const char *from, const char *to) {
  int i = 0;
  while (i < IN_USE && in_use[i] != from) {
    i++;
  }
  if (i < IN_USE) {
    in_use[i] = to;
  }
  return i < IN_USE;
}

static bool take_host_workspace(const char *host) {
  pthread_mutex_lock(&in_use_mutex);
  const bool taken = replace_in_use(host, host);
  if (!taken && !replace_in_use(NULL, host)) {
    abort();
  }
  pthread_mutex_unlock(&in_use_mutex);
  return !taken;
}

static void give_host_workspace(const char *host) {
  pthread_mutex_lock(&in_use_mutex);
  (void)replace_in_use(host, NULL);
  pthread_mutex_unlock(&in_use_mutex);
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

/* A batch of odd size needs more than one that is larger by a matrix. */
static void workspace_bytes(const work *w, size_t *device_bytes, size_t *host_bytes) {
  const size_t square = (size_t)(w->n * w->n) * (w->wide ? 8 : 4);
  *device_bytes = (size_t)w->count * (square + 256) * (w->count % 2 == 1 && w->count > 1 ? 2 : 1);
  *host_bytes = w->count > 1 ? 0 : (size_t)w->n * 16 + 100;
}

static bool valid(dc__cusolver_handle handle, dc__cusolver_params params, const work *w, int a_type, int w_type,
                  int compute_type) {
  return handle != NULL && params != NULL && w->n >= 0 && w->lda >= (w->n > 1 ? w->n : 1) && w->count >= 1 &&
         (w->vectors == DC__CUSOLVER_VECTORS || w->vectors == DC__CUSOLVER_VALUES) &&
         (w->triangle == DC__CUSOLVER_LOWER || w->triangle == 1) && a_type == w_type && a_type == compute_type &&
         (a_type == DC__CUSOLVER_R_32F || a_type == DC__CUSOLVER_R_64F) &&
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

/* Decomposes one matrix, stored by columns. */
static int solve(const work *w, void *a, void *values) {
  const int64_t n = w->n;
  double *full = calloc((size_t)(n * n + 4 * n) + 1, sizeof *full);
  double *found = full + n * n;
  for (int64_t j = 0; j < n; j++) {
    for (int64_t i = j; i < n; i++) {
      full[i * n + j] = full[j * n + i] =
          read(a, w->wide, w->triangle == DC__CUSOLVER_LOWER ? j * w->lda + i : i * w->lda + j);
    }
  }
  int info = enter("cusolver: convergence", false);
  info = info != 0 || dc__eigh_reference(n, full, found, found + n) ? info : 1;
  for (int64_t j = 0; j < n; j++) {
    write(values, w->wide, j, info == 0 ? found[j] : NAN);
    for (int64_t i = 0; i < n; i++) { /* one vector per column */
      write(a, w->wide, j * w->lda + i, info == 0 && w->vectors ? full[j * n + i] : NAN);
    }
  }
  free(full);
  return info;
}

static void fill_poison(char *memory, size_t bytes) {
  const size_t ends = bytes < 8192 ? bytes : 8192;
  memset(memory, 0xa5, ends);
  memset(memory + bytes - ends, 0xa5, ends);
}

static void run_work(void *args) {
  const work *w = args;
  const size_t size = w->wide ? 8 : 4, square = (size_t)(w->n * w->lda) * size, row = (size_t)w->n * size;
  char *a = resolve_pointer(w->a, (size_t)w->count * square, false);
  char *values = resolve_pointer(w->values, (size_t)w->count * row, false);
  int *info = resolve_pointer(w->info, (size_t)w->count * sizeof *info, false);
  char *device = resolve_pointer(w->device, w->device_bytes, false);
  if (a == NULL || values == NULL || info == NULL || device == NULL || (uintptr_t)w->device % 256 != 0) {
    lose_device(ILLEGAL_ADDRESS);
  }
  if (w->host_bytes > 0) { /* the host's workspace must still exist */
    fill_poison(w->host, w->host_bytes);
    give_host_workspace(w->host);
  }
  if (lost() != 0) {
    return;
  }
  fill_poison(device, w->device_bytes);
  for (int64_t i = 0; i < w->count; i++) {
    info[i] = solve(w, a + (size_t)i * square, values + (size_t)i * row);
  }
}

static int begin(dc__cusolver_handle handle, dc__cusolver_params params, const work *w, int a_type, int w_type,
                 int compute_type) {
  size_t device_bytes, host_bytes;
  workspace_bytes(w, &device_bytes, &host_bytes);
  if (!valid(handle, params, w, a_type, w_type, compute_type) || handle->stream == NULL || w->a == NULL ||
      w->values == NULL || w->info == NULL || w->device_bytes < device_bytes || w->host_bytes < host_bytes ||
      (w->host_bytes > 0 && (w->host == NULL || !take_host_workspace(w->host)))) {
    return INVALID;
  }
  (void)push(handle->stream, run_work, w, sizeof *w);
  return 0;
}

static int query_workspace(dc__cusolver_handle handle, dc__cusolver_params params, const work *w, int a_type,
                           int w_type, int compute_type, size_t *device_bytes, size_t *host_bytes) {
  workspace_bytes(w, device_bytes, host_bytes);
  return valid(handle, params, w, a_type, w_type, compute_type) ? 0 : INVALID;
}

#define WORK(number)                                                                                 \
  {                                                                                                  \
    .n = n, .lda = lda, .count = (number), .wide = a_type == DC__CUSOLVER_R_64F, .vectors = vectors, \
    .triangle = triangle                                                                             \
  }

int cusolverDnXsyevd_bufferSize(dc__cusolver_handle handle, dc__cusolver_params params, int vectors, int triangle,
                                int64_t n, int a_type, const void *a, int64_t lda, int w_type, const void *w,
                                int compute_type, size_t *device_bytes, size_t *host_bytes) {
  ENTER(true);
  const work all = WORK(1);
  (void)a, (void)w;
  return query_workspace(handle, params, &all, a_type, w_type, compute_type, device_bytes, host_bytes);
}

int cusolverDnXsyevBatched_bufferSize(dc__cusolver_handle handle, dc__cusolver_params params, int vectors, int triangle,
                                      int64_t n, int a_type, const void *a, int64_t lda, int w_type, const void *w,
                                      int compute_type, size_t *device_bytes, size_t *host_bytes, int64_t count) {
  ENTER(true);
  const work all = WORK(count);
  (void)a, (void)w;
  return query_workspace(handle, params, &all, a_type, w_type, compute_type, device_bytes, host_bytes);
}

int cusolverDnXsyevd(dc__cusolver_handle handle, dc__cusolver_params params, int vectors, int triangle, int64_t n,
                     int a_type, void *a, int64_t lda, int w_type, void *w, int compute_type, void *device,
                     size_t device_bytes, void *host, size_t host_bytes, int *info) {
  return cusolverDnXsyevBatched(handle, params, vectors, triangle, n, a_type, a, lda, w_type, w, compute_type, device,
                                device_bytes, host, host_bytes, info, 1);
}

int cusolverDnXsyevBatched(dc__cusolver_handle handle, dc__cusolver_params params, int vectors, int triangle, int64_t n,
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

/* ---- QR ---- */

typedef struct factoring {
  int64_t m, n, lda;
  float *a, *tau, *workspace_bytes;
  size_t room_bytes;
  int *info;
} factoring;

static int max_workspace_bytes(int m, int n) {
  return 3 * m + 32 * n;
}

/* y -= tau (v^T y) v, with 1 for v's first element. */
static void reflect(const double *v, double tau, double *y, int64_t count) {
  double product = y[0];
  for (int64_t i = 1; i < count; i++) {
    product += v[i] * y[i];
  }
  y[0] -= tau * product;
  for (int64_t i = 1; i < count; i++) {
    y[i] -= tau * product * v[i];
  }
}

/* The columns become R and Householder vectors, with LAPACK's signs. */
static void factor(const factoring *w, double *a, double *tau) {
  for (int64_t k = 0; k < w->n && k < w->m; k++) {
    double *v = a + k * w->m + k;
    double norm = 0;
    for (int64_t i = 1; i < w->m - k; i++) {
      norm = hypot(norm, v[i]);
    }
    const double head = v[0], beta = -copysign(hypot(head, norm), head);
    tau[k] = norm == 0 ? 0 : (beta - head) / beta;
    for (int64_t i = 1; i < w->m - k && norm != 0; i++) {
      v[i] /= head - beta;
    }
    for (int64_t j = 1; j < w->n - k; j++) {
      reflect(v, tau[k], v + j * w->m, w->m - k);
    }
    v[0] = norm == 0 ? head : beta;
  }
}

/* The Householder vectors become the columns of Q. */
static void multiply_out(const factoring *w, double *a, double *tau) {
  for (int64_t k = w->n - 1; k >= 0; k--) {
    double *v = a + k * w->m + k;
    for (int64_t j = 1; j < w->n - k; j++) {
      reflect(v, tau[k], v + j * w->m, w->m - k);
    }
    for (int64_t i = 1; i < w->m - k; i++) {
      v[i] *= -tau[k];
    }
    v[0] = 1 - tau[k];
    memset(a + k * w->m, 0, (size_t)k * sizeof *a);
  }
}

static void run_factoring(const factoring *w, void (*step)(const factoring *w, double *a, double *tau)) {
  float *a = resolve_pointer(w->a, (size_t)(w->lda * w->n) * sizeof *a, false);
  float *tau = resolve_pointer(w->tau, (size_t)w->n * sizeof *tau, false);
  char *device = resolve_pointer(w->workspace_bytes, w->room_bytes, false);
  int *info = resolve_pointer(w->info, sizeof *info, false);
  if (a == NULL || tau == NULL || device == NULL || info == NULL) {
    lose_device(ILLEGAL_ADDRESS);
  }
  if (lost() != 0) {
    return;
  }
  fill_poison(device, w->room_bytes);
  double *wide = calloc((size_t)(w->m * w->n + w->n) + 1, sizeof *wide);
  double *factors = wide + w->m * w->n;
  for (int64_t j = 0; j < w->n; j++) {
    factors[j] = (double)tau[j];
    for (int64_t i = 0; i < w->m; i++) {
      wide[j * w->m + i] = (double)a[j * w->lda + i];
    }
  }
  step(w, wide, factors);
  for (int64_t j = 0; j < w->n; j++) {
    tau[j] = (float)factors[j];
    for (int64_t i = 0; i < w->m; i++) {
      a[j * w->lda + i] = (float)wide[j * w->m + i];
    }
  }
  free(wide);
  *info = enter("cusolver: QR", false);
}

static void run_factor(void *args) {
  run_factoring(args, factor);
}
static void run_multiply_out(void *args) {
  run_factoring(args, multiply_out);
}

static int begin_factoring(dc__cusolver_handle handle, void (*run)(void *args), const factoring *w, int size) {
  if (handle == NULL || handle->stream == NULL || w->m < w->n || w->n < 0 || w->lda < (w->m > 1 ? w->m : 1) ||
      w->a == NULL || w->tau == NULL || w->workspace_bytes == NULL || w->info == NULL ||
      size < max_workspace_bytes((int)w->m, (int)w->n)) {
    return INVALID;
  }
  (void)push(handle->stream, run, w, sizeof *w);
  return 0;
}

int cusolverDnSgeqrf_bufferSize(dc__cusolver_handle handle, int m, int n, float *a, int lda, int *size) {
  ENTER(true);
  (void)a;
  *size = max_workspace_bytes(m, n) / 2 + 1;
  return handle == NULL || n < 0 || m < n || lda < m ? INVALID : 0;
}

int cusolverDnSorgqr_bufferSize(dc__cusolver_handle handle, int m, int n, int k, const float *a, int lda,
                                const float *tau, int *size) {
  ENTER(true);
  (void)a, (void)tau;
  *size = max_workspace_bytes(m, n);
  return handle == NULL || k < 0 || n < k || m < n || lda < m ? INVALID : 0;
}

int cusolverDnSgeqrf(dc__cusolver_handle handle, int m, int n, float *a, int lda, float *tau, float *workspace_bytes,
                     int size, int *info) {
  ENTER(true);
  const factoring w = {m, n, lda, a, tau, workspace_bytes, (size_t)size * sizeof *workspace_bytes, info};
  return begin_factoring(handle, run_factor, &w, 2 * size);
}

int cusolverDnSorgqr(dc__cusolver_handle handle, int m, int n, int k, float *a, int lda, const float *tau,
                     float *workspace_bytes, int size, int *info) {
  ENTER(true);
  const factoring w = {m,   n, lda, a, (float *)(uintptr_t)tau, workspace_bytes, (size_t)size * sizeof *workspace_bytes,
                       info};
  return k != n ? INVALID : begin_factoring(handle, run_multiply_out, &w, size);
}
