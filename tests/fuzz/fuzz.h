/* Shared by the fuzz targets: takes values from the fuzzer's bytes. Past their end come zeros. */
#ifndef TESTS_FUZZ_H
#define TESTS_FUZZ_H

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct bytes {
  const uint8_t *at;
  size_t left;
} bytes;

static inline void take(bytes *b, void *to, size_t count) {
  size_t have = count < b->left ? count : b->left;
  memset(to, 0, count);
  if (have > 0) {
    memcpy(to, b->at, have);
  }
  b->at += have;
  b->left -= have;
}

static inline uint8_t read_u8(bytes *b) {
  uint8_t value;
  take(b, &value, sizeof value);
  return value;
}

static inline int64_t read_i64(bytes *b) {
  int64_t value;
  take(b, &value, sizeof value);
  return value;
}

/* Returns a number that is often small, and sometimes any number. */
static inline int64_t read_count(bytes *b) {
  int8_t small = (int8_t)read_u8(b);
  return small == INT8_MIN ? read_i64(b) : small;
}

/* In the fuzzer a broken promise must abort the process, so that the input is kept. */
#define PROMISE(condition)                                                    \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                \
    }                                                                         \
  } while (0)

#endif
