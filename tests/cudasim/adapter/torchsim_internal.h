/* Shared by the files of the stand-in for PyTorch. */
#ifndef TESTS_TORCHSIM_INTERNAL_H
#define TESTS_TORCHSIM_INTERNAL_H

#include "torchsim.h"

enum { DIMS = 4 };

typedef struct storage {
  int refs;
  int32_t device;
  char *data;
  size_t bytes;
  void *stream; /* the stream on which the memory was allocated */
  void (*deleter)(void *data, void *user);
  void *user;
} storage;

struct dct__tensor_handle {
  storage *of;
  int32_t index, dtype, ndim;
  int64_t sizes[DIMS], strides[DIMS];
};

struct dct__list_handle {
  dct_value *items;
  size_t count;
  bool tensors;
};

struct dct__library_handle {
  char ns[16], key[32];
};

/* ---- torchsim_tensors.c ---- */

void count(int change);
/* Returns whether this call of sim_* must fail. */
bool fails(const char *function);
size_t size_of(int32_t dtype);
void *current_stream(void);
/* Takes over the reference to the storage. */
dct_tensor view_of(storage *of, int32_t index, int32_t dtype, int64_t ndim, const int64_t *sizes,
                   const int64_t *strides);
void free_memory(storage *s);
/* Copies in the order of a stream; if src is NULL, writes zeros. */
void on_stream(void *native, void *dst, const void *src, size_t bytes);

#define ENTER()          \
  do {                   \
    if (fails(__func__)) \
      return 1;          \
  } while (0)

#endif
