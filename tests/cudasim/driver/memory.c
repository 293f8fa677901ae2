/* Memory of the simulated device: addresses that the host cannot touch, each of which stands for memory that only the
 * driver knows. Also pinned memory, which both can access. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cudasim_internal.h"

enum { BLOCKS = 4096, PAGE = 4096 };
static const size_t SPACE = (size_t)16 << 30;

typedef struct block {
  char *ptr;
  size_t bytes;
  dc__cu_pool pool; /* NULL: pinned memory */
} block;

pthread_mutex_t memory_mutex = PTHREAD_MUTEX_INITIALIZER; /* protects all below */
static block blocks[BLOCKS];                              /* the device's by address, then pinned ones */
static int device_count, pinned_count;
static size_t most;  /* bytes of a card's memory */
static char *space;  /* the device's addresses */
static char *behind; /* their contents; kept until the process ends, since mapping pages anew is slow */

void memory_reset(void) {
  pthread_mutex_lock(&memory_mutex);
  most = (size_t)from_environment("CUDASIM_MIB", (int)(SPACE >> 20)) << 20;
  if (space == NULL) {
    space = mmap(NULL, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    behind = mmap(NULL, SPACE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  pthread_mutex_unlock(&memory_mutex);
}

static void insert(int at, block b) {
  memmove(&blocks[at + 1], &blocks[at], sizeof *blocks * (size_t)(device_count + pinned_count - at));
  blocks[at] = b;
}

static void remove_block(int at) {
  memmove(&blocks[at], &blocks[at + 1], sizeof *blocks * (size_t)(device_count + pinned_count - at - 1));
}

static size_t used(void) {
  size_t bytes = 0;
  for (int i = 0; i < device_count; i++) {
    bytes += blocks[i].bytes;
  }
  return bytes;
}

int memory_alloc(dc__cu_pool pool, size_t bytes, dc__cu_ptr *ptr) {
  size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  int error = DC__CU_OUT_OF_MEMORY;
  pthread_mutex_lock(&memory_mutex);
  char *at = space;
  int i = 0;
  while (i < device_count && (size_t)(blocks[i].ptr - at) < size) {
    at = blocks[i].ptr + (blocks[i].bytes + PAGE - 1) / PAGE * PAGE;
    i++;
  }
  if (size <= SPACE - (size_t)(at - space) && size <= most - used() && device_count + pinned_count < BLOCKS) {
    insert(i, (block){at, bytes, pool});
    device_count++;
    pool->refs++;
    memset(behind + (at - space), 0xa5, bytes); /* poison: no caller may rely on zeros */
    *ptr = (uintptr_t)at;
    error = 0;
  }
  pthread_mutex_unlock(&memory_mutex);
  count_live(error == 0);
  return error;
}

int cuMemAllocFromPoolAsync(dc__cu_ptr *ptr, size_t bytes, dc__cu_pool pool, dc__cu_stream stream) {
  ENTER(true);
  (void)stream;
  return pool == NULL || bytes == 0 ? INVALID_VALUE : memory_alloc(pool, bytes, ptr);
}

int memory_free(const void *ptr, bool pinned) {
  int error = INVALID_VALUE;
  pthread_mutex_lock(&memory_mutex);
  for (int i = 0; i < device_count + pinned_count; i++) {
    if (blocks[i].ptr == ptr && (blocks[i].pool == NULL) == pinned) {
      if (pinned) {
        free(blocks[i].ptr);
      } else {
        pool_drop(blocks[i].pool);
      }
      remove_block(i);
      pinned_count -= pinned;
      device_count -= !pinned;
      error = 0;
      break;
    }
  }
  pthread_mutex_unlock(&memory_mutex);
  count_live(error == 0 ? -1 : 0);
  return error;
}

int cuMemFreeAsync(dc__cu_ptr ptr, dc__cu_stream stream) {
  (void)stream;
  int error = enter(__func__, true);
  int freed = memory_free((const void *)(uintptr_t)ptr, false); /* also after the device is lost */
  return error != 0 ? error : freed;
}

int cuMemHostAlloc(void **ptr, size_t bytes, unsigned flags) {
  ENTER(true);
  int error = bytes == 0 || flags > 7 ? INVALID_VALUE : unsafe();
  void *fresh = error != 0 ? NULL : aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
  if (fresh == NULL) {
    return error != 0 ? error : DC__CU_OUT_OF_MEMORY;
  }
  pthread_mutex_lock(&memory_mutex);
  blocks[device_count + pinned_count++] = (block){fresh, bytes, NULL};
  pthread_mutex_unlock(&memory_mutex);
  count_live(1);
  *ptr = fresh;
  return 0;
}

int cuMemFreeHost(void *ptr) {
  int error = enter(__func__, true);
  int freed = memory_free(ptr, true);
  return error != 0 ? error : freed;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  ENTER(true);
  pthread_mutex_lock(&memory_mutex);
  *total = most;
  *free_bytes = most - used();
  pthread_mutex_unlock(&memory_mutex);
  return 0;
}

/* Returns the block in which the bytes lie; NULL: none. */
static const block *find(const void *ptr, size_t bytes) {
  for (int i = 0; i < device_count + pinned_count; i++) {
    uintptr_t offset = (uintptr_t)ptr - (uintptr_t)blocks[i].ptr;
    if (offset <= blocks[i].bytes && bytes <= blocks[i].bytes - offset) {
      return &blocks[i];
    }
  }
  return NULL;
}

static void *resolve_on_device(int device, const void *ptr, size_t bytes, bool any_host) {
  char *at = (char *)(uintptr_t)ptr;
  if (any_host && (uintptr_t)at - (uintptr_t)space >= SPACE) {
    return at;
  }
  pthread_mutex_lock(&memory_mutex);
  const block *b = find(ptr, bytes);
  bool seen = b != NULL && (b->pool == NULL || pool_is_open(b->pool, device));
  void *place = !seen ? NULL : b->pool == NULL ? at : behind + (at - space);
  pthread_mutex_unlock(&memory_mutex);
  return place;
}

void *resolve_pointer(const void *ptr, size_t bytes, bool any_host) {
  return resolve_on_device(running_device, ptr, bytes, any_host);
}

void *resolve_block(const void *ptr, size_t *bytes) {
  void *place = resolve_pointer(ptr, 1, false);
  pthread_mutex_lock(&memory_mutex);
  const block *b = place == NULL ? NULL : find(ptr, 1);
  *bytes = b == NULL ? 0 : b->bytes - ((uintptr_t)ptr - (uintptr_t)b->ptr);
  pthread_mutex_unlock(&memory_mutex);
  return b == NULL ? NULL : place;
}

void *cudasim_host_ptr(const void *ptr) {
  return resolve_on_device(ANYBODY, ptr, 0, true);
}

int cuPointerGetAttribute(void *value, int attribute, dc__cu_ptr ptr) {
  ENTER(true);
  pthread_mutex_lock(&memory_mutex);
  const block *b = find((const void *)(uintptr_t)ptr, 1);
  bool open = b != NULL && (b->pool == NULL || pool_is_open(b->pool, cudasim_current()));
  pthread_mutex_unlock(&memory_mutex);
  *(int *)value = open ? DC__CU_ACCESS_ALL : 0;
  return b == NULL || attribute != DC__CU_POINTER_ACCESS ? INVALID_VALUE : 0;
}
