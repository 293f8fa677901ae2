/* A collective over shared memory in progress. staging.c plans it and copies what peers cannot read in place;
 * collective.c compares the calls and moves the data. */
#ifndef DC_COMM_SHM_COLLECTIVE_H
#define DC_COMM_SHM_COLLECTIVE_H

#include "comm/shm/shm.h"
#include "comm/windows.h"

typedef struct dc__shm_plan {
  dc__shm *self;
  dc__coll coll;     /* with ranges on every item */
  dc_stream *stream; /* moves a device's data; NULL if the calling thread moves it */
  dc__range broadcast[DC__COMM_MAX_LOCAL];
  const dc__shm_request *calls[DC__COMM_MAX_LOCAL];
  int64_t begins[DC__COMM_MAX_LOCAL]; /* all-to-all: where this rank's part begins in each rank's send */
  bool has_parts;                     /* a rank's data has a part for each rank: a reduction or an all-to-all */
  bool has_counts;                    /* an all-to-all, whose parts ranks compare */
  bool staged;                        /* this rank's data is copied to staging memory */
  bool in_place;                      /* peers read this rank's data in place */
  bool in_rounds;                     /* some rank's staged data does not fit its buffer, or may not */
  bool has_checksums;                 /* publishes checksums and verifies the peers' */
  uint64_t word;                      /* of agree() */
  uint32_t first;                     /* the number of the first round */
  int64_t largest;                    /* bytes of the largest part */
  int64_t window;                     /* bytes of a part that one staging buffer holds */
} dc__shm_plan;

/* Behind a staging buffer lie DC__COMM_GROUP words for each rank, the checksums of the items. An all-to-all has one
 * item, so the words after its checksum describe its part. Those named PARTS are set for rank 0 alone. */
enum {
  DC__SHM_PART_BEGIN = 1,
  DC__SHM_PART_SENT,
  DC__SHM_PARTS_SUM,     /* hashes of sent parts minus hashes of expected ones; the sum over all ranks is 0 */
  DC__SHM_PARTS_LARGEST, /* the most bytes that are sent to one rank */
  DC__SHM_PART_EXPECTED
};

/* ---- staging.c ---- */

dc_status dc__shm_plan_collective(dc__shm_plan *p, dc__shm *self, const dc__coll *coll);
/* Prepares the round that begins at byte `lo` of the parts: data, checksums, and the parts of an all-to-all. */
void dc__shm_stage_round(const dc__shm_plan *p, int64_t lo);
/* The slice of an item's range that one checksum covers: the window if staged, else all of it. */
dc__window_slice dc__shm_checksum_slice(const dc__coll_item *item, int32_t range, bool staged, int64_t pos, int64_t lo,
                                        int64_t size);

#endif
