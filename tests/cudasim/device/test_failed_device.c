/* When a device has failed, all work queued on memory must still finish before that memory is reused. The simulated
 * driver holds back work that the host does not wait for, so memory freed too early is an illegal address. */
#include "harness.h"

#include "cudasim.h"
#include "device/cuda/driver.h"
#include "device/device.h"
#include "kernels/kernels.h"

enum { COUNT = 700, GRAPH = 5, BAD_VALUE = 1, MOST = 8 };

static int set_up(void **state) {
  (void)state;
  cudasim_reset();
  return 0;
}

static float *device_alloc(dc_device *device, int64_t elements) {
  void *ptr;
  assert_int_equal(device->ops->alloc(device, (size_t)elements * sizeof(float), DC_MEMORY_DEVICE, &ptr), DC_OK);
  return ptr;
}

static void device_release(dc_device *device, float *ptr, int64_t elements) {
  device->ops->free(device, ptr, (size_t)elements * sizeof(float), DC_MEMORY_DEVICE);
}

static void fail_now(dc_device *device, dc_stream *stream, float *x) {
  cudasim_fail("cuMemcpyAsync", 0, BAD_VALUE);
  dc__stream_copy(stream, x, x, sizeof *x);
  assert_int_equal(dc__device_check(device), DC_E_DEVICE);
}

/* ---- events ---- */

static void test_an_event_passes_when_its_work_is_done(void **state) {
  (void)state;
  dc_device *device;
  dc_stream *stream;
  dc_event *event;
  int32_t passed = 1;
  assert_int_equal(dc_device_open("cuda", NULL, &device), DC_OK);
  assert_int_equal(dc_stream_create(device, &stream), DC_OK);
  assert_int_equal(dc_event_create(device, &event), DC_OK);
  float *x = device_alloc(device, COUNT);
  cudasim_hold();
  dc__stream_zero(stream, x, COUNT * sizeof *x);
  assert_int_equal(dc_event_record(event, stream), DC_OK);
  fail_now(device, stream, x);
  assert_int_equal(dc_event_query(event, &passed), DC_E_DEVICE);
  assert_int_equal(passed, 0);
  assert_int_equal(dc_event_wait(event, NULL, 1000000), DC_E_TIMEOUT);
  assert_int_equal(dc_event_wait(event, NULL, 0), DC_E_DEVICE);
  assert_true(((float *)cudasim_host_ptr(x))[COUNT - 1] == 0.0f);
  assert_int_equal(dc_event_query(event, &passed), DC_OK);
  assert_int_equal(passed, 1);
  dc_event_destroy(event);
  device_release(device, x, COUNT);
  dc_stream_destroy(stream);
  dc_device_destroy(device);
  assert_int_equal(cudasim_live(), 0);
}

/* The driver refuses to create an event, to record it, or to wait for it. */
static void test_a_refused_call_drains_the_stream(void **state) {
  static const char *const functions[] = {"cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"};
  (void)state;
  for (size_t i = 0; i < DC__COUNT(functions); i++) {
    dc_device *device;
    dc_stream *a, *b;
    dc_event *event;
    int32_t passed = 1;
    cudasim_reset();
    assert_int_equal(dc_device_open("cuda", NULL, &device), DC_OK);
    assert_int_equal(dc_stream_create(device, &a), DC_OK);
    assert_int_equal(dc_stream_create(device, &b), DC_OK);
    assert_int_equal(dc_event_create(device, &event), DC_OK);
    float *x = device_alloc(device, COUNT);
    float *y = device_alloc(device, COUNT);
    cudasim_hold();
    dc__stream_zero(a, x, COUNT * sizeof *x);
    cudasim_fail(functions[i], 0, BAD_VALUE);
    assert_int_equal(dc_event_record(event, a), DC_OK);
    assert_int_equal(dc_event_query(event, &passed), i < 2 ? DC_E_DEVICE : DC_OK);
    assert_int_equal(passed, 0);
    assert_int_equal(i < 2 ? dc_event_wait(event, NULL, 1000000) : DC_E_DEVICE, DC_E_DEVICE);
    assert_int_equal(dc_event_wait(event, b, 0), DC_OK);
    dc__stream_copy(b, y, x, COUNT * sizeof *x);
    assert_int_equal(dc_stream_synchronize(b, 0), DC_E_DEVICE);
    assert_true(((float *)cudasim_host_ptr(y))[COUNT - 1] == 0.0f);
    dc_event_destroy(event);
    device_release(device, x, COUNT);
    device_release(device, y, COUNT);
    dc_stream_destroy(a);
    dc_stream_destroy(b);
    dc_device_destroy(device);
    assert_int_equal(cudasim_lost(), 0);
    assert_int_equal(cudasim_live(), 0);
  }
}

