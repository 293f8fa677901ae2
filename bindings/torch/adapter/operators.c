/* The operators' bodies. Real ones map 1:1 to chapter 9 of dc_api.h; fakes, the kernels of the Meta key, rest on
 * dc_context_dry_run() and never read a size, which would specialise a dynamic shape. */
#include "operators.h"

#include <stdlib.h>

#include "call.h"
#include "tensor_storage.h"

/* ---- the thirteen operators, and the four of dc_rt ---- */

static const char *allgather_param(dct_call *call) {
  dc_tensor out = DC_TENSOR_INIT;
  if (dc_allgather_param(call->context, NULL, call->graph_id, call->id, call->dtype, &out) != DC_OK) {
    return dc_last_error();
  }
  /* The reference keeps the handle, not the memory: that goes with dc_release_param(). */
  return dct_return_buffer(call, &out, dc_buffer_retain(out.buffer), false);
}

static const char *take_as(dct_call *call, bool transposed) {
  dc_tensor out = DC_TENSOR_INIT;
  dc_buffer *owned = NULL;
  if (dc_allgather_param(call->context, NULL, call->graph_id, call->id, call->dtype, &out) != DC_OK ||
      dc_take_param(call->context, call->graph_id, call->id, call->dtype, &owned) != DC_OK) {
    return dc_last_error();
  }
  out.data = dc_buffer_data(owned);
  if (transposed && out.ndim != 2) {
    dc_buffer_release(owned);
    return dct_format_error("id = %lld is not a matrix, whose transpose ~id would be", (long long)call->id);
  }
  return transposed ? dct_return_transposed(call, &out, owned) : dct_return_buffer(call, &out, owned, false);
}

static const char *take(dct_call *call) {
  return take_as(call, false);
}

/* Several, in one call of the dispatcher, ~id as a transpose. A view would cost as much as all else of a small one.
 * Those that are taken when one fails go with the call's arguments. */
static const char *take_params(dct_call *call) {
  if (call->has_dtypes && call->dtype_count != call->int_count) {
    return dct_format_error("ids and dtypes must be of one length, have %zu and %zu", call->int_count,
                            call->dtype_count);
  }
  call->tensors = malloc((call->int_count + 1) * sizeof *call->tensors);
  if (call->tensors == NULL) {
    return "out of memory";
  }
  for (size_t i = 0; i < call->int_count; ++i) {
    const bool transposed = (int64_t)call->ints[i] < 0;
    call->id = transposed ? ~(int64_t)call->ints[i] : (int64_t)call->ints[i];
    call->dtype = call->has_dtypes ? dct_decode_dtype(call, call->dtypes[i]) : DC_DTYPE_NONE;
    const char *error = call->error != NULL ? call->error : take_as(call, transposed);
    if (error != NULL) {
      return error;
    }
    call->tensors[call->tensor_count++] = dct_as_value(call->result);
  }
  dct_list list = dct_make_list(call->tensors, call->tensor_count);
  if (list == NULL) {
    return dct_torch_reason();
  }
  call->tensor_count = 0;
  call->result = dct_as_tensor(dct_as_value(list));
  return NULL;
}

static const char *gather_fake(dct_call *call) {
  dc_op_info info = {.struct_size = sizeof info};
  if (dc_context_dry_run(call->context, DC_OP_ALLGATHER_PARAM, call->graph_id, call->id, call->dtype, &info) != DC_OK) {
    return dc_last_error();
  }
  return dct_return_empty(call, info.shape, info.ndim, dct_torch.dtypes[info.dtype], dct_torch.meta, 0);
}

static const char *prefetch_params_fused(dct_call *call) {
  if (call->tensor_count != call->int_count || (call->has_dtypes && call->dtype_count != call->int_count)) {
    return dct_format_error("params, ids and dtypes must be of one length, have %zu, %zu and %zu", call->tensor_count,
                            call->int_count, call->has_dtypes ? call->dtype_count : call->int_count);
  }
  int32_t *dtypes = NULL;
  if (call->has_dtypes) {
    dtypes = malloc((call->int_count + 1) * sizeof *dtypes);
    if (dtypes == NULL) {
      return "out of memory";
    }
    for (size_t i = 0; i < call->dtype_count; ++i) {
      dtypes[i] = dct_decode_dtype(call, call->dtypes[i]);
    }
  }
  const char *error = call->error;
  if (error == NULL) {
    error = dct_status_text(dc_prefetch_params_fused(call->context, call->graph_id, (const int64_t *)call->ints, dtypes,
                                                     (int64_t)call->int_count));
  }
  free(dtypes);
  return error;
}

