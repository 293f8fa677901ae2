/* Errors between ranks on NCCL: versions, ranks that never come, errors that arrive later, aborts, and every call
 * failing in turn. Each gives a status and a text on every rank, and nothing leaks. */
#include "comm/shm/shm.h"
#include "nccl_ranks.h"

static const int64_t second = INT64_C(1000000000);
static const int64_t brief = INT64_C(2000000000); /* once the group exists, whose setup has no such deadline */

enum { COUNT = 64 };

static void nothing_left(void) {
  assert_int_equal(cudasim_live(), 0);
}

static bool says(const char *text) {
  return strstr(dc_last_error(), text) != NULL;
}

/* ---- before there is a communicator ---- */

static void refuses_arguments(card_rank *c) {
  dc_device *cpu, *other;
  dc_stream *stream;
  int64_t count = COUNT;
  FAILS(&c->r, dc_comm_create_nccl(NULL, c->r.device, &c->nccl), DC_E_INVALID, "comm is NULL");
  FAILS(&c->r, dc_comm_create_nccl(c->r.comm, NULL, &c->nccl), DC_E_INVALID, "device is NULL");
  FAILS(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, NULL), DC_E_INVALID, "nccl is NULL");
  FAILS(&c->r, dc_nccl_get_version(NULL), DC_E_INVALID, "version is NULL");
  OK(&c->r, dc_device_open("cpu", NULL, &cpu));
  dc_status status = dc_comm_create_nccl(c->r.comm, cpu, &c->nccl);
  dc_device_destroy(cpu);
  CHECK(&c->r, status == DC_E_UNSUPPORTED && says("device \"cpu\" is no card"));
  c->r.comm->world = 257; /* too large a group to be made here */
  status = dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl);
  c->r.comm->world = 1;
  CHECK(&c->r, status == DC_E_UNSUPPORTED && says("the communicator has 257 ranks, must have at most 256"));
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, dc_device_open("cuda:5", NULL, &other));
  status = dc_stream_create(other, &stream);
  dc_tensor t = flat(&status, &count, DC_FLOAT32); /* must not be read */
  if (status == DC_OK) {
    status = dc_comm_all_reduce(c->nccl, &t, DC_SUM, stream);
    dc_stream_destroy(stream);
  }
  dc_device_destroy(other);
  CHECK(&c->r, status == DC_E_INVALID && says("cannot exchange memory of device \"cuda:5\", it was made for another"));
}

static void test_arguments(void **state) {
  (void)state;
  on_cards(1, ON_THREADS, 100 * second, refuses_arguments);
  nothing_left();
}

static void finds_none(card_rank *c) {
  CHECK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl) == DC_E_UNSUPPORTED);
  CHECK(&c->r, says("is version 2.18.5, 2.19 or later is needed"));
  OK(&c->r, dc_comm_check(c->r.comm)); /* no rank waits for another, so they go on without NCCL */
  OK(&c->r, dc_comm_barrier(c->r.comm));
}

static void test_versions(void **state) {
  (void)state;
  int32_t version = 0;
  assert_int_equal(dc_nccl_get_version(&version), DC_OK);
  assert_int_equal(version, 22907);
  ncclsim_set_version(21805);
  on_cards(2, ON_PROCESSES, 100 * second, finds_none);
  ncclsim_set_version(2804);
  assert_int_equal(dc_nccl_get_version(&version), DC_E_UNSUPPORTED);
  assert_true(says("is version 2.8.4, 2.19 or later is needed"));
  assert_int_equal(version, 22907); /* an error does not change it */
  ncclsim_reset();
  assert_int_equal(setenv("LIBDC_CUDA_LIB_DIR", "/nowhere", 1), 0);
  assert_int_equal(dc_nccl_get_version(&version), DC_E_UNSUPPORTED);
  assert_true(says("NCCL: there is none: /nowhere/libnccl.so.2: cannot open"));
  unsetenv("LIBDC_CUDA_LIB_DIR");
  nothing_left();
}

static void must_not_block(card_rank *c) {
  FAILS(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl), DC_E_INVALID,
        "NCCL: the environment's NCCL_COMM_BLOCKING = \"1\", must be 0 or not be set");
  OK(&c->r, dc_comm_barrier(c->r.comm));
}

