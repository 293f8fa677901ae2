/* Cards of one process that read each other's memory in place. Tested: when access is enabled; memory that cannot be
 * read; devices that are opened and closed; each call failing in turn. nccl/test_collective.c and the conformance suite
 * check the data. */
#include "nccl_ranks.h"

static const int64_t deadline = INT64_C(100000000000);
static const char *const functions[] = {"cuDeviceCanAccessPeer", "cuCtxEnablePeerAccess", "cuMemPoolSetAccess",
                                        "cuPointerGetAttribute"};

/* data[1] and on: all ranks' data[0]. */
static dc_status gather(card_rank *c, int32_t *data, dc_stream *stream) {
  const int64_t one = 1, all = c->r.world;
  const dc_tensor from = flat(data, &one, DC_INT32);
  dc_tensor to = flat(data + 1, &all, DC_INT32);
  dc_status status = dc_comm_all_gather(c->r.comm, &from, &to, NULL, stream);
  status = status != DC_OK ? status : dc_stream_synchronize(c->stream, 0);
  return status != DC_OK ? status : dc_comm_check(c->r.comm);
}

/* Each rank contributes its number plus 1. */
static dc_status pass(card_rank *c, int32_t *data) {
  int32_t own = c->r.rank + 1;
  dc_status status = put(c, data, &own, sizeof own);
  return status != DC_OK ? status : gather(c, data, c->stream);
}

static bool arrived(card_rank *c, const int32_t *data) {
  int32_t found[8];
  bool right = put(c, found, data + 1, sizeof *data * (size_t)c->r.world) == DC_OK;
  for (int32_t r = 0; r < c->r.world; r++) {
    right = right && found[r] == r + 1;
  }
  return right;
}

enum { BYTES = 9 * sizeof(int32_t) };

/* ---- when ---- */

static void passes_thrice(card_rank *c) {
  int32_t *data = on_card(c, BYTES);
  for (int i = 0; i < 3; i++) {
    OK(&c->r, pass(c, data));
    CHECK(&c->r, arrived(c, data));
  }
  off_card(c, data, BYTES);
}

static void test_a_pair_is_opened_once(void **state) {
  (void)state;
  on_cards(3, ON_THREADS, deadline, passes_thrice);
  assert_int_equal(cudasim_calls("cuDeviceCanAccessPeer"), 6); /* for each pair in both directions */
  assert_int_equal(cudasim_calls("cuCtxEnablePeerAccess"), 6);
  assert_int_equal(cudasim_calls("cuMemPoolSetAccess"), 6);
  assert_int_equal(cudasim_live(), 0);
}

static void test_one_card_opens_nothing(void **state) {
  (void)state;
  one_card = true;
  on_cards(3, ON_THREADS, deadline, passes_thrice);
  one_card = false;
  for (size_t i = 0; i < DC__COUNT(functions); i++) {
    assert_int_equal(cudasim_calls(functions[i]), 0);
  }
}

/* ---- what cannot be read ---- */

static void is_refused(card_rank *c) {
  int32_t *data = on_card(c, BYTES);
  FAILS(&c->r, pass(c, data), DC_E_UNSUPPORTED, "the cards have no peer access; dc_comm_create_nccl() needs none");
  CHECK(&c->r, strstr(dc_last_error(), "all_gather") != NULL && strstr(dc_last_error(), "rank 2") != NULL);
  CHECK(&c->r, strstr(dc_last_error(), "\"cuda:0\"") != NULL && strstr(dc_last_error(), "\"cuda:2\"") != NULL);
  off_card(c, data, BYTES);
}

static void test_cards_without_access(void **state) {
  (void)state;
  cudasim_deny_peer_access(0, 2);
  on_cards(3, ON_THREADS, deadline, is_refused);
  assert_int_equal(cudasim_lost(), 0);
  assert_int_equal(cudasim_live(), 0);
}

static int from_pool;

static void offers_what_is_not_ours(card_rank *c) {
  int32_t *data = cudasim_alloc(c->r.rank, BYTES, from_pool);
  const dc_status status = pass(c, data);
  const bool right = from_pool != 0 ? status == DC_E_UNSUPPORTED &&
                                          strstr(dc_last_error(), "its allocator must give the other cards access")
                                    : status == DC_OK && arrived(c, data);
  CHECK(&c->r, right);
  cudasim_free(data);
}

static void test_memory_of_others(void **state) {
  (void)state;
  for (from_pool = 0; from_pool < 2; from_pool++) {
    on_cards(2, ON_THREADS, deadline, offers_what_is_not_ours);
    assert_int_equal(cudasim_lost(), 0);
    assert_int_equal(cudasim_live(), 0);
  }
}