static const char *wait_allgather(dct_call *call) {
  const char *error = dct_status_text(dc_wait_allgather(call->context, NULL, call->graph_id, call->id));
  return error != NULL ? error : dct_return_alias(call);
}

static const char *release_param(dct_call *call) {
  const char *error = dct_status_text(dc_release_param(call->context, NULL, call->graph_id, call->id, call->n_users));
  return error != NULL ? error : dct_return_alias(call);
}

static const char *alias_fake(dct_call *call) {
  return dct_return_alias(call);
}

/* On a CUDA device the gradient, and the contiguous copy that dct_read_data() may have made, can go as soon as this
 * returns. The card has not read it yet, but the read is on the current stream by then. PyTorch's allocator gives the
 * memory to later work of the stream that it was taken on, which in a backward is the current one. (Autograd records
 * on other streams what goes from one to another.) */
static const char *reduce_a(dct_call *call, dc_tensor *a) {
  const char *error = dct_read_data(call, a);
  return error != NULL ? error : dct_status_text(dc_reduce_grad(call->context, a, call->graph_id, call->id));
}

static const char *reduce_grad(dct_call *call) {
  static const int64_t none[1] = {0};
  dc_tensor a = DC_TENSOR_INIT;
  const char *error = reduce_a(call, &a);
  return error != NULL ? error : dct_return_empty(call, none, 1, dct_torch.dtypes[a.dtype], call->device, call->index);
}

/* Several, in one call of the dispatcher and without a token. */
static const char *reduce_grads(dct_call *call) {
  if (call->tensor_count != call->int_count) {
    return dct_format_error("grads and ids must be of one length, have %zu and %zu", call->tensor_count,
                            call->int_count);
  }
  const char *error = NULL;
  for (size_t i = 0; error == NULL && i < call->tensor_count; ++i) {
    dc_tensor a = DC_TENSOR_INIT;
    call->a = dct_as_tensor(call->tensors[i]);
    call->id = (int64_t)call->ints[i];
    error = reduce_a(call, &a);
    call->tensors[i] = dct_as_value(call->a); /* perhaps a contiguous copy by now */
    call->a = NULL;
  }
  return error;
}

static const char *reduce_fake(dct_call *call) {
  static const int64_t none[1] = {0};
  int32_t dtype = 0;
  if (dct_torch.aoti_torch_get_dtype(call->a, &dtype) != 0) {
    return dct_torch_reason();
  }
  return dct_return_empty(call, none, 1, dtype, dct_torch.meta, 0);
}

/* Describes each tensor to dc_free_tensors() by its length, address and, for libdc's own memory, its buffer. */
static const char *describe(dct_call *call, dc_tensor *views, int64_t *numels) {
  for (size_t i = 0; i < call->tensor_count; ++i) {
    dct_tensor tensor = dct_as_tensor(call->tensors[i]);
    void *data = NULL;
    int32_t dtype = 0;
    if (dct_torch.aoti_torch_get_numel(tensor, &numels[i]) != 0 ||
        dct_torch.aoti_torch_get_dtype(tensor, &dtype) != 0 ||
        dct_torch.torch_get_mutable_data_ptr(tensor, &data) != 0) {
      return dct_torch_reason();
    }
    int32_t known = dct_dtype_from_torch(dtype);
    numels[i] = data == NULL ? 0 : numels[i]; /* freed already */
    views[i] = (dc_tensor){.struct_size = sizeof views[i],
                           .data = data,
                           .shape = &numels[i],
                           .ndim = 1,
                           .dtype = known < 0 ? DC_UINT8 : known,
                           .buffer = dct_storage_find(data)};
  }
  return NULL;
}

/* Empties the storages that PyTorch owns, for all tensors that share them; shapes stay. Storages over another
 * library's memory can't be emptied, and keep it: freeing early is optional. */
static void free_flagged(const dct_call *call, const dc_tensor *views, const int32_t *freed) {
  for (size_t i = 0; i < call->tensor_count; ++i) {
    dct_tensor copy = NULL; /* the call consumes a handle */
    if (freed[i] == 0 || views[i].buffer != NULL ||
        dct_torch.aoti_torch_new_tensor_handle(dct_as_tensor(call->tensors[i]), &copy) != 0) {
      continue;
    }
    dct_value stack[2] = {dct_as_value(copy), 0};
    (void)dct_torch.torch_call_dispatcher("inductor::resize_storage_bytes_", "", stack, DCT_TORCH_ABI);
  }
}

