/* Errors: a device that cannot be opened, each time with a text that says why; a device that is lost during use; and
 * every call of the driver failing in turn, without a crash, a hang or a leak. */
#include "harness.h"

#include "cudasim.h"
#include "device/cuda/driver.h"
#include "device/device.h"
#include "kernels/cuda/kernel_list.h"
#include "kernels/kernels.h"

enum { COUNT = 500 };

static int set_up(void **state) {
  (void)state;
  cudasim_reset();
  return 0;
}

static void refused(const char *name, dc_status status, const char *text) {
  dc_device *device = (dc_device *)1;
  dc_status found = dc_device_open(name, NULL, &device);
  if (found != status || strstr(dc_last_error(), text) == NULL) {
    fail_msg("%s: status %d, %s", name, (int)found, dc_last_error());
  }
  assert_null(device);
  assert_int_equal(cudasim_live(), 0);
}

static void test_devices_that_cannot_be_opened(void **state) {
  (void)state;
  refused("cuda:1", DC_E_NO_DEVICE, "the machine has 1 device");
  refused("cuda:", DC_E_NO_DEVICE, "must be \"cpu\", \"count\", \"cuda\" or \"cuda:N\"");
  refused("cuda:1x", DC_E_NO_DEVICE, "must be \"cpu\"");
  cudasim_set_version(11040);
  refused("cuda", DC_E_NO_DEVICE, "the NVIDIA driver is too old: it knows CUDA 11.4, 12.0 or later is needed");
  cudasim_reset();
  cudasim_set_devices(1, 7, 1);
  refused("cuda", DC_E_NO_DEVICE, "simulated card has compute capability 7.0, must be 8.0 or more");
  cudasim_set_devices(1, 8, 0);
  refused("cuda:0", DC_E_NO_DEVICE, "simulated card has no stream-ordered memory");
  cudasim_set_devices(0, 8, 1);
  refused("cuda", DC_E_NO_DEVICE, "the machine has 0 devices");
  assert_int_equal(dc_is_cuda_available(), 0);
  cudasim_reset();
  cudasim_fail("cuInit", 0, 100);
  refused("cuda", DC_E_NO_DEVICE, "cuInit: no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE, 100)");
  cudasim_fail("cuModuleLoadData", 0, 999);
  refused("cuda", DC_E_DEVICE, "cuModuleLoadData");
  cudasim_fail("cuDevicePrimaryCtxRetain", 0, 2);
  refused("cuda", DC_E_NO_MEMORY, "cuDevicePrimaryCtxRetain: out of memory");
  cudasim_reset();
  cudasim_fail("cuDevicePrimaryCtxRetain", 0, 46); /* the card is in use, which a new process would not change */
  refused("cuda", DC_E_DEVICE, "busy or unavailable (CUDA_ERROR_DEVICE_UNAVAILABLE, 46); its compute mode may keep it");
}

/* Machine code for the card's capability is loaded if the driver takes it, and PTX otherwise. For a card later than all
 * machine code, PTX is loaded at once. The simulator's machine code needs a driver of CUDA 13. */
static void test_the_code_fits_card_and_driver(void **state) {
  (void)state;
#define FAMILY(family) +1
  enum { FAMILIES = 0 DC__CUDA_FAMILIES(FAMILY) };
#undef FAMILY
  static const struct {
    int major, version, loads;
  } cases[] = {{8, 13000, 1}, {9, 13000, 1}, {10, 13000, 1}, {12, 13000, 1},
               {8, 12000, 2}, {9, 12080, 2}, {10, 12080, 1}};
  for (size_t i = 0; i < DC__COUNT(cases); i++) {
    dc_device *device;
    cudasim_reset();
    cudasim_set_devices(1, cases[i].major, 1);
    cudasim_set_version(cases[i].version);
    assert_int_equal(dc_device_open("cuda", NULL, &device), DC_OK);
    assert_int_equal(cudasim_calls("cuModuleLoadData"), cases[i].loads * FAMILIES);
    dc_device_destroy(device);
    assert_int_equal(cudasim_live(), 0);
  }
}

/* ---- a device that is lost ---- */

