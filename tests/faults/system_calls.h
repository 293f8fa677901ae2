/* Between the library and the system: every call by which the library asks for something comes past here (the linker's
 * --wrap, so the library has no hooks), is counted, and can be refused. What was given out and not given back is
 * counted too. */
#ifndef TESTS_SYSTEM_CALLS_H
#define TESTS_SYSTEM_CALLS_H

#include <stdatomic.h>
#include <stdbool.h>

typedef enum seam_kind {
  SEAM_MEMORY,     /* calloc, realloc, aligned_alloc, posix_memalign, mmap */
  SEAM_THREAD,     /* pthread_create */
  SEAM_FILE,       /* memfd_create, ftruncate, fallocate, open, write, fsync, rename */
  SEAM_SOCKET,     /* socket, bind, listen, accept4, connect, getsockopt, poll, sendmsg, recvmsg */
  SEAM_SYSCALL,    /* pidfd_open, futex */
  SEAM_COLLECTIVE, /* a rank's handshake, its end, and staging memory */
  SEAM_KINDS
} seam_kind;

extern const char *const seam_names[SEAM_KINDS];

/* The n-th call of the kind from now on is refused, 0 being the next; negative: none is. */
void seam_refuse(seam_kind kind, long n);
/* Whether it was, and in which function. */
const char *seam_refused(void); /* NULL: not yet */
/* While the flag, which processes may share, is up, the library's clock goes ahead with each look at it, so that every
 * deadline passes at once: whoever waits for a rank that will not come need not be waited for. NULL: never. */
void seam_hurry(const atomic_bool *flag);
/* Blocks, mappings and descriptors that the library holds. */
long seam_held(void);

#endif