static const char *free_tensors(dct_call *call) {
  size_t n = call->tensor_count;
  dc_tensor *views = calloc(n + 1, sizeof *views);
  int64_t *numels = calloc(n + 1, sizeof *numels);
  int32_t *freed = calloc(n + 1, sizeof *freed);
  const char *error = "out of memory";
  if (views != NULL && numels != NULL && freed != NULL) {
    error = describe(call, views, numels);
    if (error == NULL) {
      error = dct_status_text(dc_free_tensors(call->context, views, sizeof *views, (int64_t)n, freed));
    }
    if (error == NULL) {
      free_flagged(call, views, freed);
    }
    for (size_t i = 0; i < n; ++i) {
      dc_buffer_release(views[i].buffer);
    }
  }
  free(views);
  free(numels);
  free(freed);
  return error;
}

/* The four copies between device and host keep no view of `a` but offload_tensor. */
static const char *return_out(dct_call *call, dc_status status, const dc_tensor *out, bool host) {
  return status != DC_OK ? dc_last_error() : dct_return_buffer(call, out, dc_buffer_retain(out->buffer), host);
}

/* On a CUDA device the offload stream reads `a` without PyTorch's knowledge: so `a` is kept until a stream that has
 * waited for the copy has passed. */
static const char *offload_tensor(dct_call *call) {
  dc_tensor a = DC_TENSOR_INIT;
  dc_tensor out = DC_TENSOR_INIT;
  dct_held_tensor *held = NULL;
  const char *error = dct_read_data(call, &a);
  if (error == NULL && call->sync != NULL) {
    held = dct_hold_begin(call->sync, &error);
  }
  if (error != NULL) {
    return error;
  }
  dc_status status = dc_offload_tensor(call->context, &a, call->graph_id, call->id, &out);
  if (held != NULL) {
    dct_hold_end(call->sync, held, status == DC_OK ? call->a : NULL, call->graph_id, call->id);
    call->a = status == DC_OK ? NULL : call->a;
  }
  return return_out(call, status, &out, true);
}

static const char *wait_offload(dct_call *call) {
  dc_tensor out = DC_TENSOR_INIT;
  dc_status status = dc_wait_offload(call->context, NULL, call->graph_id, call->id, &out);
  if (status == DC_OK && call->sync != NULL) {
    dct_hold_waited(call->sync, call->graph_id, call->id);
  }
  return return_out(call, status, &out, true);
}

static const char *reload_tensor(dct_call *call) {
  dc_tensor out = DC_TENSOR_INIT;
  return return_out(call, dc_reload_tensor(call->context, NULL, call->graph_id, call->id, &out), &out, false);
}

static const char *wait_reload(dct_call *call) {
  dc_tensor a = DC_TENSOR_INIT;
  dc_tensor out = DC_TENSOR_INIT;
  const char *error = dct_read_a(call, &a);
  if (error != NULL) {
    return error;
  }
  dc_status status = dc_wait_reload(call->context, &a, call->graph_id, call->id, &out);
  if (status == DC_OK && out.buffer == NULL) { /* profiling without a reload: `a` itself came back */
    return dct_return_clone(call);
  }
  return return_out(call, status, &out, false);
}

static const char *offload_parameter(dct_call *call) {
  return dct_status_text(dc_offload_parameter(call->context, NULL, call->graph_id, call->id));
}

static const char *reload_parameter(dct_call *call) {
  return dct_status_text(dc_reload_parameter(call->context, NULL, call->graph_id, call->id));
}

static const char *nothing_fake(dct_call *call) {
  (void)call;
  return NULL;
}

static const char *end_backward(dct_call *call) {
  return dct_status_text(dc_end_backward(call->context, call->graph_id, 0));
}

