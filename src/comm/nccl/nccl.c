/* Creates and destroys communicators over NCCL; has their table. */
#define _GNU_SOURCE /* secure_getenv */
#include "comm/nccl/nccl.h"
#include "comm/split.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const dc__tag init_tag = {.graph_id = -1, .id = -1, .op = DC_OP_INIT};

/* ---- destruction ---- */

static dc_status finalize_handle(dc__nccl *self, void *native, void *args) {
  (void)native;
  (void)args;
  return dc__nccl_check_result(self, "ncclCommFinalize", self->library.ncclCommFinalize(self->handle));
}

static void nccl_free_comm(dc__nccl *self) {
  pthread_cond_destroy(&self->changed);
  pthread_mutex_destroy(&self->watch_mutex);
  pthread_mutex_destroy(&self->collective_mutex);
  pthread_mutex_destroy(&self->pending_mutex);
  pthread_mutex_destroy(&self->api_mutex);
  dc__comm_head_destroy(&self->head);
  dc__free(self);
}

/* After a capture the flush takes no longer than a collective may: a graph that holds the communicator delays it. */
static int64_t flush_timeout_ns(const dc__nccl *self) {
  return self->captured && self->head.timeout_ns < DC__NCCL_FLUSH_NS ? self->head.timeout_ns : DC__NCCL_FLUSH_NS;
}

/* Members that creation did not reach are NULL. A healthy communicator is flushed before it goes; a failed one is
 * aborted. */
static void nccl_destroy(dc_comm *comm) {
  dc__nccl *self = (dc__nccl *)comm;
  dc__nccl_watchdog_stop(self);
  if (self->handle != NULL) {
    bool flushed =
        dc__comm_check(comm) == DC_OK && dc__nccl_call(self, finalize_handle, NULL) == DC_OK &&
        dc__nccl_wait_ready(self, "ncclCommFinalize", "the communicator's end", flush_timeout_ns(self)) == DC_OK;
    dc__nccl_end_handle(self, flushed ? self->library.ncclCommDestroy : self->library.ncclCommAbort);
  }
  if (!dc__nccl_leave_end(self)) {
    dc__nccl_free_staging(self->device, self->staging);
  }
  if (self->stream != NULL) {
    self->device->ops->stream_destroy(self->stream);
  }
  dc__device_release(self->device);
  dc__comm_release_exclusive(self->bootstrap);
  nccl_free_comm(self);
}

/* ---- the table ---- */

/* Reports the outcome of NCCL's work to a caller that has waited for a stream. */
static void nccl_poll_failure(dc_comm *comm) {
  dc__nccl *self = (dc__nccl *)comm;
  dc_status status = dc__comm_check(self->bootstrap);
  if (status == DC_OK && atomic_load(&self->num_watched) > 0) {
    status = dc__nccl_get_async_error(self, "a collective", NULL);
  }
  if (status != DC_OK) {
    dc__nccl_fail(self, status);
  }
}

static void nccl_abort_group(dc_comm *comm, const char *reason) {
  dc_comm *bootstrap = ((dc__nccl *)comm)->bootstrap;
  bootstrap->ops->abort(bootstrap, reason);
  nccl_poll_failure(comm);
}

static void nccl_set_parent(dc_comm *comm, dc_comm *parent) {
  dc__comm_set_parent(((dc__nccl *)comm)->bootstrap, parent);
}

static dc_status nccl_dup(dc_comm *comm, dc_comm **copy) {
  return dc__comm_create_nccl(comm, ((dc__nccl *)comm)->device, copy);
}

static dc_status nccl_split(dc_comm *comm, const dc__split *split, dc_comm **part);

static const dc__comm_ops ops = {.name = "nccl",
                                 .all_gather = dc__host_all_gather,
                                 .reduce_scatter = dc__host_reduce_scatter,
                                 .broadcast = dc__host_broadcast,
                                 .all_to_all = dc__host_all_to_all,
                                 .barrier = dc__host_barrier,
                                 .run = dc__nccl_run,
                                 .dup = nccl_dup,
                                 .split = nccl_split,
                                 .set_parent = nccl_set_parent,
                                 .abort = nccl_abort_group,
                                 .poll = nccl_poll_failure,
                                 .heap_alloc = dc__nccl_heap_alloc,
                                 .heap_free = dc__nccl_heap_free,
                                 .peer_accessible = dc__nccl_peer_accessible,
                                 .destroy = nccl_destroy};

