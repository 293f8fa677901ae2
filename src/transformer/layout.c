/* Memory layout and costs of a call. docs/transformer.md has the formulas. */
#include "kernels/cuda/kernels_cuda.h"
#include "transformer/transformer_internal.h"

/* Appends a part and returns its offset. */
static int64_t layout_alloc(int64_t *end, int64_t bytes) {
  int64_t at = *end;
  *end += (bytes + DC__LAYER_ALIGN - 1) / DC__LAYER_ALIGN * DC__LAYER_ALIGN;
  return at;
}

static int64_t element_bytes(const dc_layer *layer) {
  return (int64_t)dc_dtype_size(layer->config.dtype);
}

bool dc__layer_is_cuda(const dc_layer *layer) {
  return layer->device != NULL && layer->device->memory_space != 0;
}

/* Extra workspace of every call on a device. */
static void layout_add_cuda(const dc_layer *layer, const dc__layer_size *size, dc__layer_workspace *w) {
  if (dc__layer_is_cuda(layer)) {
    /* The caller's workspace is aligned to DC__LAYER_ALIGN only. */
    w->product = layout_alloc(&w->bytes, DC__CUDA_GEMM_WORKSPACE_BYTES + DC__MATMUL_ALIGNMENT - DC__LAYER_ALIGN);
    if (size->cu_seqlens != NULL) {
      w->offsets = layout_alloc(&w->bytes, (size->batch + 1) * (int64_t)sizeof(int32_t));
    }
  }
}

dc__layer_reserve_space dc__layer_reserve(const dc_layer *layer, const dc__layer_size *size) {
  const dc_layer_config *c = &layer->config;
  int64_t row = size->tokens * c->hidden_size * element_bytes(layer);
  int64_t wide = size->tokens * c->intermediate_size * element_bytes(layer);
  int64_t end = 0;
  dc__layer_reserve_space r;
  bool all = c->normalize_invertible == 0;
  r.y0 = c->pre_layer_norm && all ? layout_alloc(&end, row) : -1;
  r.qkv = layout_alloc(&end, 3 * row);
  r.c = layout_alloc(&end, row);
  r.z = layout_alloc(&end, row);
  r.y1 = all ? layout_alloc(&end, row) : -1;
  r.h = layout_alloc(&end, wide);
  r.f = c->gelu_checkpoint == 0 ? layout_alloc(&end, wide) : -1;
  r.t = !c->pre_layer_norm && all ? layout_alloc(&end, row) : -1;
  r.softmax = layout_alloc(&end, 2 * size->tokens * c->heads * (int64_t)sizeof(float));
  r.stats[0] = layout_alloc(&end, 2 * size->tokens * (int64_t)sizeof(float));
  r.stats[1] = layout_alloc(&end, 2 * size->tokens * (int64_t)sizeof(float));
  r.bytes = end;
  return r;
}

/* A workspace without any buffer. */
static const dc__layer_workspace unused_workspace = {
    .wide = -1, .a = -1, .b = -1, .c = -1, .d = -1, .delta = -1, .dq = -1, .product = -1, .offsets = -1, .sums = -1};

dc__layer_workspace dc__layer_forward_workspace(const dc_layer *layer, const dc__layer_size *size) {
  const dc_layer_config *c = &layer->config;
  int64_t row = size->tokens * c->hidden_size * element_bytes(layer);
  dc__layer_workspace w = unused_workspace;
  w.a = layout_alloc(&w.bytes, row);
  w.b = c->normalize_invertible ? layout_alloc(&w.bytes, row) : -1; /* y0, then y1 */
  w.wide = c->gelu_checkpoint ? layout_alloc(&w.bytes, size->tokens * c->intermediate_size * element_bytes(layer))
                              : -1; /* f */
  layout_add_cuda(layer, size, &w);
  return w;
}

dc__layer_workspace dc__layer_inference_workspace(const dc_layer *layer, const dc__layer_size *size) {
  const dc_layer_config *c = &layer->config;
  int64_t row = size->tokens * c->hidden_size * element_bytes(layer);
  int64_t wide = size->tokens * c->intermediate_size * element_bytes(layer);
  dc__layer_workspace w = unused_workspace;
  w.wide = layout_alloc(&w.bytes, wide > 3 * row ? wide : 3 * row);
  w.a = layout_alloc(&w.bytes, row);
  w.b = layout_alloc(&w.bytes, row);
  w.c = layout_alloc(&w.bytes, row);
  layout_add_cuda(layer, size, &w);
  return w;
}

