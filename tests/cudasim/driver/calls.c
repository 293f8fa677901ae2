/* Checks that are common to all calls of the simulated driver: faults that a test asked for, a lost device, a capture
 * under way. Also the functions for the driver itself, devices and contexts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cudasim_internal.h"

enum { FUNCTIONS = 128, DEPTH = 16 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects all below */
static struct {
  const char *name;
  int calls;
} called[FUNCTIONS];
static const char *fault_function;
static int fault_before, fault_error;
static int lost_error;
static int live;
static int version, devices, compute_major, has_pools;
static int retained[CUDASIM_DEVICES];

static _Thread_local int thread_calls;
static _Thread_local int depth, pushed[DEPTH]; /* pushed: current contexts, as numbers of devices */
static _Thread_local int mode;                 /* of captures: 0 global, 2 relaxed */

int from_environment(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text == NULL ? otherwise : atoi(text);
}

void calls_reset(void) {
  pthread_mutex_lock(&mutex);
  memset(called, 0, sizeof called);
  fault_function = NULL;
  lost_error = 0;
  memset(retained, 0, sizeof retained);
  version = from_environment("CUDASIM_VERSION", 13000);
  devices = from_environment("CUDASIM_CARDS", 1);
  compute_major = from_environment("CUDASIM_MAJOR", 9);
  has_pools = 1;
  pthread_mutex_unlock(&mutex);
}

void cudasim_reset(void) {
  calls_reset();
  queue_reset();
  memory_reset();
  pools_reset();
}

/* If a process opens the device without a reset by a test, it finds the default driver. */
__attribute__((constructor)) static void begin(void) {
  cudasim_reset();
}

void cudasim_set_version(int to) {
  version = to;
}

void cudasim_set_devices(int count, int major, int pools) {
  devices = count;
  compute_major = major;
  has_pools = pools;
}

void cudasim_fail(const char *function, int before, int error) {
  pthread_mutex_lock(&mutex);
  fault_function = function;
  fault_before = before;
  fault_error = error;
  pthread_mutex_unlock(&mutex);
}

static int *calls_of(const char *function) {
  int i = 0;
  while (called[i].name != NULL && strcmp(called[i].name, function) != 0) {
    i++;
  }
  called[i].name = function;
  return &called[i].calls;
}

int cudasim_calls(const char *function) {
  pthread_mutex_lock(&mutex);
  int calls = *calls_of(function);
  pthread_mutex_unlock(&mutex);
  return calls;
}

int cudasim_thread_calls(void) {
  return thread_calls;
}

int cudasim_live(void) {
  pthread_mutex_lock(&mutex);
  int now = live;
  pthread_mutex_unlock(&mutex);
  return now;
}

int cudasim_lost(void) {
  return lost();
}

int cudasim_depth(void) {
  return depth;
}

int cudasim_mode(void) {
  return mode;
}

int cudasim_current(void) {
  return depth == 0 ? -1 : pushed[depth - 1];
}

void cudasim_become(int device) {
  pushed[0] = device;
  depth = 1;
}

void count_live(int change) {
  pthread_mutex_lock(&mutex);
  live += change;
  pthread_mutex_unlock(&mutex);
}

int make_object(void **object, const void *value, size_t bytes) {
  *object = calloc(1, bytes);
  if (value != NULL) {
    memcpy(*object, value, bytes);
  }
  count_live(1);
  return 0;
}

int end_object(void *object, int error) {
  free(object);
  count_live(-1);
  return error;
}

void lose_device(int error) {
  pthread_mutex_lock(&mutex);
  lost_error = lost_error == 0 ? error : lost_error;
  pthread_mutex_unlock(&mutex);
}

int lost(void) {
  pthread_mutex_lock(&mutex);
  int error = lost_error;
  pthread_mutex_unlock(&mutex);
  return error;
}

static bool loses_device(int error) {
  return error == 46 || error == 214 || error == 220 || error == 226 || (error >= 700 && error < 800) || error == 810 ||
         error == 911 || error == 999;
}

