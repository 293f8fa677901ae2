/* All-to-alls, gathers and scatters of ranks on simulated cards: through NCCL, also from registered memory and in a
 * graph's capture, and between threads that read each other's memory in place. */
#include "nccl_ranks.h"

enum { LARGEST = 4000 }; /* bytes of a tensor */

static const int64_t second = INT64_C(1000000000);

/* Elements from one rank to another. kind 0: the same for all, 1: ragged, 2: only from rank 0. */
static int64_t sent(int kind, int32_t from, int32_t to) {
  return kind == 0 ? 19 : kind == 1 ? (from * 5 + to * 3) % 4 * 11 : from == 0 ? 7 + to : 0;
}

static int64_t make_side(const card_rank *c, int32_t dtype, int kind, bool sends, int64_t counts[8], char *data) {
  int64_t total = 0;
  for (int32_t r = 0; r < c->r.world; r++) {
    counts[r] = sends ? sent(kind, c->r.rank, r) : sent(kind, r, c->r.rank);
    fill(data + (size_t)total * dc_dtype_size(dtype), dtype, sends ? c->r.rank * 10 + r : r * 10 + c->r.rank,
         counts[r]);
    total += counts[r];
  }
  return total;
}

static void check_bytes(card_rank *c, const void *recv, const char *expected, size_t bytes) {
  char found[LARGEST];
  OK(&c->r, put(c, found, recv, bytes));
  CHECK(&c->r, memcmp(found, expected, bytes) == 0);
}

static void exchange_one(card_rank *c, int32_t dtype, int kind, void *send, void *recv) {
  char data[LARGEST], expected[LARGEST];
  int64_t send_counts[8], recv_counts[8];
  const size_t size = dc_dtype_size(dtype);
  const int64_t out = make_side(c, dtype, kind, true, send_counts, data);
  const int64_t in = make_side(c, dtype, kind, false, recv_counts, expected);
  OK(&c->r, put(c, send, data, (size_t)out * size));
  dc_tensor from = flat(send, &out, dtype), to = flat(recv, &in, dtype);
  OK(&c->r, dc_comm_all_to_all(c->nccl, &from, send_counts, &to, recv_counts, c->stream));
  OK(&c->r, dc_stream_synchronize(c->stream, 0));
  OK(&c->r, dc_comm_check(c->nccl));
  check_bytes(c, recv, expected, (size_t)in * size);
}

/* Gathers to the last rank, and scatters back. */
static void gather_and_scatter(card_rank *c, void *send, void *recv) {
  char data[LARGEST];
  const int32_t root = c->r.world - 1;
  const int64_t each = 40, all = each * c->r.world;
  fill(data, DC_FLOAT32, c->r.rank, each);
  OK(&c->r, put(c, send, data, (size_t)each * 4));
  dc_tensor part = flat(send, &each, DC_FLOAT32), whole = flat(recv, &all, DC_FLOAT32);
  OK(&c->r, dc_comm_gather(c->nccl, &part, c->r.rank == root ? &whole : NULL, NULL, root, c->stream));
  OK(&c->r, dc_stream_synchronize(c->stream, 0));
  memset(data, 0, sizeof data);
  OK(&c->r, put(c, send, data, (size_t)each * 4));
  OK(&c->r, dc_comm_scatter(c->nccl, c->r.rank == root ? &whole : NULL, NULL, &part, root, c->stream));
  OK(&c->r, dc_stream_synchronize(c->stream, 0));
  fill(data, DC_FLOAT32, c->r.rank, each);
  check_bytes(c, send, data, (size_t)each * 4);
}

static void all_of_them(card_rank *c, void *send, void *recv) {
  static const int32_t dtypes[] = {DC_FLOAT32, DC_FLOAT64, DC_BFLOAT16, DC_INT8};
  for (int i = 0; i < 4 && c->r.failure[0] == '\0'; i++) {
    for (int kind = 0; kind < 3 && c->r.failure[0] == '\0'; kind++) {
      exchange_one(c, dtypes[i], kind, send, recv);
    }
  }
  if (c->r.failure[0] == '\0') {
    gather_and_scatter(c, send, recv);
  }
}

static void nothing_left(void) {
  assert_int_equal(cudasim_live(), 0);
}

static void in_plain_memory(card_rank *c) {
  void *send = on_card(c, LARGEST), *recv = on_card(c, LARGEST);
  all_of_them(c, send, recv);
  off_card(c, send, LARGEST);
  off_card(c, recv, LARGEST);
}

static void with_nccl(card_rank *c) {
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  in_plain_memory(c);
}

static void test_parts(void **state) {
  (void)state;
  for (int32_t world = 1; world <= 4; world++) {
    on_cards(world, (meeting)(world % 3), 100 * second, with_nccl);
  }
  assert_true(cudasim_calls("ncclSend") > 0);
  nothing_left();
}

/* By rank, the input, the output, both or neither are in registered memory. */
static void in_registered_memory(card_rank *c) {
  void *memory[2];
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  for (int i = 0; i < 2; i++) {
    if ((c->r.rank >> i & 1) != 0) {
      OK(&c->r, c->nccl->ops->heap_alloc(c->nccl, LARGEST, &memory[i]));
    } else {
      memory[i] = on_card(c, LARGEST);
    }
  }
  all_of_them(c, memory[0], memory[1]);
  for (int i = 0; i < 2; i++) {
    if ((c->r.rank >> i & 1) != 0) {
      c->nccl->ops->heap_free(c->nccl, memory[i], LARGEST);
    } else {
      off_card(c, memory[i], LARGEST);
    }
  }
}

static void test_registered_memory(void **state) {
  (void)state;
  on_cards(4, ON_PROCESSES, 100 * second, in_registered_memory);
  nothing_left();
}

static void without_nccl(card_rank *c) {
  OK(&c->r, dc_comm_dup(c->r.comm, &c->nccl));
  in_plain_memory(c);
}

static void test_in_place(void **state) {
  (void)state;
  for (int32_t world = 1; world <= 4; world++) {
    on_cards(world, ON_THREADS, 100 * second, without_nccl);
  }
  nothing_left();
}

/* Rank 1 sends one element more than rank 0 expects. */
static void with_other_counts(card_rank *c) {
  void *send = on_card(c, LARGEST), *recv = on_card(c, LARGEST);
  const int64_t counts[2] = {5, 5}, more[2] = {6, 5}, ten = 10, eleven = 11;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  dc_tensor from = flat(send, c->r.rank == 1 ? &eleven : &ten, DC_FLOAT32), to = flat(recv, &ten, DC_FLOAT32);
  dc_status status = dc_comm_all_to_all(c->nccl, &from, c->r.rank == 1 ? more : counts, &to, counts, c->stream);
  (void)dc_stream_synchronize(c->stream, 0);
  status = status == DC_OK ? dc_comm_check(c->nccl) : status;
  for (int i = 0; i < 1000 && status == DC_OK; i++) { /* rank 1 learns of it later */
    nanosleep(&(struct timespec){0, 10000000}, NULL);
    status = dc_comm_check(c->nccl);
  }
  CHECK(&c->r, status == DC_E_MISMATCH);
  CHECK(&c->r, strstr(dc_last_error(), "rank 1 sends 6 elements to rank 0, which expects 5") != NULL);
  off_card(c, send, LARGEST);
  off_card(c, recv, LARGEST);
}

static void test_other_counts(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, with_other_counts);
}

#define TEST(name) cmocka_unit_test_setup(name, clean_state)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_parts),
      TEST(test_registered_memory),
      TEST(test_in_place),
      TEST(test_other_counts),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