/* ---- creation ---- */

/* In NCCL the environment overrides the config. A communicator that blocks has no deadline. */
static dc_status check_environment(void) {
  const char *value = secure_getenv("NCCL_COMM_BLOCKING");
  return value == NULL || strtoll(value, NULL, 0) != 1
             ? DC_OK
             : dc__fail(DC_E_INVALID,
                        "NCCL: the environment's NCCL_COMM_BLOCKING = \"%s\", must be 0 or not be set: "
                        "NCCL would block without a deadline",
                        value);
}

/* A rank without NCCL tells its peers, which would otherwise wait for it. */
static dc_status compare_versions(dc__nccl *self) {
  dc_status found = check_environment();
  found = found != DC_OK ? found : dc__nccl_open(&self->library);
  dc__failure failure = {DC_OK, ""};
  dc__failure_keep(&failure, found);
  int64_t own_version = found == DC_OK ? self->library.version : 0;
  int64_t versions[DC__NCCL_MAX_WORLD];
  DC__TRY(dc__comm_all_gather_int64(self->bootstrap, &init_tag, &own_version, 1, versions));
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

/* Rank 0's id, broadcast over the bootstrap communicator. */
typedef struct id_message {
  dc__nccl_id id;
  int64_t valid;
} id_message;

static dc_status get_id(dc__nccl *self, void *native, void *args) {
  (void)native;
  return dc__nccl_check_result(self, "ncclGetUniqueId", self->library.ncclGetUniqueId(args));
}

static dc_status broadcast_id(dc__nccl *self, id_message *message) {
  dc_status status = self->head.rank == 0 ? dc__nccl_call(self, get_id, &message->id) : DC_OK;
  dc__failure failure = {DC_OK, ""};
  dc__failure_keep(&failure, status);
  message->valid = status == DC_OK;
  dc__comm_broadcast(self->bootstrap, NULL, &init_tag, message, sizeof *message, 0);
  DC__TRY(dc__comm_check(self->bootstrap));
  if (status != DC_OK) {
    return dc__failure_raise(&failure);
  }
  return message->valid != 0 ? DC_OK
                             : dc__fail(DC_E_UNSUPPORTED, "NCCL: rank 0 could not begin a group (ncclGetUniqueId)");
}

static dc_status init_rank(dc__nccl *self, void *native, void *args) {
  const id_message *message = args;
  dc__nccl_config config = {.size = sizeof config,
                            .magic = DC__NCCL_MAGIC,
                            .version = DC__NCCL_MIN_VERSION,
                            .blocking = 0,
                            .cga_cluster_size = DC__NCCL_UNSET,
                            .min_ctas = DC__NCCL_UNSET,
                            .max_ctas = DC__NCCL_UNSET,
                            .net_name = NULL,
                            .split_share = DC__NCCL_UNSET};
  (void)native;
  return dc__nccl_check_result(
      self, "ncclCommInitRankConfig",
      self->library.ncclCommInitRankConfig(&self->handle, self->head.world, message->id, self->head.rank, &config));
}

/* A rank that fails while peers may wait for it in NCCL aborts the group. */
static dc_status init_comm(dc__nccl *self) {
  id_message message = {.valid = 0};
  DC__TRY(broadcast_id(self, &message));
  dc_status status = dc__nccl_call(self, init_rank, &message);
  status = status != DC_OK
               ? status
               : dc__nccl_wait_ready(self, "ncclCommInitRankConfig", "the start of NCCL", self->head.timeout_ns);
  if (status != DC_OK) {
    dc__nccl_abort(self, status);
  }
  return status;
}

static dc_status nccl_init(dc__nccl *self) {
  DC__TRY(compare_versions(self));
  DC__TRY(self->device->ops->stream_create(self->device, &self->stream));
  return init_comm(self);
}

static dc_status nccl_create(dc_comm *bootstrap, dc_device *device, dc__nccl **nccl) {
  dc__nccl *self = dc__calloc(1, sizeof *self);
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = dc__comm_head_init(&self->head, &ops, bootstrap->rank, bootstrap->world, bootstrap->timeout_ns);
  if (status != DC_OK) {
    dc__free(self);
    return status;
  }
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&self->changed, &attributes);
  pthread_condattr_destroy(&attributes);
  pthread_mutex_init(&self->watch_mutex, NULL);
  pthread_mutex_init(&self->collective_mutex, NULL);
  pthread_mutex_init(&self->pending_mutex, NULL);
  pthread_mutex_init(&self->api_mutex, NULL);
  self->head.stream_ordered = true;
  self->head.supports_device = true;
  self->head.memory_space = device->memory_space;
  self->device = device;
  self->bootstrap = bootstrap;
  self->head.usage = bootstrap->usage; /* each collective's handshake is one of the bootstrap communicator's */
  status = dc__nccl_watchdog_start(self);
  if (status != DC_OK) {
    nccl_free_comm(self);
    return status;
  }
  (void)dc__device_retain(device);
  *nccl = self;
  return DC_OK;
}

