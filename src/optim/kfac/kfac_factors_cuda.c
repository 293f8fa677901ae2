/* The two sums of outer products of a layer, on a device: GEMM-library products in the vectors' own type, of all
 * groups at once. A linear layer's vectors are used in place; a convolution's are gathered by positions, a few
 * samples at a time. */
#include <string.h>

#include "kernels/cuda/kernels_cuda.h"
#include "optim/kfac/kfac.h"

/* Vectors beyond which a product is no faster, and the limit on bytes of computed vectors. */
enum { MAX_VECTORS = 1 << 15, PANEL_BYTES = 256 << 20 };

/* One factor of one call. */
typedef struct factor_job_cuda {
  dc_linalg *l;
  dc_stream *stream;
  const dc__kfac_layer *layer;
  const dc__factor *factor;
  const dc__per_sample *s;
  bool inputs, reduce, bias, conv;
  const void *data; /* x or delta, */
  int32_t dtype;    /* its type, */
  int64_t each;     /* and elements of a sample */
  double alpha;
  int64_t order, columns; /* of a vector without the bias's element; of all groups */
  int64_t tile;           /* samples that run together */
  /* Device memory, NULL if not needed: */
  void *product, *ones, *panel;
  float *as_float32, *patches, *means; /* of the tile's samples: float32 of data, patches, vectors */
  double *sums;
} factor_job_cuda;

static bool factor_in_place_cuda(const factor_job_cuda *w) {
  return !w->conv && (!w->reduce || w->s->positions == 1);
}

static factor_job_cuda make_job(dc_linalg *l, const dc__kfac_layer *layer, const dc__per_sample *s, int32_t which,
                                double alpha) {
  const bool inputs = which == DC__FACTOR_A;
  factor_job_cuda w = {
      .l = l, .stream = l->device->internal_stream, .layer = layer, .factor = &layer->factors[which], .s = s};
  w.inputs = inputs;
  w.reduce = layer->approximation == DC_KFAC_REDUCE;
  w.bias = inputs && layer->bias >= 0;
  w.conv = s->layer.kind == DC_SAMPLE_CONV;
  w.data = inputs ? s->x : s->delta;
  w.dtype = inputs ? s->x_dtype : s->dtype;
  w.each = dc__kfac_elements(s, which) / s->samples;
  w.alpha = alpha;
  w.order = w.factor->order - (w.bias ? 1 : 0);
  w.columns = w.order * layer->groups;
  w.tile = s->samples;
  if (!factor_in_place_cuda(&w)) {
    const double fits = PANEL_BYTES / ((double)w.columns * ((double)s->positions + 1) * sizeof(double));
    const double max_samples = fmin(fits, MAX_VECTORS / (w.reduce ? 1 : (double)s->positions));
    w.tile = max_samples < 1 ? 1 : max_samples < (double)s->samples ? (int64_t)max_samples : s->samples;
  }
  return w;
}

/* ---- memory: laid out twice, to count it and to assign it ---- */

static void factor_layout_cuda(factor_job_cuda *w, dc__scratch_layout *to) {
  const bool made = !factor_in_place_cuda(w), means = made && w->reduce;
  const int64_t positions = w->s->positions, vectors = w->reduce && made ? 1 : positions;
  const size_t size = dc_dtype_size(means ? DC_FLOAT32 : w->dtype);
  int64_t unfolded = 0; /* elements of a sample */
  to->fits = to->fits && !__builtin_mul_overflow(w->columns, positions, &unfolded);
  to->fits = to->fits && dc__linalg_add_gemm_workspace(&to->bytes, w->l);
  if (to->memory != NULL) {
    size_t offset = 0; /* the product's workspace is first */
    w->product = dc__linalg_gemm_workspace(w->l, to->memory, &offset);
  }
  w->ones = dc__scratch_layout_alloc(to, w->bias, w->tile, vectors, size);
  w->panel = dc__scratch_layout_alloc(to, made && !means, w->tile, unfolded, size);
  w->as_float32 =
      dc__scratch_layout_alloc(to, means && w->dtype != DC_FLOAT32, w->tile, w->each, sizeof *w->as_float32);
  w->patches = dc__scratch_layout_alloc(to, means && w->conv && w->inputs, w->tile, unfolded, sizeof *w->patches);
  w->sums = dc__scratch_layout_alloc(to, means, w->tile, w->columns, sizeof *w->sums);
  w->means = dc__scratch_layout_alloc(to, means, w->tile, w->columns, sizeof *w->means);
}

