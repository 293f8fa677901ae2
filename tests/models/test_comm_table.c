/* The model of the local communicator's handshake (comm.pml) and the code follow the same table. Every call that
 * src/comm/shm makes between its files is a step of the table, in each rank's collectives, aborts, mismatches, deaths
 * and leaving. Every row occurs. The linker's --wrap makes the calls visible. */
#include "comm_ranks.h"

#include <sys/mman.h>

#include "comm/shm/shm.h"
#include "kernels/kernels.h"

typedef enum state { CLOSED, IDLE, POSTED, READY, READING, OVER, BROKEN, FAILED, SAFE } state;
typedef enum event { JOIN, POST, ARRIVED, GAVE_UP, READ, DONE, FAIL, UNREAD, LEAVE } event;

static struct {
  state from;
  event what;
  state to;
  const char *text;
} rows[] = {
#define ROW(from, what, to) {from, what, to, #from ", " #what ", " #to},
#include "comm_table.h"
#undef ROW
};
static atomic_int taken[DC__COUNT(rows)];
static atomic_int strange; /* 1 + from * 16 + event of a step that is not in the table */

static state now[DC__COMM_MAX_WORLD];   /* state of each rank's only communicator */
static _Thread_local int32_t runs = -1; /* the rank whose dc__shm_run this is: only there is a failure, or a copy, a
                                         * step of its way */

static void step(int32_t rank, event what) {
  for (size_t i = 0; i < DC__COUNT(rows); i++) {
    if (rows[i].from == now[rank] && rows[i].what == what) {
      atomic_fetch_add(&taken[i], 1);
      now[rank] = rows[i].to;
      return;
    }
  }
  atomic_store(&strange, 1 + (int)now[rank] * 16 + (int)what);
}

#define WRAPPED(result, name, parameters) \
  result __real_##name parameters;        \
  result __wrap_##name parameters;        \
  result __wrap_##name parameters

WRAPPED(dc_status, dc__shm_channel_join, (dc__shm_group * group, int32_t *channel)) {
  dc_status status = __real_dc__shm_channel_join(group, channel);
  if (status == DC_OK) {
    step(group->rank, JOIN);
  }
  return status;
}

WRAPPED(void, dc__shm_channel_leave, (dc__shm_group * group, int32_t channel)) {
  step(group->rank, LEAVE);
  __real_dc__shm_channel_leave(group, channel);
}

WRAPPED(void, dc__shm_run, (dc_comm * comm, const dc__coll *coll)) {
  runs = comm->rank;
  __real_dc__shm_run(comm, coll);
  runs = -1;
}

WRAPPED(void, dc__shm_signal, (const dc__shm_group *group, dc__shm_counter *word, uint32_t seq)) {
  if (runs >= 0) { /* leaving also posts its counters, with their present values */
    char *slot = (char *)word - offsetof(dc__shm_slot, done);
    bool posted = true;
    for (int32_t c = 0; c < dc__shm_channel_count(group); c++) {
      posted = posted && (char *)dc__shm_slot_of(group, c, group->rank) != slot;
    }
    step(runs, posted ? POST : DONE);
  }
  __real_dc__shm_signal(group, word, seq);
}

WRAPPED(dc_status, dc__shm_wait_posted, (dc__shm * self, const dc__coll *coll, uint32_t seq)) {
  dc_status status = __real_dc__shm_wait_posted(self, coll, seq);
  step(runs, status == DC_OK ? ARRIVED : GAVE_UP);
  return status;
}

WRAPPED(dc_status, dc__shm_wait_done, (dc__shm * self, const dc__coll *coll, uint32_t seq)) {
  dc_status status = __real_dc__shm_wait_done(self, coll, seq);
  step(runs, status == DC_OK ? ARRIVED : GAVE_UP);
  return status;
}

WRAPPED(void, dc__shm_group_fail, (const dc__shm_group *group, dc_status status)) {
  if (runs >= 0) {
    step(runs, FAIL);
  }
  __real_dc__shm_group_fail(group, status);
}

WRAPPED(void, dc__shm_wait_readers, (const dc__shm *self)) {
  __real_dc__shm_wait_readers(self);
  step(runs, UNREAD);
}

WRAPPED(void, dc__copy, (void *dst, const void *src, size_t bytes)) {
  if (runs >= 0) {
    step(runs, READ);
  }
  __real_dc__copy(dst, src, bytes);
}

WRAPPED(void, dc__reduce, (const dc__reduction *r)) {
  if (runs >= 0) {
    step(runs, READ);
  }
  __real_dc__reduce(r);
}

/* ---- what the ranks do ---- */

enum { BIG = 1 << 20, SMALL = 8 };

typedef struct memory {
  float *send, *recv;
} memory;

static dc_status gather(dc_comm *comm, const memory *m, int64_t own) {
  int64_t counts[DC__COMM_MAX_WORLD], total = 0;
  for (int32_t r = 0; r < comm->world; r++) {
    counts[r] = own;
    total += own;
  }
  dc_tensor send = flat(m->send, &own, DC_FLOAT32), recv = flat(m->recv, &total, DC_FLOAT32);
  return dc_comm_all_gather(comm, &send, &recv, counts, NULL);
}

