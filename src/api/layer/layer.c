/* Chapter 12: calls of the transformer layer. All checks of arguments are here and in layer_config.c, so that the
 * module transformer gets valid jobs. */
#include <stdio.h>
#include <string.h>

#include "api/api_internal.h"
#include "transformer/transformer.h"

static const char *const WEIGHTS[DC_LAYER_WEIGHTS] = {"attn_qkvw", "attn_qkvb", "attn_ow", "attn_ob",
                                                      "attn_nw",   "attn_nb",   "inter_w", "inter_b",
                                                      "output_w",  "output_b",  "norm_w",  "norm_b"};

/* ---- a call ---- */

static dc_status layer_check_handle(const char *fn, const dc_layer *layer) {
  DC__TRY(dc__handle_check(fn, "layer", layer, DC__HANDLE_LAYER));
  return dc__owner_check(fn, "layer", &layer->device->owner);
}

static dc_status check_offsets(const char *fn, const dc_layer_call *call) {
  const int32_t *cu = call->cu_seqlens;
  for (int64_t b = 0; b <= call->batch; b++) {
    int64_t length = b == 0 ? cu[0] : (int64_t)cu[b] - cu[b - 1];
    if (b == 0 ? length != 0 : length < 0 || length > call->seq_length) {
      return dc__fail(DC_E_INVALID, "%s: call.cu_seqlens[%" PRId64 "] = %" PRId32 ", must %s", fn, b, cu[b],
                      b == 0 ? "be 0" : "follow the one before by 0 to seq_length tokens");
    }
  }
  return DC_OK;
}

static dc_status read_size(const char *fn, const dc_layer *layer, const dc_layer_call *call, dc_layer_call *c,
                           dc__layer_size *size) {
  if (call == NULL) {
    return dc__fail(DC_E_INVALID, "%s: call is NULL", fn);
  }
  DC__TRY(dc__read_options(fn, "call", c, sizeof *c, call, DC__LAYER_CALL_SIZE_0_1));
  const dc_layer_config *config = &layer->config;
  DC__TRY(dc__check_range(fn, "call.batch", c->batch, 0, config->batch_size > 0 ? config->batch_size : INT32_MAX));
  DC__TRY(dc__check_range(fn, "call.seq_length", c->seq_length, 0,
                          config->max_seq_length > 0 ? config->max_seq_length : INT32_MAX));
  DC__TRY(dc__check_range(fn, "call.reserved0", c->reserved0, 0, 0));
  DC__TRY(dc__check_flag(fn, "call.accumulate", c->accumulate));
  int64_t tokens = c->batch * c->seq_length; /* both below 2^31 */
  if (c->cu_seqlens != NULL) {
    DC__TRY(check_offsets(fn, c));
    tokens = c->cu_seqlens[c->batch];
  }
  *size =
      (dc__layer_size){.batch = c->batch, .max_seqlen = c->seq_length, .tokens = tokens, .cu_seqlens = c->cu_seqlens};
  if (!dc__layer_fits_int64(layer, size)) {
    return dc__fail(DC_E_SHAPE, "%s: call.batch = %" PRId64 " times seq_length = %" PRId64 " is too large", fn,
                    c->batch, c->seq_length);
  }
  return DC_OK;
}

dc_status dc_layer_get_cost(const dc_layer *layer, const dc_layer_call *call, dc_layer_cost *cost) {
  DC__WITHOUT_TRAPS;
  DC__TRY(layer_check_handle(__func__, layer));
  dc_layer_call c = DC_LAYER_CALL_INIT;
  dc__layer_size size;
  DC__TRY(read_size(__func__, layer, call, &c, &size));
  dc_layer_cost out = DC_LAYER_COST_INIT;
  dc__layer_cost(layer, &size, &out);
  return dc__write_sized(__func__, "cost", cost, &out, sizeof out, DC__LAYER_COST_SIZE_0_1);
}

/* A call's array of weights, or of their gradients, as the caller passed it. */
typedef struct tensor_array {
  const dc_tensor *tensors;
  size_t tensor_size;
  int64_t count;
} tensor_array;

/* A range of memory that a call uses. Ranges are compared, since written memory may overlap no other. */
typedef struct layer_span {
  const char *name;
  const char *begin, *end;
  bool written;
} layer_span;

enum { SPANS = 2 * DC_LAYER_WEIGHTS + 8 };

typedef struct layer_reader {
  const char *fn;
  const dc_layer *layer;
  layer_span spans[SPANS];
  int32_t count;
} layer_reader;

