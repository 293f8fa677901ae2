/* Between the library and the system: every call by which the library asks for something comes past here (the linker's
 * --wrap, so the library has no hooks), is counted, and can be refused. What was given out and not given back is
 * counted too. */
#ifndef TESTS_SYSTEM_CALLS_H
#define TESTS_SYSTEM_CALLS_H

#include <stdatomic.h>
#include <stdbool.h>

typedef enum fault_kind {
  FAULT_MEMORY,     /* calloc, realloc, aligned_alloc, posix_memalign, mmap */
  FAULT_THREAD,     /* pthread_create */
  FAULT_FILE,       /* memfd_create, ftruncate, fallocate, open, write, fsync, rename */
  FAULT_SOCKET,     /* socket, bind, listen, accept4, connect, getsockopt, poll, sendmsg, recvmsg */
  FAULT_SYSCALL,    /* pidfd_open, futex */
  FAULT_COLLECTIVE, /* a rank's handshake, its end, and staging memory */
  FAULT_KINDS
} fault_kind;

extern const char *const fault_names[FAULT_KINDS];

/* The n-th call of the kind from now on is refused, 0 being the next; negative: none is. */
void fault_inject(fault_kind kind, long n);
/* Whether it was, and in which function. */
const char *fault_injected(void); /* NULL: not yet */
/* While the flag, which processes may share, is up, the library's clock goes ahead with each look at it, so that every
 * deadline passes at once: whoever waits for a rank that will not come need not be waited for. NULL: never. */
void fault_hurry_clock(const atomic_bool *flag);
/* Blocks, mappings and descriptors that the library holds. */
long fault_held_resources(void);

#endif
