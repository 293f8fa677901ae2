/* Used by every module: errors, sized structs, types, tensor views, memory, maps, time.
 * Nothing here knows a device, a rank or a parameter. */
#ifndef DC_BASE_H
#define DC_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/spin.h"
#include "base/traps.h"
#include "dc_api.h"

#define DC__PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define DC__COUNT(array) (sizeof(array) / sizeof((array)[0]))

static inline int64_t dc__min_int64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
/* count / divisor, rounded up; count >= 0, divisor > 0. */
static inline int64_t dc__ceil_div(int64_t count, int64_t divisor) {
  return count / divisor + (count % divisor != 0);
}

/* Whether two ranges of memory have a byte in common. */
static inline bool dc__ranges_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
  return a_bytes > 0 && b_bytes > 0 && (uintptr_t)a < (uintptr_t)b + b_bytes && (uintptr_t)b < (uintptr_t)a + a_bytes;
}

/* Looks up one function of a table in an open library. If the library lacks it, `missing` becomes its name. */
#define DC__DLSYM(library, table, name, missing)    \
  *(void **)&(table)->name = dlsym(library, #name); \
  (missing) = (table)->name == NULL ? #name : (missing);

/* ---- errors (status.c) ---- */

/* Sets this thread's last error and returns status, so that a check reads
 *   return dc__fail(DC_E_SHAPE, "dc_reduce_grad: a has %" PRId64 " elements, must have %" PRId64, …); */
dc_status dc__fail(dc_status status, const char *format, ...) DC__PRINTF(2, 3);
/* As snprintf(), for a part of an error's text that has fractions: they have a point in every locale. */
void dc__print(char *text, size_t cap, const char *format, ...) DC__PRINTF(3, 4);
/* The plural ending of a noun: 1 element, 2 elements. */
#define DC__PLURAL_S(count) ((count) == 1 ? "" : "s")

/* A failure that outlives its thread: streams and communicators keep the first one. */
typedef struct dc__failure {
  dc_status status;
  char text[512];
} dc__failure;

/* Keeps `status` with this thread's last error text, unless a failure is kept already. Not thread-safe by itself. */
void dc__failure_keep(dc__failure *failure, dc_status status);
/* Makes a kept failure this thread's last error and returns its status. */
dc_status dc__failure_raise(const dc__failure *failure);

#define DC__TRY(call)                  \
  do {                                 \
    dc_status dc__try_status = (call); \
    if (dc__try_status != DC_OK) {     \
      return dc__try_status;           \
    }                                  \
  } while (0)

/* ---- sized structs (options.c): the one reader and the one writer ---- */

/* DC_E_INVALID for a struct_size that is below min or over 64 KiB. */
dc_status dc__check_size(const char *function, const char *argument, size_t size, size_t min);
/* Copies a caller's struct into dst, which has `known` bytes. If src is NULL, dst keeps its defaults. Rejects a src
 * shorter than min (its size in the version that introduced it) or longer than 64 KiB. The tail of a src longer than
 * known must be zero. */
dc_status dc__read_options(const char *function, const char *argument, void *dst, size_t known, const void *src,
                           size_t min);
/* Copies src (known bytes, struct_size first) to the caller's dst, up to dst's struct_size. */
dc_status dc__write_sized(const char *function, const char *argument, void *dst, const void *src, size_t known,
                          size_t min);
/* The body of every dc_x_init(): zeroes the caller's struct and sets its struct_size. Writes nothing beyond that
 * size. */
void dc__init_sized(void *dst, size_t struct_size, size_t known);

/* ---- types and tensors (tensor.c) ---- */

/* The size of dc_tensor in version 0.1. Callers built for that version keep working when dc_tensor grows. */
enum { DC__TENSOR_SIZE_0_1 = 48 };
_Static_assert(sizeof(void *) != 8 || sizeof(dc_tensor) >= DC__TENSOR_SIZE_0_1, "0.1");

bool dc__dtype_is_float(int32_t dtype);
/* The seven types that collectives and casts take. */
bool dc__dtype_is_castable(int32_t dtype);
/* Whether `wide` holds every value of `narrow`, so that a cast through it equals the direct cast: the type itself, or a
 * larger one of the same kind. (Through float64, int32 to int8 would saturate instead of wrapping.) */
bool dc__dtype_can_represent(int32_t wide, int32_t narrow);

/* Product of a shape. DC_E_SHAPE when a length is negative or the product overflows. */
dc_status dc__numel(const char *function, const char *argument, const int64_t *shape, int32_t ndim, int64_t *numel);
/* Reads a caller's tensor. Checks struct size, shape, dtype and contiguity; data may be NULL only if it is empty. src
 * may be NULL only if optional: then dst is an empty tensor of no type and numel 0. */
dc_status dc__tensor_read(const char *function, const char *argument, const dc_tensor *src, bool optional,
                          dc_tensor *dst, int64_t *numel);
/* For an array of `count` tensors, whose elements may have another version's size: checks it, and returns its i-th
 * element. */
dc_status dc__tensors_check(const char *function, const char *argument, const dc_tensor *tensors, size_t tensor_size,
                            int64_t count);
const dc_tensor *dc__tensors_at(const dc_tensor *tensors, size_t tensor_size, int64_t i);
/* Fills a caller's output tensor. */
dc_status dc__tensor_write(const char *function, const char *argument, dc_tensor *dst, void *data, const int64_t *shape,
                           int32_t ndim, int32_t dtype, dc_buffer *buffer);
/* Checks that dst can be written, before any work is done. */
dc_status dc__tensor_check_output(const char *function, const char *argument, const dc_tensor *dst);

/* ---- host memory for bookkeeping (memory.c) ---- */

/* Zeroed; NULL with last error set on failure. All of the library's bookkeeping memory comes from these functions. */
void *dc__calloc(size_t count, size_t bytes);
/* Grows an array to hold at least `need` elements, the new ones zeroed; false (array unchanged, last error set) on
 * failure. */
bool dc__array_reserve(void **array, int64_t *capacity, int64_t need, size_t element);
void dc__free(void *ptr);
char *dc__strdup(const char *text);

/* ---- checksums (checksum.c) ---- */

#define DC__CHECKSUM UINT64_C(14695981039346656037)

/* Continues the checksum `hash` over data. Begin with DC__CHECKSUM. */
uint64_t dc__checksum(uint64_t hash, const void *data, size_t bytes);

/* ---- CRC-32C (crc32c.c) ---- */

/* Continues the checksum `crc` over data. Begin with 0. */
uint32_t dc__crc32c(uint32_t crc, const void *data, size_t bytes);
uint32_t dc__crc32c_table(uint32_t crc, const void *data, size_t bytes);
#ifdef __x86_64__
/* The processor must support the instructions. */
uint32_t dc__crc32c_sse42(uint32_t crc, const void *data, size_t bytes);
uint32_t dc__crc32c_avx512(uint32_t crc, const void *data, size_t bytes);
#endif

/* ---- maps (map.c): int64 keys to pointers, insertion order kept ---- */

/* Each operation takes constant time on average. Without removals, entry i is the i-th that was put. */
typedef struct dc__map {
  int64_t *keys; /* insertion order */
  void **values; /* parallel to keys; NULL marks a removed entry, which DC__MAP_EACH skips */
  int64_t count; /* entries that were not removed */
  int64_t used;  /* all entries, also removed ones */
  int64_t capacity;
  int32_t *slots; /* open addressing: index + 1 into keys, 0 empty */
  int64_t slot_count;
} dc__map;

void *dc__map_get(const dc__map *map, int64_t key);       /* NULL if absent */
bool dc__map_put(dc__map *map, int64_t key, void *value); /* adds or replaces; value is not NULL; false: no memory */
bool dc__map_reserve(dc__map *map);                       /* room for one more; false: no memory (last error set) */
void dc__map_remove(dc__map *map, int64_t key);
void dc__map_clear(dc__map *map); /* frees the map's own memory, not the values */

/* The index of the first entry from `at` on that was not removed; map->used if there is none. */
static inline int64_t dc__map_next(const dc__map *map, int64_t at) {
  while (at < map->used && map->values[at] == NULL) {
    at++;
  }
  return at;
}

/* Runs i over the entries of a map. The loop must neither add nor remove entries. */
#define DC__MAP_EACH(map, i) for (int64_t i = dc__map_next(map, 0); i < (map)->used; i = dc__map_next(map, i + 1))

/* ---- handles (handle.c) ---- */

/* The kind of a handle: the first member of each struct behind a public handle. Other memory is unlikely to hold these
 * numbers. */
enum {
  DC__HANDLE_DEVICE = 0x6c646300,
  DC__HANDLE_STREAM,
  DC__HANDLE_EVENT,
  DC__HANDLE_BUFFER,
  DC__HANDLE_COMM,
  DC__HANDLE_CONTEXT,
  DC__HANDLE_LAYER,
  DC__HANDLE_LINALG,
  DC__HANDLE_OPTIMIZER,
  DC__HANDLE_END
};

/* Whether `handle` is a live handle of that kind; false for NULL. */
static inline bool dc__handle_is(const void *handle, int32_t kind) {
  return handle != NULL && *(const int32_t *)handle == kind;
}
/* The error for a pointer that is no live handle of that kind. */
dc_status dc__handle_refuse(const char *fn, const char *argument, const void *handle, int32_t kind);
static inline dc_status dc__handle_check(const char *fn, const char *argument, const void *handle, int32_t kind) {
  return dc__handle_is(handle, kind) ? DC_OK : dc__handle_refuse(fn, argument, handle, kind);
}
/* For a stream or a communicator that may be NULL. */
static inline dc_status dc__handle_check_optional(const char *fn, const char *argument, const void *handle,
                                                  int32_t kind) {
  return handle == NULL ? DC_OK : dc__handle_check(fn, argument, handle, kind);
}
/* Call before freeing the memory, so that later uses of the handle are refused. */
static inline void dc__handle_clear(int32_t *kind) {
  *(volatile int32_t *)kind = 0;
}

/* ---- the process that owns an object (owner.c) ---- */

/* Tells a child made by fork() that an object belongs to its parent. The mark is a page that the kernel zeroes in
 * children, so that the check costs no system call. Where the kernel cannot (before 4.14), the process ID is compared.
 * An all-zero struct belongs to every process. */
typedef struct dc__owner {
  const unsigned char *page; /* NULL: compare pid */
  int32_t pid;
} dc__owner;

void dc__owner_init(dc__owner *owner);
void dc__owner_destroy(dc__owner *owner);
bool dc__owner_is_forked(const dc__owner *owner);
/* DC_E_STATE in a child; `what` names the object in the error text, as in "context". */
dc_status dc__owner_check(const char *function, const char *what, const dc__owner *owner);

/* ---- file descriptors (descriptor.c) ---- */

/* The descriptor that a call has just made, or its -1. In a program without standard streams it would have one of their
 * numbers, and all that is printed would be written to it. So it takes another number then; -1 and errno: no number is
 * left. */
int dc__above_streams(int fd);

/* ---- text (utf8.c) ---- */

/* Bytes of the character at text, of which `left` bytes may be read, with its number in *code. 0: it is not UTF-8.
 * Reads no further than a byte that does not belong to the character, such as a terminating zero. left >= 1. */
size_t dc__utf8_decode(const char *text, size_t left, uint32_t *code);

/* ---- time (clock.c) ---- */

int64_t dc__now_ns(void); /* monotonic */
/* Milliseconds from now to the deadline, for poll(): 0 to 2^30, rounded up. */
int dc__poll_timeout_ms(int64_t deadline_ns);
/* A faster monotonic clock in its own units: the processor's counter where that runs at a constant rate, else
 * nanoseconds. */
int64_t dc__ticks(void);

#endif