static void reader_add_span(layer_reader *r, const char *name, const void *data, int64_t bytes, bool written) {
  if (data != NULL && bytes > 0) {
    r->spans[r->count++] =
        (layer_span){.name = name, .begin = data, .end = (const char *)data + bytes, .written = written};
  }
}

static dc_status check_overlaps(const layer_reader *r) {
  for (int32_t i = 0; i < r->count; i++) {
    for (int32_t j = 0; j < r->count; j++) {
      const layer_span *a = &r->spans[i], *b = &r->spans[j];
      if (i != j && a->written && a->begin < b->end && b->begin < a->end) {
        return dc__fail(DC_E_INVALID, "%s: %s, which is written, overlaps %s", r->fn, a->name, b->name);
      }
    }
  }
  return DC_OK;
}

/* Reads an aligned tensor of `numel` elements of `dtype`, in any shape. *data is NULL without an optional tensor. */
static dc_status read_tensor(layer_reader *r, const char *name, const dc_tensor *tensor, bool optional, int64_t numel,
                             int32_t dtype, bool written, void **data) {
  *data = NULL;
  if (tensor == NULL && optional) {
    return DC_OK;
  }
  dc_tensor t;
  int64_t count;
  DC__TRY(dc__tensor_read(r->fn, name, tensor, false, &t, &count));
  if (t.dtype != dtype) {
    return dc__fail(DC_E_DTYPE, "%s: %s is %s, must be %s", r->fn, name, dc_dtype_name(t.dtype), dc_dtype_name(dtype));
  }
  if (count != numel) {
    return dc__fail(DC_E_SHAPE, "%s: %s has %" PRId64 " element%s, must have %" PRId64, r->fn, name, count,
                    DC__PLURAL_S(count), numel);
  }
  if ((uintptr_t)t.data % dc_dtype_size(dtype) != 0) {
    return dc__fail(DC_E_INVALID, "%s: %s is not aligned to its elements of %zu bytes", r->fn, name,
                    dc_dtype_size(dtype));
  }
  *data = t.data;
  reader_add_span(r, name, t.data, numel * (int64_t)dc_dtype_size(dtype), written);
  return DC_OK;
}

static const char *shape_text(char text[4 * 24], int32_t ndim, const int64_t *shape) {
  for (int32_t i = 0, length = 0; i < ndim && i < 4; i++) {
    length += snprintf(text + length, 24, "%s%" PRId64, i > 0 ? ", " : "", shape[i]);
  }
  return text;
}

/* Checks the shape, as the same elements in another one would be misread. Dimensions of 1 do not count. */
static dc_status check_shape(const char *fn, const char *name, const dc_tensor *t, int32_t ndim, const int64_t *shape) {
  int32_t j = 0;
  for (int32_t i = 0; i < t->ndim; i++) {
    while (j < ndim && shape[j] == 1) {
      j++;
    }
    if (t->shape[i] != 1 && (j == ndim || t->shape[i] != shape[j++])) {
      char is[4 * 24] = "", must[4 * 24] = "";
      return dc__fail(DC_E_SHAPE, "%s: %s is [%s], must be [%s]", fn, name, shape_text(is, t->ndim, t->shape),
                      shape_text(must, ndim, shape));
    }
  }
  return DC_OK;
}

/* Reads the features of all tokens: [B, S, H] of a dense batch, or rows of H. */
static dc_status read_tokens(layer_reader *r, const char *name, const dc_tensor *tensor, bool optional,
                             const dc__layer_size *size, bool written, void **data) {
  const int64_t h = r->layer->config.hidden_size;
  DC__TRY(read_tensor(r, name, tensor, optional, size->tokens * h, r->layer->config.dtype, written, data));
  if (tensor == NULL || size->tokens == 0) {
    return DC_OK;
  }
  if (size->cu_seqlens == NULL && tensor->ndim != 2) {
    return check_shape(r->fn, name, tensor, 3, (int64_t[]){size->batch, size->max_seqlen, h});
  }
  const bool has_rows = tensor->ndim > 0 && tensor->shape[tensor->ndim - 1] == h;
  return has_rows ? DC_OK : check_shape(r->fn, name, tensor, 2, (int64_t[]){size->tokens, h});
}

