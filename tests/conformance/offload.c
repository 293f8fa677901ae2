/* L, M: freeing activations, and moving tensors between the device and the host. */
#include "conformance.h"

enum { NUMEL = 40 };

/* The contents of a tensor of the caller, which a number selects. */
static double content(int64_t which, int64_t i) {
  return weight(which, which, i);
}

static dc_status write_content(rank *r, const array *a, int64_t which) {
  double values[NUMEL];
  for (int64_t i = 0; i < a->count; i++) {
    values[i] = content(which, i);
  }
  return write_to(r, a->data, a->dtype, values, a->count);
}

static bool has_content(rank *r, const dc_tensor *t, int64_t which) {
  double expected[NUMEL];
  for (int64_t i = 0; i < NUMEL; i++) {
    expected[i] = content(which, i);
  }
  return holds(r, t->data, t->dtype, expected, NUMEL);
}

/* ---- L: dc_free_tensors ---- */

static void above_the_threshold(rank *r) {
  int64_t threshold = *(const int64_t *)r->user;
  const int64_t counts[] = {0, 1, threshold - 1, threshold, threshold + 1, 1 << 20, 10485760, 10485761};
  enum { COUNT = sizeof counts / sizeof counts[0] };
  int64_t limit = threshold == 0 ? 10485760 : threshold == -1 ? 0 : threshold;
  array any;
  dc_tensor t[COUNT];
  int32_t freed[COUNT];
  OK(r, new_array(r, &any, 1, DC_FLOAT32)); /* only its element count matters */
  for (int i = 0; i < COUNT; i++) {
    static const int64_t none = 0;
    t[i] = flat(any.data, counts[i] < 0 ? &none : &counts[i], DC_FLOAT32);
  }
  OK(r, dc_free_tensors(r->ctx, t, sizeof t[0], COUNT, freed));
  for (int i = 0; i < COUNT; i++) {
    CHECK(r, freed[i] == (counts[i] > limit));
  }
  OK(r, dc_free_tensors(r->ctx, NULL, 0, 0, NULL));
}

static void check_97_tensors_above_the_threshold_are_freed(void **state) {
  (void)state;
  const int64_t thresholds[] = {4, 1000, -1, 0};
  for (int i = 0; i < 4; i++) {
    on_ranks((setup){.world = 1, .config.free_activation_threshold = thresholds[i]}, above_the_threshold,
             &thresholds[i]);
  }
}

/* A tensor of the library: a reloaded one, whose memory is really freed. */
static void reloaded_and_freed(rank *r, bool profiling) {
  array a;
  dc_tensor host = DC_TENSOR_INIT, device = DC_TENSOR_INIT;
  int32_t freed = -1;
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, NULL, 0));
  OK(r, new_array(r, &a, NUMEL, DC_FLOAT32));
  OK(r, write_content(r, &a, 1));
  dc_tensor t = tensor_of(&a);
  OK(r, dc_offload_tensor(r->ctx, &t, GRAPH, 1, &host));
  OK(r, dc_reload_tensor(r->ctx, NULL, GRAPH, 1, &device));
  OK(r, dc_wait_reload(r->ctx, NULL, GRAPH, 1, &device));
  OK(r, dc_enable_profiling(r->ctx, profiling));
  OK(r, dc_free_tensors(r->ctx, &device, sizeof device, 1, &freed));
  CHECK(r, freed == !profiling && stats_of(r).reload_bytes == (profiling ? NUMEL * 4 : 0));
  if (profiling) {
    CHECK(r, has_content(r, &device, 1));
  }
}

static void freed_for_real(rank *r) {
  reloaded_and_freed(r, false);
}

static void not_while_profiling(rank *r) {
  reloaded_and_freed(r, true);
}

static void check_97_memory_of_the_library_goes_back(void **state) {
  (void)state;
  on_ranks((setup){.world = 1, .config.free_activation_threshold = NUMEL - 1}, freed_for_real, NULL);
}

