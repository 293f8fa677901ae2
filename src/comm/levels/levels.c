/* Communicators in two levels: finding blocks, creation, copies, and the table. */
#include "comm/levels/levels.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/machine.h"
#include "comm/split.h"
#include "comm/tcp/hmac/hmac.h"

/* Words that each rank sends to the others. */
enum { WORD_NODE, WORD_NAME = 2, WORD_ASKED = 4, WORDS };

void dc__levels_progress(const dc__levels *self, bool waits) {
  if (self->whole->ops->progress != NULL) {
    self->whole->ops->progress(self->whole, waits);
  }
}

/* ---- the table ---- */

static void release_parts(dc__levels *parts) {
  dc__comm_release(parts->column);
  dc__comm_release(parts->block);
  dc__comm_release(parts->whole);
}

static void levels_destroy(dc_comm *comm) {
  dc__levels *self = (dc__levels *)comm;
  const bool is_used = self->head.keeps_memory && dc__comm_check(self->column) != DC_OK;
  release_parts(self);
  dc__free(self->ranges);
  dc__free(self->items);
  if (!is_used) { /* else it is leaked, since it may still be written to */
    dc__free(self->scratch);
  }
  pthread_mutex_destroy(&self->collective_mutex);
  dc__comm_head_destroy(comm);
  dc__free(self);
}

static void levels_poll_failure(dc_comm *comm) {
  dc_status status = dc__comm_check(((dc__levels *)comm)->whole);
  if (status != DC_OK) {
    dc__comm_fail(comm, status);
  }
}

static void levels_check_peers(dc_comm *comm) {
  dc_comm *whole = ((dc__levels *)comm)->whole;
  whole->ops->check_peers(whole);
  levels_poll_failure(comm);
}

static void levels_abort_group(dc_comm *comm, const char *reason) {
  dc__levels *self = (dc__levels *)comm;
  self->whole->ops->abort(self->whole, reason);
  self->block->ops->abort(self->block, reason); /* the creation of copies ignores the parent */
  self->column->ops->abort(self->column, reason);
  levels_poll_failure(comm);
}

static void levels_fail_group(dc_comm *comm, dc_status status) {
  const dc__levels *self = (const dc__levels *)comm;
  dc_comm *const parts[] = {self->whole, self->block, self->column};
  dc__failure failure = {DC_OK, ""};
  dc__failure_keep(&failure, status);
  for (size_t i = 0; i < DC__COUNT(parts); i++) {
    parts[i]->ops->fail_group(parts[i], dc__failure_raise(&failure));
  }
  levels_poll_failure(comm);
}

static void levels_set_parent(dc_comm *comm, dc_comm *parent) {
  dc__comm_set_parent(((dc__levels *)comm)->whole, parent);
}

static bool levels_agree(dc_comm *comm, const dc__coll *coll, uint64_t word) {
  dc_comm *whole = ((dc__levels *)comm)->whole;
  bool same = whole->ops->agree(whole, coll, word);
  levels_poll_failure(comm);
  return same;
}

static dc_status levels_heap_alloc(dc_comm *comm, size_t bytes, void **ptr) {
  dc_comm *block = ((dc__levels *)comm)->block;
  return block->ops->heap_alloc(block, bytes, ptr);
}

static void levels_heap_free(dc_comm *comm, void *ptr, size_t bytes) {
  dc_comm *block = ((dc__levels *)comm)->block;
  block->ops->heap_free(block, ptr, bytes);
}

/* Verifies all data or none, since a caller could not tell which is verified. */
static dc_status levels_set_checksums(dc_comm *comm, bool enable) {
  const dc__levels *self = (dc__levels *)comm;
  dc_comm *const parts[] = {self->whole, self->block, self->column};
  for (size_t i = 0; i < DC__COUNT(parts); i++) {
    if (parts[i]->ops->set_checksums == NULL) {
      return dc__fail(
          DC_E_UNSUPPORTED,
          "dc_comm_set_checksums: ranks of several machines exchange data over %s, which libdc does not see",
          parts[i]->ops->name);
    }
  }
  for (size_t i = 0; i < DC__COUNT(parts); i++) {
    DC__TRY(parts[i]->ops->set_checksums(parts[i], enable));
  }
  return DC_OK;
}

