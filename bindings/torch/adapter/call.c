/* Around every operator: the stack's values decoded, freed, and turned into results or an exception. */
#include "call.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "adapter.h"
#include "contexts.h"
#include "tensor_storage.h"

const char *dct_format_error(const char *format, ...) {
  /* Two alternate, so that an argument may be the previous text. */
  static _Thread_local char buffers[2][512];
  static _Thread_local int next_text;
  next_text = 1 - next_text;
  va_list args;
  va_start(args, format);
  vsnprintf(buffers[next_text], sizeof buffers[next_text], format, args);
  va_end(args);
  return buffers[next_text];
}

const char *dct_status_text(dc_status status) {
  return status == DC_OK ? NULL : dc_last_error();
}

/* ---- decoding: one letter an argument ---- */

int32_t dct_decode_dtype(dct_call *call, dct_value value) {
  int32_t dtype = dct_dtype_from_torch((int32_t)value);
  if (dtype < 0 && call->error == NULL) {
    call->error = dct_format_error(
        "dtype: ScalarType %d is not one of libdc's (float32, float64, float16, bfloat16, int8, int32, "
        "int64, uint8, int16, bool)",
        (int)(int32_t)value);
  }
  return dtype;
}

static void decode_list(dct_call *call, dct_value slot, dct_value **items, size_t *count) {
  if (!dct_take_list(slot, items, count) && call->error == NULL) {
    call->error = "a list argument could not be read";
  }
}

static void decode(dct_call *call, const char *signature, dct_value *stack) {
  dct_value value;
  for (; *signature != '\0'; ++signature, ++stack) {
    switch (*signature) {
      case 'a':
        call->a = dct_as_tensor(*stack);
        break;
      case 'g':
        call->graph_id = (int64_t)*stack;
        call->context = dct_context_of(call->graph_id);
        break;
      case 'i':
        call->id = (int64_t)*stack;
        break;
      case 'n':
        call->n_users = (int64_t)*stack;
        break;
      case 'k':
        call->kind = (int64_t)*stack;
        break;
      case 's':
        call->dtype = dct_decode_dtype(call, *stack);
        break;
      case 'd':
        call->dtype = dct_take_optional(*stack, &value) ? dct_decode_dtype(call, value) : DC_DTYPE_NONE;
        break;
      case 'T':
        decode_list(call, *stack, &call->tensors, &call->tensor_count);
        break;
      case 'I':
        decode_list(call, *stack, &call->ints, &call->int_count);
        break;
      case 'D':
        call->has_dtypes = dct_take_optional(*stack, &value);
        if (call->has_dtypes) {
          decode_list(call, value, &call->dtypes, &call->dtype_count);
        }
        break;
      default:
        call->error = "unknown argument in the operator table";
    }
  }
}

static void free_args(dct_call *call) {
  if (call->a != NULL) {
    dct_torch.aoti_torch_delete_tensor_object(call->a);
  }
  for (size_t i = 0; i < call->tensor_count; ++i) {
    dct_torch.aoti_torch_delete_tensor_object(dct_as_tensor(call->tensors[i]));
  }
  free(call->tensors);
  free(call->ints);
  free(call->dtypes);
}

/* ---- devices ---- */

static const char *device_name(char text[32], int32_t device, int32_t index) {
  if (device == dct_torch.cpu) {
    return "the CPU";
  }
  snprintf(text, 32, device == dct_torch.cuda ? "cuda:%d" : "device number %d of another kind", (int)index);
  return text;
}

static const char *check_device(const dct_call *call, dct_tensor tensor, bool token) {
  int32_t device = 0;
  int32_t index = 0;
  if (dct_torch.aoti_torch_get_device_type(tensor, &device) != 0 ||
      dct_torch.aoti_torch_get_device_index(tensor, &index) != 0) {
    return dct_torch_reason();
  }
  bool same_device = device == call->device && (device == dct_torch.cpu || index == call->index);
  if (same_device || (token && device == dct_torch.cpu)) {
    return NULL;
  }
  char theirs[32];
  char ours[32];
  return dct_format_error("a tensor is on %s, must be on %s as the context's are", device_name(theirs, device, index),
                          device_name(ours, call->device, call->index));
}

/* A PyTorch without CUDA has tensors on the CPU alone. */
static const char *check_devices(const dct_call *call) {
  const char *error = NULL;
  if (dct_torch.aoti_torch_get_current_cuda_stream != NULL) {
    error = call->a == NULL ? NULL : check_device(call, call->a, true);
    for (size_t i = 0; error == NULL && i < call->tensor_count; ++i) {
      error = check_device(call, dct_as_tensor(call->tensors[i]), true);
    }
  }
  return error;
}

