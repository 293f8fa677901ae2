/* The simulated driver and libraries refuse calls that break the contracts beside their prototypes: in driver.h and
 * cublaslt.h of src/device/cuda, and in library.h of src/comm/nccl. */
#include "harness.h"

#include "comm/nccl/library.h"
#include "cudasim.h"
#include "device/cuda/cublaslt.h"

#define X(name, arguments) dc__cu_result name arguments;
DC__CU_FUNCTIONS(X)
#undef X
#define X(name, arguments) int name arguments;
DC__LT_FUNCTIONS(X)
#undef X
#define X(name, result, arguments) result name arguments;
DC__NCCL_FUNCTIONS(X)
#undef X

enum { INVALID_VALUE = 1, CAPTURE_UNSUPPORTED = 900, ROWS = 4, WORKSPACE = 1024 };

static dc__cu_context context;
static dc__cu_pool pool;

static int set_up(void **state) {
  (void)state;
  const dc__cu_pool_props props = {.alloc_type = 1, .location = {1, 0}};
  cudasim_reset();
  assert_int_equal(cuDevicePrimaryCtxRetain(&context, 0), 0);
  assert_int_equal(cuCtxPushCurrent_v2(context), 0);
  assert_int_equal(cuMemPoolCreate(&pool, &props), 0);
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  assert_int_equal(cuMemPoolDestroy(pool), 0);
  assert_int_equal(cuCtxPopCurrent_v2(&context), 0);
  assert_int_equal(cuDevicePrimaryCtxRelease_v2(0), 0);
  assert_int_equal(cudasim_live(), 0);
  return 0;
}

static void test_flags_and_sizes(void **state) {
  (void)state;
  dc__cu_event event;
  dc__cu_ptr block;
  void *pinned;
  void *stream = cudasim_stream();
  assert_int_equal(cuMemHostAlloc(&pinned, 0, 0), INVALID_VALUE);
  assert_int_equal(cuMemHostAlloc(&pinned, 16, 8), INVALID_VALUE);
  assert_int_equal(cuMemAllocFromPoolAsync(&block, 0, pool, stream), INVALID_VALUE);
  assert_int_equal(cuEventCreate(&event, 4), INVALID_VALUE);
  assert_int_equal(cuEventCreate(&event, DC__CU_EVENT_NO_TIMING), 0);
  assert_int_equal(cuStreamWaitEvent(stream, event, 2), INVALID_VALUE);
  assert_int_equal(cuEventDestroy_v2(event), 0);
  cudasim_stream_end(stream);
}

static void test_no_module_is_loaded_in_a_capture(void **state) {
  (void)state;
  static const cudasim_image image = {0};
  dc__cu_module module;
  int mode = DC__CU_CAPTURE_RELAXED;
  void *stream = cudasim_stream();
  assert_int_equal(cuThreadExchangeStreamCaptureMode(&mode), 0);
  cudasim_capture(stream);
  assert_int_equal(cuModuleLoadData(&module, &image), 0);
  assert_int_equal(cuModuleUnload(module), 0);
  assert_int_equal(cudasim_capture_end(stream), 1);
  assert_int_equal(cuThreadExchangeStreamCaptureMode(&mode), 0);
  cudasim_capture(stream);
  assert_int_equal(cuModuleLoadData(&module, &image), CAPTURE_UNSUPPORTED);
  assert_int_equal(cudasim_capture_end(stream), 0); /* the capture was invalidated */
  cudasim_stream_end(stream);
}

static void test_a_spoiled_capture_takes_no_work(void **state) {
  (void)state;
  dc__cu_event event;
  int status = 0;
  void *stream = cudasim_stream();
  assert_int_equal(cuEventCreate(&event, 0), 0);
  cudasim_capture(stream);
  assert_int_equal(cuStreamIsCapturing(stream, &status), 0);
  assert_int_equal(status, 1);
  assert_int_equal(cuStreamSynchronize(stream), CAPTURE_UNSUPPORTED);
  assert_int_equal(cuStreamIsCapturing(stream, &status), 0);
  assert_int_equal(status, DC__CU_STATUS_INVALIDATED);
  assert_int_equal(cuMemsetD8Async(4096, 0, 1, stream), DC__CU_CAPTURE_INVALIDATED);
  assert_int_equal(cuEventRecord(event, stream), DC__CU_CAPTURE_INVALIDATED);
  assert_int_equal(cuStreamWaitEvent(stream, event, 0), DC__CU_CAPTURE_INVALIDATED);
  assert_int_equal(cudasim_capture_end(stream), 0);
  assert_int_equal(cuEventRecord(event, stream), 0);
  assert_int_equal(cuEventSynchronize(event), 0);
  assert_int_equal(cuEventDestroy_v2(event), 0);
  cudasim_stream_end(stream);
}

