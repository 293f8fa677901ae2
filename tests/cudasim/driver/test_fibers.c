/* Threads of a block that meet: barriers, shared memory, shuffles and ballots work as on a card. The simulated driver,
 * or the build's sanitizer, finds faults of a kernel. */
#include "harness.h"

#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "cudasim.h"
#include "device/cuda/driver.h"
#include "probes.h"

#if defined(__has_feature)
#define BUILT_WITH(what) __has_feature(what)
#else
#define BUILT_WITH(what) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || BUILT_WITH(address_sanitizer)
#define WITH_ASAN true
#else
#define WITH_ASAN false
#endif
#if defined(__SANITIZE_THREAD__) || BUILT_WITH(thread_sanitizer)
#define WITH_TSAN true
#else
#define WITH_TSAN false
#endif

#define X(name, arguments) dc__cu_result name arguments;
DC__CU_FUNCTIONS(X)
#undef X

extern const cudasim_image probes;

enum { COUNT = 6 * PROBE_THREADS };

static dc__cu_context context;
static dc__cu_pool pool;
static dc__cu_stream stream;
static dc__cu_ptr memory[2];
static float *in, *out;

static int set_up(void **state) {
  (void)state;
  const dc__cu_pool_props props = {.alloc_type = 1, .location = {.type = 1}};
  cudasim_reset();
  assert_int_equal(cuInit(0), 0);
  assert_int_equal(cuDevicePrimaryCtxRetain(&context, 0), 0);
  assert_int_equal(cuCtxPushCurrent_v2(context), 0);
  assert_int_equal(cuMemPoolCreate(&pool, &props), 0);
  assert_int_equal(cuStreamCreate(&stream, DC__CU_STREAM_NON_BLOCKING), 0);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(cuMemAllocFromPoolAsync(&memory[i], COUNT * sizeof(float), pool, stream), 0);
  }
  in = cudasim_host_ptr((const void *)(uintptr_t)memory[0]);
  out = cudasim_host_ptr((const void *)(uintptr_t)memory[1]);
  for (int i = 0; i < COUNT; i++) {
    in[i] = (float)(i * i % 101);
  }
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  (void)cuMemFreeAsync(memory[0], stream);
  (void)cuMemFreeAsync(memory[1], stream);
  (void)cuStreamDestroy_v2(stream);
  (void)cuMemPoolDestroy(pool);
  (void)cuCtxPopCurrent_v2(&context);
  (void)cuDevicePrimaryCtxRelease_v2(0);
  assert_int_equal(cudasim_live(), 0);
  return 0;
}

/* Launches a probe with 3 x 2 x 1 blocks. */
static int launch(const char *name, unsigned threads, unsigned shared_bytes) {
  dc__cu_function function;
  probe_args args = {(float *)(uintptr_t)memory[1], (float *)(uintptr_t)memory[0], COUNT};
  void *params[] = {&args};
  assert_int_equal(cuModuleGetFunction(&function, (dc__cu_module)(uintptr_t)&probes, name), 0);
  int error = cuLaunchKernel(function, 3, 2, 1, threads, 1, 1, shared_bytes, stream, params, NULL);
  return error != 0 ? error : cuStreamSynchronize(stream);
}

static void test_blocks_sum(void **state) {
  (void)state;
  assert_int_equal(launch("probe_sums", PROBE_THREADS, 0), 0);
  for (int b = 0; b < COUNT; b += PROBE_THREADS) {
    double sum = 0;
    double squares = 0;
    for (int i = b; i < b + PROBE_THREADS; i++) {
      sum += in[i];
    }
    for (int i = b; i < b + PROBE_THREADS; i++) {
      squares += (in[i] - sum / PROBE_THREADS) * (in[i] - sum / PROBE_THREADS);
    }
    for (int i = b; i < b + PROBE_THREADS; i++) {
      assert_true(fabs(out[i] - squares) <= 1e-5 * squares);
    }
  }
}

