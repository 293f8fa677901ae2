/* A communicator over the caller's collectives, which know equal counts and sums only: ragged ranges are padded, groups
 * packed, 16-bit floats summed in float32, and means divided here. Before each collective the ranks exchange what they
 * are about to do, so that a difference is an error and not whatever the caller's library makes of it. */
#include <inttypes.h>
#include <string.h>

#include "comm/host.h"
#include "kernels/kernels.h"

/* The copies of one communicator: a failure of one is a failure of all. */
typedef struct family {
  atomic_int refs;
  atomic_int failed;
  pthread_mutex_t mutex;
  dc__failure failure;
  struct external *members;
} family;

typedef struct external {
  struct dc_comm head;
  dc_comm_callbacks callbacks;
  family *family;
  struct external *next;
  pthread_mutex_t turn; /* one collective at a time; scratch */
  char *scratch[2];     /* packed send, packed recv */
  int64_t scratch_bytes[2];
} external;

/* What the ranks compare before a collective. */
enum { PRINT_OP, PRINT_KIND, PRINT_ID, PRINT_GRAPH, PRINT_TOTAL, PRINT_TYPE, PRINT_COUNT, PRINT_HASH, PRINT_WORDS };

/* ---- failures ---- */

static void adopt(dc_comm *comm) {
  family *f = ((external *)comm)->family;
  if (atomic_load_explicit(&f->failed, memory_order_acquire) != 0) {
    pthread_mutex_lock(&f->mutex);
    dc_status status = dc__failure_raise(&f->failure);
    pthread_mutex_unlock(&f->mutex);
    dc__comm_fail(comm, status);
  }
}

static void fail_family(external *self, dc_status status) {
  family *f = self->family;
  pthread_mutex_lock(&f->mutex);
  dc__failure_keep(&f->failure, status);
  atomic_store_explicit(&f->failed, 1, memory_order_release);
  pthread_mutex_unlock(&f->mutex);
  adopt(&self->head);
}

static dc_status called(const external *self, const dc__coll *coll, const char *callback, int32_t error) {
  if (error == 0) {
    return DC_OK;
  }
  char name[DC__COLL_TEXT];
  dc__coll_describe_tag(name, coll->tag.op, coll->tag.id);
  return dc__fail(DC_E_CALLBACK, "%s: the caller's %s returned %" PRId32 " on rank %" PRId32, name, callback, error,
                  self->head.rank);
}

/* ---- the comparison ---- */

static void make_print(const external *self, const dc__coll *coll, int64_t print[PRINT_WORDS]) {
  uint64_t hash = (uint64_t)coll->root;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    hash = hash * 31 + dc__coll_ranges_hash(item, self->head.world);
    hash = hash * 31 + (uint64_t)item->total;
    hash = hash * 31 + (uint64_t)item->id;
    hash = hash * 31 + (uint64_t)item->dtype * 4 + (uint64_t)item->reduce_op;
  }
  const dc__coll_item none = {.total = 0};
  const dc__coll_item *first = coll->count > 0 ? &coll->items[0] : &none;
  print[PRINT_OP] = coll->tag.op;
  print[PRINT_KIND] = coll->kind;
  print[PRINT_ID] = coll->tag.id;
  print[PRINT_GRAPH] = coll->tag.graph_id;
  print[PRINT_TOTAL] = first->total;
  print[PRINT_TYPE] = first->dtype * 4 + first->reduce_op;
  print[PRINT_COUNT] = coll->count;
  print[PRINT_HASH] = (int64_t)hash;
}

static void describe(char text[DC__COLL_TEXT], const int64_t *print, const dc__coll *coll) {
  const dc__coll_name name = {.graph_id = DC__COLL_NO_GRAPH,
                              .id = print[PRINT_ID],
                              .total = print[PRINT_TOTAL],
                              .op = (int32_t)print[PRINT_OP],
                              .kind = (int32_t)print[PRINT_KIND],
                              .count = (int32_t)print[PRINT_COUNT],
                              .dtype = (int32_t)(print[PRINT_TYPE] / 4),
                              .reduce_op = (int32_t)(print[PRINT_TYPE] % 4),
                              .root = coll->root};
  dc__coll_describe(text, &name);
}

