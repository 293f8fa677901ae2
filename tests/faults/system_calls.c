#define _GNU_SOURCE /* memfd_create, accept4 */
#include "system_calls.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "comm/shm/shm.h"

const char *const fault_names[FAULT_KINDS] = {"memory", "thread", "file", "socket", "syscall", "collective"};

static atomic_int chosen;
static atomic_long countdown = -1;
static const char *_Atomic refused;
static atomic_long held;

void fault_inject(fault_kind kind, long n) {
  atomic_store(&refused, NULL);
  atomic_store(&chosen, (int)kind);
  atomic_store(&countdown, n);
}

const char *fault_injected(void) {
  return atomic_load(&refused);
}

long fault_held_resources(void) {
  return atomic_load(&held);
}

static bool refuse(fault_kind kind, const char *function, int error) {
  if (atomic_load(&chosen) != (int)kind || atomic_load(&countdown) < 0 || atomic_fetch_sub(&countdown, 1) != 0) {
    return false;
  }
  atomic_store(&refused, function);
  errno = error;
  return true;
}

/* Counts a pointer or a descriptor that is held. */
static void *kept(void *ptr) {
  atomic_fetch_add(&held, ptr != NULL && ptr != MAP_FAILED);
  return ptr;
}

static int kept_fd(int fd) {
  atomic_fetch_add(&held, fd >= 0);
  return fd;
}

/* Declares the real function, and begins the definition of the test's, under the names that the linker uses. */
#define WRAP(type, name, ...)      \
  type __real_##name(__VA_ARGS__); \
  type __wrap_##name(__VA_ARGS__); \
  type __wrap_##name(__VA_ARGS__)

/* ---- time ---- */

static const atomic_bool *hurry;
static atomic_llong ahead;

void fault_hurry_clock(const atomic_bool *flag) {
  hurry = flag;
}

static bool hurries(void) {
  return hurry != NULL && atomic_load(hurry);
}

WRAP(int64_t, dc__now_ns, void) {
  const long long step = 1000000000000; /* about 17 minutes */
  return __real_dc__now_ns() + (hurries() ? atomic_fetch_add(&ahead, step) + step : atomic_load(&ahead));
}

/* ---- memory ---- */

WRAP(void *, calloc, size_t count, size_t bytes) {
  return refuse(FAULT_MEMORY, "calloc", ENOMEM) ? NULL : kept(__real_calloc(count, bytes));
}

WRAP(void *, realloc, void *ptr, size_t bytes) {
  if (refuse(FAULT_MEMORY, "realloc", ENOMEM)) {
    return NULL;
  }
  return ptr == NULL ? kept(__real_realloc(NULL, bytes)) : __real_realloc(ptr, bytes);
}

WRAP(void *, aligned_alloc, size_t align, size_t bytes) {
  return refuse(FAULT_MEMORY, "aligned_alloc", ENOMEM) ? NULL : kept(__real_aligned_alloc(align, bytes));
}

WRAP(void, free, void *ptr) {
  atomic_fetch_sub(&held, ptr != NULL);
  __real_free(ptr);
}

/* Counts mapped bytes in pages, since a mapping may be unmapped in pieces. */
WRAP(void *, mmap64, void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (refuse(FAULT_MEMORY, "mmap", ENOMEM)) {
    return MAP_FAILED;
  }
  void *ptr = __real_mmap64(at, bytes, protection, flags, fd, offset);
  atomic_fetch_add(&held, ptr != MAP_FAILED ? (long)((bytes + 4095) / 4096) : 0);
  return ptr;
}

WRAP(int, munmap, void *ptr, size_t bytes) {
  atomic_fetch_sub(&held, (long)((bytes + 4095) / 4096));
  return __real_munmap(ptr, bytes);
}

WRAP(int, posix_memalign, void **ptr, size_t align, size_t bytes) {
  if (refuse(FAULT_MEMORY, "posix_memalign", 0)) {
    return ENOMEM;
  }
  int error = __real_posix_memalign(ptr, align, bytes);
  (void)kept(error == 0 ? *ptr : NULL);
  return error;
}

/* ---- threads ---- */

WRAP(int, pthread_create, pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *arg) {
  return refuse(FAULT_THREAD, "pthread_create", EAGAIN) ? EAGAIN : __real_pthread_create(thread, attributes, body, arg);
}

/* ---- files ---- */

WRAP(int, memfd_create, const char *name, unsigned flags) {
  return refuse(FAULT_FILE, "memfd_create", EMFILE) ? -1 : kept_fd(__real_memfd_create(name, flags));
}

WRAP(int, ftruncate64, int fd, off_t bytes) {
  return refuse(FAULT_FILE, "ftruncate", EINVAL) ? -1 : __real_ftruncate64(fd, bytes);
}

/* Punching a hole frees memory, so its result is not checked. */
WRAP(int, fallocate64, int fd, int mode, off_t offset, off_t bytes) {
  return mode == 0 && refuse(FAULT_FILE, "fallocate", ENOSPC) ? -1 : __real_fallocate64(fd, mode, offset, bytes);
}

WRAP(int, open64, const char *path, int flags, mode_t mode) {
  return refuse(FAULT_FILE, "open", EACCES) ? -1 : kept_fd(__real_open64(path, flags, mode));
}

