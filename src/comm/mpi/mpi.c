/* Creates and destroys communicators over MPI; has their table. */
#include "comm/mpi/mpi.h"

#include <limits.h>

/* ---- destruction ---- */

/* Whether MPI_Comm_free may be called. It is collective, and may wait for a lost rank. Nor may it be called if MPI
 * itself has failed, or may still use a communicator. After a failure a message of the comparison may be on its way to
 * a rank that does not receive it. MPI would give it to the next communicator with the handle of the freed one. Only
 * where ranks have found that their calls differ, all messages were received. */
static bool can_free_mpi_comms(const dc__mpi *self) {
  dc__tcp_group *control = ((dc__tcp *)self->control)->group;
  pthread_mutex_lock(&control->mutex);
  const dc_status failure = control->failure.status;
  pthread_mutex_unlock(&control->mutex);
  const bool compared = failure == DC_E_MISMATCH && atomic_load(&control->calls_differed) && !self->unmatched;
  return dc__mpi_is_usable(self->mpi) && (failure == DC_OK || compared);
}

static void release_mpi_group(dc__mpi_group *group, const dc__mpi_library *mpi, bool can_free) {
  if (atomic_fetch_sub(&group->refs, 1) == 1) {
    if (can_free) {
      (void)mpi->calls->comm_free(mpi, &group->parent);
    }
    pthread_mutex_destroy(&group->mutex);
    dc__free(group);
  }
}

/* Memory that MPI may still use is not freed. */
static void mpi_destroy(dc_comm *comm) {
  dc__mpi *self = (dc__mpi *)comm;
  const bool can_free = can_free_mpi_comms(self);
  if (can_free && self->has_comm) {
    (void)self->mpi->calls->comm_free(self->mpi, &self->comm);
  }
  release_mpi_group(self->group, self->mpi, can_free);
  if (dc__mpi_is_usable(self->mpi) && atomic_load(&((dc__tcp *)self->control)->group->failed) == 0) {
    dc__tcp_leave((dc__tcp *)self->control); /* dc__mpi_keep() may keep it open */
  }
  dc__mpi_stop_carrying(self);
  dc__comm_release(self->control);
  dc__mpi_progress_leave();
  bool abandoned = self->abandoned || self->message_abandoned;
  if (!abandoned) {
    dc__free(self->scratch[0]);
    dc__free(self->scratch[1]);
    dc__free(self->vectors);
  }
  pthread_mutex_destroy(&self->collective_mutex);
  dc__comm_head_destroy(comm);
  if (!abandoned) {
    dc__free(self);
  }
}

/* ---- the table ---- */

static void mpi_poll_failure(dc_comm *comm) {
  dc_status status = dc__comm_check(((dc__mpi *)comm)->control);
  if (status != DC_OK) {
    dc__comm_fail(comm, status);
  }
}

static void mpi_check_peers(dc_comm *comm) {
  dc_comm *control = ((dc__mpi *)comm)->control;
  control->ops->check_peers(control);
  mpi_poll_failure(comm);
}

static void mpi_abort_group(dc_comm *comm, const char *reason) {
  dc_comm *control = ((dc__mpi *)comm)->control;
  control->ops->abort(control, reason);
  mpi_poll_failure(comm);
}

static void mpi_fail_group(dc_comm *comm, dc_status status) {
  dc_comm *control = ((dc__mpi *)comm)->control;
  control->ops->fail_group(control, status);
  mpi_poll_failure(comm);
}

static void mpi_set_parent(dc_comm *comm, dc_comm *parent) {
  dc__comm_set_parent(((dc__mpi *)comm)->control, parent);
}

/* Two levels call it before any collective here, and MPI ends the process if it is called after its end. */
static bool mpi_agree(dc_comm *comm, const dc__coll *coll, uint64_t word) {
  dc__mpi *self = (dc__mpi *)comm;
  dc_comm *control = self->control;
  if (!dc__mpi_is_usable(self->mpi)) {
    char name[DC__COLL_TEXT];
    dc__coll_describe_op(name, coll->tag.op, coll->tag.id);
    dc__mpi_fail(self, dc__mpi_check_usable(self->mpi, name));
    return false;
  }
  dc__mpi_progress_begin();
  bool same = control->ops->agree(control, coll, word);
  dc__mpi_progress_end();
  mpi_poll_failure(comm);
  return same;
}

static void mpi_progress(dc_comm *comm, bool waits) {
  (void)comm; /* the thread works for the whole process */
  if (waits) {
    dc__mpi_progress_begin();
  } else {
    dc__mpi_progress_end();
  }
}

static dc_status mpi_dup(dc_comm *comm, dc_comm **copy);
static dc_status mpi_split(dc_comm *comm, const dc__split *split, dc_comm **part);

