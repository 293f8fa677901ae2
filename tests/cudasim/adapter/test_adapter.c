/* The PyTorch adapter's CUDA key. The adapter's own sources run on a stand-in for PyTorch (torchsim.h) and on a driver
 * without a card (cudasim.h). Every operator is called as the dispatcher does. */
#include "adapter_run.h"

#include <time.h>

#include "adapter.h"
#include "cudasim.h"
#include "device/device.h"

/* Stops a stream until the gate is open. */
static void wait_at_gate(void *user) {
  while (atomic_load((atomic_int *)user) == 0) {
    nanosleep(&(struct timespec){0, 100000}, NULL);
  }
}

static void stop(void *native, atomic_int *gate) {
  cudasim_stream_call(native, wait_at_gate, gate);
}

/* ---- what the operators do ---- */

static void test_values_are_the_cpus(void **state) {
  (void)state;
  float on_cpu[FLOATS], on_cuda[FLOATS];
  run r = opened("CPU");
  operators(&r, on_cpu);
  expect_no_error(&r);
  close_run(&r);
  r = opened("CUDA");
  for (int round = 0; round < 3; round++) {
    operators(&r, on_cuda);
    expect_no_error(&r);
    assert_memory_equal(on_cpu, on_cuda, sizeof on_cpu);
  }
  close_run(&r);
  assert_true(on_cpu[0] == 1 && on_cpu[2 * NUMEL] == 7 && on_cpu[4 * NUMEL] == 50 && on_cpu[4 * NUMEL + LARGE] == 50);
}

static void test_alloc_and_fakes(void **state) {
  (void)state;
  run r = opened("CUDA");
  for (int32_t kind = DC_MEMORY_DEVICE; kind <= DC_MEMORY_HOST; kind++) {
    const dct_value shape[2] = {3, 5};
    float values[NUMEL];
    int32_t index = 0;
    dct_value stack[3] = {torchsim_list(shape, 2, false), SIM_FLOAT32, (dct_value)kind};
    dct_tensor t = dct_as_tensor(call(&r, "dc_rt", "alloc", "CompositeExplicitAutograd", stack, 3, 1));
    expect_no_error(&r);
    assert_int_equal(torchsim_device(t, &index), kind == DC_MEMORY_HOST ? SIM_CPU : SIM_CUDA);
    keep(&r, t, values);
    assert_true(values[0] == 0 && values[NUMEL - 1] == 0);
  }
  dct_value stack[4] = {dct_as_value(torchsim_tensor(SIM_META, 0, SIM_FLOAT32, 1, NONE)), GRAPH, 0, 0};
  dct_tensor fake = dct_as_tensor(call(&r, "dc", "allgather_param", "Meta", stack, 4, 1));
  int32_t index = 0;
  expect_no_error(&r);
  assert_int_equal(torchsim_device(fake, &index), SIM_META);
  torchsim_drop(fake);
  close_run(&r);
}

/* A gradient is read after its stream has written it, whichever stream is current by then. */
static void test_the_current_stream_is_followed(void **state) {
  (void)state;
  static float values[2][NUMEL];
  atomic_int gate = 0;
  run r = opened("CUDA");
  for (int i = 0; i < 2; i++) {
    dc_stream *wrapped;
    set_stream(&r, streams[1 + i]);
    dct_tensor grad = tensor_of(&r, 2, SHAPE);
    for (int k = 0; k < NUMEL; k++) {
      values[i][k] = (float)(1 + k + 20 * i);
    }
    if (i == 0) {
      stop(streams[1], &gate);
    }
    assert_int_equal(dc_stream_wrap(memory, streams[1 + i], &wrapped), DC_OK);
    dc__stream_copy(wrapped, torchsim_data(grad), values[i], sizeof values[i]);
    dc_stream_destroy(wrapped);
    dct_tensor nothing = op(&r, "reduce_grad", grad, i);
    expect_no_error(&r);
    torchsim_drop(nothing);
  }
  atomic_store(&gate, 1);
  set_stream(&r, streams[0]);
  end_backward(&r);
  expect_no_error(&r);
  for (int i = 0; i < 2; i++) {
    float found[NUMEL];
    read_values(&r, r.grad[i], found);
    assert_memory_equal(found, values[i], sizeof found);
  }
  close_run(&r);
}