static void check_99_nothing_is_freed_while_profiling(void **state) {
  (void)state;
  on_ranks((setup){.world = 1, .config.free_activation_threshold = NUMEL - 1}, not_while_profiling, NULL);
}

/* Another stream reads the tensor, and the caller's stream waits for that read. So the next reload must not get its
 * memory before the read is done. */
static void freed_while_read(rank *r) {
  array a, to;
  dc_tensor host = DC_TENSOR_INIT, first = DC_TENSOR_INIT, second = DC_TENSOR_INIT;
  dc_stream *caller, *other;
  dc_event *read;
  int32_t freed;
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, NULL, 0));
  OK(r, new_array(r, &a, NUMEL, DC_FLOAT32));
  OK(r, new_array(r, &to, NUMEL, DC_FLOAT32));
  for (int64_t id = 1; id <= 2; id++) {
    OK(r, write_content(r, &a, id));
    dc_tensor t = tensor_of(&a);
    OK(r, dc_offload_tensor(r->ctx, &t, GRAPH, id, &host));
  }
  OK(r, dc_reload_tensor(r->ctx, NULL, GRAPH, 1, &first));
  OK(r, dc_wait_reload(r->ctx, NULL, GRAPH, 1, &first));
  OK(r, new_stream(r, &caller));
  OK(r, new_stream(r, &other));
  OK(r, dc_event_create(r->device, &read));
  OK(r, dc_context_set_stream(r->ctx, caller));
  close_gate(r, other);
  dc__stream_copy(other, to.data, first.data, NUMEL * sizeof(float));
  OK(r, dc_event_record(read, other));
  OK(r, dc_event_wait(read, caller, 0));
  OK(r, dc_free_tensors(r->ctx, &first, sizeof first, 1, &freed));
  dc_event_destroy(read);
  OK(r, dc_reload_tensor(r->ctx, NULL, GRAPH, 2, &second));
  open_gate(r);
  OK(r, dc_wait_reload(r->ctx, NULL, GRAPH, 2, &second));
  OK(r, dc_stream_synchronize(caller, 0));
  dc_tensor t = tensor_of(&to);
  CHECK(r, has_content(r, &t, 1) && has_content(r, &second, 2));
}

static void check_100_memory_in_use_on_another_stream_is_not_reused(void **state) {
  (void)state;
  on_ranks((setup){.world = 1, .config.free_activation_threshold = -1}, freed_while_read, NULL);
}

/* ---- M: tensors ---- */

static void offload_and_reload(rank *r) {
  static const int32_t types[] = {DC_FLOAT32, DC_BFLOAT16, DC_FLOAT16, DC_FLOAT64, DC_INT8};
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, NULL, 0));
  for (int64_t step = 0; step < 2; step++) {
    for (int64_t id = 0; id < 5; id++) {
      array a;
      dc_tensor host = DC_TENSOR_INIT, device = DC_TENSOR_INIT;
      const int64_t shape[3] = {2, 5, 4};
      OK(r, new_array(r, &a, NUMEL, types[id]));
      OK(r, write_content(r, &a, id + step));
      dc_tensor t = flat(a.data, shape, types[id]);
      t.ndim = 3;
      OK(r, dc_offload_tensor(r->ctx, &t, GRAPH, id, &host));
      OK(r, dc_wait_offload(r->ctx, NULL, GRAPH, id, &host));
      CHECK(r, has_content(r, &host, id + step));
      OK(r, dc_reload_tensor(r->ctx, NULL, GRAPH, id, &device));
      OK(r, dc_wait_reload(r->ctx, NULL, GRAPH, id, &device));
      CHECK(r, has_content(r, &device, id + step) && device.data != host.data && device.data != a.data);
      CHECK(r, device.ndim == 3 && memcmp(device.shape, shape, sizeof shape) == 0 && device.dtype == types[id]);
    }
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  }
}

