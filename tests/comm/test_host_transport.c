/* Collectives on streams, copies of a communicator, and the arguments that calls refuse. */
#include <math.h>
#include <sys/mman.h>

#include "comm_ranks.h"

enum { DEEP = 40 };

static int queue_gathers(dc_comm *comm, dc_stream *stream, int64_t *send, int64_t *recv) {
  int64_t one = 1;
  int64_t world = dc_comm_size(comm);
  for (int i = 0; i < DEEP; i++) {
    send[i] = dc_comm_rank(comm) * 1000 + i;
    const dc_tensor from = flat(&send[i], &one, DC_INT64);
    dc_tensor to = flat(&recv[i * world], &world, DC_INT64);
    CHECK_OK(dc_comm_all_gather(comm, &from, &to, NULL, stream));
  }
  return 0;
}

static int queue_reductions(dc_comm *comm, dc_stream *stream, float *send, float *recv, float *all) {
  static const int64_t shard = 4000; /* large enough to be read in place */
  int64_t total = shard * dc_comm_size(comm);
  for (int64_t i = 0; i < total; i++) {
    send[i] = all[i] = (float)(i % 100);
  }
  for (int i = 0; i < DEEP / 2; i++) {
    const dc_tensor from = flat(send, &total, DC_FLOAT32);
    dc_tensor to = flat(recv, &shard, DC_FLOAT32);
    dc_tensor whole = flat(all, &total, DC_FLOAT32);
    CHECK_OK(dc_comm_reduce_scatter(comm, &from, &to, NULL, DC_MEAN, stream));
    CHECK_OK(dc_comm_all_reduce(comm, &whole, DC_MEAN, stream));
    CHECK_OK(dc_comm_broadcast(comm, &whole, i % dc_comm_size(comm), stream));
  }
  return 0;
}

/* Two copies of a communicator on two streams do not wait for each other, in whatever order each rank queues. The
 * communicators are destroyed while work is queued, which keeps them alive. */
static int overlap(dc_comm *comm, void *arg) {
  (void)arg;
  int64_t world = dc_comm_size(comm);
  dc_device *device = NULL;
  dc_stream *streams[2];
  dc_comm *copies[2];
  int64_t *send = calloc(DEEP, sizeof *send);
  int64_t *recv = calloc((size_t)(DEEP * world), sizeof *recv);
  float *grads = calloc((size_t)(4000 * world), sizeof *grads);
  float *whole = calloc((size_t)(4000 * world), sizeof *whole);
  float *grad = calloc(4000, sizeof *grad);
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  for (int i = 0; i < 2; i++) {
    CHECK_OK(dc_stream_create(device, &streams[i]));
    CHECK_OK(dc_comm_dup(comm, &copies[i]));
  }
  if (dc_comm_rank(comm) % 2 == 0) {
    CHECK(queue_gathers(copies[0], streams[0], send, recv) == 0);
    CHECK(queue_reductions(copies[1], streams[1], grads, grad, whole) == 0);
  } else {
    CHECK(queue_reductions(copies[1], streams[1], grads, grad, whole) == 0);
    CHECK(queue_gathers(copies[0], streams[0], send, recv) == 0);
  }
  for (int i = 0; i < 2; i++) {
    dc_comm_destroy(copies[i]);
    CHECK_OK(dc_stream_synchronize(streams[i], 0));
    dc_stream_destroy(streams[i]);
  }
  dc_device_destroy(device);
  CHECK_OK(dc_comm_check(comm));
  for (int i = 0; i < DEEP; i++) {
    for (int64_t r = 0; r < world; r++) {
      CHECK(recv[i * world + r] == r * 1000 + i);
    }
  }
  for (int64_t i = 0; i < 4000; i++) {
    CHECK(grad[i] == (float)((dc_comm_rank(comm) * 4000 + i) % 100));
    CHECK(whole[i] == (float)(i % 100));
  }
  free(send);
  free(recv);
  free(grads);
  free(whole);
  free(grad);
  return 0;
}

static void test_overlap(void **state) {
  (void)state;
  on_all_groups(overlap, NULL);
}

static int works(dc_comm *comm) {
  int64_t one = 1;
  int64_t world = dc_comm_size(comm);
  int64_t own = 7 * dc_comm_rank(comm);
  int64_t all[DC__COMM_MAX_WORLD];
  const dc_tensor from = flat(&own, &one, DC_INT64);
  dc_tensor to = flat(all, &world, DC_INT64);
  CHECK_OK(dc_comm_all_gather(comm, &from, &to, NULL, NULL));
  for (int64_t r = 0; r < world; r++) {
    CHECK(all[r] == 7 * r);
  }
  return 0;
}

enum { COPIES = 100 };

/* Over TCP the number of descriptors limits the copies, since all ranks are threads of this one process here. */
static int copies_on(const dc_comm *comm) {
  return strcmp(comm->ops->name, "tcp") == 0 ? 40 : COPIES;
}

