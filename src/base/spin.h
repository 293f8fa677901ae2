/* How long a wait spins before it sleeps. Waking a thread costs more than a short wait, so spinning pays off if the
 * other side runs on another core, and delays that side otherwise. So a wait spins long while that has worked recently;
 * otherwise only an occasional wait does, as a probe. */
#ifndef DC_SPIN_H
#define DC_SPIN_H

#include <stdbool.h>
#include <stdint.h>

/* One for each waiting side, initially zero. Only one thread at a time uses it. */
typedef struct dc__spin {
  uint32_t waits;
  int32_t credit; /* waits that may spin long without success */
} dc__spin;

static inline void dc__cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

/* How many times this wait polls before it sleeps. */
static inline int dc__spin_begin(dc__spin *spin) {
  enum { LONG_SPINS = 256, SHORT_SPINS = 16, PROBE_INTERVAL = 32 };
  return spin->credit > 0 || spin->waits++ % PROBE_INTERVAL == 0 ? LONG_SPINS : SHORT_SPINS;
}

/* Notes whether spinning was enough, and returns it. */
static inline bool dc__spin_end(dc__spin *spin, bool enough) {
  enum { CREDIT = 8 };
  spin->credit = enough ? CREDIT : spin->credit - (spin->credit > 0);
  return enough;
}

#endif