/* More streams than the adapter caches, and calls of the library between operators. */
static void test_many_streams(void **state) {
  (void)state;
  enum { MOST = 40 };
  void *native[MOST];
  run r = opened("CUDA");
  for (int i = 0; i < MOST; i++) {
    native[i] = cudasim_stream();
  }
  for (int i = 0; i < 3 * MOST && r.error == NULL; i++) {
    float values[FLOATS] = {0};
    set_stream(&r, native[i % 2 == 0 ? i % MOST : 0]);
    assert_null(dct_update_stream(r.context));
    gather_steps(&r, values);
    assert_true(r.error != NULL || (values[0] == 1 && values[NUMEL] == 101));
  }
  expect_no_error(&r);
  set_stream(&r, streams[0]);
  close_run(&r);
  for (int i = 0; i < MOST; i++) {
    cudasim_stream_end(native[i]);
  }
}

/* The offload stream reads without PyTorch's knowledge, so the adapter keeps the tensor beyond its last owner. */
static void test_an_offloaded_tensor_is_kept(void **state) {
  (void)state;
  float found[LARGE];
  atomic_int gate = 0;
  run r = opened("CUDA");
  set_stream(&r, streams[1]);
  dct_tensor x = tensor_of(&r, 1, MANY);
  write_values(&r, x, 50);
  int before = torchsim_live();
  set_stream(&r, streams[2]);
  stop(streams[2], &gate);
  torchsim_drop(op(&r, "offload_tensor", x, 3));
  dct_tensor host = op(&r, "wait_offload", token(&r), 3);
  expect_no_error(&r);
  drain_stream(streams[1]);                      /* its memory would be reused in this stream's order */
  assert_int_equal(torchsim_live(), before + 1); /* x, and the host copy */
  atomic_store(&gate, 1);
  drain_stream(streams[2]);
  keep(&r, host, found);
  assert_true(found[0] == 50 && found[LARGE - 1] == 50 + LARGE - 1);
  assert_null(dct_update_stream(r.context));
  assert_int_equal(torchsim_live(), before - 1);
  x = tensor_of(&r, 1, MANY);
  torchsim_drop(op(&r, "offload_tensor", x, 4)); /* no call waits for it before the context is closed */
  close_run(&r);
}

static void test_a_steady_step_makes_nothing(void **state) {
  (void)state;
  float values[FLOATS];
  run r = opened("CUDA");
  int events = 0, blocks = 0;
  enum {
    ROUNDS = 1500,
    LAST = 30
  }; /* three operations a round; for their times, the last 4096 keep two events of the driver each */
  for (int round = 0; round < ROUNDS; round++) {
    set_stream(&r, streams[round % 3]);
    offload_steps(&r, values);
    drain_stream(streams[round % 3]);
    if (round == ROUNDS - LAST) {
      events = cudasim_calls("cuEventCreate");
      blocks = cudasim_calls("cuStreamCreate");
    }
  }
  expect_no_error(&r);
  /* On a busy machine one more event may be in use at once than ever before. A step that created an event each time
   * would create LAST. */
  assert_in_range(cudasim_calls("cuEventCreate") - events, 0, LAST / 2);
  assert_int_equal(cudasim_calls("cuStreamCreate"), blocks);
  close_run(&r);
}

/* Weights are prefetched and taken, and serve as their own gradients, so the values that were read can be checked. */
static void weights_as_gradients(run *r) {
  const dct_value ids[2] = {0, 1}, tokens[2] = {dct_as_value(token(r)), dct_as_value(token(r))};
  dct_value ahead[4] = {GRAPH, torchsim_list(tokens, 2, true), torchsim_list(ids, 2, false), 0};
  (void)call(r, "dc", "prefetch_params_fused", "CompositeExplicitAutograd", ahead, 4, 0);
  assert_int_equal(dc_start_backward(r->context, 1), DC_OK);
  for (int i = 0; i < 2; i++) {
    dct_value one[4] = {dct_as_value(token(r)), GRAPH, (dct_value)i, 0};
    dct_tensor whole = dct_as_tensor(call(r, "dc_rt", "take", "CUDA", one, 4, 1));
    expect_no_error(r);
    dct_tensor nothing = op(r, "reduce_grad", whole, i);
    expect_no_error(r);
    torchsim_drop(nothing);
  }
  end_backward(r);
  expect_no_error(r);
  assert_int_equal(dc_context_params_updated(r->context, (const int64_t[]){0, 1}, 2), DC_OK);
}

static void gradients_are(const run *r, float first) {
  for (int i = 0; i < 2; i++) {
    float found[NUMEL];
    read_values(r, r->grad[i], found);
    assert_true(found[0] == first + (float)(100 * i) && found[NUMEL - 1] == found[0] + NUMEL - 1);
  }
}

/* As in torch.cuda.graph, the captured stream is the current one during the capture, and graphs are launched on
 * another. */