static const dc__comm_ops ops = {.name = "mpi",
                                 .all_gather = dc__host_all_gather,
                                 .reduce_scatter = dc__host_reduce_scatter,
                                 .broadcast = dc__host_broadcast,
                                 .all_to_all = dc__host_all_to_all,
                                 .barrier = dc__host_barrier,
                                 .run = dc__mpi_run,
                                 .agree = mpi_agree,
                                 .progress = mpi_progress,
                                 .set_parent = mpi_set_parent,
                                 .check_peers = mpi_check_peers,
                                 .dup = mpi_dup,
                                 .split = mpi_split,
                                 .abort = mpi_abort_group,
                                 .fail_group = mpi_fail_group,
                                 .poll = mpi_poll_failure,
                                 .destroy = mpi_destroy};

/* ---- creation ---- */

/* Copies one of MPI's communicators, after all ranks have met at the control communicator. `copy` must outlive a
 * failure, after which MPI may still write to it. `fn` is the public function, for error texts. */
static dc_status copy_mpi_comm(const dc__mpi *self, const char *fn, dc__mpi_handle from, dc__mpi_handle *copy) {
  dc__mpi_wait wait = {.mpi = self->mpi,
                       .control = self->control,
                       .rank = self->head.rank,
                       .timeout_ns = self->head.timeout_ns,
                       .what = fn,
                       .count = 1};
  DC__TRY(dc__mpi_check_result(&wait, "MPI_Comm_idup",
                               self->mpi->calls->comm_idup(self->mpi, from, copy, &wait.requests[0])));
  DC__TRY(dc__mpi_wait_all(&wait));
  return dc__mpi_check_result(&wait, "MPI_Comm_set_errhandler", self->mpi->calls->comm_return_errors(self->mpi, *copy));
}

/* Creates a communicator that has none of MPI's yet. Takes the control communicator over, even if it fails, and takes a
 * reference to the group. */
static dc_status create_member(dc__mpi_group *group, dc_comm *control, int64_t timeout_ns, dc__mpi **out) {
  dc__mpi *self = dc__calloc(1, sizeof *self);
  int *vectors = self == NULL ? NULL : dc__mpi_alloc_vectors(control->world);
  dc_status status = vectors == NULL ? DC_E_NO_MEMORY
                                     : dc__comm_head_init(&self->head, &ops, control->rank, control->world, timeout_ns);
  if (status != DC_OK) {
    control->ops->abort(control, "a rank has no memory for a communicator over MPI");
    dc__comm_release(control);
    dc__free(vectors);
    dc__free(self);
    return status;
  }
  self->vectors = vectors;
  self->max_bytes = INT_MAX;
  pthread_mutex_init(&self->collective_mutex, NULL);
  atomic_fetch_add(&group->refs, 1);
  dc__mpi_progress_join();
  self->mpi = dc__mpi_runtime_state.library;
  self->group = group;
  self->control = control;
  self->head.keeps_memory = true;
  self->head.usage = control->usage; /* each collective is one of the control communicator's */
  *out = self;
  return DC_OK;
}

/* Gives the communicator a copy of the group's MPI communicator; fails on all ranks or on none. */
static dc_status finish_member(dc__mpi *self, const char *fn, dc_comm **comm) {
  dc_status status = copy_mpi_comm(self, fn, self->group->parent, &self->comm);
  if (status != DC_OK) {
    dc__mpi_fail(self, status);
    status = dc__comm_check(self->control);
    self->abandoned = true;
    dc__comm_release(&self->head);
    return status;
  }
  self->has_comm = true;
  dc__mpi_carry(self);
  *comm = &self->head;
  return DC_OK;
}

/* Copies are made one at a time, in the order of the control communicator's, which is the same on all ranks. */
static dc_status mpi_dup(dc_comm *comm, dc_comm **copy) {
  dc__mpi *self = (dc__mpi *)comm;
  dc__mpi *member = NULL;
  dc_comm *control;
  DC__TRY(dc__mpi_check_usable(self->mpi, "dc_comm_dup"));
  pthread_mutex_lock(&self->group->mutex);
  dc__mpi_progress_begin();
  dc_status status = dc__comm_dup(self->control, &control);
  dc__mpi_progress_end();
  status = status != DC_OK ? status : create_member(self->group, control, comm->timeout_ns, &member);
  status = status != DC_OK ? status : finish_member(member, "dc_comm_dup", copy);
  pthread_mutex_unlock(&self->group->mutex);
  return status;
}

/* Frees a part's MPI communicator, which no group has taken over. */
static void drop_mpi_part(const dc__mpi_handle *part) {
  const dc__mpi_library *mpi = dc__mpi_runtime_state.library;
  dc__mpi_handle handle;
  if (part != NULL && dc__mpi_is_usable(mpi)) {
    handle = *part;
    (void)mpi->calls->comm_free(mpi, &handle);
  }
}

