/* A communicator over the caller's collectives: what its files share. */
#ifndef DC_COMM_EXTERNAL_H
#define DC_COMM_EXTERNAL_H

#include "comm/host.h"

/* The copies of one communicator: a failure of one is a failure of all. */
typedef struct dc__external_family {
  atomic_int refs;
  atomic_int failed;
  pthread_mutex_t mutex;
  dc__failure failure;
  struct dc__external *members;
} dc__external_family;

typedef struct dc__external {
  struct dc_comm head;
  dc_comm_callbacks callbacks;
  dc__external_family *family;
  struct dc__external *next;
  pthread_mutex_t turn; /* one collective at a time; scratch */
  char *scratch[2];     /* packed send, packed recv */
  int64_t scratch_bytes[2];
} dc__external;

/* A callback's result as a status that names the operator. */
dc_status dc__external_called(const dc__external *self, const dc__coll *coll, const char *callback, int32_t error);

/* packed.c */
dc_status dc__external_gather(dc__external *self, const dc__coll *coll);
dc_status dc__external_reduce(dc__external *self, const dc__coll *coll);

#endif
