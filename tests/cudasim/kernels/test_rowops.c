/* The kernels of the layer's rows compared with float64 sums: rows for which a thread holds one piece and longer ones,
 * of any length and at any address; GELU over the whole line. On the simulated driver, or on a card (tests/card). */
#include "harness.h"

#include <math.h>

#include "cuda_fixture.h"
#include "device_matrix.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/gemm/gemm.h"

/* A few of the sums' chunks, the last of them short; and where rows are long, more than LN's backward has blocks. */
enum { ROWS = 70, MORE = DC__CUDA_MIN_SMS + 22, LONG = 2048, FEW = 3 };

static int32_t dtype;
static int64_t columns;

/* An array, `shift` elements behind a multiple of 64 bytes, and its values as they were stored. */
typedef struct array {
  dc_tensor whole;
  int64_t count, shift;
  float *values;
} array;

static void *at(const array *a) {
  return (char *)a->whole.data + (size_t)a->shift * dc_dtype_size(a->whole.dtype);
}

static void copy_to_host(array *a) {
  float *all = malloc((size_t)(a->count + a->shift) * sizeof *all);
  void *host = elements(device, &a->whole);
  dc__cast(all, DC_FLOAT32, host, a->whole.dtype, a->count + a->shift);
  memcpy(a->values, all + a->shift, (size_t)a->count * sizeof *all);
  free(host);
  free(all);
}

static array make(int32_t type, int64_t rows, int64_t wide, int64_t shift, uint64_t seed, float scale) {
  array a = {.count = rows * wide, .shift = shift};
  a.whole = tensor(device, type, 1, a.count + shift);
  a.values = malloc((size_t)a.count * sizeof *a.values);
  randomize(device, &a.whole, seed, scale, 0.25f);
  copy_to_host(&a);
  return a;
}

static void done(void) {
  if (dc_stream_synchronize(stream, 0) != DC_OK) {
    fail_msg("%s", dc_last_error());
  }
}