static void test_an_illegal_address_is_named(void **state) {
  (void)state;
  dc_device *device;
  dc_stream *stream;
  void *ptr, *more;
  assert_int_equal(dc_device_open("cuda", NULL, &device), DC_OK);
  assert_int_equal(dc_stream_create(device, &stream), DC_OK);
  assert_int_equal(device->ops->alloc(device, 1000, DC_MEMORY_DEVICE, &ptr), DC_OK);
  dc__stream_cast(stream, ptr, DC_FLOAT16, ptr, DC_FLOAT32, 1000); /* reads 4,000 bytes of 1,000 */
  assert_int_equal(dc_stream_synchronize(stream, 0), DC_E_DEVICE);
  assert_non_null(strstr(dc_last_error(), "device \"cuda\" (simulated card)"));
  assert_non_null(strstr(dc_last_error(),
                         "an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS, 700); "
                         "the device is lost to this process, which must be started again"));
  assert_int_equal(dc__device_check(device), DC_E_DEVICE);
  assert_int_equal(device->ops->alloc(device, 8, DC_MEMORY_DEVICE, &more), DC_E_DEVICE); /* every later call fails */
  assert_int_equal(dc_stream_synchronize(stream, 0), DC_E_DEVICE);
  device->ops->free(device, ptr, 1000, DC_MEMORY_DEVICE);
  dc_stream_destroy(stream);
  dc_device_destroy(device);
  assert_int_equal(cudasim_live(), 0);
}

/* A wait ends with these errors at once, not at its deadline: cuda.h says this of them, or the context is gone. */
static void test_errors_that_want_a_new_process(void **state) {
  (void)state;
  static const int errors[] = {4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999};
  for (size_t i = 0; i < DC__COUNT(errors); i++) {
    dc_device *device;
    dc_stream *stream;
    void *ptr;
    cudasim_reset();
    assert_int_equal(dc_device_open("cuda", NULL, &device), DC_OK);
    assert_int_equal(dc_stream_create(device, &stream), DC_OK);
    assert_int_equal(device->ops->alloc(device, COUNT, DC_MEMORY_DEVICE, &ptr), DC_OK);
    dc__stream_zero(stream, ptr, COUNT);
    cudasim_fail("cuEventQuery", 0, errors[i]);
    if (dc_stream_synchronize(stream, INT64_C(1000000000)) != DC_E_DEVICE ||
        strstr(dc_last_error(), "must be started again") == NULL) {
      fail_msg("%d: %s", errors[i], dc_last_error());
    }
    device->ops->free(device, ptr, COUNT, DC_MEMORY_DEVICE);
    dc_stream_destroy(stream);
    dc_device_destroy(device);
    assert_int_equal(cudasim_live(), 0);
  }
}

/* Misaligned tensors are refused, since kernels that use them would lose the device. */
static void refuse_misaligned_tensors(rank *r) {
  dc_buffer *buffer;
  dc_stream *stream;
  const int64_t count = COUNT, shape = COUNT * r->world, ids[] = {3};
  OK(r, dc_context_alloc(r->ctx, (2 * shape + 1) * (int64_t)sizeof(float), DC_MEMORY_DEVICE, &buffer));
  OK(r, dc_stream_create(r->device, &stream));
  char *data = dc_buffer_data(buffer), *more = data + shape * (int64_t)sizeof(float);
  dc_tensor good = flat(data, &count, DC_FLOAT32), grad = flat(more, &count, DC_FLOAT32);
  dc_tensor misaligned = flat(more + 2, &count, DC_FLOAT32), whole = flat(more + 2, &shape, DC_FLOAT32);
  FAILS(r, dc_register_z3_param(r->ctx, 3, &shape, 1, &misaligned, NULL, 0, DC_DTYPE_NONE), DC_E_INVALID,
        "shard.data = ");
  FAILS(r, dc_register_z3_param(r->ctx, 3, &shape, 1, &good, &misaligned, 0, DC_DTYPE_NONE), DC_E_INVALID,
        "grad_buffer.data = ");
  OK(r, dc_register_z3_param(r->ctx, 3, &shape, 1, &good, &grad, 0, DC_DTYPE_NONE));
  OK(r, dc_register_graph_z3(r->ctx, 1, ids, 1));
  FAILS(r, dc_reduce_grad(r->ctx, &whole, 1, 3), DC_E_INVALID, "grad.data = ");
  FAILS(r, dc_comm_all_reduce(r->comm, &misaligned, DC_SUM, stream), DC_E_INVALID, "data.data = ");
  FAILS(r, dc_comm_reduce_scatter(r->comm, &whole, &good, NULL, DC_SUM, stream), DC_E_INVALID, "send.data = ");
  whole.data = more;
  misaligned.data = data + 2;
  FAILS(r, dc_comm_reduce_scatter(r->comm, &whole, &misaligned, NULL, DC_SUM, stream), DC_E_INVALID,
        "must be a multiple of 4 on device \"cuda\"");
  OK(r, dc_context_check(r->ctx));
  dc_stream_destroy(stream);
  dc_buffer_release(buffer);
}