static dc_status compare(external *self, const dc__coll *coll) {
  int64_t mine[PRINT_WORDS];
  int64_t all[PRINT_WORDS * DC__COMM_MAX_WORLD];
  make_print(self, coll, mine);
  const dc_comm_callbacks *c = &self->callbacks;
  DC__TRY(called(self, coll, "all_gather", c->all_gather(mine, all, PRINT_WORDS, DC_INT64, c->user)));
  for (int32_t r = 1; r < self->head.world; r++) {
    const int64_t *other = &all[(size_t)r * PRINT_WORDS];
    if (memcmp(all, other, sizeof mine) != 0) {
      char zero_text[DC__COLL_TEXT];
      char other_text[DC__COLL_TEXT];
      describe(zero_text, all, coll);
      describe(other_text, other, coll);
      const char *rest = strcmp(zero_text, other_text) == 0 ? ", which differ in graph, split or a later tensor" : "";
      return dc__fail(DC_E_MISMATCH, "rank %" PRId32 " called %s where rank 0 called %s%s", r, other_text, zero_text,
                      rest);
    }
  }
  return DC_OK;
}

/* ---- packing ---- */

/* Memory that only grows, for packed data. */
static dc_status need(external *self, int32_t which, int64_t bytes, char **ptr) {
  if (self->scratch_bytes[which] < bytes) {
    dc__free(self->scratch[which]);
    self->scratch_bytes[which] = 0;
    self->scratch[which] = dc__calloc(1, (size_t)bytes);
    if (self->scratch[which] == NULL) {
      return DC_E_NO_MEMORY;
    }
    self->scratch_bytes[which] = bytes;
  }
  *ptr = self->scratch[which];
  return DC_OK;
}

static int64_t longest(const dc__coll_item *item, int32_t world) {
  int64_t count = 0;
  for (int32_t r = 0; r < world; r++) {
    count = item->ranges[r].count > count ? item->ranges[r].count : count;
  }
  return count;
}

static int64_t size_of(const dc__coll_item *item) {
  return (int64_t)dc_dtype_size(item->dtype);
}

static int64_t bytes_of_others(const external *self, const dc__coll_item *item) {
  int64_t count = 0;
  for (int32_t r = 0; r < self->head.world; r++) {
    count += r == self->head.rank ? 0 : item->ranges[r].count;
  }
  return count * size_of(item);
}

/* One call for the whole group: in the items' type if they have one in common, else in bytes. */
static dc_status gather(external *self, const dc__coll *coll) {
  int32_t world = self->head.world;
  int64_t block = 0; /* bytes of a rank's packed part */
  bool common = true;
  for (int32_t i = 0; i < coll->count; i++) {
    block += longest(&coll->items[i], world) * size_of(&coll->items[i]);
    common = common && coll->items[i].dtype == coll->items[0].dtype;
  }
  if (block == 0) {
    return DC_OK;
  }
  char *send;
  char *recv;
  DC__TRY(need(self, 0, block, &send));
  DC__TRY(need(self, 1, block * world, &recv));
  int64_t pos = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    size_t bytes = (size_t)(item->ranges[self->head.rank].count * size_of(item));
    if (bytes > 0) {
      memcpy(send + pos, item->send, bytes);
    }
    pos += longest(item, world) * size_of(item);
  }
  int32_t dtype = common ? coll->items[0].dtype : DC_INT8;
  const dc_comm_callbacks *c = &self->callbacks;
  int64_t count = block / (int64_t)dc_dtype_size(dtype);
  DC__TRY(called(self, coll, "all_gather", c->all_gather(send, recv, count, dtype, c->user)));
  int64_t moved = 0;
  pos = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    for (int32_t r = 0; r < world; r++) {
      size_t bytes = (size_t)(item->ranges[r].count * size_of(item));
      if (bytes > 0) {
        memcpy((char *)item->recv + item->ranges[r].begin * size_of(item), recv + r * block + pos, bytes);
      }
    }
    pos += longest(item, world) * size_of(item);
    moved += bytes_of_others(self, item);
  }
  atomic_fetch_add(&self->head.wire_bytes, moved);
  return DC_OK;
}

/* The type in which the caller's library adds. */
static int32_t sum_dtype(const dc__coll_item *item) {
  return item->dtype == DC_FLOAT16 || item->dtype == DC_BFLOAT16 ? DC_FLOAT32 : item->dtype;
}

