/* Handles by the thousand: destroy functions take NULL, any order of destruction is fine, and memory stays flat. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include <cmocka.h>

#include "dc_api.h"

enum { ROUNDS = 10000, WARM = 1000, ORDERS = 120, MOST_GROWTH = 1 << 20 };

typedef struct handles {
  dc_device *device;
  dc_comm *comm;
  dc_context *context;
  dc_stream *stream;
  dc_event *event;
} handles;

static void make(handles *h, int with_context) {
  assert_int_equal(dc_device_open("cpu", NULL, &h->device), DC_OK);
  assert_int_equal(dc_comm_create_threads(1, NULL, &h->comm), DC_OK);
  assert_int_equal(dc_stream_create(h->device, &h->stream), DC_OK);
  assert_int_equal(dc_event_create(h->device, &h->event), DC_OK);
  assert_int_equal(dc_event_record(h->event, h->stream), DC_OK);
  h->context = NULL;
  if (with_context) {
    assert_int_equal(dc_context_create(h->device, NULL, &h->context), DC_OK);
    assert_int_equal(dc_init(h->context, h->comm, NULL, 16), DC_OK);
  }
}

static void destroy(handles *h, int which) {
  switch (which) {
    case 0:
      dc_context_destroy(h->context);
      break;
    case 1:
      dc_comm_destroy(h->comm);
      break;
    case 2:
      dc_stream_destroy(h->stream);
      break;
    case 3:
      dc_event_destroy(h->event);
      break;
    default:
      dc_device_destroy(h->device);
      break;
  }
}

/* Destroys the handles in the given order: one of the 120 permutations of five. */
static void destroy_in_order(handles *h, int order) {
  int left[] = {0, 1, 2, 3, 4};
  for (int count = 5; count > 0; order /= count--) {
    int at = order % count;
    destroy(h, left[at]);
    left[at] = left[count - 1];
  }
}

static long resident_bytes(void) {
  long all = 0, resident = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  assert_non_null(file);
  assert_int_equal(fscanf(file, "%ld %ld", &all, &resident), 2);
  fclose(file);
  return resident * sysconf(_SC_PAGESIZE);
}

static void test_null(void **state) {
  (void)state;
  handles none = {0};
  destroy_in_order(&none, 0);
  dc_buffer_release(NULL);
  assert_null(dc_buffer_retain(NULL));
}

static void test_orders(void **state) {
  (void)state;
  for (int order = 0; order < ORDERS; order++) {
    handles h;
    make(&h, 1);
    destroy_in_order(&h, order);
  }
}

static void test_memory_stays_flat(void **state) {
  (void)state;
  long before = 0;
  for (int round = 0; round < ROUNDS; round++) {
    if (round == WARM) {
      before = resident_bytes();
    }
    handles h;
    make(&h, round % 10 == 0);
    destroy_in_order(&h, round % ORDERS);
  }
  long growth = resident_bytes() - before;
  if (growth > MOST_GROWTH) {
    fail_msg("%d rounds: %ld bytes more", ROUNDS - WARM, growth);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_null),
      cmocka_unit_test(test_orders),
      cmocka_unit_test(test_memory_stays_flat),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
