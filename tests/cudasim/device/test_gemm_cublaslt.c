/* Matrix products of the device by cuBLASLt, for which a stand-in is used (cublaslt.c), compared with the CPU's. Also
 * tested: work that is done only once, refusals, and every call failing in turn. */
#include "harness.h"

#include "cuda_fixture.h"
#include "device/cuda/cublaslt.h"
#include "kernels/kernels.h"

enum { BYTES = 1 << 16, WORKSPACE = 4096 };

static char *blocks[5]; /* A, B, D, the epilogue's input, the workspace */

static void open_all(void) {
  (void)open_stream(NULL);
  if (device->ops->matmul_init(device) != DC_OK) {
    fail_msg("%s", dc_last_error());
  }
  for (size_t i = 0; i < DC__COUNT(blocks); i++) {
    void *ptr;
    assert_int_equal(device->ops->alloc(device, BYTES, DC_MEMORY_DEVICE, &ptr), DC_OK);
    blocks[i] = ptr;
  }
}

static void close_all(void) {
  for (size_t i = 0; i < DC__COUNT(blocks); i++) {
    device->ops->free(device, blocks[i], BYTES, DC_MEMORY_DEVICE);
  }
  (void)close_stream(NULL);
  assert_int_equal(cudasim_depth(), 0);
}

static int set_up(void **state) {
  (void)state;
  cudasim_reset();
  return 0;
}

static void fill(int block, int32_t dtype, int64_t count) {
  double *values = cudasim_host_ptr(blocks[4]); /* the workspace serves as scratch memory */
  void *data = cudasim_host_ptr(blocks[block]);
  assert_true(count * (int64_t)sizeof(double) <= BYTES);
  for (int64_t i = 0; i < count; i++) {
    values[i] = (double)((i * 37 + block * 11) % 64 - 32) / 32.0;
  }
  if (dtype == DC_FLOAT64) {
    memcpy(data, values, (size_t)count * sizeof(double));
  } else {
    dc__cast(data, dtype, values, DC_FLOAT64, count);
  }
}

static dc__matmul product_of(int32_t dtype, int32_t out_dtype, int64_t m, int64_t n, int64_t k) {
  dc__matmul p = {.dtype = dtype, .out_dtype = out_dtype, .m = m, .n = n, .k = k, .alpha = 1};
  p.a = blocks[0];
  p.b = blocks[1];
  p.d = blocks[2];
  p.epilogue_ptr = blocks[3];
  p.workspace = blocks[4];
  p.workspace_bytes = WORKSPACE;
  p.lda = m;
  p.ldb = k;
  p.ldd = m;
  return p;
}

/* Computes the same on the CPU, with row-major matrices. */
static void multiply_cpu(const dc__matmul *p, void *d, void *scratch) {
  dc__gemm g = {.dtype = p->dtype, .out_dtype = p->out_dtype, .batch = 1, .alpha = p->alpha, .beta = p->beta};
  g.trans_a = p->trans_b != 0;
  g.trans_b = p->trans_a != 0;
  g.m = p->n;
  g.n = p->m;
  g.k = p->k;
  g.a = cudasim_host_ptr(p->b);
  g.b = cudasim_host_ptr(p->a);
  g.c = d;
  g.lda = p->ldb;
  g.ldb = p->lda;
  g.ldc = p->ldd;
  if (p->epilogue == DC__MATMUL_BIAS) {
    g.epilogue = DC__EPILOGUE_BIAS;
    g.bias = cudasim_host_ptr(p->epilogue_ptr);
  } else if (p->epilogue == DC__MATMUL_DGELU) {
    g.epilogue = DC__EPILOGUE_GELU_BACK;
    g.aux = cudasim_host_ptr(p->epilogue_ptr);
  }
  dc__gemm_serial(&g, scratch);
}

static void compare(const dc__matmul *p, void *scratch) {
  static _Alignas(64) char expected[BYTES], sums[BYTES];
  const size_t bytes = (size_t)(p->ldd * p->n) * dc_dtype_size(p->out_dtype);
  fill(0, p->dtype, p->m * p->k);
  fill(1, p->dtype, p->k * p->n);
  fill(2, p->out_dtype, p->m * p->n);
  fill(3, p->dtype, p->m * p->n);
  memcpy(expected, cudasim_host_ptr(blocks[2]), bytes);
  multiply_cpu(p, expected, scratch);
  assert_true(device->ops->stream_matmul(stream, p));
  assert_int_equal(dc_stream_synchronize(stream, 0), DC_OK);
  assert_memory_equal(cudasim_host_ptr(blocks[2]), expected, bytes);
  if (p->epilogue == DC__MATMUL_BGRADB) {
    for (int64_t j = 0; j < p->n; j++) {
      float sum = 0;
      for (int64_t k = 0; k < p->k; k++) {
        float x;
        const int64_t at = p->trans_b ? k * p->ldb + j : j * p->ldb + k;
        dc__cast(&x, DC_FLOAT32, (char *)cudasim_host_ptr(p->b) + (size_t)at * dc_dtype_size(p->dtype), p->dtype, 1);
        sum += x;
      }
      dc__cast(sums + (size_t)j * dc_dtype_size(p->out_dtype), p->out_dtype, &sum, DC_FLOAT32, 1);
    }
    assert_memory_equal(cudasim_host_ptr(blocks[3]), sums, (size_t)p->n * dc_dtype_size(p->out_dtype));
  }
}

