/* Linear layers and convolutions on a device: batched products over slices of samples. */
#include "linalg/per_sample/per_sample_cuda.h"

/* Positions in a Gram tile, and rows of a gradient computed at a time, so that a norm's memory grows with neither. */
enum { TILE = 256, ROWS = 256 };

typedef dc__per_sample_cuda per_sample_cuda;

static bool is_conv(const per_sample_cuda *w) {
  return w->s->layer.kind == DC_SAMPLE_CONV;
}
static bool is_ghost(const per_sample_cuda *w) {
  const double positions = (double)w->s->positions;
  return 2 * positions * positions < (double)w->in * (double)w->out;
}
static bool is_empty(const per_sample_cuda *w) {
  return w->in == 0 || w->out == 0 || w->s->positions == 0;
}

bool dc__per_sample_linear_sizes_cuda(const per_sample_cuda *w, dc__per_sample_linear_sizes *n) {
  const int64_t positions = w->s->positions, tile = dc__min_int64(TILE, positions), rows = dc__min_int64(ROWS, w->out);
  const int64_t patches = is_conv(w) ? dc__im2col_numel(w->s) : 0;
  int64_t sums = 0, own = 0;
  bool fits = true;
  if (w->call->op == DC__PER_SAMPLE_NORMS) {
    sums = positions == 1 ? 2 : is_ghost(w) ? tile : rows;
    fits = positions == 1 || !__builtin_mul_overflow(is_ghost(w) ? 2 * tile : rows, is_ghost(w) ? tile : w->in, &own);
  } else if (w->call->op == DC__PER_SAMPLE_SUM && (is_conv(w) || w->call->factors != NULL)) {
    fits = !__builtin_mul_overflow(is_conv(w) ? w->out : w->in + w->out, positions, &own);
  }
  return fits && !__builtin_mul_overflow(patches, w->groups, &n->patches) &&
         !__builtin_mul_overflow(own, w->groups, &n->own) && !__builtin_mul_overflow(sums, w->groups, &n->sums);
}

/* ---- layout of a slice's factors ---- */

/* delta and x of `count` samples from `first` on. Pair i is at i * stride_d and i * stride_a. A convolution's d is
 * [out][T] and its a [in][T]; otherwise they are [T][out] and [T][in]. */
typedef struct sample_slice {
  const per_sample_cuda *w;
  const void *a, *d;
  int64_t first, count;
} sample_slice;

static dc__cuda_im2col_args patches_of(const sample_slice *f) {
  const dc__per_sample *s = f->w->s;
  const int64_t pixels = s->size[0] * s->size[1] * s->size[2];
  dc__cuda_im2col_args p = {.to = f->w->patches, .samples = f->count, .channels = s->in};
  p.from = dc__element_ptr(s->x, s->dtype, f->first * s->in * pixels);
  p.wide = s->dtype == DC_FLOAT64;
  for (int32_t i = 0; i < 3; i++) {
    p.size[i] = s->size[i];
    p.size_out[i] = s->size_out[i];
    p.kernel[i] = s->layer.kernel[i];
    p.stride[i] = s->layer.stride[i];
    p.padding[i] = s->layer.padding[i];
    p.dilation[i] = s->layer.dilation[i];
  }
  return p;
}

static sample_slice sample_slice_at(const per_sample_cuda *w, int64_t first) {
  const dc__per_sample *s = w->s;
  sample_slice f = {
      .w = w, .first = first, .count = dc__min_int64(w->max_samples, s->samples - first), .a = w->patches};
  f.d = dc__element_ptr(s->delta, s->dtype, first * s->out * s->positions);
  if (is_conv(w)) {
    dc__cuda_im2col_args p = patches_of(&f);
    p.pitch = s->positions;
    p.step = w->groups * w->in * s->positions;
    dc__cuda_im2col(w->stream, &p);
  } else {
    f.a = dc__element_ptr(s->x, s->dtype, first * s->positions * s->in);
  }
  return f;
}

/* c [pairs, rows, in] = rows [row, row + rows) of each gradient. */
static void sample_slice_gemm(const sample_slice *f, int64_t row, int64_t rows, void *c) {
  const per_sample_cuda *w = f->w;
  const int64_t positions = w->s->positions;
  const void *d = dc__element_ptr(f->d, w->s->dtype, is_conv(w) ? row * positions : row);
  dc__gemm g = dc__gemm_dense(w->s->dtype, !is_conv(w), is_conv(w), rows, w->in, positions, d, f->a, c);
  g.lda = is_conv(w) ? positions : w->out;
  g.batch = f->count * w->groups;
  g.stride_a = positions * w->out;
  g.stride_b = positions * w->in;
  g.stride_c = rows * w->in;
  dc__linalg_gemm(w->l, &g, w->product);
}

