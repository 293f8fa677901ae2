/* Memory of the simulated NCCL, and its rules of registration. A window belongs to all ranks: of memory of
 * ncclMemAlloc, in the same order and of the same size. Meanwhile the communicator gets no other call. Freeing or
 * deregistering memory that queued work uses ends the process. collectives.c checks that gathers use the same
 * windows. */
#include <stdio.h>
#include <stdlib.h>

#include "ncclsim_internal.h"

enum { ALIGNMENT = 4096 }; /* of a window's first byte */

typedef struct block {
  struct block *next;
  char *ptr;
  size_t bytes;
} block;

static block *blocks;
static bool has_windows;
static int through;

void ncclsim_windows_reset(void) {
  while (blocks != NULL) { /* blocks that a lost device left */
    block *next = blocks->next;
    free(blocks);
    blocks = next;
  }
  has_windows = true;
  through = 0;
}

void ncclsim_set_windows(bool there) {
  has_windows = there;
}

int ncclsim_through_windows(void) {
  pthread_mutex_lock(&ncclsim_mutex);
  int found = through;
  pthread_mutex_unlock(&ncclsim_mutex);
  return found;
}

/* ---- users of memory ---- */

static bool overlaps(const char *a, size_t a_bytes, const char *b, size_t b_bytes) {
  return a != NULL && b != NULL && a < b + b_bytes && b < a + a_bytes;
}

static size_t received(const struct ncclComm *comm, const call *c) {
  return c->kind == ALL_GATHER ? c->bytes * (size_t)comm->world->ranks : c->bytes;
}

/* Groups in graphs do not count: they still exist, but need not be launched again. */
static void must_be_unused(const struct ncclComm *comm, const char *ptr, size_t bytes, const char *what) {
  for (const group *g = comm->groups; g != NULL; g = g->next) {
    for (int i = 0; i < g->count; i++) {
      const call *c = &g->calls[i];
      if (overlaps(c->send, c->bytes, ptr, bytes) || overlaps(c->recv, received(comm, c), ptr, bytes)) {
        fprintf(stderr, "simulated NCCL: %s of memory that queued work of rank %d uses\n", what, comm->rank);
        abort();
      }
    }
  }
}

/* ---- blocks ---- */

int ncclMemAlloc(void **ptr, size_t bytes) {
  NCCLSIM_ENTER(true);
  *ptr = cudasim_alloc(cudasim_current(), bytes, 0);
  if (*ptr == NULL) {
    return DC__NCCL_CUDA_ERROR;
  }
  block *b = malloc(sizeof *b);
  pthread_mutex_lock(&ncclsim_mutex);
  *b = (block){blocks, *ptr, bytes};
  blocks = b;
  count_live(1);
  pthread_mutex_unlock(&ncclsim_mutex);
  return 0;
}

int ncclMemFree(void *ptr) {
  int error = ncclsim_enter(__func__, true);
  pthread_mutex_lock(&ncclsim_mutex);
  block **link = &blocks;
  while (*link != NULL && (*link)->ptr != ptr) {
    link = &(*link)->next;
  }
  block *b = *link;
  if (b != NULL) {
    for (const struct ncclComm *comm = ncclsim_comms; comm != NULL; comm = comm->next) {
      must_be_unused(comm, b->ptr, b->bytes, "ncclMemFree");
    }
    *link = b->next;
    free(b);
    count_live(-1);
  }
  pthread_mutex_unlock(&ncclsim_mutex);
  if (b == NULL) {
    return DC__NCCL_INVALID_ARGUMENT;
  }
  int freed = cuMemFreeAsync((dc__cu_ptr)(uintptr_t)ptr, NULL);
  return error != 0 ? error : freed != 0 ? DC__NCCL_CUDA_ERROR : 0;
}

/* ---- of one rank ---- */

int ncclCommRegister(const dc__nccl_handle comm, void *data, size_t bytes, void **handle) {
  NCCLSIM_ENTER(true);
  pthread_mutex_lock(&ncclsim_mutex);
  bool fine = comm != NULL && bytes > 0 && comm->opening.to == NULL;
  if (fine) {
    registration *fresh = malloc(sizeof *fresh);
    *fresh = (registration){comm->registrations, data, bytes};
    comm->registrations = fresh;
    count_live(1);
  }
  pthread_mutex_unlock(&ncclsim_mutex);
  *handle = fine ? data : NULL;
  return fine ? 0 : DC__NCCL_INVALID_USAGE;
}

int ncclCommDeregister(const dc__nccl_handle comm, void *handle) {
  int error = ncclsim_enter(__func__, true);
  pthread_mutex_lock(&ncclsim_mutex);
  registration **link = &comm->registrations;
  while (*link != NULL && (*link)->ptr != handle) {
    link = &(*link)->next;
  }
  registration *found = *link;
  if (found != NULL) {
    must_be_unused(comm, found->ptr, found->bytes, "ncclCommDeregister");
    *link = found->next;
    free(found);
    count_live(-1);
  }
  pthread_mutex_unlock(&ncclsim_mutex);
  return found != NULL ? error : DC__NCCL_INVALID_ARGUMENT;
}

