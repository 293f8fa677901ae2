/* A thread that lets MPI make progress while this rank waits for others over TCP or in shared memory. MPI may hold back
 * data that it has reported as sent, until its next call. A peer may need that data before it can join this rank's
 * wait. */
#include <stdio.h>
#include <time.h>

#include "comm/mpi/mpi.h"

enum { PERIOD_NS = 2000000, IDLE_PERIODS = 500 }; /* after a second without a wait the thread blocks */

static struct {
  pthread_mutex_t mutex; /* held during calls of MPI, so that none goes on after a wait */
  pthread_cond_t changed;
  pthread_t thread;
  int32_t members; /* communicators */
  int32_t waits;
  bool running, blocked, stopping;
} progress = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static pthread_mutex_t membership = PTHREAD_MUTEX_INITIALIZER; /* one start or stop of the thread at a time */

static void sleep_period(void) {
  pthread_mutex_unlock(&progress.mutex);
  nanosleep(&(struct timespec){0, PERIOD_NS}, NULL);
  pthread_mutex_lock(&progress.mutex);
}

static void block_until_wait(void) {
  progress.blocked = true;
  while (progress.waits == 0 && !progress.stopping) {
    pthread_cond_wait(&progress.changed, &progress.mutex);
  }
  progress.blocked = false;
}

static void *progress_main(void *arg) {
  const dc__mpi_runtime *runtime = arg;
  int32_t idle = 0;
  pthread_mutex_lock(&progress.mutex);
  while (!progress.stopping) {
    sleep_period();
    if (progress.waits > 0) {
      idle = 0;
      (void)runtime->library->calls->iprobe(runtime->library, runtime->rank, runtime->world);
    } else if (++idle > IDLE_PERIODS) {
      block_until_wait();
    }
  }
  pthread_mutex_unlock(&progress.mutex);
  return NULL;
}

/* If the thread cannot start, MPI still makes progress, but only in this rank's own calls. */
void dc__mpi_progress_join(void) {
  pthread_mutex_lock(&membership);
  pthread_mutex_lock(&progress.mutex);
  if (progress.members++ == 0) {
    progress.stopping = false;
    progress.running = pthread_create(&progress.thread, NULL, progress_main, &dc__mpi_runtime_state) == 0;
  }
  pthread_mutex_unlock(&progress.mutex);
  pthread_mutex_unlock(&membership);
}

void dc__mpi_progress_leave(void) {
  pthread_mutex_lock(&membership);
  pthread_mutex_lock(&progress.mutex);
  bool last = --progress.members == 0 && progress.running;
  pthread_t thread = progress.thread;
  progress.stopping = progress.stopping || last;
  progress.running = progress.running && !last;
  pthread_cond_signal(&progress.changed);
  pthread_mutex_unlock(&progress.mutex);
  if (last) {
    pthread_join(thread, NULL);
  }
  pthread_mutex_unlock(&membership);
}

void dc__mpi_progress_begin(void) {
  pthread_mutex_lock(&progress.mutex);
  progress.waits++;
  if (progress.blocked) {
    pthread_cond_signal(&progress.changed);
  }
  pthread_mutex_unlock(&progress.mutex);
}

void dc__mpi_progress_end(void) {
  pthread_mutex_lock(&progress.mutex);
  progress.waits--;
  pthread_mutex_unlock(&progress.mutex);
}

bool dc__mpi_progress_is_needed(void) {
  pthread_mutex_lock(&progress.mutex);
  bool needed = progress.waits > 0;
  pthread_mutex_unlock(&progress.mutex);
  return needed;
}
