/* Records are cut from slabs, which live as long as their owner. */
#include "device/records.h"

#include <stddef.h>
#include <string.h>

#include "base/base.h"
#include "device/poison.h"

enum { SLAB = 64 };

typedef struct dc__record {
  _Alignas(max_align_t) union {
    struct dc__record *next;
    unsigned char bytes[DC__RECORD];
  } as;
} record;

typedef struct dc__record_slab {
  struct dc__record_slab *next;
  record records[SLAB];
} slab;

static void put(dc__records *records, record *given) {
  given->as.next = records->spare;
  records->spare = given;
  /* All but the link, so that the use of a dead handle is found. */
  POISON(given->as.bytes + sizeof(void *), sizeof(*given) - sizeof(void *));
}

void *dc__records_take(dc__records *records) {
  if (records->spare == NULL) {
    slab *fresh = dc__calloc(1, sizeof(*fresh));
    if (fresh == NULL) {
      return NULL;
    }
    fresh->next = records->slabs;
    records->slabs = fresh;
    for (int i = 0; i < SLAB; i++) {
      put(records, &fresh->records[i]);
    }
  }
  record *taken = records->spare;
  records->spare = taken->as.next;
  UNPOISON(taken, sizeof(*taken));
  return memset(taken, 0, sizeof(*taken));
}

void dc__records_give(dc__records *records, void *ptr) {
  put(records, ptr);
}

void dc__records_free(dc__records *records) {
  while (records->slabs != NULL) {
    slab *next = records->slabs->next;
    UNPOISON(records->slabs, sizeof(slab));
    dc__free(records->slabs);
    records->slabs = next;
  }
  records->spare = NULL;
}
