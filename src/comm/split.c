/* Divides a communicator's ranks into parts. All ranks exchange colors and keys, so that each computes its part, and
 * then each transport connects the ranks of a part (dc__comm_ops.split). */
#include "comm/split.h"

#include <inttypes.h>
#include <stdio.h>

#include "comm/tcp/hmac/hmac.h"

enum { SPLIT_COLOR, SPLIT_KEY, SPLIT_NAME, SPLIT_STATUS = SPLIT_NAME + 2, SPLIT_WORDS };

dc_status dc__split_exchange(dc_comm *comm, const int64_t *own, int64_t count, int64_t *table) {
  const dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_COMM_SPLIT};
  return dc__comm_all_gather_int64(comm, &tag, own, count, table);
}

/* A rank without the memory cannot take part in the exchange, so it ends the group. */
static dc_status split_alloc_table(dc_comm *comm, int64_t words, int64_t **table) {
  *table = dc__calloc((size_t)comm->world * (size_t)words, sizeof **table);
  if (*table == NULL) {
    comm->ops->abort(comm, "a rank has no memory for dc_comm_split");
  }
  return *table == NULL ? DC_E_NO_MEMORY : DC_OK;
}

dc_status dc__split_agree(const char *what, dc_comm *comm, dc_status status) {
  dc__failure failure = {DC_OK, ""};
  const int64_t own = status;
  int64_t *table;
  dc__failure_keep(&failure, status);
  DC__TRY(split_alloc_table(comm, 1, &table));
  dc_status met = dc__split_exchange(comm, &own, 1, table);
  int32_t failed = 0;
  while (met == DC_OK && failed < comm->world && table[failed] == DC_OK) {
    failed++;
  }
  const int64_t theirs = met == DC_OK && failed < comm->world ? table[failed] : DC_OK;
  dc__free(table);
  if (status != DC_OK) {
    return dc__failure_raise(&failure);
  }
  return theirs == DC_OK ? met
                         : dc__fail((dc_status)theirs, "%s: rank %" PRId32 " could not make its communicator: %s", what,
                                    failed, dc_status_string((dc_status)theirs));
}

/* Whether rank a comes before rank b in a part. */
static bool split_precedes(const int64_t *table, int32_t a, int32_t b) {
  const int64_t first = table[(size_t)a * SPLIT_WORDS + SPLIT_KEY], second = table[(size_t)b * SPLIT_WORDS + SPLIT_KEY];
  return first < second || (first == second && a < b);
}

static void split_find_part(const dc_comm *comm, const int64_t *table, dc__split *part, int32_t *members) {
  const int64_t color = table[(size_t)comm->rank * SPLIT_WORDS + SPLIT_COLOR];
  for (int32_t r = 0; r < comm->world && color >= 0; r++) {
    if (table[(size_t)r * SPLIT_WORDS + SPLIT_COLOR] == color) {
      int32_t at = part->world++;
      for (; at > 0 && split_precedes(table, r, members[at - 1]); at--) {
        members[at] = members[at - 1];
      }
      members[at] = r;
    }
  }
  part->leader = part->world > 0 ? members[0] : comm->rank;
  while (part->world > 0 && members[part->rank] != comm->rank) {
    part->rank++;
  }
  const int64_t *leader = &table[(size_t)part->leader * SPLIT_WORDS];
  part->name[0] = (uint64_t)leader[SPLIT_NAME];
  part->name[1] = (uint64_t)leader[SPLIT_NAME + 1];
}

/* Turns the error in rank r's words of the table into this rank's error. */
static dc_status split_rank_error(const dc_comm *comm, const int64_t *table, int32_t r) {
  const int64_t *words = &table[(size_t)r * SPLIT_WORDS];
  char whose[32] = "";
  if (r != comm->rank) {
    snprintf(whose, sizeof whose, "rank %" PRId32 "'s ", r);
  }
  if (words[SPLIT_STATUS] == DC_E_SYSTEM) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_split: rank %" PRId32 " has no random bytes", r);
  }
  return words[SPLIT_COLOR] < -1
             ? dc__fail(DC_E_INVALID, "dc_comm_split: %scolor = %" PRId64 ", must be >= 0, or -1 for no communicator",
                        whose, words[SPLIT_COLOR])
             : dc__fail(DC_E_INVALID, "dc_comm_split: %spart is NULL", whose);
}

/* A rank with invalid arguments still takes part, so that all ranks return an error and stay in step. */
static dc_status split_exchange_colors(dc_comm *comm, int32_t color, int32_t key, bool has_part, int64_t *table) {
  int64_t own[SPLIT_WORDS] = {[SPLIT_COLOR] = color, [SPLIT_KEY] = key};
  const bool random = dc__random_bytes(&own[SPLIT_NAME], 2 * sizeof own[0]);
  own[SPLIT_STATUS] = color < -1 || !has_part ? DC_E_INVALID : random ? DC_OK : DC_E_SYSTEM;
  DC__TRY(dc__split_exchange(comm, own, SPLIT_WORDS, table));
  if (own[SPLIT_STATUS] != DC_OK) {
    return split_rank_error(comm, table, comm->rank);
  }
  for (int32_t r = 0; r < comm->world; r++) {
    if (table[(size_t)r * SPLIT_WORDS + SPLIT_STATUS] != DC_OK) {
      return split_rank_error(comm, table, r);
    }
  }
  return DC_OK;
}

/* The members' list lies behind the table. */
static dc_status split_with_table(dc_comm *comm, int32_t color, int32_t key, int64_t *table, dc_comm **part) {
  int32_t *members = (int32_t *)(table + (size_t)comm->world * SPLIT_WORDS);
  dc__split split = {.members = members};
  DC__TRY(split_exchange_colors(comm, color, key, part != NULL, table));
  split_find_part(comm, table, &split, members);
  dc_status status = dc__split_agree("dc_comm_split", comm, comm->ops->split(comm, &split, part));
  if (status != DC_OK && *part != NULL) {
    dc__comm_release(*part);
    *part = NULL;
  }
  return status;
}

dc_status dc__comm_split(dc_comm *comm, int32_t color, int32_t key, dc_comm **part) {
  int64_t *table;
  if (comm->ops->split == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "dc_comm_split: this communicator (%s) cannot be split", comm->ops->name);
  }
  DC__TRY(split_alloc_table(comm, SPLIT_WORDS + 1, &table));
  dc_status status = split_with_table(comm, color, key, table, part);
  dc__free(table);
  return status;
}

dc_status dc__comm_split_even(dc_comm *comm, int32_t first, int32_t step, int32_t world, dc_comm **part) {
  return comm->ops->split_even != NULL ? comm->ops->split_even(comm, first, step, world, part)
                                       : dc__comm_split(comm, first, 0, part);
}
