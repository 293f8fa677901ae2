/* Errors in the PyTorch adapter with CUDA (test_adapter.c has the setup): a PyTorch that lacks a symbol or library,
 * tensors of another device, and each call of PyTorch refused in turn. */
#include "adapter_run.h"

#include <sys/wait.h>
#include <unistd.h>

#include "adapter.h"
#include "cudasim.h"

enum { BAD_VALUE = 1 };

/* ---- registration ---- */

static const char *const all_names[] = {
#define X(result, name, args) #name,
    DCT_SHIM(X)
#undef X
};

static void refused(const char *hidden, const char *text) {
  torchsim_hide(hidden);
  assert_int_not_equal(dct_register(), 0);
  if (strstr(dct_error(), text) == NULL) {
    fail_msg("without %s: %s", hidden, dct_error());
  }
  assert_int_equal(torchsim_live(), 0);
}

/* Registering cannot be undone, so each of these runs in a process of its own. */
static void in_a_child(bool (*right)(const char *name), const char *name) {
  pid_t child = fork();
  if (child == 0) {
    _exit(right(name) ? 0 : 1);
  }
  int status = -1;
  assert_int_equal(waitpid(child, &status, 0), child);
  if (status != 0) {
    fail_msg("%s: status %d", name, status);
  }
}

static bool without_cuda(const char *hidden) {
  torchsim_hide(hidden);
  return dct_register() == 0 && torchsim_has("dc", "reduce_grad", "CPU") &&
         !torchsim_has("dc", "reduce_grad", "CUDA") &&
         strstr(dct_track_stream(NULL, NULL, 0), "this PyTorch has no CUDA") != NULL;
}

/* Whichever call of the function is refused, nothing stays registered. */
static bool with_refusals(const char *function) {
  for (int before = 0;; before++) {
    torchsim_fail(function, before);
    int status = dct_register();
    if (!torchsim_failed()) {
      return status == 0 && before > 0;
    }
    if (status == 0 || torchsim_live() != 0) {
      return false;
    }
  }
}

static void test_registration(void **state) {
  (void)state;
  refused("libtorch_cpu.so", "import torch first");
  for (size_t i = 0; i < sizeof all_names / sizeof all_names[0]; i++) {
    refused(all_names[i], all_names[i]);
  }
  in_a_child(without_cuda, "libtorch_cuda.so");
  in_a_child(without_cuda, "aoti_torch_get_current_cuda_stream");
  torchsim_hide(NULL);
  in_a_child(with_refusals, "aoti_torch_library_init_def");
  in_a_child(with_refusals, "aoti_torch_library_def");
  in_a_child(with_refusals, "aoti_torch_library_init_impl");
  in_a_child(with_refusals, "torch_library_impl");
  assert_int_equal(dct_register(), 0);
  assert_int_equal(dct_register(), 0);
  registered = torchsim_live();
  assert_true(torchsim_has("dc", "reduce_grad", "CUDA") && torchsim_has("dc", "reduce_grad", "CPU"));
  assert_true(torchsim_has("dc", "free_tensors", "CompositeExplicitAutograd"));
  assert_false(torchsim_has("dc", "free_tensors", "CUDA"));
}

/* ---- what they refuse ---- */

static void refuses(run *r, const char *name, dct_tensor a, const char *text) {
  dct_tensor out = op(r, name, a, 0);
  if (out != NULL || r->error == NULL || strstr(r->error, text) == NULL) {
    fail_msg("%s: %s", name, r->error == NULL ? "no error" : r->error);
  }
  r->error = NULL;
}

