/* How processes meet: names and ranks already in use, worlds that differ, ranks that never come or die meanwhile. */
#include "comm_ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "comm/shm/shm.h"

static const int64_t patient = 60000 * MS;

/* ---- how far the processes are ---- */

static atomic_int *steps; /* listening sockets and messages sent, over all processes of a test */

int __real_listen(int fd, int backlog);
int __wrap_listen(int fd, int backlog);
int __wrap_listen(int fd, int backlog) {
  int result = __real_listen(fd, backlog);
  atomic_fetch_add(steps, 1);
  return result;
}

static int refusals; /* number of welcome messages whose sending fails in the next child */

ssize_t __real_dc__shm_send_fds(int fd, const void *data, size_t bytes, const int *fds, int32_t count);
ssize_t __wrap_dc__shm_send_fds(int fd, const void *data, size_t bytes, const int *fds, int32_t count);
ssize_t __wrap_dc__shm_send_fds(int fd, const void *data, size_t bytes, const int *fds, int32_t count) {
  if (count > 2 && refusals > 0) { /* a welcome message */
    refusals--;
    errno = ETOOMANYREFS;
    return -1;
  }
  ssize_t result = __real_dc__shm_send_fds(fd, data, bytes, fds, count);
  atomic_fetch_add(steps, 1);
  return result;
}

static void await_steps(int count) {
  while (atomic_load(steps) < count) { /* the test's own limit is the deadline */
    sleep_ms(1);
  }
}

static int set_up(void **state) {
  (void)state;
  atomic_store(steps, 0);
  return 0;
}

/* ---- ranks ---- */

typedef struct meeting {
  int32_t rank;
  int32_t world;
  dc_status status;
  const char *says;
  int64_t timeout_ns;
} meeting;

static pid_t meet(const char *name, const meeting *m) {
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = m->timeout_ns};
    dc_comm *comm = NULL;
    dc_status status = dc_comm_create_processes(name, m->rank, m->world, &options, &comm);
    bool right = status == m->status && (status == DC_OK) == (comm != NULL) &&
                 (m->says == NULL || strstr(dc_last_error(), m->says) != NULL);
    if (!right) {
      fprintf(stderr, "rank %d: status %d, must be %d; %s\n", m->rank, status, m->status, dc_last_error());
    }
    dc_comm_destroy(comm);
    fflush(NULL);
    _exit(right ? 0 : 1);
  }
  return child;
}

/* The kernel refuses to send more descriptors until ranks have received those already on their way. */
static void test_too_many_descriptors_on_the_way(void **state) {
  (void)state;
  char name[64];
  const meeting zero = {0, 3, DC_OK, NULL, patient};
  const meeting one = {1, 3, DC_OK, NULL, patient};
  const meeting two = {2, 3, DC_OK, NULL, patient};
  refusals = 5;
  pid_t a = meet(fresh_name(name), &zero);
  refusals = 0;
  pid_t b = meet(name, &one);
  assert_int_equal(end_rank(meet(name, &two)), 0);
  assert_int_equal(end_rank(b), 0);
  assert_int_equal(end_rank(a), 0);
}

static void test_name_taken(void **state) {
  (void)state;
  char name[64];
  const meeting first = {0, 2, DC_OK, NULL, patient};
  const meeting second = {0, 2, DC_E_EXISTS, "is taken by another group", patient};
  const meeting other = {1, 2, DC_OK, NULL, patient};
  pid_t a = meet(fresh_name(name), &first);
  await_steps(1); /* rank 0 listens at the name */
  assert_int_equal(end_rank(meet(name, &second)), 0);
  assert_int_equal(end_rank(meet(name, &other)), 0);
  assert_int_equal(end_rank(a), 0);
}

static void test_rank_taken(void **state) {
  (void)state;
  char name[64];
  const meeting zero = {0, 3, DC_OK, NULL, patient};
  const meeting one = {1, 3, DC_OK, NULL, patient};
  const meeting again = {1, 3, DC_E_EXISTS, "rank 1 is taken", patient};
  const meeting two = {2, 3, DC_OK, NULL, patient};
  pid_t a = meet(fresh_name(name), &zero);
  pid_t b = meet(name, &one);
  await_steps(2); /* and rank 1 has sent its hello */
  assert_int_equal(end_rank(meet(name, &again)), 0);
  assert_int_equal(end_rank(meet(name, &two)), 0);
  assert_int_equal(end_rank(a), 0);
  assert_int_equal(end_rank(b), 0);
}

/* A rank that dies before the others have come may be started again, also if rank 0 notices only later. */
static void test_a_rank_joins_twice(void **state) {
  (void)state;
  char name[64];
  const meeting zero = {0, 3, DC_OK, NULL, patient};
  const meeting one = {1, 3, DC_OK, NULL, patient};
  const meeting two = {2, 3, DC_OK, NULL, patient};
  pid_t a = meet(fresh_name(name), &zero);
  await_steps(1);
  kill(a, SIGSTOP);
  pid_t b = meet(name, &one);
  await_steps(2);
  kill(b, SIGKILL);
  assert_int_equal(end_rank(b), -SIGKILL);
  b = meet(name, &one);
  await_steps(3);
  kill(a, SIGCONT);
  assert_int_equal(end_rank(meet(name, &two)), 0);
  assert_int_equal(end_rank(a), 0);
  assert_int_equal(end_rank(b), 0);
}

static void test_worlds_differ(void **state) {
  (void)state;
  char name[64];
  const char *says = "rank 1 says world_size = 3 where rank 0 says 2";
  const meeting zero = {0, 2, DC_E_MISMATCH, says, patient};
  const meeting one = {1, 3, DC_E_MISMATCH, says, patient};
  pid_t a = meet(fresh_name(name), &zero);
  pid_t b = meet(name, &one);
  assert_int_equal(end_rank(a), 0);
  assert_int_equal(end_rank(b), 0);
}

