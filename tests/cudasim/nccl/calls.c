/* The tests' controls of the simulated NCCL; its version and the texts of its errors. Calls are counted, and made to
 * fail, like the driver's. */
#include <string.h>

#include "base/base.h"
#include "ncclsim_internal.h"

pthread_mutex_t ncclsim_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t ncclsim_progress = PTHREAD_COND_INITIALIZER;
static int version;
static int break_error[RANKS];
static bool stalls[RANKS];

void ncclsim_calls_reset(void) {
  memset(break_error, 0, sizeof break_error);
  memset(stalls, 0, sizeof stalls);
  version = 22907;
}

void ncclsim_set_version(int to) {
  version = to;
}

void ncclsim_break(int rank, int error) {
  pthread_mutex_lock(&ncclsim_mutex);
  break_error[rank] = error;
  pthread_mutex_unlock(&ncclsim_mutex);
}

void ncclsim_stall(int rank) {
  pthread_mutex_lock(&ncclsim_mutex);
  stalls[rank] = true;
  pthread_mutex_unlock(&ncclsim_mutex);
}

int ncclsim_takes_break(int rank) {
  int error = break_error[rank];
  break_error[rank] = 0;
  return error;
}

bool ncclsim_takes_stall(int rank) {
  bool taken = stalls[rank];
  stalls[rank] = false;
  return taken;
}

int ncclsim_enter(const char *function, bool needs_device) {
  int error = enter(function, needs_device);
  return error < FIRST_DRIVERS_ERROR ? error : DC__NCCL_CUDA_ERROR;
}

/* ---- versions and errors ---- */

int ncclGetVersion(int *to) {
  NCCLSIM_ENTER(false);
  *to = version;
  return 0;
}

const char *ncclGetErrorString(int error) {
  static const char *const texts[] = {"no error",
                                      "unhandled cuda error",
                                      "unhandled system error",
                                      "internal error",
                                      "invalid argument",
                                      "invalid usage",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress"};
  return error >= 0 && error < (int)DC__COUNT(texts) ? texts[error] : "unknown result code";
}

const char *ncclGetLastError(dc__nccl_handle comm) {
  pthread_mutex_lock(&ncclsim_mutex);
  const char *why = comm == NULL ? "" : comm->why != NULL ? comm->why : "simulated";
  pthread_mutex_unlock(&ncclsim_mutex);
  return why;
}