static void check_101_a_tensor_comes_back_bit_for_bit(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, offload_and_reload, NULL);
}

/* The producer is queued behind a gate; the source is overwritten as soon as the operators allow it. */
static void follows_the_producer(rank *r) {
  array a, made;
  dc_tensor host = DC_TENSOR_INIT;
  dc_stream *stream;
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, NULL, 0));
  OK(r, new_array(r, &a, NUMEL, DC_FLOAT32));
  OK(r, new_array(r, &made, NUMEL, DC_FLOAT32));
  OK(r, write_content(r, &a, 1));
  dc_tensor t = tensor_of(&a);
  OK(r, dc_offload_tensor(r->ctx, &t, GRAPH, 1, &host)); /* the caller is the host: its tensor is free on return */
  OK(r, set_all(r, &a, 0));
  OK(r, dc_wait_offload(r->ctx, NULL, GRAPH, 1, &host));
  CHECK(r, has_content(r, &host, 1));
  OK(r, write_content(r, &made, 2));
  OK(r, new_stream(r, &stream));
  OK(r, dc_context_set_stream(r->ctx, stream));
  close_gate(r, stream);
  dc__stream_copy(stream, a.data, made.data, NUMEL * sizeof(float));
  OK(r, dc_offload_tensor(r->ctx, &t, GRAPH, 1, &host));
  OK(r, dc_wait_offload(r->ctx, NULL, GRAPH, 1, &host));
  dc__stream_zero(stream, a.data, NUMEL * sizeof(float)); /* on a stream the tensor is free after the wait */
  open_gate(r);
  OK(r, dc_stream_synchronize(stream, 0));
  CHECK(r, has_content(r, &host, 2));
}

static void check_102_an_offload_follows_its_producer(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, follows_the_producer, NULL);
}

static void kinds_of_memory(rank *r) {
  array a;
  dc_tensor host = DC_TENSOR_INIT, device = DC_TENSOR_INIT;
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, NULL, 0));
  watch *w = watch_device(r);
  OK(r, new_array(r, &a, NUMEL, DC_FLOAT32));
  OK(r, write_content(r, &a, 1));
  dc_tensor t = tensor_of(&a);
  atomic_store(&w->refuse[DC_MEMORY_HOST], 1);
  FAILS(r, dc_offload_tensor(r->ctx, &t, GRAPH, 1, &host), DC_E_NO_MEMORY, "the test refuses");
  FAILS(r, dc_wait_offload(r->ctx, NULL, GRAPH, 1, &host), DC_E_NOT_FOUND, "never offloaded"); /* nothing happened */
  CHECK(r, stats_of(r).offload_bytes == 0 && atomic_load(&w->made[DC_MEMORY_HOST]) == 0);
  atomic_store(&w->refuse[DC_MEMORY_HOST], 0);
  OK(r, dc_offload_tensor(r->ctx, &t, GRAPH, 1, &host));
  CHECK(r, atomic_load(&w->made[DC_MEMORY_HOST]) == 1); /* pinned memory, which the device copies fast */
  OK(r, dc_reload_tensor(r->ctx, NULL, GRAPH, 1, &device));
  OK(r, dc_wait_reload(r->ctx, NULL, GRAPH, 1, &device));
  CHECK(r, atomic_load(&w->made[DC_MEMORY_HOST]) == 1 && has_content(r, &device, 1));
}

static void check_103_host_memory_comes_from_the_device(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, kinds_of_memory, NULL);
}

