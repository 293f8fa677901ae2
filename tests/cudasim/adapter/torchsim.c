/* A stand-in for libtorch's C shim, and for the process whose symbols are looked up (torchsim.h). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "torchsim_internal.h"

enum { KERNELS = 80, LIBRARIES = 16 };

static struct {
  char id[96];
  dct_kernel kernel;
} kernels[KERNELS];
static int kernel_count;
static struct dct__library_handle libraries[LIBRARIES]; /* registered libraries, which stay */

static char hidden[64];
static _Thread_local jmp_buf raised;
static _Thread_local char raised_text[512];

/* ---- the shim ---- */

#define X(result, name, args) static result sim_##name args;
DCT_SHIM(X)
#undef X
static dct_err sim_aoti_torch_get_current_cuda_stream(int32_t index, void **stream);

static dct_err sim_aoti_torch_library_init_def(const char *ns, const char *file, uint32_t line, dct_library *library) {
  ENTER();
  return sim_aoti_torch_library_init_impl(ns, "", file, line, library);
}

static dct_err sim_aoti_torch_library_init_impl(const char *ns, const char *key, const char *file, uint32_t line,
                                                dct_library *library) {
  ENTER();
  (void)file;
  (void)line;
  dct_library free_one = libraries;
  while (free_one->ns[0] != '\0') {
    free_one++;
  }
  *library = free_one;
  snprintf((*library)->ns, sizeof(*library)->ns, "%s", ns);
  snprintf((*library)->key, sizeof(*library)->key, "%s", key);
  count(1);
  return 0;
}

static dct_err sim_aoti_torch_library_def(dct_library library, const char *schema) {
  ENTER();
  (void)library;
  return schema == NULL;
}

static dct_err sim_torch_library_impl(dct_library library, const char *name, dct_kernel kernel, uint64_t abi) {
  ENTER();
  snprintf(kernels[kernel_count].id, sizeof kernels->id, "%s::%s/%s", library->ns, name, library->key);
  kernels[kernel_count++].kernel = kernel;
  return abi != DCT_TORCH_ABI;
}

static dct_err sim_aoti_torch_delete_library_object(dct_library library) {
  library->ns[0] = '\0';
  kernel_count = 0;
  count(-1);
  return 0;
}

static dct_tensor copy_of(dct_tensor t) {
  dct_tensor copy = torchsim_tensor(t->of->device, t->index, t->dtype, t->ndim, t->sizes);
  size_t size = size_of(t->dtype);
  for (int64_t i = 0, n = torchsim_numel(t); i < n; i++) {
    int64_t at = 0, rest = i;
    for (int32_t d = t->ndim - 1; d >= 0; d--) {
      at += rest % t->sizes[d] * t->strides[d];
      rest /= t->sizes[d];
    }
    char *dst = copy->of->data + (size_t)i * size;
    const char *src = t->of->data + (size_t)at * size;
    if (t->of->device == SIM_CUDA) {
      on_stream(current_stream(), dst, src, size);
    } else {
      memcpy(dst, src, size);
    }
  }
  return copy;
}

static dct_err sim_torch_call_dispatcher(const char *name, const char *overload, dct_value *stack, uint64_t abi) {
  dct_tensor t = dct_as_tensor(stack[0]);
  bool fail = fails(__func__) || abi != DCT_TORCH_ABI || overload[0] != '\0';
  if (!fail && strcmp(name, "aten::alias") != 0) {
    if (strcmp(name, "inductor::resize_storage_bytes_") == 0) {
      free_memory(t->of);
    } else {
      stack[0] = dct_as_value(copy_of(t));
    }
    torchsim_drop(t);
  } else if (fail) {
    torchsim_drop(t);
  }
  return fail;
}

static dct_err sim_aoti_torch_new_tensor_handle(dct_tensor tensor, dct_tensor *copy) {
  ENTER();
  *copy = torchsim_again(tensor);
  return 0;
}

static dct_err sim_aoti_torch_delete_tensor_object(dct_tensor tensor) {
  torchsim_drop(tensor);
  return 0;
}

static dct_err sim_aoti_torch_is_contiguous(dct_tensor tensor, bool *contiguous) {
  ENTER();
  int64_t strides[DIMS];
  dct_contiguous_strides(tensor->sizes, tensor->ndim, strides);
  *contiguous = memcmp(strides, tensor->strides, sizeof *strides * (size_t)tensor->ndim) == 0;
  return 0;
}

#define GETTER(name, type, value)                           \
  static dct_err sim_##name(dct_tensor tensor, type *out) { \
    ENTER();                                                \
    *out = (value);                                         \
    return 0;                                               \
  }
GETTER(torch_get_mutable_data_ptr, void *, tensor->of->data)
GETTER(aoti_torch_get_numel, int64_t, torchsim_numel(tensor))
GETTER(aoti_torch_get_dim, int64_t, tensor->ndim)
GETTER(aoti_torch_get_sizes, int64_t *, tensor->sizes)
GETTER(aoti_torch_get_dtype, int32_t, tensor->dtype)
GETTER(aoti_torch_get_layout, int32_t, tensor == NULL ? 1 : 0)
GETTER(aoti_torch_get_device_type, int32_t, tensor->of->device)
GETTER(aoti_torch_get_device_index, int32_t, tensor->index)

static dct_err sim_aoti_torch_empty_strided(int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                                            int32_t on, int32_t index, dct_tensor *tensor) {
  ENTER();
  (void)strides;
  *tensor = torchsim_tensor(on, index, dtype, (int32_t)ndim, sizes);
  return 0;
}