static dc_status reader_read_block(layer_reader *r, const char *name, void *data, int64_t bytes, int64_t needed,
                                   bool written) {
  if (needed > 0 && data == NULL) {
    return dc__fail(DC_E_INVALID, "%s: call.%s is NULL, must have %" PRId64 " bytes", r->fn, name, needed);
  }
  if (bytes < needed) {
    return dc__fail(DC_E_BUFFER_TOO_SMALL, "%s: call.%s_bytes = %" PRId64 ", must be at least %" PRId64, r->fn, name,
                    bytes, needed);
  }
  if ((uintptr_t)data % DC__LAYER_ALIGN != 0) {
    return dc__fail(DC_E_INVALID, "%s: call.%s is not aligned to %d bytes", r->fn, name, (int)DC__LAYER_ALIGN);
  }
  reader_add_span(r, name, data, needed, written);
  return DC_OK;
}

static dc_status read_mask(layer_reader *r, const dc_layer_call *call, dc__layer_job *job) {
  if (call->mask == NULL) {
    return DC_OK;
  }
  if (call->cu_seqlens != NULL) {
    return dc__fail(DC_E_INVALID, "%s: call.mask must be NULL when cu_seqlens is given", r->fn);
  }
  dc_tensor t;
  int64_t numel;
  DC__TRY(dc__tensor_read(r->fn, "call.mask", call->mask, false, &t, &numel));
  job->mask_dtype = t.dtype == DC_FLOAT32 ? DC_FLOAT32 : r->layer->config.dtype;
  void *data;
  DC__TRY(
      read_tensor(r, "call.mask", call->mask, false, call->batch * call->seq_length, job->mask_dtype, false, &data));
  if (t.ndim < 2 || t.shape[0] != call->batch || t.shape[t.ndim - 1] != call->seq_length) {
    return dc__fail(DC_E_SHAPE, "%s: call.mask must be [%" PRId64 ", %" PRId64 "], with any 1s between", r->fn,
                    call->batch, call->seq_length);
  }
  job->mask = data;
  return DC_OK;
}

static dc_status read_weights(layer_reader *r, const char *argument, const tensor_array *weights, bool gradients,
                              int32_t dtype, void **data) {
  DC__TRY(dc__check_range(r->fn, "count", weights->count, DC_LAYER_WEIGHTS, DC_LAYER_WEIGHTS));
  DC__TRY(dc__tensors_check(r->fn, argument, weights->tensors, weights->tensor_size, weights->count));
  for (int32_t i = 0; i < DC_LAYER_WEIGHTS; i++) {
    int64_t rows;
    int64_t columns;
    int64_t numel = dc__layer_weight_numel(r->layer, i, &rows, &columns);
    char name[64];
    snprintf(name, sizeof name, "%s[%s]", argument, WEIGHTS[i]);
    const dc_tensor *tensor = dc__tensors_at(weights->tensors, weights->tensor_size, i);
    dc_tensor known = DC_TENSOR_INIT;
    DC__TRY(dc__read_options(r->fn, name, &known, sizeof known, tensor, DC__TENSOR_SIZE_0_1));
    const bool wanted = !gradients || known.dtype != DC_DTYPE_NONE;
    DC__TRY(read_tensor(r, name, wanted ? tensor : NULL, gradients, numel, dtype, gradients, &data[i]));
    if (data[i] != NULL) {
      DC__TRY(check_shape(r->fn, name, tensor, columns > 0 ? 2 : 1, (int64_t[]){rows, columns}));
      r->spans[r->count - 1].name = WEIGHTS[i]; /* a static string, unlike `name` */
    }
  }
  return DC_OK;
}

/* Reads the arguments that all three calls have. */
static dc_status layer_read_call(layer_reader *r, const dc_layer_call *call, const tensor_array *weights,
                                 const dc_tensor *input, dc_layer_call *read, dc__layer_job *job) {
  DC__TRY(layer_check_handle(r->fn, r->layer));
  DC__TRY(read_size(r->fn, r->layer, call, read, &job->size));
  DC__TRY(dc__handle_check_optional(r->fn, "call.stream", read->stream, DC__HANDLE_STREAM));
  if (read->stream != NULL && read->stream->device != r->layer->device) {
    return dc__fail(DC_E_INVALID, "%s: call.stream is of another device (\"%s\") than the layer (\"%s\")", r->fn,
                    read->stream->device->name, r->layer->device->name);
  }
  const dc_layer_config *c = &r->layer->config;
  void *data[DC_LAYER_WEIGHTS];
  DC__TRY(read_weights(r, "weights", weights, false, c->dtype, data));
  memcpy(job->weight, data, sizeof data);
  void *x;
  DC__TRY(read_tokens(r, "input", input, false, &job->size, false, &x));
  job->input = x;
  job->offset = read->offset;
  job->accumulate = read->accumulate;
  job->dropout = c->training;
  return read_mask(r, read, job);
}

