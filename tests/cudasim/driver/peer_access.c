/* Which simulated card may access which memory: pools, and contexts of cards that were given access to another's. */
#include <stdlib.h>
#include <string.h>

#include "cudasim_internal.h"

static bool apart[CUDASIM_DEVICES][CUDASIM_DEVICES]; /* pairs without access; both tables need the memory's mutex */
static bool peers[CUDASIM_DEVICES][CUDASIM_DEVICES]; /* the first card's context may access the second one's */

void pools_reset(void) {
  pthread_mutex_lock(&memory_mutex);
  memset(apart, 0, sizeof apart);
  memset(peers, 0, sizeof peers);
  pthread_mutex_unlock(&memory_mutex);
}

void cudasim_deny_peer_access(int one, int other) {
  apart[one][other] = apart[other][one] = true;
}

/* ---- contexts ---- */

int cuDeviceCanAccessPeer(int *can, int device, int peer) {
  ENTER(false);
  *can = device != peer && !apart[device][peer];
  return 0;
}

int cuCtxEnablePeerAccess(dc__cu_context context, unsigned flags) {
  ENTER(true);
  int device = cudasim_current(), peer = device_of(context);
  if (device == peer || flags != 0) {
    return flags != 0 ? INVALID_VALUE : INVALID_DEVICE;
  }
  pthread_mutex_lock(&memory_mutex);
  int error = apart[device][peer] ? PEER_UNSUPPORTED : peers[device][peer] ? DC__CU_PEER_ALREADY : 0;
  peers[device][peer] = peers[device][peer] || error == 0;
  pthread_mutex_unlock(&memory_mutex);
  return error;
}

void forget_context(int device) {
  pthread_mutex_lock(&memory_mutex);
  for (int other = 0; other < CUDASIM_DEVICES; other++) {
    peers[device][other] = peers[other][device] = false;
  }
  pthread_mutex_unlock(&memory_mutex);
}

/* ---- pools ---- */

static dc__cu_pool create(int device, bool contexts) {
  dc__cu_pool pool = calloc(1, sizeof *pool);
  *pool = (struct CUmemPoolHandle_st){.device = device, .refs = 1, .contexts = contexts};
  return pool;
}

bool pool_is_open(dc__cu_pool pool, int device) {
  return device == ANYBODY || pool->device == device || (pool->readers >> device & 1) != 0 ||
         (pool->contexts && peers[device][pool->device]);
}

void pool_drop(dc__cu_pool pool) {
  if (--pool->refs == 0) {
    free(pool);
  }
}

int cuMemPoolCreate(dc__cu_pool *pool, const dc__cu_pool_props *props) {
  ENTER(true);
  if (props->alloc_type != 1 || props->location.type != 1) {
    return INVALID_VALUE;
  }
  *pool = create(props->location.id, false);
  count_live(1);
  return 0;
}

static void leave(dc__cu_pool pool) {
  pthread_mutex_lock(&memory_mutex);
  pool_drop(pool);
  pthread_mutex_unlock(&memory_mutex);
}

int cuMemPoolDestroy(dc__cu_pool pool) {
  int error = enter(__func__, true);
  leave(pool);
  count_live(-1);
  return error;
}

int cuMemPoolSetAccess(dc__cu_pool pool, const dc__cu_access *whose, size_t count) {
  ENTER(true);
  int error = 0;
  pthread_mutex_lock(&memory_mutex);
  for (size_t i = 0; i < count && error == 0; i++) {
    const int reader = whose[i].location.id;
    const bool fine = whose[i].location.type == 1 && whose[i].flags == DC__CU_ACCESS_ALL && reader != pool->device &&
                      !apart[reader][pool->device];
    error = fine ? 0 : INVALID_DEVICE;
    pool->readers |= fine ? 1U << reader : 0;
  }
  pthread_mutex_unlock(&memory_mutex);
  return error;
}

/* ---- memory of others ---- */

void *cudasim_alloc(int device, size_t bytes, int from_pool) {
  dc__cu_pool pool = create(device, from_pool == 0);
  dc__cu_ptr ptr = 0;
  (void)memory_alloc(pool, bytes, &ptr);
  leave(pool); /* the pool lives as long as its memory */
  return (void *)(uintptr_t)ptr;
}

void cudasim_free(void *ptr) {
  (void)memory_free(ptr, false);
}
