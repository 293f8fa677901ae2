/* All-gather and reduce-scatter over shared memory, ranks as threads and as processes, beside a plain memcpy of the
 * same bytes by all ranks at once: what the memory can do. Sizes are of the whole float32 tensor; a rank's shard is
 * 1/ranks of it. "heap" sends from memory that peers read in place, "staged" from ordinary memory.
 *
 *   bench_comm [ranks] [--json]      medians; GB/s = whole tensor / time */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/comm.h"

enum { MAX_REPEATS = 2000, MIN_KIB = 1, MAX_KIB = 65536 };

typedef struct rank_state {
  dc_comm *comm;
  int rank;
  int ranks;
  bool heap;
} rank_state;

typedef enum work { COPY, GATHER, REDUCE } work;

typedef struct result {
  double us[3];
} result;

typedef struct buffers {
  char *shard; /* as large as whole, for the plain copy */
  char *whole;
} buffers;

/* Shared between the ranks: rank 0's results. */
static result *results;

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a;
  double y = *(const double *)b;
  return (x > y) - (x < y);
}

static void must(dc_status status) {
  if (status != DC_OK) {
    fprintf(stderr, "%s\n", dc_last_error());
    exit(1);
  }
}

static void run_once(const rank_state *s, work kind, const buffers *b, int64_t shard) {
  dc_tensor part = {.struct_size = sizeof part, .data = b->shard, .shape = &shard, .ndim = 1, .dtype = DC_FLOAT32};
  int64_t total = shard * s->ranks;
  dc_tensor all = {.struct_size = sizeof all, .data = b->whole, .shape = &total, .ndim = 1, .dtype = DC_FLOAT32};
  if (kind == GATHER) {
    must(dc_comm_all_gather(s->comm, &part, &all, NULL, NULL));
  } else if (kind == REDUCE) {
    must(dc_comm_reduce_scatter(s->comm, &all, &part, NULL, DC_SUM, NULL));
  } else {
    memcpy(b->whole, b->shard, (size_t)total * 4);
  }
}

static double measure(const rank_state *s, work kind, const buffers *b, int64_t shard, int repeats) {
  static _Thread_local double times[MAX_REPEATS];
  for (int i = -3; i < repeats; i++) {
    if (kind == COPY || i < 0) {
      must(dc_comm_barrier(s->comm));
    }
    int64_t begin = dc__now_ns();
    run_once(s, kind, b, shard);
    if (i >= 0) {
      times[i] = (double)(dc__now_ns() - begin) / 1e3;
    }
  }
  qsort(times, (size_t)repeats, sizeof times[0], by_value);
  return times[repeats / 2];
}

static void *alloc_buffer(const rank_state *s, size_t bytes) {
  void *ptr = NULL;
  if (s->heap) {
    must(s->comm->ops->heap_alloc(s->comm, bytes, &ptr));
  } else if (posix_memalign(&ptr, 4096, bytes) != 0) {
    exit(1);
  }
  memset(ptr, 1, bytes);
  return ptr;
}

static void free_buffer(const rank_state *s, void *ptr, size_t bytes) {
  if (s->heap) {
    s->comm->ops->heap_free(s->comm, ptr, bytes);
  } else {
    free(ptr);
  }
}

static void *run_rank(void *arg) {
  const rank_state *s = arg;
  size_t most = (size_t)MAX_KIB * 1024;
  buffers b = {alloc_buffer(s, most), alloc_buffer(s, most)};
  int line = 0;
  for (int64_t kib = MIN_KIB; kib <= MAX_KIB; kib *= 4, line++) {
    int repeats = kib <= 256 ? MAX_REPEATS : kib <= 4096 ? 200 : 15;
    for (work kind = COPY; kind <= REDUCE; kind++) {
      double us = measure(s, kind, &b, kib * 256 / s->ranks, repeats);
      if (s->rank == 0) {
        results[line].us[kind] = us;
      }
    }
  }
  must(dc_comm_barrier(s->comm));
  free_buffer(s, b.shard, most);
  free_buffer(s, b.whole, most);
  dc_comm_destroy(s->comm);
  return NULL;
}

static void run_threads(int ranks) {
  dc_comm *comms[DC__COMM_MAX_WORLD];
  pthread_t threads[DC__COMM_MAX_WORLD];
  rank_state states[DC__COMM_MAX_WORLD];
  must(dc_comm_create_threads(ranks, NULL, comms));
  for (int r = 0; r < ranks; r++) {
    states[r] = (rank_state){comms[r], r, ranks, false};
    pthread_create(&threads[r], NULL, run_rank, &states[r]);
  }
  for (int r = 0; r < ranks; r++) {
    pthread_join(threads[r], NULL);
  }
}

static void run_processes(int ranks, bool heap) {
  char name[64];
  snprintf(name, sizeof name, "bench-%ld-%d", (long)getpid(), heap);
  for (int r = 0; r < ranks; r++) {
    if (fork() == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL); /* the others wait for one that fails */
      rank_state s = {NULL, r, ranks, heap};
      must(dc_comm_create_processes(name, r, ranks, NULL, &s.comm));
      run_rank(&s);
      _exit(0);
    }
  }
  for (int r = 0; r < ranks; r++) {
    int status;
    if (wait(&status) < 0 || status != 0) {
      exit(1);
    }
  }
}

static void print(const char *label, int ranks, bool json) {
  int line = 0;
  if (!json) {
    printf("%s, %d ranks: median us (GB/s)\n%8s %20s %20s %20s %9s %9s\n", label, ranks, "KiB", "memcpy", "all_gather",
           "reduce_scatter", "ag/copy", "rs/copy");
  }
  for (int64_t kib = MIN_KIB; kib <= MAX_KIB; kib *= 4, line++) {
    const double *us = results[line].us;
    double bytes = (double)kib * 1024;
    if (json) {
      printf("{\"kind\": \"%s\", \"ranks\": %d, \"kib\": %" PRId64
             ", \"memcpy_us\": %.2f, \"all_gather_us\": %.2f, "
             "\"reduce_scatter_us\": %.2f}\n",
             label, ranks, kib, us[COPY], us[GATHER], us[REDUCE]);
    } else {
      printf("%8" PRId64, kib);
      for (work kind = COPY; kind <= REDUCE; kind++) {
        printf(" %11.1f (%6.2f)", us[kind], bytes / us[kind] / 1e3);
      }
      printf(" %8.2fx %8.2fx\n", us[COPY] / us[GATHER], us[COPY] / us[REDUCE]);
    }
  }
}

int main(int argc, char **argv) {
  int ranks = 2;
  bool json = false;
  for (int i = 1; i < argc; i++) {
    json = json || strcmp(argv[i], "--json") == 0;
    if (argv[i][0] >= '1' && argv[i][0] <= '9') {
      ranks = atoi(argv[i]);
    }
  }
  if (ranks < 1 || ranks > DC__COMM_MAX_WORLD) {
    fprintf(stderr, "ranks must be 1 to %d\n", (int)DC__COMM_MAX_WORLD);
    return 1;
  }
  results = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (results == MAP_FAILED) {
    return 1;
  }
  run_processes(ranks, true); /* processes first: nothing was called in this one yet */
  print("processes, heap", ranks, json);
  run_processes(ranks, false);
  print("processes, staged", ranks, json);
  run_threads(ranks);
  print("threads", ranks, json);
  return 0;
}
