/* Records are cut from slabs, which live as long as their owner. */
#include "device/record_pool.h"

#include <stddef.h>
#include <string.h>

#include "base/base.h"
#include "device/poison.h"

enum { SLAB = 64 };

typedef struct dc__record {
  _Alignas(max_align_t) union {
    struct dc__record *next;
    unsigned char bytes[DC__RECORD_BYTES];
  } as;
} dc__record;

typedef struct dc__record_slab {
  struct dc__record_slab *next;
  dc__record records[SLAB];
} dc__record_slab;

static void record_pool_push(dc__record_pool *records, dc__record *freed) {
  freed->as.next = records->free_list;
  records->free_list = freed;
  /* Poisons all but the link, so that uses of a destroyed handle are found. */
  POISON(freed->as.bytes + sizeof(void *), sizeof(*freed) - sizeof(void *));
}

void *dc__record_pool_alloc(dc__record_pool *records) {
  if (records->free_list == NULL) {
    dc__record_slab *slab = dc__calloc(1, sizeof(*slab));
    if (slab == NULL) {
      return NULL;
    }
    slab->next = records->slabs;
    records->slabs = slab;
    for (int i = 0; i < SLAB; i++) {
      record_pool_push(records, &slab->records[i]);
    }
  }
  dc__record *allocated = records->free_list;
  records->free_list = allocated->as.next;
  UNPOISON(allocated, sizeof(*allocated));
  return memset(allocated, 0, sizeof(*allocated));
}

void dc__record_pool_free(dc__record_pool *records, void *ptr) {
  record_pool_push(records, ptr);
}

void dc__record_pool_destroy(dc__record_pool *records) {
  while (records->slabs != NULL) {
    dc__record_slab *next = records->slabs->next;
    UNPOISON(records->slabs, sizeof(dc__record_slab));
    dc__free(records->slabs);
    records->slabs = next;
  }
  records->free_list = NULL;
}
