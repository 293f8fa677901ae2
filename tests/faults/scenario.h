/* One rank's use of the library for the tests of refusals: it makes a group, a context and parameters, takes two steps
 * with every kind of operator, and frees all. A call that fails must say so and change nothing, so that the same call
 * works at the second try. Otherwise the group has failed for every rank, and the rank ends. */
#ifndef TESTS_FAULTS_SCENARIO_H
#define TESTS_FAULTS_SCENARIO_H

#include "dc_api.h"

typedef struct ending {
  dc_status first; /* the first failure; DC_OK: there was none */
  dc_status last;  /* the failure that ended the rank; DC_OK: it completed, and all values were right */
  int made;        /* 0: not even the rank's group was made */
  char text[700];  /* of `last`; if the library's answer was wrong, begins with "wrong: " */
} ending;

/* Runs as one rank of a group. Releases comm in every case. folder: where to write a dump; NULL: no dump. */
ending scenario_run(dc_comm *comm, const char *folder);
/* Runs as one rank of a group of processes that it makes; a refusal while making it ends the rank. */
ending scenario_run_process(const char *name, int32_t rank, int32_t world, int64_t timeout_ns);

#endif
