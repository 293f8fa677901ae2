/* A pool of small structs of one size. Its owner does the locking. */
#ifndef DC_DEVICE_RECORD_POOL_H
#define DC_DEVICE_RECORD_POOL_H

enum { DC__RECORD_BYTES = 128 }; /* of one struct */

typedef struct dc__record_pool {
  struct dc__record_slab *slabs;
  struct dc__record *free_list;
} dc__record_pool;

/* DC__RECORD_BYTES zeroed bytes, aligned for anything; NULL: no memory, last error set. */
void *dc__record_pool_alloc(dc__record_pool *records);
void dc__record_pool_free(dc__record_pool *records, void *ptr);
/* Frees all structs, also those that were not given back. */
void dc__record_pool_destroy(dc__record_pool *records);

#endif
