/* The harness's ranks on the simulated device: the same rank, setup, CHECK and OK, and a seed. */
#ifndef TESTS_SIM_RANKS_H
#define TESTS_SIM_RANKS_H

#include <inttypes.h>

#include "harness.h"
#include "sim/sim.h"

typedef struct sim_job {
  const setup *s;
  void (*body)(rank *r);
  rank ranks[SIM_RANKS];
} sim_job;

static inline void sim_rank_main(int32_t index, void *user) {
  sim_job *job = user;
  rank *r = &job->ranks[index];
  dc_status status = sim_device_open(&r->device);
  if (status == DC_OK) {
    status = sim_comm_open(&r->comm);
  }
  live(r, job->s, job->body, status);
}

/* Runs body on every rank of a simulated world. Returns "", or the first failure with the seed: a report of the
 * checker, or a rank's failed CHECK. */
static inline const char *sim_ranks(const sim_options *options, setup s, void (*body)(rank *r), const void *user) {
  static char failure[1200];
  sim_job job = {.s = &s, .body = body};
  s.config.struct_size = sizeof s.config;
  for (int32_t i = 0; i < options->world; i++) {
    job.ranks[i].rank = i;
    job.ranks[i].world = options->world;
    job.ranks[i].user = user;
  }
  if (!sim_run(options, sim_rank_main, &job)) {
    return sim_report();
  }
  failure[0] = '\0';
  for (int pass = 0; pass < 2; pass++) { /* first looks for a rank that failed by itself */
    for (int32_t i = 0; i < options->world && failure[0] == '\0'; i++) {
      const char *text = job.ranks[i].failure;
      if (text[0] != '\0' && (pass == 1 || strstr(text, "abort") == NULL)) {
        snprintf(failure, sizeof failure, "seed %" PRIu64 ": %s", options->seed, text);
      }
    }
  }
  return failure;
}

/* How many seeds a test runs, SIM_SEEDS in the environment or the test's own number; and the first one. */
static inline uint64_t sim_setting(const char *name, uint64_t usual) {
  const char *text = getenv(name);
  return text == NULL || text[0] == '\0' ? usual : strtoull(text, NULL, 10);
}

#endif