static const char *alloc(dct_call *call) {
  int64_t bytes = (int64_t)dc_dtype_size(call->dtype);
  for (size_t i = 0; i < call->int_count; ++i) {
    int64_t length = (int64_t)call->ints[i];
    if (length < 0 || __builtin_mul_overflow(bytes, length, &bytes)) {
      return dct_format_error("shape[%zu] = %lld, must be >= 0 and the whole must fit in memory", i, (long long)length);
    }
  }
  if (call->int_count > DCT_MAX_DIMS) {
    return dct_format_error("shape has %zu dimensions, at most %d are allowed", call->int_count, DCT_MAX_DIMS);
  }
  dc_buffer *owned = NULL;
  if (dc_context_alloc(call->context, bytes, (int32_t)call->kind, &owned) != DC_OK) {
    return dc_last_error();
  }
  dc_tensor out = {.struct_size = sizeof out,
                   .data = dc_buffer_data(owned),
                   .shape = (const int64_t *)call->ints,
                   .ndim = (int32_t)call->int_count,
                   .dtype = call->dtype};
  return dct_return_buffer(call, &out, owned, call->kind == DC_MEMORY_HOST);
}

/* ---- the table ---- */

/* clang-format off */
/*  namespace, name, schema, signature for decode(), without tensors?, Meta body (NONE: in Python) */
#define OPS(X, NONE)                                                                                                  \
  X("dc", allgather_param, "(Tensor a, int graph_id, int id, ScalarType? dtype = None) -> Tensor", "agid", false,     \
    gather_fake)                                                                                                      \
  NONE("dc", prefetch_params_fused,                                                                                   \
       "(int graph_id, Tensor[] params, int[] ids, ScalarType[]? dtypes = None) -> ()", "gTID", true)                 \
  X("dc", wait_allgather, "(Tensor(a) a, int graph_id, int id) -> Tensor(a)", "agi", false, alias_fake)               \
  X("dc", release_param, "(Tensor(a) a, int graph_id, int id, int n_users) -> Tensor(a)", "agin", false, alias_fake)  \
  X("dc", reduce_grad, "(Tensor a, int graph_id, int id) -> Tensor", "agi", false, reduce_fake)                  \
  NONE("dc", free_tensors, "(Tensor[] a) -> ()", "T", true)                                                           \
  NONE("dc", offload_tensor, "(Tensor a, int graph_id, int id) -> Tensor", "agi", false)                              \
  NONE("dc", reload_tensor, "(Tensor a, int graph_id, int id) -> Tensor", "agi", false)                               \
  NONE("dc", wait_offload, "(Tensor a, int graph_id, int id) -> Tensor", "agi", false)                                \
  NONE("dc", wait_reload, "(Tensor a, int graph_id, int id) -> Tensor", "agi", false)                                 \
  X("dc", offload_parameter, "(Tensor a, int graph_id, int id) -> ()", "agi", false, nothing_fake)                    \
  X("dc", reload_parameter, "(Tensor a, int graph_id, int id) -> ()", "agi", false, nothing_fake)                     \
  NONE("dc", end_backward, "(int graph_id) -> ()", "g", true)                                                         \
  X("dc_rt", take, "(Tensor shard, int graph_id, int id, ScalarType? dtype = None) -> Tensor", "agid", false,         \
    gather_fake)                                                                                                      \
  NONE("dc_rt", take_params, "(int graph_id, int[] ids, ScalarType[]? dtypes = None) -> Tensor[]", "gID", true)       \
  NONE("dc_rt", reduce_grads, "(Tensor[] grads, int graph_id, int[] ids) -> ()", "TgI", true)                          \
  NONE("dc_rt", alloc, "(int[] shape, ScalarType dtype, int kind) -> Tensor", "Isk", true)
/* clang-format on */

#define REAL(ns, name, schema, signature, any)                                   \
  static void name##_real(dct_value *stack, uint64_t inputs, uint64_t outputs) { \
    (void)inputs;                                                                \
    dct_run(ns "::" #name, signature, name, false, stack, outputs);              \
  }
#define REAL_AND_META(ns, name, schema, signature, any, meta)                    \
  REAL(ns, name, schema, signature, any)                                         \
  static void name##_meta(dct_value *stack, uint64_t inputs, uint64_t outputs) { \
    (void)inputs;                                                                \
    dct_run(ns "::" #name, signature, meta, true, stack, outputs);               \
  }
OPS(REAL_AND_META, REAL)

#define ROW(ns, name, schema, signature, any) {ns, #name, #name schema, any, name##_real, NULL},
#define ROW_META(ns, name, schema, signature, any, meta) {ns, #name, #name schema, any, name##_real, name##_meta},
const dct_op dct_ops[] = {OPS(ROW_META, ROW)};
const size_t dct_op_count = sizeof dct_ops / sizeof dct_ops[0];