static bool levels_has_checksums(const dc_comm *comm) {
  const dc_comm *whole = ((const dc__levels *)comm)->whole;
  return whole->ops->has_checksums != NULL && whole->ops->has_checksums(whole);
}

static dc_status levels_dup(dc_comm *comm, dc_comm **copy);
static dc_status levels_split(dc_comm *comm, const dc__split *split, dc_comm **part);

static const dc__comm_ops ops = {.name = "two levels",
                                 .all_gather = dc__host_all_gather,
                                 .reduce_scatter = dc__host_reduce_scatter,
                                 .broadcast = dc__host_broadcast,
                                 .all_to_all = dc__host_all_to_all,
                                 .barrier = dc__host_barrier,
                                 .run = dc__levels_run,
                                 .agree = levels_agree,
                                 .set_parent = levels_set_parent,
                                 .check_peers = levels_check_peers,
                                 .dup = levels_dup,
                                 .split = levels_split,
                                 .abort = levels_abort_group,
                                 .fail_group = levels_fail_group,
                                 .poll = levels_poll_failure,
                                 .heap_alloc = levels_heap_alloc,
                                 .heap_free = levels_heap_free,
                                 .set_checksums = levels_set_checksums,
                                 .has_checksums = levels_has_checksums,
                                 .destroy = levels_destroy};

/* ---- creation ---- */

/* Takes the three communicators over, even if it fails. */
static dc_status create_on_parts(const dc__levels *parts, dc_comm **comm) {
  dc__levels *self = dc__calloc(1, sizeof *self);
  dc_comm *whole = parts->whole;
  dc_status status = self == NULL ? DC_E_NO_MEMORY : DC_OK;
  if (status == DC_OK) {
    *self = *parts;
    self->ranges = dc__calloc(dc__levels_range_count(self), sizeof *self->ranges);
    self->items = dc__calloc((size_t)self->blocks * DC__COMM_GROUP, sizeof *self->items);
    status = self->ranges == NULL || self->items == NULL
                 ? DC_E_NO_MEMORY
                 : dc__comm_head_init(&self->head, &ops, whole->rank, whole->world, whole->timeout_ns);
  }
  if (status != DC_OK) {
    whole->ops->abort(whole, "a rank has no memory for a communicator in two levels");
    if (self != NULL) {
      dc__free(self->ranges);
      dc__free(self->items);
      dc__free(self);
    }
    dc__levels lost = *parts;
    release_parts(&lost);
    return status;
  }
  pthread_mutex_init(&self->collective_mutex, NULL);
  dc__comm_set_parent(self->block, whole);
  dc__comm_set_parent(self->column, whole);
  self->head.keeps_memory = whole->keeps_memory;
  self->head.usage = whole->usage; /* each collective is one of the whole's */
  *comm = &self->head;
  return DC_OK;
}

/* The length of the longest possible blocks: 2^k consecutive ranks, each block on one machine. 1 if there are none, or
 * if all ranks are on one machine. */
static int32_t find_length(const int64_t *table, int32_t world) {
  bool several = false;
  for (int32_t length = DC__COMM_MAX_LOCAL; length > 1; length /= 2) {
    bool fits = world % length == 0;
    for (int32_t r = 0; r < world; r++) {
      const int64_t *own = &table[(size_t)r * WORDS], *first = &table[(size_t)(r - r % length) * WORDS];
      several = several || memcmp(own, table, 2 * sizeof *own) != 0;
      fits = fits && memcmp(own, first, 2 * sizeof *own) == 0;
    }
    if (fits && several) {
      return length;
    }
  }
  return 1;
}

static bool is_asked(const int64_t *table, int32_t world) {
  bool asked = false;
  for (int32_t r = 0; r < world; r++) {
    asked = asked || table[(size_t)r * WORDS + WORD_ASKED] != 0;
  }
  return asked;
}

