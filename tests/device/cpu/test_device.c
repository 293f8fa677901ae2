/* The CPU device's memory, the caller's own allocator, and the arguments that a device's calls refuse. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include "device/device.h"

static dc_device *open_cpu(void) {
  dc_device *device = NULL;
  assert_int_equal(dc_device_open("cpu", NULL, &device), DC_OK);
  return device;
}

static void test_memory(void **state) {
  (void)state;
  dc_device *device = open_cpu();
  const size_t sizes[] = {0, 1, 255, 4097, (2u << 20) - 1, 2u << 20, (4u << 20) + 1};
  for (size_t i = 0; i < DC__COUNT(sizes); i++) {
    for (int32_t kind = DC_MEMORY_DEVICE; kind <= DC_MEMORY_HOST; kind += DC_MEMORY_HOST - DC_MEMORY_DEVICE) {
      void *ptr = NULL;
      assert_int_equal(device->ops->alloc(device, sizes[i], kind, &ptr), DC_OK);
      assert_non_null(ptr);
      assert_int_equal((uintptr_t)ptr % 256, 0);
      memset(ptr, 7, sizes[i]);
      device->ops->free(device, ptr, sizes[i], kind);
    }
  }
  assert_int_equal(device->allocations, 2 * DC__COUNT(sizes));
  void *none = NULL;
  assert_int_equal(device->ops->alloc(device, SIZE_MAX, DC_MEMORY_DEVICE, &none), DC_E_NO_MEMORY);
  assert_int_equal(device->ops->alloc(device, SIZE_MAX / 8, DC_MEMORY_DEVICE, &none), DC_E_NO_MEMORY);
  assert_null(none);
  dc_device_destroy(device);
}

typedef struct counting {
  int64_t live_bytes;
  int live;
  int calls;
  int destroyed;
  size_t skew; /* added to what alloc returns */
  bool empty;
} counting;

static void *counting_alloc(int64_t bytes, int64_t align, void *user) {
  counting *c = user;
  assert_true(align > 0 && align <= 4096 && (align & (align - 1)) == 0);
  c->calls++;
  if (c->empty) {
    return NULL;
  }
  c->live++;
  c->live_bytes += bytes;
  return (char *)aligned_alloc((size_t)align, (size_t)((bytes + 2 * align - 1) / align * align)) + c->skew;
}

static void counting_free(void *ptr, int64_t bytes, int64_t align, void *user) {
  counting *c = user;
  assert_int_equal(align, 256); /* as alloc was told */
  c->live--;
  c->live_bytes -= bytes;
  free((char *)ptr - c->skew);
}

static void counting_destroy(void *user) {
  counting *c = user;
  assert_int_equal(c->live, 0);
  c->destroyed++;
}

static void test_callers_allocator(void **state) {
  (void)state;
  counting c = {0};
  dc_allocator allocator = {sizeof(allocator), counting_alloc, counting_free, counting_destroy, &c};
  dc_device_options options = DC_DEVICE_OPTIONS_INIT;
  options.allocator = &allocator;
  dc_device *device = NULL;
  assert_int_equal(dc_device_open("cpu", &options, &device), DC_OK);
  memset(&allocator, 0, sizeof(allocator)); /* the device has copied it */
  void *small = NULL;
  void *large = NULL;
  assert_int_equal(device->ops->alloc(device, 10, DC_MEMORY_DEVICE, &small), DC_OK);
  assert_int_equal(device->ops->alloc(device, (3u << 20) + 5, DC_MEMORY_HOST, &large), DC_OK);
  assert_int_equal(c.live, 2);
  device->ops->free(device, small, 10, DC_MEMORY_DEVICE);
  device->ops->free(device, large, (3u << 20) + 5, DC_MEMORY_HOST);
  assert_int_equal(c.live, 0);
  assert_int_equal(c.live_bytes, 0);

  void *none = NULL;
  c.skew = 64;
  assert_int_equal(device->ops->alloc(device, 10, DC_MEMORY_DEVICE, &none), DC_E_CALLBACK);
  assert_non_null(strstr(dc_last_error(), "must be 256-byte aligned"));
  assert_int_equal(c.live, 0);
  c.empty = true;
  assert_int_equal(device->ops->alloc(device, 10, DC_MEMORY_DEVICE, &none), DC_E_NO_MEMORY);
  assert_string_equal(dc_last_error(), "device \"cpu\": the caller's allocator gave no 256 bytes");
  assert_null(none);

  dc_stream *stream;
  assert_int_equal(dc_stream_create(device, &stream), DC_OK);
  dc_device_destroy(device);
  assert_int_equal(c.destroyed, 0); /* the stream keeps the device */
  dc_stream_destroy(stream);
  assert_int_equal(c.destroyed, 1);
}