static void offers_the_hosts(card_rank *c) {
  int32_t *data = on_card(c, BYTES), host[9] = {0};
  dc_status status = c->r.rank == 0 ? gather(c, host, NULL) : gather(c, data, c->stream);
  CHECK(&c->r, status == DC_E_MISMATCH && strstr(dc_last_error(), "with memory of another device") != NULL);
  off_card(c, data, BYTES);
}

static void test_a_host_and_a_card(void **state) {
  (void)state;
  on_cards(2, ON_THREADS, deadline, offers_the_hosts);
  assert_int_equal(cudasim_live(), 0);
}

/* ---- devices that come and go ---- */

/* Rank 1 uses memory of a device that was opened after the first collective. */
static void opens_another(card_rank *c) {
  char name[16];
  dc_device *second = NULL;
  void *data = on_card(c, BYTES), *later = NULL;
  OK(&c->r, pass(c, data));
  off_card(c, data, BYTES);
  snprintf(name, sizeof name, "cuda:%d", c->r.rank);
  OK(&c->r, dc_device_open(name, NULL, &second));
  dc_status status = second->ops->alloc(second, BYTES, DC_MEMORY_DEVICE, &later);
  status = status != DC_OK ? status : pass(c, later);
  const bool right = status == DC_OK && arrived(c, later);
  second->ops->free(second, later, BYTES, DC_MEMORY_DEVICE);
  dc_device_destroy(second);
  CHECK(&c->r, right);
  data = on_card(c, BYTES); /* what the other device closed is not what this one has */
  OK(&c->r, pass(c, data));
  CHECK(&c->r, arrived(c, data));
  off_card(c, data, BYTES);
}

static void test_a_device_opened_later(void **state) {
  (void)state;
  on_cards(2, ON_THREADS, deadline, opens_another);
  assert_int_equal(cudasim_calls("cuCtxEnablePeerAccess"), 2);
  assert_int_equal(cudasim_calls("cuMemPoolSetAccess"), 4);
  assert_int_equal(cudasim_live(), 0);
}

/* Peer access ends when a card is closed, so a card that is opened again enables it again, though another handle stays
 * open. */
static void test_a_card_opened_again(void **state) {
  (void)state;
  dc_device *stays = NULL;
  assert_int_equal(dc_device_open("cuda:0", NULL, &stays), DC_OK);
  for (int i = 1; i <= 2; i++) {
    on_cards(2, ON_THREADS, deadline, passes_thrice);
    assert_int_equal(cudasim_calls("cuCtxEnablePeerAccess"), 2 * i);
  }
  dc_device_destroy(stays);
  assert_int_equal(cudasim_live(), 0);
}

/* ---- each call failing ---- */

static int failures;

static void may_fail(card_rank *c) {
  char name[16];
  dc_device *second = NULL;
  int32_t *data = on_card(c, BYTES);
  snprintf(name, sizeof name, "cuda:%d", c->r.rank);
  dc_status status = pass(c, data);
  CHECK(&c->r, status != DC_OK || arrived(c, data));
  CHECK(&c->r, status == DC_OK || strstr(dc_last_error(), "rank") != NULL);
  status = status != DC_OK ? status : dc_device_open(name, NULL, &second);
  if (status != DC_OK) {
    __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
  }
  dc_device_destroy(second);
  off_card(c, data, BYTES);
}

static void test_each_call_fails(void **state) {
  (void)state;
  for (size_t f = 0; f < DC__COUNT(functions); f++) {
    clean_state(NULL);
    on_cards(2, ON_THREADS, deadline, may_fail);
    const int calls = cudasim_calls(functions[f]);
    assert_true(calls >= 2);
    for (int before = 0; before < calls; before++) {
      clean_state(NULL);
      failures = 0;
      cudasim_fail(functions[f], before, 1);
      on_cards(2, ON_THREADS, deadline, may_fail);
      assert_true(failures > 0 || cudasim_calls(functions[f]) <= before); /* ranks may divide the calls differently */
      assert_int_equal(cudasim_live(), 0);
      assert_int_equal(cudasim_lost(), 0);
    }
  }
}

#define TEST(name) cmocka_unit_test_setup(name, clean_state)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_a_pair_is_opened_once), TEST(test_one_card_opens_nothing), TEST(test_cards_without_access),
      TEST(test_memory_of_others),      TEST(test_a_host_and_a_card),      TEST(test_a_device_opened_later),
      TEST(test_a_card_opened_again),   TEST(test_each_call_fails),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
