/* Collectives of ranks on simulated cards through NCCL, compared with plain C: every type, even and ragged parts,
 * groups; with processes, threads and the caller's collectives as the bootstrap; and the calls of NCCL. */
#include "nccl_ranks.h"

enum { COUNT = 700, TYPES = 7 };

static const int32_t dtypes[TYPES] = {DC_FLOAT32, DC_FLOAT64, DC_FLOAT16, DC_BFLOAT16, DC_INT8, DC_INT32, DC_INT64};
static const int64_t second = INT64_C(1000000000);

/* Elements of each rank: the same for all, ragged with an empty part, or all on one rank. */
static int64_t parts(int32_t world, int kind, int64_t counts[8]) {
  int64_t total = 0;
  for (int32_t r = 0; r < world; r++) {
    counts[r] = kind == 0 ? 37 : kind == 1 ? (r * 53) % 71 : r == world - 1 ? 129 : 0;
    total += counts[r];
  }
  return total;
}

static int64_t before(const int64_t *counts, int32_t last) {
  int64_t sum = 0;
  for (int32_t r = 0; r < last; r++) {
    sum += counts[r];
  }
  return sum;
}

/* recv on the device equals the expected bytes. */
static bool same(card_rank *c, const void *recv, const void *expected, size_t bytes) {
  char found[COUNT * 8];
  return put(c, found, recv, bytes) == DC_OK && memcmp(found, expected, bytes) == 0;
}

static void gather_one(card_rank *c, int32_t dtype, int kind, void *send, void *recv) {
  int64_t counts[8];
  char whole[COUNT * 8], mine[COUNT * 8];
  int64_t total = parts(c->r.world, kind, counts);
  size_t size = dc_dtype_size(dtype);
  for (int32_t r = 0; r < c->r.world; r++) {
    fill(whole + (size_t)before(counts, r) * size, dtype, r + kind, counts[r]);
  }
  fill(mine, dtype, c->r.rank + kind, counts[c->r.rank]);
  OK(&c->r, put(c, send, mine, (size_t)counts[c->r.rank] * size));
  dc_tensor from = flat(send, &counts[c->r.rank], dtype), to = flat(recv, &total, dtype);
  OK(&c->r, dc_comm_all_gather(c->nccl, &from, &to, counts, c->stream));
  OK(&c->r, dc_stream_synchronize(c->stream, 0));
  OK(&c->r, dc_comm_check(c->nccl));
  CHECK(&c->r, same(c, recv, whole, (size_t)total * size));
}

static void reduce_one(card_rank *c, int32_t dtype, int kind, void *send, void *recv) {
  int64_t counts[8];
  char whole[8][COUNT * 8], expected[COUNT * 8];
  int64_t total = parts(c->r.world, kind, counts);
  size_t size = dc_dtype_size(dtype);
  const void *sources[8];
  int32_t op = dc__dtype_is_float(dtype) && kind != 1 ? DC_MEAN : DC_SUM;
  for (int32_t r = 0; r < c->r.world; r++) {
    fill(whole[r], dtype, r * 5 + kind, total);
    sources[r] = whole[r] + (size_t)before(counts, c->r.rank) * size;
  }
  int64_t own = counts[c->r.rank];
  dc__reduce(&(dc__reduction){.dst = expected,
                              .src = sources,
                              .count = own,
                              .dst_dtype = dtype,
                              .src_dtype = dtype,
                              .n = c->r.world,
                              .mean = op == DC_MEAN});
  OK(&c->r, put(c, send, whole[c->r.rank], (size_t)total * size));
  dc_tensor from = flat(send, &total, dtype), to = flat(recv, &own, dtype);
  OK(&c->r, dc_comm_reduce_scatter(c->nccl, &from, &to, counts, op, c->stream));
  OK(&c->r, dc_stream_synchronize(c->stream, 0));
  OK(&c->r, dc_comm_check(c->nccl));
  CHECK(&c->r, same(c, recv, expected, (size_t)own * size));
}

static void all_reduce_one(card_rank *c, int32_t dtype, void *data) {
  char whole[8][COUNT * 8], expected[COUNT * 8];
  const void *sources[8];
  int64_t count = 131;
  for (int32_t r = 0; r < c->r.world; r++) {
    fill(whole[r], dtype, r * 3, count);
    sources[r] = whole[r];
  }
  dc__reduce(&(dc__reduction){
      .dst = expected, .src = sources, .count = count, .dst_dtype = dtype, .src_dtype = dtype, .n = c->r.world});
  OK(&c->r, put(c, data, whole[c->r.rank], (size_t)count * dc_dtype_size(dtype)));
  dc_tensor tensor = flat(data, &count, dtype);
  OK(&c->r, dc_comm_all_reduce(c->nccl, &tensor, DC_SUM, c->stream));
  OK(&c->r, dc_stream_synchronize(c->stream, 0));
  CHECK(&c->r, same(c, data, expected, (size_t)count * dc_dtype_size(dtype)));
}

