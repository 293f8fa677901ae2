/* The kernels' threads. A call puts a job, which lies on its stack, into the pool's list. Workers help any job with
 * work left. The caller works too, then waits for its helpers. */
#define _GNU_SOURCE /* sched_getaffinity, sched_getcpu */
#include "kernels/threadpool.h"

#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MIN_PARALLEL_COST = 1 << 18 }; /* multiplications or loads: about 20 microseconds, the cost of waking a thread */
/* A worker spins this often before it sleeps, since the kernels of a layer follow each other closely. So does a caller
 * before it sleeps, since its helpers' pieces of work take about as long as its own. */
enum { SPINS = 4000 };

typedef struct pool_job {
  dc__parallel_fn fn;
  void *arg;
  int64_t n;
  atomic_llong claimed; /* number of indices taken, by the caller from the first up, by helpers from the last down */
  int64_t front;        /* the caller's next index */
  atomic_llong back;    /* number of indices that helpers have taken */
  atomic_int helpers;   /* workers in the job; changes under the pool's mutex */
  struct pool_job *link;
} pool_job;

/* A worker, accessed under the pool's mutex. */
typedef struct worker_slot {
  pid_t thread;
  int processor; /* where it fell asleep; AWAKE if it is not asleep */
} worker_slot;

enum { AWAKE = -1 };

/* A block of scratch memory. Free blocks form a list. */
typedef union pool_scratch {
  union pool_scratch *link;
  unsigned char bytes[DC__SCRATCH_BYTES];
} pool_scratch;

struct dc__threadpool {
  int32_t threads;
  int32_t refs;         /* under `registry` */
  dc__threadpool *link; /* the next open pool; under `registry` */
  pid_t process;        /* the process that opened it: a child of fork() has no workers */
  pthread_mutex_t mutex;
  pthread_cond_t work; /* a job was added, or the pool ends */
  pthread_cond_t done; /* a helper left a job, or a block of scratch memory was returned */
  pool_job *jobs;
  atomic_int job_epoch; /* changes with every job, for workers that spin */
  atomic_bool stopping;
  bool started;
  int32_t workers; /* number of started workers */
  pthread_t *ids;
  worker_slot *slots;
  int32_t num_slots;
  cpu_set_t processors; /* the workers' affinity when they were started */
  pool_scratch *free;
};

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static dc__threadpool *open_pools;

static int32_t threadpool_count_cpus(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) {
    return 1;
  }
  int32_t count = CPU_COUNT(&set);
  return count < 1 ? 1 : count;
}

static pool_scratch *scratch_create(void) {
  void *block = NULL;
  return posix_memalign(&block, 4096, sizeof(pool_scratch)) == 0 ? block : NULL;
}

static void pool_free(dc__threadpool *pool) {
  while (pool->free != NULL) {
    pool_scratch *block = pool->free;
    pool->free = block->link;
    free(block);
  }
  pthread_mutex_destroy(&pool->mutex);
  pthread_cond_destroy(&pool->work);
  pthread_cond_destroy(&pool->done);
  dc__free(pool->ids);
  dc__free(pool->slots);
  dc__free(pool);
}

static dc__threadpool *pool_create(int32_t threads) {
  dc__threadpool *pool = dc__calloc(1, sizeof *pool);
  if (pool == NULL) {
    return NULL;
  }
  pool->threads = threads;
  pool->refs = 1;
  pool->process = getpid();
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->work, NULL);
  pthread_cond_init(&pool->done, NULL);
  pool->ids = dc__calloc((size_t)threads, sizeof *pool->ids);
  pool->slots = dc__calloc((size_t)threads, sizeof *pool->slots);
  const bool allocated = pool->ids != NULL && pool->slots != NULL;
  for (int32_t i = 0; i < threads && allocated; i++) {
    pool_scratch *block = scratch_create();
    if (block == NULL) {
      dc__fail(DC_E_NO_MEMORY, "out of host memory: %d bytes for a thread", (int)DC__SCRATCH_BYTES);
      pool_free(pool);
      return NULL;
    }
    block->link = pool->free;
    pool->free = block;
  }
  if (!allocated) {
    pool_free(pool);
    return NULL;
  }
  return pool;
}