static dct_err sim_torch_from_blob(void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides,
                                   int64_t offset, int32_t dtype, int32_t on, int32_t index, dct_tensor *tensor,
                                   int32_t layout, const uint8_t *metadata, int64_t bytes,
                                   void (*deleter)(void *data, void *user), void *user) {
  ENTER();
  if (offset != 0 || layout != 0 || metadata != NULL || bytes != 0) {
    return 1;
  }
  storage *s = calloc(1, sizeof *s);
  *s = (storage){1, on, data, 0, NULL, deleter, user};
  *tensor = view_of(s, index, dtype, ndim, sizes, strides);
  return 0;
}

static dct_err sim_torch_new_list_reserve_size(size_t size, dct_list *list) {
  ENTER();
  *list = calloc(1, sizeof **list);
  (*list)->items = calloc(size + 1, sizeof *(*list)->items);
  count(1);
  return 0;
}

static dct_err sim_torch_list_push_back(dct_list list, dct_value item) {
  ENTER();
  list->items[list->count++] = item;
  return 0;
}

static dct_err sim_torch_list_size(dct_list list, size_t *size) {
  ENTER();
  *size = list->count;
  return 0;
}

static dct_err sim_torch_list_get_item(dct_list list, size_t index, dct_value *item) {
  ENTER();
  *item = list->items[index];
  if (list->tensors) {
    *item = dct_as_value(torchsim_again(dct_as_tensor(*item)));
  }
  return 0;
}

static dct_err sim_torch_delete_list(dct_list list) {
  for (size_t i = 0; list->tensors && i < list->count; i++) {
    torchsim_drop(dct_as_tensor(list->items[i]));
  }
  free(list->items);
  free(list);
  count(-1);
  return 0;
}

static dct_err sim_aoti_torch_get_current_cuda_stream(int32_t index, void **stream) {
  ENTER();
  *stream = current_stream();
  return index != 0;
}

static dct_err sim_torch_delete_stable_ivalue(dct_value *value) {
  free(value);
  count(-1);
  return 0;
}

#define NUMBER(name, value)         \
  static int32_t sim_##name(void) { \
    return (value);                 \
  }
NUMBER(aoti_torch_device_type_cpu, SIM_CPU)
NUMBER(aoti_torch_device_type_cuda, SIM_CUDA)
NUMBER(aoti_torch_device_type_meta, SIM_META)
NUMBER(aoti_torch_layout_strided, 0)
NUMBER(aoti_torch_memory_format_contiguous_format, 0)
NUMBER(aoti_torch_dtype_uint8, 0)
NUMBER(aoti_torch_dtype_int8, 1)
NUMBER(aoti_torch_dtype_int16, 2)
NUMBER(aoti_torch_dtype_int32, 3)
NUMBER(aoti_torch_dtype_int64, 4)
NUMBER(aoti_torch_dtype_float16, 5)
NUMBER(aoti_torch_dtype_float32, SIM_FLOAT32)
NUMBER(aoti_torch_dtype_float64, 7)
NUMBER(aoti_torch_dtype_bool, 11)
NUMBER(aoti_torch_dtype_bfloat16, SIM_BFLOAT16)

static void sim_aoti_torch_check(bool ok, const char *function, const char *file, uint32_t line, const char *message) {
  (void)function;
  (void)file;
  (void)line;
  if (!ok) {
    snprintf(raised_text, sizeof raised_text, "%s", message);
    longjmp(raised, 1);
  }
}

/* ---- operators ---- */

static dct_kernel kernel_of(const char *ns, const char *name, const char *key) {
  char id[96];
  snprintf(id, sizeof id, "%s::%s/%s", ns, name, key);
  for (int i = 0; i < kernel_count; i++) {
    if (strcmp(kernels[i].id, id) == 0) {
      return kernels[i].kernel;
    }
  }
  return NULL;
}

bool torchsim_has(const char *ns, const char *name, const char *key) {
  return kernel_of(ns, name, key) != NULL;
}

const char *torchsim_call(const char *ns, const char *name, const char *key, dct_value *stack, uint64_t inputs,
                          uint64_t outputs) {
  dct_kernel kernel = kernel_of(ns, name, key);
  if (kernel == NULL) {
    return "no kernel";
  }
  if (setjmp(raised) != 0) {
    return raised_text;
  }
  kernel(stack, inputs, outputs);
  return NULL;
}

/* ---- looking up symbols in the process ---- */

void *torchsim_dlopen(const char *name, int flags);
void *torchsim_dlsym(void *library, const char *wanted);

static char cpu_library, cuda_library;

void torchsim_hide(const char *name) {
  snprintf(hidden, sizeof hidden, "%s", name == NULL ? "" : name);
}

void *torchsim_dlopen(const char *name, int flags) {
  bool known = (flags & RTLD_NOLOAD) != 0 && strcmp(name, hidden) != 0;
  return !known                                  ? NULL
         : strcmp(name, "libtorch_cpu.so") == 0  ? &cpu_library
         : strcmp(name, "libtorch_cuda.so") == 0 ? &cuda_library
                                                 : NULL;
}

/* A function pointer's bits, as dlsym() gives them. */
#define FOUND(name)                          \
  if (strcmp(wanted, #name) == 0) {          \
    void *bits;                              \
    __typeof__(&sim_##name) fn = sim_##name; \
    memcpy(&bits, &fn, sizeof bits);         \
    return bits;                             \
  }

static void *symbol_of_cpu(const char *wanted) {
#define X(result, name, args) FOUND(name)
  DCT_SHIM(X)
#undef X
  FOUND(torch_delete_stable_ivalue)
  return NULL;
}

void *torchsim_dlsym(void *library, const char *wanted) {
  if (strcmp(wanted, hidden) == 0) {
    return NULL;
  }
  if (library == &cuda_library) {
    FOUND(aoti_torch_get_current_cuda_stream)
    return NULL;
  }
  return symbol_of_cpu(wanted);
}