static void broadcast_one(card_rank *c, int32_t dtype, void *data) {
  char expected[COUNT * 8];
  int64_t count = 99;
  fill(expected, dtype, 77, count);
  size_t bytes = (size_t)count * dc_dtype_size(dtype);
  if (c->r.rank == c->r.world - 1) {
    OK(&c->r, put(c, data, expected, bytes));
  }
  dc_tensor tensor = flat(data, &count, dtype);
  OK(&c->r, dc_comm_broadcast(c->nccl, &tensor, c->r.world - 1, c->stream));
  OK(&c->r, dc_stream_synchronize(c->stream, 0));
  CHECK(&c->r, same(c, data, expected, bytes));
}

static void all_of_them(card_rank *c) {
  void *send = on_card(c, COUNT * 8), *recv = on_card(c, COUNT * 8);
  CHECK(&c->r, dc_comm_rank(c->nccl) == c->r.rank && dc_comm_size(c->nccl) == c->r.world);
  for (int i = 0; i < TYPES && c->r.failure[0] == '\0'; i++) {
    for (int kind = 0; kind < 3 && c->r.failure[0] == '\0'; kind++) {
      gather_one(c, dtypes[i], kind, send, recv);
      if (c->r.failure[0] == '\0') {
        reduce_one(c, dtypes[i], kind, send, recv);
      }
    }
    if (c->r.failure[0] == '\0') {
      all_reduce_one(c, dtypes[i], send);
    }
    if (c->r.failure[0] == '\0') {
      broadcast_one(c, dtypes[i], recv);
    }
  }
  off_card(c, send, COUNT * 8);
  off_card(c, recv, COUNT * 8);
}

static void with_nccl(card_rank *c) {
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  all_of_them(c);
}

static void nothing_left(void) {
  assert_int_equal(cudasim_live(), 0);
}

static void test_every_type_and_split(void **state) {
  (void)state;
  for (int32_t world = 1; world <= 4; world++) {
    on_cards(world, (meeting)(world % 3), 100 * second, with_nccl);
  }
  assert_true(cudasim_calls("ncclAllGather") > 0 && cudasim_calls("ncclBroadcast") > 0 &&
              cudasim_calls("ncclSend") > 0);
  nothing_left();
}

/* Some ranks send from registered memory; all receive in memory that is not registered. */
static void from_registered_memory(card_rank *c) {
  void *send = NULL, *recv = on_card(c, COUNT * 8);
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  if (c->r.rank % 2 == 0) {
    OK(&c->r, c->nccl->ops->heap_alloc(c->nccl, COUNT * 8, &send));
  } else {
    send = on_card(c, COUNT * 8);
  }
  for (int kind = 0; kind < 3 && c->r.failure[0] == '\0'; kind++) {
    reduce_one(c, DC_FLOAT32, kind, send, recv);
    if (c->r.failure[0] == '\0') {
      gather_one(c, DC_FLOAT32, kind, send, recv);
    }
  }
  if (c->r.rank % 2 == 0) {
    c->nccl->ops->heap_free(c->nccl, send, COUNT * 8);
  } else {
    off_card(c, send, COUNT * 8);
  }
  off_card(c, recv, COUNT * 8);
}

static void test_registered_memory(void **state) {
  (void)state;
  for (int32_t world = 2; world <= 3; world++) {
    on_cards(world, ON_PROCESSES, 100 * second, from_registered_memory);
  }
  assert_true(cudasim_calls("ncclCommRegister") > 0);
  nothing_left();
}

/* Ranks as threads that read each other's memory in place. */
static void without_nccl(card_rank *c) {
  OK(&c->r, dc_comm_dup(c->r.comm, &c->nccl));
  all_of_them(c);
}

static void test_in_place(void **state) {
  (void)state;
  for (int32_t world = 1; world <= 4; world++) {
    one_card = true;
    on_cards(world, ON_THREADS, 100 * second, without_nccl);
    assert_int_equal(cudasim_calls("cuMemPoolSetAccess"), 0);
    one_card = false;
  }
  for (int32_t world = 2; world <= 4; world++) {
    on_cards(world, ON_THREADS, 100 * second, without_nccl);
  }
  assert_int_equal(cudasim_calls("ncclGroupStart"), 0);
  nothing_left();
}

