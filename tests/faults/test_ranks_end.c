/* A rank that is killed, or that stops without ending, at every phase of a step and in the middle of a collective, in
 * groups of 2, 4 and 8 processes: every other rank gets an error that names it, in time; the context says so from then
 * on; and a new group of those that are left works. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm/local/local.h"
#include "harness.h"
#include "kernels/kernels.h"
#include "runtime/runtime.h"

enum { MOST = 8, GRAPH = 1, ID = 5, VALUE = 9, COUNT = 4000, STEPS = 3, LIMIT_S = 60 };

static const int64_t stopped_ns = INT64_C(10000000000); /* the busiest machine's living ranks come before that */

/* Where the victim ends: before the call that the phase is named after, or in it. */
#define PHASES(X) \
  X(REGISTER)     \
  X(GATHER)       \
  X(WAIT) X(RELEASE) X(REDUCE) X(FLUSH) X(OFFLOAD) X(END_BACKWARD) X(BARRIER) X(IN_HANDSHAKE) X(IN_READING) X(IN_LOCK)
#define NAME(phase) phase,
#define TEXT(phase) #phase,
enum phase { PHASES(NAME) PHASE_COUNT };
static const char *const phase_names[] = {PHASES(TEXT)};

typedef struct outcome {
  dc_status status;
  double seconds; /* from the victim's end to the error */
  char text[600];
} outcome;

typedef struct group {
  char name[64];
  int32_t world, victim;
  int how; /* SIGKILL or SIGSTOP */
  enum phase phase;
  pid_t children[MOST];
  struct shared {
    _Atomic double end; /* when the victim's came */
    outcome ranks[MOST];
  } * shared;
} group;

static const group *here; /* in a child */
static int32_t own_rank;
static atomic_bool armed; /* collectives run on streams */

static double now(void) {
  return (double)dc__now_ns() / 1e9;
}

/* The victim's way through the phases comes past here. */
static void at(enum phase phase) {
  if (armed && here->phase == phase && own_rank == here->victim) {
    armed = false;
    here->shared->end = now();
    raise(here->how);
  }
}

dc_status __real_dc__local_await_posted(dc__local *self, const dc__coll *coll, uint32_t seq);
dc_status __wrap_dc__local_await_posted(dc__local *self, const dc__coll *coll, uint32_t seq);
dc_status __wrap_dc__local_await_posted(dc__local *self, const dc__coll *coll, uint32_t seq) {
  at(IN_HANDSHAKE);
  if (armed && here->phase == IN_LOCK && own_rank == here->victim) {
    self->group->control->lock = own_rank + 1;
    at(IN_LOCK);
  }
  return __real_dc__local_await_posted(self, coll, seq);
}

void __real_dc__reduce(void *dst, int32_t dst_dtype, const void *const *src, int32_t n, int32_t src_dtype,
                       int64_t count, bool mean, bool accumulate);
void __wrap_dc__reduce(void *dst, int32_t dst_dtype, const void *const *src, int32_t n, int32_t src_dtype,
                       int64_t count, bool mean, bool accumulate);
void __wrap_dc__reduce(void *dst, int32_t dst_dtype, const void *const *src, int32_t n, int32_t src_dtype,
                       int64_t count, bool mean, bool accumulate) {
  at(IN_READING);
  __real_dc__reduce(dst, dst_dtype, src, n, src_dtype, count, mean, accumulate);
}

/* ---- a rank ---- */

typedef struct training {
  rank r;
  sharded p;
  float gradient[COUNT];
} training;

static dc_status open_rank(training *t, const char *name, int32_t index, int32_t world) {
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  rank *r = &t->r;
  options.timeout_ns = INT64_C(60000000000);
  r->rank = index;
  r->world = world;
  DC__TRY(dc_comm_create_processes(name, index, world, &options, &r->comm));
  DC__TRY(dc_device_open("cpu", NULL, &r->device));
  DC__TRY(dc_context_create(r->device, NULL, &r->ctx));
  DC__TRY(dc_init(r->ctx, r->comm, NULL, COUNT)); /* a gradient fills a bucket */
  return register_sharded(r, &t->p, ID, COUNT, 0);
}