/* ---- bad arguments ---- */

#define assert_fails(call, status, text)        \
  do {                                          \
    assert_int_equal(call, status);             \
    assert_string_equal(dc_last_error(), text); \
  } while (0)

static void test_open_arguments(void **state) {
  (void)state;
  dc_device *device = (dc_device *)&device;
  assert_fails(dc_device_open("cpu", NULL, NULL), DC_E_INVALID, "dc_device_open: device is NULL");
  assert_fails(dc_device_open("tpu", NULL, &device), DC_E_NO_DEVICE,
               "dc_device_open: name = \"tpu\", must be \"cpu\", \"count\", \"cuda\" or \"cuda:N\"");
  assert_null(device);
  assert_fails(dc_device_open(NULL, NULL, &device), DC_E_INVALID, "dc_device_open: name is NULL");
  dc_device_options options = {0};
  assert_int_equal(dc_device_open("cpu", &options, &device), DC_E_INVALID);
  dc_device_options_init(&options, sizeof(options));
  dc_allocator allocator = DC_ALLOCATOR_INIT;
  allocator.alloc = counting_alloc;
  options.allocator = &allocator;
  assert_fails(dc_device_open("cpu", &options, &device), DC_E_INVALID,
               "dc_device_open: options.allocator.free is NULL, must be a function");
  allocator.alloc = NULL;
  assert_fails(dc_device_open("cpu", &options, &device), DC_E_INVALID,
               "dc_device_open: options.allocator.alloc is NULL, must be a function");
  options.allocator = NULL;
  options.max_pinned_bytes = -1;
  assert_fails(dc_device_open("cpu", &options, &device), DC_E_INVALID,
               "dc_device_open: options.max_pinned_bytes = -1, must be >= 0 (0: half of the machine's)");
  assert_null(device);
  assert_string_equal(dc_device_name(NULL), "");
}

static void enter(void *user) {
  *(bool *)user = true;
}

static void test_arguments(void **state) {
  (void)state;
  dc_device *device = open_cpu();
  dc_stream *a = NULL;
  dc_event *one = NULL;
  assert_int_equal(dc_stream_create(device, &a), DC_OK);
  assert_int_equal(dc_event_create(device, &one), DC_OK);
  dc_stream *stream = a;
  dc_event *event = one;
  int32_t passed = 7;
  assert_string_equal(dc_device_name(device), "cpu");
  assert_fails(dc_stream_create(device, NULL), DC_E_INVALID, "dc_stream_create: stream is NULL");
  assert_fails(dc_stream_create(NULL, &stream), DC_E_INVALID, "dc_stream_create: device is NULL");
  assert_null(stream);
  assert_fails(dc_stream_synchronize(NULL, 0), DC_E_INVALID, "dc_stream_synchronize: stream is NULL");
  assert_fails(dc_stream_synchronize(a, -1), DC_E_INVALID, "dc_stream_synchronize: timeout_ns = -1, must be >= 0");
  assert_fails(dc_stream_call(a, NULL, NULL), DC_E_INVALID, "dc_stream_call: fn is NULL");
  assert_fails(dc_event_create(device, NULL), DC_E_INVALID, "dc_event_create: event is NULL");
  assert_fails(dc_event_create(NULL, &event), DC_E_INVALID, "dc_event_create: device is NULL");
  assert_null(event);
  assert_fails(dc_event_record(NULL, a), DC_E_INVALID, "dc_event_record: event is NULL");
  assert_fails(dc_event_wait(NULL, a, 0), DC_E_INVALID, "dc_event_wait: event is NULL");
  assert_fails(dc_event_wait(one, NULL, -5), DC_E_INVALID, "dc_event_wait: timeout_ns = -5, must be >= 0");
  assert_fails(dc_event_query(NULL, &passed), DC_E_INVALID, "dc_event_query: event is NULL");
  assert_fails(dc_event_query(one, NULL), DC_E_INVALID, "dc_event_query: passed is NULL");
  assert_int_equal(passed, 7);
  dc_stream_destroy(NULL);
  dc_event_destroy(NULL);
  dc_device_destroy(NULL);
  bool entered = false;
  assert_int_equal(dc_stream_call(NULL, enter, &entered), DC_OK); /* runs at once, on this thread */
  assert_true(entered);
  dc_event_destroy(one);
  dc_stream_destroy(a);
  dc_device_destroy(device);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_memory),
      cmocka_unit_test(test_callers_allocator),
      cmocka_unit_test(test_open_arguments),
      cmocka_unit_test(test_arguments),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
