/* Common to all transports: the communicator's head with its references and failure, and the split of long lists into
 * groups. */
#include "comm/comm.h"
#include "comm/signature.h"

#include <string.h>

dc_status dc__comm_head_init(dc_comm *comm, const dc__comm_ops *ops, int32_t rank, int32_t world, int64_t timeout_ns) {
  comm->handle = DC__HANDLE_COMM;
  comm->ops = ops;
  comm->rank = rank;
  comm->world = world;
  comm->timeout_ns = timeout_ns;
  atomic_init(&comm->refs, 1);
  atomic_init(&comm->wire_bytes, 0);
  atomic_init(&comm->numbered, 0);
  atomic_init(&comm->failed, 0);
  if (pthread_mutex_init(&comm->mutex, NULL) != 0) {
    return dc__fail(DC_E_SYSTEM, "a communicator's mutex could not be made");
  }
  dc__owner_init(&comm->owner);
  return DC_OK;
}

void dc__comm_head_destroy(dc_comm *comm) {
  dc__handle_clear(&comm->handle);
  dc__owner_destroy(&comm->owner);
  pthread_mutex_destroy(&comm->mutex);
}

dc_status dc__comm_dup(dc_comm *comm, dc_comm **copy) {
  pthread_mutex_lock(&comm->mutex);
  const uint64_t number = ++comm->copies; /* also counts one that fails on this rank alone, as the other ranks do */
  pthread_mutex_unlock(&comm->mutex);
  DC__TRY(comm->ops->dup(comm, copy));
  (*copy)->origin = dc__digest_add(comm->origin, number);
  return DC_OK;
}

uint64_t dc__comm_number(dc_comm *comm, uint64_t collectives) {
  return atomic_fetch_add_explicit(&comm->numbered, collectives, memory_order_relaxed) + 1;
}

void dc__comm_note_handshakes(dc_comm *comm, uint64_t count) {
  if (comm->usage != NULL) {
    atomic_fetch_add_explicit(&comm->usage->requested, count, memory_order_release);
  }
}

void dc__comm_note_request(dc_comm *comm, uint64_t collectives) {
  dc__comm_usage *usage = comm->usage;
  if (usage == NULL) {
    return;
  }
  uint64_t thread = dc__thread_id();
  unsigned long long user = atomic_load_explicit(&usage->user, memory_order_relaxed);
  if (user != thread && user != DC__COMM_SEVERAL_USERS &&
      (user != 0 || !atomic_compare_exchange_strong(&usage->user, &user, thread))) {
    atomic_store(&usage->user, DC__COMM_SEVERAL_USERS);
  }
  if (collectives > 0) {
    dc__comm_note_handshakes(comm, collectives);
  }
}

uint64_t dc__comm_blocked_user(const dc_comm *comm) {
  uint64_t user = comm->usage == NULL ? 0 : atomic_load(&comm->usage->user);
  return user != 0 && user != DC__COMM_SEVERAL_USERS && dc__thread_is_blocked(user) ? user : 0;
}

dc_comm *dc__comm_retain(dc_comm *comm) {
  atomic_fetch_add_explicit(&comm->refs, 1, memory_order_relaxed);
  return comm;
}

void dc__comm_release(dc_comm *comm) {
  if (comm != NULL && atomic_fetch_sub_explicit(&comm->refs, 1, memory_order_acq_rel) == 1) {
    dc__comm_free_group(comm);
    dc__comm_free_scratch(comm);
    comm->ops->destroy(comm);
  }
}

void dc__comm_set_parent(dc_comm *comm, dc_comm *parent) {
  comm->parent = parent;
  if (comm->ops->set_parent != NULL) {
    comm->ops->set_parent(comm, parent);
  }
}

dc_status dc__comm_check_parents(const dc_comm *comm) {
  for (dc_comm *parent = comm->parent; parent != NULL; parent = parent->parent) {
    DC__TRY(dc__comm_check(parent));
  }
  return DC_OK;
}

dc_status dc__comm_acquire_exclusive(const char *fn, dc_comm *comm, dc_comm **exclusive_comm) {
  dc_status status = dc__comm_dup(comm, exclusive_comm);
  if (status != DC_E_UNSUPPORTED) {
    return status;
  }
  if (atomic_exchange(&comm->exclusive, 1) != 0) {
    return dc__fail(DC_E_BUSY,
                    "%s: this communicator (%s) cannot be copied, and another context uses it; give each context a "
                    "communicator of its own, or the callbacks a dup",
                    fn, comm->ops->name);
  }
  *exclusive_comm = dc__comm_retain(comm);
  return DC_OK;
}