static void test_misaligned_tensors_are_refused(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, refuse_misaligned_tensors, NULL);
  assert_int_equal(cudasim_live(), 0);
}

/* One rank's kernel fails; the next calls of every rank return its error. */
static void lose_it(rank *r) {
  float *data;
  dc_buffer *buffer;
  int64_t count = COUNT;
  OK(r, dc_context_alloc(r->ctx, COUNT * sizeof *data, DC_MEMORY_DEVICE, &buffer));
  data = dc_buffer_data(buffer);
  dc_tensor t = flat(data, &count, DC_FLOAT32);
  int64_t shape = COUNT * r->world;
  const int64_t ids[] = {3};
  dc_tensor full = DC_TENSOR_INIT;
  dc_status status = dc_register_z3_param(r->ctx, 3, &shape, 1, &t, NULL, 0, DC_DTYPE_NONE);
  status = status != DC_OK ? status : dc_register_graph_z3(r->ctx, 1, ids, 1);
  if (r->rank == 1) {
    dc__stream_cast(r->device->internal_stream, data, DC_FLOAT64, data, DC_FLOAT32, (int64_t)1 << 40);
  }
  status = status != DC_OK ? status : dc_allgather_param(r->ctx, NULL, 1, 3, DC_DTYPE_NONE, &full);
  status = status != DC_OK ? status : dc_wait_allgather(r->ctx, NULL, 1, 3);
  dc_buffer_release(buffer);
  CHECK(r, status == DC_E_DEVICE || status == DC_E_ABORTED); /* either rank may see it first */
  status = dc_context_check(r->ctx);
  CHECK(r, status == DC_E_DEVICE || status == DC_E_ABORTED);
  CHECK(r, strstr(dc_last_error(), "ILLEGAL_ADDRESS") != NULL);
}

static void test_ranks_learn_of_a_lost_device(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, lose_it, NULL);
  assert_int_equal(cudasim_live(), 0);
}

/* ---- every call failing in turn ---- */

static void host_work(void *user) {
  (void)user;
}

