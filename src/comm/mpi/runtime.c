/* Initialises MPI in this process, and finalizes it. A process can initialise MPI only once. */
#include <inttypes.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "comm/mpi/mpi.h"

dc__mpi_runtime dc__mpi_runtime_state = {.mutex = PTHREAD_MUTEX_INITIALIZER};

enum { EXIT_PAUSE_NS = 1000000 };
static const int64_t failed_exit_ns = INT64_C(5000000000); /* how long an exit after a failure waits for the others */

/* ---- the end ---- */

static bool has_lost_a_rank(dc_comm *control) {
  dc__tcp_group *group = ((dc__tcp *)control)->group;
  bool lost = false;
  for (int32_t r = 0; r < control->world; r++) {
    lost = lost || atomic_load(&group->closed[r]) == DC__TCP_DISCONNECTED;
  }
  return lost;
}

/* A rank whose watcher is silent is stopped. In an overlay the neighbours of other stopped ranks notice them, and then
 * leave. */
static bool has_stopped_rank(dc_comm *control) {
  dc__tcp_group *group = ((dc__tcp *)control)->group;
  bool stopped = false;
  for (int32_t r = 0; r < control->world; r++) {
    const bool left = atomic_load(&group->closed[r]) != 0;
    stopped = stopped || (left ? group->overlay : group->control[r] >= 0 && dc__tcp_is_silent(group, r));
  }
  return stopped;
}

/* Whether the others cannot all reach their exit: one is dead, or stopped, or a failure was long ago. *until is when to
 * look for stopped ranks, as at the deadline of a collective. `last` is NULL if the ranks have not met. */
static bool gives_up_exit(dc_comm *last, int64_t begun, int64_t *until) {
  if (last != NULL) {
    last->ops->check_peers(last);
    if (has_lost_a_rank(last)) {
      return true;
    }
  }
  if (last == NULL || dc__comm_check(last) != DC_OK) {
    return dc__now_ns() > begun + failed_exit_ns;
  }
  if (dc__now_ns() < *until) {
    return false;
  }
  *until = dc__now_ns() + last->timeout_ns;
  return has_stopped_rank(last);
}

/* Waits until all ranks have reached their exit: without a limit while they are alive, as MPI_Finalize() would. */
static bool all_exit(dc__mpi_runtime *runtime) {
  const dc__mpi_library *mpi = runtime->library;
  dc__mpi_handle request = {.pointer = NULL};
  dc_comm *last = runtime->last;
  int64_t begun = dc__now_ns(), until = begun + (last == NULL ? 0 : last->timeout_ns);
  int done = 0, error = mpi->calls->ibarrier(mpi, runtime->world, &request);
  while (error == 0 && (error = mpi->calls->test(mpi, &request, &done)) == 0 && done == 0) {
    if (gives_up_exit(last, begun, &until)) {
      return false;
    }
    nanosleep(&(struct timespec){0, EXIT_PAUSE_NS}, NULL);
  }
  return error == 0; /* MPI also reports a failed barrier as done */
}

static bool is_finalized(const dc__mpi_library *mpi) {
  int finalized = 0;
  (void)mpi->MPI_Finalized(&finalized);
  return finalized != 0;
}

static void finalize_at_exit(void) {
  dc__mpi_runtime *runtime = &dc__mpi_runtime_state;
  if (getpid() != atomic_load(&runtime->pid) || is_finalized(runtime->library)) {
    return;
  }
  bool healthy =
      runtime->ready && atomic_load(&runtime->abandoned) == 0 && !dc__mpi_progress_is_needed() && all_exit(runtime);
  if (runtime->last != NULL) {
    dc__comm_release(runtime->last);
    runtime->last = NULL;
  }
  if (healthy) {
    (void)runtime->library->MPI_Finalize();
  }
}

void dc__mpi_keep(dc_comm *control) {
  dc__mpi_runtime *runtime = &dc__mpi_runtime_state;
  if (!runtime->owned) {
    return;
  }
  if (runtime->last != NULL) {
    dc__comm_release(runtime->last);
  }
  runtime->last = dc__comm_retain(control);
}

/* ---- the beginning ---- */

dc_status dc__mpi_check_process(const char *fn) {
  const int pid = atomic_load(&dc__mpi_runtime_state.pid);
  return pid == 0 || pid == getpid() ? DC_OK
                                     : dc__fail(DC_E_STATE,
                                                "%s: MPI belongs to process %d, which forked this one (%d); a child "
                                                "may make communicators of other kinds",
                                                fn, pid, (int)getpid());
}