/* A group has any number of copies, made and destroyed any number of times, at different times on each rank. */
static int many_copies(dc_comm *comm, void *arg) {
  (void)arg;
  dc_comm *copies[COPIES];
  int count = copies_on(comm); /* not a multiple of 7 */
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < count; i++) {
      CHECK_OK(dc_comm_dup(i == 0 ? comm : copies[0], &copies[i]));
      CHECK(works(copies[i]) == 0);
    }
    for (int i = 0; i < count; i++) {
      dc_comm_destroy(copies[(i * 7 + dc_comm_rank(comm)) % count]);
    }
    CHECK_OK(dc_comm_barrier(comm));
  }
  for (int i = 0; i < 100; i++) {
    CHECK_OK(dc_comm_dup(comm, &copies[0]));
    CHECK(works(copies[0]) == 0);
    dc_comm_destroy(copies[0]);
  }
  return 0;
}

/* The last rank makes all its copies before the others make any. */
static int copies_ahead(dc_comm *comm, void *arg) {
  (void)arg;
  dc_comm *copies[COPIES];
  int count = copies_on(comm);
  if (dc_comm_rank(comm) != dc_comm_size(comm) - 1) {
    sleep_ms(50);
  }
  for (int i = 0; i < count; i++) {
    CHECK_OK(dc_comm_dup(comm, &copies[i]));
  }
  for (int i = count - 1; i >= 0; i--) {
    CHECK(works(copies[i]) == 0);
    dc_comm_destroy(copies[i]);
  }
  return 0;
}

/* A rank waits on a channel that the aborting rank has never joined. */
static int aborted_ahead(dc_comm *comm, void *arrived) {
  dc_comm *copies[COPIES];
  if (dc_comm_rank(comm) == 0) {
    meet_all_ranks(arrived, comm); /* the others have made their copies */
    sleep_ms(50);
    dc_comm_abort(comm, "enough");
    CHECK(dc_comm_check(comm) == DC_E_ABORTED);
    return 0;
  }
  for (int i = 0; i < COPIES; i++) {
    CHECK_OK(dc_comm_dup(comm, &copies[i]));
  }
  meet_all_ranks(arrived, comm);
  CHECK(dc_comm_barrier(copies[COPIES - 1]) == DC_E_ABORTED);
  CHECK_SAYS("enough");
  for (int i = 0; i < COPIES; i++) {
    dc_comm_destroy(copies[i]);
  }
  return 0;
}

static void test_many_copies(void **state) {
  (void)state;
  on_all_groups(many_copies, NULL);
}

static void test_copies_ahead(void **state) {
  (void)state;
  on_all_groups(copies_ahead, NULL);
}

static void test_aborted_ahead(void **state) {
  (void)state;
  atomic_int *arrived = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_int_equal(on_threads(3, 0, aborted_ahead, arrived), 0);
  atomic_store(arrived, 0);
  assert_int_equal(on_processes(2, 0, aborted_ahead, arrived), 0);
  munmap(arrived, 4096);
}

typedef struct own_work {
  dc_comm *comm;
  dc_stream *stream;
  double x;
  int refused;
} own_work;

enum { OWN_CALLS = 300 }; /* more than the stream's queue holds */

static void reduce_often(void *user) {
  own_work *w = user;
  int64_t one = 1;
  dc_tensor x = flat(&w->x, &one, DC_FLOAT64);
  for (int i = 0; i < OWN_CALLS; i++) {
    w->refused += dc_comm_all_reduce(w->comm, &x, DC_SUM, w->stream) != DC_OK;
  }
}

/* A function on the stream queues more work there than the queue holds, without blocking. */
static int from_own_work(dc_comm *comm, void *arg) {
  (void)arg;
  dc_device *device = NULL;
  own_work w = {.comm = comm, .x = 1};
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  CHECK_OK(dc_stream_create(device, &w.stream));
  CHECK_OK(dc_stream_call(w.stream, reduce_often, &w));
  CHECK_OK(dc_stream_synchronize(w.stream, 0)); /* waits for the function */
  CHECK_OK(dc_stream_synchronize(w.stream, 0)); /* waits for the work that it queued */
  CHECK(w.refused == 0);
  CHECK_OK(dc_comm_check(comm));
  CHECK(w.x == ldexp(1, OWN_CALLS));
  dc_stream_destroy(w.stream);
  dc_device_destroy(device);
  return 0;
}

static void test_from_own_work(void **state) {
  (void)state;
  const int64_t limit = INT64_C(60000000000);
  assert_int_equal(on_threads(2, limit, from_own_work, NULL), 0);
  assert_int_equal(on_processes(2, limit, from_own_work, NULL), 0);
  assert_int_equal(on_tcp(2, limit, from_own_work, NULL), 0);
}

static void test_alone(void **state) {
  (void)state;
  dc_comm *comm = NULL;
  assert_int_equal(dc__comm_create_self(&comm), DC_OK);
  assert_int_equal(overlap(comm, NULL), 0);
  dc_comm_destroy(comm);
}

/* ---- arguments ---- */

#define EXPECT(status, call) assert_int_equal((call), (status))