/* Checks the norm of the difference, relative to the expected norm. */
static void same(const char *what, array *found, const double *expected) {
  copy_to_host(found);
  double square = 0, norm = 0;
  for (int64_t i = 0; i < found->count; i++) {
    square += (found->values[i] - expected[i]) * (found->values[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  const double e = sqrt(square / (norm > 0 ? norm : 1));
  const double gate = found->whole.dtype == DC_FLOAT32 ? 2e-6 : found->whole.dtype == DC_FLOAT16 ? 1e-3 : 5e-3;
  if (!(e < gate)) {
    fail_msg("%s differs by %g: %s, %d columns", what, e, dc_dtype_name(dtype), (int)columns);
  }
}

static void free_all(array *arrays, int count) {
  for (int i = 0; i < count; i++) {
    free(arrays[i].values);
  }
  while (block_count > 0) {
    block_count--;
    device->ops->free(device, blocks[block_count].ptr, blocks[block_count].bytes, DC_MEMORY_DEVICE);
  }
}

/* Computes a row's mean, and 1 / its standard deviation. */
static void statistics(const float *row, double *mean, double *rstd) {
  double sum = 0, squares = 0;
  for (int64_t j = 0; j < columns; j++) {
    sum += row[j];
  }
  *mean = sum / (double)columns;
  for (int64_t j = 0; j < columns; j++) {
    squares += (row[j] - *mean) * (row[j] - *mean);
  }
  *rstd = 1 / sqrt(squares / (double)columns + 1e-5);
}

/* out = residual + u + bias, y = LN(out), and LN's gradient at out, with sums over all rows. */
static void check_norm(int64_t shift) {
  enum { U, BIAS, RESIDUAL, GAMMA, BETA, OUT, Y, DY, ADD, DX, STATS, PARTS, SUM, DOT, PLAIN, ARRAYS };
  const int64_t rows = columns > LONG ? MORE : ROWS;
  array a[ARRAYS];
  for (int i = 0; i < ARRAYS; i++) {
    const bool narrow = i == BIAS || i == GAMMA || i == BETA || i >= SUM;
    const int32_t type = i >= STATS ? DC_FLOAT32 : dtype;
    const int64_t wide = i == STATS ? 2 : i == PARTS ? dc__cuda_sum_parts(rows, columns, columns) / 4 : columns;
    a[i] = make(type, narrow || i == PARTS ? 1 : rows, wide, i < OUT ? shift : 0, (uint64_t)i, 1);
  }
  const dc__cuda_residual_args forward = {.u = at(&a[U]),
                                          .bias = at(&a[BIAS]),
                                          .residual = at(&a[RESIDUAL]),
                                          .out = at(&a[OUT]),
                                          .y = at(&a[Y]),
                                          .gamma = at(&a[GAMMA]),
                                          .beta = at(&a[BETA]),
                                          .stats = at(&a[STATS]),
                                          .rows = rows,
                                          .columns = columns,
                                          .eps = 1e-5f,
                                          .dtype = dtype};
  dc__cuda_residual(stream, &forward);
  const dc__cuda_layernorm_backward_args back = {
      .dy = at(&a[DY]),
      .x = at(&a[OUT]),
      .gamma = at(&a[GAMMA]),
      .add = at(&a[ADD]),
      .stats = at(&a[STATS]),
      .dx = at(&a[DX]),
      .rows = rows,
      .columns = columns,
      .dtype = dtype,
      .sums = {.parts = at(&a[PARTS]), .to = {at(&a[SUM]), at(&a[DOT])}, .dtype = DC_FLOAT32, .accumulate = 1}};
  dc__cuda_layernorm_backward(stream, &back);
  const dc__cuda_sum_args sums = {.x = at(&a[DY]),
                                  .rows = rows,
                                  .columns = columns,
                                  .dtype = dtype,
                                  .sums = {.parts = at(&a[PARTS]), .to = {at(&a[PLAIN])}, .dtype = DC_FLOAT32}};
  dc__cuda_column_sums(stream, &sums);
  done();
  double *out = malloc((size_t)((3 * rows + 3) * columns) * sizeof *out), *y = out + rows * columns;
  double *dx = y + rows * columns, *sum = dx + rows * columns, *dot = sum + columns, *plain = dot + columns;
  copy_to_host(&a[OUT]);
  for (int64_t j = 0; j < columns; j++) {
    sum[j] = a[SUM].values[j];
    dot[j] = a[DOT].values[j];
    plain[j] = 0;
  }
  for (int64_t i = 0; i < rows; i++) {
    double mean, rstd, total = 0, product = 0;
    const float *x = a[OUT].values + i * columns, *dy = a[DY].values + i * columns;
    statistics(x, &mean, &rstd);
    for (int64_t j = 0; j < columns; j++) {
      const int64_t k = i * columns + j;
      const double normal = (x[j] - mean) * rstd;
      out[k] = (double)a[U].values[k] + a[BIAS].values[j] + a[RESIDUAL].values[k];
      y[k] = normal * a[GAMMA].values[j] + a[BETA].values[j];
      total += (double)dy[j] * a[GAMMA].values[j];
      product += (double)dy[j] * a[GAMMA].values[j] * normal;
      sum[j] += dy[j];
      plain[j] += dy[j];
      dot[j] += dy[j] * normal;
    }
    for (int64_t j = 0; j < columns; j++) {
      const int64_t k = i * columns + j;
      const double along = (x[j] - mean) * rstd * product / (double)columns;
      dx[k] = rstd * ((double)dy[j] * a[GAMMA].values[j] - total / (double)columns - along) + a[ADD].values[k];
    }
  }
  same("the sum with the residual", &a[OUT], out);
  same("LN", &a[Y], y);
  same("LN's gradient", &a[DX], dx);
  same("LN's sum over rows", &a[SUM], sum);
  same("LN's sum of products over rows", &a[DOT], dot);
  same("a sum over rows", &a[PLAIN], plain);
  free(out);
  free_all(a, ARRAYS);
}

static double gelu(double x, bool erf_form, bool slope) {
  const double k = sqrt(2 / M_PI), t = tanh(k * (x + 0.044715 * x * x * x));
  if (erf_form) {
    const double half = 0.5 * (1 + erf(x * M_SQRT1_2));
    return slope ? half + x * exp(-0.5 * x * x) / sqrt(2 * M_PI) : x * half;
  }
  return slope ? 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 0.134145 * x * x) : 0.5 * x * (1 + t);
}

/* x + bias, its GELU, and a gradient times GELU's derivative there. */
static void check_gelu(int32_t form, int64_t shift) {
  enum { X, BIAS, F, DF, ARRAYS };
  array a[ARRAYS];
  for (int i = 0; i < ARRAYS; i++) {
    a[i] = make(dtype, i == BIAS ? 1 : FEW, columns, shift, (uint64_t)i + 20, i == X ? 6 : 1);
  }
  dc__cuda_epilogue_args e = {.x = at(&a[X]),
                              .out = at(&a[F]),
                              .bias = at(&a[BIAS]),
                              .aux = at(&a[X]),
                              .rows = FEW,
                              .columns = columns,
                              .dtype = dtype,
                              .epilogue = DC__EPILOGUE_GELU};
  e.gelu = form;
  double *f = malloc((size_t)(3 * FEW * columns) * sizeof *f), *df = f + FEW * columns, *h = df + FEW * columns;
  for (int64_t k = 0; k < FEW * columns; k++) {
    h[k] = (double)a[X].values[k] + a[BIAS].values[k % columns];
  }
  dc__cuda_epilogue(stream, &e);
  e.x = e.out = at(&a[DF]);
  e.epilogue = DC__EPILOGUE_GELU_BACK;
  dc__cuda_epilogue(stream, &e);
  done();
  same("x and its bias", &a[X], h);
  for (int64_t k = 0; k < FEW * columns; k++) {
    f[k] = gelu(a[X].values[k], form == DC__GELU_ERF, false);
    df[k] = a[DF].values[k] * gelu(a[X].values[k], form == DC__GELU_ERF, true);
  }
  same("GELU", &a[F], f);
  same("GELU's gradient", &a[DF], df);
  free(f);
  free_all(a, ARRAYS);
}

/* The thread sanitizer makes kernels slow, and so does interpreted PTX, so only some cases are run. */
#ifdef CUDASIM_TSAN
enum { EVERY = 7 };
#else
enum { EVERY = 1 };
#endif

static void test_rows(void **state) {
  (void)state;
  static const int32_t dtypes[] = {DC_FLOAT32, DC_FLOAT16, DC_BFLOAT16};
  static const int64_t widths[] = {1, 40, 257, 1024, 4096, 3001, 5003, 8200};
  const bool as_ptx = getenv("CUDASIM_PTX") != NULL;
  const int32_t end = as_ptx ? 16 : 3 * (int32_t)DC__COUNT(widths);
  for (int32_t i = as_ptx; i < end; i += as_ptx ? 4 : EVERY) {
    dtype = dtypes[i % 3];
    columns = widths[i / 3];
    check_norm(i / 3 % 2);
    check_gelu(DC__GELU_TANH, 0);
    check_gelu(DC__GELU_ERF, i / 3 % 2);
  }
}

/* For large |x|, GELU is x or 0, and its derivative 1 or 0. */
static void test_far_out(void **state) {
  (void)state;
  dtype = DC_FLOAT32;
  columns = 6;
  static const float far[6] = {-1e30f, -150, -30, 30, 150, 1e30f};
  for (int32_t form = 0; form < 2; form++) {
    array x = make(dtype, 1, columns, 0, 0, 1), f = make(dtype, 1, columns, 0, 0, 1);
    array slope = make(dtype, 1, columns, 0, 0, 1), all[] = {x, f, slope};
    static const float ones[6] = {1, 1, 1, 1, 1, 1};
    copy(device, at(&x), far, sizeof far);
    copy(device, at(&slope), ones, sizeof ones);
    dc__cuda_epilogue_args e = {.x = at(&x),
                                .out = at(&f),
                                .rows = 1,
                                .columns = columns,
                                .dtype = dtype,
                                .epilogue = DC__EPILOGUE_GELU,
                                .gelu = form};
    dc__cuda_epilogue(stream, &e);
    e.x = e.out = at(&slope);
    e.aux = at(&x);
    e.epilogue = DC__EPILOGUE_GELU_BACK;
    dc__cuda_epilogue(stream, &e);
    done();
    copy_to_host(&f);
    copy_to_host(&slope);
    for (int i = 0; i < 6; i++) {
      assert_true(f.values[i] == (far[i] > 0 ? far[i] : 0));
      assert_true(fabsf(slope.values[i] - (far[i] > 0 ? 1.0f : 0.0f)) < 1e-6f);
    }
    free_all(all, 3);
  }
}

/* ---- grids ---- */

static dc__launch launches[2];
static int launch_count;

static void keep_launch(dc_stream *on, const dc__launch *launch) {
  (void)on;
  assert_true(launch_count < 2);
  launches[launch_count++] = *launch;
}

/* The kernels of sums do not loop over columns: in the first a thread has 8 of them, in the second a block has 32. */
static void test_sums_have_blocks_for_all_columns(void **state) {
  (void)state;
  const dc__device_ops ops = {.stream_launch = keep_launch};
  dc_device launcher = {.ops = &ops};
  dc_stream on = {.device = &launcher};
  const dc__cuda_sum_args sums = {.rows = 1, .columns = DC__CUDA_MAX_SUM_COLUMNS, .dtype = DC_FLOAT32};
  dc__cuda_column_sums(&on, &sums);
  assert_int_equal(launch_count, 2);
  assert_int_equal(launches[0].blocks_y, DC__CUDA_MAX_GRID_YZ);
  assert_true((int64_t)launches[0].blocks_y * launches[0].threads * 8 >= sums.columns);
  assert_true((int64_t)launches[1].blocks * 32 >= sums.columns);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_rows), cmocka_unit_test(test_far_out),
                                     cmocka_unit_test(test_sums_have_blocks_for_all_columns)};
  return cmocka_run_group_tests(tests, open_stream, close_stream);
}