/* ---- of all ranks ---- */

static bool is_block(const char *ptr, size_t bytes) {
  const block *b = blocks;
  while (b != NULL && b->ptr != ptr) {
    b = b->next;
  }
  return b != NULL && bytes <= b->bytes && (uintptr_t)ptr % ALIGNMENT == 0;
}

int ncclCommWindowRegister(dc__nccl_handle comm, void *data, size_t bytes, dc__nccl_window *to, int flags) {
  NCCLSIM_ENTER(true);
  int error = DC__NCCL_IN_PROGRESS;
  pthread_mutex_lock(&ncclsim_mutex);
  world *w = comm->world;
  *to = NULL;
  if (!has_windows) {
    error = 0;
  } else if (!is_block(data, bytes) || flags != DC__NCCL_SYMMETRIC) {
    error = DC__NCCL_INVALID_ARGUMENT;
  } else if (comm->opening.to != NULL || comm->looks > 0 || comm->launching > 0 || w->windows[comm->rank] == WINDOWS) {
    error = DC__NCCL_INVALID_USAGE;
  } else {
    int number = w->windows[comm->rank]++;
    if (w->window_bytes[number] == 0) {
      w->window_bytes[number] = bytes;
    }
    comm->error = w->window_bytes[number] == bytes ? comm->error : DC__NCCL_INVALID_USAGE;
    comm->opening = (opening){to, {NULL, data, bytes, number + 1}};
  }
  pthread_mutex_unlock(&ncclsim_mutex);
  return error;
}

bool ncclsim_opens(struct ncclComm *comm) {
  const world *w = comm->world;
  if (comm->opening.to == NULL) {
    return false;
  }
  for (int r = 0; r < w->ranks; r++) {
    if (w->windows[r] < comm->opening.window.number) {
      return true;
    }
  }
  window *fresh = malloc(sizeof *fresh);
  *fresh = comm->opening.window;
  fresh->next = comm->windows;
  comm->windows = fresh;
  *comm->opening.to = fresh;
  comm->opening.to = NULL;
  count_live(1);
  return false;
}

int ncclCommWindowDeregister(dc__nccl_handle comm, dc__nccl_window handle) {
  int error = ncclsim_enter(__func__, true);
  pthread_mutex_lock(&ncclsim_mutex);
  window **link = &comm->windows;
  while (*link != NULL && *link != handle) {
    link = &(*link)->next;
  }
  window *found = *link;
  if (found != NULL) {
    must_be_unused(comm, found->ptr, found->bytes, "ncclCommWindowDeregister");
    *link = found->next;
    free(found);
    count_live(-1);
  }
  pthread_mutex_unlock(&ncclsim_mutex);
  return found != NULL ? error : DC__NCCL_INVALID_ARGUMENT;
}

int ncclsim_end_memory(struct ncclComm *comm) {
  int ended = 0;
  for (; comm->registrations != NULL; ended++) {
    registration *next = comm->registrations->next;
    free(comm->registrations);
    comm->registrations = next;
  }
  for (; comm->windows != NULL; ended++) {
    window *next = comm->windows->next;
    free(comm->windows);
    comm->windows = next;
  }
  return ended;
}

/* ---- where a call's memory lies ---- */

static spot spot_of(const struct ncclComm *comm, const char *ptr) {
  const window *w = comm->windows;
  while (w != NULL && !(ptr >= w->ptr && ptr < w->ptr + w->bytes)) {
    w = w->next;
  }
  return w == NULL ? (spot){0, 0} : (spot){w->number, (size_t)(ptr - w->ptr)};
}

static bool is_registered(const struct ncclComm *comm, const char *ptr) {
  const registration *r = comm->registrations;
  while (r != NULL && !(ptr >= r->ptr && ptr < r->ptr + r->bytes)) {
    r = r->next;
  }
  return r != NULL || spot_of(comm, ptr).window != 0;
}

void ncclsim_locate(const struct ncclComm *comm, call *c) {
  c->registered_send = c->send != NULL && is_registered(comm, c->send);
  c->registered_recv = c->recv != NULL && is_registered(comm, c->recv);
  if (c->kind == ALL_GATHER) {
    c->from = spot_of(comm, c->send);
    c->to = spot_of(comm, c->recv);
    through += c->to.window != 0;
  }
}

bool ncclsim_both_registered(const call *own, const call *other) {
  switch (own->kind) {
    case ALL_GATHER:
      return own->registered_send == other->registered_send && own->registered_recv == other->registered_recv;
    case BROADCAST: /* other is the root's call */
      return own->registered_recv == other->registered_recv && own->registered_recv == other->registered_send;
    default:
      return own->registered_recv == other->registered_send;
  }
}

bool ncclsim_alike(const call *a, const call *b) {
  return a->from.window == b->from.window && a->from.offset == b->from.offset && a->to.window == b->to.window &&
         a->to.offset == b->to.offset;
}
