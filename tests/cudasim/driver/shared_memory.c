/* A block's memory: the kernel's declarations, identified by their site in the code; the memory that the launch asked
 * for; and the slots through which a warp's threads exchange values. Each declaration is a malloc'ed block, so the
 * address sanitizer knows its end. */
#include <stdlib.h>
#include <string.h>

#include "cudasim_internal.h"

enum { SITES = 32, WARP_SLOTS = CUDASIM_WARP * CUDASIM_SLOT };

/* An exchange's result is valid until the thread's next exchange but one, and no thread can be two exchanges ahead of
 * another of its warp. */
enum { TURNS = 3 };

struct shared {
  pthread_mutex_t mutex;
  struct {
    const void *site;
    void *memory;
  } declared[SITES];
  size_t bytes; /* of all shared memory */
  void *launch;
  uint32_t launch_bytes;
  uint32_t exchanges[CUDASIM_THREADS];
  unsigned char (*slots)[TURNS][WARP_SLOTS]; /* one set for each warp */
};

_Thread_local shared *block_memory;

shared *shared_create(const grid *g) {
  shared *b = calloc(1, sizeof *b);
  pthread_mutex_init(&b->mutex, NULL);
  b->launch_bytes = g->shared_bytes;
  b->slots = malloc((g->threads + CUDASIM_WARP - 1) / CUDASIM_WARP * sizeof *b->slots);
  b->launch = g->shared_bytes > 0 ? malloc(g->shared_bytes) : NULL;
  shared_clear(b);
  return b;
}

/* Poison for a thread that reads before it writes: NaN as floats. */
static void fill_poison(void *memory, size_t bytes) {
  if (bytes > 0) {
    memset(memory, 0xff, bytes);
  }
}

void shared_clear(shared *b) {
  for (int i = 0; i < SITES && b->declared[i].site != NULL; i++) {
    free(b->declared[i].memory);
    b->declared[i].site = NULL;
  }
  b->bytes = b->launch_bytes;
  fill_poison(b->launch, b->launch_bytes);
}

void shared_destroy(shared *b) {
  shared_clear(b);
  pthread_mutex_destroy(&b->mutex);
  free(b->launch);
  free(b->slots);
  free(b);
}

static void *find_or_add(const void *site, size_t bytes) {
  shared *b = block_memory;
  int i = 0;
  while (i < SITES && b->declared[i].site != NULL && b->declared[i].site != site) {
    i++;
  }
  if (i == SITES || (b->declared[i].site == NULL && b->bytes + bytes > CUDASIM_SHARED)) {
    return NULL;
  }
  if (b->declared[i].site == NULL) {
    b->declared[i].site = site;
    b->declared[i].memory = malloc(bytes);
    b->bytes += bytes;
    fill_poison(b->declared[i].memory, bytes);
  }
  return b->declared[i].memory;
}

static void require_barriers(const char *what) {
  if (meeting == NULL) {
    fault(LAUNCH_FAILED, what);
  }
}

void *cudasim_shared(const void *site, size_t bytes) {
  require_barriers("shared memory in a kernel that is no DC_BLOCK_KERNEL");
  tsan_ignore(true);
  pthread_mutex_lock(&block_memory->mutex);
  void *memory = find_or_add(site, bytes);
  pthread_mutex_unlock(&block_memory->mutex);
  tsan_ignore(false);
  if (memory == NULL) {
    fault(LAUNCH_FAILED, "too much shared memory");
  }
  return memory;
}

void *cudasim_launch_shared(void) {
  require_barriers("shared memory in a kernel that is no DC_BLOCK_KERNEL");
  return block_memory->launch;
}

void cudasim_sync(int warp) {
  require_barriers("a barrier in a kernel that is no DC_BLOCK_KERNEL");
  wait_at_barrier(warp != 0, true);
}

const unsigned char *cudasim_exchange(const void *own, size_t bytes) {
  require_barriers("a warp's exchange in a kernel that is no DC_BLOCK_KERNEL");
  const uint32_t thread = current->thread;
  tsan_ignore(true);
  unsigned char *slots = block_memory->slots[thread / CUDASIM_WARP][block_memory->exchanges[thread]++ % TURNS];
  memcpy(slots + (size_t)(thread % CUDASIM_WARP) * CUDASIM_SLOT, own, bytes);
  tsan_ignore(false);
  wait_at_barrier(true, false);
  return slots;
}
