/* A group of processes over TCP: what a meeting and a small all-reduce cost. bench_ranks.py runs it for many sizes.
 *
 *   ranks N      five numbers, means over ranks: microseconds of the meeting, and of them a rank's processor time; a
 *                rank's descriptors; microseconds of an all-reduce of 1 KiB, and of them a rank's processor time */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "checked.h"

enum { MOST_RANKS = 1024, TURNS = 100, FLOATS = 256, NUMBERS = 5 };

static double count_files(void) {
  double count = 0;
  DIR *folder = opendir("/proc/self/fd");
  while (folder != NULL && readdir(folder) != NULL) {
    count++;
  }
  closedir(folder);
  return count;
}

static void allow_files(void) {
  struct rlimit files;
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &files);
  }
}

static void reduce(dc_comm *comm) {
  static float data[FLOATS];
  const int64_t count = FLOATS;
  dc_tensor whole = DC_TENSOR_INIT;
  whole.data = data;
  whole.shape = &count;
  whole.ndim = 1;
  whole.dtype = DC_FLOAT32;
  check(dc_comm_all_reduce(comm, &whole, DC_SUM, NULL), "all-reduce");
}

static void be_rank(const char *address, int32_t rank, int32_t world, double *out) {
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  dc_comm *comm;
  options.heartbeat_ns = INT64_C(60000000000); /* at 64 ranks 63 a rank and second would take a machine of few cores */
  options.timeout_ns = INT64_C(1800000000000);
  const double held = count_files(), wall = now_us(CLOCK_MONOTONIC), cpu = now_us(CLOCK_PROCESS_CPUTIME_ID);
  check(dc_comm_create_tcp(address, "ranks", rank, world, &options, &comm), "meeting");
  out[0] = now_us(CLOCK_MONOTONIC) - wall;
  out[1] = now_us(CLOCK_PROCESS_CPUTIME_ID) - cpu;
  out[2] = count_files() - held;
  reduce(comm);
  const double begin = now_us(CLOCK_MONOTONIC), own = now_us(CLOCK_THREAD_CPUTIME_ID);
  for (int i = 0; i < TURNS; i++) {
    reduce(comm);
  }
  out[3] = (now_us(CLOCK_MONOTONIC) - begin) / TURNS;
  out[4] = (now_us(CLOCK_THREAD_CPUTIME_ID) - own) / TURNS;
  check(dc_comm_barrier(comm), "barrier");
  dc_comm_destroy(comm);
}

int main(int argc, char **argv) {
  char address[64];
  const int32_t world = argc == 2 ? atoi(argv[1]) : 0;
  if (world < 1 || world > MOST_RANKS) {
    fprintf(stderr, "ranks N: N must be 1 to %d\n", MOST_RANKS);
    return 2;
  }
  double *all =
      mmap(NULL, sizeof(double) * NUMBERS * MOST_RANKS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  allow_files();
  snprintf(address, sizeof address, "127.0.0.1:%d", 20000 + (int)getpid() % 12000);
  for (int32_t r = 0; r < world; r++) {
    const pid_t child = fork();
    if (child < 0) {
      perror("fork");
      return 1;
    }
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL); /* the others wait for one that fails */
      be_rank(address, r, world, all + (size_t)r * NUMBERS);
      _exit(0);
    }
  }
  for (int32_t r = 0; r < world; r++) {
    int status = 0;
    wait(&status);
    if (status != 0) {
      return 1;
    }
  }
  for (int i = 0; i < NUMBERS; i++) {
    double sum = 0;
    for (int32_t r = 0; r < world; r++) {
      sum += all[(size_t)r * NUMBERS + (size_t)i];
    }
    printf("%.6g%s", sum / world, i < NUMBERS - 1 ? " " : "\n");
  }
  return 0;
}
