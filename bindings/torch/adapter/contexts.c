/* The context that an operator works on. Models with a context each bind their graphs; the seed's bindings, of which a
 * process has one set, use the default. Both are read by every operator call and written a few times in a run. */
#include "contexts.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "adapter.h"

typedef struct binding {
  int64_t graph_id;
  dc_context *context; /* NULL: an empty slot */
} binding;

static _Atomic(dc_context *) default_context;

/* Open addressing; the bound graph lies between its own slot and the next empty one. */
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static binding *slots;
static size_t slot_count;    /* a power of two, at least twice the count; or 0 */
static _Atomic size_t count; /* written under the lock; 0 spares the reader the lock */

/* SplitMix64's finaliser: graphs' numbers may be addresses, or differ in high bits alone. */
static size_t own_slot(int64_t graph_id) {
  uint64_t x = (uint64_t)graph_id;
  x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
  return (size_t)(x ^ (x >> 31)) & (slot_count - 1);
}

/* The graph's slot, or the empty one where it would be. slot_count is not 0. */
static binding *context_find_slot(int64_t graph_id) {
  size_t at = own_slot(graph_id);
  while (slots[at].context != NULL && slots[at].graph_id != graph_id) {
    at = (at + 1) & (slot_count - 1);
  }
  return &slots[at];
}

dc_context *dct_context_of(int64_t graph_id) {
  dc_context *context = NULL;
  if (atomic_load_explicit(&count, memory_order_acquire) > 0) {
    pthread_rwlock_rdlock(&lock);
    context = context_find_slot(graph_id)->context;
    pthread_rwlock_unlock(&lock);
  }
  return context != NULL ? context : atomic_load(&default_context);
}

static int grow_slots(void) {
  binding *before = slots;
  size_t before_count = slot_count;
  size_t wanted = slot_count == 0 ? 16 : 2 * slot_count;
  binding *grown = calloc(wanted, sizeof *grown);
  if (grown == NULL) {
    return -1;
  }
  slots = grown;
  slot_count = wanted;
  for (size_t i = 0; i < before_count; ++i) {
    if (before[i].context != NULL) {
      *context_find_slot(before[i].graph_id) = before[i];
    }
  }
  free(before);
  return 0;
}

static int set_binding(int64_t graph_id, dc_context *context) {
  if (2 * (count + 1) > slot_count && grow_slots() != 0) {
    return -1;
  }
  binding *slot = context_find_slot(graph_id);
  count = count + (slot->context == NULL);
  *slot = (binding){graph_id, context};
  return 0;
}

/* Later ones move up, so that no search stops at the gap before it has found them. */
static void remove_binding(int64_t graph_id) {
  binding *gap = slot_count == 0 ? NULL : context_find_slot(graph_id);
  if (gap == NULL || gap->context == NULL) {
    return;
  }
  gap->context = NULL;
  count = count - 1;
  size_t mask = slot_count - 1;
  for (size_t at = ((size_t)(gap - slots) + 1) & mask; slots[at].context != NULL; at = (at + 1) & mask) {
    binding moved = slots[at];
    slots[at].context = NULL;
    *context_find_slot(moved.graph_id) = moved;
  }
}

int dct_bind(int64_t graph_id, dc_context *context) {
  int result = 0;
  pthread_rwlock_wrlock(&lock);
  if (context != NULL) {
    result = set_binding(graph_id, context);
  } else {
    remove_binding(graph_id);
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
