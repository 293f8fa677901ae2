/* Shared by buffer.c and the arena: reused small host structs, so that a steady step never calls malloc. */
#ifndef DC_DEVICE_ARENA_H
#define DC_DEVICE_ARENA_H

#include "device/device.h"
#include "device/record_pool.h"

/* DC__RECORD_BYTES zeroed bytes; NULL: no memory, last error set. They live until given back or the arena dies. */
void *dc__arena_record_alloc(dc__arena *arena);
void dc__arena_record_free(dc__arena *arena, void *ptr);
/* Whether this process is a child made by fork() and the arena belongs to its parent. */
bool dc__arena_is_forked(const dc__arena *arena);

#endif
