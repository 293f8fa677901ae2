/* Included before a test of the runtime (-include), this runs the test in simulated worlds. run_ranks() runs each
 * scenario for several seeds, with every kind of communicator that fits it. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "sim/sim.h"

/* Reusing an address for another owner would look like a race. The test's writes to this memory are not recorded: it
 * counts as written when it was allocated. */
static inline void *sim_written(size_t bytes) {
  void *ptr = sim_new(bytes);
  sim_writes(ptr, bytes, "the test");
  return memset(ptr, 0, bytes);
}

#define malloc(bytes) sim_written(bytes)
#define calloc(count, bytes) sim_written((count) * (bytes))
#define free(ptr) ((void)(ptr))
#define run_ranks run_ranks_on_threads
#include "harness.h"
#undef run_ranks

#include "sim/sim_ranks.h"

static inline void run_ranks(setup s, void (*body)(rank *r), const void *user) {
  uint64_t first = sim_setting("SIM_SEED", 1), seeds = sim_setting("SIM_SEEDS", s.world > 3 ? 4 : 12);
  for (uint64_t seed = first; seed < first + seeds; seed++) {
    bool no_heap = seed % 3 == 2 && s.config.symmetric_memory == 0;
    const char *failure = sim_ranks(&(sim_options){seed, s.world, no_heap, seed % 5 == 4}, s, body, user);
    if (failure[0] != '\0') {
      fail_msg("%s", failure);
    }
  }
}