dc_status dc__threadpool_open(int32_t threads, dc__threadpool **pool) {
  *pool = NULL;
  if (threads < 0 || threads > DC__THREADS_MAX) {
    return dc__fail(DC_E_INVALID, "threads = %" PRId32 ", must be 0 to %d", threads, (int)DC__THREADS_MAX);
  }
  int32_t count = threads > 0 ? threads : threadpool_count_cpus();
  count = count < DC__THREADS_MAX ? count : DC__THREADS_MAX;
  pthread_mutex_lock(&registry);
  dc__threadpool *found = open_pools;
  while (found != NULL && (found->threads != count || found->process != getpid())) {
    found = found->link;
  }
  if (found != NULL) {
    found->refs++;
  } else if ((found = pool_create(count)) != NULL) {
    found->link = open_pools;
    open_pools = found;
  }
  pthread_mutex_unlock(&registry);
  *pool = found;
  return found != NULL ? DC_OK : DC_E_NO_MEMORY;
}

void dc__threadpool_close(dc__threadpool *pool) {
  if (pool == NULL) {
    return;
  }
  pthread_mutex_lock(&registry);
  bool last = --pool->refs == 0;
  if (last) {
    dc__threadpool **at = &open_pools;
    while (*at != pool) {
      at = &(*at)->link;
    }
    *at = pool->link;
  }
  pthread_mutex_unlock(&registry);
  if (!last) {
    return;
  }
  if (pool->process == getpid()) { /* a child of fork() has the memory, but not the threads */
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->stopping, true);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (int32_t i = 0; i < pool->workers; i++) {
      pthread_join(pool->ids[i], NULL);
    }
  }
  pool_free(pool);
}

int32_t dc__threadpool_threads(const dc__threadpool *pool) {
  return pool->threads;
}

/* Takes indices from both ends. Successive kernels cut the same rows, so a thread finds more of its data in its caches
 * that way. */
static void run_job(pool_job *j, bool helper, void *block) {
  memset(block, 0, DC__SCRATCH_HEADER);
  while (atomic_fetch_add_explicit(&j->claimed, 1, memory_order_relaxed) < j->n) {
    j->fn(j->arg, helper ? j->n - 1 - atomic_fetch_add_explicit(&j->back, 1, memory_order_relaxed) : j->front++, block);
  }
}

/* Returns a block for a caller. If none is free, it allocates one, or waits for another caller's if that fails. */
static pool_scratch *scratch_acquire(dc__threadpool *pool) {
  pthread_mutex_lock(&pool->mutex);
  while (pool->free == NULL) {
    pool_scratch *more = scratch_create();
    if (more != NULL) {
      pthread_mutex_unlock(&pool->mutex);
      return more;
    }
    pthread_cond_wait(&pool->done, &pool->mutex);
  }
  pool_scratch *block = pool->free;
  pool->free = block->link;
  pthread_mutex_unlock(&pool->mutex);
  return block;
}

static void scratch_release(dc__threadpool *pool, pool_scratch *block) {
  pthread_mutex_lock(&pool->mutex);
  block->link = pool->free;
  pool->free = block;
  pthread_cond_broadcast(&pool->done);
  pthread_mutex_unlock(&pool->mutex);
}

static pool_job *find_job(dc__threadpool *pool) {
  pool_job *j = pool->jobs;
  while (j != NULL && atomic_load_explicit(&j->claimed, memory_order_relaxed) >= j->n) {
    j = j->link;
  }
  return j;
}

static void spin_for_work(dc__threadpool *pool, int32_t seen) {
  for (int32_t i = 0; i < SPINS && atomic_load_explicit(&pool->job_epoch, memory_order_relaxed) == seen &&
                      !atomic_load_explicit(&pool->stopping, memory_order_relaxed);
       i++) {
    dc__cpu_relax();
  }
}

static void spin_for_helpers(pool_job *j) {
  for (int32_t i = 0; i < SPINS && atomic_load_explicit(&j->helpers, memory_order_relaxed) > 0; i++) {
    dc__cpu_relax();
  }
}

static void *threadpool_worker_main(void *arg) {
  dc__threadpool *pool = arg;
  pool_scratch *block = scratch_acquire(pool);
  pthread_mutex_lock(&pool->mutex);
  worker_slot *own = &pool->slots[pool->num_slots++];
  *own = (worker_slot){(pid_t)syscall(SYS_gettid), AWAKE};
  while (!atomic_load(&pool->stopping)) {
    pool_job *j = find_job(pool);
    if (j != NULL) {
      atomic_fetch_add_explicit(&j->helpers, 1, memory_order_relaxed);
      pthread_mutex_unlock(&pool->mutex);
      run_job(j, true, block);
      pthread_mutex_lock(&pool->mutex);
      atomic_fetch_sub_explicit(&j->helpers, 1, memory_order_relaxed);
      pthread_cond_broadcast(&pool->done);
      continue;
    }
    int32_t seen = atomic_load(&pool->job_epoch);
    pthread_mutex_unlock(&pool->mutex);
    spin_for_work(pool, seen);
    pthread_mutex_lock(&pool->mutex);
    own->processor = sched_getcpu();
    while (!atomic_load(&pool->stopping) && atomic_load(&pool->job_epoch) == seen) {
      pthread_cond_wait(&pool->work, &pool->mutex);
    }
    own->processor = AWAKE;
  }
  pthread_mutex_unlock(&pool->mutex);
  scratch_release(pool, block);
  return NULL;
}

