/* Memory of the simulated device: addresses that the host cannot touch, each standing for a place that only the driver
 * knows; and pinned memory, which both can. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "inside.h"

enum { BLOCKS = 4096, PAGE = 4096 };
static const size_t SPACE = (size_t)16 << 30;

typedef struct block {
  char *ptr;
  size_t bytes;
  bool pinned;
} block;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* all below */
static block blocks[BLOCKS];                              /* the device's by address, then pinned ones */
static int device_count, pinned_count;
static char *space;  /* the device's addresses */
static char *behind; /* what they stand for */

void memory_reset(void) {
  pthread_mutex_lock(&mutex);
  if (space == NULL) {
    space = mmap(NULL, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    behind = mmap(NULL, SPACE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  pthread_mutex_unlock(&mutex);
}

static void insert(int at, block b) {
  memmove(&blocks[at + 1], &blocks[at], sizeof *blocks * (size_t)(device_count + pinned_count - at));
  blocks[at] = b;
}

static void take_out(int at) {
  memmove(&blocks[at], &blocks[at + 1], sizeof *blocks * (size_t)(device_count + pinned_count - at - 1));
}

int cuMemAllocFromPoolAsync(dc__cu_ptr *ptr, size_t bytes, dc__cu_pool pool, dc__cu_stream stream) {
  ENTER(true);
  (void)stream;
  size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  int error = pool == NULL ? INVALID_VALUE : DC__CU_OUT_OF_MEMORY;
  pthread_mutex_lock(&mutex);
  char *at = space;
  int i = 0;
  while (i < device_count && (size_t)(blocks[i].ptr - at) < size) {
    at = blocks[i].ptr + (blocks[i].bytes + PAGE - 1) / PAGE * PAGE;
    i++;
  }
  if (pool != NULL && size <= SPACE - (size_t)(at - space) && device_count + pinned_count < BLOCKS) {
    insert(i, (block){at, bytes, false});
    device_count++;
    memset(behind + (at - space), 0xa5, bytes); /* nobody may rely on zeros */
    *ptr = (uintptr_t)at;
    error = 0;
  }
  pthread_mutex_unlock(&mutex);
  count_live(error == 0);
  return error;
}

static int free_block(const void *ptr, bool pinned) {
  int error = INVALID_VALUE;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < device_count + pinned_count; i++) {
    if (blocks[i].ptr == ptr && blocks[i].pinned == pinned) {
      if (pinned) {
        free(blocks[i].ptr);
      } else {
        madvise(behind + (blocks[i].ptr - space), blocks[i].bytes, MADV_DONTNEED);
      }
      take_out(i);
      pinned_count -= pinned;
      device_count -= !pinned;
      error = 0;
      break;
    }
  }
  pthread_mutex_unlock(&mutex);
  count_live(error == 0 ? -1 : 0);
  return error;
}

int cuMemFreeAsync(dc__cu_ptr ptr, dc__cu_stream stream) {
  (void)stream;
  int error = enter(__func__, true);
  int freed = free_block((const void *)(uintptr_t)ptr, false); /* a lost device's memory goes with the process */
  return error != 0 ? error : freed;
}

int cuMemHostAlloc(void **ptr, size_t bytes, unsigned flags) {
  ENTER(true);
  int error = unsafe();
  (void)flags;
  void *fresh = error != 0 ? NULL : aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
  if (fresh == NULL) {
    return error != 0 ? error : DC__CU_OUT_OF_MEMORY;
  }
  pthread_mutex_lock(&mutex);
  blocks[device_count + pinned_count++] = (block){fresh, bytes, true};
  pthread_mutex_unlock(&mutex);
  count_live(1);
  *ptr = fresh;
  return 0;
}

int cuMemFreeHost(void *ptr) {
  int error = enter(__func__, true);
  int freed = free_block(ptr, true);
  return error != 0 ? error : freed;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  ENTER(true);
  pthread_mutex_lock(&mutex);
  size_t used = 0;
  for (int i = 0; i < device_count; i++) {
    used += blocks[i].bytes;
  }
  pthread_mutex_unlock(&mutex);
  *total = SPACE;
  *free_bytes = SPACE - used;
  return 0;
}

int cuMemPoolCreate(dc__cu_pool *pool, const dc__cu_pool_props *props) {
  ENTER(true);
  if (props->alloc_type != 1 || props->location.type != 1) {
    return INVALID_VALUE;
  }
  *pool = (dc__cu_pool)(void *)&blocks;
  count_live(1);
  return 0;
}

int cuMemPoolDestroy(dc__cu_pool pool) {
  int error = enter(__func__, true);
  (void)pool;
  count_live(-1);
  return error;
}

void *place_of(const void *ptr, size_t bytes, bool any_host) {
  char *at = (char *)(uintptr_t)ptr;
  bool is_devices = (uintptr_t)at - (uintptr_t)space < SPACE;
  void *place = any_host && !is_devices ? at : NULL;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < device_count + pinned_count && place == NULL; i++) {
    uintptr_t offset = (uintptr_t)at - (uintptr_t)blocks[i].ptr;
    if (offset <= blocks[i].bytes && bytes <= blocks[i].bytes - offset) {
      place = blocks[i].pinned ? at : behind + (at - space);
    }
  }
  pthread_mutex_unlock(&mutex);
  return place;
}

void *cudasim_look(const void *ptr) {
  return place_of(ptr, 0, true);
}