static void test_tensors_of_another_device(void **state) {
  (void)state;
  static const char *const names[] = {"allgather_param",   "wait_allgather",  "release_param", "reduce_grad",
                                      "offload_tensor",    "reload_tensor",   "wait_offload",  "wait_reload",
                                      "offload_parameter", "reload_parameter"};
  run r = opened("CUDA");
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    refuses(&r, names[i], torchsim_tensor(SIM_CUDA, 1, SIM_FLOAT32, 2, SHAPE),
            "a tensor is on cuda:1, must be on cuda:0 as the context's are");
  }
  refuses(&r, "reduce_grad", torchsim_tensor(SIM_CPU, -1, SIM_FLOAT32, 2, SHAPE),
          "dc::reduce_grad: a tensor is on the CPU, must be on cuda:0 as the context's are");
  refuses(&r, "offload_tensor", torchsim_tensor(SIM_CPU, -1, SIM_FLOAT32, 2, SHAPE),
          "is on the CPU, must be on cuda:0");
  free_one(&r, torchsim_tensor(SIM_CUDA, 1, SIM_FLOAT32, 2, SHAPE));
  assert_non_null(strstr(r.error, "dc::free_tensors: a tensor is on cuda:1"));
  r.error = NULL;
  dct_tensor w = op(&r, "allgather_param", torchsim_tensor(SIM_CPU, -1, SIM_FLOAT32, 1, NONE), 0); /* a token */
  int32_t index = 1;
  expect_no_error(&r);
  assert_int_equal(torchsim_device(w, &index), SIM_CUDA);
  assert_int_equal(index, 0);
  torchsim_drop(w);
  close_run(&r);
  r = opened("CPU");
  refuses(&r, "reduce_grad", torchsim_tensor(SIM_CUDA, 0, SIM_FLOAT32, 1, NONE),
          "a tensor is on cuda:0, must be on the CPU as the context's are");
  close_run(&r);
}

/* Each call of the shim is refused in turn: an operator returns an error, nothing leaks, and the context can be
 * closed. */
static void test_each_call_refused(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof all_names / sizeof all_names[0] + 1; i++) {
    const char *name = i == 0 ? "aoti_torch_get_current_cuda_stream" : all_names[i - 1];
    bool came = true;
    for (int before = 0; came; before++) {
      float values[FLOATS];
      run r = opened("CUDA");
      int live = torchsim_live();
      torchsim_fail(name, before);
      operators(&r, values);
      came = torchsim_failed();
      /* Freeing early is optional, so its refusal is no error. */
      bool offer = strcmp(name, "torch_call_dispatcher") == 0 || strcmp(name, "aoti_torch_new_tensor_handle") == 0;
      if (came == (r.error == NULL) && !(came && offer)) {
        fail_msg("%s, call %d: %s", name, before, r.error == NULL ? "no error" : r.error);
      }
      assert_null(dct_update_stream(r.context));
      drain_stream(streams[0]);
      assert_null(dct_update_stream(r.context));
      assert_true(torchsim_live() <= live + 1); /* a tensor that was offloaded and not waited for */
      close_run(&r);
      assert_int_equal(torchsim_live(), registered);
    }
  }
}

/* After a device's first failure each operator returns that failure's text, and no result. Streams are held back, so
 * that PyTorch's memory freed too early would be found. The context can be closed, and nothing leaks. */
static void test_a_device_that_fails(void **state) {
  (void)state;
  static const char *const functions[] = {"cuLaunchKernel", "cuStreamWaitEvent"};
  cudasim_hold();
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
    bool came = true;
    for (int before = 0; came; before++) {
      float values[FLOATS];
      run r = opened("CUDA");
      int calls = cudasim_calls(functions[i]);
      cudasim_fail(functions[i], before, BAD_VALUE);
      operators(&r, values);
      cudasim_fail(NULL, 0, 0);
      came = cudasim_calls(functions[i]) - calls > before;
      assert_true(came || before > 0);
      if (came && dc_context_check(r.context) != DC_E_DEVICE) {
        fail_msg("%s, call %d: %s", functions[i], before, r.error == NULL ? "no error" : r.error);
      }
      r.error = NULL;
      if (came) {
        refuses(&r, "allgather_param", token(&r), functions[i]);
        refuses(&r, "reduce_grad", tensor_of(&r, 2, SHAPE), functions[i]);
        refuses(&r, "offload_tensor", tensor_of(&r, 1, MANY), functions[i]);
      }
      close_run(&r);
      drain_stream(streams[0]);
      assert_int_equal(torchsim_live(), registered);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_registration),
      TEST(test_tensors_of_another_device),
      TEST(test_each_call_refused),
      TEST(test_a_device_that_fails),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