static void test_no_peer_connects(void **state) {
  (void)state;
  char name[64];
  const meeting zero = {0, 4, DC_E_TIMEOUT, "ranks 2, 3 of 4 have not come after 10.0 s", 10000 * MS};
  const meeting one = {1, 4, DC_E_TIMEOUT, "ranks 2, 3 of 4 have not come after 10.0 s", patient};
  const meeting alone = {1, 2, DC_E_TIMEOUT, "rank 0 of 2 has not come after 0.3 s", 300 * MS};
  int64_t begin = dc__now_ns(); /* rank 0 waits for as long as the busiest machine may take for rank 1 to come */
  pid_t b = meet(fresh_name(name), &one);
  pid_t a = meet(name, &zero);
  assert_int_equal(end_rank(a), 0);
  assert_int_equal(end_rank(b), 0);
  assert_int_equal(end_rank(meet(fresh_name(name), &alone)), 0);
  assert_true(within(begin, 10300, 60000));
}

/* Leaves only `free_count` descriptors. */
static void take_descriptors(int free_count) {
  const struct rlimit limit = {64, 64};
  int fds[64];
  int count = 0;
  (void)setrlimit(RLIMIT_NOFILE, &limit);
  while (count < 64 && (fds[count] = open("/dev/null", O_RDONLY)) >= 0) {
    count++;
  }
  for (int i = 0; i < free_count; i++) {
    close(fds[--count]);
  }
}

/* Returns 0 if the group formed, 1 if an error tells of descriptors, 2 if rank 0 ended before it could tell. */
static int meet_with_few(const char *name, int32_t rank, int free_count) {
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = patient};
  dc_comm *comm = NULL;
  fflush(NULL);
  if (free_count > 0) {
    take_descriptors(free_count);
  }
  const dc_status status = dc_comm_create_processes(name, rank, 2, &options, &comm);
  const bool told = strstr(dc_last_error(), "descriptors") != NULL || strstr(dc_last_error(), strerror(EMFILE)) != NULL;
  const bool lost = rank == 1 && status == DC_E_PEER_DEAD;
  if (status != DC_OK && !told && !lost) {
    fprintf(stderr, "rank %d with %d descriptors: status %d, %s\n", rank, free_count, status, dc_last_error());
  }
  dc_comm_destroy(comm);
  return status == DC_OK ? 0 : told ? 1 : lost ? 2 : 3;
}

static void test_descriptors_run_out(void **state) {
  (void)state;
  int failures = 0;
  for (int free_count = 4; free_count < 12; free_count++) { /* with fewer rank 0 does not even listen */
    char name[64];
    fresh_name(name);
    atomic_store(steps, 0);
    pid_t a = fork();
    if (a == 0) {
      _exit(meet_with_few(name, 0, free_count));
    }
    int early = 0;
    pid_t ended = 0;
    while (atomic_load(steps) == 0 && ended == 0) {
      ended = waitpid(a, &early, WNOHANG);
      sleep_ms(1);
    }
    if (ended != 0) { /* before rank 0 listened */
      assert_int_equal(WEXITSTATUS(early), 1);
      failures++;
      continue;
    }
    pid_t b = fork();
    if (b == 0) {
      _exit(meet_with_few(name, 1, 0));
    }
    const int of_zero = end_rank(a), of_one = end_rank(b);
    assert_true(of_zero < 2 && of_one < 3 && (of_one == 0) == (of_zero == 0));
    failures += of_zero;
  }
  assert_true(failures > 0 && failures < 8);
}

static void test_host_dies(void **state) {
  (void)state;
  char name[64];
  const meeting zero = {0, 3, DC_OK, NULL, patient};
  const meeting one = {1, 3, DC_E_PEER_DEAD, "rank 0 ended", patient};
  pid_t a = meet(fresh_name(name), &zero);
  pid_t b = meet(name, &one);
  await_steps(2);
  kill(a, SIGKILL);
  assert_int_equal(end_rank(a), -SIGKILL);
  assert_int_equal(end_rank(b), 0);
}

/* ---- and part ---- */

/* A rank that waits outside of a collective can check whether the others live. */
static int watched(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK_OK(dc_comm_barrier(comm));
  if (comm->rank == 1) {
    raise(SIGKILL);
  }
  while (dc__comm_check(comm) == DC_OK) { /* the test's own limit is the deadline */
    sleep_ms(1);
    comm->ops->check_peers(comm);
  }
  CHECK(dc__comm_check(comm) == DC_E_PEER_DEAD);
  CHECK_SAYS("rank 1 died (its process ended)");
  return 0;
}

static void test_a_death_is_seen_without_a_collective(void **state) {
  (void)state;
  char name[64];
  pid_t children[2];
  fresh_name(name);
  for (int32_t r = 0; r < 2; r++) {
    children[r] = start_rank(name, r, 2, NULL, watched, NULL);
  }
  assert_int_equal(end_rank(children[1]), -SIGKILL);
  assert_int_equal(end_rank(children[0]), 0);
}

#define TEST(name) cmocka_unit_test_setup(name, set_up)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_name_taken),
      TEST(test_rank_taken),
      TEST(test_a_rank_joins_twice),
      TEST(test_worlds_differ),
      TEST(test_no_peer_connects),
      TEST(test_descriptors_run_out),
      TEST(test_host_dies),
      TEST(test_a_death_is_seen_without_a_collective),
      TEST(test_too_many_descriptors_on_the_way),
  };
  steps = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return steps == MAP_FAILED ? 1 : cmocka_run_group_tests(tests, NULL, NULL);
}