static dc_status register_graph(training *t) {
  static const int64_t id = ID;
  return dc_register_graph_z3(t->r.ctx, GRAPH, &id, 1);
}

static dc_status forward(training *t) {
  static const int64_t count = COUNT;
  dc_context *ctx = t->r.ctx;
  dc_tensor full = DC_TENSOR_INIT, value = flat(t->gradient, &count, DC_FLOAT32), host = DC_TENSOR_INIT;
  at(GATHER);
  DC__TRY(dc_allgather_param(ctx, NULL, GRAPH, ID, DC_DTYPE_NONE, &full));
  at(WAIT);
  DC__TRY(dc_wait_allgather(ctx, NULL, GRAPH, ID));
  at(RELEASE);
  DC__TRY(dc_release_param(ctx, NULL, GRAPH, ID, 1));
  DC__TRY(dc_offload_tensor(ctx, &value, GRAPH, VALUE, &host));
  at(OFFLOAD);
  return dc_wait_offload(ctx, NULL, GRAPH, VALUE, &host);
}

static dc_status backward(training *t) {
  static const int64_t count = COUNT;
  dc_context *ctx = t->r.ctx;
  dc_tensor gradient = flat(t->gradient, &count, DC_FLOAT32);
  DC__TRY(dc_start_backward(ctx, 1));
  DC__TRY(dc_reduce_grad(ctx, &gradient, GRAPH, ID));
  at(REDUCE);
  DC__TRY(dc_reduce_grad(ctx, &gradient, GRAPH, ID));
  at(FLUSH);
  DC__TRY(dc_reduce_grad(ctx, &gradient, GRAPH, ID));
  at(END_BACKWARD);
  return dc_end_backward(ctx, GRAPH, 0);
}

/* From now on the victim may end. A rank that stops is found by the deadline alone, which is not to cut short how the
 * group is made. */
static void arm(training *t) {
  armed = true;
  if (here->how == SIGSTOP) {
    t->r.comm->timeout_ns = t->r.ctx->gather_comm->timeout_ns = t->r.ctx->reduce_comm->timeout_ns = stopped_ns;
  }
}

static dc_status train(training *t) {
  DC__TRY(dc_comm_barrier(t->r.comm)); /* who ends at REGISTER finds nobody in dc_init */
  if (here->phase == REGISTER) {
    arm(t);
  }
  at(REGISTER);
  DC__TRY(register_graph(t));
  for (int step = 0; step < STEPS; step++) {
    if (step == 1) {
      arm(t);
    }
    DC__TRY(forward(t));
    DC__TRY(backward(t));
    at(BARRIER);
    DC__TRY(dc_comm_barrier(t->r.comm));
  }
  return DC_OK;
}

static void close_rank(training *t) {
  dc_context_destroy(t->r.ctx);
  dc_comm_destroy(t->r.comm);
  dc_device_destroy(t->r.device);
  free_sharded(&t->p);
}

/* Those that are left, numbered anew. */
static bool start_again(const group *g, int32_t index) {
  char name[80];
  training *t = calloc(1, sizeof *t);
  snprintf(name, sizeof name, "%.60s-again", g->name);
  dc_status status = open_rank(t, name, index - (index > g->victim), g->world - 1);
  status = status != DC_OK ? status : register_graph(t);
  status = status != DC_OK ? status : forward(t);
  close_rank(t);
  free(t);
  return status == DC_OK;
}

static void run_rank_of(const group *g, int32_t index) {
  training *t = calloc(1, sizeof *t);
  outcome *o = &g->shared->ranks[index];
  alarm(200); /* a hang ends the child, and the test sees that it did */
  here = g;
  own_rank = index;
  o->status = open_rank(t, g->name, index, g->world);
  o->status = o->status != DC_OK ? o->status : train(t);
  o->seconds = now() - g->shared->end;
  snprintf(o->text, sizeof o->text, "%s", dc_last_error());
  if (o->status != DC_OK && dc_async_error(t->r.ctx) != o->status) {
    snprintf(o->text, sizeof o->text, "later calls gave another status: %s", dc_last_error());
  }
  double begin = now();
  close_rank(t);
  free(t);
  if (now() - begin > LIMIT_S) {
    snprintf(o->text, sizeof o->text, "took %.1f s to clean up", now() - begin);
  }
  if (g->world > 2 && !start_again(g, index)) {
    snprintf(o->text, sizeof o->text, "anew: %.500s", dc_last_error());
  }
  exit(0);
}

