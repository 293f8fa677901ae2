/* Invalid handles: of another kind, or destroyed. Each call returns an error that names the argument. Calls without a
 * status return the same as for NULL, and calls that destroy do nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "dc_api.h"
#include "support/sanitized.h"
#include "support/steps.h"

typedef struct handles {
  dc_device *device;
  dc_stream *stream;
  dc_event *event;
  dc_buffer *buffer;
  dc_comm *comm;
  dc_context *context;
  dc_layer *layer;
  dc_linalg *linalg;
  dc_optimizer *optimizer;
} handles;

static int set_up(void **state) {
  static handles h;
  dc_layer_config config = DC_LAYER_CONFIG_INIT;
  dc_tensor tensor = DC_TENSOR_INIT;
  config.hidden_size = 64;
  config.heads = 4;
  config.intermediate_size = 128;
  config.dtype = DC_FLOAT32;
  assert_int_equal(dc_device_open("cpu", NULL, &h.device), DC_OK);
  assert_int_equal(dc_stream_create(h.device, &h.stream), DC_OK);
  assert_int_equal(dc_event_create(h.device, &h.event), DC_OK);
  assert_int_equal(dc_tensor_create(h.device, (int64_t[]){4}, 1, DC_FLOAT32, &tensor), DC_OK);
  h.buffer = tensor.buffer;
  assert_int_equal(dc_comm_create_threads(1, NULL, &h.comm), DC_OK);
  assert_int_equal(dc_context_create(h.device, NULL, &h.context), DC_OK);
  assert_int_equal(dc_init(h.context, h.comm, NULL, 64), DC_OK);
  assert_int_equal(dc_layer_create(h.device, &config, &h.layer), DC_OK);
  assert_int_equal(dc_linalg_create(h.device, NULL, &h.linalg), DC_OK);
  assert_int_equal(dc_adamw_create(h.linalg, NULL, &h.optimizer), DC_OK);
  *state = &h;
  return 0;
}

static int tear_down(void **state) {
  handles *h = *state;
  dc_optimizer_destroy(h->optimizer);
  dc_linalg_destroy(h->linalg);
  dc_layer_destroy(h->layer);
  dc_context_destroy(h->context);
  dc_comm_destroy(h->comm);
  dc_buffer_release(h->buffer);
  dc_event_destroy(h->event);
  dc_stream_destroy(h->stream);
  dc_device_destroy(h->device);
  return 0;
}

static void refused(dc_status status, const char *argument, const void *handle, const char *kind) {
  char text[160];
  assert_int_equal(status, DC_E_INVALID);
  snprintf(text, sizeof text, ": %s = %p is no %s: it was destroyed, or it is a handle of another kind", argument,
           handle, kind);
  if (strstr(dc_last_error(), text) == NULL) {
    fail_msg("\"%s\" is not in \"%s\"", text, dc_last_error());
  }
}

/* Every kind of handle, passed where another is expected. */
static void test_other_kinds(void **state) {
  const handles h = *(const handles *)*state;
  void *const all[] = {h.device, h.stream, h.event, h.buffer, h.comm, h.context, h.layer, h.linalg, h.optimizer};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    void *x = all[i];
    void *out = NULL;
    int32_t flag = 0;
    if (x != h.device) {
      refused(dc_stream_create(x, (dc_stream **)&out), "device", x, "device");
      refused(dc_event_create(x, (dc_event **)&out), "device", x, "device");
      refused(dc_context_create(x, NULL, (dc_context **)&out), "device", x, "device");
      refused(dc_linalg_create(x, NULL, (dc_linalg **)&out), "device", x, "device");
      refused(dc_layer_create(x, &(dc_layer_config)DC_LAYER_CONFIG_INIT, (dc_layer **)&out), "device", x, "device");
      refused(dc_device_get_memory(x, &(dc_device_memory)DC_DEVICE_MEMORY_INIT), "device", x, "device");
      assert_string_equal(dc_device_name(x), "");
      dc_device_destroy(x);
    }
    if (x != h.stream) {
      refused(dc_stream_synchronize(x, 0), "stream", x, "stream");
      refused(dc_event_record(h.event, x), "stream", x, "stream");
      refused(dc_event_wait(h.event, x, 0), "stream", x, "stream");
      refused(dc_context_set_stream(h.context, x), "stream", x, "stream");
      refused(dc_optimizer_set_stream(h.optimizer, x), "stream", x, "stream");
      assert_int_equal(dc_comm_group_begin(h.comm), DC_OK);
      refused(dc_comm_group_end(h.comm, x), "stream", x, "stream");
      assert_int_equal(dc_comm_barrier(h.comm), DC_OK); /* the error has closed the group */
      dc_stream_destroy(x);
    }
    if (x != h.event) {
      refused(dc_event_record(x, NULL), "event", x, "event");
      refused(dc_event_wait(x, NULL, 0), "event", x, "event");
      refused(dc_event_query(x, &flag), "event", x, "event");
      dc_event_destroy(x);
    }
    if (x != h.buffer) {
      assert_null(dc_buffer_data(x));
      assert_int_equal(dc_buffer_bytes(x), 0);
      dc_buffer_release(dc_buffer_retain(x));
    }
    if (x != h.comm) {
      refused(dc_comm_barrier(x), "comm", x, "communicator");
      refused(dc_comm_dup(x, (dc_comm **)&out), "comm", x, "communicator");
      refused(dc_comm_check(x), "comm", x, "communicator");
      refused(dc_comm_set_checksums(x, 1), "comm", x, "communicator");
      refused(dc_init(h.context, x, NULL, 64), "comm", x, "communicator");
      refused(dc_shampoo_create(h.linalg, x, NULL, (dc_optimizer **)&out), "comm", x, "communicator");
      assert_int_equal(dc_comm_rank(x), -1);
      assert_int_equal(dc_comm_size(x), -1);
      dc_comm_abort(x, "not this one");
      dc_comm_destroy(x);
    }
    if (x != h.context) {
      refused(dc_start_backward(x, 1), "context", x, "context");
      refused(dc_wait_allgather(x, NULL, 1, 1), "context", x, "context");
      refused(dc_reset(x), "context", x, "context");
      refused(dc_cleanup(x), "context", x, "context");
      refused(dc_init(x, NULL, NULL, 64), "context", x, "context");
      refused(dc_context_trace_dump(x, "folder"), "context", x, "context");
      assert_int_equal(dc_is_profiling(x), 0);
      dc_context_destroy(x);
    }
    if (x != h.layer) {
      refused(dc_layer_forward(x, NULL, NULL, 0, 0, NULL, NULL), "layer", x, "layer");
      refused(dc_layer_inference(x, NULL, NULL, 0, 0, NULL, NULL), "layer", x, "layer");
      dc_layer_destroy(x);
    }
    if (x != h.linalg) {
      refused(dc_linalg_begin_query(x), "linalg", x, "linear algebra handle");
      refused(dc_adamw_create(x, NULL, (dc_optimizer **)&out), "linalg", x, "linear algebra handle");
      assert_string_equal(dc_linalg_solver(x), "");
      dc_linalg_destroy(x);
    }
    if (x != h.optimizer) {
      refused(dc_optimizer_set_lr(x, 0, 0.1), "optimizer", x, "optimizer");
      assert_int_equal(steps_of(x), -1);
      dc_optimizer_destroy(x);
    }
    assert_null(out);
  }
}