/* ---- running ---- */

static dc_status layer_submit_job(const layer_reader *r, dc_layer *layer, const dc_layer_call *call, dc__layer_job *job,
                                  void (*run)(const dc__layer_job *job)) {
  DC__TRY(check_overlaps(r));
  job->layer = layer;
  job->workspace = call->workspace;
  job->reserve = call->reserve;
  return dc__layer_submit(r->fn, job, call->stream, run);
}

static dc_status layer_infer(const char *fn, dc_layer *layer, const dc_layer_call *call, const tensor_array *weights,
                             const dc_tensor *input, const dc_tensor *output) {
  layer_reader r = {.fn = fn, .layer = layer};
  dc_layer_call c = DC_LAYER_CALL_INIT;
  dc__layer_job job = {0};
  DC__TRY(layer_read_call(&r, call, weights, input, &c, &job));
  job.dropout = false;
  DC__TRY(read_tokens(&r, "output", output, false, &job.size, true, &job.output));
  job.at = dc__layer_inference_workspace(layer, &job.size);
  DC__TRY(reader_read_block(&r, "workspace", c.workspace, c.workspace_bytes, job.at.bytes, true));
  return layer_submit_job(&r, layer, &c, &job, dc__layer_inference);
}

dc_status dc_layer_inference(dc_layer *layer, const dc_layer_call *call, const dc_tensor *weights, size_t tensor_size,
                             int64_t count, const dc_tensor *input, dc_tensor *output) {
  DC__WITHOUT_TRAPS;
  const tensor_array all = {.tensors = weights, .tensor_size = tensor_size, .count = count};
  return layer_infer(__func__, layer, call, &all, input, output);
}

dc_status dc_layer_forward(dc_layer *layer, const dc_layer_call *call, const dc_tensor *weights, size_t tensor_size,
                           int64_t count, const dc_tensor *input, dc_tensor *output) {
  DC__WITHOUT_TRAPS;
  const tensor_array all = {.tensors = weights, .tensor_size = tensor_size, .count = count};
  if (dc__handle_is(layer, DC__HANDLE_LAYER) && !layer->config.training) {
    return layer_infer(__func__, layer, call, &all, input, output);
  }
  layer_reader r = {.fn = __func__, .layer = layer};
  dc_layer_call c = DC_LAYER_CALL_INIT;
  dc__layer_job job = {0};
  DC__TRY(layer_read_call(&r, call, &all, input, &c, &job));
  DC__TRY(read_tokens(&r, "output", output, false, &job.size, true, &job.output));
  job.at = dc__layer_forward_workspace(layer, &job.size);
  DC__TRY(reader_read_block(&r, "workspace", c.workspace, c.workspace_bytes, job.at.bytes, true));
  DC__TRY(
      reader_read_block(&r, "reserve", c.reserve, c.reserve_bytes, dc__layer_reserve(layer, &job.size).bytes, true));
  return layer_submit_job(&r, layer, &c, &job, dc__layer_forward);
}

dc_status dc_layer_backward(dc_layer *layer, const dc_layer_call *call, const dc_tensor *weights, size_t tensor_size,
                            int64_t count, const dc_tensor *input, const dc_tensor *output,
                            const dc_tensor *grad_output, dc_tensor *grad_input, dc_tensor *grad_weights) {
  DC__WITHOUT_TRAPS;
  const tensor_array all = {.tensors = weights, .tensor_size = tensor_size, .count = count};
  const tensor_array gradients = {.tensors = grad_weights, .tensor_size = tensor_size, .count = count};
  layer_reader r = {.fn = __func__, .layer = layer};
  dc_layer_call c = DC_LAYER_CALL_INIT;
  dc__layer_job job = {0};
  DC__TRY(layer_read_call(&r, call, &all, input, &c, &job));
  const dc_layer_config *config = &layer->config;
  if (!config->training) {
    return dc__fail(DC_E_STATE, "%s: config.training was -1: the layer is for inference", __func__);
  }
  bool optional = config->pre_layer_norm || !config->normalize_invertible;
  void *grad_output_data;
  DC__TRY(read_tokens(&r, "output", output, optional, &job.size, false, &job.output));
  DC__TRY(read_tokens(&r, "grad_output", grad_output, false, &job.size, false, &grad_output_data));
  DC__TRY(read_tokens(&r, "grad_input", grad_input, true, &job.size, true, &job.grad_input));
  DC__TRY(read_weights(&r, "grad_weights", &gradients, true, config->grad_dtype, job.grad_weight));
  job.grad_output = grad_output_data;
  job.at = dc__layer_backward_workspace(layer, &job.size);
  DC__TRY(reader_read_block(&r, "workspace", c.workspace, c.workspace_bytes, job.at.bytes, true));
  DC__TRY(
      reader_read_block(&r, "reserve", c.reserve, c.reserve_bytes, dc__layer_reserve(layer, &job.size).bytes, false));
  return layer_submit_job(&r, layer, &c, &job, dc__layer_backward);
}

