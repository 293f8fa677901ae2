/* The transformer layer: its mathematics, written once on top of each device's kernels. api/layer/layer.c checks the
 * arguments; here they are valid.
 *
 * Symbols: B samples of at most S tokens, N tokens in all, H hidden and I intermediate features, A heads of d = H / A.
 * The order of every product, sum over tokens and dropout draw is independent of the number of threads. */
#ifndef DC_TRANSFORMER_H
#define DC_TRANSFORMER_H

#include <stdatomic.h>

#include "base/base.h"
#include "device/device.h"
#include "kernels/kernels.h"

enum {
  DC__LAYER_ALIGN = 64,
  DC__LAYER_MAX_HIDDEN = 131072, /* a thread's scratch memory holds several float32 rows */
  DC__LAYER_MAX_HEAD = 8192      /* and a tile of attention */
};

struct dc_layer {
  int32_t handle;  /* DC__HANDLE_LAYER */
  atomic_int refs; /* the handle's and each queued call's */
  dc_device *device;
  dc__threadpool *pool;
  const struct dc__layer_work *work; /* of the device: CPU or CUDA */
  dc_layer_config config;            /* defaults filled in; flags that may be -1 are 0 or 1 */
};

/* A call's sizes. */
typedef struct dc__layer_size {
  int64_t batch;
  int64_t max_seqlen;        /* S */
  int64_t tokens;            /* N */
  const int32_t *cu_seqlens; /* NULL: dense */
} dc__layer_size;

/* Byte offsets in one of the three workspaces; -1 if absent. Each part begins at a multiple of DC__LAYER_ALIGN. */
typedef struct dc__layer_workspace {
  int64_t wide;  /* backward: f, then dh, then dqkv; inference: qkv, then f */
  int64_t a;     /* [N, H] forward: products before their residual sum; backward: dw, then dc */
  int64_t b;     /* [N, H] backward: dt or dy1, then dy0; inference: c, then y1 */
  int64_t c;     /* [N, H] backward: the sum t if it is recomputed, then dz; inference: z */
  int64_t d;     /* [N, H] backward: du, and recomputed activations */
  int64_t delta; /* [A, N] float32: backward of attention */
  int64_t dq;    /* [N, H] float32: q's gradient, if it has 16 bits and is summed over key blocks */
  /* On a device (layer_cuda.c): */
  int64_t product; /* workspace of a matrix product */
  int64_t offsets; /* packed: [B + 1] int32, cu_seqlens */
  int64_t sums;    /* backward: [2, chunks of tokens, widest] float32, partial sums of gradients over tokens */
  int64_t bytes;
} dc__layer_workspace;
/* One call, as it is queued. Pointers are to elements of the layer's dtype unless said. */
typedef struct dc__layer_job {
  dc_layer *layer;
  dc__layer_size size;
  const void *mask; /* [B, S] or NULL */
  int32_t mask_dtype;
  int32_t accumulate;
  int64_t offset;
  bool dropout;
  dc_stream *stream; /* of a device; NULL for the calling thread */
  dc__layer_workspace at;
  char *workspace;
  char *reserve;
  const void *weight[DC_LAYER_WEIGHTS];
  const void *input;
  void *output; /* backward: the forward's, read-only */
  const void *grad_output;
  void *grad_input;                    /* NULL if not wanted */
  void *grad_weight[DC_LAYER_WEIGHTS]; /* of grad_dtype; NULL if not wanted */
} dc__layer_job;

/* ---- layer.c ---- */

dc_status dc__layer_create(const char *fn, dc_device *device, const dc_layer_config *config, dc_layer **layer);
dc_layer *dc__layer_retain(dc_layer *layer);
void dc__layer_release(dc_layer *layer);
int64_t dc__layer_weight_numel(const dc_layer *layer, int32_t index, int64_t *rows, int64_t *columns);
/* Fills in the initial values of weight `index`, of dtype, in host memory. */
void dc__layer_init_weight(const dc_layer *layer, int32_t index, void *weight, int32_t dtype);

/* ---- layout.c: memory layout and costs ---- */

/* Byte offsets of what a forward keeps; -1 if absent. Each part begins at a multiple of DC__LAYER_ALIGN. */
typedef struct dc__layer_reserve_space {
  int64_t y0;       /* [N, H] Pre-LN: the normalised input */
  int64_t qkv;      /* [N, 3H] with bias */
  int64_t c;        /* [N, H] the attention's output */
  int64_t z;        /* [N, H] the sum after attention */
  int64_t y1;       /* [N, H] z normalised */
  int64_t h;        /* [N, I] GELU's input */
  int64_t f;        /* [N, I] GELU's output */
  int64_t t;        /* [N, H] Post-LN: the sum before the last normalisation */
  int64_t softmax;  /* [2, A, N] float32: each row's maximum, then 1 / its sum */
  int64_t stats[2]; /* [2, N] float32, mean and 1 / sqrt(variance + eps): 0 norm, 1 attn_n */
  int64_t bytes;
} dc__layer_reserve_space;
dc__layer_reserve_space dc__layer_reserve(const dc_layer *layer, const dc__layer_size *size);

/* The layouts of the three workspaces. */
dc__layer_workspace dc__layer_forward_workspace(const dc_layer *layer, const dc__layer_size *size);
dc__layer_workspace dc__layer_backward_workspace(const dc_layer *layer, const dc__layer_size *size);
dc__layer_workspace dc__layer_inference_workspace(const dc_layer *layer, const dc__layer_size *size);
/* Whether offsets, bytes and products of a call stay far below 2^63, and planes of dropout below 2^32. */
bool dc__layer_fits_int64(const dc_layer *layer, const dc__layer_size *size);
void dc__layer_cost(const dc_layer *layer, const dc__layer_size *size, dc_layer_cost *cost);

/* Whether the layer's device is CUDA: the host cannot access its memory. */
bool dc__layer_is_cuda(const dc_layer *layer);
/* layer_cuda.c: DC_E_UNSUPPORTED where the device has no kernels for the layer. */
dc_status dc__layer_check_cuda(const char *fn, dc_device *device, const dc_layer_config *config);

/* ---- forward.c, backward.c: run a job on the calling thread and the pool, or queue it on the job's stream ---- */

void dc__layer_forward(const dc__layer_job *job);
void dc__layer_inference(const dc__layer_job *job);
void dc__layer_backward(const dc__layer_job *job);

/* ---- submit.c ---- */

/* Runs the job on the stream; with NULL, synchronously. */
dc_status dc__layer_submit(const char *fn, dc__layer_job *job, dc_stream *stream,
                           void (*run)(const dc__layer_job *job));
/* Replaces *data by host memory if it is on a device. The flush copies that memory to `data` and frees it. */
dc_status dc__layer_host_buffer_alloc(const dc_layer *layer, size_t bytes, void **data);
dc_status dc__layer_host_buffer_flush(const dc_layer *layer, size_t bytes, void *data, void *host);

/* ---- dropout.c ---- */

/* The key of a site for a call; threshold 0 when `on` is false. */
dc__dropout dc__layer_dropout(const dc_layer *layer, int64_t offset, int32_t site, bool on);
/* 1 where an element of a dense batch is kept, 0 where it is dropped. */
void dc__layer_export_mask(const dc_layer *layer, const dc__layer_size *size, int64_t offset, int32_t site,
                           uint8_t *mask);

#endif