int enter(const char *function, bool needs_context) {
  thread_calls++;
  pthread_mutex_lock(&mutex);
  ++*calls_of(function);
  int error = needs_context ? lost_error : 0;
  if (error == 0 && fault_function != NULL && strcmp(function, fault_function) == 0 && fault_before-- == 0) {
    error = fault_error;
    lost_error = loses_device(error) ? error : lost_error;
    fault_function = NULL;
  }
  if (error == 0 && needs_context && depth == 0) {
    error = INVALID_CONTEXT;
  }
  pthread_mutex_unlock(&mutex);
  return error;
}

int unsafe(void) {
  if (mode != DC__CU_CAPTURE_RELAXED && captures()) {
    cudasim_spoil();
    return CAPTURE_UNSUPPORTED;
  }
  return 0;
}

/* ---- the driver ---- */

int cuInit(unsigned flags) {
  ENTER(false);
  return flags == 0 ? 0 : INVALID_VALUE;
}

int cuDriverGetVersion(int *to) {
  ENTER(false);
  *to = version;
  return 0;
}

static const struct {
  int error;
  const char *name, *text;
} errors[] = {
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int find_error_text(int error, bool name, const char **to) {
  for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
    if (errors[i].error == error) {
      *to = name ? errors[i].name : errors[i].text;
      return 0;
    }
  }
  *to = NULL;
  return INVALID_VALUE;
}

int cuGetErrorName(int error, const char **name) {
  ENTER(false);
  return find_error_text(error, true, name);
}

int cuGetErrorString(int error, const char **text) {
  ENTER(false);
  return find_error_text(error, false, text);
}

/* ---- devices and contexts ---- */

int cuDeviceGetCount(int *count) {
  ENTER(false);
  *count = devices;
  return 0;
}

int cuDeviceGet(int *device, int number) {
  ENTER(false);
  *device = number;
  return number < devices ? 0 : INVALID_DEVICE;
}

int cuDeviceGetName(char *name, int length, int device) {
  ENTER(false);
  (void)device;
  snprintf(name, (size_t)length, "simulated card");
  return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  ENTER(false);
  (void)device;
  *value = attribute == DC__CU_ATTRIBUTE_MAJOR ? compute_major : attribute == DC__CU_ATTRIBUTE_POOLS ? has_pools : 0;
  return 0;
}

int refuse_code(int major) {
  const bool fits = major == 0 || major == compute_major;
  return !fits ? DC__CU_NO_BINARY : major != 0 && version < 13000 ? DC__CU_INVALID_IMAGE : 0;
}

static char contexts[CUDASIM_DEVICES]; /* by device number */

int device_of(dc__cu_context context) {
  return (int)((char *)(void *)context - contexts);
}

int cuDevicePrimaryCtxRetain(dc__cu_context *context, int device) {
  ENTER(false);
  *context = (dc__cu_context)(void *)&contexts[device];
  pthread_mutex_lock(&mutex);
  retained[device]++;
  pthread_mutex_unlock(&mutex);
  count_live(1);
  return lost();
}

/* A call that frees something frees it, whatever it returns. */
int cuDevicePrimaryCtxRelease_v2(int device) {
  int error = enter(__func__, false);
  pthread_mutex_lock(&mutex);
  bool ends = --retained[device] == 0;
  pthread_mutex_unlock(&mutex);
  if (ends) {
    forget_context(device);
  }
  count_live(-1);
  return error;
}

int cuCtxPushCurrent_v2(dc__cu_context context) {
  ENTER(false);
  if (context == NULL || depth == DEPTH) {
    return INVALID_CONTEXT;
  }
  pushed[depth++] = device_of(context);
  return 0;
}

int cuCtxPopCurrent_v2(dc__cu_context *context) {
  int error = enter(__func__, false);
  if (depth == 0) {
    return INVALID_CONTEXT;
  }
  *context = (dc__cu_context)(void *)&contexts[pushed[--depth]];
  return error;
}

int cuThreadExchangeStreamCaptureMode(int *other) {
  ENTER(false);
  int before = mode;
  mode = *other;
  *other = before;
  return 0;
}
