/* A rank is killed, or stops without ending, at every phase of a step and in the middle of a collective, in groups of
 * 2, 4 and 8 processes. Every other rank gets an error that names it in time, and its context returns that error from
 * then on. A new group of the remaining ranks works. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm/shm/shm.h"
#include "harness.h"
#include "kernels/kernels.h"
#include "runtime/runtime.h"

#include "leftovers.h"

enum { MOST = 8, GRAPH = 1, ID = 5, VALUE = 9, COUNT = 4000, STEPS = 3, HANG_S = 300 };

static const int64_t patience_ns = INT64_C(3000000000000); /* no wait reaches it unless the test skips time */

/* Where the victim ends: before the call that gives the phase its name, or in it. */
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
  char text[600];
} outcome;

typedef struct group {
  char name[64];
  int32_t world, victim;
  int how; /* SIGKILL or SIGSTOP */
  enum phase phase;
  pid_t children[MOST];
  struct shared {
    atomic_bool stopped;          /* the victim has stopped */
    _Atomic uint64_t stuck[MOST]; /* the wait in which a rank waits for the victim, by its number on all ranks */
    atomic_bool passed;           /* the survivors' deadline has passed */
    outcome ranks[MOST];
  } * shared;
} group;

static const group *here; /* set in a child */
static int32_t own_rank;
static atomic_bool armed; /* set once collectives run on streams */

/* The victim calls this at each phase. */
static void at(enum phase phase) {
  if (armed && here->phase == phase && own_rank == here->victim) {
    armed = false;
    raise(here->how);
  }
}

/* ---- only the deadline ends waits for a victim that stopped ---- */

static _Thread_local struct wait {
  const dc__shm_counter *victims; /* the victim's counter, which must reach seq; NULL: this thread does not wait */
  uint32_t seq;
  uint64_t number;
} wait_of_thread;

static void begin_wait(const dc__shm *self, uint32_t seq, bool for_done) {
  const dc__shm_slot *slot = dc__shm_slot_of(self->group, self->channel, here->victim);
  uint64_t number = (uint64_t)seq << 32 | (uint64_t)(self->channel + 1) << 1 | for_done;
  wait_of_thread = (struct wait){!armed ? NULL : for_done ? &slot->done : &slot->posted, seq, number};
}

static void end_wait(void) {
  wait_of_thread.victims = NULL;
}

/* A rank that waits reads the clock several times a second. Once the victim has stopped, a counter that it has not
 * raised never changes. */
int64_t __real_dc__now_ns(void);
int64_t __wrap_dc__now_ns(void);
int64_t __wrap_dc__now_ns(void) {
  const struct wait *w = &wait_of_thread;
  if (w->victims != NULL && atomic_load(&here->shared->stopped) &&
      (int32_t)(atomic_load(&w->victims->value) - w->seq) < 0) {
    atomic_store(&here->shared->stuck[own_rank], w->number);
  }
  return __real_dc__now_ns() + (here != NULL && atomic_load(&here->shared->passed) ? 2 * patience_ns : 0);
}

dc_status __real_dc__shm_wait_posted(dc__shm *self, const dc__coll *coll, uint32_t seq);
dc_status __wrap_dc__shm_wait_posted(dc__shm *self, const dc__coll *coll, uint32_t seq);
dc_status __wrap_dc__shm_wait_posted(dc__shm *self, const dc__coll *coll, uint32_t seq) {
  at(IN_HANDSHAKE);
  if (armed && here->phase == IN_LOCK && own_rank == here->victim) {
    self->group->control->lock = own_rank + 1;
    at(IN_LOCK);
  }
  begin_wait(self, seq, false);
  dc_status status = __real_dc__shm_wait_posted(self, coll, seq);
  end_wait();
  return status;
}

dc_status __real_dc__shm_wait_done(dc__shm *self, const dc__coll *coll, uint32_t seq);
dc_status __wrap_dc__shm_wait_done(dc__shm *self, const dc__coll *coll, uint32_t seq);
dc_status __wrap_dc__shm_wait_done(dc__shm *self, const dc__coll *coll, uint32_t seq) {
  begin_wait(self, seq, true);
  dc_status status = __real_dc__shm_wait_done(self, coll, seq);
  end_wait();
  return status;
}

void __real_dc__reduce(const dc__reduction *r);
void __wrap_dc__reduce(const dc__reduction *r);
void __wrap_dc__reduce(const dc__reduction *r) {
  at(IN_READING);
  __real_dc__reduce(r);
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
  options.timeout_ns = patience_ns;
  r->rank = index;
  r->world = world;
  DC__TRY(dc_comm_create_processes(name, index, world, &options, &r->comm));
  DC__TRY(dc_device_open("cpu", NULL, &r->device));
  DC__TRY(dc_context_create(r->device, NULL, &r->ctx));
  DC__TRY(dc_init(r->ctx, r->comm, NULL, COUNT)); /* the bucket holds one gradient */
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

static dc_status train(training *t) {
  DC__TRY(dc_comm_barrier(t->r.comm)); /* so a rank that ends at REGISTER ends after all have left dc_init */
  if (here->phase == REGISTER) {
    armed = true;
  }
  at(REGISTER);
  DC__TRY(register_graph(t));
  for (int step = 0; step < STEPS; step++) {
    if (step == 1) {
      armed = true;
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

/* The remaining ranks make a group with new numbers. */
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
  alarm(HANG_S); /* ends the child if it hangs, which the test notices */
  here = g;
  own_rank = index;
  o->status = open_rank(t, g->name, index, g->world);
  o->status = o->status != DC_OK ? o->status : train(t);
  armed = false;
  snprintf(o->text, sizeof o->text, "%s", dc_last_error());
  if (o->status != DC_OK && dc_context_check(t->r.ctx) != o->status) {
    snprintf(o->text, sizeof o->text, "later calls gave another status: %s", dc_last_error());
  }
  close_rank(t);
  free(t);
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
  return strstr(o->text, named) == NULL ? "another text" : NULL;
}

/* Lets the survivors' deadline pass once all of them are in one wait that only the victim holds up: they have raised
 * the counter themselves. */
static void pass_deadline(const group *g) {
  int status = 0;
  assert_int_equal(waitpid(g->children[g->victim], &status, WUNTRACED), g->children[g->victim]);
  assert_true(WIFSTOPPED(status));
  atomic_store(&g->shared->stopped, true);
  for (int ms = 0; ms < HANG_S * 1000; ms++) {
    uint64_t number = 0;
    int stuck = 0;
    for (int32_t i = 0; i < g->world; i++) {
      uint64_t of_rank = atomic_load(&g->shared->stuck[i]);
      stuck += of_rank != 0 && (number == 0 || number == of_rank);
      number = number == 0 ? of_rank : number;
    }
    if (stuck == g->world - 1) {
      atomic_store(&g->shared->passed, true);
      return;
    }
    nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
  fail_msg("at %s of rank %d of %d the survivors do not all wait for it", phase_names[g->phase], g->victim, g->world);
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
        snprintf(failure, sizeof failure, "signal %d at %s of rank %d of %d: rank %d: %s: %s: %s", g->how,
                 phase_names[g->phase], g->victim, g->world, i, what, dc_status_name(o->status), o->text);
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

static void all_phases(int32_t world, int how) {
  for (int phase = 0; phase < PHASE_COUNT; phase++) {
    group g;
    start_group(&g, world, how, (enum phase)phase);
    if (how == SIGSTOP) {
      pass_deadline(&g);
    }
    end_group(&g);
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
  return cmocka_run_group_tests_name("rank_death", tests, leftovers_note, leftovers_compare);
}