/* A product of two matrices, whose fields a test breaks. */
typedef struct product {
  dc__lt_handle handle;
  dc__lt_desc desc;
  dc__lt_layout layout, out;
  const float *beta;
  char *workspace;
} product;

static int multiply(const product *p, void *stream, dc__cu_ptr data) {
  static const float alpha = 1;
  const dc__lt_algo algo = {.data = {16, WORKSPACE}};
  void *a = (void *)(uintptr_t)data;
  return cublasLtMatmul(p->handle, p->desc, &alpha, a, p->layout, a, p->layout, p->beta, a, p->out, a, p->out, &algo,
                        p->workspace, WORKSPACE, stream);
}

static void test_products(void **state) {
  (void)state;
  static const float beta = 0;
  const int bias = DC__LT_EPILOGUE_BIAS, none = DC__LT_EPILOGUE_NONE;
  const int32_t batch = 2;
  const int64_t stride = ROWS;
  product p = {.beta = &beta};
  dc__cu_ptr block, space;
  void *stream = cudasim_stream();
  assert_int_equal(cuMemAllocFromPoolAsync(&block, 4096, pool, stream), 0);
  assert_int_equal(cuMemAllocFromPoolAsync(&space, 2 * WORKSPACE, pool, stream), 0);
  p.workspace = (char *)(uintptr_t)space;
  assert_int_equal(cublasLtCreate(&p.handle), 0);
  assert_int_equal(cublasLtMatmulDescCreate(&p.desc, DC__LT_COMPUTE_32F, DC__LT_R_32F), 0);
  assert_int_equal(cublasLtMatrixLayoutCreate(&p.layout, 99, ROWS, ROWS, ROWS), DC__LT_INVALID_VALUE);
  assert_int_equal(cublasLtMatrixLayoutCreate(&p.layout, DC__LT_R_32F, ROWS, ROWS, ROWS), 0);
  p.out = p.layout;
  assert_int_equal(multiply(&p, stream, block), 0);
  product broken = p;
  broken.beta = NULL;
  assert_int_equal(multiply(&broken, stream, block), DC__LT_INVALID_VALUE);
  broken = p;
  broken.workspace = NULL;
  assert_int_equal(multiply(&broken, stream, block), DC__LT_INVALID_VALUE);
  broken.workspace = p.workspace + 64;
  assert_int_equal(multiply(&broken, stream, block), DC__LT_INVALID_VALUE);
  broken = p;
  assert_int_equal(cublasLtMatrixLayoutCreate(&broken.out, DC__LT_R_32F, ROWS, 2 * ROWS, ROWS), 0);
  assert_int_equal(multiply(&broken, stream, block), DC__LT_INVALID_VALUE); /* not the shape of the product */
  assert_int_equal(cublasLtMatrixLayoutDestroy(broken.out), 0);
  assert_int_equal(cublasLtMatmulDescSetAttribute(p.desc, DC__LT_DESC_EPILOGUE, &bias, sizeof bias), 0);
  assert_int_equal(multiply(&p, stream, block), DC__LT_INVALID_VALUE); /* the epilogue needs a bias */
  assert_int_equal(cublasLtMatmulDescSetAttribute(p.desc, DC__LT_DESC_EPILOGUE, &none, sizeof none), 0);
  assert_int_equal(cublasLtMatrixLayoutSetAttribute(p.layout, DC__LT_LAYOUT_BATCH, &batch, sizeof batch), 0);
  assert_int_equal(cublasLtMatrixLayoutSetAttribute(p.layout, DC__LT_LAYOUT_STRIDE, &stride, sizeof stride), 0);
  assert_int_equal(multiply(&p, stream, block), DC__LT_INVALID_VALUE); /* matrices of the batch overlap in the output */
  assert_int_equal(cublasLtMatrixLayoutDestroy(p.layout), 0);
  assert_int_equal(cublasLtMatmulDescDestroy(p.desc), 0);
  assert_int_equal(cublasLtDestroy(p.handle), 0);
  assert_int_equal(cuStreamSynchronize(stream), 0);
  assert_int_equal(cuMemFreeAsync(block, stream), 0);
  assert_int_equal(cuMemFreeAsync(space, stream), 0);
  cudasim_stream_end(stream);
}

static void test_a_group_begins_before_it_ends(void **state) {
  (void)state;
  assert_int_equal(ncclGroupEnd(), DC__NCCL_INVALID_USAGE);
  assert_int_equal(ncclGroupStart(), 0);
  assert_int_equal(ncclGroupEnd(), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_flags_and_sizes),
      TEST(test_no_module_is_loaded_in_a_capture),
      TEST(test_a_spoiled_capture_takes_no_work),
      TEST(test_products),
      TEST(test_a_group_begins_before_it_ends),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
