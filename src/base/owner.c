/* The process that an object belongs to. A child made by fork() has copies of all objects, but none of their threads.
 * Its locks may be held by threads that it lacks, and its writes to shared memory would reach the parent's peers. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, MADV_WIPEONFORK */
#include <sys/mman.h>
#include <unistd.h>

#include "base/base.h"

enum { PAGE = 4096 };

void dc__owner_init(dc__owner *owner) {
  *owner = (dc__owner){.pid = getpid()};
#ifdef MADV_WIPEONFORK
  unsigned char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    return; /* the process ID is compared instead */
  }
  if (madvise(page, PAGE, MADV_WIPEONFORK) != 0) {
    munmap(page, PAGE);
    return;
  }
  *page = 1;
  owner->page = page;
#endif
}

void dc__owner_destroy(dc__owner *owner) {
  if (owner->page != NULL) {
    munmap((void *)(uintptr_t)owner->page, PAGE);
  }
  *owner = (dc__owner){0};
}

bool dc__owner_is_forked(const dc__owner *owner) {
  if (owner->page != NULL) {
    return *owner->page == 0;
  }
  return owner->pid != 0 && owner->pid != getpid();
}

dc_status dc__owner_check(const char *function, const char *what, const dc__owner *owner) {
  if (!dc__owner_is_forked(owner)) {
    return DC_OK;
  }
  return dc__fail(DC_E_STATE,
                  "%s: the %s belongs to process %d, which forked this one (%d); a child makes objects of its own",
                  function, what, (int)owner->pid, (int)getpid());
}
