/* Communicators of the simulated NCCL: how ranks find each other, their states, their memory. */
#include <stdlib.h>
#include <string.h>

#include "inside.h"

static world *worlds;
static struct ncclComm *comms;
static unsigned long ids;

/* ---- life ---- */

static void leave_world(world *w) {
  if (--w->members == 0) {
    world **link = &worlds;
    while (*link != w) {
      link = &(*link)->next;
    }
    *link = w->next;
    free(w);
  }
}

static void forget(struct ncclComm *comm) {
  struct ncclComm **link = &comms;
  while (*link != comm) {
    link = &(*link)->next;
  }
  *link = comm->next;
  ncclsim_free_groups(comm->captured);
  leave_world(comm->world);
  free(comm);
}

void ncclsim_drop(struct ncclComm *comm) {
  if (comm->ended && comm->groups == NULL && comm->captured == NULL) {
    forget(comm);
  }
}

void ncclsim_reset(void) {
  pthread_mutex_lock(&ncclsim_mutex);
  while (comms != NULL) {
    ncclsim_free_groups(comms->groups);
    forget(comms);
  }
  ncclsim_calls_reset();
  pthread_mutex_unlock(&ncclsim_mutex);
}

/* A process that opens NCCL without a test's reset finds the usual one. */
__attribute__((constructor)) static void begin(void) {
  ncclsim_reset();
}

int ncclGetUniqueId(dc__nccl_id *id) {
  NCCLSIM_ENTER(true);
  pthread_mutex_lock(&ncclsim_mutex);
  ids++;
  memset(id, 0x5a, sizeof *id);
  memcpy(id, &ids, sizeof ids);
  pthread_mutex_unlock(&ncclsim_mutex);
  return 0;
}

static world *find_world(const dc__nccl_id *id, int ranks) {
  world *w = worlds;
  while (w != NULL && memcmp(&w->id, id, sizeof *id) != 0) {
    w = w->next;
  }
  if (w == NULL) {
    w = calloc(1, sizeof *w);
    w->id = *id;
    w->ranks = ranks;
    w->next = worlds;
    worlds = w;
  }
  return w;
}

int ncclCommInitRankConfig(dc__nccl_handle *comm, int ranks, dc__nccl_id id, int rank, dc__nccl_config *config) {
  NCCLSIM_ENTER(true);
  if (config->magic != DC__NCCL_MAGIC || config->size != sizeof *config || config->blocking != 0 || ranks > RANKS ||
      rank < 0 || rank >= ranks) {
    return DC__NCCL_INVALID_ARGUMENT;
  }
  struct ncclComm *c = calloc(1, sizeof *c);
  pthread_mutex_lock(&ncclsim_mutex);
  c->world = find_world(&id, ranks);
  c->rank = rank;
  c->looks = LOOKS;
  c->error = c->world->ranks == ranks ? 0 : DC__NCCL_INVALID_USAGE;
  c->world->members++;
  c->world->joined += !ncclsim_takes_stall(rank);
  c->next = comms;
  comms = c;
  count_live(1);
  pthread_mutex_unlock(&ncclsim_mutex);
  *comm = c;
  return DC__NCCL_IN_PROGRESS;
}

int ncclCommGetAsyncError(dc__nccl_handle comm, int *error) {
  NCCLSIM_ENTER(false);
  pthread_mutex_lock(&ncclsim_mutex);
  bool waits = comm->world->joined < comm->world->ranks || comm->looks > 0;
  comm->looks -= comm->looks > 0;
  *error = comm->error != 0 ? comm->error : waits ? DC__NCCL_IN_PROGRESS : 0;
  pthread_mutex_unlock(&ncclsim_mutex);
  return 0;
}

int ncclCommFinalize(dc__nccl_handle comm) {
  NCCLSIM_ENTER(true);
  pthread_mutex_lock(&ncclsim_mutex);
  comm->looks = LOOKS;
  pthread_mutex_unlock(&ncclsim_mutex);
  return DC__NCCL_IN_PROGRESS;
}

/* What ends a communicator does so, whatever it says. */
static void end(struct ncclComm *comm, bool abort) {
  pthread_mutex_lock(&ncclsim_mutex);
  while (abort && comm->world->moving > 0) { /* what is being read stays */
    pthread_cond_wait(&ncclsim_progress, &ncclsim_mutex);
  }
  comm->world->aborted[comm->rank] = abort;
  pthread_cond_broadcast(&ncclsim_progress);
  comm->ended = true;
  count_live(-1);
  ncclsim_drop(comm);
  pthread_mutex_unlock(&ncclsim_mutex);
}

int ncclCommDestroy(dc__nccl_handle comm) {
  int error = ncclsim_enter(__func__, true);
  end(comm, false);
  return error;
}

int ncclCommAbort(dc__nccl_handle comm) {
  int error = ncclsim_enter(__func__, true);
  end(comm, true);
  return error;
}

/* ---- memory ---- */

int ncclMemAlloc(void **ptr, size_t bytes) {
  NCCLSIM_ENTER(true);
  dc__cu_ptr block = 0;
  if (cuMemAllocFromPoolAsync(&block, bytes, (dc__cu_pool)(void *)&worlds, NULL) != 0) {
    return DC__NCCL_CUDA_ERROR;
  }
  *ptr = (void *)(uintptr_t)block;
  count_live(1);
  return 0;
}

int ncclMemFree(void *ptr) {
  int error = ncclsim_enter(__func__, true);
  int freed = cuMemFreeAsync((dc__cu_ptr)(uintptr_t)ptr, NULL);
  count_live(-1);
  return error != 0 ? error : freed != 0 ? DC__NCCL_CUDA_ERROR : 0;
}

int ncclCommRegister(const dc__nccl_handle comm, void *data, size_t bytes, void **handle) {
  NCCLSIM_ENTER(true);
  *handle = comm != NULL && bytes > 0 ? data : NULL;
  count_live(1);
  return *handle != NULL ? 0 : DC__NCCL_INVALID_ARGUMENT;
}

int ncclCommDeregister(const dc__nccl_handle comm, void *handle) {
  int error = ncclsim_enter(__func__, true);
  count_live(-1);
  return comm != NULL && handle != NULL ? error : DC__NCCL_INVALID_ARGUMENT;
}
