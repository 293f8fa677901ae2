/* Which context an operator works on. Models with a context each bind their graphs; the seed's bindings, of which a
 * process has one set, use the default. Both are read by every operator call and written a few times in a run. */
#include "contexts.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "adapter.h"

typedef struct binding {
  int64_t graph_id;
  dc_context *context;
} binding;

static _Atomic(dc_context *) default_context;

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static binding *bindings;
static size_t capacity;
static _Atomic size_t count; /* written under the lock; 0 spares the reader the lock */

static binding *find_binding(int64_t graph_id) {
  for (size_t i = 0; i < count; ++i) {
    if (bindings[i].graph_id == graph_id) {
      return &bindings[i];
    }
  }
  return NULL;
}

dc_context *dct_context_of(int64_t graph_id) {
  dc_context *context = NULL;
  if (atomic_load_explicit(&count, memory_order_acquire) > 0) {
    pthread_rwlock_rdlock(&lock);
    const binding *found = find_binding(graph_id);
    context = found == NULL ? NULL : found->context;
    pthread_rwlock_unlock(&lock);
  }
  return context != NULL ? context : atomic_load(&default_context);
}

static int set_binding(int64_t graph_id, dc_context *context) {
  binding *found = find_binding(graph_id);
  if (found != NULL) {
    found->context = context;
    return 0;
  }
  if (count == capacity) {
    size_t wanted = capacity == 0 ? 8 : 2 * capacity;
    binding *grown = realloc(bindings, wanted * sizeof *grown);
    if (grown == NULL) {
      return -1;
    }
    bindings = grown;
    capacity = wanted;
  }
  bindings[count] = (binding){graph_id, context};
  count = count + 1;
  return 0;
}

int dct_bind(int64_t graph_id, dc_context *context) {
  int result = 0;
  pthread_rwlock_wrlock(&lock);
  if (context != NULL) {
    result = set_binding(graph_id, context);
  } else {
    binding *found = find_binding(graph_id);
    if (found != NULL) {
      *found = bindings[count - 1];
      count = count - 1;
    }
  }
  pthread_rwlock_unlock(&lock);
  return result;
}

void dct_set_context(dc_context *context) {
  atomic_store(&default_context, context);
}

dc_context *dct_get_context(void) {
  return atomic_load(&default_context);
}