static void may_be_created(card_rank *c) {
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
}

static void test_environment(void **state) {
  (void)state;
  assert_int_equal(setenv("NCCL_COMM_BLOCKING", "1", 1), 0);
  on_cards(2, ON_PROCESSES, 100 * second, must_not_block);
  assert_int_equal(cudasim_calls("ncclCommInitRankConfig"), 0);
  assert_int_equal(setenv("NCCL_COMM_BLOCKING", "0", 1), 0);
  on_cards(2, ON_PROCESSES, 100 * second, may_be_created);
  unsetenv("NCCL_COMM_BLOCKING");
  nothing_left();
}

/* One of two ranks finds no NCCL; which one is not known. */
static void one_has_none(card_rank *c) {
  CHECK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl) == DC_E_UNSUPPORTED);
  CHECK(&c->r, says("ncclGetVersion of") || says("has none that can be used"));
  OK(&c->r, dc_comm_barrier(c->r.comm));
}

static void test_one_rank_without(void **state) {
  (void)state;
  cudasim_fail("ncclGetVersion", 1, 2);
  on_cards(2, ON_PROCESSES, 100 * second, one_has_none);
  nothing_left();
}

/* ---- ranks that never come ---- */

/* The rank whose deadline expires first tells the others. */
static bool is_late(dc_status status) {
  return (status == DC_E_TIMEOUT || status == DC_E_ABORTED) && says("s at ") &&
         says("a card or a rank does not answer");
}

static void starts_alone(card_rank *c) {
  ((dc__shm *)c->r.comm)->group->timeout_ns = brief; /* also of the copy that NCCL uses as its bootstrap */
  CHECK(&c->r, is_late(dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl)));
  CHECK(&c->r, says("the start of NCCL"));
  CHECK(&c->r, dc_comm_check(c->r.comm) != DC_OK); /* and the group has failed */
}

static void test_a_rank_never_starts(void **state) {
  (void)state;
  ncclsim_stall(1);
  on_cards(2, ON_PROCESSES, 100 * second, starts_alone);
  nothing_left();
}

/* Runs an all-gather on the rank's stream. Returns the communicator's status afterwards. */
static dc_status gather(card_rank *c, int64_t count, float *block) {
  int64_t all = count * c->r.world;
  dc_tensor from = flat(block, &count, DC_FLOAT32), to = flat(block + COUNT, &all, DC_FLOAT32);
  dc_status status = dc_comm_all_gather(c->nccl, &from, &to, NULL, c->stream);
  status = status != DC_OK ? status : dc_stream_synchronize(c->stream, 0);
  return status != DC_OK ? status : dc_comm_check(c->nccl);
}

/* Once all ranks have their communicators, calls `before` on rank 0, and gathers with this deadline for NCCL. */
static dc_status gather_after(card_rank *c, void (*before)(void), int64_t count, int64_t timeout_ns) {
  enum { BYTES = 16 * COUNT * sizeof(float) };
  float *block = on_card(c, BYTES);
  dc_status status = dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl);
  status = status != DC_OK ? status : dc_comm_barrier(c->nccl);
  if (c->r.rank == 0) {
    before();
  }
  status = status != DC_OK ? status : dc_comm_barrier(c->nccl);
  if (status == DC_OK) {
    c->nccl->timeout_ns = timeout_ns;
    status = gather(c, count, block);
  }
  off_card(c, block, BYTES);
  return status;
}

static void stall_one(void) {
  ncclsim_stall(1);
}

static void gathers_alone(card_rank *c) {
  CHECK(&c->r, is_late(gather_after(c, stall_one, COUNT, brief)));
  CHECK(&c->r, says("all_gather"));
  dc_status first = dc_comm_check(c->nccl);
  CHECK(&c->r, first != DC_OK && dc_comm_barrier(c->nccl) == first); /* the failure is permanent */
  CHECK(&c->r, dc_comm_check(c->r.comm) != DC_OK);
}

static void test_a_rank_hangs(void **state) {
  (void)state;
  on_cards(3, ON_PROCESSES, 100 * second, gathers_alone);
  nothing_left();
}