static void divide(void *data, int32_t dtype, int64_t count, int32_t world) {
  if (dtype == DC_FLOAT32) {
    float *values = data;
    for (int64_t i = 0; i < count; i++) {
      values[i] /= (float)world;
    }
  } else if (dtype == DC_FLOAT64) {
    double *values = data;
    for (int64_t i = 0; i < count; i++) {
      values[i] /= (double)world;
    }
  }
}

/* Rank-major: block r holds every rank's contribution to what rank r receives. Padding is zero. */
static void pack(const external *self, const dc__coll *coll, int32_t dtype, char *send) {
  int64_t size = (int64_t)dc_dtype_size(dtype);
  for (int32_t r = 0; r < self->head.world; r++) {
    for (int32_t i = 0; i < coll->count; i++) {
      const dc__coll_item *item = &coll->items[i];
      if (sum_dtype(item) == dtype) {
        dc__range range = item->ranges[r];
        int64_t padded = longest(item, self->head.world);
        dc__cast(send, dtype, (const char *)item->send + range.begin * size_of(item), item->dtype, range.count);
        memset(send + range.count * size, 0, (size_t)((padded - range.count) * size));
        send += padded * size;
      }
    }
  }
}

static void unpack(external *self, const dc__coll *coll, int32_t dtype, char *recv) {
  int64_t size = (int64_t)dc_dtype_size(dtype);
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    if (sum_dtype(item) == dtype) {
      int64_t count = item->ranges[self->head.rank].count;
      const void *sum = recv;
      if (item->reduce_op == DC_MEAN) {
        divide(recv, dtype, count, self->head.world);
      }
      /* One source: converts and, if asked, accumulates like the transports that add themselves. */
      dc__reduce(item->recv, item->recv_dtype, &sum, 1, dtype, count, false, item->accumulate != 0);
      recv += longest(item, self->head.world) * size;
      atomic_fetch_add(&self->head.wire_bytes, count * size_of(item) * (self->head.world - 1));
    }
  }
}

static dc_status reduce_dtype(external *self, const dc__coll *coll, int32_t dtype) {
  int64_t block = 0; /* elements */
  for (int32_t i = 0; i < coll->count; i++) {
    block += sum_dtype(&coll->items[i]) == dtype ? longest(&coll->items[i], self->head.world) : 0;
  }
  if (block == 0) {
    return DC_OK;
  }
  char *send;
  char *recv;
  int64_t bytes = block * (int64_t)dc_dtype_size(dtype);
  DC__TRY(need(self, 0, bytes * self->head.world, &send));
  DC__TRY(need(self, 1, bytes, &recv));
  pack(self, coll, dtype, send);
  const dc_comm_callbacks *c = &self->callbacks;
  DC__TRY(called(self, coll, "reduce_scatter", c->reduce_scatter(send, recv, block, dtype, c->user)));
  unpack(self, coll, dtype, recv);
  return DC_OK;
}

static dc_status reduce(external *self, const dc__coll *coll) {
  for (int32_t dtype = DC_FLOAT32; dtype <= DC_INT64; dtype++) {
    DC__TRY(reduce_dtype(self, coll, dtype)); /* does nothing for a type that no item is summed in */
  }
  return DC_OK;
}

static dc_status run_kind(external *self, const dc__coll *coll) {
  const dc_comm_callbacks *c = &self->callbacks;
  DC__TRY(compare(self, coll));
  if (coll->kind == DC__COLL_GATHER) {
    return gather(self, coll);
  }
  if (coll->kind == DC__COLL_REDUCE) {
    return reduce(self, coll);
  }
  if (coll->kind == DC__COLL_BROADCAST) {
    size_t bytes = (size_t)coll->items[0].total;
    atomic_fetch_add(&self->head.wire_bytes, coll->root == self->head.rank ? 0 : coll->items[0].total);
    return bytes == 0 ? DC_OK
                      : called(self, coll, "broadcast", c->broadcast(coll->items[0].recv, bytes, coll->root, c->user));
  }
  return called(self, coll, "barrier", c->barrier(c->user));
}

static void in_turn(dc_comm *comm, const dc__coll *coll, dc_status (*work)(external *self, const dc__coll *coll)) {
  external *self = (external *)comm;
  pthread_mutex_lock(&self->turn);
  dc_status status = work(self, coll);
  pthread_mutex_unlock(&self->turn);
  if (status != DC_OK) {
    fail_family(self, status);
  }
}

