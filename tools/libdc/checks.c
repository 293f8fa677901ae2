/* Checks of the machine: clock, memory, files, threads. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "tool.h"

void report_finding(finding *f, int state, const char *format, ...) {
  va_list list;
  f->state = state;
  va_start(list, format);
  vsnprintf(f->text, sizeof f->text, format, list);
  va_end(list);
}

static void check_library(finding *f, int ranks) {
  (void)ranks;
  Dl_info where = {0};
  uint32_t version = dc_api_version();
  (void)dladdr((void *)(uintptr_t)dc_api_version, &where);
  bool fits = version / 1000 == DC_API_VERSION / 1000 && version >= DC_API_VERSION;
  report_finding(f, fits ? CHECK_OK : CHECK_FAILED, "libdc %s from %s%s", dc_version_string(),
                 where.dli_fname == NULL ? "?" : where.dli_fname, fits ? "" : ", which this libdc was not built for");
}

static void check_clock(finding *f, int ranks) {
  (void)ranks;
  struct timespec resolution = {0};
  clock_getres(CLOCK_MONOTONIC, &resolution);
  int64_t last = now_ns();
  int64_t begin = last;
  enum { READS = 200000 };
  for (int i = 0; i < READS; i++) {
    int64_t now = now_ns();
    if (now < last) {
      report_finding(f, CHECK_FAILED, "the monotonic clock went back by %" PRId64 " ns", last - now);
      return;
    }
    last = now;
  }
  const struct timespec nap = {0, 10000000};
  int64_t before = now_ns();
  nanosleep(&nap, NULL);
  int64_t slept = now_ns() - before;
  bool well = slept >= nap.tv_nsec && slept < INT64_C(2000000000) && resolution.tv_nsec <= 1000000;
  report_finding(f, well ? CHECK_OK : CHECK_FAILED, "%.0f ns a reading, resolution %ld ns; a nap of 10 ms took %.1f ms",
                 (double)(last - begin) / READS, resolution.tv_nsec, (double)slept / 1e6);
}

static void check_memory(finding *f, int ranks) {
  enum { MIB = 256 };
  size_t bytes = (size_t)MIB << 20;
  (void)ranks;
  char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    report_finding(f, CHECK_FAILED, "%d MiB can't be had: %s", MIB, strerror(errno));
    return;
  }
  int64_t begin = now_ns();
  for (size_t i = 0; i < bytes; i += 4096) {
    memory[i] = 1;
  }
  double seconds = (double)(now_ns() - begin) / 1e9;
  munmap(memory, bytes);
  report_finding(f, seconds < 20 ? CHECK_OK : CHECK_FAILED, "%d MiB taken and written in %.2f s%s", MIB, seconds,
                 seconds < 20 ? "" : ": the machine swaps");
}

static void check_descriptors(finding *f, int ranks) {
  struct rlimit limit = {0};
  enum { WANTED = 128 }; /* 64 ranks: each other's process and heap */
  int fds[WANTED];
  int count = 0;
  (void)ranks;
  getrlimit(RLIMIT_NOFILE, &limit);
  while (count < WANTED && (fds[count] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0) {
    count++;
  }
  int error = errno;
  for (int i = 0; i < count; i++) {
    close(fds[i]);
  }
  if (count < WANTED) {
    report_finding(f, CHECK_FAILED,
                   "only %d more files can be opened (%s): 64 processes need %d; raise ulimit -n, now %" PRIu64, count,
                   strerror(error), WANTED, (uint64_t)limit.rlim_cur);
  } else {
    report_finding(f, CHECK_OK, "%d opened, the limit is %" PRIu64, WANTED, (uint64_t)limit.rlim_cur);
  }
}

static void check_shared_memory(finding *f, int ranks) {
  enum { MIB = 64 };
  size_t bytes = (size_t)MIB << 20;
  struct statvfs shm = {0};
  (void)ranks;
  (void)statvfs("/dev/shm", &shm);
  int fd = memfd_create("dc-doctor", MFD_CLOEXEC);
  int error = fd < 0 ? errno : posix_fallocate(fd, 0, (off_t)bytes);
  void *memory = fd < 0 || error != 0 ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  error = error == 0 && memory == MAP_FAILED ? errno : error;
  if (memory != MAP_FAILED) {
    memset(memory, 1, bytes);
    munmap(memory, bytes);
  }
  if (fd >= 0) {
    close(fd);
  }
  if (error != 0) {
    report_finding(f, CHECK_FAILED, "a memory file of %d MiB can't be made: %s", MIB, strerror(error));
  } else {
    report_finding(f, CHECK_OK, "a memory file of %d MiB; /dev/shm, which is not needed, has %" PRIu64 " MiB free", MIB,
                   (uint64_t)shm.f_bavail * shm.f_frsize >> 20);
  }
}

/* ---- streams ---- */

static void add_one(void *user) {
  ++*(int *)user;
}

/* Work of two streams, ordered by an event. */
static dc_status run_on_streams(dc_device *device, dc_stream *streams[2], dc_event **event, int *sum) {
  dc_status status = dc_stream_create(device, &streams[0]);
  status = status != DC_OK ? status : dc_stream_create(device, &streams[1]);
  status = status != DC_OK ? status : dc_event_create(device, event);
  for (int i = 0; i < 1000 && status == DC_OK; i++) {
    dc_stream *one = streams[i & 1];
    status = dc_event_wait(*event, one, 0);
    status = status != DC_OK ? status : dc_stream_call(one, add_one, sum);
    status = status != DC_OK ? status : dc_event_record(*event, one);
  }
  for (int i = 0; i < 2; i++) {
    dc_status synced = streams[i] == NULL ? DC_OK : dc_stream_synchronize(streams[i], INT64_C(10000000000));
    status = status != DC_OK ? status : synced;
  }
  return status;
}

static void check_streams(finding *f, int ranks) {
  dc_device *device = NULL;
  dc_stream *streams[2] = {NULL, NULL};
  dc_event *event = NULL;
  int sum = 0;
  (void)ranks;
  dc_status status = dc_device_open("cpu", NULL, &device);
  status = status != DC_OK ? status : run_on_streams(device, streams, &event, &sum);
  if (status != DC_OK) {
    report_finding(f, CHECK_FAILED, "%s (%s)", dc_last_error(), dc_status_name(status));
  } else {
    report_finding(f, sum == 1000 ? CHECK_OK : CHECK_FAILED, "two threads took turns, %d of 1000 tasks in order", sum);
  }
  dc_event_destroy(event);
  dc_stream_destroy(streams[0]);
  dc_stream_destroy(streams[1]);
  dc_device_destroy(device);
}

const check machine_checks[] = {{"library", check_library},
                                {"clock", check_clock},
                                {"memory", check_memory},
                                {"descriptors", check_descriptors},
                                {"shared memory", check_shared_memory},
                                {"streams", check_streams},
                                {NULL, NULL}};