static void aborts(card_rank *c) {
  if (c->r.rank == 0) {
    CHECK(&c->r, gather_after(c, stall_one, COUNT, 100 * second) == DC_E_ABORTED);
  } else {
    enum { BYTES = 16 * COUNT * sizeof(float) };
    float *block = on_card(c, BYTES);
    int64_t count = COUNT, all = COUNT * c->r.world;
    dc_tensor from = flat(block, &count, DC_FLOAT32), to = flat(block + COUNT, &all, DC_FLOAT32);
    OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
    OK(&c->r, dc_comm_barrier(c->nccl));
    OK(&c->r, dc_comm_barrier(c->nccl));
    OK(&c->r, dc_comm_all_gather(c->nccl, &from, &to, NULL, c->stream));
    dc_comm_abort(c->nccl, "seen enough");
    OK(&c->r, dc_stream_synchronize(c->stream, 0));
    off_card(c, block, BYTES);
    CHECK(&c->r, dc_comm_check(c->nccl) == DC_E_ABORTED);
  }
  CHECK(&c->r, says("rank 1 aborted the group: seen enough"));
}

static void test_an_abort_ends_nccl(void **state) {
  (void)state;
  on_cards(2, ON_TCP, 100 * second, aborts);
  (void)clean_state(NULL);
  on_cards(2, ON_PROCESSES, 100 * second, aborts); /* much longer than the test */
  assert_int_equal(cudasim_calls("ncclCommAbort"), 2);
  nothing_left();
}

/* ---- errors that arrive later ---- */

static void break_one(void) {
  ncclsim_break(1, DC__NCCL_REMOTE_ERROR);
}

static void breaks(card_rank *c) {
  dc_status status = gather_after(c, break_one, COUNT, 100 * second);
  CHECK(&c->r, status == (c->r.rank == 1 ? DC_E_PEER_DEAD : DC_E_ABORTED));
  CHECK(&c->r, says("NCCL 2.29.7 on rank 1: ") && says("remote process exited or there was a network error (6)"));
}

static void test_an_asynchronous_error(void **state) {
  (void)state;
  on_cards(3, ON_THREADS, 100 * second, breaks);
  nothing_left();
}

static void do_nothing(void) {}

static void mismatches(card_rank *c) {
  int groups = cudasim_calls("ncclGroupStart");
  CHECK(&c->r, gather_after(c, do_nothing, COUNT - c->r.rank, 100 * second) == DC_E_MISMATCH);
  CHECK(&c->r, says("rank 1 called all_gather (126 elements") && cudasim_calls("ncclGroupStart") == groups);
}

static void test_a_mismatch_is_found_first(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, mismatches);
  nothing_left();
}

/* A lost device's groups never run, and the other rank learns of it. */
static void loses_card(card_rank *c) {
  dc_status status = gather_after(c, do_nothing, COUNT, 100 * second);
  CHECK(&c->r, status == DC_OK);
  int64_t count = COUNT;
  float *block = on_card(c, COUNT * sizeof *block);
  dc_tensor data = flat(block, &count, DC_FLOAT32);
  if (c->r.rank == 0) {
    cudasim_fail("cuLaunchKernel", 0, 700);
  }
  status = dc_comm_all_reduce(c->nccl, &data, DC_SUM, c->stream);
  status = status != DC_OK ? status : dc_stream_synchronize(c->stream, 0);
  status = status != DC_OK ? status : dc_comm_check(c->nccl);
  bool named = says("CUDA_ERROR_ILLEGAL_ADDRESS");
  off_card(c, block, COUNT * sizeof *block);
  CHECK(&c->r, (status == DC_E_DEVICE || status == DC_E_ABORTED) && named);
}

static void test_a_lost_device(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, loses_card);
}

static dc_status no_event(dc_device *device, dc_event **event) {
  (void)event;
  return dc__fail(DC_E_DEVICE, "device \"%s\" has no event", device->name);
}

/* The first collective in flight needs events; the device's error becomes the communicator's. */
static void has_no_events(card_rank *c) {
  static dc__device_ops without[2];
  without[c->r.rank] = *c->r.device->ops;
  without[c->r.rank].event_create = no_event;
  c->r.device->ops = &without[c->r.rank];
  dc_status status = gather_after(c, do_nothing, COUNT, 100 * second);
  CHECK(&c->r, (status == DC_E_DEVICE || status == DC_E_ABORTED) && says("has no event"));
}

