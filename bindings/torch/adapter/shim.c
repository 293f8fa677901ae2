/* Finds libtorch's C shim in the running process, and the few helpers that hide its value representation. */
#include "shim.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

dct_shim dct_torch;

static void *find_symbol(void *library, const char *name) {
  return library == NULL ? NULL : dlsym(library, name);
}

static void shim_read_numbers(void) {
  dct_shim *t = &dct_torch;
  t->cpu = t->aoti_torch_device_type_cpu();
  t->cuda = t->aoti_torch_device_type_cuda();
  t->meta = t->aoti_torch_device_type_meta();
  t->strided = t->aoti_torch_layout_strided();
  t->dtypes[DC_DTYPE_NONE] = -1;
  t->dtypes[DC_FLOAT32] = t->aoti_torch_dtype_float32();
  t->dtypes[DC_FLOAT64] = t->aoti_torch_dtype_float64();
  t->dtypes[DC_FLOAT16] = t->aoti_torch_dtype_float16();
  t->dtypes[DC_BFLOAT16] = t->aoti_torch_dtype_bfloat16();
  t->dtypes[DC_INT8] = t->aoti_torch_dtype_int8();
  t->dtypes[DC_INT32] = t->aoti_torch_dtype_int32();
  t->dtypes[DC_INT64] = t->aoti_torch_dtype_int64();
  t->dtypes[DC_UINT8] = t->aoti_torch_dtype_uint8();
  t->dtypes[DC_INT16] = t->aoti_torch_dtype_int16();
  t->dtypes[DC_BOOL] = t->aoti_torch_dtype_bool();
}

const char *dct_shim_resolve(char *text, size_t cap) {
  void *torch = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_NOW | RTLD_LOCAL);
  if (torch == NULL) {
    snprintf(text, cap, "dct_register: libtorch_cpu.so is not loaded in this process: import torch first");
    return text;
  }
  /* A function pointer cannot be assigned from void * in ISO C; dlsym() promises that the bits are right. */
#define X(result, name, args)                                                                                 \
  *(void **)(&dct_torch.name) = find_symbol(torch, #name);                                                    \
  if (dct_torch.name == NULL) {                                                                               \
    snprintf(text, cap, "dct_register: the loaded libtorch has no %s; torch 2.11 or later is needed", #name); \
    return text;                                                                                              \
  }
  DCT_SHIM(X)
#undef X
  *(void **)(&dct_torch.torch_delete_stable_ivalue) = find_symbol(torch, "torch_delete_stable_ivalue");
  *(void **)(&dct_torch.torch_exception_get_what_without_backtrace) =
      find_symbol(torch, "torch_exception_get_what_without_backtrace");
  *(void **)(&dct_torch.operator_delete) = find_symbol(torch, "_ZdlPv"); /* searches libtorch's own dependencies too */
  if (dct_torch.torch_delete_stable_ivalue == NULL && dct_torch.operator_delete == NULL) {
    snprintf(text, cap, "dct_register: neither torch_delete_stable_ivalue nor operator delete can be found");
    return text;
  }
  void *torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_NOW | RTLD_LOCAL);
  *(void **)(&dct_torch.aoti_torch_get_current_cuda_stream) =
      find_symbol(torch_cuda, "aoti_torch_get_current_cuda_stream");
  shim_read_numbers();
  return NULL;
}

const char *dct_torch_reason(void) {
  const char *what = NULL;
  if (dct_torch.torch_exception_get_what_without_backtrace != NULL) {
    what = dct_torch.torch_exception_get_what_without_backtrace();
  }
  return what != NULL && what[0] != '\0' ? what : "this version of torch does not tell why";
}

void dct_raise(const char *function, const char *text) {
  dct_torch.aoti_torch_check(false, function, "libdc_torch", 0, text);
}

int32_t dct_dtype_from_torch(int32_t dtype) {
  for (int32_t i = DC_FLOAT32; i <= DC_BOOL; ++i) {
    if (dct_torch.dtypes[i] == dtype) {
      return i;
    }
  }
  return -1;
}

bool dct_take_optional(dct_value slot, dct_value *value) {
  if (slot == 0) {
    return false;
  }
  dct_value *box = (dct_value *)(uintptr_t)slot;
  *value = *box;
  if (dct_torch.torch_delete_stable_ivalue != NULL) {
    dct_torch.torch_delete_stable_ivalue(box);
  } else {
    dct_torch.operator_delete(box);
  }
  return true;
}

bool dct_take_list(dct_value slot, dct_value **items, size_t *count) {
  dct_list list = (dct_list)(uintptr_t)slot;
  size_t n = 0;
  bool ok = dct_torch.torch_list_size(list, &n) == 0;
  *count = 0;
  *items = ok ? malloc((n + 1) * sizeof **items) : NULL;
  for (size_t i = 0; *items != NULL && i < n; ++i) {
    if (dct_torch.torch_list_get_item(list, i, *items + i) != 0) {
      break;
    }
    *count = i + 1;
  }
  ok = *items != NULL && *count == n;
  dct_torch.torch_delete_list(list);
  return ok;
}

dct_list dct_make_list(const dct_value *items, size_t count) {
  dct_list list = NULL;
  bool ok = dct_torch.torch_new_list_reserve_size(count, &list) == 0;
  for (size_t i = 0; ok && i < count; ++i) {
    ok = dct_torch.torch_list_push_back(list, items[i]) == 0;
  }
  if (!ok && list != NULL) {
    dct_torch.torch_delete_list(list); /* not what is in it */
    list = NULL;
  }
  return list;
}
