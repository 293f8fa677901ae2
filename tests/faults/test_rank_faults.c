/* A rank makes another call, comes late, or is killed, in groups of 2, 4 and 8 processes. The others get an error at
 * once that names the operator, the parameter and the rank. They can clean up and start again. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "shm_calls.h"

#include "harness.h"
#include "leftovers.h"
#include "runtime/runtime.h"

enum { MOST = 8, GRAPH = 1, CULPRIT = 1 };

static const int32_t worlds[] = {2, 4, 8};

typedef struct outcome {
  int32_t status;
  char text[512];
} outcome;

static outcome *outcomes; /* shared with the children, one for each rank */

/* One operator that needs the other ranks; its error is the outcome. */
typedef dc_status (*step_fn)(dc_context *ctx);

static dc_status gather_one(dc_context *ctx) {
  dc_tensor full = DC_TENSOR_INIT;
  dc_status status = dc_allgather_param(ctx, NULL, GRAPH, 5, DC_DTYPE_NONE, &full);
  return status != DC_OK ? status : dc_wait_allgather(ctx, NULL, GRAPH, 5);
}

static dc_status gather_another(dc_context *ctx) {
  dc_tensor full = DC_TENSOR_INIT;
  dc_status status = dc_allgather_param(ctx, NULL, GRAPH, 6, DC_DTYPE_NONE, &full);
  return status != DC_OK ? status : dc_wait_allgather(ctx, NULL, GRAPH, 6);
}

static dc_status gather_as_bfloat16(dc_context *ctx) {
  dc_tensor full = DC_TENSOR_INIT;
  dc_status status = dc_allgather_param(ctx, NULL, GRAPH, 5, DC_BFLOAT16, &full);
  return status != DC_OK ? status : dc_wait_allgather(ctx, NULL, GRAPH, 5);
}

static dc_status prefetch_both(dc_context *ctx) {
  const int64_t ids[2] = {5, 6};
  dc_status status = dc_prefetch_params_fused(ctx, GRAPH, ids, NULL, 2);
  return status != DC_OK ? status : dc_wait_allgather(ctx, NULL, GRAPH, 5);
}

static dc_status reduce_one(dc_context *ctx) {
  static float grad[100];
  static const int64_t hundred = 100;
  dc_tensor g = flat(grad, &hundred, DC_FLOAT32);
  dc_status status = dc_reduce_grad(ctx, &g, GRAPH, 5);
  return status != DC_OK ? status : dc_end_backward(ctx, GRAPH, 0);
}

