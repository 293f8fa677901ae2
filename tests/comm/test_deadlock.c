/* Ranks that are in different calls of one context, each on a communicator of its own. They notice long before the
 * deadline, and all get one error. A wait that only looks like a deadlock, and ends by itself, is not disturbed. */
#include <sys/mman.h>

#include "comm_failing.h"

enum { MOST = 4, GRAPH = 7, NUMEL = 12, DELAY = 1500 /* ms; longer than ranks must be held */ };

/* ---- a context with two parameters ---- */

typedef struct model {
  dc_device *device;
  dc_context *ctx;
  float shard[2][NUMEL], grad[2][NUMEL];
} model;

static int open_model(model *m, dc_comm *comm) {
  const int64_t ids[2] = {1, 2};
  const int64_t numel = NUMEL, chunk = (NUMEL + comm->world - 1) / comm->world;
  memset(m, 0, sizeof *m);
  CHECK_OK(dc_device_open("cpu", NULL, &m->device));
  CHECK_OK(dc_context_create(m->device, NULL, &m->ctx));
  CHECK_OK(dc_init(m->ctx, comm, NULL, 1024));
  for (int i = 0; i < 2; i++) {
    dc_tensor shard = flat(m->shard[i], &chunk, DC_FLOAT32), grad = flat(m->grad[i], &chunk, DC_FLOAT32);
    CHECK_OK(dc_register_z3_param(m->ctx, ids[i], &numel, 1, &shard, &grad, 0, DC_DTYPE_NONE));
  }
  CHECK_OK(dc_register_graph_z3(m->ctx, GRAPH, ids, 2));
  return 0;
}

static void close_model(model *m) {
  dc_context_destroy(m->ctx);
  dc_device_destroy(m->device);
}

static dc_status start_gather(model *m, dc_tensor *full) {
  *full = (dc_tensor)DC_TENSOR_INIT;
  return dc_allgather_param(m->ctx, NULL, GRAPH, 2, DC_DTYPE_NONE, full);
}

static dc_status gather_and_wait(model *m) {
  dc_tensor full;
  dc_status status = start_gather(m, &full);
  return status != DC_OK ? status : dc_wait_allgather(m->ctx, &full, GRAPH, 2);
}

static dc_status backward(model *m) {
  float values[NUMEL] = {0};
  const int64_t numel = NUMEL;
  const dc_tensor grad = flat(values, &numel, DC_FLOAT32);
  dc_status status = dc_start_backward(m->ctx, 1);
  if (status == DC_OK) {
    status = dc_reduce_grad(m->ctx, &grad, GRAPH, 1);
  }
  return status != DC_OK ? status : dc_end_backward(m->ctx, GRAPH, 0);
}

/* ---- crossed calls ---- */

enum call { BARRIER, GATHER, BACKWARD };

static const char *const said[] = {"barrier", "allgather_param of parameter 2", "reduce_grad of parameter 1"};

typedef struct crossing {
  enum call calls[MOST]; /* by rank */
  int32_t world;
  bool mixed;      /* the ranks have made all of the calls before */
  int32_t late_ms; /* how much later rank 1 makes its call, in ms */
  char texts[MOST][512];
} crossing;

static dc_status make_call(dc_comm *comm, model *m, enum call call) {
  return call == BARRIER ? dc_comm_barrier(comm) : call == GATHER ? gather_and_wait(m) : backward(m);
}

static int cross(dc_comm *comm, void *arg) {
  crossing *x = arg;
  model m;
  CHECK(open_model(&m, comm) == 0);
  if (x->mixed) {
    for (enum call call = BARRIER; call <= BACKWARD; call++) {
      CHECK_OK(make_call(comm, &m, call));
    }
    CHECK_OK(dc_context_params_updated(m.ctx, NULL, 0));
  }
  sleep_ms(comm->rank == 1 ? x->late_ms : 0);
  int64_t begin = dc__now_ns();
  CHECK(make_call(comm, &m, x->calls[comm->rank]) == DC_E_MISMATCH);
  CHECK(within(begin, 900, SOON));
  snprintf(x->texts[comm->rank], sizeof x->texts[0], "%s", dc_last_error());
  CHECK_SAYS(said[x->calls[0]]);
  CHECK_SAYS(said[x->calls[1]]);
  CHECK_SAYS("the same order");
  CHECK(check_dead(comm, DC_E_MISMATCH) == 0);
  close_model(&m);
  return 0;
}

