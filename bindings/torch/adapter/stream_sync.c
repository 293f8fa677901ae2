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

struct dct_held_tensor {
  dct_held_tensor *next;
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
  dct_held_tensor *held, **last;
  dct_held_tensor *free_list;
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

static void release_sync(dct_stream_sync *sync) {
  if (atomic_fetch_sub_explicit(&sync->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  for (int i = 0; i < STREAMS; ++i) {
    dc_stream_destroy(sync->streams[i].stream);
  }
  while (sync->free_list != NULL) {
    dct_held_tensor *next = sync->free_list->next;
    dc_event_destroy(sync->free_list->event);
    free(sync->free_list);
    sync->free_list = next;
  }
  pthread_mutex_destroy(&sync->lock);
  free(sync);
}

/* ---- tracking ---- */

/* The slot of a stream; -1 if it cannot be wrapped. */
static int stream_find_slot(dct_stream_sync *sync, void *native) {
  for (int i = 0; i < STREAMS; ++i) {
    if (sync->streams[i].stream != NULL && sync->streams[i].native == native) {
      return i;
    }
  }
  sync->next_evicted = (sync->next_evicted + 1) % STREAMS;
  if (sync->next_evicted == sync->current) {
    sync->next_evicted = (sync->next_evicted + 1) % STREAMS;
  }
  wrapped_stream *slot = &sync->streams[sync->next_evicted];
  dc_stream_destroy(slot->stream); /* waits for nothing, and ends nothing of the stream's */
  slot->native = native;
  return dc_stream_wrap(sync->device, native, &slot->stream) == DC_OK ? sync->next_evicted : -1;
}

static const char *set_current_stream(dct_stream_sync *sync) {
  void *native = NULL;
  if (dct_torch.aoti_torch_get_current_cuda_stream(sync->index, &native) != 0) {
    return dct_format_error("the current stream of cuda:%d: %s", (int)sync->index, dct_torch_reason());
  }
  if (sync->current >= 0 && sync->streams[sync->current].native == native) {
    return NULL;
  }
  int slot = stream_find_slot(sync, native);
  if (slot < 0 || dc_context_set_stream(sync->context, sync->streams[slot].stream) != DC_OK) {
    return dc_last_error();
  }
  sync->current = slot;
  return NULL;
}

const char *dct_stream_sync_begin(dc_context *context, dct_stream_sync **begun) {
  dct_stream_sync *sync = acquire_sync(context);
  *begun = sync;
  if (sync == NULL) {
    return NULL;
  }
  pthread_mutex_lock(&sync->lock);
  const char *error = set_current_stream(sync);
  if (error != NULL) {
    dct_stream_sync_end(sync);
    *begun = NULL;
  }
  return error;
}

/* Tensors are freed outside of the lock, since freeing one may have to wait for Python. */
static void free_held(dct_stream_sync *sync, dct_held_tensor *done) {
  if (done == NULL) {
    return;
  }
  dct_held_tensor *last = done;
  for (dct_held_tensor *k = done; k != NULL; k = k->next) {
    dct_torch.aoti_torch_delete_tensor_object(k->tensor);
    last = k;
  }
  pthread_mutex_lock(&sync->lock);
  last->next = sync->free_list;
  sync->free_list = done;
  pthread_mutex_unlock(&sync->lock);
}

/* The list of those whose copies are done. They complete in the order in which they were waited for, except in programs
 * that wait on several streams: so the scan ends at the first that is not complete. On a failed device, too. */
static dct_held_tensor *pop_completed(dct_stream_sync *sync) {
  dct_held_tensor *done = NULL, **at = &sync->held;
  int32_t passed = 1;
  while (*at != NULL && passed != 0) {
    dct_held_tensor *k = *at;
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
    sync->last = at;
  }
  return done;
}

void dct_stream_sync_end(dct_stream_sync *sync) {
  if (sync != NULL) {
    dct_held_tensor *done = pop_completed(sync);
    pthread_mutex_unlock(&sync->lock);
    free_held(sync, done);
    release_sync(sync);
  }
}

/* ---- tensors that the offload stream still reads ---- */

dct_held_tensor *dct_hold_begin(dct_stream_sync *sync, const char **error) {
  dct_held_tensor *held = sync->free_list;
  if (held != NULL) {
    sync->free_list = held->next;
    return held;
  }
  held = calloc(1, sizeof *held);
  if (held == NULL) {
    *error = "out of memory";
  } else if (dc_event_create(sync->device, &held->event) != DC_OK) {
    *error = dc_last_error();
    free(held);
    held = NULL;
  }
  return held;
}

void dct_hold_end(dct_stream_sync *sync, dct_held_tensor *held, dct_tensor tensor, int64_t graph_id, int64_t id) {
  held->tensor = tensor;
  held->graph_id = graph_id;
  held->id = id;
  held->waited = false;
  if (tensor == NULL) {
    held->next = sync->free_list;
    sync->free_list = held;
    return;
  }
  held->next = NULL;
  *sync->last = held;
  sync->last = &held->next;
}

void dct_hold_waited(dct_stream_sync *sync, int64_t graph_id, int64_t id) {
  for (dct_held_tensor *k = sync->held; k != NULL; k = k->next) {
    if (!k->waited && k->graph_id == graph_id && k->id == id) {
      k->waited = dc_event_record(k->event, sync->streams[sync->current].stream) == DC_OK;
    }
  }
}

/* ---- life ---- */

const char *dct_track_stream(dc_context *context, dc_device *device, int32_t index) {
  if (dct_torch.aoti_torch_get_current_cuda_stream == NULL) {
    return "this PyTorch has no CUDA, or none that tells its current stream (aoti_torch_get_current_cuda_stream)";
  }
  dct_stream_sync *sync = calloc(1, sizeof *sync);
  if (sync == NULL) {
    return "out of memory";
  }
  sync->context = context;
  sync->device = device;
  sync->index = index;
  sync->current = -1;
  sync->last = &sync->held;
  atomic_init(&sync->refs, 1);
  pthread_mutex_init(&sync->lock, NULL);
  pthread_rwlock_wrlock(&lock);
  bool known = *find_sync(context) != NULL;
  if (!known) {
    sync->next = all;
    all = sync;
    atomic_fetch_add(&count, 1);
  }
  pthread_rwlock_unlock(&lock);
  if (known) {
    release_sync(sync);
  }
  return NULL;
}

const char *dct_update_stream(dc_context *context) {
  dct_stream_sync *sync;
  const char *error = dct_stream_sync_begin(context, &sync);
  dct_stream_sync_end(sync);
  return error;
}

/* With no stream set, waiting is the calling thread's. A context that was cleaned up refuses, and has waited already;
 * one that failed refuses too, and nothing but its end is left, which waits for all. */
static dct_held_tensor *wait_held(dct_stream_sync *sync) {
  dc_status status = dc_context_set_stream(sync->context, NULL);
  if (status != DC_OK && status != DC_E_STATE) {
    (void)dc_cleanup(sync->context);
  }
  for (const dct_held_tensor *k = sync->held; k != NULL; k = k->next) {
    dc_tensor out = DC_TENSOR_INIT;
    (void)(k->waited ? dc_event_wait(k->event, NULL, 0)
                     : dc_wait_offload(sync->context, NULL, k->graph_id, k->id, &out));
  }
  dct_held_tensor *done = sync->held;
  sync->held = NULL;
  sync->last = &sync->held;
  return done;
}

void dct_untrack_stream(dc_context *context) {
  pthread_rwlock_wrlock(&lock);
  dct_stream_sync **at = find_sync(context);
  dct_stream_sync *sync = *at;
  if (sync != NULL) {
    *at = sync->next;
    atomic_fetch_sub(&count, 1);
  }
  pthread_rwlock_unlock(&lock);
  if (sync != NULL) {
    pthread_mutex_lock(&sync->lock); /* an operator that runs ends first */
    dct_held_tensor *done = wait_held(sync);
    sync->current = -1;
    pthread_mutex_unlock(&sync->lock);
    free_held(sync, done);
    release_sync(sync);
  }
}