/* ---- weights and masks ---- */

dc_status dc_layer_init_weights(const dc_layer *layer, dc_tensor *weights, size_t tensor_size, int64_t count) {
  DC__WITHOUT_TRAPS;
  DC__TRY(layer_check_handle(__func__, layer));
  layer_reader r = {.fn = __func__, .layer = layer};
  const tensor_array all = {.tensors = weights, .tensor_size = tensor_size, .count = count};
  const int32_t dtype = weights != NULL && weights->dtype == DC_FLOAT32 ? DC_FLOAT32 : layer->config.dtype;
  void *data[DC_LAYER_WEIGHTS];
  DC__TRY(read_weights(&r, "weights", &all, false, dtype, data));
  for (int32_t i = 0; i < r.count; i++) {
    r.spans[i].written = true;
  }
  DC__TRY(check_overlaps(&r));
  for (int32_t i = 0; i < DC_LAYER_WEIGHTS; i++) {
    int64_t shape[2];
    const size_t bytes = (size_t)dc__layer_weight_numel(layer, i, &shape[0], &shape[1]) * dc_dtype_size(dtype);
    void *host = data[i];
    DC__TRY(dc__layer_host_buffer_alloc(layer, bytes, &host));
    dc__layer_init_weight(layer, i, host, dtype);
    DC__TRY(dc__layer_host_buffer_flush(layer, bytes, data[i], host));
  }
  return DC_OK;
}

dc_status dc_layer_get_dropout_mask(const dc_layer *layer, const dc_layer_call *call, int32_t site, dc_tensor *mask,
                                    double *scale) {
  DC__WITHOUT_TRAPS;
  DC__TRY(layer_check_handle(__func__, layer));
  dc_layer_call c = DC_LAYER_CALL_INIT;
  dc__layer_size size;
  DC__TRY(read_size(__func__, layer, call, &c, &size));
  if (c.cu_seqlens != NULL) {
    return dc__fail(DC_E_INVALID, "%s: call.cu_seqlens must be NULL; a packed sample has the dense one's mask",
                    __func__);
  }
  DC__TRY(dc__check_range(__func__, "site", site, DC_DROPOUT_ATTENTION, DC_DROPOUT_OUTPUT));
  dc_tensor t;
  int64_t numel;
  DC__TRY(dc__tensor_read(__func__, "mask", mask, false, &t, &numel));
  if (t.dtype != DC_UINT8 && t.dtype != DC_BOOL) {
    return dc__fail(DC_E_DTYPE, "%s: mask is %s, must be uint8 or bool", __func__, dc_dtype_name(t.dtype));
  }
  const bool attention = site == DC_DROPOUT_ATTENTION;
  const int64_t heads = layer->config.heads, hidden = layer->config.hidden_size, seq = size.max_seqlen;
  const int64_t width = attention ? heads * seq : hidden; /* elements of a token */
  if (numel != size.tokens * width) {
    return dc__fail(DC_E_SHAPE, "%s: mask has %" PRId64 " element%s, must have %" PRId64 " times %" PRId64, __func__,
                    numel, DC__PLURAL_S(numel), size.tokens, width);
  }
  void *host = t.data;
  if (numel > 0) {
    DC__TRY(check_shape(__func__, "mask", &t, attention ? 4 : 3,
                        (int64_t[]){size.batch, attention ? heads : seq, attention ? seq : hidden, seq}));
    DC__TRY(dc__layer_host_buffer_alloc(layer, (size_t)numel, &host));
    dc__layer_export_mask(layer, &size, c.offset, site, host);
    DC__TRY(dc__layer_host_buffer_flush(layer, (size_t)numel, t.data, host));
  }
  if (scale != NULL) {
    *scale = (double)dc__layer_dropout(layer, c.offset, site, layer->config.training).scale;
  }
  return DC_OK;
}