/* Called under the mutex. Workers block all signals. */
static void start_workers(dc__threadpool *pool) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  sched_getaffinity(0, sizeof pool->processors, &pool->processors);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  while (pool->workers < pool->threads - 1 &&
         pthread_create(&pool->ids[pool->workers], NULL, threadpool_worker_main, pool) == 0) {
    pool->workers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pool->started = true;
}

/* Moves sleeping workers off the caller's processor, under the mutex. A worker wakes on the processor where it fell
 * asleep. If no other is reported to share that one's cache, as in many virtual machines, the two threads would share
 * the processor for milliseconds. */
static void free_callers_cpu(dc__threadpool *pool) {
  int cpu = sched_getcpu();
  for (int32_t i = 0; i < pool->num_slots && cpu >= 0; i++) {
    cpu_set_t others;
    if (pool->slots[i].processor != cpu || sched_getaffinity(0, sizeof others, &others) != 0) {
      continue;
    }
    CPU_AND(&others, &others, &pool->processors);
    CPU_CLR((size_t)cpu, &others);
    if (CPU_COUNT(&others) > 0) {
      sched_setaffinity(pool->slots[i].thread, sizeof others, &others);
    }
  }
}

static void run_with_helpers(dc__threadpool *pool, pool_job *j, void *block) {
  pthread_mutex_lock(&pool->mutex);
  if (!pool->started) {
    start_workers(pool);
  }
  j->link = pool->jobs;
  pool->jobs = j;
  atomic_fetch_add(&pool->job_epoch, 1);
  free_callers_cpu(pool);
  pthread_cond_broadcast(&pool->work);
  pthread_mutex_unlock(&pool->mutex);
  run_job(j, false, block);
  spin_for_helpers(j);
  pthread_mutex_lock(&pool->mutex);
  pool_job **at = &pool->jobs;
  while (*at != j) {
    at = &(*at)->link;
  }
  *at = j->link;
  while (atomic_load_explicit(&j->helpers, memory_order_relaxed) >
         0) { /* under the mutex: the helpers' writes are visible */
    pthread_cond_wait(&pool->done, &pool->mutex);
  }
  pthread_mutex_unlock(&pool->mutex);
}

void *dc__scratch_acquire(dc__threadpool *pool) {
  if (pool->process == getpid()) {
    return scratch_acquire(pool);
  }
  /* In a child of fork() the mutex may be held by a thread that does not exist there. */
  pool_scratch *own = scratch_create();
  while (own == NULL) {
    sched_yield();
    own = scratch_create();
  }
  return own;
}

void dc__scratch_release(dc__threadpool *pool, void *block) {
  if (pool->process == getpid()) {
    scratch_release(pool, block);
  } else {
    free(block);
  }
}

void dc__parallel_for_scratch(dc__threadpool *pool, void *block, int64_t n, int64_t cost, dc__parallel_fn fn,
                              void *arg) {
  pool_job j = {.fn = fn, .arg = arg, .n = n};
  const bool small = n < MIN_PARALLEL_COST && cost < MIN_PARALLEL_COST && n * cost < MIN_PARALLEL_COST;
  if (small || n <= 1 || pool->threads == 1 || pool->process != getpid()) {
    run_job(&j, false, block);
  } else {
    run_with_helpers(pool, &j, block);
  }
}

void dc__parallel_for_cost(dc__threadpool *pool, int64_t n, int64_t cost, dc__parallel_fn fn, void *arg) {
  if (n > 0) {
    void *block = dc__scratch_acquire(pool);
    dc__parallel_for_scratch(pool, block, n, cost, fn, arg);
    dc__scratch_release(pool, block);
  }
}

void dc__parallel_for(dc__threadpool *pool, int64_t n, dc__parallel_fn fn, void *arg) {
  dc__parallel_for_cost(pool, n, MIN_PARALLEL_COST, fn, arg);
}