static void test_types_and_epilogues(void **state) {
  (void)state;
  static const int32_t dtypes[][2] = {{DC_FLOAT32, DC_FLOAT32},
                                      {DC_FLOAT64, DC_FLOAT64},
                                      {DC_FLOAT16, DC_FLOAT16},
                                      {DC_BFLOAT16, DC_BFLOAT16},
                                      {DC_BFLOAT16, DC_FLOAT32}};
  void *scratch = aligned_alloc(4096, DC__SCRATCH_BYTES);
  open_all();
  for (size_t i = 0; i < DC__COUNT(dtypes); i++) {
    for (int32_t transposed = 0; transposed < 4; transposed++) {
      dc__matmul p = product_of(dtypes[i][0], dtypes[i][1], 24, 17, 40);
      p.trans_a = transposed & 1;
      p.trans_b = transposed >> 1;
      p.lda = p.trans_a ? p.k : p.m;
      p.ldb = p.trans_b ? p.n : p.k;
      p.beta = transposed == 3 ? 1 : 0;
      compare(&p, scratch);
      p.epilogue = DC__MATMUL_BIAS;
      if (i != 1 && i != 4) {
        compare(&p, scratch);
      }
      p.epilogue = DC__MATMUL_BGRADB;
      if (i >= 2) {
        compare(&p, scratch);
      } else {
        assert_false(device->ops->stream_matmul(stream, &p));
      }
    }
    dc__matmul p = product_of(dtypes[i][0], dtypes[i][1], 24, 17, 40);
    p.epilogue = DC__MATMUL_DGELU;
    if (i == 2 || i == 3) {
      compare(&p, scratch);
      p.m = p.lda = p.ldd = 25; /* rows whose bytes are not a multiple of 16 */
    }
    assert_false(device->ops->stream_matmul(stream, &p));
  }
  close_all();
  free(scratch);
}

static int made(void) {
  return cudasim_calls("cublasLtMatmulAlgoGetHeuristic") + cudasim_calls("cublasLtMatmulDescCreate") +
         cudasim_calls("cublasLtMatrixLayoutCreate") + cudasim_calls("cublasLtMatmulPreferenceCreate");
}

static void test_a_shape_is_looked_for_once(void **state) {
  (void)state;
  open_all();
  dc__matmul p = product_of(DC_BFLOAT16, DC_BFLOAT16, 16, 16, 16);
  fill(0, DC_BFLOAT16, 256);
  fill(1, DC_BFLOAT16, 256);
  assert_true(device->ops->stream_matmul(stream, &p));
  int before = made();
  for (int i = 0; i < 3; i++) {
    p.beta = i;
    p.a = blocks[0] + 32 * i; /* only alignments up to 16 bytes matter */
    assert_true(device->ops->stream_matmul(stream, &p));
  }
  assert_int_equal(made(), before);
  int live = 0;
  for (int64_t m = 1; m <= 2048; m++) { /* more shapes than are cached */
    p = product_of(DC_FLOAT32, DC_FLOAT32, m, 1, 1);
    assert_true(device->ops->stream_matmul(stream, &p));
    live = cudasim_live() > live ? cudasim_live() : live;
  }
  assert_true(live < 4 * 512 + 64);
  assert_int_equal(dc_stream_synchronize(stream, 0), DC_OK);
  close_all();
}

static void wait_for(void *gate) {
  while (atomic_load((atomic_int *)gate) == 0) {
    sched_yield();
  }
}