/* Uses a bit of everything, and ignores the statuses. */
static void use_all(void) {
  dc_device *device;
  dc_stream *a = NULL, *b = NULL;
  dc_event *event = NULL;
  void *ptr[3] = {NULL, NULL, NULL};
  int64_t total, left;
  (void)dc_device_count("cuda");
  if (dc_device_open("cuda", NULL, &device) != DC_OK) {
    return;
  }
  for (int i = 0; i < 3; i++) {
    if (device->ops->alloc(device, COUNT * 8, i == 2 ? DC_MEMORY_HOST : DC_MEMORY_DEVICE, &ptr[i]) != DC_OK) {
      ptr[i] = NULL;
    }
  }
  (void)device->ops->memory_info(device, &total, &left);
  if (dc_stream_create(device, &a) == DC_OK && dc_stream_create(device, &b) == DC_OK &&
      dc_event_create(device, &event) == DC_OK && ptr[0] != NULL && ptr[1] != NULL && ptr[2] != NULL) {
    dc__stream_zero(a, ptr[0], COUNT * 8);
    dc__timestamp *stamp = device->ops->stream_timestamp(a);
    (void)dc_stream_call(a, host_work, NULL);
    dc__stream_cast(a, ptr[1], DC_BFLOAT16, ptr[0], DC_FLOAT32, COUNT);
    (void)dc_event_record(event, a);
    (void)dc_event_wait(event, b, 0);
    dc__stream_copy(b, ptr[2], ptr[1], COUNT);
    int32_t passed;
    (void)dc_event_query(event, &passed);
    (void)dc_event_wait(event, NULL, INT64_C(10000000000));
    (void)dc_stream_synchronize(b, 0);
    (void)dc_stream_synchronize(a, 0);
    if (stamp != NULL) {
      (void)device->ops->timestamp_ns(stamp);
      device->ops->timestamp_release(stamp);
    }
  }
  if (event != NULL) {
    dc_event_destroy(event);
  }
  dc_stream_destroy(a);
  dc_stream_destroy(b); /* waits for work that is still queued because a wait was refused */
  for (int i = 0; i < 3; i++) {
    device->ops->free(device, ptr[i], COUNT * 8, i == 2 ? DC_MEMORY_HOST : DC_MEMORY_DEVICE);
  }
  dc_device_destroy(device);
}

static void test_every_call_fails(void **state) {
  (void)state;
  static const char *const functions[] = {
#define X(name, arguments) #name,
      DC__CU_FUNCTIONS(X)
#undef X
  };
  static const int errors[] = {1, 2, 700};
  use_all();
  int calls[DC__COUNT(functions)];
  for (size_t f = 0; f < DC__COUNT(functions); f++) {
    calls[f] = cudasim_calls(functions[f]);
  }
  for (size_t f = 0; f < DC__COUNT(functions); f++) {
    int most = calls[f] < 6 ? calls[f] : 6;
    for (int before = 0; before < most; before++) {
      cudasim_reset();
      cudasim_fail(functions[f], before, errors[(f + (size_t)before) % DC__COUNT(errors)]);
      use_all();
      if (cudasim_live() != 0 || cudasim_depth() != 0) {
        fail_msg("%s, call %d: %d things stay behind, %d contexts pushed", functions[f], before, cudasim_live(),
                 cudasim_depth());
      }
    }
  }
}

static void test_the_budget_of_pinned_memory_is_an_option(void **state) {
  (void)state;
  dc_device *limited;
  void *ptr, *more;
  const dc_device_options options = {.struct_size = sizeof options, .max_pinned_bytes = 10000};
  assert_int_equal(dc_device_open("cuda", &options, &limited), DC_OK);
  assert_int_equal(limited->ops->alloc(limited, 8000, DC_MEMORY_HOST, &ptr), DC_OK);
  assert_int_equal(limited->ops->alloc(limited, 2048, DC_MEMORY_HOST, &more), DC_E_NO_MEMORY);
  assert_string_equal(dc_last_error(),
                      "device \"cuda\": no pinned memory for 2048 bytes: 8192 of at most 10000 bytes are pinned "
                      "(max_pinned_bytes of dc_device_options; by default half of the machine's memory)");
  limited->ops->free(limited, ptr, 8000, DC_MEMORY_HOST);
  assert_int_equal(limited->ops->alloc(limited, 9000, DC_MEMORY_HOST, &ptr), DC_OK);
  limited->ops->free(limited, ptr, 9000, DC_MEMORY_HOST);
  dc_device_destroy(limited);
}

#define TEST(name) cmocka_unit_test_setup(name, set_up)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_devices_that_cannot_be_opened),
      TEST(test_the_code_fits_card_and_driver),
      TEST(test_an_illegal_address_is_named),
      TEST(test_errors_that_want_a_new_process),
      TEST(test_misaligned_tensors_are_refused),
      TEST(test_ranks_learn_of_a_lost_device),
      TEST(test_every_call_fails),
      TEST(test_the_budget_of_pinned_memory_is_an_option),
  };
  setenv("LIBDC_TEST_DEVICE", "cuda", 1); /* for run_ranks */
  return cmocka_run_group_tests(tests, NULL, NULL);
}