void dc__per_sample_linear_grads_cuda(const per_sample_cuda *w) {
  for (int64_t first = 0; first < w->s->samples; first += w->max_samples) {
    const sample_slice f = sample_slice_at(w, first);
    sample_slice_gemm(&f, 0, w->out,
                      dc__element_ptr(w->call->to_weight, w->s->dtype, first * w->groups * w->out * w->in));
  }
}

/* ---- norms ---- */

/* sums [pairs, rows] = the dot products of a's and b's rows, of `columns` elements each. */
static void row_dots(const sample_slice *f, const void *a, const void *b, int64_t rows, int64_t columns, double *sums) {
  dc__cuda_dots_args args = {.a = a, .b = b, .sums = sums, .columns = columns, .step = 1};
  args.rows = f->count * f->w->groups * rows;
  args.wide = f->w->s->dtype == DC_FLOAT64;
  dc__cuda_dots(f->w->stream, &args);
}

/* Adds factor times the row sums to the slice's parts. */
static void add_totals(const sample_slice *f, double factor, int64_t rows) {
  const per_sample_cuda *w = f->w;
  dc__cuda_totals_args args = {.sums = w->sums, .factor = factor, .rows = rows};
  args.to = w->parts + f->first * w->width;
  args.count = f->count * w->groups;
  args.group = w->groups;
  args.step = w->width;
  dc__cuda_totals(w->stream, &args);
}

/* c = the Gram tile [pairs, rows, columns] of positions from t and u on of one factor, with `width` values each. */
static void linear_gram_cuda(const sample_slice *f, const void *factor, int64_t width, int64_t t, int64_t rows,
                             int64_t u, int64_t columns, void *c) {
  const per_sample_cuda *w = f->w;
  const int32_t dtype = w->s->dtype;
  const void *a = dc__element_ptr(factor, dtype, is_conv(w) ? t : t * width);
  const void *b = dc__element_ptr(factor, dtype, is_conv(w) ? u : u * width);
  dc__gemm g = dc__gemm_dense(dtype, is_conv(w), !is_conv(w), rows, columns, width, a, b, c);
  g.lda = g.ldb = is_conv(w) ? w->s->positions : width;
  g.batch = f->count * w->groups;
  g.stride_a = g.stride_b = w->s->positions * width;
  g.stride_c = rows * columns;
  dc__linalg_gemm(w->l, &g, w->product);
}

/* Adds the sums over t, u of (a_t . a_u) (d_t . d_u), in tiles. */
static void ghost_squares(const sample_slice *f) {
  const per_sample_cuda *w = f->w;
  const int64_t positions = w->s->positions;
  for (int64_t t = 0; t < positions; t += TILE) {
    const int64_t rows = dc__min_int64(TILE, positions - t);
    for (int64_t u = 0; u <= t; u += TILE) {
      const int64_t columns = dc__min_int64(TILE, positions - u);
      void *other = dc__element_ptr(w->own, w->s->dtype, f->count * w->groups * rows * columns);
      linear_gram_cuda(f, f->a, w->in, t, rows, u, columns, w->own);
      linear_gram_cuda(f, f->d, w->out, t, rows, u, columns, other);
      row_dots(f, w->own, other, rows, columns, w->sums);
      add_totals(f, u < t ? 2 : 1, rows);
    }
  }
}

/* Adds the squares of the gradients themselves, computed a few rows at a time. */
static void direct_squares(const sample_slice *f) {
  const per_sample_cuda *w = f->w;
  for (int64_t row = 0; row < w->out; row += ROWS) {
    const int64_t rows = dc__min_int64(ROWS, w->out - row);
    sample_slice_gemm(f, row, rows, w->own);
    row_dots(f, w->own, w->own, rows, w->in, w->sums);
    add_totals(f, 1, rows);
  }
}

