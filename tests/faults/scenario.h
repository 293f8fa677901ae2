/* One rank's way through the library, for the tests of refusals: it makes a group, a context, parameters, two steps of
 * every kind of operator, and frees all. A call that fails must say so and change nothing, so that the same call works
 * at the second try. Or the group has failed, for every rank, and the rank ends. */
#ifndef TESTS_FAULTS_SCENARIO_H
#define TESTS_FAULTS_SCENARIO_H

#include "dc_api.h"

typedef struct ending {
  dc_status first; /* the first failure; DC_OK: none */
  dc_status last;  /* the failure that ended the rank; DC_OK: it reached its end, and all values were right */
  int made;        /* 0: the rank's group was not even made */
  char text[700];  /* of `last`, or what was wrong with the library's answer, which then begins with "wrong: " */
} ending;

/* As one rank of a group. comm is released in every case. folder: for a dump; NULL: none. */
ending scenario_run(dc_comm *comm, const char *folder);
/* As one rank of a group of processes that is made here; a refusal there ends the rank. */
ending scenario_run_process(const char *name, int32_t rank, int32_t world, int64_t timeout_ns);

#endif
