/* Copies and host functions on the simulated driver's streams. */
#include <string.h>

#include "stream.h"

typedef struct move {
  void *dst;
  const void *src; /* NULL: fill with `value` */
  size_t bytes;
  unsigned char value;
} move;

static void run_move(void *args) {
  const move *m = args;
  void *dst = resolve_pointer(m->dst, m->bytes, true);
  const void *src = m->src == NULL ? dst : resolve_pointer(m->src, m->bytes, true);
  if (dst == NULL || src == NULL) {
    lose_device(ILLEGAL_ADDRESS);
  }
  if (lost() != 0) {
    return;
  }
  if (m->src != NULL) {
    memmove(dst, src, m->bytes);
  } else {
    memset(dst, m->value, m->bytes);
  }
}

int cuMemcpyAsync(dc__cu_ptr dst, dc__cu_ptr src, size_t bytes, dc__cu_stream stream) {
  ENTER(true);
  const move m = {(void *)(uintptr_t)dst, (const void *)(uintptr_t)src, bytes, 0};
  if (bytes == 0) { /* the driver ignores it on a stream, and refuses it in a graph */
    return INVALID_VALUE;
  }
  return push(stream, run_move, &m, sizeof m);
}

int cuMemsetD8Async(dc__cu_ptr dst, unsigned char value, size_t bytes, dc__cu_stream stream) {
  ENTER(true);
  const move m = {(void *)(uintptr_t)dst, NULL, bytes, value};
  if (bytes == 0) { /* the driver ignores it on a stream, and refuses it in a graph */
    return INVALID_VALUE;
  }
  return push(stream, run_move, &m, sizeof m);
}

typedef struct host_call {
  void (*fn)(void *user);
  void *user;
} host_call;

/* Once the device is lost, the driver calls no more host functions. */
static void run_host_call(void *args) {
  const host_call *call = args;
  if (lost() == 0) {
    call->fn(call->user);
  }
}

int cuLaunchHostFunc(dc__cu_stream stream, void (*fn)(void *user), void *user) {
  ENTER(true);
  const host_call call = {fn, user};
  return push(stream, run_host_call, &call, sizeof call);
}

void cudasim_stream_call(void *stream, void (*fn)(void *user), void *user) {
  const host_call call = {fn, user};
  (void)push(stream, run_host_call, &call, sizeof call);
}