/* ---- sums of outer products ---- */

/* Vectors are [count][row], or by rows [columns][row]. With beta 0 old values are ignored. */
static void factor_add_products_cuda(const factor_job_cuda *w, const void *data, int32_t dtype, bool by_rows,
                                     int64_t count, int64_t row, bool adds) {
  const int64_t width = w->factor->order;
  dc__gemm g = {.dtype = dtype, .out_dtype = DC_FLOAT32, .trans_a = !by_rows, .trans_b = by_rows, .alpha = w->alpha};
  g.m = g.n = w->order;
  g.k = count;
  g.a = g.b = data;
  g.c = w->factor->sum;
  g.lda = g.ldb = row;
  g.ldc = width;
  g.batch = w->layer->groups;
  g.stride_a = g.stride_b = by_rows ? w->order * row : w->order;
  g.stride_c = width * width;
  g.beta = adds ? 1 : 0;
  dc__linalg_gemm(w->l, &g, w->product);
  if (w->bias) { /* the last column */
    g.n = g.ldb = 1;
    g.trans_b = false;
    g.b = w->ones;
    g.stride_b = 0;
    g.c = w->factor->sum + w->order;
    dc__linalg_gemm(w->l, &g, w->product);
  }
}

/* ---- computed vectors ---- */

/* Unfolds `count` samples of `from`: inputs into patches, gradients (a kernel of 1) into channels. Row r of sample n,
 * one number per position, begins at n * step + r * pitch. */
static void factor_im2col_cuda(const factor_job_cuda *w, const void *from, int32_t dtype, int64_t count, int64_t step,
                               int64_t pitch, void *to) {
  const dc__per_sample *s = w->s;
  dc__cuda_im2col_args p = {.from = from, .to = to, .samples = count, .step = step, .pitch = pitch};
  p.channels = w->inputs ? s->in : s->out;
  p.wide = dtype == DC_FLOAT32 ? 0 : -1;
  for (int32_t i = 0; i < 3; i++) {
    p.size[i] = w->inputs ? s->size[i] : s->size_out[i];
    p.size_out[i] = s->size_out[i];
    p.kernel[i] = w->inputs ? s->layer.kernel[i] : 1;
    p.stride[i] = w->inputs ? s->layer.stride[i] : 1;
    p.padding[i] = w->inputs ? s->layer.padding[i] : 0;
    p.dilation[i] = w->inputs ? s->layer.dilation[i] : 1;
  }
  dc__cuda_im2col(w->stream, &p);
}

/* The means of a few samples' inputs over their positions, or the sums of their gradients. */
static void make_means(const factor_job_cuda *w, const void *from, int64_t count) {
  dc__cuda_columns_args sums = {.delta = from, .sums = w->sums, .samples = count, .columns = w->columns};
  dc__cuda_load_args load = {.mask = 1, .factor = {w->inputs ? 1 / (double)w->s->positions : 1}};
  if (w->dtype != DC_FLOAT32) {
    dc__cuda_cast(w->stream, w->as_float32, DC_FLOAT32, from, w->dtype, count * w->each);
    sums.delta = w->as_float32;
  }
  if (w->conv && w->inputs) {
    factor_im2col_cuda(w, sums.delta, DC_FLOAT32, count, w->columns * w->s->positions, w->s->positions, w->patches);
    sums.delta = w->patches;
  }
  sums.positions = w->s->positions;
  sums.by_rows = w->conv;
  sums.group = 1;
  dc__cuda_columns(w->stream, &sums);
  load.from = (dc__cuda_matrices){.data = w->sums, .row_stride = w->columns, .col_stride = 1, .count = 1, .wide = 1};
  load.from.rows = count;
  load.from.cols = w->columns;
  load.to = load.from;
  load.to.data = w->means;
  load.to.wide = 0;
  dc__cuda_load(w->stream, &load);
}

/* ---- a factor ---- */

static void make_ones(const factor_job_cuda *w) {
  const bool means = w->means != NULL;
  const dc__cuda_fill_ones_args args = {w->ones, w->tile * (means ? 1 : w->s->positions),
                                        means ? DC_FLOAT32 : w->dtype};
  dc__cuda_fill_ones(w->stream, &args);
}

