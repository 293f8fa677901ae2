/* fork() after every object was made. In the child, every call on an inherited handle returns an error at once,
 * destroying does nothing, and new handles work. The parent's rank continues undisturbed. */
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "harness.h"

#include "leftovers.h"

enum { GRAPH = 1, ID = 5, COUNT = 40000 };

typedef struct handles {
  rank r;
  dc_stream *stream;
  dc_event *event;
  dc_buffer *buffer;
  dc_layer *layer;
  sharded p;
} handles;

static float *gradient;

/* By default the thread sanitizer ends a child that starts threads; here it must not. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) {
  return "die_after_fork=0";
}

/* Gathers, reads and reduces, on all ranks. */
static dc_status step(handles *h) {
  static const int64_t count = COUNT;
  dc_tensor full = DC_TENSOR_INIT, grad = flat(gradient, &count, DC_FLOAT32);
  dc_context *ctx = h->r.ctx;
  dc_status status = dc_allgather_param(ctx, NULL, GRAPH, ID, DC_DTYPE_NONE, &full);
  status = status != DC_OK ? status : dc_wait_allgather(ctx, NULL, GRAPH, ID);
  for (int64_t i = 0; i < COUNT && status == DC_OK; i++) {
    status = ((const float *)full.data)[i] == value_of(ID, i) ? DC_OK : DC_E_INTERNAL;
  }
  status = status != DC_OK ? status : dc_release_param(ctx, NULL, GRAPH, ID, 1);
  status = status != DC_OK ? status : dc_reduce_grad(ctx, &grad, GRAPH, ID);
  return status != DC_OK ? status : dc_end_backward(ctx, GRAPH, 0);
}

static dc_layer_config small_layer(void) {
  dc_layer_config config = DC_LAYER_CONFIG_INIT;
  config.hidden_size = 8;
  config.heads = 2;
  config.threads = 2;
  return config;
}

static dc_status set_up(handles *h, dc_comm *comm) {
  static const int64_t id = ID;
  const dc_layer_config config = small_layer();
  rank *r = &h->r;
  r->comm = comm;
  r->world = dc_comm_size(comm);
  r->rank = dc_comm_rank(comm);
  dc_status status = dc_device_open("cpu", NULL, &r->device);
  status = status != DC_OK ? status : dc_context_create(r->device, NULL, &r->ctx);
  status = status != DC_OK ? status : dc_init(r->ctx, comm, NULL, 1000);
  status = status != DC_OK ? status : dc_stream_create(r->device, &h->stream);
  status = status != DC_OK ? status : dc_event_create(r->device, &h->event);
  status = status != DC_OK ? status : dc_layer_create(r->device, &config, &h->layer);
  status = status != DC_OK ? status : dc_context_alloc(r->ctx, 100, DC_MEMORY_SHARED, &h->buffer);
  status = status != DC_OK ? status : register_sharded(r, &h->p, ID, COUNT, 0);
  return status != DC_OK ? status : dc_register_graph_z3(r->ctx, GRAPH, &id, 1);
}

static void tear_down(handles *h) {
  dc_buffer_release(h->buffer);
  dc_layer_destroy(h->layer);
  dc_event_destroy(h->event);
  dc_stream_destroy(h->stream);
  dc_context_destroy(h->r.ctx);
  dc_device_destroy(h->r.device);
  dc_comm_destroy(h->r.comm);
  free_sharded(&h->p);
}

static void nothing(void *user) {
  (void)user;
}

#define REFUSED(call)                                                                       \
  do {                                                                                      \
    if ((call) != DC_E_STATE || strstr(dc_last_error(), "which forked this one") == NULL) { \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, dc_last_error());       \
      return 1;                                                                             \
    }                                                                                       \
  } while (0)

static int use_inherited_layer(handles *h) {
  const dc_layer_config config = small_layer();
  dc_layer *layer = NULL;
  int64_t shape[2];
  int32_t ndim;
  REFUSED(dc_layer_create(h->r.device, &config, &layer));
  REFUSED(dc_layer_get_cost(h->layer, NULL, NULL));
  REFUSED(dc_layer_init_weights(h->layer, NULL, 0, 0));
  REFUSED(dc_layer_forward(h->layer, NULL, NULL, 0, 0, NULL, NULL));
  REFUSED(dc_layer_inference(h->layer, NULL, NULL, 0, 0, NULL, NULL));
  REFUSED(dc_layer_backward(h->layer, NULL, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL));
  dc_layer_destroy(h->layer);
  REFUSED(dc_layer_get_weight_shape(h->layer, 0, shape, &ndim)); /* the refused destroy left it */
  return 0;
}

