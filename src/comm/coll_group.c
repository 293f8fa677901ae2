/* Starts one checked collective, or collects it in the group of dc_comm_group_begin … end and starts them together. */
#include <inttypes.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/host_transport.h"

typedef struct group_member {
  dc__coll_item item;
  dc__range *ranges; /* the member's own copy, which item.ranges points to */
  dc_stream *stream;
  int32_t kind;
} group_member;

struct dc__comm_group_state {
  group_member *members;
  int64_t count;
  int64_t capacity;
};

static void free_group(struct dc__comm_group_state *group) {
  for (int64_t i = 0; i < group->count; i++) {
    dc__free(group->members[i].ranges);
  }
  dc__free(group->members);
  dc__free(group);
}

void dc__comm_free_group(dc_comm *comm) {
  if (comm->group != NULL) {
    free_group(comm->group);
    comm->group = NULL;
  }
}

static void free_block_task(void *args) {
  void *ptr;
  memcpy(&ptr, args, sizeof ptr);
  dc__free(ptr);
}

/* If it cannot be queued, the block is leaked, since queued work may still read it. */
void dc__comm_run_behind(dc_comm *comm, dc_stream *stream, dc__task_fn fn, void *block) {
  (void)dc__host_launch_func(comm, stream, fn, &block, sizeof block);
}

static void submit_items(dc_comm *comm, dc_stream *stream, int32_t kind, const dc__coll_item *items, int64_t count) {
  const dc__tag tag = {
      .graph_id = -1, .id = -1, .op = kind == DC__COLL_GATHER ? DC_OP_COMM_ALL_GATHER : DC_OP_COMM_REDUCE_SCATTER};
  if (kind == DC__COLL_GATHER) {
    dc__comm_all_gather(comm, stream, &tag, items, count);
  } else {
    dc__comm_reduce_scatter(comm, stream, &tag, items, count);
  }
}

