/* Memory that changes between a rank's post and a peer's read, with checksums on (dc_comm_set_checksums). Every rank
 * gets the same error, which names both ranks, the operator, the parameter and the elements. The linker redirects the
 * wait for the others' posts to this file (--wrap), which then does the damage. */
#include "comm/shm/shm.h"
#include "comm_ranks.h"

#include "leftovers.h"

enum { SMALL = 12, LARGE = 600000 }; /* elements: staged; in place with threads, in several rounds with processes */

typedef struct damage {
  int32_t kind;  /* enum dc__coll_kind */
  int64_t total; /* number of elements */
  int32_t round; /* the round in which rank 0 damages rank 1's memory; 0: none */
  bool checked;  /* checksums are on */
  bool heap;     /* rank 1's data is in memory that peers can read */
} damage;

static _Thread_local const damage *planted; /* set on rank 0's thread, during the collective */
static _Thread_local int32_t rounds;

static void corrupt_offer(const dc__shm *self) {
  const dc__shm_request *call = &dc__shm_slot_of(self->group, self->channel, 1)->calls[self->calls & 1];
  uintptr_t base = self->group->bases[1];
  unsigned char *at = (unsigned char *)(base + call->addresses[0]);
  if (call->staged) {
    at = (unsigned char *)(base + call->stage + (self->seq & 1) * self->stage_bytes);
  }
  at[5] ^= 0x10;
}

dc_status __real_dc__shm_wait_posted(dc__shm *self, const dc__coll *coll, uint32_t seq);
dc_status __wrap_dc__shm_wait_posted(dc__shm *self, const dc__coll *coll, uint32_t seq);
dc_status __wrap_dc__shm_wait_posted(dc__shm *self, const dc__coll *coll, uint32_t seq) {
  dc_status status = __real_dc__shm_wait_posted(self, coll, seq);
  if (status == DC_OK && planted != NULL && ++rounds == planted->round) {
    corrupt_offer(self);
  }
  return status;
}

/* Rank r has its value in its own range. A reduction adds whole tensors of all ranks. */
static void start_collective(dc_comm *comm, const damage *d, float *send, float *recv, const dc__range *ranges) {
  const int32_t op = d->kind == DC__COLL_REDUCE   ? DC_OP_REDUCE_GRAD
                     : d->kind == DC__COLL_GATHER ? DC_OP_ALLGATHER_PARAM
                                                  : DC_OP_COMM_BROADCAST;
  const dc__tag tag = {.graph_id = 4, .id = 7, .op = op};
  dc__coll_item item = {.send = send,
                        .recv = recv,
                        .ranges = ranges,
                        .total = d->total,
                        .id = 7,
                        .dtype = DC_FLOAT32,
                        .recv_dtype = DC_FLOAT32,
                        .reduce_op = DC_SUM};
  if (d->kind == DC__COLL_REDUCE) {
    dc__comm_reduce_scatter(comm, NULL, &tag, &item, 1);
  } else if (d->kind == DC__COLL_GATHER) {
    item.send = recv + ranges[comm->rank].begin; /* in place */
    item.reduce_op = 0;
    dc__comm_all_gather(comm, NULL, &tag, &item, 1);
  } else {
    dc__comm_broadcast(comm, NULL, &tag, recv, (size_t)d->total * sizeof(float), 1);
  }
}

static bool right(const damage *d, const dc_comm *comm, const float *recv, const dc__range *ranges) {
  for (int64_t i = 0; i < (d->kind == DC__COLL_REDUCE ? ranges[comm->rank].count : d->total); i++) {
    float expected = d->kind == DC__COLL_REDUCE ? 3.0f : d->kind == DC__COLL_BROADCAST || i >= ranges[1].begin ? 2 : 1;
    if (recv[i] != expected) {
      return false;
    }
  }
  return true;
}