/* ---- more than one at a time ---- */

/* Data in the host's memory goes over the bootstrap communicator, and a copy works like the original. */
static void hosts_and_copies(card_rank *c) {
  dc_comm *copy;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, dc_comm_dup(c->nccl, &copy));
  int64_t one = 1, count = c->r.world;
  int32_t mine = c->r.rank + 10, all[8] = {0};
  dc_tensor from = flat(&mine, &one, DC_INT32), to = flat(all, &count, DC_INT32);
  dc_status status = dc_comm_all_gather(copy, &from, &to, NULL, NULL);
  status = status != DC_OK ? status : dc_comm_barrier(copy);
  status = status != DC_OK ? status : dc_comm_all_reduce(copy, &from, DC_SUM, NULL);
  dc_comm_destroy(copy);
  OK(&c->r, status);
  CHECK(&c->r, all[c->r.world - 1] == c->r.world + 9 && mine == 10 * c->r.world + c->r.world * (c->r.world - 1) / 2);
  CHECK(&c->r, dc_comm_set_checksums(c->nccl, 1) == DC_E_UNSUPPORTED);
  CHECK(&c->r, dc_comm_create_nccl(c->nccl, c->r.device, &copy) == DC_OK); /* over the same bootstrap communicator */
  dc_comm_destroy(copy);
}

static void test_hosts_and_copies(void **state) {
  (void)state;
  on_cards(3, ON_PROCESSES, 100 * second, hosts_and_copies);
  nothing_left();
}

/* The even ranks and the odd ones form two NCCL communicators. */
static void in_parts(card_rank *c) {
  dc_comm *whole;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &whole));
  dc_status status = dc_comm_split(whole, c->r.rank % 2, 0, &c->nccl);
  dc_comm_destroy(whole);
  OK(&c->r, status);
  c->r.world = (c->r.world + 1 - c->r.rank % 2) / 2;
  c->r.rank /= 2;
  all_of_them(c);
}

static void test_parts(void **state) {
  (void)state;
  on_cards(4, ON_THREADS, 100 * second, in_parts);
  on_cards(3, ON_PROCESSES, 100 * second, in_parts);
  nothing_left();
}

/* A group of libdc is one group of NCCL. */
static void grouped(card_rank *c) {
  enum { MEMBERS = 5 };
  char *send = on_card(c, COUNT * 8), *recv = on_card(c, COUNT * 8);
  int32_t values[COUNT];
  int64_t one = 3, all = 3 * c->r.world;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  for (int i = 0; i < 3 * MEMBERS; i++) {
    values[i] = c->r.rank * 100 + i;
  }
  OK(&c->r, put(c, send, values, sizeof(int32_t) * 3 * MEMBERS));
  OK(&c->r, dc_comm_barrier(c->nccl));
  int groups = cudasim_calls("ncclGroupEnd");
  OK(&c->r, dc_comm_barrier(c->nccl));
  OK(&c->r, dc_comm_group_begin(c->nccl));
  for (int i = 0; i < MEMBERS; i++) {
    dc_tensor from = flat(send + i * 12, &one, DC_INT32), to = flat(recv + i * 12 * c->r.world, &all, DC_INT32);
    OK(&c->r, dc_comm_all_gather(c->nccl, &from, &to, NULL, c->stream));
  }
  OK(&c->r, dc_comm_group_end(c->nccl, c->stream));
  OK(&c->r, dc_stream_synchronize(c->stream, 0));
  OK(&c->r, dc_comm_barrier(c->nccl));
  CHECK(&c->r, cudasim_calls("ncclGroupEnd") == groups + c->r.world);
  OK(&c->r, put(c, values, recv, sizeof(int32_t) * 3 * MEMBERS * (size_t)c->r.world));
  for (int i = 0; i < MEMBERS; i++) {
    for (int32_t r = 0; r < c->r.world; r++) {
      CHECK(&c->r, values[(i * c->r.world + r) * 3 + 1] == r * 100 + i * 3 + 1);
    }
  }
  off_card(c, send, COUNT * 8);
  off_card(c, recv, COUNT * 8);
}

static void test_a_group_is_one(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, grouped);
  nothing_left();
}

#define TEST(name) cmocka_unit_test_setup(name, clean_state)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_every_type_and_split),
      TEST(test_registered_memory),
      TEST(test_in_place),
      TEST(test_hosts_and_copies),
      TEST(test_parts),
      TEST(test_a_group_is_one),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
