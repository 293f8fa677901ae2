/* Hosts may trap floating-point exceptions: Free Pascal does by default, and feenableexcept() or -ffpe-trap ask for it.
 * The library computes with infinities and NaN, and overflows on the way to an error, so its calls mask the traps. */
#ifndef DC_BASE_TRAPS_H
#define DC_BASE_TRAPS_H

#include <fenv.h>
#include <stdbool.h>

typedef struct dc__traps {
  fenv_t host; /* the host's environment, kept while its traps are masked */
  bool masked;
} dc__traps;

/* Whether a floating-point exception would trap. If none would, this check is all that a call pays. */
static inline bool dc__traps_are_set(void) {
#if defined(__x86_64__)
  unsigned short x87;
  unsigned int sse;
  __asm__ volatile("fnstcw %0\n\tstmxcsr %1" : "=m"(x87), "=m"(sse)::"memory");
  return (x87 & 0x3f) != 0x3f || (sse & 0x1f80) != 0x1f80;
#elif defined(__aarch64__)
  unsigned long long control;
  __asm__ volatile("mrs %0, fpcr" : "=r"(control)::"memory");
  return (control & 0x9f00) != 0;
#else
  return true; /* C has no query for it */
#endif
}

static inline void dc__traps_mask(dc__traps *traps) {
  traps->masked = dc__traps_are_set();
  if (__builtin_expect(traps->masked, false)) {
    traps->masked = feholdexcept(&traps->host) == 0;
  }
}

/* Restores the host's environment with its exception flags, and raises no exception. */
static inline void dc__traps_restore(const dc__traps *traps) {
  if (__builtin_expect(traps->masked, false)) {
    fesetenv(&traps->host);
  }
}

/* Masks traps until the function returns. Comes first in each public function that computes or waits. Threads inherit
 * their creator's masks, so traps stay masked in the library's threads. scripts/checks/check_traps.py knows which
 * functions need this. */
#define DC__WITHOUT_TRAPS                                               \
  __attribute__((cleanup(dc__traps_restore))) dc__traps dc__host_traps; \
  dc__traps_mask(&dc__host_traps)

#endif