WRAP(ssize_t, write, int fd, const void *data, size_t bytes) {
  return refuse(FAULT_FILE, "write", ENOSPC) ? -1 : __real_write(fd, data, bytes);
}

WRAP(int, fsync, int fd) {
  return refuse(FAULT_FILE, "fsync", EIO) ? -1 : __real_fsync(fd);
}

WRAP(int, rename, const char *from, const char *to) {
  return refuse(FAULT_FILE, "rename", EACCES) ? -1 : __real_rename(from, to);
}

WRAP(int, close, int fd) {
  atomic_fetch_sub(&held, 1);
  return __real_close(fd);
}

/* ---- sockets ---- */

WRAP(int, socket, int domain, int type, int protocol) {
  return refuse(FAULT_SOCKET, "socket", EMFILE) ? -1 : kept_fd(__real_socket(domain, type, protocol));
}

WRAP(int, bind, int fd, const struct sockaddr *address, socklen_t length) {
  return refuse(FAULT_SOCKET, "bind", EACCES) ? -1 : __real_bind(fd, address, length);
}

WRAP(int, listen, int fd, int backlog) {
  return refuse(FAULT_SOCKET, "listen", ENOBUFS) ? -1 : __real_listen(fd, backlog);
}

WRAP(int, accept4, int fd, struct sockaddr *address, socklen_t *length, int flags) {
  return refuse(FAULT_SOCKET, "accept4", EMFILE) ? -1 : kept_fd(__real_accept4(fd, address, length, flags));
}

WRAP(int, connect, int fd, const struct sockaddr *address, socklen_t length) {
  return refuse(FAULT_SOCKET, "connect", EACCES) ? -1 : __real_connect(fd, address, length);
}

WRAP(int, getsockopt, int fd, int level, int option, void *value, socklen_t *length) {
  return refuse(FAULT_SOCKET, "getsockopt", ENOBUFS) ? -1 : __real_getsockopt(fd, level, option, value, length);
}

/* Waits in slices, so that time may be skipped meanwhile. */
WRAP(int, poll, struct pollfd *fds, nfds_t count, int timeout) {
  enum { SLICE_MS = 10 };
  if (refuse(FAULT_SOCKET, "poll", ENOMEM)) {
    return -1;
  }
  int ready;
  do {
    int slice = timeout < 0 || timeout > SLICE_MS ? SLICE_MS : timeout;
    ready = __real_poll(fds, count, slice);
    timeout -= timeout < 0 ? 0 : slice;
  } while (ready == 0 && timeout != 0 && !hurries());
  return ready;
}

WRAP(ssize_t, sendmsg, int fd, const struct msghdr *message, int flags) {
  return refuse(FAULT_SOCKET, "sendmsg", ENOBUFS) ? -1 : __real_sendmsg(fd, message, flags);
}

WRAP(ssize_t, recvmsg, int fd, struct msghdr *message, int flags) {
  if (refuse(FAULT_SOCKET, "recvmsg", ENOMEM)) {
    return -1;
  }
  ssize_t got = __real_recvmsg(fd, message, flags);
  for (struct cmsghdr *h = got < 0 ? NULL : CMSG_FIRSTHDR(message); h != NULL; h = CMSG_NXTHDR(message, h)) {
    atomic_fetch_add(&held, (long)((h->cmsg_len - CMSG_LEN(0)) / sizeof(int)));
  }
  return got;
}

/* ---- system calls without a function ---- */

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
/* Reads six arguments, though most callers pass fewer. */
__attribute__((no_sanitize_address)) long __wrap_syscall(long number, ...) {
  long a[6];
  va_list args;
  va_start(args, number);
  for (int i = 0; i < 6; i++) {
    a[i] = va_arg(args, long);
  }
  va_end(args);
  if (refuse(FAULT_SYSCALL, "syscall", ENOSYS)) {
    return -1;
  }
  long result = __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  return number == SYS_pidfd_open ? kept_fd((int)result) : result;
}

/* ---- collectives ---- */

static dc_status broken(const char *function) {
  return dc__fail(DC_E_SYSTEM, "%s was refused", function);
}

WRAP(dc_status, dc__shm_wait_posted, dc__shm *self, const dc__coll *coll, uint32_t seq) {
  return refuse(FAULT_COLLECTIVE, "a handshake", 0) ? broken("a handshake")
                                                    : __real_dc__shm_wait_posted(self, coll, seq);
}

WRAP(dc_status, dc__shm_wait_done, dc__shm *self, const dc__coll *coll, uint32_t seq) {
  return refuse(FAULT_COLLECTIVE, "a handshake's end", 0) ? broken("a handshake's end")
                                                          : __real_dc__shm_wait_done(self, coll, seq);
}

WRAP(dc_status, dc__shm_staging, dc__shm_group *group, int32_t channel, size_t bytes, char **stage) {
  return refuse(FAULT_COLLECTIVE, "staging memory", 0) ? broken("staging memory")
                                                       : __real_dc__shm_staging(group, channel, bytes, stage);
}

WRAP(dc_status, dc__shm_channel_join, dc__shm_group *group, int32_t *channel) {
  return refuse(FAULT_COLLECTIVE, "a channel", 0) ? broken("a channel") : __real_dc__shm_channel_join(group, channel);
}
