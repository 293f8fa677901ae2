/* The reader and the writer of sized structs. Whatever struct_size says, they touch no byte beyond it, and none beyond
 * their own struct. The struct ends at the end of its block, so the sanitizer notices one byte more. */
#include "base/base.h"
#include "fuzz.h"

enum { KNOWN = 40, LEAST = 24, MOST = 65536 };

static void read_one(const unsigned char *given, size_t length, size_t size) {
  unsigned char own[KNOWN];
  memset(own, 0xa5, sizeof own);
  dc_status status = dc__read_options("fuzz", "options", own, sizeof own, given, LEAST);
  bool fits = size >= LEAST && size <= MOST;
  PROMISE(fits || status == DC_E_INVALID);
  if (status != DC_OK) {
    PROMISE(status == DC_E_INVALID || status == DC_E_UNSUPPORTED);
    for (size_t i = 0; i < sizeof own; i++) {
      PROMISE(own[i] == 0xa5); /* nothing is partly read */
    }
    return;
  }
  for (size_t i = sizeof size; i < sizeof own; i++) {
    PROMISE(own[i] == (i < size ? given[i] : 0));
  }
  for (size_t i = KNOWN; i < size && i < length; i++) {
    PROMISE(given[i] == 0);
  }
}

static void write_one(unsigned char *given, size_t length, size_t size) {
  unsigned char own[KNOWN], *before = malloc(length);
  memset(own, 0x5a, sizeof own);
  memcpy(before, given, length);
  dc_status status = dc__write_sized("fuzz", "stats", given, own, sizeof own, LEAST);
  size_t end = status != DC_OK ? 0 : size < KNOWN ? size : KNOWN;
  for (size_t i = 0; i < length; i++) {
    PROMISE(given[i] == (i >= sizeof size && i < end ? 0x5a : before[i]));
  }
  dc__init_sized(given, size <= length ? size : 0, KNOWN);
  free(before);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length) {
  bytes b = {data, length};
  size_t size = (size_t)read_count(&b);
  /* The caller's block has struct_size bytes; if that is out of bounds, only the size field. */
  size_t block = size >= LEAST && size <= MOST ? size : sizeof size;
  unsigned char *given = malloc(block);
  take(&b, given, block);
  memcpy(given, &size, sizeof size);
  read_one(given, block, size);
  write_one(given, block, size);
  free(given);
  return 0;
}
