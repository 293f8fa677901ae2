/* The counting device: its memory, its clocks, its statistics, and what it refuses. */
#include "harness.h"

static dc_device *open_count(void) {
  dc_device *device;
  assert_int_equal(dc_device_open("count", NULL, &device), DC_OK);
  return device;
}

static int64_t figure(dc_device *device, const char *name) {
  int64_t value = -1;
  assert_int_equal(dc_count_get(device, name, &value), DC_OK);
  return value;
}

static void set(dc_device *device, const char *name, int64_t value) {
  assert_int_equal(dc_count_set(device, name, value), DC_OK);
}

static dc_stream *open_stream(dc_device *device) {
  dc_stream *stream;
  assert_int_equal(dc_stream_create(device, &stream), DC_OK);
  return stream;
}

static void refused(dc_status status, dc_status expected, const char *text) {
  assert_int_equal(status, expected);
  if (strstr(dc_last_error(), text) == NULL) {
    fail_msg("\"%s\" does not have \"%s\"", dc_last_error(), text);
  }
}

static void test_streams_overlap_and_events_order_them(void **state) {
  (void)state;
  dc_device *device = open_count();
  dc_stream *a = open_stream(device), *b = open_stream(device);
  dc_event *event;
  int32_t passed;
  assert_int_equal(dc_event_create(device, &event), DC_OK);
  assert_int_equal(dc_count_work(a, 700), DC_OK);
  assert_int_equal(dc_count_work(b, 300), DC_OK);
  assert_int_equal(dc_event_record(event, a), DC_OK);
  assert_int_equal(dc_event_query(event, &passed), DC_OK);
  assert_int_equal(passed, 0);
  assert_int_equal(dc_event_wait(event, b, 0), DC_OK);
  assert_int_equal(dc_count_work(b, 10), DC_OK);
  assert_int_equal(figure(device, "time_ns"), 0);
  assert_int_equal(dc_stream_synchronize(b, 0), DC_OK);
  assert_int_equal(figure(device, "time_ns"), 710);
  assert_int_equal(dc_event_query(event, &passed), DC_OK);
  assert_int_equal(passed, 1);
  assert_int_equal(dc_count_work(a, 5), DC_OK); /* queued when the host's clock is at 710 */
  assert_int_equal(dc_event_record(event, a), DC_OK);
  assert_int_equal(dc_event_wait(event, NULL, 0), DC_OK);
  assert_int_equal(figure(device, "time_ns"), 715);
  dc_event_destroy(event);
  dc_stream_destroy(a);
  dc_stream_destroy(b);
  dc_device_destroy(device);
}

static void test_memory_has_a_limit_and_no_bytes(void **state) {
  (void)state;
  enum { MIB = 1 << 20 };
  dc_device *device = open_count();
  dc_device_memory memory = DC_DEVICE_MEMORY_INIT;
  dc_tensor fits = DC_TENSOR_INIT, more = DC_TENSOR_INIT;
  const int64_t numel = INT64_C(60) * MIB;
  set(device, "memory_bytes", INT64_C(300) * MIB);
  assert_int_equal(dc_tensor_create(device, &numel, 1, DC_FLOAT32, &fits), DC_OK);
  refused(dc_tensor_create(device, &numel, 1, DC_FLOAT32, &more), DC_E_NO_MEMORY, "do not fit beside 251658240 of");
  assert_int_equal(dc_device_get_memory(device, &memory), DC_OK);
  assert_int_equal(memory.total_bytes, INT64_C(300) * MIB);
  assert_int_equal(memory.reserved_bytes, INT64_C(240) * MIB);
  assert_int_equal(memory.free_bytes, INT64_C(60) * MIB);
  dc_buffer_release(fits.buffer);
  assert_int_equal(dc_device_get_memory(device, &memory), DC_OK);
  assert_int_equal(memory.reserved_bytes, 0);
  assert_int_equal(memory.peak_bytes, INT64_C(240) * MIB);
  dc_device_destroy(device);
}

/* Without a limit, memory ends with the addresses; beyond them are those of host memory, and then the program's. */
static void test_memory_without_a_limit_ends(void **state) {
  (void)state;
  enum { MOST = 8 };
  dc_device *device = open_count();
  dc_tensor tensors[MOST];
  const int64_t numel = INT64_C(1) << 56;
  int made = 0;
  dc_status status = DC_OK;
  while (made < MOST && status == DC_OK) {
    tensors[made] = (dc_tensor)DC_TENSOR_INIT;
    status = dc_tensor_create(device, &numel, 1, DC_FLOAT64, &tensors[made]);
    made += status == DC_OK;
  }
  refused(status, DC_E_NO_MEMORY, "no addresses are left");
  while (made > 0) {
    dc_buffer_release(tensors[--made].buffer);
  }
  dc_device_destroy(device);
}