/* Small data are staged, large data are read in place, a barrier reads nothing. After a barrier comes a large
 * collective. */
static int healthy(dc_comm *comm, void *arg) {
  memory m = ((memory *)arg)[comm->rank];
  CHECK_OK(gather(comm, &m, SMALL));
  CHECK_OK(gather(comm, &m, SMALL));
  CHECK_OK(gather(comm, &m, BIG));
  CHECK_OK(dc_comm_barrier(comm));
  CHECK_OK(gather(comm, &m, BIG));
  return 0;
}

static int ends_staged(dc_comm *comm, void *arg) {
  CHECK_OK(gather(comm, &((memory *)arg)[comm->rank], SMALL));
  return 0;
}

static int differs(dc_comm *comm, void *arg) {
  CHECK(gather(comm, &((memory *)arg)[comm->rank], SMALL + comm->rank) == DC_E_MISMATCH);
  return 0;
}

static int one_leaves(dc_comm *comm, void *arg) {
  CHECK(comm->rank == 0 || gather(comm, &((memory *)arg)[comm->rank], SMALL) == DC_E_PEER_DEAD);
  return 0;
}

/* Rank 0's memory is read in place; rank 1 posts by hand and fails before it reads. */
static int fails_while_offering(dc_comm *comm, void *arg) {
  if (comm->rank == 0) {
    CHECK(gather(comm, &((memory *)arg)[0], BIG) == DC_E_ABORTED);
    return 0;
  }
  dc__shm *self = (dc__shm *)comm;
  dc__shm_slot *own = dc__shm_slot_of(self->group, self->channel, 1);
  dc__shm_slot *other = dc__shm_slot_of(self->group, self->channel, 0);
  while (atomic_load(&other->posted.value) == 0) {
    sleep_ms(1);
  }
  own->calls[1] = other->calls[1];
  atomic_store(&own->posted.value, 1); /* not by dc__shm_signal, since this rank does not take the usual steps */
  while (atomic_load(&other->done.value) == 0) {
    sleep_ms(1);
  }
  dc_comm_abort(comm, "instead of reading");
  return 0;
}

/* Between threads the staging memory holds small data at once. Processes stage large data, in rounds. Each rank is a
 * process, so it returns its results in shared memory. */
static int in_rounds(dc_comm *comm, void *arg) {
  CHECK_OK(gather(comm, &((memory *)arg)[comm->rank], BIG));
  int64_t counts[2] = {BIG, 0}, send_count = BIG, recv_count = comm->rank == 0 ? BIG : 0;
  memory m = ((memory *)arg)[comm->rank];
  dc_tensor send = flat(m.send, &send_count, DC_FLOAT32), recv = flat(m.recv, &recv_count, DC_FLOAT32);
  CHECK_OK(dc_comm_reduce_scatter(comm, &send, &recv, counts, DC_SUM, NULL));
  return 0;
}

typedef struct report {
  void *arg;
  atomic_int *shared; /* rows taken by all processes, and steps not in the table */
} report;

static int reported(dc_comm *comm, void *arg) {
  const report *to = arg;
  int result = in_rounds(comm, to->arg);
  for (size_t i = 0; i < DC__COUNT(rows); i++) {
    atomic_fetch_add(&to->shared[i], atomic_load(&taken[i]));
  }
  atomic_fetch_add(&to->shared[DC__COUNT(rows)], atomic_load(&strange));
  return result;
}

static void on_two_threads(rank_fn fn, memory *m) {
  assert_int_equal(on_threads(2, INT64_C(20000000000), fn, m), 0);
}

static void test_the_table_is_what_the_code_does(void **unused) {
  (void)unused;
  memory m[3];
  for (int r = 0; r < 3; r++) {
    m[r] = (memory){calloc(BIG, sizeof(float)), calloc((size_t)3 * BIG, sizeof(float))};
  }
  on_two_threads(healthy, m);
  assert_int_equal(on_threads(3, INT64_C(20000000000), healthy, m), 0);
  on_two_threads(ends_staged, m);
  on_two_threads(differs, m);
  on_two_threads(one_leaves, m);
  on_two_threads(fails_while_offering, m);
  size_t bytes = (DC__COUNT(rows) + 1) * sizeof(atomic_int);
  atomic_int *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_ptr_not_equal(shared, MAP_FAILED);
  report to = {m, shared};
  assert_int_equal(on_processes(2, INT64_C(20000000000), reported, &to), 0);
  if (atomic_load(&strange) != 0 || atomic_load(&shared[DC__COUNT(rows)]) != 0) {
    fail_msg("in state %d came event %d, which is no row", (atomic_load(&strange) - 1) / 16,
             (atomic_load(&strange) - 1) % 16);
  }
  for (size_t i = 0; i < DC__COUNT(rows); i++) {
    if (atomic_load(&taken[i]) == 0 && atomic_load(&shared[i]) == 0) {
      fail_msg("row \"%s\" was not taken", rows[i].text);
    }
  }
  munmap(shared, bytes);
  for (int r = 0; r < 3; r++) {
    free(m[r].send);
    free(m[r].recv);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_the_table_is_what_the_code_does)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