/* With one position, a gradient's square is the product of its factors' squares. */
static void outer_squares(const sample_slice *f) {
  const per_sample_cuda *w = f->w;
  const int64_t pairs = f->count * w->groups;
  row_dots(f, f->a, f->a, 1, w->in, w->sums);
  row_dots(f, f->d, f->d, 1, w->out, w->sums + pairs);
  const dc__cuda_dots_args both = {
      .a = w->sums, .b = w->sums + pairs, .sums = w->sums, .rows = pairs, .columns = 1, .step = 1, .wide = true};
  dc__cuda_dots(w->stream, &both);
  add_totals(f, 1, 1);
}

void dc__per_sample_linear_norms_cuda(const per_sample_cuda *w) {
  for (int64_t first = 0; first < w->s->samples && !is_empty(w); first += w->max_samples) {
    const sample_slice f = sample_slice_at(w, first);
    if (w->s->positions == 1) {
      outer_squares(&f);
    } else if (is_ghost(w)) {
      ghost_squares(&f);
    } else {
      direct_squares(&f);
    }
  }
}

/* ---- sums ---- */

/* weights = D A, or += with `adds`, over `positions` of all groups' factors, which are laid out as in a slice. */
static void linear_add_product_cuda(const per_sample_cuda *w, const void *d, const void *a, int64_t positions,
                                    bool adds) {
  dc__gemm g = dc__gemm_dense(w->s->dtype, !is_conv(w), is_conv(w), w->out, w->in, positions, d, a, w->call->to_weight);
  g.batch = w->groups;
  g.stride_a = positions * w->out;
  g.stride_b = positions * w->in;
  g.stride_c = w->out * w->in;
  g.beta = adds ? 1 : 0;
  dc__linalg_gemm(w->l, &g, w->product);
}

/* Gathers `rows` of `length` elements of each sample side by side, in order, to [rows][samples * length]; zeros for
 * samples with factor 0. */
static void gather_samples(const sample_slice *f, const void *from, int64_t rows, int64_t length, bool scaled,
                           void *to) {
  const dc__per_sample *s = f->w->s;
  dc__cuda_im2col_args p = {.from = from, .to = to, .samples = f->count, .channels = rows, .step = length};
  p.factors = f->w->call->factors == NULL ? NULL : dc__element_ptr(f->w->call->factors, s->dtype, f->first);
  p.pitch = f->count * length;
  p.scaled = scaled;
  p.wide = s->dtype == DC_FLOAT64;
  for (int32_t i = 0; i < 3; i++) {
    p.size[i] = p.size_out[i] = i < 2 ? 1 : length;
    p.kernel[i] = p.stride[i] = p.dilation[i] = 1;
  }
  dc__cuda_im2col(f->w->stream, &p);
}

/* Adds a slice's product. Its factors are copied side by side, with zeros for samples of factor 0. */
static void add_sample_slice(const sample_slice *f, bool adds) {
  const per_sample_cuda *w = f->w;
  const dc__per_sample *s = w->s;
  const int64_t positions = s->positions;
  const void *d = dc__element_ptr(s->delta, s->dtype, f->first * s->out * positions);
  if (is_conv(w)) {
    dc__cuda_im2col_args p = patches_of(f);
    p.factors = w->call->factors == NULL ? NULL : dc__element_ptr(w->call->factors, s->dtype, f->first);
    p.step = positions;
    p.pitch = f->count * positions;
    dc__cuda_im2col(w->stream, &p);
    gather_samples(f, d, s->out, positions, true, w->own);
    linear_add_product_cuda(w, w->own, w->patches, f->count * positions, adds);
  } else {
    void *x = dc__element_ptr(w->own, s->dtype, f->count * positions * s->out);
    gather_samples(f, d, 1, positions * s->out, true, w->own);
    gather_samples(f, dc__element_ptr(s->x, s->dtype, f->first * positions * s->in), 1, positions * s->in, false, x);
    linear_add_product_cuda(w, w->own, x, f->count * positions, adds);
  }
}

void dc__per_sample_linear_sum_cuda(const per_sample_cuda *w) {
  const dc__per_sample *s = w->s;
  if (s->samples == 0 || is_empty(w) || (!is_conv(w) && w->call->factors == NULL)) {
    linear_add_product_cuda(w, s->delta, s->x, is_conv(w) ? 0 : s->samples * s->positions, w->call->accumulate);
    return;
  }
  for (int64_t first = 0; first < s->samples; first += w->max_samples) {
    const sample_slice f = {.w = w, .first = first, .count = dc__min_int64(w->max_samples, s->samples - first)};
    add_sample_slice(&f, w->call->accumulate || first > 0);
  }
}
