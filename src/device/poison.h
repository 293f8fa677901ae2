/* With AddressSanitizer, a read of an arena's freed memory is found like a read of freed heap memory. The simulator's
 * tests compile the arena once more, to learn where a block's lifetime begins and ends. That is on the host, or in
 * stream order if a stream waits for the memory's earlier users. */
#ifndef DC_DEVICE_POISON_H
#define DC_DEVICE_POISON_H

#include <stddef.h>

#if defined(__SANITIZE_ADDRESS__)
#define DC_POISON_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DC_POISON_ASAN 1
#endif
#endif
#if defined(DC_ARENA_WATCHED)
void dc__arena_poison(const void *ptr, size_t bytes);
void dc__arena_unpoison(const void *ptr, size_t bytes);
struct dc_stream;
void dc__arena_unpoison_on(struct dc_stream *stream, const void *ptr, size_t bytes);
#define POISON(ptr, bytes) dc__arena_poison(ptr, bytes)
#define UNPOISON(ptr, bytes) dc__arena_unpoison(ptr, bytes)
#define UNPOISON_ON(stream, ptr, bytes) dc__arena_unpoison_on(stream, ptr, bytes)
#elif defined(DC_POISON_ASAN)
#include <sanitizer/asan_interface.h>

#include "device/count/count.h"
/* The counting device's addresses have no memory, so the sanitizer has no shadow of it. */
#define DC_HAS_SHADOW(ptr) (dc__count_memory_of(ptr) == DC__COUNT_OWN)
#define POISON(ptr, bytes) (DC_HAS_SHADOW(ptr) ? ASAN_POISON_MEMORY_REGION(ptr, bytes) : (void)0)
#define UNPOISON(ptr, bytes) (DC_HAS_SHADOW(ptr) ? ASAN_UNPOISON_MEMORY_REGION(ptr, bytes) : (void)0)
#define UNPOISON_ON(stream, ptr, bytes) UNPOISON(ptr, bytes)
#else
#define POISON(ptr, bytes) ((void)(ptr), (void)(bytes))
#define UNPOISON(ptr, bytes) ((void)(ptr), (void)(bytes))
#define UNPOISON_ON(stream, ptr, bytes) ((void)(stream), (void)(ptr), (void)(bytes))
#endif

#endif