/* Destroyed handles. The C library leaves freed memory readable; a sanitizer does not. */
static void test_destroyed(void **state) {
#ifndef SANITIZED
  handles h;
  memcpy(&h, *state, sizeof h);
  volatile uintptr_t optimizer = (uintptr_t)h.optimizer, linalg = (uintptr_t)h.linalg, layer = (uintptr_t)h.layer;
  volatile uintptr_t context = (uintptr_t)h.context, comm = (uintptr_t)h.comm, event = (uintptr_t)h.event;
  volatile uintptr_t stream = (uintptr_t)h.stream;
  (void)tear_down(state);
  refused(dc_optimizer_set_lr((dc_optimizer *)optimizer, 0, 0.1), "optimizer", (void *)optimizer, "optimizer");
  refused(dc_linalg_begin_query((dc_linalg *)linalg), "linalg", (void *)linalg, "linear algebra handle");
  refused(dc_layer_forward((dc_layer *)layer, NULL, NULL, 0, 0, NULL, NULL), "layer", (void *)layer, "layer");
  refused(dc_reset((dc_context *)context), "context", (void *)context, "context");
  refused(dc_comm_barrier((dc_comm *)comm), "comm", (void *)comm, "communicator");
  refused(dc_event_record((dc_event *)event, NULL), "event", (void *)event, "event");
  refused(dc_stream_synchronize((dc_stream *)stream, 0), "stream", (void *)stream, "stream");
  (void)tear_down(state); /* must not destroy anything twice */
#else
  (void)tear_down(state);
#endif
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_other_kinds, set_up, tear_down),
      cmocka_unit_test_setup(test_destroyed, set_up),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
