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
} record;

typedef struct dc__record_slab {
  struct dc__record_slab *next;
  record records[SLAB];
} slab;

static void record_pool_push(dc__record_pool *records, record *given) {
  given->as.next = records->free_list;
  records->free_list = given;
  /* All but the link, so that the use of a dead handle is found. */
  POISON(given->as.bytes + sizeof(void *), sizeof(*given) - sizeof(void *));
}

void *dc__record_pool_alloc(dc__record_pool *records) {
  if (records->free_list == NULL) {
    slab *fresh = dc__calloc(1, sizeof(*fresh));
    if (fresh == NULL) {
      return NULL;
    }
    fresh->next = records->slabs;
    records->slabs = fresh;
    for (int i = 0; i < SLAB; i++) {
      record_pool_push(records, &fresh->records[i]);
    }
  }
  record *taken = records->free_list;
  records->free_list = taken->as.next;
  UNPOISON(taken, sizeof(*taken));
  return memset(taken, 0, sizeof(*taken));
}

void dc__record_pool_free(dc__record_pool *records, void *ptr) {
  record_pool_push(records, ptr);
}

void dc__record_pool_destroy(dc__record_pool *records) {
  while (records->slabs != NULL) {
    slab *next = records->slabs->next;
    UNPOISON(records->slabs, sizeof(slab));
    dc__free(records->slabs);
    records->slabs = next;
  }
  records->free_list = NULL;
}
