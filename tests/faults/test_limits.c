/* Too few resources: address space, file size, shared memory, descriptors. Making a group then fails with the reason,
 * in time and on every rank, and never by a signal. Smaller requests still work. Each case runs in a process of its
 * own. */
#define _GNU_SOURCE /* unshare */
#include "comm_ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "leftovers.h"
#include "sanitized.h"

enum { MIB = 1 << 20 };

static int make_group(int64_t heap_bytes, dc_comm **comm) {
  static int groups;
  char name[64];
  const dc_comm_options options = {
      .struct_size = sizeof options, .timeout_ns = INT64_C(5000000000), .heap_bytes = heap_bytes};
  snprintf(name, sizeof name, "libdc-test-limits-%ld-%d", (long)getpid(), groups++);
  *comm = NULL;
  return dc_comm_create_processes(name, 0, 1, &options, comm);
}

static int limit_to(__rlimit_resource_t resource, size_t bytes) {
  const struct rlimit limit = {bytes, bytes};
  return setrlimit(resource, &limit);
}

static int open_descriptors(void) {
  int count = 0;
  for (int fd = 0; fd < 1024; fd++) {
    count += fcntl(fd, F_GETFD) != -1;
  }
  return count;
}

/* If a heap is larger than files may be, the error names the limit; otherwise SIGXFSZ would end the process. */
static int small_files(void) {
  dc_comm *comm;
  CHECK(limit_to(RLIMIT_FSIZE, 4 * MIB) == 0);
  CHECK(make_group(0, &comm) == DC_E_SYSTEM && comm == NULL);
  CHECK_SAYS("ulimit -f");
  CHECK_SAYS("options.heap_bytes");
  CHECK_OK(make_group(2 * MIB, &comm));
  dc_comm_destroy(comm);
  return 0;
}

static int little_address_space(void) {
#ifndef SANITIZED /* sanitizers need terabytes of address space */
  dc_comm *comm;
  CHECK(limit_to(RLIMIT_AS, 512 * MIB) == 0);
  CHECK(make_group(1024 * MIB, &comm) == DC_E_NO_MEMORY && comm == NULL);
  CHECK_SAYS("mapping 1073741824 bytes: the process's limit for addresses (ulimit -v) is 536870912 bytes");
  CHECK_SAYS("options.heap_bytes");
  CHECK_OK(make_group(8 * MIB, &comm));
  dc_comm_destroy(comm);
#endif
  return 0;
}

/* A group of one needs three descriptors, and a fourth by which others notice its death. */
static int no_descriptors(void) {
  enum { MOST = 64 };
  dc_comm *comm;
  int taken[MOST], count = 0;
  CHECK(limit_to(RLIMIT_NOFILE, MOST) == 0);
  while (count < MOST && (taken[count] = dup(0)) >= 0) {
    count++;
  }
  int before = open_descriptors();
  for (int spare = 0; spare <= 4; spare++) {
    for (int i = 0; i < spare; i++) {
      close(taken[count - 1 - i]);
    }
    dc_status status = make_group(2 * MIB, &comm);
    if (spare < 3) {
      CHECK(status == DC_E_SYSTEM && comm == NULL);
      CHECK_SAYS(strerror(EMFILE));
    } else {
      CHECK(status == (spare == 4 || comm != NULL ? DC_OK : DC_E_SYSTEM));
    }
    dc_comm_destroy(comm);
    for (int i = 0; i < spare; i++) {
      taken[count - 1 - i] = dup(0);
    }
    CHECK(open_descriptors() == before);
  }
  return 0;
}

/* Blocks that do not fit into the heap are refused one by one, and the group stays usable. */
static int small_heap(void) {
  dc_comm *comm;
  dc_device *device = NULL;
  dc_context *context = NULL;
  dc_buffer *large = NULL, *small = NULL;
  CHECK_OK(make_group(8 * MIB, &comm));
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  CHECK_OK(dc_context_create(device, NULL, &context));
  CHECK_OK(dc_init(context, comm, NULL, 100));
  CHECK(dc_context_alloc(context, 16 * MIB, DC_MEMORY_SHARED, &large) == DC_E_NO_MEMORY && large == NULL);
  CHECK_SAYS("options.heap_bytes");
  CHECK_OK(dc_context_check(context));
  CHECK_OK(dc_context_alloc(context, MIB, DC_MEMORY_SHARED, &small));
  memset(dc_buffer_data(small), 1, MIB);
  CHECK_OK(dc_comm_barrier(comm));
  dc_buffer_release(small);
  dc_context_destroy(context);
  dc_device_destroy(device);
  dc_comm_destroy(comm);
  return 0;
}

/* Memory files are on no mounted file system, so a full /dev/shm does not matter. Mounting needs root; without it, the
 * group is made beside the machine's own /dev/shm, which must stay as it was. */
static int full_dev_shm(void) {
  dc_comm *comm;
  if (unshare(CLONE_NEWNS) == 0 && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
      mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=4096") == 0) {
    char page[4096] = {0};
    int file = open("/dev/shm/full", O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    CHECK(write(file, page, sizeof page) == (ssize_t)sizeof page);
    CHECK(write(file, page, 1) == -1 && errno == ENOSPC);
    close(file);
  }
  CHECK_OK(make_group(8 * MIB, &comm));
  void *block = NULL;
  CHECK_OK(comm->ops->heap_alloc(comm, MIB, &block));
  memset(block, 1, MIB);
  comm->ops->heap_free(comm, block, MIB);
  dc_comm_destroy(comm);
  return 0;
}

static void in_a_child(int (*body)(void)) {
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    alarm(600);
    int result = body();
    fflush(NULL);
    _exit(result);
  }
  assert_int_equal(end_rank(child), 0);
}

#define CASE(name)                    \
  static void test_##name(void **s) { \
    (void)s;                          \
    in_a_child(name);                 \
  }
CASE(small_files)
CASE(little_address_space)
CASE(no_descriptors)
CASE(small_heap)
CASE(full_dev_shm)

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_small_files),    cmocka_unit_test(test_little_address_space),
      cmocka_unit_test(test_no_descriptors), cmocka_unit_test(test_small_heap),
      cmocka_unit_test(test_full_dev_shm),
  };
  return cmocka_run_group_tests_name("limits", tests, leftovers_note, leftovers_compare);
}
