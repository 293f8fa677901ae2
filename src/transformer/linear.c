/* The layer's matrix products. */
#include "transformer/transformer_internal.h"

static dc__gemm linear_gemm(const dc__layer_job *job) {
  int32_t dtype = job->layer->config.dtype;
  dc__gemm g = {.dtype = dtype, .out_dtype = dtype, .batch = 1, .alpha = 1};
  g.gelu = job->layer->config.gelu == DC_GELU_ERF ? DC__GELU_ERF : DC__GELU_TANH;
  return g;
}

void dc__linear_forward(const dc__layer_job *job, const dc__linear_args *linear) {
  dc__gemm g = linear_gemm(job);
  g.trans_b = true;
  g.m = job->size.tokens;
  g.n = linear->out;
  g.k = linear->in;
  g.a = linear->x;
  g.b = linear->w;
  g.c = linear->y;
  g.lda = g.ldb = linear->in;
  g.ldc = linear->out;
  g.epilogue = linear->epilogue;
  g.bias = linear->bias;
  g.aux = linear->aux;
  job->layer->work->gemm(job, &g);
}

void dc__linear_backward_input(const dc__layer_job *job, const void *dy, const void *w, void *dx, int64_t in,
                               int64_t out, bool add, const void *aux) {
  dc__gemm g = linear_gemm(job);
  g.m = job->size.tokens;
  g.n = in;
  g.k = out;
  g.a = dy;
  g.b = w;
  g.c = dx;
  g.lda = out;
  g.ldb = g.ldc = in;
  g.beta = add ? 1 : 0;
  g.epilogue = aux != NULL ? DC__EPILOGUE_GELU_BACK : DC__EPILOGUE_NONE;
  g.aux = (void *)(uintptr_t)aux; /* only read by this epilogue */
  job->layer->work->gemm(job, &g);
}

void dc__linear_backward_weight(const dc__layer_job *job, const void *dy, const void *x, int32_t w, int32_t bias) {
  int64_t out;
  int64_t in;
  bool summed = false;
  dc__layer_weight_numel(job->layer, w, &out, &in);
  if (job->grad_weight[w] != NULL) {
    dc__gemm g = linear_gemm(job);
    g.out_dtype = job->layer->config.grad_dtype;
    g.trans_a = true;
    g.m = out;
    g.n = in;
    g.k = job->size.tokens;
    g.a = dy;
    g.b = x;
    g.c = job->grad_weight[w];
    g.lda = out;
    g.ldb = g.ldc = in;
    g.beta = job->accumulate ? 1 : 0;
    if (job->grad_weight[bias] != NULL) {
      summed = job->layer->work->gemm_sums(job, &g, job->grad_weight[bias]);
    } else {
      job->layer->work->gemm(job, &g);
    }
  }
  if (job->grad_weight[bias] != NULL && !summed) {
    job->layer->work->column_sums(job, dy, out, bias);
  }
}