static void test_bad_arguments(void **state) {
  (void)state;
  dc_comm *comms[65];
  dc_comm *comm = NULL;
  dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = -1};
  EXPECT(DC_E_INVALID, dc_comm_create_threads(0, NULL, comms));
  EXPECT(DC_E_INVALID, dc_comm_create_threads(65, NULL, comms));
  EXPECT(DC_E_INVALID, dc_comm_create_threads(2, NULL, NULL));
  EXPECT(DC_E_INVALID, dc_comm_create_threads(2, &options, comms));
  options.timeout_ns = 0;
  options.heap_bytes = INT64_MAX;
  EXPECT(DC_E_INVALID, dc_comm_create_processes("x", 0, 1, &options, &comm));
  options.heap_bytes = -1;
  EXPECT(DC_E_INVALID, dc_comm_create_processes("x", 0, 1, &options, &comm));
  options.heap_bytes = 0;
  options.reserved0 = 1;
  EXPECT(DC_E_INVALID, dc_comm_create_processes("x", 0, 1, &options, &comm));
  EXPECT(DC_E_INVALID, dc_comm_create_processes(NULL, 0, 1, NULL, &comm));
  EXPECT(DC_E_INVALID, dc_comm_create_processes("", 0, 1, NULL, &comm));
  EXPECT(DC_E_INVALID, dc_comm_create_processes("x", 1, 1, NULL, &comm));
  EXPECT(DC_E_INVALID, dc_comm_create_processes("x", 0, 1, NULL, NULL));
  char long_name[100];
  memset(long_name, 'n', sizeof long_name);
  long_name[81] = '\0';
  EXPECT(DC_E_INVALID, dc_comm_create_processes(long_name, 0, 1, NULL, &comm));
  long_name[80] = '\0';
  EXPECT(DC_OK, dc_comm_create_processes(long_name, 0, 1, NULL, &comm));
  dc_comm_destroy(comm);
  const dc_comm_callbacks none = {.struct_size = sizeof none};
  EXPECT(DC_E_INVALID, dc_comm_create_external(NULL, 0, 1, NULL, &comm));
  EXPECT(DC_E_INVALID, dc_comm_create_external(&none, 0, 1, NULL, &comm));
  assert_null(comm);

  EXPECT(DC_OK, dc_comm_create_threads(1, NULL, &comm));
  int64_t two = 2;
  int64_t three = 3;
  int64_t negative = -1;
  float a[3] = {1, 2, 3};
  float b[3] = {0};
  dc_tensor from = flat(a, &two, DC_FLOAT32);
  dc_tensor to = flat(b, &three, DC_FLOAT32);
  dc_tensor other = flat(b, &two, DC_INT32);
  dc_tensor bytes = flat(b, &two, DC_UINT8);
  dc_tensor shifted = flat(a + 1, &two, DC_FLOAT32);
  EXPECT(DC_E_INVALID, dc_comm_all_gather(NULL, &from, &to, NULL, NULL));
  EXPECT(DC_E_INVALID, dc_comm_all_gather(comm, NULL, &to, NULL, NULL));
  EXPECT(DC_E_SHAPE, dc_comm_all_gather(comm, &from, &to, NULL, NULL));
  EXPECT(DC_E_SHAPE, dc_comm_all_gather(comm, &from, &to, &three, NULL));
  EXPECT(DC_E_INVALID, dc_comm_all_gather(comm, &from, &to, &negative, NULL));
  EXPECT(DC_E_DTYPE, dc_comm_all_gather(comm, &from, &other, NULL, NULL));
  EXPECT(DC_E_DTYPE, dc_comm_all_gather(comm, &bytes, &bytes, NULL, NULL));
  EXPECT(DC_E_INVALID, dc_comm_all_gather(comm, &from, &shifted, NULL, NULL));
  EXPECT(DC_E_SHAPE, dc_comm_reduce_scatter(comm, &from, &to, NULL, DC_SUM, NULL));
  EXPECT(DC_E_INVALID, dc_comm_reduce_scatter(comm, &from, &from, NULL, DC_SUM, NULL));
  EXPECT(DC_E_INVALID, dc_comm_reduce_scatter(comm, &from, &to, NULL, 3, NULL));
  EXPECT(DC_E_DTYPE, dc_comm_all_reduce(comm, &other, DC_MEAN, NULL));
  EXPECT(DC_E_INVALID, dc_comm_broadcast(comm, &from, 1, NULL));
  EXPECT(DC_E_INVALID, dc_comm_barrier(NULL));
  EXPECT(DC_E_INVALID, dc_comm_check(NULL));
  EXPECT(DC_E_INVALID, dc_comm_dup(comm, NULL));
  EXPECT(DC_OK, dc_comm_check(comm)); /* a refused call does no harm */
  assert_int_equal(dc_comm_rank(NULL), -1);
  assert_int_equal(dc_comm_size(NULL), -1);
  dc_comm_abort(NULL, NULL);
  dc_comm_destroy(NULL);
  dc_comm_destroy(comm);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_overlap),       cmocka_unit_test(test_many_copies),   cmocka_unit_test(test_copies_ahead),
      cmocka_unit_test(test_from_own_work), cmocka_unit_test(test_aborted_ahead), cmocka_unit_test(test_alone),
      cmocka_unit_test(test_bad_arguments),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