static void test_a_device_without_events(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, has_no_events);
  nothing_left();
}

/* ---- ranks that end later ---- */

/* A rank's end of NCCL waits for the other rank's, and that rank waits for one that has destroyed its communicator. */
static void ends_before_its_peer(card_rank *c) {
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  if (c->r.rank == 0) {
    dc_comm_destroy(c->nccl);
    c->nccl = NULL;
  }
  OK(&c->r, dc_comm_barrier(c->r.comm));
}

static void test_an_end_waits_for_no_rank(void **state) {
  (void)state;
  ncclsim_end_together();
  on_cards(2, ON_PROCESSES, 100 * second, ends_before_its_peer);
  for (int i = 0; i < 30000 && cudasim_live() > 0; i++) {
    usleep(1000); /* a thread of libdc ends the first rank's communicator */
  }
  nothing_left();
}

/* ---- every call failing in turn ---- */

static void use_all(card_rank *c) {
  enum { BYTES = 16 * COUNT * sizeof(float) };
  float *block = on_card(c, BYTES);
  int64_t count = COUNT, all = COUNT * c->r.world;
  dc_comm *copy = NULL;
  if (dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl) == DC_OK && dc_comm_dup(c->nccl, &copy) == DC_OK) {
    dc_tensor from = flat(block, &count, DC_FLOAT32), to = flat(block + COUNT, &all, DC_FLOAT32);
    void *heap = NULL;
    bool has_heap = copy->ops->heap_alloc(copy, BYTES, &heap) == DC_OK;
    float *at = has_heap ? heap : block; /* otherwise the other rank would wait for this one */
    dc_tensor in_window = flat(at, &count, DC_FLOAT32), all_in_window = flat(at + COUNT, &all, DC_FLOAT32);
    (void)dc_comm_all_gather(copy, &in_window, &all_in_window, NULL, c->stream);
    (void)dc_stream_synchronize(c->stream, 0);
    if (has_heap) {
      copy->ops->heap_free(copy, heap, BYTES);
    }
    (void)dc_comm_all_gather(c->nccl, &from, &to, NULL, c->stream);
    (void)dc_comm_broadcast(copy, &to, 0, c->stream);
    (void)dc_comm_all_reduce(copy, &to, DC_MEAN, c->stream);
    (void)dc_stream_synchronize(c->stream, 0);
  }
  dc_comm_destroy(copy);
  off_card(c, block, BYTES);
}

static void test_every_call_fails(void **state) {
  (void)state;
  static const char *const functions[] = {
#define X(name, result, arguments) #name,
      DC__NCCL_FUNCTIONS(X) DC__NCCL_OPTIONAL_FUNCTIONS(X)
#undef X
  };
  static const int errors[] = {1, 2, 3, 4, 5, 6};
  int calls[DC__COUNT(functions)];
  on_cards(2, ON_PROCESSES, 100 * second, use_all);
  nothing_left();
  for (size_t f = 0; f < DC__COUNT(functions); f++) {
    calls[f] = cudasim_calls(functions[f]);
  }
  for (size_t f = 0; f < DC__COUNT(functions); f++) {
    int most = calls[f] < 5 ? calls[f] : 5;
    for (int before = 0; before < most; before++) {
      clean_state(state);
      cudasim_fail(functions[f], before, errors[(f + (size_t)before) % DC__COUNT(errors)]);
      on_cards(2, ON_PROCESSES, 100 * second, use_all);
      if (cudasim_live() != 0 || cudasim_depth() != 0) {
        fail_msg("%s, call %d: %d things stay behind", functions[f], before, cudasim_live());
      }
    }
  }
}

#define TEST(name) cmocka_unit_test_setup(name, clean_state)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_arguments),
      TEST(test_environment),
      TEST(test_versions),
      TEST(test_one_rank_without),
      TEST(test_a_rank_never_starts),
      TEST(test_a_rank_hangs),
      TEST(test_an_abort_ends_nccl),
      TEST(test_an_asynchronous_error),
      TEST(test_a_mismatch_is_found_first),
      TEST(test_a_lost_device),
      TEST(test_a_device_without_events),
      TEST(test_an_end_waits_for_no_rank),
      TEST(test_every_call_fails),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