/* Comes only after the others have failed, however late they are. */
static dc_status come_late(dc_context *ctx) {
  while (dc__comm_check(ctx->gather_comm) == DC_OK) {
    nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
  return gather_one(ctx);
}

static dc_status kill_itself(dc_context *ctx) {
  (void)ctx;
  kill(getpid(), SIGKILL);
  return DC_OK;
}

/* No wait lasts for long_enough, since the alarm comes before. */
static const int64_t long_enough = INT64_C(3000000000000), one_second = INT64_C(1000000000);

/* Sets this rank's deadline, which is the first, once every other rank but the culprit waits in the same call. So only
 * the culprit is late, even if others are slow. */
static void time_out_first(const rank *r, int64_t timeout_ns) {
  dc_comm *gathers = r->ctx->gather_comm;
  for (int32_t i = 0; i < r->world; i++) {
    if (i != r->rank && i != CULPRIT) {
      await_call(gathers, i, calls_of(gathers, r->rank));
    }
  }
  gathers->timeout_ns = timeout_ns;
}

static dc_status set_up(rank *r, const char *name, int32_t world) {
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  options.timeout_ns = long_enough;
  dc_status status = dc_comm_create_processes(name, r->rank, world, &options, &r->comm);
  status = status != DC_OK ? status : dc_device_open("cpu", NULL, &r->device);
  status = status != DC_OK ? status : dc_context_create(r->device, NULL, &r->ctx);
  status = status != DC_OK ? status : dc_init(r->ctx, r->comm, NULL, 10);
  r->world = world;
  sharded *p = calloc(2, sizeof *p);
  const int64_t ids[2] = {5, 6};
  status = status != DC_OK ? status : register_sharded(r, &p[0], 5, 100, 0);
  status = status != DC_OK ? status : register_sharded(r, &p[1], 6, 100, 0);
  return status != DC_OK ? status : dc_register_graph_z3(r->ctx, GRAPH, ids, 2);
}

static void tear_down(rank *r) {
  dc_context_destroy(r->ctx);
  dc_comm_destroy(r->comm);
  dc_device_destroy(r->device);
}

static void run_child(int32_t index, int32_t world, const char *name, int64_t timeout_ns, step_fn step) {
  alarm(300); /* ends the child if it hangs, which the test notices */
  rank r = {.rank = index, .world = world};
  outcome *o = &outcomes[index];
  o->status = set_up(&r, name, world);
  if (o->status == DC_OK) {
    if (timeout_ns < long_enough && index == (CULPRIT + 1) % world) {
      time_out_first(&r, timeout_ns);
    }
    o->status = step(r.ctx);
    snprintf(o->text, sizeof o->text, "%s", dc_last_error());
    if (o->status != DC_OK && dc_start_forward(r.ctx) != o->status) { /* every later call returns the first failure */
      snprintf(o->text, sizeof o->text, "later calls gave another status: %s", dc_last_error());
    }
  } else {
    snprintf(o->text, sizeof o->text, "set-up: %s", dc_last_error());
  }
  tear_down(&r);
  if (index != CULPRIT) { /* the survivors start again without the culprit */
    char again[80];
    snprintf(again, sizeof again, "%s-again", name);
    rank s = {.rank = index - (index > CULPRIT)};
    if (set_up(&s, again, world - 1) != DC_OK || gather_one(s.ctx) != DC_OK) {
      snprintf(o->text, sizeof o->text, "anew: %s", dc_last_error());
    }
    tear_down(&s);
  }
  _exit(0);
}

static void run_processes(const char *test, int32_t world, int64_t timeout_ns, step_fn all, step_fn culprit) {
  char name[64];
  snprintf(name, sizeof name, "libdc-test-%s-%d-%d", test, world, (int)getpid());
  memset(outcomes, 0, MOST * sizeof *outcomes);
  pid_t children[MOST];
  for (int32_t i = 0; i < world; i++) {
    children[i] = fork();
    assert_true(children[i] >= 0);
    if (children[i] == 0) {
      run_child(i, world, name, timeout_ns, i == CULPRIT ? culprit : all);
    }
  }
  for (int32_t i = 0; i < world; i++) {
    int status;
    assert_int_equal(waitpid(children[i], &status, 0), children[i]);
    if (culprit == kill_itself && i == CULPRIT) {
      assert_true(WIFSIGNALED(status));
    } else {
      assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
  }
}

static void expect(int32_t index, dc_status status, const char *const texts[3]) {
  const outcome *o = &outcomes[index];
  if (o->status != status) {
    fail_msg("rank %d: %s: %s", index, dc_status_name(o->status), o->text);
  }
  for (int i = 0; i < 3; i++) {
    if (strstr(o->text, texts[i]) == NULL) {
      fail_msg("rank %d: \"%s\" lacks \"%s\"", index, o->text, texts[i]);
    }
  }
}

/* One rank's step differs. All other ranks must have this status and text; all: the culprit too. */
static void on_all_worlds(const char *test, int64_t timeout_ns, step_fn step, step_fn culprit, bool all,
                          dc_status status, const char *const texts[3]) {
  for (size_t w = 0; w < sizeof worlds / sizeof worlds[0]; w++) {
    run_processes(test, worlds[w], timeout_ns, step, culprit);
    for (int32_t i = 0; i < worlds[w]; i++) {
      if (all || i != CULPRIT) {
        expect(i, status, texts);
      }
    }
  }
}

#define TEXTS(...) ((const char *const[3]){__VA_ARGS__})

static void test_no_failure(void **state) {
  (void)state;
  on_all_worlds("fine", long_enough, gather_one, gather_one, true, DC_OK, TEXTS("", "", ""));
}

static void test_another_parameter(void **state) {
  (void)state;
  on_all_worlds("param", long_enough, gather_one, gather_another, true, DC_E_MISMATCH,
                TEXTS("rank 1 called allgather_param", "parameter 6", "parameter 5"));
}

static void test_another_operator(void **state) {
  (void)state;
  on_all_worlds("op", long_enough, gather_one, prefetch_both, true, DC_E_MISMATCH,
                TEXTS("rank 1 called prefetch_params_fused", "allgather_param", "parameter 5"));
}

static void test_another_type(void **state) {
  (void)state;
  on_all_worlds("type", long_enough, gather_one, gather_as_bfloat16, true, DC_E_MISMATCH,
                TEXTS("rank 1 called allgather_param of parameter 5", "bfloat16", "float32"));
}

/* Gathers and reductions have different communicators: the ranks wait for each other, which they notice. */
static void test_a_reduction_instead(void **state) {
  (void)state;
  on_all_worlds(
      "reduce", long_enough, gather_one, reduce_one, true, DC_E_MISMATCH,
      TEXTS("in allgather_param of parameter 5", "rank 1 is in reduce_grad of parameter 5", "wait for each other"));
}

static void test_late(void **state) {
  (void)state; /* the late rank gets the reason when it comes */
  on_all_worlds("late", one_second, gather_one, come_late, true, DC_E_TIMEOUT,
                TEXTS("rank 1", "allgather_param", "parameter 5"));
}

static void test_killed(void **state) {
  (void)state;
  on_all_worlds("killed", long_enough, gather_one, kill_itself, false, DC_E_PEER_DEAD,
                TEXTS("rank 1 died", "allgather_param", "parameter 5"));
}

static void test_killed_before_a_reduction(void **state) {
  (void)state;
  on_all_worlds("reduction", long_enough, reduce_one, kill_itself, false, DC_E_PEER_DEAD,
                TEXTS("rank 1 died", "reduce_grad", "parameter 5"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_no_failure),
      cmocka_unit_test(test_another_parameter),
      cmocka_unit_test(test_another_operator),
      cmocka_unit_test(test_another_type),
      cmocka_unit_test(test_a_reduction_instead),
      cmocka_unit_test(test_late),
      cmocka_unit_test(test_killed),
      cmocka_unit_test(test_killed_before_a_reduction),
  };
  void *shared = mmap(NULL, MOST * sizeof *outcomes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) {
    return 1;
  }
  outcomes = shared;
  return cmocka_run_group_tests_name("rank_faults", tests, leftovers_note, leftovers_compare);
}
