/* Bits that change on the way between two ranks over TCP, with checksums (dc_comm_set_checksums) or with TLS. The
 * collective fails, and never gives a wrong sum, wherever the bit is: in the call, the data, the checksum or a TLS
 * record.
 *
 *     test_tcp_corruption [TRANSFERS [SEED]] */
#include "comm_data.h"

#include "comm/tcp/collective.h"

#include "leftovers.h"

enum { MOST_RANKS = 3, LONGEST = 6000, FEW = 60, LIMIT_S = 30 };

static int32_t transfers = FEW;
static uint32_t seed = 1;
static _Thread_local int64_t flip_at = -1; /* index of the byte to damage in what this thread receives next */
static _Thread_local bool was_flipped;

ssize_t __real_recv(int fd, void *data, size_t bytes, int flags);
ssize_t __wrap_recv(int fd, void *data, size_t bytes, int flags);
ssize_t __real_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags);

static void damage(const struct iovec *list, size_t count, ssize_t got) {
  if (got <= 0 || flip_at < 0) {
    return;
  }
  if (flip_at >= got) {
    flip_at -= got;
    return;
  }
  for (size_t i = 0; i < count; i++) {
    if ((size_t)flip_at < list[i].iov_len) {
      ((unsigned char *)list[i].iov_base)[flip_at] ^= (unsigned char)(1u << (seed % 8));
      was_flipped = true;
      break;
    }
    flip_at -= (int64_t)list[i].iov_len;
  }
  flip_at = -1;
}

ssize_t __wrap_recv(int fd, void *data, size_t bytes, int flags) {
  ssize_t got = __real_recv(fd, data, bytes, flags);
  const struct iovec all = {data, bytes};
  damage(&all, 1, got);
  return got;
}

ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags) {
  struct iovec list[DC__COMM_GROUP + 2]; /* a copy of the caller's, which the system may change */
  memcpy(list, message->msg_iov, message->msg_iovlen * sizeof *list);
  ssize_t got = __real_recvmsg(fd, message, flags);
  damage(list, message->msg_iovlen, got);
  return got;
}

typedef struct transfer {
  char address[64], name[64];
  int64_t count;
  int64_t flip; /* index of a byte that rank 1 receives; -1: none */
  int32_t rank, world;
  bool reduces;
  bool tls; /* otherwise checksums */
} transfer;

static bool has_right_sum(const transfer *t, const float *data) {
  for (int64_t i = 0; i < t->count; i++) {
    if (data[i] != (float)(t->reduces ? t->world * i + t->world * (t->world - 1) / 2 : i)) {
      return false;
    }
  }
  return true;
}

/* Returns 0 if the result was right, or an error after damage; otherwise 1. */
static int transfer_once(const transfer *t, dc_comm *comm) {
  float data[LONGEST];
  CHECK_OK(dc_comm_set_checksums(comm, !t->tls));
  for (int64_t i = 0; i < t->count; i++) {
    data[i] = (float)(i + t->rank);
  }
  dc_tensor tensor = flat(data, &t->count, DC_FLOAT32);
  was_flipped = false;
  flip_at = t->rank == 1 ? t->flip : -1;
  dc_status status =
      t->reduces ? dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL) : dc_comm_broadcast(comm, &tensor, 0, NULL);
  flip_at = -1;
  CHECK(status != DC_OK || (!was_flipped && has_right_sum(t, data)));
  CHECK(status == DC_OK || t->flip >= 0);
  CHECK(status == DC_OK || !t->tls || strstr(dc_last_error(), "rank ") != NULL);
  return 0;
}

static void *transfer_rank(void *arg) {
  const transfer *t = arg;
  const dc_comm_options options = {.struct_size = sizeof options,
                                   .timeout_ns = LIMIT_S * INT64_C(1000000000),
                                   .secret = t->tls ? "0123456789abcdef" : NULL,
                                   .tls = t->tls};
  dc_comm *comm = NULL;
  intptr_t result = 1;
  if (dc_comm_create_tcp(t->address, t->name, t->rank, t->world, &options, &comm) == DC_OK) {
    result = transfer_once(t, comm);
  } else {
    fprintf(stderr, "%s\n", dc_last_error());
  }
  dc_comm_destroy(comm);
  return (void *)result;
}

static void run_transfer(int32_t world, int64_t count, int64_t flip, bool reduces, bool tls) {
  transfer ranks[MOST_RANKS];
  pthread_t threads[MOST_RANKS];
  transfer t = {.count = count, .flip = flip, .world = world, .reduces = reduces, .tls = tls};
  fresh_address(t.address);
  fresh_name(t.name);
  for (int32_t r = 0; r < world; r++) {
    ranks[r] = t;
    ranks[r].rank = r;
    assert_int_equal(pthread_create(&threads[r], NULL, transfer_rank, &ranks[r]), 0);
  }
  for (int32_t r = 0; r < world; r++) {
    void *result = NULL;
    pthread_join(threads[r], &result);
    assert_null(result);
  }
}

static void test_no_damage(void **state) {
  (void)state;
  for (int tls = 0; tls < 2; tls++) {
    run_transfer(2, 0, -1, true, tls);
    run_transfer(2, 1, -1, true, tls);
    run_transfer(3, LONGEST, -1, true, tls);
    run_transfer(3, LONGEST, -1, false, tls);
  }
}

static void test_no_wrong_sum(void **state) {
  (void)state;
  for (int32_t i = 0; i < transfers; i++) {
    seed = seed * 1664525 + 1013904223;
    uint32_t chosen = seed >> 8;
    int64_t count = 1 + chosen % (i % 2 == 0 ? 16 : LONGEST);
    int64_t bytes = (int64_t)sizeof(struct dc__tcp_header) + count * (int64_t)sizeof(float);
    run_transfer(2, count, (chosen >> 3) % bytes, i % 3 != 0, i % 4 == 3);
  }
}

/* Rank 1 forwards damaged data, which rank 2 must not take for a result. */
static void test_no_damage_is_sent_on(void **state) {
  (void)state;
  for (int32_t i = 0; i < transfers / 3; i++) {
    seed = seed * 1664525 + 1013904223;
    run_transfer(3, LONGEST, (seed >> 8) % (LONGEST * sizeof(float)), false, false);
  }
}

int main(int argc, char **argv) {
  transfers = argc > 1 ? atoi(argv[1]) : transfers;
  seed = argc > 2 ? (uint32_t)atoi(argv[2]) : seed;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_no_damage),
      cmocka_unit_test(test_no_wrong_sum),
      cmocka_unit_test(test_no_damage_is_sent_on),
  };
  return cmocka_run_group_tests_name("tcp_corruption", tests, leftovers_note, leftovers_compare);
}