/* ---- memory ---- */

static void test_memory_of_a_failed_device_goes_back_last(void **state) {
  (void)state;
  dc_device *device;
  dc_stream *stream;
  void *pinned;
  assert_int_equal(dc_device_open("cuda", NULL, &device), DC_OK);
  assert_int_equal(dc_stream_create(device, &stream), DC_OK);
  float *x = device_alloc(device, COUNT);
  assert_int_equal(device->ops->alloc(device, COUNT * sizeof *x, DC_MEMORY_HOST, &pinned), DC_OK);
  cudasim_hold();
  dc__stream_zero(stream, x, COUNT * sizeof *x);
  dc__stream_copy(stream, pinned, x, COUNT * sizeof *x);
  fail_now(device, stream, x);
  device->ops->free(device, pinned, COUNT * sizeof *x, DC_MEMORY_HOST);
  device_release(device, x, COUNT);
  assert_int_equal(dc_stream_synchronize(stream, 0), DC_E_DEVICE);
  assert_int_equal(cudasim_lost(), 0);
  dc_stream_destroy(stream);
  dc_device_destroy(device);
  assert_int_equal(cudasim_live(), 0);
}

static void test_memory_in_unknown_state_is_kept(void **state) {
  (void)state;
  dc_device *device;
  assert_int_equal(dc_device_open("cuda", NULL, &device), DC_OK);
  float *x = device_alloc(device, COUNT);
  fail_now(device, device->internal_stream, x);
  cudasim_fail("cuCtxSynchronize", 0, BAD_VALUE);
  device_release(device, x, COUNT);
  assert_non_null(cudasim_host_ptr(x));
  device_release(device, x, COUNT); /* the memory now belongs to another owner */
  assert_null(cudasim_host_ptr(x));
  dc_device_destroy(device);
  assert_int_equal(cudasim_live(), 0);
}

/* ---- a training run ---- */

/* The caller's memory comes from another device object, which does not fail, so only the end of the context protects
 * it. */
typedef struct run {
  dc_device *callers, *device;
  void *native;
  dc_stream *stream;
  dc_context *ctx;
  float *shard, *grad, *x;
} run;

static const int64_t count = COUNT;

static dc_status open_run(run *r) {
  const int64_t ids[] = {1};
  assert_int_equal(dc_device_open("cuda", NULL, &r->callers), DC_OK);
  assert_int_equal(dc_device_open("cuda", NULL, &r->device), DC_OK);
  r->native = cudasim_stream();
  assert_int_equal(dc_stream_wrap(r->device, r->native, &r->stream), DC_OK);
  r->shard = device_alloc(r->callers, COUNT);
  r->grad = device_alloc(r->callers, COUNT);
  r->x = device_alloc(r->callers, COUNT);
  dc_tensor shard = flat(r->shard, &count, DC_FLOAT32);
  dc_tensor grad = flat(r->grad, &count, DC_FLOAT32);
  dc_status status = dc_context_create(r->device, NULL, &r->ctx);
  status = status != DC_OK ? status : dc_init(r->ctx, NULL, NULL, COUNT);
  status = status != DC_OK ? status : dc_context_set_stream(r->ctx, r->stream);
  status = status != DC_OK ? status : dc_register_z3_param(r->ctx, 1, &count, 1, &shard, &grad, 0, DC_DTYPE_NONE);
  return status != DC_OK ? status : dc_register_graph_z3(r->ctx, GRAPH, ids, 1);
}

/* A step without the optimizer. It ignores the statuses, since a call after a failure returns that failure. */
static void step(run *r) {
  dc_tensor x = flat(r->x, &count, DC_FLOAT32);
  dc_tensor out = DC_TENSOR_INIT;
  (void)dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_FLOAT16, &out);
  (void)dc_wait_allgather(r->ctx, NULL, GRAPH, 1);
  (void)dc_release_param(r->ctx, NULL, GRAPH, 1, 1);
  (void)dc_offload_tensor(r->ctx, &x, GRAPH, 9, &out);
  (void)dc_wait_offload(r->ctx, NULL, GRAPH, 9, &out);
  (void)dc_reload_tensor(r->ctx, NULL, GRAPH, 9, &out);
  (void)dc_wait_reload(r->ctx, NULL, GRAPH, 9, &out);
  (void)dc_start_backward(r->ctx, 1);
  (void)dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &out);
  (void)dc_wait_allgather(r->ctx, NULL, GRAPH, 1);
  (void)dc_reduce_grad(r->ctx, &x, GRAPH, 1);
  (void)dc_release_param(r->ctx, NULL, GRAPH, 1, 1);
  (void)dc_reduce_grad(r->ctx, &x, GRAPH, 1); /* a full bucket */
  (void)dc_end_backward(r->ctx, GRAPH, 0);
  (void)dc_context_params_updated(r->ctx, NULL, 0);
}