static void test_a_captured_step(void **state) {
  (void)state;
  run r = opened("CUDA");
  for (int round = 0; round < 2; round++) {
    set_stream(&r, streams[round]);
    weights_as_gradients(&r);
    gradients_are(&r, 1);
  }
  for (int graph = 0; graph < 2; graph++) {
    drain_stream(streams[0]);
    cudasim_capture(streams[2]);
    set_stream(&r, streams[2]);
    weights_as_gradients(&r);
    assert_true(cudasim_capture_end(streams[2]));
    for (int launch = 0; launch < 3; launch++) {
      const float first = (float)(7 + 10 * launch);
      for (int i = 0; i < 2; i++) {
        write_values(&r, r.shard[i], first + (float)(100 * i));
      }
      cudasim_launch(streams[2]);
      gradients_are(&r, first);
    }
    set_stream(&r, streams[0]);
    for (int i = 0; i < 2; i++) {
      write_values(&r, r.shard[i], (float)(3 + 100 * i));
    }
    weights_as_gradients(&r); /* and once more without a graph */
    gradients_are(&r, 3);
  }
  close_run(&r);
}

/* ---- threads ---- */

typedef struct job {
  dc_comm *comm;
  int number;
  run *shared;
  float values[FLOATS];
  const char *error;
} job;

static void *rank_thread(void *arg) {
  job *j = arg;
  run r;
  torchsim_set_stream(streams[j->number]);
  if (open_run(&r, "CUDA", j->comm, GRAPH + j->number) != DC_OK) {
    j->error = "set-up";
    return NULL;
  }
  set_stream(&r, streams[j->number]);
  for (int round = 0; round < 3; round++) {
    set_stream(&r, streams[(j->number + round % 2) % 3]);
    operators(&r, j->values);
  }
  j->error = r.error;
  close_run(&r);
  dc_comm_destroy(j->comm);
  return NULL;
}

/* Threads share a context, and each has a current stream of its own. */
static void *stream_thread(void *arg) {
  job *j = arg;
  run r = *j->shared;
  set_stream(&r, streams[j->number]);
  for (int round = 0; round < 30 && r.error == NULL; round++) {
    float found[LARGE];
    dct_tensor x = tensor_of(&r, 1, MANY);
    write_values(&r, x, (float)(1 + j->number + 2 * round));
    dct_tensor host = op(&r, "offload_tensor", x, 10 + j->number);
    host = host == NULL ? NULL : op(&r, "wait_offload", host, 10 + j->number);
    drain_stream(r.native);
    keep(&r, host, found);
    if (r.error == NULL && found[0] != (float)(1 + j->number + 2 * round)) {
      r.error = "wrong values";
    }
  }
  j->error = r.error;
  return NULL;
}

static void in_two_threads(void *(*body)(void *arg), job jobs[2]) {
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) {
    jobs[i].number = i;
    assert_int_equal(pthread_create(&threads[i], NULL, body, &jobs[i]), 0);
  }
  for (int i = 0; i < 2; i++) {
    pthread_join(threads[i], NULL);
  }
  for (int i = 0; i < 2; i++) {
    if (jobs[i].error != NULL) {
      fail_msg("thread %d: %s", i, jobs[i].error);
    }
  }
}

static void test_ranks_as_threads(void **state) {
  (void)state;
  static job jobs[2];
  dc_comm *comms[2];
  memset(jobs, 0, sizeof jobs);
  assert_int_equal(dc_comm_create_threads(2, NULL, comms), DC_OK);
  jobs[0].comm = comms[0];
  jobs[1].comm = comms[1];
  in_two_threads(rank_thread, jobs);
  assert_memory_equal(jobs[0].values, jobs[1].values, 2 * NUMEL * sizeof(float)); /* the gathered weights */
}

static void test_threads_of_one_context(void **state) {
  (void)state;
  job jobs[2];
  memset(jobs, 0, sizeof jobs);
  run r = opened("CUDA");
  jobs[0].shared = jobs[1].shared = &r;
  in_two_threads(stream_thread, jobs);
  close_run(&r);
}

static int begin(void **state) {
  (void)state;
  int status = dct_register();
  registered = torchsim_live();
  return status;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_values_are_the_cpus),
      TEST(test_alloc_and_fakes),
      TEST(test_the_current_stream_is_followed),
      TEST(test_many_streams),
      TEST(test_an_offloaded_tensor_is_kept),
      TEST(test_a_steady_step_makes_nothing),
      TEST(test_a_captured_step),
      TEST(test_ranks_as_threads),
      TEST(test_threads_of_one_context),
  };
  return cmocka_run_group_tests(tests, begin, NULL);
}
