/* The stand-in's storages and tensors, and a test's settings of the process (torchsim.h). */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cudasim.h"
#include "device/device.h"
#include "torchsim_internal.h"

enum { GRAVES = 4096 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects all below */
static int live;
static char fault[64];
static int fault_before;
static bool fault_occurred;
static dc_device *device;
static struct {
  void *data;
  size_t bytes;
} graves[GRAVES];
static int grave_count;
static _Thread_local void *current;

void count(int change) {
  pthread_mutex_lock(&mutex);
  live += change;
  pthread_mutex_unlock(&mutex);
}

int torchsim_live(void) {
  pthread_mutex_lock(&mutex);
  int now = live;
  pthread_mutex_unlock(&mutex);
  return now;
}

void torchsim_fail(const char *function, int before) {
  pthread_mutex_lock(&mutex);
  snprintf(fault, sizeof fault, "%s", function);
  fault_before = before;
  fault_occurred = false;
  pthread_mutex_unlock(&mutex);
}

bool torchsim_failed(void) {
  pthread_mutex_lock(&mutex);
  bool came = fault_occurred;
  fault[0] = '\0';
  pthread_mutex_unlock(&mutex);
  return came;
}

bool fails(const char *function) {
  pthread_mutex_lock(&mutex);
  bool now = strcmp(fault, function + strlen("sim_")) == 0 && fault_before-- == 0;
  fault_occurred = fault_occurred || now;
  pthread_mutex_unlock(&mutex);
  return now;
}

/* ---- memory ---- */

void torchsim_use(dc_device *to) {
  dc_device *from = device;
  for (int i = 0; i < grave_count; i++) {
    from->ops->free(from, graves[i].data, graves[i].bytes, DC_MEMORY_DEVICE);
  }
  grave_count = 0;
  device = to;
}

void torchsim_set_stream(void *native) {
  current = native;
}

void *current_stream(void) {
  return current;
}

typedef struct move {
  void *dst;
  const void *src; /* NULL: zeros */
  size_t bytes;
} move;

static void run_move(void *user) {
  move *m = user;
  if (m->src != NULL) {
    memcpy(cudasim_host_ptr(m->dst), cudasim_host_ptr(m->src), m->bytes);
  } else {
    memset(cudasim_host_ptr(m->dst), 0, m->bytes);
  }
  free(m);
}

void on_stream(void *native, void *dst, const void *src, size_t bytes) {
  move *m = bytes > 0 ? malloc(sizeof *m) : NULL;
  if (m != NULL) {
    *m = (move){dst, src, bytes};
    cudasim_stream_call(native, run_move, m);
  }
}

/* In the order of the stream, overwrites the memory as its next owner would. */
static void release_storage_memory(storage *s) {
  if (s->bytes == 0) {
    return;
  }
  pthread_mutex_lock(&mutex);
  graves[grave_count].data = s->data;
  graves[grave_count++].bytes = s->bytes;
  pthread_mutex_unlock(&mutex);
  on_stream(s->stream, s->data, NULL, s->bytes);
}

void free_memory(storage *s) {
  if (s->deleter != NULL) {
    s->deleter(s->data, s->user);
  } else if (s->device == SIM_CUDA) {
    release_storage_memory(s);
  } else {
    free(s->data);
  }
  s->deleter = NULL;
  s->data = NULL;
  s->bytes = 0;
}

static storage *new_storage(int32_t on, int32_t index, size_t bytes) {
  storage *s = calloc(1, sizeof *s);
  void *data = NULL;
  s->refs = 1;
  s->device = on;
  s->stream = current;
  s->bytes = index > 0 ? 0 : bytes;
  if (on == SIM_CUDA && s->bytes > 0) {
    (void)device->ops->alloc(device, bytes, DC_MEMORY_DEVICE, &data);
  } else if (on == SIM_CPU) {
    data = calloc(1, bytes + 1);
  }
  s->data = data;
  return s;
}

/* ---- tensors ---- */

size_t size_of(int32_t dtype) {
  return dtype == SIM_FLOAT32 ? 4 : 2;
}

dct_tensor view_of(storage *of, int32_t index, int32_t dtype, int64_t ndim, const int64_t *sizes,
                   const int64_t *strides) {
  dct_tensor t = calloc(1, sizeof *t);
  t->of = of;
  t->index = index;
  t->dtype = dtype;
  t->ndim = (int32_t)ndim;
  memcpy(t->sizes, sizes, sizeof *sizes * (size_t)ndim);
  memcpy(t->strides, strides, sizeof *strides * (size_t)ndim);
  count(1);
  return t;
}

int64_t torchsim_numel(dct_tensor t) {
  int64_t numel = 1;
  for (int32_t i = 0; i < t->ndim; i++) {
    numel *= t->sizes[i];
  }
  return numel;
}

dct_tensor torchsim_tensor(int32_t on, int32_t index, int32_t dtype, int32_t ndim, const int64_t *sizes) {
  int64_t strides[DIMS];
  dct_contiguous_strides(sizes, ndim, strides);
  dct_tensor t = view_of(NULL, index, dtype, ndim, sizes, strides);
  t->of = new_storage(on, index, (size_t)torchsim_numel(t) * size_of(dtype));
  return t;
}

dct_tensor torchsim_again(dct_tensor t) {
  pthread_mutex_lock(&mutex);
  t->of->refs++;
  pthread_mutex_unlock(&mutex);
  return view_of(t->of, t->index, t->dtype, t->ndim, t->sizes, t->strides);
}

dct_tensor torchsim_transposed(dct_tensor t) {
  dct_tensor view = torchsim_again(t);
  for (int i = 0; i < 2; i++) {
    view->sizes[i] = t->sizes[1 - i];
    view->strides[i] = t->strides[1 - i];
  }
  return view;
}

void torchsim_drop(dct_tensor t) {
  pthread_mutex_lock(&mutex);
  bool last = --t->of->refs == 0;
  pthread_mutex_unlock(&mutex);
  if (last) {
    free_memory(t->of);
    free(t->of);
  }
  free(t);
  count(-1);
}

void *torchsim_data(dct_tensor t) {
  return t->of->data;
}

int32_t torchsim_device(dct_tensor t, int32_t *index) {
  *index = t->index;
  return t->of->device;
}

dct_value torchsim_list(const dct_value *items, size_t n, bool tensors) {
  dct_list list = calloc(1, sizeof *list);
  list->items = malloc((n + 1) * sizeof *items);
  memcpy(list->items, items, n * sizeof *items);
  list->count = n;
  list->tensors = tensors;
  count(1);
  return dct_as_value(list);
}

void torchsim_items(dct_value list, dct_tensor *items, size_t n) {
  dct_list from = (dct_list)(uintptr_t)list;
  for (size_t i = 0; i < n; i++) {
    items[i] = i < from->count ? dct_as_tensor(from->items[i]) : NULL;
  }
  free(from->items);
  free(from);
  count(-1);
}

dct_value torchsim_some(dct_value value) {
  dct_value *box = malloc(sizeof *box);
  *box = value;
  count(1);
  return dct_as_value(box);
}