/* Products behind a host function wait for the stream's worker, while more shapes than are cached are requested. */
static void test_behind_a_host_function_and_in_a_graph(void **state) {
  (void)state;
  atomic_int gate = 0;
  open_all();
  assert_int_equal(dc_stream_call(stream, wait_for, &gate), DC_OK);
  memset(cudasim_host_ptr(blocks[0]), 0, BYTES);
  memset(cudasim_host_ptr(blocks[1]), 0, BYTES);
  for (int64_t m = 1; m <= 700; m++) {
    dc__matmul p = product_of(DC_FLOAT32, DC_FLOAT32, m % 350 + 1, 1, m / 350 + 1);
    if (m == 20) {
      atomic_store(&gate, 1);
    }
    assert_true(device->ops->stream_matmul(stream, &p));
  }
  assert_int_equal(dc_stream_synchronize(stream, 0), DC_OK);
  void *native = cudasim_stream();
  dc_stream *wrapped;
  assert_int_equal(dc_stream_wrap(device, native, &wrapped), DC_OK);
  dc__matmul p = product_of(DC_FLOAT32, DC_FLOAT32, 8, 8, 8);
  p.beta = 1;
  for (int i = 0; i < 64; i++) {
    ((float *)cudasim_host_ptr(blocks[0]))[i] = ((float *)cudasim_host_ptr(blocks[1]))[i] = i % 9 == 0 ? 1 : 0;
    ((float *)cudasim_host_ptr(blocks[2]))[i] = 0;
  }
  cudasim_capture(native);
  assert_true(device->ops->stream_matmul(wrapped, &p));
  assert_int_equal(cudasim_capture_end(native), 1);
  cudasim_launch(native);
  cudasim_launch(native);
  assert_int_equal(dc_stream_synchronize(wrapped, 0), DC_OK);
  assert_true(((float *)cudasim_host_ptr(blocks[2]))[9] == 2);
  cudasim_capture(native);
  cudasim_spoil();
  assert_true(device->ops->stream_matmul(wrapped, &p));
  assert_int_equal(cudasim_capture_end(native), 0);
  assert_int_equal(dc__device_check(device), DC_OK); /* only the capture has failed */
  dc_stream_destroy(wrapped);
  cudasim_stream_end(native);
  close_all();
}

static void test_refusals(void **state) {
  (void)state;
  assert_int_equal(dc_device_open("cuda", NULL, &device), DC_OK);
  setenv("LIBDC_CUDA_LIB_DIR", "/nowhere", 1);
  assert_int_equal(device->ops->matmul_init(device), DC_E_UNSUPPORTED);
  assert_non_null(strstr(dc_last_error(), "matrix products need cuBLASLt, and it was not found (/nowhere/"));
  assert_non_null(
      strstr(dc_last_error(), "install the package nvidia-cublas, or name its folder in LIBDC_CUDA_LIB_DIR"));
  cudasim_set_version(12040);
  assert_int_equal(device->ops->matmul_init(device), DC_E_UNSUPPORTED);
  assert_non_null(strstr(dc_last_error(), "libcublasLt.so.12: "));
  assert_non_null(strstr(dc_last_error(), "install the package nvidia-cublas-cu12, or"));
  cudasim_set_version(13000);
  unsetenv("LIBDC_CUDA_LIB_DIR");
  cudasim_fail("cublasLtGetProperty", 0, 1);
  assert_int_equal(device->ops->matmul_init(device), DC_E_UNSUPPORTED);
  assert_non_null(strstr(dc_last_error(), "cuBLASLt is too old (version); that of CUDA 12.0 is needed"));
  cudasim_fail("cublasLtCreate", 0, DC__LT_ALLOC_FAILED);
  assert_int_equal(device->ops->matmul_init(device), DC_E_NO_MEMORY);
  assert_int_equal(device->ops->matmul_init(device), DC_OK);
  assert_int_equal(device->ops->matmul_init(device), DC_OK);
  dc_device_destroy(device);
  assert_int_equal(cudasim_live(), 0);
}

/* The newest version does not load, and no older one is next to it. */
static void test_a_library_that_does_not_load_is_named(void **state) {
  (void)state;
  char folder[] = "/tmp/libdc-cublas-XXXXXX", path[64];
  assert_non_null(mkdtemp(folder));
  snprintf(path, sizeof path, "%s/libcublasLt.so.13", folder);
  FILE *file = fopen(path, "w");
  assert_non_null(file);
  assert_int_equal(fclose(file), 0);
  assert_int_equal(dc_device_open("cuda", NULL, &device), DC_OK);
  setenv("LIBDC_CUDA_LIB_DIR", folder, 1);
  assert_int_equal(device->ops->matmul_init(device), DC_E_UNSUPPORTED);
  assert_non_null(strstr(dc_last_error(), "libcublasLt.so.13: "));
  unsetenv("LIBDC_CUDA_LIB_DIR");
  dc_device_destroy(device);
  (void)remove(path);
  (void)remove(folder);
}