/* Makes the new communicator's own bootstrap communicator. */
static dc_status acquire_bootstrap(dc_comm *comm, dc_comm **own) {
  bool on_nccl = comm->ops == &ops;
  dc_comm *bootstrap = on_nccl ? ((dc__nccl *)comm)->bootstrap : comm;
  if (bootstrap->ops->agree == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "NCCL: ranks of this communicator (%s) cannot compare their calls",
                    bootstrap->ops->name);
  }
  return on_nccl ? dc__comm_dup(bootstrap, own) : dc__comm_acquire_exclusive("dc_comm_create_nccl", bootstrap, own);
}

/* Takes the bootstrap communicator over, even if it fails. */
static dc_status create_on_bootstrap(dc_comm *bootstrap, dc_device *device, dc_comm **copy) {
  dc__nccl *self;
  dc_status status = nccl_create(bootstrap, device, &self);
  if (status != DC_OK) {
    dc__comm_release_exclusive(bootstrap);
    return status;
  }
  status = nccl_init(self);
  if (status != DC_OK) {
    dc__comm_release(&self->head);
    return status;
  }
  *copy = &self->head;
  return DC_OK;
}

dc_status dc__comm_create_nccl(dc_comm *comm, dc_device *device, dc_comm **copy) {
  dc_comm *bootstrap;
  if (device->ops->stream_issue == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "NCCL: device \"%s\" is no card", device->name);
  }
  if (comm->world > DC__NCCL_MAX_WORLD) {
    return dc__fail(DC_E_UNSUPPORTED,
                    "dc_comm_create_nccl: the communicator has %" PRId32 " ranks, must have at most %d", comm->world,
                    DC__NCCL_MAX_WORLD);
  }
  DC__TRY(acquire_bootstrap(comm, &bootstrap));
  return create_on_bootstrap(bootstrap, device, copy);
}

/* A part's ranks get a new NCCL id. ncclCommSplit() would wait for all ranks inside NCCL, without a deadline. */
static dc_status nccl_split(dc_comm *comm, const dc__split *split, dc_comm **part) {
  const dc__nccl *self = (dc__nccl *)comm;
  dc_comm *bootstrap = NULL;
  if (self->bootstrap->ops->split == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "dc_comm_split: the bootstrap communicator (%s) cannot be split",
                    self->bootstrap->ops->name);
  }
  dc_status status = self->bootstrap->ops->split(self->bootstrap, split, &bootstrap);
  /* The part's ranks then meet in NCCL, where none may be missing. */
  status = dc__split_agree("dc_comm_split", self->bootstrap, status);
  if (status != DC_OK || split->world == 0) {
    dc__comm_release(bootstrap);
    return status;
  }
  return create_on_bootstrap(bootstrap, self->device, part);
}

dc_status dc__nccl_version(int32_t *version) {
  dc__nccl_library library;
  DC__TRY(dc__nccl_open(&library));
  *version = library.version;
  return DC_OK;
}
