/* A communicator over the caller's collectives: declarations shared by its files. */
#ifndef DC_COMM_EXTERNAL_H
#define DC_COMM_EXTERNAL_H

#include "comm/host_transport.h"

/* The copies of one communicator, which fail together. A watchdog thread enforces the callbacks' deadlines. */
typedef struct dc__external_group {
  atomic_int refs;
  atomic_int failed;
  pthread_mutex_t mutex; /* guards what follows, and the members' `running` */
  pthread_cond_t changed;
  bool stopping;
  bool aborted; /* the callers' abort has been called */
  pthread_t watchdog;
  dc__failure failure;
  struct dc__external *members;
} dc__external_group;

enum { DC__EXTERNAL_COLLECTIVE, DC__EXTERNAL_DUP, DC__EXTERNAL_SLOTS };

/* A running callback. */
typedef struct dc__external_callback {
  const char *name; /* NULL if none */
  int64_t since;
  pthread_t thread;
  int64_t id;
  int32_t op; /* 0: dc_comm_dup or dc_comm_split, as `name` says */
  bool timed_out;
} dc__external_callback;

typedef struct dc__external {
  struct dc_comm head;
  dc_comm_callbacks callbacks;
  dc__external_group *group;
  struct dc__external *next;
  dc__external_callback running[DC__EXTERNAL_SLOTS];
  pthread_mutex_t collective_mutex; /* one collective at a time; guards scratch */
  char *scratch[3];                 /* packed send, packed recv, counts */
  int64_t scratch_bytes[3];
  int64_t *signatures; /* of all ranks */
} dc__external;

/* Fails the group with this thread's last error, unless it has failed. Aborts it if a copy is in a callback. */
void dc__external_fail(dc__external_group *group, dc_status status);
/* The same for a failure that the other ranks may not see: calls abort, once, which ends their waits. */
void dc__external_fail_alone(dc__external_group *group, dc_status status);

/* callbacks.c: a bit for each function that the table has, of those that the tables of all ranks must have, or of
 * none. */
int64_t dc__external_functions(const dc_comm_callbacks *c);
/* DC_E_MISMATCH: a rank's table has other functions than rank 0's. */
dc_status dc__external_fail_functions(int32_t rank, int64_t functions, int64_t zero_functions);
/* callbacks.c: they bracket each callback. The first refuses it in a failed group; the second turns its result into a
 * status. coll is NULL for dup. */
dc_status dc__external_callback_begin(dc__external *self, const dc__coll *coll, const char *callback);
dc_status dc__external_callback_end(dc__external *self, const dc__coll *coll, int32_t error);
/* DC_E_STATE on a thread that runs a callback of this communicator, since it would deadlock. */
dc_status dc__external_check_reentry(dc__external *self, const dc__coll *coll);
dc_status dc__external_start_watchdog(dc__external_group *group);
void dc__external_stop_watchdog(dc__external_group *group);

/* collective.c */
dc_status dc__external_gather(dc__external *self, const dc__coll *coll);
dc_status dc__external_reduce(dc__external *self, const dc__coll *coll);
/* Memory that only grows: 0 for packed sends, 1 for packed receives, 2 for counts. */
dc_status dc__external_reserve_scratch(dc__external *self, int32_t which, int64_t bytes, char **ptr);

/* all_to_all.c */
dc_status dc__external_exchange_counts(dc__external *self, const dc__coll *coll);
/* All ranks find the same difference. */
dc_status dc__external_compare_counts(const dc__external *self, const dc__coll *coll);
dc_status dc__external_all_to_all(dc__external *self, const dc__coll *coll);

#endif