static void out_of_order(rank *r) {
  array a;
  dc_tensor out = DC_TENSOR_INIT;
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, NULL, 0));
  FAILS(r, dc_reload_tensor(r->ctx, NULL, GRAPH, 1, &out), DC_E_STATE, "id = 1 was not offloaded in graph 7");
  FAILS(r, dc_wait_offload(r->ctx, NULL, GRAPH, 1, &out), DC_E_NOT_FOUND, "id = 1 was never offloaded in graph 7");
  FAILS(r, dc_wait_reload(r->ctx, NULL, GRAPH, 1, &out), DC_E_NOT_FOUND, "id = 1 was never offloaded in graph 7");
  OK(r, new_array(r, &a, NUMEL, DC_FLOAT32));
  dc_tensor t = tensor_of(&a);
  OK(r, dc_offload_tensor(r->ctx, &t, GRAPH, 1, &out));
  FAILS(r, dc_wait_reload(r->ctx, NULL, GRAPH, 1, &out), DC_E_STATE, "id = 1 is not being reloaded");
}

static void check_104_a_reload_needs_an_offload(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, out_of_order, NULL);
}

static void another_shape(rank *r) {
  array a;
  dc_tensor host = DC_TENSOR_INIT;
  const int64_t less = NUMEL - 1, shape[2] = {NUMEL / 4, 4};
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, NULL, 0));
  OK(r, new_array(r, &a, NUMEL, DC_FLOAT32));
  OK(r, write_content(r, &a, 1));
  dc_tensor t = tensor_of(&a), wrong[3] = {t, t, t};
  OK(r, dc_offload_tensor(r->ctx, &t, GRAPH, 1, &host));
  wrong[0].shape = &less;
  wrong[1].dtype = DC_INT32;
  wrong[2].shape = shape;
  wrong[2].ndim = 2;
  OK(r, set_all(r, &a, 0));
  for (int i = 0; i < 3; i++) {
    FAILS(r, dc_offload_tensor(r->ctx, &wrong[i], GRAPH, 1, &host), DC_E_SHAPE, "differs in shape or type");
  }
  CHECK(r, has_content(r, &host, 1)); /* the failed calls copied nothing */
}

static void check_105_an_id_keeps_its_shape(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, another_shape, NULL);
}

static void five_steps(rank *r) {
  array a;
  dc_tensor host = DC_TENSOR_INIT, device = DC_TENSOR_INIT;
  const void *first = NULL;
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, NULL, 0));
  OK(r, new_array(r, &a, NUMEL, DC_FLOAT32));
  dc_tensor t = tensor_of(&a);
  for (int64_t step = 0; step < 5; step++) {
    for (int64_t id = 0; id < 3; id++) {
      OK(r, write_content(r, &a, step + id));
      OK(r, dc_offload_tensor(r->ctx, &t, GRAPH, id, &host));
    }
    first = step == 0 ? host.data : first;
    for (int64_t id = 2; id >= 0; id--) {
      OK(r, dc_reload_tensor(r->ctx, NULL, GRAPH, id, &device));
      OK(r, dc_wait_reload(r->ctx, NULL, GRAPH, id, &device));
      CHECK(r, has_content(r, &device, step + id));
    }
    CHECK(r, stats_of(r).reload_bytes == 3 * NUMEL * 4 && host.data == first);
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    CHECK(r, stats_of(r).reload_bytes == 0 && stats_of(r).offload_bytes == 3 * NUMEL * 4);
    CHECK(r, step == 0 || stats_of(r).allocations == 0);
    OK(r, dc_context_reset_stats(r->ctx));
  }
}

static void check_106_reloads_end_with_the_backward_and_host_memory_stays(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, five_steps, NULL);
}

