/* Costs that grow with a model or a group: one row of the table, at one size. bench_growth.py runs all, fits exponents.
 *
 *   growth ROW SIZE      one number: microseconds of processor time, or bytes */
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "checked.h"

enum { ELEMENTS = 16, BUCKET = 1 << 20, GRAPH = 1, TURNS = 500, MOST_RANKS = 64, KIB = 256 /* floats */ };

static double cpu_us(void) {
  return now_us(CLOCK_PROCESS_CPUTIME_ID);
}

static dc_tensor flat(void *data, const int64_t *count) {
  return (dc_tensor){.struct_size = sizeof(dc_tensor), .data = data, .shape = count, .ndim = 1, .dtype = DC_FLOAT32};
}

/* ---- a model of small parameters ---- */

typedef struct model {
  dc_context *context;
  dc_device *device;
  int64_t count, world;
  int64_t *ids;
  float *data;
} model;

static model make_model(dc_comm *comm, int64_t count, int shift, int64_t bucket) {
  model m = {.count = count, .world = dc_comm_size(comm)};
  check(dc_device_open("cpu", NULL, &m.device), "device");
  check(dc_context_create(m.device, NULL, &m.context), "context");
  check(dc_init(m.context, comm, NULL, bucket), "init");
  m.ids = calloc((size_t)count, sizeof *m.ids);
  m.data = calloc((size_t)count * ELEMENTS, sizeof *m.data);
  for (int64_t i = 0; i < count; i++) {
    m.ids[i] = i << shift;
  }
  return m;
}

static void register_params(const model *m, int64_t elements) {
  const int64_t part = (elements + m->world - 1) / m->world, none = 0;
  for (int64_t i = 0; i < m->count; i++) {
    dc_tensor shard = flat(m->data + i * ELEMENTS, &part), grad = flat(m->data, &none);
    check(dc_register_z3_param(m->context, m->ids[i], &elements, 1, &shard, &grad, 0, DC_DTYPE_NONE), "register");
  }
}

static dc_comm *alone(void) {
  dc_comm *comm;
  check(dc_comm_create_threads(1, NULL, &comm), "comm");
  return comm;
}

/* ---- rows: a model grows ---- */

static double removal(int64_t count, int shift) {
  model m = make_model(alone(), count, shift, ELEMENTS);
  double begin = cpu_us();
  register_params(&m, ELEMENTS);
  for (int64_t i = 0; i < count; i++) {
    check(dc_unregister_param(m.context, m.ids[i]), "unregister");
  }
  return cpu_us() - begin;
}

static double row_removal(int64_t count) {
  return removal(count, 0);
}

static double row_ids(int64_t count) {
  return removal(count, 44);
}

static void gather(const model *m, int64_t i) {
  dc_tensor full = DC_TENSOR_INIT;
  check(dc_allgather_param(m->context, NULL, GRAPH, m->ids[i], DC_DTYPE_NONE, &full), "gather");
  check(dc_wait_allgather(m->context, NULL, GRAPH, m->ids[i]), "wait");
}

static double row_prefetch(int64_t count) {
  model m = make_model(alone(), count, 0, ELEMENTS);
  register_params(&m, ELEMENTS);
  check(dc_register_graph_z3(m.context, GRAPH, m.ids, count), "graph");
  double best = 0;
  for (int turn = 0; turn < 3; turn++) {
    double begin = cpu_us();
    check(dc_prefetch_params_fused(m.context, GRAPH, m.ids, NULL, count), "prefetch");
    for (int64_t i = 0; i < count; i++) {
      gather(&m, i);
      check(dc_release_param(m.context, NULL, GRAPH, m.ids[i], 1), "release");
    }
    double took = cpu_us() - begin;
    best = turn == 0 || took < best ? took : best;
    check(dc_context_params_updated(m.context, NULL, 0), "updated");
  }
  return best;
}

/* Every other block of memory is free, and is taken again. */
static double row_blocks(int64_t count) {
  model m = make_model(alone(), count, 0, ELEMENTS);
  register_params(&m, ELEMENTS);
  check(dc_register_graph_z3(m.context, GRAPH, m.ids, count), "graph");
  for (int64_t i = 0; i < count; i++) {
    gather(&m, i);
  }
  for (int64_t i = 0; i < count; i += 2) {
    check(dc_release_param(m.context, NULL, GRAPH, m.ids[i], 1), "release");
  }
  double begin = cpu_us();
  for (int64_t i = 0; i < count; i += 2) {
    gather(&m, i);
  }
  return cpu_us() - begin;
}

/* ---- rows: ranks that are threads ---- */