dc__layer_workspace dc__layer_backward_workspace(const dc_layer *layer, const dc__layer_size *size) {
  const dc_layer_config *c = &layer->config;
  dc__layer_workspace w = dc__layer_inference_workspace(layer, size);
  w.d = layout_alloc(&w.bytes, size->tokens * c->hidden_size * element_bytes(layer));
  w.delta = layout_alloc(&w.bytes, size->tokens * c->heads * (int64_t)sizeof(float));
  if (dc__layer_is_cuda(layer)) {
    int64_t widest = c->intermediate_size > 3 * c->hidden_size ? c->intermediate_size : 3 * c->hidden_size;
    w.sums = layout_alloc(&w.bytes, dc__cuda_sum_parts(size->tokens, c->hidden_size, widest));
  } else if (c->dtype != DC_FLOAT32 && size->max_seqlen > dc__attention_keys(c->hidden_size / c->heads)) {
    w.dq = layout_alloc(&w.bytes, size->tokens * c->hidden_size * (int64_t)sizeof(float));
  }
  return w;
}

bool dc__layer_fits_int64(const dc_layer *layer, const dc__layer_size *size) {
  const dc_layer_config *c = &layer->config;
  int64_t widest = c->intermediate_size > 3 * c->hidden_size ? c->intermediate_size : 3 * c->hidden_size;
  const int64_t tokens = size->tokens > 0 ? size->tokens : 1;
  return tokens <= (INT64_C(1) << 52) / widest / c->hidden_size &&
         size->max_seqlen <= (INT64_C(1) << 58) / c->hidden_size / tokens && size->batch <= UINT32_MAX / c->heads;
}

/* Query-key pairs in all samples. */
static int64_t attention_pairs(const dc__layer_size *size) {
  if (size->cu_seqlens == NULL) {
    return size->tokens * size->max_seqlen;
  }
  int64_t pairs = 0;
  for (int64_t b = 0; b < size->batch; b++) {
    pairs += dc__sample_length(size, b) * dc__sample_length(size, b);
  }
  return pairs;
}

void dc__layer_cost(const dc_layer *layer, const dc__layer_size *size, dc_layer_cost *cost) {
  const dc_layer_config *c = &layer->config;
  int64_t n = size->tokens;
  int64_t h = c->hidden_size;
  int64_t i = c->intermediate_size;
  int64_t row = n * h * element_bytes(layer);
  int64_t wide = n * i * element_bytes(layer);
  int64_t weights = (4 * h * h + 2 * h * i) * element_bytes(layer);
  cost->forward_workspace_bytes = dc__layer_forward_workspace(layer, size).bytes;
  cost->backward_workspace_bytes = dc__layer_backward_workspace(layer, size).bytes;
  cost->inference_workspace_bytes = dc__layer_inference_workspace(layer, size).bytes;
  cost->reserve_bytes = c->training ? dc__layer_reserve(layer, size).bytes : 0;
  cost->kept_bytes = c->training ? cost->reserve_bytes + row : 0;
  cost->forward_flops = 8 * n * h * h + 4 * n * h * i + 4 * h * attention_pairs(size);
  cost->backward_flops = 2 * cost->forward_flops;
  /* Reads and writes of [N, H]: LN 2, QKV 4, attention 4, projection 2, sum and LN 4, sum 3, FF1 1, FF2 1. Of [N, I]: h
   * and f written, f read. In Post-LN the second LN replaces the first. */
  cost->forward_bytes = weights + 21 * row + 3 * wide;
  /* Of [N, H]: dw 3, FF2 2, FF1 2, LN 6, projection 5, attention 8, qkv's gradient 3, QKV 8, LN 5. Of [N, I]: f and h
   * read, dh written and read twice. Each weight is read, and its gradient written. */
  cost->backward_bytes = 2 * weights + 42 * row + 5 * wide;
  if (c->normalize_invertible) {
    cost->backward_bytes += 4 * row;
  }
  if (c->gelu_checkpoint) {
    cost->backward_bytes += 2 * wide;
  }
}
