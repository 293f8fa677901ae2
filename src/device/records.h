/* Small zeroed structs of one size that are used again. The owner locks. */
#ifndef DC_DEVICE_RECORDS_H
#define DC_DEVICE_RECORDS_H

enum { DC__RECORD = 96 }; /* bytes */

typedef struct dc__records {
  struct dc__record_slab *slabs;
  struct dc__record *spare;
} dc__records;

/* DC__RECORD zeroed bytes, aligned for anything; NULL: no memory, last error set. */
void *dc__records_take(dc__records *records);
void dc__records_give(dc__records *records, void *ptr);
/* All of them at once, also those that were not given back. */
void dc__records_free(dc__records *records);

#endif
