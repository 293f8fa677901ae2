/* The part of libtorch's C shim that the adapter uses, by prototypes of our own. Nothing of PyTorch is needed to build
 * or to load this library: dct_shim_resolve() finds the functions in the libtorch_cpu.so that the process has loaded.
 *
 * A boxed kernel owns the values on its stack: what it does not return it frees, and it frees before it raises. */
#ifndef DCT_SHIM_H
#define DCT_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dc_api.h"

typedef uint64_t dct_value; /* one slot of a boxed call: an integer, a handle, or a pointer to an optional's value */
typedef struct dct__tensor_handle *dct_tensor;
typedef struct dct__list_handle *dct_list;
typedef struct dct__library_handle *dct_library;
typedef int32_t dct_err; /* 0 is success */
typedef void (*dct_kernel)(dct_value *stack, uint64_t inputs, uint64_t outputs);

/* The oldest version that has all of these is 2.11 (torch_from_blob); kernels and calls are made in its terms. */
#define DCT_TORCH_ABI ((UINT64_C(2) << 56) | (UINT64_C(11) << 48))

/* clang-format off */
#define DCT_SHIM(X)                                                                                                   \
  X(dct_err, aoti_torch_library_init_def, (const char *ns, const char *file, uint32_t line, dct_library *library))    \
  X(dct_err, aoti_torch_library_init_impl,                                                                            \
    (const char *ns, const char *key, const char *file, uint32_t line, dct_library *library))                         \
  X(dct_err, aoti_torch_library_def, (dct_library library, const char *schema))                                       \
  X(dct_err, torch_library_impl, (dct_library library, const char *name, dct_kernel kernel, uint64_t abi))            \
  X(dct_err, aoti_torch_delete_library_object, (dct_library library))                                                 \
  X(dct_err, torch_call_dispatcher, (const char *name, const char *overload, dct_value *stack, uint64_t abi))         \
  X(dct_err, aoti_torch_new_tensor_handle, (dct_tensor tensor, dct_tensor *copy))                                     \
  X(dct_err, aoti_torch_delete_tensor_object, (dct_tensor tensor))                                                    \
  X(dct_err, torch_get_mutable_data_ptr, (dct_tensor tensor, void **data))                                            \
  X(dct_err, aoti_torch_get_numel, (dct_tensor tensor, int64_t *numel))                                               \
  X(dct_err, aoti_torch_get_dim, (dct_tensor tensor, int64_t *ndim))                                                  \
  X(dct_err, aoti_torch_get_sizes, (dct_tensor tensor, int64_t **sizes))                                              \
  X(dct_err, aoti_torch_get_dtype, (dct_tensor tensor, int32_t *dtype))                                               \
  X(dct_err, aoti_torch_get_layout, (dct_tensor tensor, int32_t *layout))                                             \
  X(dct_err, aoti_torch_get_device_type, (dct_tensor tensor, int32_t *type))                                          \
  X(dct_err, aoti_torch_get_device_index, (dct_tensor tensor, int32_t *index))                                        \
  X(dct_err, aoti_torch_is_contiguous, (dct_tensor tensor, bool *contiguous))                                         \
  X(dct_err, aoti_torch_empty_strided,                                                                                \
    (int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device, int32_t index,        \
     dct_tensor *tensor))                                                                                             \
  X(dct_err, torch_from_blob,                                                                                         \
    (void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides, int64_t offset, int32_t dtype,           \
     int32_t device, int32_t index, dct_tensor *tensor, int32_t layout, const uint8_t *metadata, int64_t bytes,       \
     void (*deleter)(void *data, void *user), void *user))                                                            \
  X(dct_err, torch_new_list_reserve_size, (size_t size, dct_list *list))                                              \
  X(dct_err, torch_list_push_back, (dct_list list, dct_value item))                                                   \
  X(dct_err, torch_list_size, (dct_list list, size_t *size))                                                          \
  X(dct_err, torch_list_get_item, (dct_list list, size_t index, dct_value *item))                                     \
  X(dct_err, torch_delete_list, (dct_list list))                                                                      \
  X(int32_t, aoti_torch_device_type_cpu, (void))                                                                      \
  X(int32_t, aoti_torch_device_type_cuda, (void))                                                                     \
  X(int32_t, aoti_torch_device_type_meta, (void))                                                                     \
  X(int32_t, aoti_torch_layout_strided, (void))                                                                       \
  X(int32_t, aoti_torch_memory_format_contiguous_format, (void))                                                      \
  X(int32_t, aoti_torch_dtype_float32, (void))                                                                        \
  X(int32_t, aoti_torch_dtype_float64, (void))                                                                        \
  X(int32_t, aoti_torch_dtype_float16, (void))                                                                        \
  X(int32_t, aoti_torch_dtype_bfloat16, (void))                                                                       \
  X(int32_t, aoti_torch_dtype_int8, (void))                                                                           \
  X(int32_t, aoti_torch_dtype_int32, (void))                                                                          \
  X(int32_t, aoti_torch_dtype_int64, (void))                                                                          \
  X(int32_t, aoti_torch_dtype_uint8, (void))                                                                          \
  X(int32_t, aoti_torch_dtype_int16, (void))                                                                          \
  X(int32_t, aoti_torch_dtype_bool, (void))                                                                           \
  X(void, aoti_torch_check, (bool ok, const char *function, const char *file, uint32_t line, const char *message))
