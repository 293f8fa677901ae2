/* Contexts on CUDA devices and PyTorch's current streams. A context's stream is set only when the current one differs
 * from the last operator's. Wrapped streams are cached, so a steady step allocates nothing. A lock is contended only by
 * threads that the context would serialise itself. */
#include "stream_sync.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "adapter.h"
#include "call.h"

enum { STREAMS = 16 }; /* of one context; PyTorch has pools of 32, programs use a few */

struct dct_pinned {
  dct_pinned *next;
  dct_tensor tensor;
  int64_t graph_id, id;
  dc_event *event; /* recorded when a stream has waited for the copy */
  bool waited;
};

typedef struct wrapped_stream {
  void *native;
  dc_stream *stream; /* NULL if the slot is free */
} wrapped_stream;

struct dct_stream_sync {
  dct_stream_sync *next;
  dc_context *context;
  dc_device *device;
  int32_t index;
  atomic_int refs;      /* the list's, and each operator's */
  pthread_mutex_t lock; /* all below */
  wrapped_stream streams[STREAMS];
  int current, next_evicted; /* slots: of the stream that is set, or -1; and the one that is replaced next */
  dct_pinned *pinned, **last;
  dct_pinned *free_list;
};

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static dct_stream_sync *all;
static atomic_int count; /* written under the lock; 0 spares the reader the lock */

int32_t dct_stream_sync_index(const dct_stream_sync *sync) {
  return sync->index;
}

/* ---- finding ---- */

static dct_stream_sync **find_sync(const dc_context *context) {
  dct_stream_sync **at = &all;
  while (*at != NULL && (*at)->context != context) {
    at = &(*at)->next;
  }
  return at;
}

static dct_stream_sync *acquire_sync(const dc_context *context) {
  if (atomic_load_explicit(&count, memory_order_acquire) == 0) {
    return NULL;
  }
  pthread_rwlock_rdlock(&lock);
  dct_stream_sync *found = *find_sync(context);
  if (found != NULL) {
    atomic_fetch_add_explicit(&found->refs, 1, memory_order_relaxed);
  }
  pthread_rwlock_unlock(&lock);
  return found;
}