/* Calls every function that takes a handle. Returns 0 if all were refused. */
static int use_inherited(handles *h) {
  dc_context *ctx = h->r.ctx, *other = NULL;
  dc_comm *comm = h->r.comm, *copy = NULL;
  dc_stream *stream = NULL;
  dc_event *event = NULL;
  dc_buffer *buffer = NULL;
  dc_memory_stats stats = {.struct_size = sizeof stats};
  float data[4] = {0};
  const int64_t four = 4;
  int32_t flag = 0;
  dc_tensor t = flat(data, &four, DC_FLOAT32);
  REFUSED(step(h));
  REFUSED(dc_register_graph_z3(ctx, 2, NULL, 0));
  REFUSED(dc_end_backward(ctx, GRAPH, 0));
  REFUSED(dc_offload_tensor(ctx, &t, GRAPH, 1, &t));
  REFUSED(dc_context_alloc(ctx, 8, DC_MEMORY_DEVICE, &buffer));
  REFUSED(dc_context_get_memory_stats(ctx, &stats));
  REFUSED(dc_context_set_stream(ctx, NULL));
  REFUSED(dc_context_step_abort(ctx));
  REFUSED(dc_context_check(ctx));
  REFUSED(dc_init(ctx, NULL, NULL, 1));
  REFUSED(dc_cleanup(ctx));
  REFUSED(dc_context_create(h->r.device, NULL, &other));
  REFUSED(dc_stream_create(h->r.device, &stream));
  REFUSED(dc_stream_call(h->stream, nothing, NULL));
  REFUSED(dc_stream_synchronize(h->stream, 0));
  REFUSED(dc_event_create(h->r.device, &event));
  REFUSED(dc_event_record(h->event, h->stream));
  REFUSED(dc_event_wait(h->event, NULL, 0));
  REFUSED(dc_event_query(h->event, &flag));
  REFUSED(dc_comm_dup(comm, &copy));
  REFUSED(dc_comm_all_reduce(comm, &t, DC_SUM, NULL));
  REFUSED(dc_comm_broadcast(comm, &t, 0, h->stream));
  REFUSED(dc_comm_barrier(comm));
  REFUSED(dc_comm_group_begin(comm));
  REFUSED(dc_comm_group_end(comm, NULL));
  REFUSED(dc_comm_set_checksums(comm, 1));
  REFUSED(dc_comm_check(comm));
  return 0;
}

/* New objects work, also together with inherited ones. */
static int use_new(handles *old) {
  handles h = {.r = {.failure = ""}};
  dc_comm *comm = NULL;
  if (dc_comm_create_threads(1, NULL, &comm) != DC_OK || set_up(&h, comm) != DC_OK || step(&h) != DC_OK) {
    fprintf(stderr, "a context of the child's: %s\n", dc_last_error());
    return 1;
  }
  dc_context *ctx = NULL;
  REFUSED(dc_context_set_stream(h.r.ctx, old->stream));
  REFUSED(dc_event_record(h.event, old->stream));
  REFUSED(dc_event_wait(h.event, old->stream, 0));
  if (dc_context_create(h.r.device, NULL, &ctx) != DC_OK) {
    return 1;
  }
  REFUSED(dc_init(ctx, old->r.comm, NULL, 1));
  dc_context_destroy(ctx);
  tear_down(&h);
  return 0;
}

static int in_child(handles *h) {
  alarm(600); /* ends the child if it hangs */
  if (use_inherited(h) != 0 || use_inherited_layer(h) != 0 || use_new(h) != 0) {
    return 1;
  }
  /* Peers must not notice these calls. */
  dc_comm_abort(h->r.comm, "from the child");
  dc_buffer_release(h->buffer);
  dc_event_destroy(h->event);
  dc_stream_destroy(h->stream);
  dc_context_destroy(h->r.ctx);
  dc_device_destroy(h->r.device);
  dc_comm_destroy(h->r.comm);
  return dc_is_profiling(h->r.ctx) != 0;
}

/* A rank forks while its streams have work, and continues. */
static int run_rank_with_child(dc_comm *comm) {
  handles h = {.r = {.failure = ""}};
  const dc_tensor *none = NULL;
  if (set_up(&h, comm) != DC_OK || step(&h) != DC_OK) {
    fprintf(stderr, "%s\n", dc_last_error());
    return 1;
  }
  dc_tensor full = DC_TENSOR_INIT;
  int result = dc_allgather_param(h.r.ctx, none, GRAPH, ID, DC_BFLOAT16, &full) != DC_OK; /* in flight at the fork */
  pid_t child = fork();
  if (child == 0) {
    _exit(in_child(&h));
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    fprintf(stderr, "the child of rank %d ended with %#x\n", h.r.rank, (unsigned)status);
    result = 1;
  }
  for (int i = 0; i < 3 && result == 0; i++) {
    result = dc_invalidate_gathered_param(h.r.ctx, ID) != DC_OK || step(&h) != DC_OK;
  }
  if (result != 0) {
    fprintf(stderr, "rank %d after the fork: %s\n", h.r.rank, dc_last_error());
  }
  tear_down(&h);
  return result;
}

static dc_comm_options patient(void) {
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  options.timeout_ns = INT64_C(300000000000);
  return options;
}

static void test_processes(void **state) {
  (void)state;
  char name[64];
  pid_t ranks[2];
  const dc_comm_options options = patient();
  snprintf(name, sizeof name, "libdc-test-fork-%d", (int)getpid());
  for (int32_t i = 0; i < 2; i++) {
    ranks[i] = fork();
    if (ranks[i] == 0) {
      dc_comm *comm = NULL;
      _exit(dc_comm_create_processes(name, i, 2, &options, &comm) != DC_OK || run_rank_with_child(comm) != 0);
    }
  }
  for (int32_t i = 0; i < 2; i++) {
    int status;
    assert_int_equal(waitpid(ranks[i], &status, 0), ranks[i]);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
  }
}

static void test_one_rank(void **state) {
  (void)state;
  dc_comm *comm = NULL;
  assert_int_equal(dc_comm_create_threads(1, NULL, &comm), DC_OK);
  assert_int_equal(run_rank_with_child(comm), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_processes),
      cmocka_unit_test(test_one_rank),
  };
  gradient = calloc(COUNT, sizeof *gradient);
  int failed = gradient == NULL ? 1 : cmocka_run_group_tests_name("fork", tests, leftovers_note, leftovers_compare);
  free(gradient);
  return failed;
}