/* clang-format on */

typedef struct dct_shim {
#define X(result, name, args) result(*name) args;
  DCT_SHIM(X)
#undef X
  /* From 2.13 on; before, an optional's value is a plain C++ allocation and an error's text is lost. */
  dct_err (*torch_delete_stable_ivalue)(dct_value *value);
  void (*operator_delete)(void *ptr);
  const char *(*torch_exception_get_what_without_backtrace)(void);
  /* Of libtorch_cuda.so, which a PyTorch for CPUs lacks: NULL. */
  dct_err (*aoti_torch_get_current_cuda_stream)(int32_t index, void **stream);
  /* Read once: the numbers of types and devices are libtorch's own. */
  int32_t dtypes[DC_BOOL + 1]; /* by enum dc_dtype */
  int32_t cpu, cuda, meta, strided;
} dct_shim;

/* Filled by dct_shim_resolve(), constant from then on. */
extern dct_shim dct_torch;

/* NULL, or why the functions cannot be had. */
const char *dct_shim_resolve(char *text, size_t cap);

/* The reason of the last libtorch call that failed on this thread, as far as that version tells. */
const char *dct_torch_reason(void);

/* Throws a RuntimeError through the dispatcher. Everything must be freed before. */
void dct_raise(const char *function, const char *text);

/* enum dc_dtype of a libtorch type; -1 if libdc has none such. */
int32_t dct_dtype_from_torch(int32_t dtype);

/* Value of a `T?` slot, freed here; false: None. */
bool dct_take_optional(dct_value slot, dct_value *value);

/* One array for a list's items, which the caller owns (free() it, and the items); the list itself is freed here.
 * False: a libtorch call or the allocation failed. */
bool dct_take_list(dct_value slot, dct_value **items, size_t *count);

/* The reverse: a list of items, which it takes over. NULL: a libtorch call failed, and the items are the caller's. */
dct_list dct_make_list(const dct_value *items, size_t count);

/* Row-major strides of a shape with at most DCT_MAX_DIMS lengths, as PyTorch counts them. */
enum { DCT_MAX_DIMS = 64 };
static inline void dct_contiguous_strides(const int64_t *shape, int32_t ndim, int64_t *strides) {
  int64_t stride = 1;
  for (int32_t i = ndim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape[i] > 0 ? shape[i] : 1;
  }
}

static inline dct_tensor dct_as_tensor(dct_value value) {
  return (dct_tensor)(uintptr_t)value;
}
static inline dct_value dct_as_value(const void *handle) {
  return (dct_value)(uintptr_t)handle;
}

#endif
