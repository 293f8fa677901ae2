/* Tensors of the caller that move between device and host. */
#include "program.h"

static void expect_content(program *p, const value *v, const void *data, int64_t which, const char *what) {
  touch *look = new_touch(p, data, TENSOR, v->dtype, false, what);
  for (int64_t i = 0; i < TENSOR; i++) {
    touch_values(look)[i] = content(which, i);
  }
  on_caller(p, look);
}

void offload(program *p, value *v) {
  const int64_t shape = TENSOR;
  dc_tensor out = DC_TENSOR_INIT;
  if (v->device >= 0 && v->reload_waited && pick(p, 4) == 0) { /* offloads the device copy itself */
    dc_tensor a = flat((void *)(uintptr_t)v->device_data, &shape, v->dtype);
    OK(p, dc_offload_tensor(p->ctx, &a, v->graph, v->id, &out));
    v->host = v->device;
    v->host_data = out.data;
    v->stale = v->read_back = true;
    return;
  }
  if (v->content < 0 || v->offload_waited) { /* otherwise the source must not be overwritten yet */
    v->content = ++p->contents;
    touch *t = new_touch(p, v->source, TENSOR, v->dtype, true, "an activation");
    for (int64_t i = 0; i < TENSOR; i++) {
      touch_values(t)[i] = content(v->content, i);
    }
    on_caller(p, t);
  }
  dc_tensor a = flat(v->source, &shape, v->dtype);
  OK(p, dc_offload_tensor(p->ctx, &a, v->graph, v->id, &out));
  v->host = v->content;
  v->stale = v->device >= 0;
  v->host_data = out.data;
  v->offload_waited = p->caller == NULL;
}

static void free_device(program *p, value *v) {
  const int64_t shape = TENSOR;
  int32_t freed;
  dc_tensor t = flat((void *)(uintptr_t)v->device_data, &shape, v->dtype), out = DC_TENSOR_INIT;
  OK(p, dc_wait_reload(p->ctx, NULL, v->graph, v->id, &out));
  t.buffer = out.buffer;
  OK(p, dc_free_tensors(p->ctx, &t, sizeof t, 1, &freed));
  CHECK(p, freed == !p->profiling);
  v->device = freed == 1 ? -1 : v->device;
  v->read_back = v->read_back && freed == 0;
}

void reload(program *p, value *v) {
  dc_tensor out = DC_TENSOR_INIT;
  if (v->host < 0) {
    return;
  }
  switch (pick(p, 4)) {
    case 0:
      OK(p, dc_wait_offload(p->ctx, NULL, v->graph, v->id, &out));
      v->offload_waited = true;
      v->read_back = false;
      expect_content(p, v, v->host_data, v->host, "an offloaded tensor");
      break;
    case 1:
      if (v->device >= 0 && v->reload_waited && pick(p, 2) == 0) { /* possibly while it is being offloaded itself */
        free_device(p, v);
      }
      break;
    case 2:
      OK(p, dc_reload_tensor(p->ctx, NULL, v->graph, v->id, &out));
      if (v->device < 0 || v->stale) {
        v->device = v->host;
        v->stale = v->read_back = false;
        v->reload_waited = false;
      }
      v->device_data = out.data;
      break;
    default:
      if (v->device >= 0) {
        OK(p, dc_wait_reload(p->ctx, NULL, v->graph, v->id, &out));
        v->reload_waited = true;
        expect_content(p, v, v->device_data, v->device, "a reloaded tensor");
      }
  }
}