/* The backward ends while the caller's stream, which is held back, has yet to read the reloaded tensor. */
static void ended_while_read(rank *r) {
  array a, to;
  dc_tensor host = DC_TENSOR_INIT, device = DC_TENSOR_INIT;
  dc_stream *stream;
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, NULL, 0));
  OK(r, new_array(r, &a, NUMEL, DC_FLOAT32));
  OK(r, new_array(r, &to, NUMEL, DC_FLOAT32));
  OK(r, write_content(r, &a, 1));
  dc_tensor t = tensor_of(&a);
  OK(r, dc_offload_tensor(r->ctx, &t, GRAPH, 1, &host));
  OK(r, new_stream(r, &stream));
  OK(r, dc_context_set_stream(r->ctx, stream));
  OK(r, dc_reload_tensor(r->ctx, NULL, GRAPH, 1, &device));
  OK(r, dc_wait_reload(r->ctx, NULL, GRAPH, 1, &device));
  close_gate(r, stream);
  dc__stream_copy(stream, to.data, device.data, NUMEL * sizeof(float));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, stats_of(r).reload_bytes == 0);
  OK(r, dc_reload_tensor(r->ctx, NULL, GRAPH, 1, &device)); /* asks for memory */
  open_gate(r);
  OK(r, dc_wait_reload(r->ctx, NULL, GRAPH, 1, &device));
  OK(r, dc_stream_synchronize(stream, 0));
  t = tensor_of(&to);
  CHECK(r, has_content(r, &t, 1) && has_content(r, &device, 1));
}

static void check_106_a_reload_is_kept_for_its_last_reader(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, ended_while_read, NULL);
}

/* Offloaded on a stream, and waited for on the host. */
static void read_on_the_host(rank *r) {
  array a;
  dc_tensor host = DC_TENSOR_INIT;
  dc_stream *stream;
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, NULL, 0));
  OK(r, new_array(r, &a, NUMEL, DC_FLOAT32));
  OK(r, new_stream(r, &stream));
  dc_tensor t = tensor_of(&a);
  for (int64_t step = 0; step < 4; step++) {
    OK(r, write_content(r, &a, step));
    OK(r, dc_context_set_stream(r->ctx, stream));
    OK(r, dc_offload_tensor(r->ctx, &t, GRAPH, 1, &host));
    OK(r, dc_context_set_stream(r->ctx, NULL));
    OK(r, dc_wait_offload(r->ctx, NULL, GRAPH, 1, &host));
    const float *values = on_host(host.data, NUMEL * sizeof(float));
    for (int64_t i = 0; i < NUMEL; i++) {
      CHECK(r, (double)values[i] == content(step, i));
    }
  }
}

static void check_107_the_host_may_read_after_its_wait(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, read_on_the_host, NULL);
}

static void profiled_wait(rank *r) {
  array a;
  dc_tensor out = DC_TENSOR_INIT;
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, NULL, 0));
  OK(r, new_array(r, &a, NUMEL, DC_FLOAT32));
  dc_tensor t = tensor_of(&a);
  OK(r, dc_enable_profiling(r->ctx, 1));
  OK(r, dc_wait_reload(r->ctx, &t, GRAPH, 1, &out));
  CHECK(r, out.data == a.data && out.ndim == 1 && out.shape[0] == NUMEL && out.dtype == DC_FLOAT32);
}

static void check_108_a_profiled_wait_returns_its_argument(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, profiled_wait, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_97_tensors_above_the_threshold_are_freed),
      cmocka_unit_test(check_97_memory_of_the_library_goes_back),
      cmocka_unit_test(check_99_nothing_is_freed_while_profiling),
      cmocka_unit_test(check_100_memory_in_use_on_another_stream_is_not_reused),
      cmocka_unit_test(check_101_a_tensor_comes_back_bit_for_bit),
      cmocka_unit_test(check_102_an_offload_follows_its_producer),
      cmocka_unit_test(check_103_host_memory_comes_from_the_device),
      cmocka_unit_test(check_104_a_reload_needs_an_offload),
      cmocka_unit_test(check_105_an_id_keeps_its_shape),
      cmocka_unit_test(check_106_reloads_end_with_the_backward_and_host_memory_stays),
      cmocka_unit_test(check_106_a_reload_is_kept_for_its_last_reader),
      cmocka_unit_test(check_107_the_host_may_read_after_its_wait),
      cmocka_unit_test(check_108_a_profiled_wait_returns_its_argument),
  };
  return cmocka_run_group_tests_name("conformance: offload", tests, NULL, NULL);
}