/* If a machine allows no shared memory, the whole is used without levels, unless the caller asked for blocks. */
static dc_status connect_levels(dc__levels *parts, const int64_t *table, dc_comm **comm) {
  dc_comm *whole = parts->whole;
  const int32_t place = whole->rank % parts->length;
  const int64_t *name = &table[(size_t)(whole->rank - place) * WORDS + WORD_NAME];
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = whole->timeout_ns};
  char text[64];
  snprintf(text, sizeof text, "block-%016" PRIx64 "%016" PRIx64, (uint64_t)name[0], (uint64_t)name[1]);
  dc__levels_progress(parts, true);
  dc_status status = dc__comm_create_processes(text, place, parts->length, &options, &parts->block);
  dc__levels_progress(parts, false);
  status = dc__split_agree("blocks of ranks over shared memory", whole, status);
  if (status != DC_OK) {
    dc__comm_release(parts->block);
    if (dc__comm_check(whole) == DC_OK && !is_asked(table, whole->world)) {
      *comm = whole;
      return DC_OK;
    }
    dc__comm_release(whole);
    return status;
  }
  status = dc__comm_split(whole, place, 0, &parts->column);
  if (status != DC_OK) {
    release_parts(parts);
    return status;
  }
  return create_on_parts(parts, comm);
}

static dc_status exchange_nodes(dc__levels *parts, bool asked, int64_t *table) {
  int64_t own[WORDS] = {(int64_t)parts->node[0], (int64_t)parts->node[1]};
  own[WORD_ASKED] = asked;
  if (!dc__random_bytes(&own[WORD_NAME], 2 * sizeof own[0])) {
    own[WORD_NODE] = parts->whole->rank + 1; /* joins no block, since others might guess its name */
  }
  const dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_INIT};
  return dc__comm_all_gather_int64(parts->whole, &tag, own, WORDS, table);
}

static dc_status create_with_table(dc__levels *parts, bool asked, int64_t *table, dc_comm **comm) {
  dc_status status = exchange_nodes(parts, asked, table);
  if (status != DC_OK) {
    dc__comm_release(parts->whole);
    return status;
  }
  parts->length = find_length(table, parts->whole->world);
  if (parts->length == 1) {
    *comm = parts->whole;
    return DC_OK;
  }
  parts->blocks = parts->whole->world / parts->length;
  return connect_levels(parts, table, comm);
}

/* Creates the levels on a machine with this hash. */
static dc_status create_on_node(dc_comm *whole, const uint64_t node[2], bool asked, dc_comm **comm) {
  dc__levels parts = {.whole = whole, .node = {node[0], node[1]}};
  int64_t *table = dc__calloc((size_t)whole->world, WORDS * sizeof *table);
  if (table == NULL) {
    whole->ops->abort(whole, "a rank has no memory for the machines of all ranks");
    dc__comm_release(whole);
    return DC_E_NO_MEMORY;
  }
  dc_status status = create_with_table(&parts, asked, table, comm);
  dc__free(table);
  return status;
}

dc_status dc__comm_create_levels(dc_comm *whole, const char *node, dc_comm **comm) {
  char machine[DC__MACHINE_NAME];
  unsigned char digest[32];
  uint64_t hash[2];
  dc__machine_name(machine);
  dc__sha256_reference(node != NULL ? node : machine, node != NULL ? strlen(node) : sizeof machine, digest);
  memcpy(hash, digest, sizeof hash);
  if (node != NULL && node[0] == '\0') {
    hash[0] = (uint64_t)whole->rank;
    hash[1] = 0;
  }
  return create_on_node(whole, hash, node != NULL && node[0] != '\0', comm);
}

/* Copies the three communicators in the same order on all ranks. */
static dc_status levels_dup(dc_comm *comm, dc_comm **copy) {
  const dc__levels *self = (dc__levels *)comm;
  dc__levels parts = {.length = self->length, .blocks = self->blocks, .node = {self->node[0], self->node[1]}};
  dc_status status = dc__comm_dup(self->whole, &parts.whole);
  status = status != DC_OK ? status : dc__comm_dup(self->block, &parts.block);
  status = status != DC_OK ? status : dc__comm_dup(self->column, &parts.column);
  if (status != DC_OK) {
    levels_abort_group(comm, dc_last_error());
    release_parts(&parts);
    return status;
  }
  return create_on_parts(&parts, copy);
}

static dc_status levels_split(dc_comm *comm, const dc__split *split, dc_comm **part) {
  const dc__levels *self = (dc__levels *)comm;
  dc_comm *whole = NULL;
  dc_status status = dc__split_agree("dc_comm_split", self->whole, self->whole->ops->split(self->whole, split, &whole));
  if (status != DC_OK) { /* perhaps only another rank failed */
    dc__comm_release(whole);
    return status;
  }
  return whole == NULL ? DC_OK : create_on_node(whole, self->node, false, part);
}
