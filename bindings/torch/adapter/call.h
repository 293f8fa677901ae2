/* One call of an operator: its decoded arguments, and how tensors come in and go out. */
#ifndef DCT_CALL_H
#define DCT_CALL_H

#include "shim.h"
#include "stream_sync.h"

typedef struct dct_call {
  dc_context *context;
  dct_stream_sync *sync; /* of a real kernel's context on a CUDA device, while the body runs */
  int32_t device, index; /* where the context's tensors lie, in libtorch's numbers */
  dct_tensor a;          /* the tensor argument, if the operator has one */
  int64_t graph_id, id, n_users, kind;
  int32_t dtype; /* enum dc_dtype; DC_DTYPE_NONE: not given */
  dct_value *tensors, *ints, *dtypes;
  size_t tensor_count, int_count, dtype_count;
  bool has_dtypes;
  const char *error; /* found while decoding */
  dct_tensor result; /* or the handle of a list */
} dct_call;

/* The work of an operator. NULL, or an error's text that stays valid until the thread's next call. */
typedef const char *(*dct_body)(dct_call *call);

/* Decodes the stack, one letter of `signature` for each argument, runs the body, frees what the kernel owns, and only
 * then raises or stores the result. A fake, the body of the Meta key, tracks no stream and checks no device. */
void dct_run(const char *name, const char *signature, dct_body body, bool fake, dct_value *stack, uint64_t outputs);

/* Formats this thread's error text and returns it. */
const char *dct_format_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* NULL for DC_OK, else libdc's text. */
const char *dct_status_text(dc_status status);

/* enum dc_dtype of a value; an unknown one becomes the call's error. */
int32_t dct_decode_dtype(dct_call *call, dct_value value);

/* A view of call->a, made contiguous first where it is not. */
const char *dct_read_a(dct_call *call, dc_tensor *view);
/* The same for what the library itself reads: a must lie on the context's device, which tokens need not. */
const char *dct_read_data(dct_call *call, dc_tensor *view);

/* Results. The argument itself: as an alias of its own, since the dispatcher's checks forbid the same object. */
const char *dct_return_alias(dct_call *call);
/* A copy of the argument. */
const char *dct_return_clone(dct_call *call);
/* Memory of libdc; takes over the reference `owned`. host: on the CPU, else on the context's device. */
const char *dct_return_buffer(dct_call *call, const dc_tensor *out, dc_buffer *owned, bool host);
/* The transpose of a matrix in memory of libdc, which lies on the context's device. */
const char *dct_return_transposed(dct_call *call, const dc_tensor *out, dc_buffer *owned);
/* Uninitialised, contiguous; dtype and device are libtorch's numbers. */
const char *dct_return_empty(dct_call *call, const int64_t *shape, int32_t ndim, int32_t dtype, int32_t device,
                             int32_t index);

#endif
