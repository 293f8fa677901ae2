/* Communicators of the simulated NCCL: how ranks find each other, and their states. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ncclsim_internal.h"

enum { GRAPH_POLL_NS = 1000000 };

static world *worlds;
struct ncclComm *ncclsim_comms;
static unsigned long ids;
static bool end_together;

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
  struct ncclComm **link = &ncclsim_comms;
  while (*link != comm) {
    link = &(*link)->next;
  }
  *link = comm->next;
  ncclsim_free_groups(comm->captured);
  (void)ncclsim_end_memory(comm);
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
  while (ncclsim_comms != NULL) {
    ncclsim_free_groups(ncclsim_comms->groups);
    forget(ncclsim_comms);
  }
  end_together = false;
  ncclsim_windows_reset();
  ncclsim_calls_reset();
  pthread_mutex_unlock(&ncclsim_mutex);
}

void ncclsim_end_together(void) {
  pthread_mutex_lock(&ncclsim_mutex);
  end_together = true;
  pthread_mutex_unlock(&ncclsim_mutex);
}

/* If a process opens NCCL without a reset by a test, it finds the default one. */
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
  c->next = ncclsim_comms;
  ncclsim_comms = c;
  count_live(1);
  pthread_mutex_unlock(&ncclsim_mutex);
  *comm = c;
  return DC__NCCL_IN_PROGRESS;
}

static _Thread_local int polls;

int ncclsim_thread_polls(void) {
  return polls;
}

/* While such a graph exists, NCCL's communicator does not end. */
static bool graph_lives(const struct ncclComm *comm) {
  const group *g = comm->captured;
  while (g != NULL && !cudasim_graph_lives(g->graph)) {
    g = g->next;
  }
  return g != NULL;
}

int ncclCommGetAsyncError(dc__nccl_handle comm, int *error) {
  polls++;
  NCCLSIM_ENTER(false);
  pthread_mutex_lock(&ncclsim_mutex);
  bool waits = comm->world->joined < comm->world->ranks || ncclsim_opens(comm) || comm->looks > 0 ||
               comm->launching > 0 || (comm->finalizes && graph_lives(comm));
  comm->looks -= comm->looks > 0;
  *error = comm->error != 0 ? comm->error : waits ? DC__NCCL_IN_PROGRESS : 0;
  pthread_mutex_unlock(&ncclsim_mutex);
  return 0;
}

int ncclCommFinalize(dc__nccl_handle comm) {
  NCCLSIM_ENTER(true);
  pthread_mutex_lock(&ncclsim_mutex);
  comm->looks = LOOKS;
  comm->finalizes = true;
  pthread_mutex_unlock(&ncclsim_mutex);
  return DC__NCCL_IN_PROGRESS;
}

/* A call that ends a communicator ends it, whatever the call returns. */
static void end(struct ncclComm *comm, bool abort) {
  pthread_mutex_lock(&ncclsim_mutex);
  while (comm->launching > 0 || (abort && comm->world->moving > 0)) { /* memory that is being read must stay */
    pthread_cond_wait(&ncclsim_progress, &ncclsim_mutex);
  }
  comm->world->aborted[comm->rank] = abort;
  comm->world->ending++;
  pthread_cond_broadcast(&ncclsim_progress);
  while (end_together && comm->world->ending < comm->world->ranks) {
    pthread_cond_wait(&ncclsim_progress, &ncclsim_mutex);
  }
  while (graph_lives(comm)) {
    pthread_mutex_unlock(&ncclsim_mutex);
    clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){0, GRAPH_POLL_NS}, NULL); /* not the program's nanosleep() */
    pthread_mutex_lock(&ncclsim_mutex);
  }
  comm->ended = true;
  count_live(-1 - ncclsim_end_memory(comm));
  ncclsim_drop(comm);
  pthread_mutex_unlock(&ncclsim_mutex);
}

int ncclCommDestroy(dc__nccl_handle comm) {
  int error = ncclsim_enter(__func__, true);
  end(comm, false);
  return error;
}

int ncclCommAbort(dc__nccl_handle comm) {
  int error = ncclsim_enter(__func__, false); /* this call sets the device itself */
  end(comm, true);
  return error;
}