typedef int (*start_fn)(int32_t world, int64_t timeout_ns, rank_fn fn, void *arg);

static void try_on(start_fn start, const crossing *wanted) {
  crossing *x = mmap(NULL, sizeof *x, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(x != MAP_FAILED);
  *x = *wanted;
  assert_int_equal(start(x->world, 0, cross, x), 0);
  for (int32_t r = 1; r < x->world; r++) {
    assert_string_equal(x->texts[r], x->texts[0]);
  }
  assert_int_equal(strncmp(x->texts[0], "rank", 4), 0);
  munmap(x, sizeof *x);
}

static void try_all(start_fn start) {
  const crossing all[] = {{.calls = {BARRIER, GATHER}, .world = 2},
                          {.calls = {GATHER, BARRIER}, .world = 2, .late_ms = DELAY},
                          {.calls = {BARRIER, BACKWARD}, .world = 2, .mixed = true},
                          {.calls = {BACKWARD, GATHER}, .world = 2, .mixed = true, .late_ms = DELAY},
                          {.calls = {GATHER, BACKWARD}, .world = 2},
                          {.calls = {GATHER, BARRIER, GATHER}, .world = 3},
                          {.calls = {BACKWARD, GATHER, GATHER}, .world = 3, .mixed = true}};
  for (size_t i = 0; i < DC__COUNT(all); i++) {
    try_on(start, &all[i]);
  }
}

/* A rank creates a context while another rank waits in a barrier, so only the first has the context's communicator. */
typedef struct creation {
  int32_t world, waiting; /* waiting: the rank in the barrier */
  bool copied;            /* all ranks have made another communicator before */
  int32_t late_ms;        /* how much later the barrier is called, in ms */
} creation;

static int init_beside_barrier(dc_comm *comm, void *arg) {
  const creation *c = arg;
  const bool waits = comm->rank == c->waiting;
  dc_comm *copy = NULL;
  dc_device *device;
  dc_context *ctx;
  if (c->copied) {
    CHECK_OK(dc_comm_dup(comm, &copy));
    CHECK_OK(dc_comm_barrier(copy));
  }
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  CHECK_OK(dc_context_create(device, NULL, &ctx));
  sleep_ms(waits ? c->late_ms : 0);
  int64_t begin = dc__now_ns();
  CHECK((waits ? dc_comm_barrier(comm) : dc_init(ctx, comm, NULL, 1024)) == DC_E_MISMATCH);
  CHECK(within(begin, waits ? 900 : 0, SOON)); /* the barrier's second may have begun long before the creation */
  CHECK_SAYS("in barrier");
  CHECK_SAYS("in init");
  CHECK_SAYS("the same order");
  dc_context_destroy(ctx);
  dc_device_destroy(device);
  dc_comm_destroy(copy);
  return 0;
}

static void try_init(start_fn start) {
  creation copied = {.world = 2, .waiting = 1, .copied = true}, first = {.world = 3, .waiting = 0, .late_ms = DELAY};
  assert_int_equal(start(copied.world, 0, init_beside_barrier, &copied), 0);
  assert_int_equal(start(first.world, 0, init_beside_barrier, &first), 0);
}

/* Over TCP the ranks meet to make a communicator: the last rank, or one in the middle, does not come. */
static void try_init_over_tcp(void) {
  creation late = {.world = 2, .waiting = 1, .late_ms = DELAY}, between = {.world = 3, .waiting = 1};
  try_init(on_tcp);
  assert_int_equal(on_tcp(late.world, 0, init_beside_barrier, &late), 0);
  assert_int_equal(on_tcp(between.world, 0, init_beside_barrier, &between), 0);
}

static void test_threads(void **state) {
  (void)state;
  try_all(on_threads);
  try_init(on_threads);
}

static void test_processes(void **state) {
  (void)state;
  try_all(on_processes);
  try_init(on_processes);
}

static void test_tcp(void **state) {
  (void)state;
  try_all(on_tcp);
  try_init_over_tcp();
}

/* A third rank, which is in neither call, gets the same error from its next call. */
static int cross_beside(dc_comm *comm, void *arg) {
  (void)arg;
  model m;
  CHECK(open_model(&m, comm) == 0);
  if (comm->rank == 2) {
    await_failure(comm);
  }
  CHECK(make_call(comm, &m, comm->rank == 0 ? BARRIER : GATHER) == DC_E_MISMATCH);
  CHECK_SAYS(
      "rank 0 is in barrier where rank 1 is in allgather_param of parameter 2, and they wait for each other; "
      "all ranks must make the same calls of a context and its communicator in the same order");
  close_model(&m);
  return 0;
}

/* ---- waits that end by themselves ---- */

/* A rank is late; and a rank computes while its gather is under way, and then calls the barrier. */
static int come_late(dc_comm *comm, void *arg) {
  (void)arg;
  model m;
  dc_tensor full = DC_TENSOR_INIT;
  CHECK(open_model(&m, comm) == 0);
  sleep_ms(comm->rank == 1 ? DELAY : 0);
  CHECK_OK(dc_comm_barrier(comm));
  sleep_ms(comm->rank == 0 ? DELAY : 0);
  CHECK_OK(gather_and_wait(&m));
  CHECK_OK(dc_context_params_updated(m.ctx, NULL, 0));
  if (comm->rank == 1) {
    CHECK_OK(start_gather(&m, &full));
    sleep_ms(DELAY);
  }
  CHECK_OK(dc_comm_barrier(comm));
  if (comm->rank == 0) {
    CHECK_OK(start_gather(&m, &full));
  }
  CHECK_OK(dc_wait_allgather(m.ctx, &full, GRAPH, 2));
  close_model(&m);
  return 0;
}

/* Two threads of a rank, each with its own communicator, make their calls in a different order on every rank. */
typedef struct worker {
  dc_comm *comm; /* its own */
  int64_t delay;
  dc_status status;
  int64_t copy_delay;
} worker;

static void *copy_alone(void *arg) {
  worker *w = arg;
  dc_comm *copy = NULL;
  w->status = dc_comm_dup(w->comm, &copy);
  w->comm = copy;
  return NULL;
}

static void *work(void *arg) {
  worker *w = arg;
  for (int i = 0; i < 2 && w->status == DC_OK; i++) {
    sleep_ms(w->delay);
    w->status = dc_comm_barrier(w->comm);
  }
  return NULL;
}

/* Makes a communicator, and then calls with it. */
static void *copy_and_work(void *arg) {
  worker *w = arg;
  sleep_ms(w->copy_delay);
  (void)copy_alone(w);
  return work(w);
}

static int take_turns(dc_comm *comm, void *arg) {
  (void)arg;
  const int64_t late = comm->rank == 0 ? DELAY : 0;
  worker own = {.comm = comm, .delay = DELAY - late}, other = {.comm = comm, .delay = late, .copy_delay = late};
  pthread_t thread;
  (void)copy_alone(&own); /* the first copy on every rank */
  CHECK_OK(own.status);
  CHECK(pthread_create(&thread, NULL, copy_and_work, &other) == 0);
  (void)work(&own);
  pthread_join(thread, NULL);
  CHECK_OK(own.status);
  CHECK_OK(other.status);
  dc_comm_destroy(own.comm);
  dc_comm_destroy(other.comm);
  return 0;
}

/* As take_turns(), with a communicator that another thread of the rank has made and used before. */
static int hand_over(dc_comm *comm, void *arg) {
  (void)arg;
  const int64_t late = comm->rank == 0 ? DELAY : 0;
  worker own = {.comm = comm, .delay = DELAY - late}, other = {.comm = comm, .delay = late};
  pthread_t thread;
  (void)copy_alone(&other);
  CHECK_OK(other.status);
  CHECK_OK(dc_comm_barrier(other.comm));
  CHECK_OK(dc_comm_barrier(comm));
  CHECK(pthread_create(&thread, NULL, work, &other) == 0);
  (void)work(&own);
  pthread_join(thread, NULL);
  CHECK_OK(own.status);
  CHECK_OK(other.status);
  dc_comm_destroy(other.comm);
  return 0;
}

/* Rank 0 makes two calls in turn on one thread. Rank 1 makes them on two threads: the second one makes a communicator
 * late, while the first one waits. */
static void *use_and_copy(void *arg) {
  worker *w = arg;
  w->status = dc_comm_barrier(w->comm);
  return w->status == DC_OK ? copy_and_work(w) : NULL;
}

static int copy_beside(dc_comm *comm, void *arg) {
  (void)arg;
  worker one = {.comm = comm}, other = {.comm = comm, .copy_delay = comm->rank == 0 ? DELAY / 3 : 2 * DELAY};
  pthread_t thread;
  (void)copy_alone(&one);
  CHECK_OK(one.status);
  if (comm->rank == 0) {
    (void)use_and_copy(&other);
  } else {
    CHECK(pthread_create(&thread, NULL, use_and_copy, &other) == 0);
  }
  (void)work(&one);
  CHECK(comm->rank == 0 || pthread_join(thread, NULL) == 0);
  CHECK_OK(one.status);
  CHECK_OK(other.status);
  dc_comm_destroy(one.comm);
  dc_comm_destroy(other.comm);
  return 0;
}

/* An all-reduce counts as requested once it is queued, however late its stream reaches it. */
static void sleep_in_turn(void *user) {
  (void)user;
  sleep_ms(DELAY);
}

static int queue_ahead(dc_comm *comm, void *arg) {
  (void)arg;
  float values[N] = {0};
  const int64_t count = N;
  dc_tensor data = flat(values, &count, DC_FLOAT32);
  dc_comm *copy = NULL;
  dc_device *device = NULL;
  dc_stream *stream = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  CHECK_OK(dc_stream_create(device, &stream));
  if (comm->rank == 0) {
    CHECK_OK(dc_stream_call(stream, sleep_in_turn, NULL));
    CHECK_OK(dc_comm_all_reduce(copy, &data, DC_SUM, stream));
    CHECK_OK(dc_comm_barrier(comm));
    CHECK_OK(dc_stream_synchronize(stream, 0));
  } else {
    CHECK_OK(dc_comm_all_reduce(copy, &data, DC_SUM, NULL));
    CHECK_OK(dc_comm_barrier(comm));
  }
  CHECK_OK(dc_comm_check(copy));
  dc_stream_destroy(stream);
  dc_device_destroy(device);
  dc_comm_destroy(copy);
  return 0;
}

static void try_late(start_fn start) {
  assert_int_equal(start(3, 0, cross_beside, NULL), 0);
  assert_int_equal(start(2, 0, come_late, NULL), 0);
  assert_int_equal(start(2, 0, take_turns, NULL), 0);
  assert_int_equal(start(2, 0, hand_over, NULL), 0);
  assert_int_equal(start(2, 0, queue_ahead, NULL), 0);
}

static void test_threads_that_go_on(void **state) {
  (void)state;
  try_late(on_threads);
}

static void test_processes_that_go_on(void **state) {
  (void)state;
  try_late(on_processes);
}

static void test_no_deadlock_over_tcp(void **state) {
  (void)state;
  try_late(on_tcp);
  assert_int_equal(on_tcp(2, 0, copy_beside, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_threads),
      cmocka_unit_test(test_processes),
      cmocka_unit_test(test_tcp),
      cmocka_unit_test(test_threads_that_go_on),
      cmocka_unit_test(test_processes_that_go_on),
      cmocka_unit_test(test_no_deadlock_over_tcp),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