static int run(dc_comm *comm, const damage *d, float *send, float *recv) {
  int64_t half = d->total / 2;
  const dc__range ranges[2] = {{0, half}, {half, d->total - half}};
  CHECK_OK(dc_comm_set_checksums(comm, d->checked));
  for (int repeat = 0; repeat < 3; repeat++) {
    for (int64_t i = 0; i < d->total; i++) {
      send[i] = recv[i] = (float)(comm->rank + 1);
    }
    planted = comm->rank == 0 && repeat == 2 ? d : NULL;
    rounds = 0;
    start_collective(comm, d, send, recv, ranges);
    planted = NULL;
    if (repeat < 2 || d->round == 0) {
      CHECK_OK(dc__comm_check(comm));
      CHECK(right(d, comm, recv, ranges));
    }
  }
  if (d->round == 0) {
    return 0;
  }
  if (!d->checked) { /* without checksums no rank notices */
    CHECK_OK(dc__comm_check(comm));
    CHECK(comm->rank != 0 || !right(d, comm, recv, ranges));
    return 0;
  }
  dc_comm_barrier(comm);
  CHECK(dc_comm_check(comm) == DC_E_CORRUPT);
  CHECK_SAYS("what rank 0 read from rank 1 is not what that rank offered: elements ");
  CHECK_SAYS(d->kind == DC__COLL_REDUCE      ? "reduce_grad of parameter 7"
             : d->kind == DC__COLL_BROADCAST ? "broadcast"
                                             : "allgather_param of parameter 7");
  return 0;
}

static int damaged(dc_comm *comm, void *arg) {
  const damage *d = arg;
  size_t bytes = (size_t)d->total * sizeof(float);
  void *shared = NULL;
  float *send = malloc(bytes), *recv = malloc(bytes);
  if (d->heap && comm->rank == 1) {
    CHECK_OK(comm->ops->heap_alloc(comm, bytes, &shared));
  }
  bool sends = d->kind == DC__COLL_REDUCE;
  int result = run(comm, d, shared != NULL && sends ? shared : send, shared != NULL && !sends ? shared : recv);
  if (shared != NULL) {
    comm->ops->heap_free(comm, shared, bytes);
  }
  free(send);
  free(recv);
  return result;
}

static void on_both(damage d) {
  const int64_t limit = INT64_C(30000000000);
  const int32_t kinds[] = {DC__COLL_GATHER, DC__COLL_REDUCE, DC__COLL_BROADCAST};
  for (size_t i = 0; i < DC__COUNT(kinds); i++) {
    d.kind = kinds[i];
    if (d.round < 2) {
      assert_int_equal(on_threads(2, limit, damaged, &d), 0);
    }
    assert_int_equal(on_processes(2, limit, damaged, &d), 0);
  }
}

static void test_no_damage(void **state) {
  (void)state;
  for (int heap = 0; heap < 2; heap++) {
    on_both((damage){.total = SMALL, .checked = true, .heap = heap == 1});
    on_both((damage){.total = LARGE, .checked = true, .heap = heap == 1});
  }
}

static void test_staged(void **state) {
  (void)state;
  on_both((damage){.total = SMALL, .round = 1, .checked = true});
}

static void test_in_place(void **state) {
  (void)state;
  on_both((damage){.total = LARGE, .round = 1, .checked = true, .heap = true});
}

/* Data moves in rounds, and the text says in which part the damage is. */
static void test_later_round(void **state) {
  (void)state;
  on_both((damage){.total = LARGE, .round = 2, .checked = true});
}

static void test_unnoticed_without(void **state) {
  (void)state;
  on_both((damage){.total = SMALL, .round = 1});
}

static void test_switch(void **state) {
  (void)state;
  dc_comm *comm = NULL;
  assert_int_equal(dc_comm_create_threads(1, NULL, &comm), DC_OK);
  assert_int_equal(dc_comm_set_checksums(NULL, 1), DC_E_INVALID);
  assert_int_equal(dc_comm_set_checksums(comm, 2), DC_E_INVALID);
  assert_non_null(strstr(dc_last_error(), "enable = 2, must be 0 or 1"));
  assert_int_equal(dc_comm_set_checksums(comm, 1), DC_OK);
  dc_comm_destroy(comm);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_no_damage),         cmocka_unit_test(test_staged),
      cmocka_unit_test(test_in_place),          cmocka_unit_test(test_later_round),
      cmocka_unit_test(test_unnoticed_without), cmocka_unit_test(test_switch),
  };
  return cmocka_run_group_tests_name("corruption", tests, leftovers_note, leftovers_compare);
}