bool dc__mpi_is_usable(const dc__mpi_library *mpi) {
  return !is_finalized(mpi) && atomic_load(&dc__mpi_runtime_state.abandoned) == 0;
}

dc_status dc__mpi_check_usable(const dc__mpi_library *mpi, const char *fn) {
  if (dc__mpi_is_usable(mpi)) {
    return DC_OK;
  }
  return is_finalized(mpi) ? dc__fail(DC_E_STATE, "%s: MPI has been finalized in this process", fn)
                           : dc__fail(DC_E_STATE,
                                      "%s: an earlier collective over MPI was given up after an error, and MPI may "
                                      "still run it; start new processes",
                                      fn);
}

static dc_status check_thread_level(const dc__mpi_library *mpi, bool by_caller) {
  int level = 0;
  if (mpi->MPI_Query_thread(&level) == 0 && level == mpi->thread_multiple) {
    return DC_OK;
  }
  return dc__fail(DC_E_UNSUPPORTED,
                  "dc_comm_create_mpi: MPI gives a thread level of %d, must be MPI_THREAD_MULTIPLE (%d)%s", level,
                  mpi->thread_multiple,
                  by_caller ? ": call MPI_Init_thread with it, or leave MPI to libdc" : "; this MPI was built without");
}

static dc_status init_mpi(dc__mpi_runtime *runtime, int32_t *launched) {
  const dc__mpi_library *mpi = runtime->library;
  int initialized = 0, level = 0;
  *launched = 0;
  (void)mpi->MPI_Initialized(&initialized);
  if (initialized == 0) {
    DC__TRY(dc__mpi_check_launcher(mpi, launched));
  }
  atomic_store(&runtime->pid, getpid());
  if (initialized == 0) {
    int error = mpi->MPI_Init_thread(NULL, NULL, mpi->thread_multiple, &level);
    if (error != 0) {
      return dc__fail(DC_E_SYSTEM, "dc_comm_create_mpi: MPI_Init_thread fails (%d)", error);
    }
    runtime->owned = true;
    (void)atexit(finalize_at_exit);
  }
  return check_thread_level(mpi, initialized != 0);
}

static dc_status copy_world(dc__mpi_runtime *runtime, int64_t timeout_ns) {
  const dc__mpi_library *mpi = runtime->library;
  dc__mpi_wait wait = {.mpi = mpi, .timeout_ns = timeout_ns, .what = "dc_comm_create_mpi", .count = 1};
  int rank = 0, size = 0;
  (void)mpi->calls->comm_rank(mpi, mpi->world, &rank);
  (void)mpi->calls->comm_size(mpi, mpi->world, &size);
  wait.rank = runtime->rank = rank;
  runtime->size = size;
  if (size > DC__COMM_MAX_WORLD) {
    return dc__fail(DC_E_UNSUPPORTED, "dc_comm_create_mpi: MPI_COMM_WORLD has %d ranks, must be at most %d", size,
                    DC__COMM_MAX_WORLD);
  }
  if (runtime->owned) {
    (void)mpi->calls->comm_return_errors(mpi, mpi->world); /* else MPI ends the process at an error */
  }
  DC__TRY(dc__mpi_check_result(&wait, "MPI_Comm_idup",
                               mpi->calls->comm_idup(mpi, mpi->world, &runtime->world, &wait.requests[0])));
  DC__TRY(dc__mpi_wait_all(&wait));
  (void)mpi->calls->comm_return_errors(mpi, runtime->world);
  runtime->ready = true;
  return DC_OK;
}

dc_status dc__mpi_start(int64_t timeout_ns) {
  dc__mpi_runtime *runtime = &dc__mpi_runtime_state;
  int32_t launched;
  DC__TRY(dc__mpi_open(&runtime->library));
  DC__TRY(dc__mpi_check_usable(runtime->library, "dc_comm_create_mpi"));
  if (runtime->ready) {
    return DC_OK;
  }
  DC__TRY(init_mpi(runtime, &launched));
  int size = 0;
  (void)runtime->library->calls->comm_size(runtime->library, runtime->library->world, &size);
  if (launched != 0 && size != launched) {
    return dc__fail(DC_E_MISMATCH,
                    "dc_comm_create_mpi: the launcher started %" PRId32
                    " ranks, but MPI (%s) has %d: the launcher is another MPI's",
                    launched, runtime->library->version, size);
  }
  return copy_world(runtime, timeout_ns);
}