typedef struct thread_job {
  dc_comm *comm;
  pthread_barrier_t *barrier;
  int64_t size;
  double result; /* rank 0's */
  int32_t rank;
} thread_job;

static void run_threads(int32_t world, int64_t size, void *(*run)(void *), thread_job jobs[MOST_RANKS]) {
  dc_comm *comms[MOST_RANKS];
  pthread_t threads[MOST_RANKS];
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, NULL, (unsigned)world);
  check(dc_comm_create_threads(world, NULL, comms), "comms");
  for (int32_t r = 0; r < world; r++) {
    jobs[r] = (thread_job){.comm = comms[r], .barrier = &barrier, .size = size, .rank = r};
    pthread_create(&threads[r], NULL, run, &jobs[r]);
  }
  for (int32_t r = 0; r < world; r++) {
    pthread_join(threads[r], NULL);
  }
}

enum { SPLIT_PARAMS = 5000 };

static void *split_rank(void *arg) {
  thread_job *job = arg;
  model m = make_model(job->comm, SPLIT_PARAMS, 0, ELEMENTS);
  pthread_barrier_wait(job->barrier);
  size_t before = mallinfo2().uordblks;
  pthread_barrier_wait(job->barrier);
  register_params(&m, ELEMENTS);
  pthread_barrier_wait(job->barrier);
  job->result = (double)(mallinfo2().uordblks - before);
  pthread_barrier_wait(job->barrier);
  dc_context_destroy(m.context);
  return NULL;
}

/* Bytes of a registered parameter on one rank. */
static double row_splits(int64_t world) {
  thread_job jobs[MOST_RANKS];
  mallopt(M_ARENA_MAX, 1); /* so that mallinfo2() counts all */
  run_threads((int32_t)world, 0, split_rank, jobs);
  return jobs[0].result / (double)world / SPLIT_PARAMS;
}

static void step_large(dc_context *context, const dc_tensor *grad) {
  dc_tensor full = DC_TENSOR_INIT;
  check(dc_allgather_param(context, NULL, GRAPH, 0, DC_DTYPE_NONE, &full), "gather");
  check(dc_wait_allgather(context, NULL, GRAPH, 0), "wait");
  check(dc_release_param(context, NULL, GRAPH, 0, 1), "release");
  check(dc_start_backward(context, 1), "start");
  check(dc_reduce_grad(context, grad, GRAPH, 0), "reduce");
  check(dc_end_backward(context, GRAPH, 0), "end");
  check(dc_context_params_updated(context, NULL, 0), "updated");
}

static double peak_bytes(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return 1024.0 * (double)usage.ru_maxrss;
}

static float *touched(int64_t count) {
  float *data = malloc((size_t)count * sizeof *data);
  memset(data, 0, (size_t)count * sizeof *data);
  return data;
}

static void *large_rank(void *arg) {
  thread_job *job = arg;
  const int64_t world = dc_comm_size(job->comm), part = (job->size + world - 1) / world, id = 0;
  model m = make_model(job->comm, 1, 0, BUCKET);
  float *shard = touched(part), *own = touched(part), *whole = touched(job->size);
  dc_tensor s = flat(shard, &part), g = flat(own, &part), grad = flat(whole, &job->size);
  check(dc_register_z3_param(m.context, id, &job->size, 1, &s, &g, 0, DC_DTYPE_NONE), "register");
  check(dc_register_graph_z3(m.context, GRAPH, &id, 1), "graph");
  pthread_barrier_wait(job->barrier);
  double before = peak_bytes();
  pthread_barrier_wait(job->barrier);
  for (int step = 0; step < 2; step++) {
    step_large(m.context, &grad);
  }
  pthread_barrier_wait(job->barrier);
  job->result = peak_bytes() - before;
  return NULL;
}

/* Bytes that a step of one parameter takes on each of two ranks, beside shard and gradients. */
static double row_large(int64_t count) {
  thread_job jobs[MOST_RANKS];
  run_threads(2, count, large_rank, jobs);
  return jobs[0].result / 2;
}

/* ---- rows: ranks that are processes ---- */

typedef dc_status (*collective)(dc_comm *comm);

typedef struct cost {
  double us, held_bytes;
} cost;

static dc_status all_reduce(dc_comm *comm) {
  static float data[KIB];
  const int64_t count = KIB;
  dc_tensor part = flat(data, &count);
  return dc_comm_all_reduce(comm, &part, DC_SUM, NULL);
}