static void factor_add_cuda(const factor_job_cuda *w) {
  const int64_t positions = w->s->positions;
  bool adds = w->factor->count > 0;
  if (w->bias) {
    make_ones(w);
  }
  if (factor_in_place_cuda(w)) {
    factor_add_products_cuda(w, w->data, w->dtype, false, w->s->samples * positions, w->columns, adds);
    return;
  }
  for (int64_t first = 0; first < w->s->samples; first += w->tile, adds = true) {
    const int64_t count = w->s->samples - first < w->tile ? w->s->samples - first : w->tile;
    const void *from = dc__element_ptr(w->data, w->dtype, first * w->each);
    if (w->reduce) {
      make_means(w, from, count);
      factor_add_products_cuda(w, w->means, DC_FLOAT32, false, count, w->columns, adds);
    } else {
      factor_im2col_cuda(w, from, w->dtype, count, positions, count * positions, w->panel);
      factor_add_products_cuda(w, w->panel, w->dtype, true, count * positions, count * positions, adds);
    }
  }
}

dc_status dc__kfac_accumulate_cuda(dc_linalg *l, dc__kfac_layer *layer, const dc__per_sample *s, double scale) {
  factor_job_cuda ways[DC__FACTORS] = {make_job(l, layer, s, DC__FACTOR_A, 1),
                                       make_job(l, layer, s, DC__FACTOR_G, scale * scale)};
  size_t bytes = 0; /* one memory, reused */
  void *memory;
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    dc__scratch_layout to = {.fits = true};
    factor_layout_cuda(&ways[which], &to);
    if (!to.fits) {
      return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold the patches of a sample", s->fn);
    }
    bytes = to.bytes > bytes ? to.bytes : bytes;
  }
  DC__TRY(dc__linalg_scratch(l, s->fn, bytes, &memory));
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    dc__scratch_layout to = {.memory = memory, .fits = true};
    factor_layout_cuda(&ways[which], &to);
    factor_add_cuda(&ways[which]);
  }
  return dc__linalg_synchronize(l);
}

/* ---- nonfinite input ---- */

/* Searches on the host for the first nonfinite element. */
static dc_status find_nonfinite(dc_linalg *l, const dc__per_sample *s, int32_t which) {
  enum { SCAN_CHUNK = 1 << 16 };
  const int32_t dtype = which == DC__FACTOR_A ? s->x_dtype : s->dtype;
  const void *data = which == DC__FACTOR_A ? s->x : s->delta;
  const int64_t count = dc__kfac_elements(s, which);
  void *host = dc__calloc(SCAN_CHUNK, sizeof(float));
  dc_status status = host == NULL ? DC_E_NO_MEMORY : DC_OK;
  for (int64_t from = 0; from < count && status == DC_OK; from += SCAN_CHUNK) {
    const int64_t chunk = count - from < SCAN_CHUNK ? count - from : SCAN_CHUNK;
    status = dc__linalg_copy_to_host(l, host, dc__element_ptr(data, dtype, from), (size_t)chunk * dc_dtype_size(dtype));
    const int64_t at = status == DC_OK ? dc__kfac_first_nonfinite(host, dtype, chunk) : chunk;
    if (at < chunk) {
      status = dc__kfac_not_finite(s, which, from + at);
    }
  }
  dc__free(host);
  return status;
}

dc_status dc__kfac_scan_cuda(dc_linalg *l, const dc__per_sample *s, double max_abs[DC__FACTORS]) {
  uint64_t found[DC__FACTORS];
  void *memory;
  DC__TRY(dc__linalg_scratch(l, s->fn, sizeof found, &memory));
  dc__stream_zero(l->device->internal_stream, memory, sizeof found);
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    const bool inputs = which == DC__FACTOR_A;
    const dc__cuda_max_abs_args args = {.data = inputs ? s->x : s->delta,
                                        .count = dc__kfac_elements(s, which),
                                        .found = (uint64_t *)memory + which,
                                        .dtype = inputs ? s->x_dtype : s->dtype};
    dc__cuda_max_abs(l->device->internal_stream, &args);
  }
  DC__TRY(dc__linalg_copy_to_host(l, found, memory, sizeof found));
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    const uint32_t bits = (uint32_t)found[which];
    float value;
    if (bits >= UINT32_C(0x7f800000)) {
      return find_nonfinite(l, s, which);
    }
    memcpy(&value, &bits, sizeof value);
    max_abs[which] = (double)value;
  }
  return DC_OK;
}