/* Clearing the flag is harmless on a copy, which the release destroys. */
void dc__comm_release_exclusive(dc_comm *exclusive_comm) {
  if (exclusive_comm != NULL) {
    atomic_store(&exclusive_comm->exclusive, 0);
    dc__comm_release(exclusive_comm);
  }
}

void dc__comm_fail(dc_comm *comm, dc_status status) {
  pthread_mutex_lock(&comm->mutex);
  dc__failure_keep(&comm->failure, status);
  atomic_store_explicit(&comm->failed, 1, memory_order_release);
  pthread_mutex_unlock(&comm->mutex);
}

dc_status dc__comm_check(dc_comm *comm) {
  if (atomic_load_explicit(&comm->failed, memory_order_acquire) == 0 && comm->ops->poll != NULL) {
    comm->ops->poll(comm);
  }
  if (atomic_load_explicit(&comm->failed, memory_order_acquire) == 0) {
    return DC_OK;
  }
  pthread_mutex_lock(&comm->mutex);
  dc_status status = dc__failure_raise(&comm->failure);
  pthread_mutex_unlock(&comm->mutex);
  return status;
}

dc_status dc__comm_check_device(const char *fn, const dc_comm *comm, const dc_device *device) {
  if (device->memory_space == 0 ||
      (comm->supports_device && (comm->memory_space == 0 || comm->memory_space == device->memory_space))) {
    return DC_OK;
  }
  return dc__fail(comm->supports_device ? DC_E_INVALID : DC_E_UNSUPPORTED,
                  "%s: ranks of this communicator (%s) cannot exchange memory of device \"%s\"%s", fn, comm->ops->name,
                  device->name, comm->supports_device ? ", it was made for another one" : "");
}

typedef void (*submit_fn)(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                          int32_t count);

static void submit_in_groups(submit_fn submit_group, dc_comm *comm, dc_stream *stream, const dc__tag *tag,
                             const dc__coll_item *items, int64_t count) {
  dc__coll_item group[DC__COMM_GROUP];
  int32_t filled = 0;
  dc__tag group_tag = *tag;
  for (int64_t i = 0; i < count; i++) {
    if (items[i].total > 0) {
      group[filled++] = items[i];
    }
    if (filled == DC__COMM_GROUP || (filled > 0 && i == count - 1)) {
      group_tag.id = group[0].id;
      submit_group(comm, stream, &group_tag, group, filled);
      filled = 0;
    }
  }
}

void dc__comm_all_gather(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                         int64_t count) {
  submit_in_groups(comm->ops->all_gather, comm, stream, tag, items, count);
}

void dc__comm_reduce_scatter(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                             int64_t count) {
  submit_in_groups(comm->ops->reduce_scatter, comm, stream, tag, items, count);
}

void dc__comm_broadcast(dc_comm *comm, dc_stream *stream, const dc__tag *tag, void *data, size_t bytes, int32_t root) {
  comm->ops->broadcast(comm, stream, tag, data, bytes, root);
}

dc_status dc__comm_all_gather_int64(dc_comm *comm, const dc__tag *tag, const int64_t *values, int64_t count,
                                    int64_t *table) {
  dc__range ranges[DC__COMM_MAX_WORLD];
  for (int32_t r = 0; r < comm->world; r++) {
    ranges[r] = (dc__range){r * count, count};
  }
  const size_t bytes = (size_t)comm->world * (size_t)count * sizeof *table;
  int64_t *to = comm->keeps_memory ? dc__calloc(1, bytes) : table;
  if (to == NULL) {
    comm->ops->abort(comm, "a rank has no memory for an exchange");
    return DC_E_NO_MEMORY;
  }
  const dc__coll_item item = {
      .send = values, .recv = to, .ranges = ranges, .total = comm->world * count, .id = tag->id, .dtype = DC_INT64};
  dc__device_pause();
  dc__comm_all_gather(comm, NULL, tag, &item, 1);
  const dc_status status = dc__comm_check(comm);
  if (to != table && status == DC_OK) { /* else it is leaked, since it may still be written to */
    memcpy(table, to, bytes);
    dc__free(to);
  }
  return status;
}

dc_status dc__comm_create_self(dc_comm **comm) {
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = 1}; /* there is no peer to wait for */
  return dc__comm_create_threads(1, &options, comm);
}
