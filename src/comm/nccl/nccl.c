/* Making and ending NCCL's communicators. */
#include "comm/nccl/nccl.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

static const dc__tag init_tag = {-1, -1, DC_OP_INIT, NULL};

/* ---- the end ---- */

static dc_status finalize(dc__nccl *self, void *native, void *args) {
  (void)native;
  (void)args;
  return dc__nccl_error(self, "ncclCommFinalize", self->library.ncclCommFinalize(self->handle));
}

/* Whatever it says, the handle is gone. */
static dc_status end_handle(dc__nccl *self, void *native, void *args) {
  const bool *flushed = args;
  (void)native;
  (void)(*flushed ? self->library.ncclCommDestroy(self->handle) : self->library.ncclCommAbort(self->handle));
  return DC_OK;
}

static void free_head(dc__nccl *self) {
  pthread_cond_destroy(&self->news);
  pthread_mutex_destroy(&self->watch);
  pthread_mutex_destroy(&self->turn);
  pthread_mutex_destroy(&self->busy);
  pthread_mutex_destroy(&self->calls);
  dc__comm_head_destroy(&self->head);
  dc__free(self);
}

/* Of what create() got; what it did not get is NULL. What was sent must have left before NCCL's communicator goes; a
 * failed one sends nothing any more. */
static void destroy(dc_comm *comm) {
  dc__nccl *self = (dc__nccl *)comm;
  dc__nccl_watcher_end(self);
  if (self->handle != NULL) {
    bool flushed = dc__comm_check(comm) == DC_OK && dc__nccl_issue(self, finalize, NULL) == DC_OK &&
                   dc__nccl_settle(self, "ncclCommFinalize", "the communicator's end", DC__NCCL_FLUSH_NS) == DC_OK;
    (void)dc__nccl_issue(self, end_handle, &flushed);
  }
  dc__nccl_drop_staging(self);
  if (self->stream != NULL) {
    self->device->ops->stream_destroy(self->stream);
  }
  dc__device_release(self->device);
  dc__comm_disown(self->base);
  free_head(self);
}

/* ---- the table ---- */

/* Who has waited for a stream learns here what became of NCCL's work on it. */
static void poll_failure(dc_comm *comm) {
  dc__nccl *self = (dc__nccl *)comm;
  dc_status status = dc__comm_check(self->base);
  if (status == DC_OK && atomic_load(&self->watched) > 0) {
    status = dc__nccl_ask(self, "a collective", NULL);
  }
  if (status != DC_OK) {
    dc__nccl_fail(self, status);
  }
}

static void abort_group(dc_comm *comm, const char *reason) {
  dc_comm *base = ((dc__nccl *)comm)->base;
  base->ops->abort(base, reason);
  poll_failure(comm);
}

static dc_status dup(dc_comm *comm, dc_comm **copy) {
  return dc__comm_create_nccl(comm, ((dc__nccl *)comm)->device, copy);
}

static const dc__comm_ops ops = {.name = "nccl",
                                 .all_gather = dc__host_all_gather,
                                 .reduce_scatter = dc__host_reduce_scatter,
                                 .broadcast = dc__host_broadcast,
                                 .barrier = dc__host_barrier,
                                 .run = dc__nccl_run,
                                 .dup = dup,
                                 .abort = abort_group,
                                 .poll = poll_failure,
                                 .heap_alloc = dc__nccl_heap_alloc,
                                 .heap_free = dc__nccl_heap_free,
                                 .shares = dc__nccl_shares,
                                 .destroy = destroy};

/* ---- the beginning ---- */

/* A rank without NCCL says so to the others, which would wait for it in vain. */
static dc_status agree_on_version(dc__nccl *self) {
  dc_status found = dc__nccl_open(&self->library);
  dc__failure failure = {DC_OK, ""};
  dc__failure_keep(&failure, found);
  int64_t mine = found == DC_OK ? self->library.version : 0;
  int64_t versions[DC__COMM_MAX_WORLD];
  DC__TRY(dc__comm_exchange(self->base, &init_tag, &mine, 1, versions));
  for (int32_t r = 0; r < self->head.world && found == DC_OK; r++) {
    if (versions[r] == 0) {
      return dc__fail(DC_E_UNSUPPORTED, "NCCL: rank %" PRId32 " has none that can be used", r);
    }
    if (versions[r] != versions[0]) {
      return dc__fail(DC_E_MISMATCH, "NCCL: rank %" PRId32 " has version %" PRId64 ", but rank 0 has %" PRId64, r,
                      versions[r], versions[0]);
    }
  }
  return found == DC_OK ? DC_OK : dc__failure_raise(&failure);
}