/* 8 ranks, 4 per node: an all-reduce moves (N - 1) / N of the data twice; 3 of 7 parts come from ranks of the node. */
static void test_collectives_take_the_slower_link(void **state) {
  (void)state;
  enum { RANKS = 8, NUMEL = 8000 };
  dc_device *device = open_count();
  dc_stream *a = open_stream(device), *b = open_stream(device);
  dc_comm *comm, *copy;
  dc_tensor data = DC_TENSOR_INIT;
  const int64_t numel = NUMEL;
  set(device, "ranks_per_node", 4);
  set(device, "node_bytes_per_second", 1000000000);
  set(device, "node_latency_ns", 50);
  set(device, "network_bytes_per_second", 100000000);
  set(device, "network_latency_ns", 1000);
  assert_int_equal(dc_tensor_create(device, &numel, 1, DC_FLOAT32, &data), DC_OK);
  assert_int_equal(dc_comm_create_count(device, 5, RANKS, 1, &comm), DC_OK);
  assert_int_equal(dc_comm_dup(comm, &copy), DC_OK);
  assert_int_equal(dc_comm_all_reduce(comm, &data, DC_SUM, a), DC_OK);
  assert_int_equal(figure(device, "node_received_bytes"), 2 * 3 * 4000);
  assert_int_equal(figure(device, "network_received_bytes"), 2 * 4 * 4000);
  assert_int_equal(figure(device, "collectives"), 2);
  assert_int_equal(figure(device, "link_busy_ns"), 2 * (1000 + 160000));
  assert_int_equal(dc_comm_all_reduce(copy, &data, DC_SUM, b), DC_OK); /* after a's, as the rank has one link */
  assert_int_equal(dc_stream_synchronize(a, 0), DC_OK);
  assert_int_equal(figure(device, "time_ns"), 322000);
  assert_int_equal(dc_stream_synchronize(b, 0), DC_OK);
  assert_int_equal(figure(device, "time_ns"), 644000);
  assert_int_equal(dc_comm_broadcast(comm, &data, 5, a), DC_OK); /* the root receives nothing */
  assert_int_equal(figure(device, "network_received_bytes"), 4 * 4 * 4000);
  dc_comm_abort(comm, "enough");
  refused(dc_comm_check(comm), DC_E_ABORTED, "rank 5 aborted the group: enough");
  dc_buffer_release(data.buffer);
  dc_comm_destroy(copy);
  dc_comm_destroy(comm);
  dc_stream_destroy(a);
  dc_stream_destroy(b);
  dc_device_destroy(device);
}