/* ---- a group ---- */

static void start_group(group *g, int32_t world, int how, enum phase phase) {
  static int groups;
  *g = (group){.world = world, .victim = (int32_t)phase % world, .how = how, .phase = phase};
  snprintf(g->name, sizeof g->name, "libdc-test-end-%d-%d", (int)getpid(), groups++);
  void *shared = mmap(NULL, sizeof *g->shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(shared != MAP_FAILED);
  g->shared = shared;
  fflush(NULL);
  for (int32_t i = 0; i < world; i++) {
    g->children[i] = fork();
    assert_true(g->children[i] >= 0);
    if (g->children[i] == 0) {
      run_rank_of(g, i);
    }
  }
}

static const char *wrong(const group *g, int32_t index) {
  const outcome *o = &g->shared->ranks[index];
  char named[64];
  if (o->status != (g->how == SIGKILL ? DC_E_PEER_DEAD : DC_E_TIMEOUT)) {
    return "another status";
  }
  if (g->how == SIGKILL) {
    snprintf(named, sizeof named, "rank %d died", g->victim);
  } else {
    snprintf(named, sizeof named, "for rank %d of %d to ", g->victim, g->world);
  }
  return strstr(o->text, named) == NULL ? "another text" : o->seconds > LIMIT_S ? "too late" : NULL;
}

static void end_group(group *g) {
  char failure[900] = "";
  for (int32_t i = 0; i < g->world; i++) {
    int status = 0;
    if (i != g->victim) {
      assert_int_equal(waitpid(g->children[i], &status, 0), g->children[i]);
      const char *what = !WIFEXITED(status) || WEXITSTATUS(status) != 0 ? "it ended otherwise" : wrong(g, i);
      if (what != NULL && failure[0] == '\0') {
        const outcome *o = &g->shared->ranks[i];
        snprintf(failure, sizeof failure, "signal %d at %s of rank %d of %d: rank %d: %s: %s after %.1f s: %s", g->how,
                 phase_names[g->phase], g->victim, g->world, i, what, dc_status_name(o->status), o->seconds, o->text);
      }
    }
  }
  int status;
  kill(g->children[g->victim], SIGKILL);
  assert_int_equal(waitpid(g->children[g->victim], &status, 0), g->children[g->victim]);
  munmap(g->shared, sizeof *g->shared);
  if (failure[0] != '\0') {
    fail_msg("%s", failure);
  }
}

/* Groups of all phases. Those that wait for a deadline do so together. */
static void all_phases(int32_t world, int how) {
  group groups[PHASE_COUNT];
  int at_once = how == SIGKILL ? 1 : world > 4 ? PHASE_COUNT / 2 : PHASE_COUNT;
  for (int begin = 0; begin < PHASE_COUNT; begin += at_once) {
    int count = PHASE_COUNT - begin < at_once ? PHASE_COUNT - begin : at_once;
    for (int i = 0; i < count; i++) {
      start_group(&groups[i], world, how, (enum phase)(begin + i));
    }
    for (int i = 0; i < count; i++) {
      end_group(&groups[i]);
    }
  }
}

#define CASE(name, world, how)        \
  static void test_##name(void **s) { \
    (void)s;                          \
    all_phases(world, how);           \
  }
CASE(killed_of_2, 2, SIGKILL)
CASE(killed_of_4, 4, SIGKILL)
CASE(killed_of_8, 8, SIGKILL)
CASE(stopped_of_2, 2, SIGSTOP)
CASE(stopped_of_4, 4, SIGSTOP)
CASE(stopped_of_8, 8, SIGSTOP)

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_killed_of_2),  cmocka_unit_test(test_killed_of_4),  cmocka_unit_test(test_killed_of_8),
      cmocka_unit_test(test_stopped_of_2), cmocka_unit_test(test_stopped_of_4), cmocka_unit_test(test_stopped_of_8),
  };
  return cmocka_run_group_tests_name("ranks end", tests, NULL, NULL);
}