/* The body, on PyTorch's current stream where the context is on a CUDA device. */
static const char *run_real(dct_call *call, dct_body body) {
  const char *error = dct_stream_sync_begin(call->context, &call->sync);
  if (error == NULL && call->sync != NULL) {
    call->device = dct_torch.cuda;
    call->index = dct_stream_sync_index(call->sync);
  }
  error = error != NULL ? error : check_devices(call);
  error = error != NULL ? error : body(call);
  dct_stream_sync_end(call->sync);
  return error;
}

void dct_run(const char *name, const char *signature, dct_body body, bool fake, dct_value *stack, uint64_t outputs) {
  /* The CPU has no number. */
  dct_call call = {.context = dct_get_context(), .device = dct_torch.cpu, .index = -1};
  decode(&call, signature, stack);
  const char *error = call.error;
  if (error == NULL && call.context == NULL) {
    error = "no default context: call libdc.torch.dc.init() first";
  }
  if (error == NULL) {
    error = fake ? body(&call) : run_real(&call, body);
  }
  free_args(&call);
  if (error != NULL && error != dc_last_error()) {
    error = dct_format_error("%s: %s", name, error); /* libdc's own texts begin with its function's name */
  }
  if (error != NULL) {
    dct_raise(name, error);
  } else if (outputs > 0) {
    stack[0] = dct_as_value(call.result);
  }
}

/* ---- tensors in, tensors out ---- */

/* Replaces call->a by the result of a one-tensor ATen call, which consumes it. */
static const char *replace_tensor_arg(dct_call *call, const char *op, dct_value second) {
  dct_value stack[2] = {dct_as_value(call->a), second};
  call->a = NULL;
  if (dct_torch.torch_call_dispatcher(op, "", stack, DCT_TORCH_ABI) != 0) {
    return dct_format_error("%s failed: %s", op, dct_torch_reason());
  }
  call->a = dct_as_tensor(stack[0]);
  return NULL;
}

static const char *return_call(dct_call *call, const char *op) {
  const char *error = replace_tensor_arg(call, op, 0);
  call->result = call->a;
  call->a = NULL;
  return error;
}

const char *dct_return_alias(dct_call *call) {
  return return_call(call, "aten::alias");
}

const char *dct_return_clone(dct_call *call) {
  return return_call(call, "aten::clone");
}

const char *dct_return_buffer(dct_call *call, const dc_tensor *out, dc_buffer *owned, bool host) {
  const char *error = NULL;
  call->result = dct_storage_tensor(out->data, out->shape, NULL, out->ndim, out->dtype,
                                    host ? dct_torch.cpu : call->device, host ? -1 : call->index, owned, &error);
  return error;
}

const char *dct_return_transposed(dct_call *call, const dc_tensor *out, dc_buffer *owned) {
  const char *error = NULL;
  const int64_t shape[2] = {out->shape[1], out->shape[0]};
  const int64_t strides[2] = {1, out->shape[1] > 0 ? out->shape[1] : 1};
  call->result = dct_storage_tensor(out->data, shape, strides, 2, out->dtype, call->device, call->index, owned, &error);
  return error;
}

const char *dct_return_empty(dct_call *call, const int64_t *shape, int32_t ndim, int32_t dtype, int32_t device,
                             int32_t index) {
  int64_t strides[DCT_MAX_DIMS];
  dct_contiguous_strides(shape, ndim, strides);
  if (dct_torch.aoti_torch_empty_strided(ndim, shape, strides, dtype, device, index, &call->result) != 0) {
    return dct_torch_reason();
  }
  return NULL;
}

const char *dct_read_a(dct_call *call, dc_tensor *view) {
  int32_t layout = 0;
  int32_t dtype = 0;
  int64_t ndim = 0;
  int64_t *sizes = NULL;
  bool contiguous = false;
  if (dct_torch.aoti_torch_get_layout(call->a, &layout) != 0 || layout != dct_torch.strided) {
    return "a: must be a strided tensor (not sparse)";
  }
  if (dct_torch.aoti_torch_is_contiguous(call->a, &contiguous) != 0) {
    return dct_torch_reason();
  }
  if (!contiguous) {
    const char *error = replace_tensor_arg(call, "aten::contiguous",
                                           (dct_value)(uint32_t)dct_torch.aoti_torch_memory_format_contiguous_format());
    if (error != NULL) {
      return error;
    }
  }
  if (dct_torch.aoti_torch_get_dtype(call->a, &dtype) != 0 || dct_torch.aoti_torch_get_dim(call->a, &ndim) != 0 ||
      dct_torch.aoti_torch_get_sizes(call->a, &sizes) != 0 ||
      dct_torch.torch_get_mutable_data_ptr(call->a, &view->data) != 0) {
    return dct_torch_reason();
  }
  view->dtype = dct_decode_dtype(call, (dct_value)(uint32_t)dtype);
  view->shape = sizes;
  view->ndim = (int32_t)ndim;
  return call->error;
}

const char *dct_read_data(dct_call *call, dc_tensor *view) {
  const char *error = call->sync == NULL ? NULL : check_device(call, call->a, false);
  return error != NULL ? error : dct_read_a(call, view);
}