/* Rank 0's, by way of the base. */
typedef struct ticket {
  dc__nccl_id id;
  int64_t made;
} ticket;

static dc_status get_id(dc__nccl *self, void *native, void *args) {
  (void)native;
  return dc__nccl_error(self, "ncclGetUniqueId", self->library.ncclGetUniqueId(args));
}

static dc_status share_id(dc__nccl *self, ticket *t) {
  dc_status status = self->head.rank == 0 ? dc__nccl_issue(self, get_id, &t->id) : DC_OK;
  dc__failure failure = {DC_OK, ""};
  dc__failure_keep(&failure, status);
  t->made = status == DC_OK;
  dc__comm_broadcast(self->base, NULL, &init_tag, t, sizeof *t, 0);
  DC__TRY(dc__comm_check(self->base));
  if (status != DC_OK) {
    return dc__failure_raise(&failure);
  }
  return t->made != 0 ? DC_OK : dc__fail(DC_E_UNSUPPORTED, "NCCL: rank 0 could not begin a group (ncclGetUniqueId)");
}

static dc_status init_rank(dc__nccl *self, void *native, void *args) {
  const ticket *t = args;
  dc__nccl_config config = {sizeof config,  DC__NCCL_MAGIC, DC__NCCL_OLDEST, 0, DC__NCCL_UNSET, DC__NCCL_UNSET,
                            DC__NCCL_UNSET, NULL,           DC__NCCL_UNSET};
  (void)native;
  return dc__nccl_error(
      self, "ncclCommInitRankConfig",
      self->library.ncclCommInitRankConfig(&self->handle, self->head.world, t->id, self->head.rank, &config));
}

/* Who fails once the others may wait for him in NCCL ends the group. */
static dc_status join(dc__nccl *self) {
  ticket t = {.made = 0};
  DC__TRY(share_id(self, &t));
  dc_status status = dc__nccl_issue(self, init_rank, &t);
  status = status != DC_OK
               ? status
               : dc__nccl_settle(self, "ncclCommInitRankConfig", "the start of NCCL", self->head.timeout_ns);
  if (status != DC_OK) {
    dc__nccl_give_up(self, status);
  }
  return status;
}

static dc_status open(dc__nccl *self) {
  DC__TRY(agree_on_version(self));
  DC__TRY(self->device->ops->stream_create(self->device, &self->stream));
  return join(self);
}

static dc_status create(dc_comm *base, dc_device *device, dc__nccl **nccl) {
  dc__nccl *self = dc__calloc(1, sizeof *self);
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = dc__comm_head_init(&self->head, &ops, base->rank, base->world, base->timeout_ns);
  if (status != DC_OK) {
    dc__free(self);
    return status;
  }
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&self->news, &attributes);
  pthread_condattr_destroy(&attributes);
  pthread_mutex_init(&self->watch, NULL);
  pthread_mutex_init(&self->turn, NULL);
  pthread_mutex_init(&self->busy, NULL);
  pthread_mutex_init(&self->calls, NULL);
  self->head.issues = true;
  self->head.takes_devices = true;
  self->head.place = device->place;
  self->device = device;
  self->base = base;
  self->head.use = base->use; /* each of its collectives is one of the base's, at which the ranks meet */
  status = dc__nccl_watcher_start(self);
  if (status != DC_OK) {
    free_head(self);
    return status;
  }
  (void)dc__device_retain(device);
  *nccl = self;
  return DC_OK;
}

/* What the new communicator stands on. */
static dc_status take_base(dc_comm *comm, dc_comm **own) {
  bool on_nccl = comm->ops == &ops;
  dc_comm *base = on_nccl ? ((dc__nccl *)comm)->base : comm;
  if (base->ops->agree == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "NCCL: ranks of this communicator (%s) cannot compare their calls",
                    base->ops->name);
  }
  return on_nccl ? base->ops->dup(base, own) : dc__comm_own("dc_comm_create_nccl", base, own);
}

dc_status dc__comm_create_nccl(dc_comm *comm, dc_device *device, dc_comm **copy) {
  dc_comm *base;
  dc__nccl *self;
  if (device->ops->stream_issue == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "NCCL: device \"%s\" is no card", device->name);
  }
  DC__TRY(take_base(comm, &base));
  dc_status status = create(base, device, &self);
  if (status != DC_OK) {
    dc__comm_disown(base);
    return status;
  }
  status = open(self);
  if (status != DC_OK) {
    dc__comm_release(&self->head);
    return status;
  }
  *copy = &self->head;
  return DC_OK;
}

dc_status dc__nccl_version(int32_t *version) {
  dc__nccl_library library;
  DC__TRY(dc__nccl_open(&library));
  *version = library.version;
  return DC_OK;
}