static void close_run(run *r) {
  dc_context_destroy(r->ctx);
  device_release(r->callers, r->shard, COUNT);
  device_release(r->callers, r->grad, COUNT);
  device_release(r->callers, r->x, COUNT);
  dc_stream_destroy(r->stream);
  dc_device_destroy(r->device);
  cudasim_stream_end(r->native); /* runs the work that is still held back */
  dc_device_destroy(r->callers);
}

/* Runs a step in which one call of the function fails, after `before` others. Returns how often the step calls the
 * function. */
static int run_once(const char *function, int before) {
  run r = {0};
  int live = cudasim_live();
  cudasim_reset();
  assert_int_equal(open_run(&r), DC_OK);
  cudasim_hold();
  int calls = cudasim_calls(function);
  cudasim_fail(function, before, BAD_VALUE);
  step(&r);
  step(&r);
  calls = cudasim_calls(function) - calls;
  cudasim_fail(NULL, 0, 0);
  close_run(&r);
  if (cudasim_lost() != 0 || cudasim_live() != live) {
    fail_msg("%s, call %d: lost by %d, %d things stay behind", function, before, cudasim_lost(), cudasim_live() - live);
  }
  return calls;
}

static void test_a_context_frees_nothing_under_queued_work(void **state) {
  static const char *const functions[] = {
#define X(name, arguments) #name,
      DC__CU_FUNCTIONS(X)
#undef X
  };
  (void)state;
  for (size_t f = 0; f < DC__COUNT(functions); f++) {
    int calls = run_once(functions[f], INT32_MAX);
    for (int i = 0; i < calls && i < MOST; i++) {
      (void)run_once(functions[f], calls <= MOST ? i : i * calls / MOST);
    }
  }
}

/* ---- other ranks ---- */

/* Rank 1's kernel is refused just before its collective, which would send rank 0 uninitialised memory. */
static void offer_nothing(rank *r) {
  const int64_t all = 2 * COUNT;
  dc_buffer *buffer;
  dc_stream *stream;
  OK(r, dc_context_alloc(r->ctx, 2 * COUNT * sizeof(float), DC_MEMORY_DEVICE, &buffer));
  OK(r, dc_stream_create(r->device, &stream));
  float *x = dc_buffer_data(buffer);
  dc_tensor full = flat(x, &all, DC_FLOAT32);
  dc_tensor part = flat(x + r->rank * COUNT, &count, DC_FLOAT32);
  if (r->rank == 1) {
    r->device->ops->stream_launch(stream, &(dc__launch){.threads = 1 << 20, .blocks = 1, .args = &count, .bytes = 8});
  }
  dc_status status = dc_comm_all_gather(r->comm, &part, &full, NULL, stream);
  CHECK(r, status == DC_OK || status == DC_E_ABORTED); /* on rank 0, rank 1's failure may already be known */
  status = dc_stream_synchronize(stream, 0);
  CHECK(r, status == (r->rank == 1 ? DC_E_DEVICE : DC_OK));
  CHECK(r, dc_comm_check(r->comm) == DC_E_ABORTED);
  CHECK(r, strstr(dc_last_error(), "rank 1") != NULL && strstr(dc_last_error(), "cuLaunchKernel") != NULL);
  dc_stream_destroy(stream);
  dc_buffer_release(buffer);
}

static void test_a_failed_rank_offers_nothing(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, offer_nothing, NULL);
  assert_int_equal(cudasim_live(), 0);
}

#define TEST(name) cmocka_unit_test_setup(name, set_up)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_an_event_passes_when_its_work_is_done),     TEST(test_a_refused_call_drains_the_stream),
      TEST(test_memory_of_a_failed_device_goes_back_last),  TEST(test_memory_in_unknown_state_is_kept),
      TEST(test_a_context_frees_nothing_under_queued_work), TEST(test_a_failed_rank_offers_nothing),
  };
  setenv("LIBDC_TEST_DEVICE", "cuda", 1); /* for run_ranks */
  return cmocka_run_group_tests(tests, NULL, NULL);
}
