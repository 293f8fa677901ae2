/* Groups of the simulated NCCL: a thread collects the calls, and a stream runs them when all ranks' streams have
 * reached them. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ncclsim_internal.h"

enum { LAUNCH_NS = 100000 };

static _Thread_local int depth;
static _Thread_local group *open;
static _Thread_local int64_t ended_ns;

/* ---- collecting calls ---- */

int ncclGroupStart(void) {
  NCCLSIM_ENTER(false);
  depth++;
  return 0;
}

static void free_group(group *g) {
  free(g->calls);
  free(g);
}

void ncclsim_free_groups(group *first) {
  while (first != NULL) {
    group *next = first->next;
    free_group(first);
    first = next;
  }
}

static int add(struct ncclComm *comm, void *stream, call c) {
  pthread_mutex_lock(&ncclsim_mutex);
  const bool busy = comm->launching > 0 || comm->opening.to != NULL; /* it takes no call until it is ready again */
  pthread_mutex_unlock(&ncclsim_mutex);
  if (c.peer < 0 || c.peer >= comm->world->ranks) {
    return DC__NCCL_INVALID_ARGUMENT;
  }
  if (depth == 0 || busy || (open != NULL && (open->comm != comm || open->stream != stream))) {
    return DC__NCCL_INVALID_USAGE; /* libdc's groups have calls of one communicator only */
  }
  if (open == NULL) {
    open = calloc(1, sizeof *open);
    open->comm = comm;
    open->stream = stream;
  }
  if (open->count == open->capacity) {
    open->capacity = open->capacity * 2 + 8;
    open->calls = realloc(open->calls, sizeof c * (size_t)open->capacity);
  }
  pthread_mutex_lock(&ncclsim_mutex);
  ncclsim_locate(comm, &c);
  pthread_mutex_unlock(&ncclsim_mutex);
  open->calls[open->count++] = c;
  return 0;
}

static size_t bytes_of(size_t count, int dtype) {
  return dtype == DC__NCCL_INT8 ? count : 0; /* the only type that libdc moves */
}

int ncclAllGather(const void *send, void *recv, size_t count, int dtype, dc__nccl_handle comm, void *stream) {
  NCCLSIM_ENTER(true);
  return add(comm, stream, (call){.kind = ALL_GATHER, .send = send, .recv = recv, .bytes = bytes_of(count, dtype)});
}

int ncclBroadcast(const void *send, void *recv, size_t count, int dtype, int root, dc__nccl_handle comm, void *stream) {
  NCCLSIM_ENTER(true);
  return add(comm, stream,
             (call){.kind = BROADCAST, .send = send, .recv = recv, .bytes = bytes_of(count, dtype), .peer = root});
}

int ncclSend(const void *data, size_t count, int dtype, int peer, dc__nccl_handle comm, void *stream) {
  NCCLSIM_ENTER(true);
  return add(comm, stream, (call){.kind = SEND, .send = data, .bytes = bytes_of(count, dtype), .peer = peer});
}

int ncclRecv(void *data, size_t count, int dtype, int peer, dc__nccl_handle comm, void *stream) {
  NCCLSIM_ENTER(true);
  return add(comm, stream, (call){.kind = RECV, .recv = data, .bytes = bytes_of(count, dtype), .peer = peer});
}

/* ---- moving data ---- */

/* Returns the peer's call that matches one of this rank's; NULL: none does. */
static const call *partner(const world *w, const group *g, int index, int peer) {
  const call *own = &g->calls[index];
  const group *other = w->groups[peer];
  const call *found = NULL;
  int before = 0;
  if (own->kind != RECV) {
    found = index < other->count ? &other->calls[index] : NULL;
    return found != NULL && found->kind == own->kind && found->bytes == own->bytes && found->peer == own->peer &&
                   ncclsim_alike(found, own)
               ? found
               : NULL;
  }
  for (int i = 0; i < index; i++) {
    before += g->calls[i].kind == RECV && g->calls[i].peer == peer;
  }
  for (int i = 0; i < other->count && found == NULL; i++) {
    bool to_me = other->calls[i].kind == SEND && other->calls[i].peer == g->comm->rank;
    found = to_me && before-- == 0 ? &other->calls[i] : NULL;
  }
  return found != NULL && found->bytes == own->bytes ? found : NULL;
}

static bool copy(char *to, const char *from, size_t bytes) {
  char *dst = cudasim_host_ptr(to);
  const char *src = cudasim_host_ptr(from);
  if (dst == NULL || src == NULL || (char *)cudasim_host_ptr(to + bytes) != dst + bytes ||
      (const char *)cudasim_host_ptr(from + bytes) != src + bytes) {
    return false;
  }
  if (dst != src) {
    memmove(dst, src, bytes);
  }
  return true;
}

static int move_from(const world *w, const group *g, int index, int peer, size_t offset) {
  const call *own = &g->calls[index];
  const call *other = peer == g->comm->rank ? own : partner(w, g, index, peer);
  if (other == NULL) {
    return DC__NCCL_INVALID_USAGE;
  }
  if (other != own && !ncclsim_both_registered(own, other)) {
    pthread_mutex_lock(&ncclsim_mutex);
    g->comm->why = "only one side's memory is registered";
    pthread_mutex_unlock(&ncclsim_mutex);
    return DC__NCCL_INVALID_USAGE;
  }
  return copy(own->recv + offset, other->send, own->bytes) ? 0 : DC__NCCL_CUDA_ERROR;
}

