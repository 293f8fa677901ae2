/* Memory that peers can read: a sparse memory file. fallocate() fills its blocks, and punches holes to free them. */
#define _GNU_SOURCE /* memfd_create, fallocate */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "comm/shm/shm.h"

static size_t round_up_to_pages(size_t bytes) {
  return (bytes + DC__SHM_PAGE_BYTES - 1) & ~(size_t)(DC__SHM_PAGE_BYTES - 1);
}

/* Signals may interrupt fallocate(), even repeatedly for large blocks. */
static int fill_file(int fd, size_t offset, size_t bytes) {
  int result;
  do {
    result = fallocate(fd, 0, (off_t)offset, (off_t)bytes);
  } while (result != 0 && errno == EINTR);
  return result;
}

/* Past the limit the kernel sends SIGXFSZ, which by default ends the process. */
static dc_status check_limit(const char *call, size_t bytes) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur) {
    return DC_OK;
  }
  return dc__fail(DC_E_SYSTEM,
                  "%s: a memory file of %zu bytes: the process's limit for files (ulimit -f) is %zu bytes "
                  "(options.heap_bytes sets the heap's size)",
                  call, bytes, (size_t)limit.rlim_cur);
}

dc_status dc__shm_file_create(const char *label, size_t bytes, int *fd) {
  DC__TRY(check_limit("dc_comm_create_processes", bytes));
  int file = dc__above_streams(memfd_create(label, MFD_CLOEXEC));
  if (file < 0) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: no memory file: %s", strerror(errno));
  }
  if (ftruncate(file, (off_t)bytes) != 0) {
    int error = errno;
    close(file);
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: a memory file of %zu bytes: %s", bytes, strerror(error));
  }
  *fd = file;
  return DC_OK;
}

/* A mapping takes addresses, not memory, and this limit is what makes them scarce. Callers of a launcher's group choose
 * no heap_bytes, but they can raise the limit. */
static dc_status fail_to_map(const char *call, size_t bytes, int error) {
  struct rlimit limit;
  if (error != ENOMEM || getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return dc__fail(DC_E_NO_MEMORY, "%s: mapping %zu bytes: %s (options.heap_bytes limits it)", call, bytes,
                    strerror(error));
  }
  return dc__fail(DC_E_NO_MEMORY,
                  "%s: mapping %zu bytes: the process's limit for addresses (ulimit -v) is %zu bytes, and a rank maps "
                  "every rank's heap (options.heap_bytes sets its size; 0: the machine's memory)",
                  call, bytes, (size_t)limit.rlim_cur);
}

dc_status dc__shm_file_map(const char *call, int fd, size_t offset, size_t bytes, bool fill, void **base) {
  if (fill) {
    DC__TRY(check_limit(call, offset + bytes));
  }
  if (fill && fill_file(fd, offset, bytes) != 0) {
    return dc__fail(DC_E_NO_MEMORY, "%s: %zu bytes of shared memory: %s", call, bytes, strerror(errno));
  }
  void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, (off_t)offset);
  if (map == MAP_FAILED) {
    return fail_to_map(call, bytes, errno);
  }
  *base = map;
  return DC_OK;
}

dc_status dc__shm_heap_init(dc__shm_heap *heap, size_t reserve) {
  heap->fd = -1;
  if (pthread_mutex_init(&heap->mutex, NULL) != 0) {
    return dc__fail(DC_E_SYSTEM, "a heap's mutex could not be made");
  }
  if (reserve == 0) {
    return DC_OK;
  }
  heap->reserve = round_up_to_pages(reserve);
  dc_status status = dc__shm_file_create("libdc-heap", heap->reserve, &heap->fd);
  if (status == DC_OK) {
    void *base = NULL;
    status = dc__shm_file_map("dc_comm_create_processes", heap->fd, 0, heap->reserve, false, &base);
    heap->base = base;
  }
  if (status != DC_OK) {
    dc__shm_heap_destroy(heap);
  }
  return status;
}

void dc__shm_heap_destroy(dc__shm_heap *heap) {
  if (heap->base != NULL) {
    munmap(heap->base, heap->reserve);
  }
  if (heap->fd >= 0) {
    close(heap->fd);
  }
  dc__free(heap->blocks);
  pthread_mutex_destroy(&heap->mutex);
}

static dc_status alloc_anonymous(size_t bytes, void **ptr) {
  void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) {
    return dc__fail(DC_E_NO_MEMORY, "%zu bytes of shared memory: %s", bytes, strerror(errno));
  }
  *ptr = map;
  return DC_OK;
}

/* First fit: blocks are few and large, since arenas subdivide them. */
static dc_status alloc_in_file(dc__shm_heap *heap, size_t bytes, void **ptr) {
  size_t offset = 0;
  int64_t at = 0;
  while (at < heap->count && heap->blocks[at].offset - offset < bytes) {
    offset = heap->blocks[at].offset + heap->blocks[at].bytes;
    at++;
  }
  if (bytes > heap->reserve || offset > heap->reserve - bytes) {
    return dc__fail(DC_E_NO_MEMORY,
                    "%zu bytes of shared memory: the heap has %zu (options.heap_bytes), and too little is free", bytes,
                    heap->reserve);
  }
  void *blocks = heap->blocks;
  if (!dc__array_reserve(&blocks, &heap->capacity, heap->count + 1, sizeof *heap->blocks)) {
    return DC_E_NO_MEMORY;
  }
  heap->blocks = blocks;
  if (fill_file(heap->fd, offset, bytes) != 0) {
    return dc__fail(DC_E_NO_MEMORY, "%zu bytes of shared memory: %s", bytes, strerror(errno));
  }
  memmove(&heap->blocks[at + 1], &heap->blocks[at], (size_t)(heap->count - at) * sizeof *heap->blocks);
  heap->blocks[at] = (dc__shm_block){offset, bytes};
  heap->count++;
  *ptr = heap->base + offset;
  return DC_OK;
}

dc_status dc__shm_heap_alloc(dc__shm_heap *heap, size_t bytes, void **ptr) {
  if (bytes > SIZE_MAX / 2) {
    return dc__fail(DC_E_NO_MEMORY, "%zu bytes of shared memory", bytes);
  }
  bytes = bytes > 0 ? round_up_to_pages(bytes) : DC__SHM_PAGE_BYTES;
  if (heap->base == NULL) {
    return alloc_anonymous(bytes, ptr);
  }
  pthread_mutex_lock(&heap->mutex);
  dc_status status = alloc_in_file(heap, bytes, ptr);
  pthread_mutex_unlock(&heap->mutex);
  return status;
}

void dc__shm_heap_free(dc__shm_heap *heap, void *ptr, size_t bytes) {
  bytes = bytes > 0 ? round_up_to_pages(bytes) : DC__SHM_PAGE_BYTES;
  if (heap->base == NULL) {
    munmap(ptr, bytes);
    return;
  }
  size_t offset = (size_t)((char *)ptr - heap->base);
  pthread_mutex_lock(&heap->mutex);
  for (int64_t i = 0; i < heap->count; i++) {
    if (heap->blocks[i].offset == offset) {
      memmove(&heap->blocks[i], &heap->blocks[i + 1], (size_t)(heap->count - i - 1) * sizeof *heap->blocks);
      heap->count--;
      break;
    }
  }
  /* The hole gives the memory back and reads as zero. */
  (void)fallocate(heap->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes);
  pthread_mutex_unlock(&heap->mutex);
}