/* Nothing stays behind, and the device has failed, or the product was made. */
static void use_all(const char *failing, int before, int error) {
  open_all();
  cudasim_fail(failing, before, error);
  dc__matmul p = product_of(DC_BFLOAT16, DC_BFLOAT16, 16, 16, 16);
  for (int32_t epilogue = 0; epilogue < 4; epilogue++) {
    p.epilogue = epilogue;
    (void)device->ops->stream_matmul(stream, &p);
  }
  p.epilogue = DC__MATMUL_NONE;
  p.batch = 2;
  p.heuristic_batch = 32;
  p.stride_a = p.stride_b = p.stride_d = 256;
  (void)device->ops->stream_matmul(stream, &p);
  dc_status status = dc_stream_synchronize(stream, 0);
  status = status != DC_OK ? status : dc__device_check(device);
  if (status == DC_OK && failing != NULL && strstr(failing, "Destroy") == NULL &&
      !((strstr(failing, "Heuristic") != NULL || strstr(failing, "AlgoCheck") != NULL) &&
        error == DC__LT_NOT_SUPPORTED)) {
    fail_msg("%s, call %d: nobody was told", failing, before);
  }
  if (status != DC_OK && strstr(dc_last_error(), "cuBLASLt's status") == NULL) {
    fail_msg("%s", dc_last_error());
  }
  close_all();
}

static void test_every_call_fails(void **state) {
  (void)state;
  static const char *const functions[] = {
#define X(name, arguments) #name,
      DC__LT_FUNCTIONS(X)
#undef X
  };
  int calls[DC__COUNT(functions)];
  use_all(NULL, 0, 0);
  for (size_t f = 2; f < DC__COUNT(functions); f++) { /* without opening, which is above */
    calls[f] = cudasim_calls(functions[f]);
    assert_true(calls[f] > 0);
  }
  for (size_t f = 2; f < DC__COUNT(functions); f++) {
    for (int before = 0; before < calls[f]; before++) {
      cudasim_reset();
      use_all(functions[f], before, before % 2 == 0 ? DC__LT_NOT_SUPPORTED : DC__LT_ALLOC_FAILED);
    }
  }
}

/* An algorithm that was found for the nominal batch is checked for the real one, once a shape. If the library refuses
 * it, the search is repeated for the real batch. */
static void test_batches_of_other_sizes(void **state) {
  (void)state;
  for (int refused = 0; refused < 2; refused++) {
    cudasim_reset();
    open_all();
    dc__matmul p = product_of(DC_FLOAT32, DC_FLOAT32, 8, 8, 8);
    fill(0, DC_FLOAT32, 128);
    fill(1, DC_FLOAT32, 128);
    p.stride_a = p.stride_b = p.stride_d = 64;
    p.batch = p.heuristic_batch = 2;
    assert_true(device->ops->stream_matmul(stream, &p));
    assert_int_equal(cudasim_calls("cublasLtMatmulAlgoCheck"), 0);
    assert_int_equal(dc_stream_synchronize(stream, 0), DC_OK);
    char expected[512];
    memcpy(expected, cudasim_host_ptr(blocks[2]), sizeof expected);
    memset(cudasim_host_ptr(blocks[2]), 0, sizeof expected);
    const int searches = cudasim_calls("cublasLtMatmulAlgoGetHeuristic");
    if (refused != 0) {
      cudasim_fail("cublasLtMatmulAlgoCheck", 0, DC__LT_NOT_SUPPORTED);
    }
    p.heuristic_batch = 32;
    assert_true(device->ops->stream_matmul(stream, &p));
    assert_true(device->ops->stream_matmul(stream, &p));
    assert_int_equal(cudasim_calls("cublasLtMatmulAlgoCheck"), 1);
    assert_int_equal(cudasim_calls("cublasLtMatmulAlgoGetHeuristic"), searches + 1 + refused);
    assert_int_equal(dc_stream_synchronize(stream, 0), DC_OK);
    assert_memory_equal(cudasim_host_ptr(blocks[2]), expected, sizeof expected);
    close_all();
  }
}

/* A misaligned workspace is an error and no product. */
static void test_workspace_alignment(void **state) {
  (void)state;
  for (int64_t offset = 0; offset <= 512; offset += 64) {
    open_all();
    dc__matmul p = product_of(DC_FLOAT32, DC_FLOAT32, 8, 8, 8);
    p.workspace = blocks[4] + offset;
    (void)device->ops->stream_matmul(stream, &p);
    const dc_status status = dc_stream_synchronize(stream, 0);
    assert_int_equal(status == DC_OK ? dc__device_check(device) : status,
                     offset % DC__MATMUL_ALIGNMENT == 0 ? DC_OK : DC_E_DEVICE);
    close_all();
  }
}

#define TEST(name) cmocka_unit_test_setup(name, set_up)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_types_and_epilogues),
      TEST(test_a_shape_is_looked_for_once),
      TEST(test_behind_a_host_function_and_in_a_graph),
      TEST(test_batches_of_other_sizes),
      TEST(test_workspace_alignment),
      TEST(test_refusals),
      TEST(test_a_library_that_does_not_load_is_named),
      TEST(test_every_call_fails),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