static void run(dc_comm *comm, const dc__coll *coll) {
  in_turn(comm, coll, run_kind);
}

static void agree(dc_comm *comm, const dc__coll *coll) {
  in_turn(comm, coll, compare);
}

/* ---- the communicator ---- */

static dc_status dup(dc_comm *comm, dc_comm **copy);

static void abort_family(dc_comm *comm, const char *reason) {
  external *self = (external *)comm;
  fail_family(self, dc__fail(DC_E_ABORTED, "rank %" PRId32 " aborted the group%s%.300s", comm->rank,
                             reason != NULL ? ": " : "", reason != NULL ? reason : ""));
  pthread_mutex_lock(&self->family->mutex);
  for (external *member = self->family->members; member != NULL; member = member->next) {
    if (member->callbacks.abort != NULL) {
      member->callbacks.abort(member->callbacks.user);
    }
  }
  pthread_mutex_unlock(&self->family->mutex);
}

static void release_family(family *f) {
  if (atomic_fetch_sub(&f->refs, 1) == 1) {
    pthread_mutex_destroy(&f->mutex);
    dc__free(f);
  }
}

static void leave_family(external *self) {
  pthread_mutex_lock(&self->family->mutex);
  external **link = &self->family->members;
  while (*link != self) {
    link = &(*link)->next;
  }
  *link = self->next;
  pthread_mutex_unlock(&self->family->mutex);
  release_family(self->family);
}

static void destroy(dc_comm *comm) {
  external *self = (external *)comm;
  leave_family(self);
  if (self->callbacks.destroy_user != NULL) {
    self->callbacks.destroy_user(self->callbacks.user);
  }
  dc__free(self->scratch[0]);
  dc__free(self->scratch[1]);
  pthread_mutex_destroy(&self->turn);
  dc__comm_head_destroy(comm);
  dc__free(self);
}

static const dc__comm_ops ops = {.name = "external",
                                 .all_gather = dc__host_all_gather,
                                 .reduce_scatter = dc__host_reduce_scatter,
                                 .broadcast = dc__host_broadcast,
                                 .barrier = dc__host_barrier,
                                 .run = run,
                                 .agree = agree,
                                 .dup = dup,
                                 .abort = abort_family,
                                 .poll = adopt,
                                 .destroy = destroy};

static dc_status create(const dc_comm_callbacks *callbacks, family *f, int32_t rank, int32_t world, int64_t timeout_ns,
                        dc_comm **comm) {
  external *self = dc__calloc(1, sizeof *self);
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = dc__comm_head_init(&self->head, &ops, rank, world, timeout_ns);
  if (status != DC_OK) {
    dc__free(self);
    return status;
  }
  pthread_mutex_init(&self->turn, NULL);
  self->callbacks = *callbacks;
  self->family = f;
  atomic_fetch_add(&f->refs, 1);
  pthread_mutex_lock(&f->mutex);
  self->next = f->members;
  f->members = self;
  pthread_mutex_unlock(&f->mutex);
  *comm = &self->head;
  return DC_OK;
}

static dc_status dup(dc_comm *comm, dc_comm **copy) {
  external *self = (external *)comm;
  dc_comm_callbacks callbacks = self->callbacks;
  if (callbacks.dup == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "dc_comm_dup: the caller's table has no dup");
  }
  int32_t error = callbacks.dup(self->callbacks.user, &callbacks.user);
  if (error != 0) {
    return dc__fail(DC_E_CALLBACK, "dc_comm_dup: the caller's dup returned %" PRId32 " on rank %" PRId32, error,
                    comm->rank);
  }
  dc_status status = create(&callbacks, self->family, comm->rank, comm->world, comm->timeout_ns, copy);
  if (status != DC_OK && callbacks.destroy_user != NULL) {
    callbacks.destroy_user(callbacks.user);
  }
  return status;
}

dc_status dc__comm_create_external(const dc_comm_callbacks *callbacks, int32_t rank, int32_t world,
                                   const dc_comm_options *options, dc_comm **comm) {
  family *f = dc__calloc(1, sizeof *f);
  if (f == NULL) {
    return DC_E_NO_MEMORY;
  }
  atomic_init(&f->refs, 1);
  pthread_mutex_init(&f->mutex, NULL);
  dc_status status = create(callbacks, f, rank, world, options->timeout_ns, comm);
  release_family(f);
  return status;
}