/* Starts the members as one, with a copy of their ranges, which a task frees behind them on the stream. */
static dc_status submit_members(dc_comm *comm, dc_stream *stream, const group_member *members, int64_t count) {
  size_t world = (size_t)comm->world;
  size_t items_bytes = (size_t)count * sizeof(dc__coll_item);
  char *block = dc__calloc(1, items_bytes + (size_t)count * world * sizeof(dc__range));
  if (block == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc__coll_item *items = (dc__coll_item *)(void *)block;
  dc__range *ranges = (dc__range *)(void *)(block + items_bytes);
  for (int64_t i = 0; i < count; i++) {
    memcpy(&ranges[(size_t)i * world], members[i].item.ranges, world * sizeof(dc__range));
    items[i] = members[i].item;
    items[i].ranges = &ranges[(size_t)i * world];
  }
  submit_items(comm, stream, members[0].kind, items, count);
  dc__comm_run_behind(comm, stream, free_block_task, block);
  return stream == NULL ? dc__comm_check(comm) : DC_OK;
}

dc_status dc__comm_all_to_all(dc_comm *comm, dc_stream *stream, int32_t op, int32_t root, const dc__coll_item *item) {
  const dc__tag tag = {.graph_id = -1, .id = -1, .op = op};
  if (comm->world == 1 && item->ranges[0].count != item->ranges[1].count) { /* more ranks: the collective reports it */
    const dc__coll coll = {.tag = tag};
    return dc__coll_fail_counts(&coll, 0, item->ranges[0].count, 0, item->ranges[1].count);
  }
  if (stream == NULL) {
    comm->ops->all_to_all(comm, NULL, &tag, item, root);
    return dc__comm_check(comm);
  }
  size_t bytes = 2 * (size_t)comm->world * sizeof(dc__range);
  dc__range *ranges = dc__calloc(1, bytes);
  if (ranges == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc__coll_item copy = *item;
  copy.ranges = memcpy(ranges, item->ranges, bytes);
  comm->ops->all_to_all(comm, stream, &tag, &copy, root);
  dc__comm_run_behind(comm, stream, free_block_task, ranges);
  return DC_OK;
}

/* Requires comm->mutex. */
static dc_status append_to_group(dc_comm *comm, const group_member *m) {
  struct dc__comm_group_state *group = comm->group;
  size_t bytes = (size_t)comm->world * sizeof *m->ranges;
  dc__range *ranges = dc__calloc(1, bytes);
  void *members = group->members;
  if (ranges == NULL || !dc__array_reserve(&members, &group->capacity, group->count + 1, sizeof *m)) {
    dc__free(ranges);
    return DC_E_NO_MEMORY;
  }
  memcpy(ranges, m->item.ranges, bytes);
  group->members = members;
  group_member *member = &group->members[group->count++];
  *member = *m;
  member->ranges = ranges;
  member->item.ranges = ranges;
  return DC_OK;
}

dc_status dc__comm_submit(dc_comm *comm, dc_stream *stream, int32_t kind, const dc__coll_item *item) {
  const group_member m = {.item = *item, .stream = stream, .kind = kind};
  pthread_mutex_lock(&comm->mutex);
  bool grouped = comm->group != NULL;
  dc_status status = grouped ? append_to_group(comm, &m) : DC_OK;
  pthread_mutex_unlock(&comm->mutex);
  if (grouped) {
    return status;
  }
  if (stream != NULL) {
    return submit_members(comm, stream, &m, 1);
  }
  submit_items(comm, NULL, kind, item, 1);
  return dc__comm_check(comm);
}

bool dc__comm_group_is_open(dc_comm *comm) {
  pthread_mutex_lock(&comm->mutex);
  bool open = comm->group != NULL;
  pthread_mutex_unlock(&comm->mutex);
  return open;
}

dc_status dc__comm_group_begin(const char *fn, dc_comm *comm) {
  struct dc__comm_group_state *group = dc__calloc(1, sizeof *group);
  if (group == NULL) {
    return DC_E_NO_MEMORY;
  }
  pthread_mutex_lock(&comm->mutex);
  bool open = comm->group != NULL;
  if (!open) {
    comm->group = group;
  }
  pthread_mutex_unlock(&comm->mutex);
  if (open) {
    dc__free(group);
    return dc__fail(DC_E_STATE, "%s: a group is open already; groups do not nest", fn);
  }
  return DC_OK;
}

static dc_status submit_coll_group(const char *fn, dc_comm *comm, dc_stream *stream,
                                   const struct dc__comm_group_state *group) {
  for (int64_t i = 0; i < group->count; i++) {
    if (group->members[i].kind != group->members[0].kind) {
      return dc__fail(DC_E_INVALID, "%s: the group has both all-gathers and reduce-scatters, must have one kind", fn);
    }
    if (group->members[i].stream != stream) {
      return dc__fail(DC_E_INVALID, "%s: member %" PRId64 " of the group was given another stream", fn, i);
    }
  }
  return group->count == 0 ? DC_OK : submit_members(comm, stream, group->members, group->count);
}

/* Closes the open group. The caller frees it; NULL if none was open. */
static struct dc__comm_group_state *take_group(dc_comm *comm) {
  pthread_mutex_lock(&comm->mutex);
  struct dc__comm_group_state *group = comm->group;
  comm->group = NULL;
  pthread_mutex_unlock(&comm->mutex);
  return group;
}

void dc__comm_group_drop(dc_comm *comm) {
  struct dc__comm_group_state *group = take_group(comm);
  if (group != NULL) {
    free_group(group);
  }
}

dc_status dc__comm_group_end(const char *fn, dc_comm *comm, dc_stream *stream) {
  struct dc__comm_group_state *group = take_group(comm);
  if (group == NULL) {
    return dc__fail(DC_E_STATE, "%s: no group is open", fn);
  }
  dc_status status = dc__comm_check(comm);
  if (status == DC_OK) {
    status = submit_coll_group(fn, comm, stream, group);
  }
  free_group(group);
  return status;
}
