/* Stands between the library and the system: every call by which the library asks for a resource goes through here, is
 * counted, and can be refused. The linker redirects it (--wrap), so the library needs no hooks. Resources that are not
 * released are counted too. */
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
  FAULT_COLLECTIVE, /* a rank's handshake, its end, and its staging memory */
  FAULT_KINDS
} fault_kind;

extern const char *const fault_names[FAULT_KINDS];

/* Refuses the n-th call of the kind from now on, 0 being the next; negative: refuses none. */
void fault_inject(fault_kind kind, long n);
/* Returns the function whose call was refused. */
const char *fault_injected(void); /* NULL: not yet */
/* While the flag is set, each read of the library's clock advances it, so that every deadline passes at once. A test
 * then need not wait for a rank that never comes. Processes may share the flag. NULL: never. */
void fault_hurry_clock(const atomic_bool *flag);
/* Returns the number of blocks, mappings and descriptors that the library holds. */
long fault_held_resources(void);

#endif