static dc__mpi_group *alloc_mpi_group(dc_comm *control) {
  dc__mpi_group *group = dc__calloc(1, sizeof *group);
  if (group == NULL) {
    control->ops->abort(control, "a rank has no memory for a communicator over MPI");
    dc__comm_release(control);
    return NULL;
  }
  atomic_init(&group->refs, 0);
  pthread_mutex_init(&group->mutex, NULL);
  return group;
}

/* Creates a group and its first communicator, a copy of the group's parent. The parent is `part`, or if that is NULL a
 * copy of the process's world. */
static dc_status create_mpi_group(dc_comm *control, int64_t timeout_ns, const dc__mpi_handle *part, dc_comm **comm) {
  dc__mpi *self = NULL;
  dc__mpi_group *group = alloc_mpi_group(control);
  if (group == NULL) {
    drop_mpi_part(part);
    return DC_E_NO_MEMORY;
  }
  dc_status status = create_member(group, control, timeout_ns, &self);
  if (status != DC_OK) {
    pthread_mutex_destroy(&group->mutex);
    dc__free(group);
    drop_mpi_part(part);
    return status;
  }
  if (part != NULL) {
    group->parent = *part;
    return finish_member(self, "dc_comm_split", comm);
  }
  status = copy_mpi_comm(self, "dc_comm_create_mpi", dc__mpi_runtime_state.world, &group->parent);
  if (status != DC_OK) {
    dc__mpi_fail(self, status);
    status = dc__comm_check(control);
    atomic_fetch_add(&group->refs, 1); /* MPI may still write to the parent */
    self->abandoned = true;
    dc__comm_release(&self->head);
    return status;
  }
  return finish_member(self, "dc_comm_create_mpi", comm);
}

static dc_status agree_on_mpi_split(const dc__mpi *self, dc_status status) {
  dc__mpi_progress_begin();
  status = dc__split_agree("dc_comm_split", self->control, status);
  dc__mpi_progress_end();
  return status;
}

/* Makes the part's control communicator and its MPI communicator. All ranks do a handshake just before the MPI call,
 * which cannot be cancelled. They do another one after it, since a rank would wait in its part for one that has failed.
 * Requires the collective mutex. The group's mutex would not do: other threads may split and copy other communicators
 * meanwhile, in another order on each rank. */
static dc_status split_mpi_comms(dc__mpi *self, const dc__split *split, dc_comm **control, dc__mpi_handle *part) {
  dc__mpi_progress_begin();
  dc_status status = self->control->ops->split(self->control, split, control);
  dc__mpi_progress_end();
  DC__TRY(agree_on_mpi_split(self, status));
  const dc_status own = dc__mpi_split_comm(self, split, part);
  status = agree_on_mpi_split(self, own);
  if (own == DC_OK && status != DC_OK && can_free_mpi_comms(self)) {
    (void)self->mpi->calls->comm_free(self->mpi, part);
  }
  return status;
}

static dc_status mpi_split(dc_comm *comm, const dc__split *split, dc_comm **part) {
  dc__mpi *self = (dc__mpi *)comm;
  dc_comm *control = NULL;
  dc__mpi_handle handle;
  DC__TRY(dc__mpi_check_usable(self->mpi, "dc_comm_split"));
  pthread_mutex_lock(&self->collective_mutex);
  dc_status status = split_mpi_comms(self, split, &control, &handle);
  pthread_mutex_unlock(&self->collective_mutex);
  if (status != DC_OK) {
    dc__comm_release(control);
    return status;
  }
  if (split->world == 0) {
    (void)self->mpi->calls->comm_free(self->mpi, &handle);
    return DC_OK;
  }
  return create_mpi_group(control, comm->timeout_ns, &handle, part);
}

static dc_status create_started(const dc_comm_options *options, dc_comm **comm) {
  dc_comm *control;
  DC__TRY(dc__mpi_start(options->timeout_ns));
  DC__TRY(dc__mpi_meet(options, &control));
  dc__mpi_keep(control);
  return create_mpi_group(control, options->timeout_ns, NULL, comm);
}

dc_status dc__comm_create_mpi(const dc_comm_options *options, dc_comm **comm) {
  DC__TRY(dc__mpi_check_process("dc_comm_create_mpi"));
  pthread_mutex_lock(&dc__mpi_runtime_state.mutex);
  dc_status status = create_started(options, comm);
  pthread_mutex_unlock(&dc__mpi_runtime_state.mutex);
  return status;
}

dc_status dc__mpi_version(const char **version) {
  dc__mpi_library *library;
  pthread_mutex_lock(&dc__mpi_runtime_state.mutex);
  dc_status status = dc__mpi_open(&library);
  pthread_mutex_unlock(&dc__mpi_runtime_state.mutex);
  DC__TRY(status);
  *version = library->version;
  return DC_OK;
}