static int move_all(const world *w, const group *g) {
  int error = 0;
  for (int i = 0; i < g->count && error == 0; i++) {
    const call *c = &g->calls[i];
    for (int peer = 0; c->kind == ALL_GATHER && peer < w->ranks && error == 0; peer++) {
      error = move_from(w, g, i, peer, (size_t)peer * c->bytes);
    }
    if (c->kind == BROADCAST || c->kind == RECV) {
      error = move_from(w, g, i, c->peer, 0);
    }
  }
  return error;
}

/* Whether all ranks have come this far, and with no_aborts, none has aborted. */
static bool all(const world *w, const unsigned long *counts, unsigned long number, bool no_aborts) {
  bool come = true;
  for (int r = 0; r < w->ranks; r++) {
    come = come && counts[r] >= number && !(no_aborts && w->aborted[r]);
  }
  return come;
}

static void run_collective(world *w, group *g) {
  struct ncclComm *comm = g->comm;
  unsigned long number = ++w->posted[comm->rank];
  w->groups[comm->rank] = g;
  pthread_cond_broadcast(&ncclsim_progress);
  while (!w->aborted[comm->rank] && !all(w, w->posted, number, true)) {
    pthread_cond_wait(&ncclsim_progress, &ncclsim_mutex);
  }
  if (w->aborted[comm->rank]) {
    return;
  }
  w->moving++;
  pthread_mutex_unlock(&ncclsim_mutex);
  int error = move_all(w, g);
  pthread_mutex_lock(&ncclsim_mutex);
  w->moving--;
  comm->error = comm->error != 0 ? comm->error : error;
  w->done[comm->rank] = number;
  pthread_cond_broadcast(&ncclsim_progress);
  while (!w->aborted[comm->rank] && !all(w, w->done, number, false)) {
    pthread_cond_wait(&ncclsim_progress, &ncclsim_mutex);
  }
}

static void remove_group(group *g) {
  group **link = g->captured ? &g->comm->captured : &g->comm->groups;
  while (*link != g) {
    link = &(*link)->next;
  }
  *link = g->next;
  free_group(g);
}

static void run(group *g) {
  struct ncclComm *comm = g->comm;
  world *w = comm->world;
  comm->error = comm->error != 0 ? comm->error : g->breaks;
  if (comm->error != 0) { /* later work of the graph finds no peers either */
    return;
  }
  while (g->stalls && !w->aborted[comm->rank]) {
    pthread_cond_wait(&ncclsim_progress, &ncclsim_mutex);
  }
  if (!w->aborted[comm->rank]) {
    run_collective(w, g);
  }
}

static void take_orders(group *g) {
  g->breaks = ncclsim_takes_break(g->comm->rank);
  g->stalls = ncclsim_takes_stall(g->comm->rank);
}

/* Runs on the stream's thread. */
static void run_group(void *arg) {
  group *g = arg;
  struct ncclComm *comm = g->comm;
  pthread_mutex_lock(&ncclsim_mutex);
  if (g->captured) {
    take_orders(g);
    run(g);
  } else {
    run(g);
    remove_group(g);
  }
  ncclsim_drop(comm);
  pthread_mutex_unlock(&ncclsim_mutex);
}

/* A refused group is freed. A captured one stays, and keeps its communicator alive. */
static int launch(group *g) {
  struct ncclComm *comm = g->comm;
  int captured = 0;
  int refused = cuStreamIsCapturing(g->stream, &captured);
  pthread_mutex_lock(&ncclsim_mutex);
  g->captured = captured != 0;
  g->graph = captured != 0 ? cudasim_graph_of(g->stream) : 0;
  if (!g->captured) {
    take_orders(g);
  }
  group **list = g->captured ? &comm->captured : &comm->groups;
  g->next = *list;
  *list = g;
  pthread_mutex_unlock(&ncclsim_mutex);
  if (refused == 0 && cuLaunchHostFunc(g->stream, run_group, g) == 0) {
    return 0;
  }
  pthread_mutex_lock(&ncclsim_mutex);
  remove_group(g);
  pthread_mutex_unlock(&ncclsim_mutex);
  return DC__NCCL_CUDA_ERROR;
}

/* For a non-blocking communicator, NCCL starts a thread at the end of each group. */
static void *launch_late(void *arg) {
  group *g = arg;
  struct ncclComm *comm = g->comm;
  clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){0, LAUNCH_NS}, NULL); /* not the program's nanosleep() */
  cudasim_become(comm->device);
  int error = launch(g);
  pthread_mutex_lock(&ncclsim_mutex);
  comm->error = comm->error != 0 ? comm->error : error;
  comm->launching--;
  pthread_cond_broadcast(&ncclsim_progress);
  pthread_mutex_unlock(&ncclsim_mutex);
  return NULL;
}

/* A communicator of one rank needs no thread. */
static int launch_on_thread(group *g) {
  struct ncclComm *comm = g->comm;
  if (comm->world->ranks == 1) {
    return launch(g);
  }
  pthread_t thread;
  pthread_mutex_lock(&ncclsim_mutex);
  comm->launching++;
  comm->device = cudasim_current();
  pthread_mutex_unlock(&ncclsim_mutex);
  if (pthread_create(&thread, NULL, launch_late, g) != 0) {
    abort();
  }
  pthread_detach(thread);
  return DC__NCCL_IN_PROGRESS;
}

int64_t ncclsim_group_ended_ns(void) {
  return ended_ns;
}

int ncclGroupEnd(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  ended_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
  int error = ncclsim_enter(__func__, open != NULL);
  group *g = open;
  if (depth == 0) {
    return DC__NCCL_INVALID_USAGE;
  }
  open = NULL;
  depth--;
  if (g == NULL || error != 0) {
    if (g != NULL) {
      free_group(g);
    }
    return error;
  }
  return launch_on_thread(g);
}