static dc_status all_gather(dc_comm *comm) {
  static float data[KIB], all[KIB * MOST_RANKS];
  const int64_t count = KIB, total = KIB * dc_comm_size(comm);
  const dc_tensor part = flat(data, &count);
  dc_tensor whole = flat(all, &total);
  return dc_comm_all_gather(comm, &part, &whole, NULL, NULL);
}

static double resident_bytes(void) {
  long pages = 0, resident = 0;
  FILE *f = fopen("/proc/self/statm", "r");
  if (f == NULL || fscanf(f, "%ld %ld", &pages, &resident) != 2) {
    exit(1);
  }
  fclose(f);
  return (double)resident * (double)sysconf(_SC_PAGESIZE);
}

/* Of the calling thread: heartbeats of the watcher cost by time, and not by call. */
static double time_rank(dc_comm *comm, collective run) {
  check(run(comm), "collective");
  double begin = now_us(CLOCK_THREAD_CPUTIME_ID);
  for (int i = 0; i < TURNS; i++) {
    check(run(comm), "collective");
  }
  return (now_us(CLOCK_THREAD_CPUTIME_ID) - begin) / TURNS;
}

typedef struct shared {
  pthread_barrier_t start;
  cost each[MOST_RANKS];
} shared;

static void run_process(shared *all, int32_t r, int32_t world, bool tcp, collective run, int first_port) {
  char name[64], address[64];
  int32_t group = r / world;
  dc_comm *comm;
  snprintf(name, sizeof name, "growth-%d-%d", first_port, group);
  snprintf(address, sizeof address, "127.0.0.1:%d", first_port + group);
  double before = resident_bytes();
  check(tcp ? dc_comm_create_tcp(address, name, r % world, world, NULL, &comm)
            : dc_comm_create_processes(name, r % world, world, NULL, &comm),
        "comm");
  pthread_barrier_wait(&all->start);
  all->each[r].us = time_rank(comm, run);
  all->each[r].held_bytes = resident_bytes() - before;
  check(dc_comm_barrier(comm), "barrier");
  dc_comm_destroy(comm);
}

/* Means over ranks. There are always as many processes, in groups of `world`: with more of them than cores each message
 * pays for switching between processes, and that depends on all of them. */
static cost run_processes(int32_t world, bool tcp, collective run) {
  cost sum = {0};
  pthread_barrierattr_t attributes;
  shared *all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pthread_barrierattr_init(&attributes);
  pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&all->start, &attributes, MOST_RANKS);
  int first_port = 20000 + (int)getpid() % 350 * (MOST_RANKS / 2);
  for (int32_t r = 0; r < MOST_RANKS; r++) {
    if (fork() == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL); /* the others wait for one that fails */
      run_process(all, r, world, tcp, run, first_port);
      _exit(0);
    }
  }
  for (int32_t r = 0; r < MOST_RANKS; r++) {
    int status = 0;
    wait(&status);
    if (status != 0) {
      exit(1);
    }
  }
  for (int32_t r = 0; r < MOST_RANKS; r++) {
    sum.us += all->each[r].us / MOST_RANKS;
    sum.held_bytes += all->each[r].held_bytes / MOST_RANKS;
  }
  return sum;
}

static double row_tcp_barrier(int64_t world) {
  return run_processes((int32_t)world, true, dc_comm_barrier).us;
}

static double row_tcp_all_reduce(int64_t world) {
  return run_processes((int32_t)world, true, all_reduce).us;
}

static double row_tcp_all_gather(int64_t world) {
  return run_processes((int32_t)world, true, all_gather).us;
}

static double row_shm_barrier(int64_t world) {
  return run_processes((int32_t)world, false, dc_comm_barrier).us;
}

static double row_shm_memory(int64_t world) {
  return run_processes((int32_t)world, false, all_gather).held_bytes;
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    double (*run)(int64_t size);
  } rows[] = {{"removal", row_removal},
              {"ids", row_ids},
              {"prefetch", row_prefetch},
              {"blocks", row_blocks},
              {"splits", row_splits},
              {"large", row_large},
              {"tcp_barrier", row_tcp_barrier},
              {"tcp_all_reduce", row_tcp_all_reduce},
              {"tcp_all_gather", row_tcp_all_gather},
              {"shm_barrier", row_shm_barrier},
              {"shm_memory", row_shm_memory}};
  for (size_t i = 0; argc == 3 && i < sizeof rows / sizeof *rows; i++) {
    if (strcmp(argv[1], rows[i].name) == 0) {
      printf("%.6g\n", rows[i].run(atoll(argv[2])));
      return 0;
    }
  }
  fprintf(stderr, "growth ROW SIZE\n");
  return 2;
}