/* A device's work cannot wait for another device's streams: the wait would never end, or end at once. */
static void test_streams_of_other_devices_are_refused(void **state) {
  (void)state;
  dc_device *device = open_count(), *other = open_count(), *cpu, *again;
  dc_stream *stream = open_stream(device), *counts = open_stream(other), *computes;
  dc_event *event, *cpu_event;
  dc_context *context, *cpu_context;
  dc_comm *comm;
  float x = 0;
  const int64_t one = 1;
  dc_tensor tensor = {.struct_size = sizeof tensor, .data = &x, .shape = &one, .ndim = 1, .dtype = DC_FLOAT32};
  assert_int_equal(dc_device_open("cpu", NULL, &cpu), DC_OK);
  assert_int_equal(dc_device_open("cpu", NULL, &again), DC_OK);
  assert_int_equal(dc_stream_create(again, &computes), DC_OK);
  assert_int_equal(dc_event_create(device, &event), DC_OK);
  assert_int_equal(dc_event_create(cpu, &cpu_event), DC_OK);
  assert_int_equal(dc_context_create(device, NULL, &context), DC_OK);
  assert_int_equal(dc_context_create(cpu, NULL, &cpu_context), DC_OK);
  assert_int_equal(dc_init(context, NULL, NULL, 1024), DC_OK);
  assert_int_equal(dc_init(cpu_context, NULL, NULL, 1024), DC_OK);
  assert_int_equal(dc_comm_create_count(device, 0, 2, 1, &comm), DC_OK);
  refused(dc_event_record(event, computes), DC_E_INVALID,
          "dc_event_record: stream is of device \"cpu\", must be of the event's, \"count\"");
  refused(dc_event_wait(event, computes, 0), DC_E_INVALID,
          "dc_event_wait: stream is of device \"cpu\", must be of the event's, \"count\"");
  refused(dc_event_record(cpu_event, stream), DC_E_INVALID,
          "dc_event_record: stream is of device \"count\", must be of the event's, \"cpu\"");
  refused(dc_event_wait(cpu_event, stream, 0), DC_E_INVALID,
          "dc_event_wait: stream is of device \"count\", must be of the event's, \"cpu\"");
  refused(dc_event_wait(event, counts, 0), DC_E_INVALID,
          "stream is of another device \"count\", must be of the event's");
  refused(dc_context_set_stream(cpu_context, stream), DC_E_INVALID,
          "dc_context_set_stream: stream is of device \"count\", must be of the context's, \"cpu\"");
  refused(dc_context_set_stream(context, computes), DC_E_INVALID,
          "dc_context_set_stream: stream is of device \"cpu\", must be of the context's, \"count\"");
  refused(dc_context_set_stream(context, counts), DC_E_INVALID, "another device \"count\"");
  refused(dc_comm_all_reduce(comm, &tensor, DC_SUM, computes), DC_E_INVALID,
          "dc_comm_all_reduce: stream is of device \"cpu\", must be of the communicator's, \"count\"");
  refused(dc_comm_broadcast(comm, &tensor, 0, counts), DC_E_INVALID, "another device \"count\"");
  /* Several handles of a device count as one device. */
  assert_int_equal(dc_event_record(cpu_event, computes), DC_OK);
  assert_int_equal(dc_event_wait(cpu_event, computes, 0), DC_OK);
  assert_int_equal(dc_context_set_stream(cpu_context, computes), DC_OK);
  assert_int_equal(dc_context_set_stream(context, stream), DC_OK);
  dc_comm_destroy(comm);
  dc_context_destroy(cpu_context);
  dc_context_destroy(context);
  dc_event_destroy(cpu_event);
  dc_event_destroy(event);
  dc_stream_destroy(computes);
  dc_stream_destroy(counts);
  dc_stream_destroy(stream);
  dc_device_destroy(again);
  dc_device_destroy(cpu);
  dc_device_destroy(other);
  dc_device_destroy(device);
}

static void test_bad_arguments_are_named(void **state) {
  (void)state;
  dc_device *device = open_count(), *cpu;
  dc_comm *comm = NULL;
  dc_stream *stream = open_stream(device), *computes;
  int64_t value;
  assert_int_equal(dc_device_open("cpu", NULL, &cpu), DC_OK);
  assert_int_equal(dc_stream_create(cpu, &computes), DC_OK);
  refused(dc_count_set(device, "speed", 1), DC_E_INVALID, "name = speed, must be one that dc_api.h lists");
  refused(dc_count_set(device, NULL, 1), DC_E_INVALID, "name = NULL");
  refused(dc_count_set(device, "time_ns", 1), DC_E_INVALID, "name = time_ns is counted");
  refused(dc_count_set(device, "launch_ns", -1), DC_E_INVALID, "value = -1, must be >= 0");
  refused(dc_count_set(cpu, "launch_ns", 1), DC_E_UNSUPPORTED, "device \"cpu\" computes");
  refused(dc_count_get(device, "launch_ns", NULL), DC_E_INVALID, "value is NULL");
  refused(dc_count_get(NULL, "launch_ns", &value), DC_E_INVALID, "device is NULL");
  refused(dc_count_work(stream, -5), DC_E_INVALID, "duration_ns = -5");
  refused(dc_count_work(computes, 5), DC_E_UNSUPPORTED, "device \"cpu\" computes");
  refused(dc_comm_create_count(device, 0, 2, 1, NULL), DC_E_INVALID, "comm is NULL");
  refused(dc_comm_create_count(cpu, 0, 2, 1, &comm), DC_E_UNSUPPORTED, "device \"cpu\" computes");
  refused(dc_comm_create_count(device, 0, 1025, 1, &comm), DC_E_INVALID, "world_size = 1025, must be 1 to 1024");
  refused(dc_comm_create_count(device, 2, 2, 1, &comm), DC_E_INVALID, "rank = 2, must be 0 to 1");
  refused(dc_comm_create_count(device, 0, 2, 2, &comm), DC_E_INVALID, "heap = 2, must be 0 or 1");
  dc_stream_destroy(computes);
  dc_stream_destroy(stream);
  dc_device_destroy(cpu);
  dc_device_destroy(device);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_streams_overlap_and_events_order_them),
                                     cmocka_unit_test(test_memory_has_a_limit_and_no_bytes),
                                     cmocka_unit_test(test_memory_without_a_limit_ends),
                                     cmocka_unit_test(test_collectives_take_the_slower_link),
                                     cmocka_unit_test(test_streams_of_other_devices_are_refused),
                                     cmocka_unit_test(test_bad_arguments_are_named)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