static void test_memory_of_a_block(void **state) {
  (void)state;
  assert_int_equal(launch("probe_reverse", PROBE_THREADS, PROBE_THREADS * sizeof(float)), 0);
  for (int i = 0; i < COUNT; i++) {
    int other = i / PROBE_THREADS * PROBE_THREADS + PROBE_THREADS - 1 - i % PROBE_THREADS;
    assert_true(out[i] == in[other] + 1);
  }
  assert_int_equal(launch("probe_warp", PROBE_THREADS, 0), 0);
  for (int i = 0; i < COUNT; i++) {
    assert_true(out[i] == in[i ^ 5]);
  }
}

static void test_launches_that_do_not_fit(void **state) {
  (void)state;
  dc__cu_function function;
  assert_int_equal(launch("probe_sums", 0, 0), 1);
  assert_int_equal(launch("probe_sums", 40, 0), 1);                /* not a multiple of a warp */
  assert_int_equal(launch("probe_sums", 2 * PROBE_THREADS, 0), 1); /* more threads than the kernel allows */
  assert_int_equal(launch("probe_reverse", PROBE_THREADS, 50 << 10), 1);
  assert_int_equal(cuModuleGetFunction(&function, (dc__cu_module)(uintptr_t)&probes, "probe_reverse"), 0);
  assert_int_equal(cuFuncSetAttribute(function, DC__CU_FUNCTION_SHARED_BYTES, 100 << 10), 1);
  assert_int_equal(cuFuncSetAttribute(function, DC__CU_FUNCTION_SHARED_BYTES, 60 << 10), 0);
  assert_int_equal(launch("probe_reverse", PROBE_THREADS, 50 << 10), 0);
}

/* Each launch ends with an error, and nothing hangs or leaks. */
static void test_threads_that_miss_a_barrier(void **state) {
  static const struct {
    const char *name;
    int error;
  } faults[] = {{"probe_diverges", 719}, {"probe_half_warp", 719}, {"probe_no_block", 719}, {"probe_stray", 700}};
  for (size_t i = 0; i < DC__COUNT(faults); i++) {
    assert_int_equal(launch(faults[i].name, PROBE_THREADS, 0), faults[i].error);
    assert_int_equal(tear_down(state), 0);
    assert_int_equal(set_up(state), 0);
  }
  assert_int_equal(launch("probe_warp", PROBE_THREADS, 0), 0);
}

/* ---- faults that a sanitizer finds, each in a process of its own ---- */

static char program[4096];

static void find(const char *name, const char *text) {
  char found[65536] = "";
  char command[sizeof program + 200];
  snprintf(command, sizeof command, "TSAN_OPTIONS=exitcode=66 ASAN_OPTIONS=exitcode=66 '%s' %s 2>&1", program, name);
  FILE *run = popen(command, "r");
  assert_non_null(run);
  size_t bytes = fread(found, 1, sizeof found - 1, run);
  char rest[4096];
  while (fread(rest, 1, sizeof rest, run) > 0) {
  }
  int status = pclose(run);
  found[bytes] = '\0';
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 66 || strstr(found, text) == NULL) {
    fail_msg("%s: status %x, %s", name, (unsigned)status, found);
  }
}

static void test_faults_are_found(void **state) {
  (void)state;
  if (WITH_TSAN) {
    find("probe_no_barrier", "data race");
    find("probe_no_warp_barrier", "data race");
  } else if (WITH_ASAN) {
    find("probe_outside", "heap-buffer-overflow");
  } else { /* fibers run in a fixed order: the last warp has not written when the first one sums up */
    assert_int_equal(launch("probe_no_barrier", PROBE_THREADS, 0), 0);
    assert_true(out[0] != out[0]);
  }
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_blocks_sum),
      cmocka_unit_test(test_memory_of_a_block),
      cmocka_unit_test(test_launches_that_do_not_fit),
      cmocka_unit_test(test_threads_that_miss_a_barrier),
      cmocka_unit_test(test_faults_are_found),
  };
  if (argc > 1) {
    (void)set_up(NULL);
    return launch(argv[1], PROBE_THREADS, 0);
  }
  ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
  assert_true(length > 0);
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