static void release_sync(dct_stream_sync *f) {
  if (atomic_fetch_sub_explicit(&f->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  for (int i = 0; i < STREAMS; ++i) {
    dc_stream_destroy(f->streams[i].stream);
  }
  while (f->free_list != NULL) {
    dct_pinned *next = f->free_list->next;
    dc_event_destroy(f->free_list->event);
    free(f->free_list);
    f->free_list = next;
  }
  pthread_mutex_destroy(&f->lock);
  free(f);
}

/* ---- tracking ---- */

/* The slot of a stream; -1 if it cannot be wrapped. */
static int find_slot(dct_stream_sync *f, void *native) {
  for (int i = 0; i < STREAMS; ++i) {
    if (f->streams[i].stream != NULL && f->streams[i].native == native) {
      return i;
    }
  }
  f->next_evicted = (f->next_evicted + 1) % STREAMS;
  if (f->next_evicted == f->current) {
    f->next_evicted = (f->next_evicted + 1) % STREAMS;
  }
  wrapped_stream *slot = &f->streams[f->next_evicted];
  dc_stream_destroy(slot->stream); /* waits for nothing, and ends nothing of the stream's */
  slot->native = native;
  return dc_stream_wrap(f->device, native, &slot->stream) == DC_OK ? f->next_evicted : -1;
}

static const char *set_current_stream(dct_stream_sync *f) {
  void *native = NULL;
  if (dct_torch.aoti_torch_get_current_cuda_stream(f->index, &native) != 0) {
    return dct_format_error("the current stream of cuda:%d: %s", (int)f->index, dct_torch_reason());
  }
  if (f->current >= 0 && f->streams[f->current].native == native) {
    return NULL;
  }
  int slot = find_slot(f, native);
  if (slot < 0 || dc_context_set_stream(f->context, f->streams[slot].stream) != DC_OK) {
    return dc_last_error();
  }
  f->current = slot;
  return NULL;
}

const char *dct_stream_sync_begin(dc_context *context, dct_stream_sync **sync) {
  dct_stream_sync *f = acquire_sync(context);
  *sync = f;
  if (f == NULL) {
    return NULL;
  }
  pthread_mutex_lock(&f->lock);
  const char *error = set_current_stream(f);
  if (error != NULL) {
    dct_stream_sync_end(f);
    *sync = NULL;
  }
  return error;
}

/* Tensors are freed outside of the lock, since freeing one may have to wait for Python. */
static void free_pinned(dct_stream_sync *f, dct_pinned *done) {
  if (done == NULL) {
    return;
  }
  dct_pinned *last = done;
  for (dct_pinned *k = done; k != NULL; k = k->next) {
    dct_torch.aoti_torch_delete_tensor_object(k->tensor);
    last = k;
  }
  pthread_mutex_lock(&f->lock);
  last->next = f->free_list;
  f->free_list = done;
  pthread_mutex_unlock(&f->lock);
}

/* The list of those whose copies are done. They complete in the order in which they were waited for, except in programs
 * that wait on several streams: so the scan ends at the first that is not complete. On a failed device, too. */
static dct_pinned *pop_completed(dct_stream_sync *f) {
  dct_pinned *done = NULL, **at = &f->pinned;
  int32_t passed = 1;
  while (*at != NULL && passed != 0) {
    dct_pinned *k = *at;
    if (k->waited) {
      (void)dc_event_query(k->event, &passed);
    }
    if (k->waited && passed != 0) {
      *at = k->next;
      k->next = done;
      done = k;
    } else {
      at = &k->next;
    }
  }
  if (*at == NULL) {
    f->last = at;
  }
  return done;
}

void dct_stream_sync_end(dct_stream_sync *f) {
  if (f != NULL) {
    dct_pinned *done = pop_completed(f);
    pthread_mutex_unlock(&f->lock);
    free_pinned(f, done);
    release_sync(f);
  }
}

/* ---- tensors that the offload stream still reads ---- */

dct_pinned *dct_pin_begin(dct_stream_sync *f, const char **error) {
  dct_pinned *pinned = f->free_list;
  if (pinned != NULL) {
    f->free_list = pinned->next;
    return pinned;
  }
  pinned = calloc(1, sizeof *pinned);
  if (pinned == NULL) {
    *error = "out of memory";
  } else if (dc_event_create(f->device, &pinned->event) != DC_OK) {
    *error = dc_last_error();
    free(pinned);
    pinned = NULL;
  }
  return pinned;
}

void dct_pin_end(dct_stream_sync *f, dct_pinned *pinned, dct_tensor tensor, int64_t graph_id, int64_t id) {
  pinned->tensor = tensor;
  pinned->graph_id = graph_id;
  pinned->id = id;
  pinned->waited = false;
  if (tensor == NULL) {
    pinned->next = f->free_list;
    f->free_list = pinned;
    return;
  }
  pinned->next = NULL;
  *f->last = pinned;
  f->last = &pinned->next;
}

void dct_pin_waited(dct_stream_sync *f, int64_t graph_id, int64_t id) {
  for (dct_pinned *k = f->pinned; k != NULL; k = k->next) {
    if (!k->waited && k->graph_id == graph_id && k->id == id) {
      k->waited = dc_event_record(k->event, f->streams[f->current].stream) == DC_OK;
    }
  }
}

/* ---- life ---- */

const char *dct_track_stream(dc_context *context, dc_device *device, int32_t index) {
  if (dct_torch.aoti_torch_get_current_cuda_stream == NULL) {
    return "this PyTorch has no CUDA, or none that tells its current stream (aoti_torch_get_current_cuda_stream)";
  }
  dct_stream_sync *f = calloc(1, sizeof *f);
  if (f == NULL) {
    return "out of memory";
  }
  f->context = context;
  f->device = device;
  f->index = index;
  f->current = -1;
  f->last = &f->pinned;
  atomic_init(&f->refs, 1);
  pthread_mutex_init(&f->lock, NULL);
  pthread_rwlock_wrlock(&lock);
  bool known = *find_sync(context) != NULL;
  if (!known) {
    f->next = all;
    all = f;
    atomic_fetch_add(&count, 1);
  }
  pthread_rwlock_unlock(&lock);
  if (known) {
    release_sync(f);
  }
  return NULL;
}

const char *dct_update_stream(dc_context *context) {
  dct_stream_sync *f;
  const char *error = dct_stream_sync_begin(context, &f);
  dct_stream_sync_end(f);
  return error;
}

/* With no stream set, waiting is the calling thread's. A context that was cleaned up refuses, and has waited already;
 * one that failed refuses too, and nothing but its end is left, which waits for all. */
static dct_pinned *wait_pinned(dct_stream_sync *f) {
  dc_status status = dc_context_set_stream(f->context, NULL);
  if (status != DC_OK && status != DC_E_STATE) {
    (void)dc_cleanup(f->context);
  }
  for (const dct_pinned *k = f->pinned; k != NULL; k = k->next) {
    dc_tensor out = DC_TENSOR_INIT;
    (void)(k->waited ? dc_event_wait(k->event, NULL, 0) : dc_wait_offload(f->context, NULL, k->graph_id, k->id, &out));
  }
  dct_pinned *done = f->pinned;
  f->pinned = NULL;
  f->last = &f->pinned;
  return done;
}

void dct_untrack_stream(dc_context *context) {
  pthread_rwlock_wrlock(&lock);
  dct_stream_sync **at = find_sync(context);
  dct_stream_sync *f = *at;
  if (f != NULL) {
    *at = f->next;
    atomic_fetch_sub(&count, 1);
  }
  pthread_rwlock_unlock(&lock);
  if (f != NULL) {
    pthread_mutex_lock(&f->lock); /* an operator that runs ends first */
    dct_pinned *done = wait_pinned(f);
    f->current = -1;
    pthread_mutex_unlock(&f->lock);
    free_pinned(f, done);
    release_sync(f);
  }
}
