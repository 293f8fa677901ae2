/* Compares the dumps of a group and says in one sentence which rank did what differently. Ranks that do the same have
 * the same collectives under the same numbers, so the first number with a difference is where it began. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tool.h"

enum { MAX_NAMED = 16 };

static const char *const groups[] = {"gather", "reduce"};

/* ---- sentences ---- */

static PRINTF(2, 3) void sentence_append(char sentence[SENTENCE], const char *format, ...) {
  size_t used = strlen(sentence);
  va_list list;
  va_start(list, format);
  vsnprintf(sentence + used, SENTENCE - used, format, list);
  va_end(list);
}

/* "rank 1", "ranks 0, 2 and 3" of those in the set; of many, how many more. */
static void sentence_append_ranks(char sentence[SENTENCE], const bool set[MAX_RANKS]) {
  int total = 0;
  for (int r = 0; r < MAX_RANKS; r++) {
    total += set[r];
  }
  sentence_append(sentence, "rank%s ", plural_s(total));
  int named = 0;
  for (int r = 0; r < MAX_RANKS && named < MAX_NAMED; r++) {
    if (set[r]) {
      named++;
      sentence_append(sentence, "%s%d", named == 1 ? "" : named == total ? " and " : ", ", r);
    }
  }
  if (named < total) {
    sentence_append(sentence, " and %d more", total - named);
  }
}

static void sentence_append_entry(char sentence[SENTENCE], const entry *e) {
  sentence_append(sentence, "%s", e->op);
  if (e->id >= 0) {
    sentence_append(sentence, " of parameter %" PRId64, e->id);
    if (e->name[0] != '\0') {
      sentence_append(sentence, " (%.96s)", e->name);
    }
  }
  if (e->graph >= 0) {
    sentence_append(sentence, " in graph number %" PRId64, e->graph);
  }
  sentence_append(sentence, " (%" PRId64 " byte%s, %s", e->bytes, plural_s(e->bytes), e->dtype);
  sentence_append(sentence, e->tensors > 1 ? ", %" PRId64 " tensors)" : ")", e->tensors);
}

static double seconds(int64_t ns) {
  return (double)ns / 1e9;
}

static const char *plural(const char *group) {
  return strcmp(group, "reduce") == 0 ? "reductions" : "gathers";
}

/* ---- searches ---- */

/* The entry of a collective; the search begins at *at, which advances with it, since numbers ascend. */
static const entry *collective(const dump *d, const char *group, int64_t seq, int64_t *at) {
  for (; *at < d->count; ++*at) {
    const entry *e = &d->entries[*at];
    if (e->seq >= seq && strcmp(e->group, group) == 0) {
      return e->seq == seq ? e : NULL;
    }
  }
  return NULL;
}

/* The first and the last collective of a group that a rank still has; false: none. */
static bool seq_range(const dump *d, const char *group, int64_t *first, int64_t *last) {
  *first = *last = 0;
  for (int64_t i = 0; i < d->count; i++) {
    if (strcmp(d->entries[i].group, group) == 0) {
      *first = *first == 0 ? d->entries[i].seq : *first;
      *last = d->entries[i].seq;
    }
  }
  return *first > 0;
}

static bool same_operation(const entry *a, const entry *b) {
  return strcmp(a->op, b->op) == 0 && strcmp(a->dtype, b->dtype) == 0 && a->graph == b->graph && a->id == b->id &&
         a->bytes == b->bytes && a->tensors == b->tensors;
}

static bool is_pending(const entry *e) {
  return strcmp(e->state, "done") != 0;
}

/* ---- the cases ---- */

/* A rank without a file: it died, if the others report a dead peer. */
static bool find_missing_ranks(const dumps *d, diagnosis *v) {
  bool is_missing[MAX_RANKS] = {false};
  for (int r = 0; r < d->world; r++) {
    is_missing[r] = true;
  }
  bool dead = false;
  const char *error = "";
  for (int i = 0; i < d->count; i++) {
    is_missing[d->ranks[i].rank] = false;
    dead = dead || strcmp(d->ranks[i].status, "DC_E_PEER_DEAD") == 0;
    error = error[0] == '\0' ? d->ranks[i].error : error;
  }
  if (d->count == d->world) {
    return false;
  }
  v->kind = dead ? "died" : "missing";
  memcpy(v->culprits, is_missing, sizeof v->culprits);
  sentence_append_ranks(v->sentence, is_missing);
  sentence_append(v->sentence,
                  dead ? " died" : " left no dump: not alive, or not back in libdc since the others failed");
  sentence_append(v->sentence, error[0] == '\0' ? "; the others have no error" : "; the others say: %s", error);
  return true;
}

/* The ranks' entries under one number, NULL where a rank does not have it. */
static void align_entries(const dumps *d, const char *group, int64_t seq, int64_t at[MAX_RANKS],
                          const entry *line[MAX_RANKS]) {
  for (int i = 0; i < d->count; i++) {
    line[i] = collective(&d->ranks[i], group, seq, &at[i]);
  }
}

/* The entry that most have; of two with as many, that of the lower rank. */
static const entry *majority(const dumps *d, const entry *const line[MAX_RANKS]) {
  const entry *best = NULL;
  int most_common = 0;
  for (int i = 0; i < d->count; i++) {
    int votes = 0;
    for (int k = 0; k < d->count && line[i] != NULL; k++) {
      votes += line[k] != NULL && same_operation(line[i], line[k]);
    }
    if (votes > most_common) {
      most_common = votes;
      best = line[i];
    }
  }
  return best;
}

static bool find_other_operation(const dumps *d, const char *group, int64_t seq, const entry *const line[MAX_RANKS],
                                 diagnosis *v) {
  const entry *most_common = majority(d, line);
  const entry *other = NULL;
  bool others[MAX_RANKS] = {false};
  bool usuals[MAX_RANKS] = {false};
  for (int i = 0; i < d->count; i++) {
    if (line[i] != NULL && same_operation(line[i], most_common)) {
      usuals[d->ranks[i].rank] = true;
    } else if (line[i] != NULL && (other == NULL || same_operation(line[i], other))) {
      other = line[i];
      others[d->ranks[i].rank] = true;
    }
  }
  if (other == NULL) {
    return false;
  }
  v->kind = "operation";
  memcpy(v->culprits, others, sizeof v->culprits);
  sentence_append_ranks(v->sentence, others);
  sentence_append(v->sentence, " called ");
  sentence_append_entry(v->sentence, other);
  sentence_append(v->sentence, " where ");
  sentence_append_ranks(v->sentence, usuals);
  sentence_append(v->sentence, " called ");
  sentence_append_entry(v->sentence, most_common);
  sentence_append(v->sentence, ": collective %" PRId64 " of the %s", seq, plural(group));
  return true;
}

static int64_t end_ns(const entry *e) {
  return e->end > 0 ? e->end : e->queued;
}

/* The last entry of a rank, which must have one. */
static const entry *latest_entry(const dump *d) {
  const entry *last = &d->entries[0];
  for (int64_t i = 1; i < d->count; i++) {
    last = end_ns(&d->entries[i]) >= end_ns(last) ? &d->entries[i] : last;
  }
  return last;
}

/* Some ranks are in a collective that others never reached. */
static bool find_late_ranks(const dumps *d, const char *group, int64_t seq, const entry *const line[MAX_RANKS],
                            diagnosis *v) {
  const entry *waited = NULL;
  const dump *waiting = NULL;
  bool came[MAX_RANKS] = {false};
  const dump *absent = NULL;
  for (int i = 0; i < d->count; i++) {
    if (line[i] == NULL) {
      absent = absent == NULL ? &d->ranks[i] : absent;
      v->culprits[d->ranks[i].rank] = true;
    } else {
      came[d->ranks[i].rank] = true;
      if (is_pending(line[i]) && waited == NULL) {
        waited = line[i];
        waiting = &d->ranks[i];
      }
    }
  }
  if (absent == NULL || waited == NULL || absent->time < waited->queued) { /* its dump may just be older */
    memset(v->culprits, 0, sizeof v->culprits);
    return false;
  }
  v->kind = "late";
  int64_t until = waited->end > 0 ? waited->end : waiting->time;
  sentence_append_ranks(v->sentence, v->culprits);
  sentence_append(v->sentence, " never came to collective %" PRId64 " of the %s, ", seq, plural(group));
  sentence_append_entry(v->sentence, waited);
  sentence_append(v->sentence, ", in which ");
  sentence_append_ranks(v->sentence, came);
  sentence_append(v->sentence, " waited %.1f s", seconds(until - (waited->begin > 0 ? waited->begin : waited->queued)));
  if (absent->count > 0) {
    const entry *last = latest_entry(absent);
    sentence_append(v->sentence, "; the last that rank %d did was %s, %.1f s before they gave up", absent->rank,
                    last->op, seconds(until - end_ns(last)));
  }
  return true;
}

/* The next number that any rank has, INT64_MAX: none has. */
static int64_t next_seq(const dumps *d, const char *group, int64_t seq, int64_t at[MAX_RANKS]) {
  int64_t next = INT64_MAX;
  for (int i = 0; i < d->count; i++) {
    const dump *one = &d->ranks[i];
    while (at[i] < one->count && (one->entries[at[i]].seq <= seq || strcmp(one->entries[at[i]].group, group) != 0)) {
      at[i]++;
    }
    if (at[i] < one->count && one->entries[at[i]].seq < next) {
      next = one->entries[at[i]].seq;
    }
  }
  return next;
}

/* Walks a group's collectives in order; true if they differ. */
static bool find_difference(const dumps *d, const char *group, diagnosis *v) {
  int64_t from = 1;
  int64_t to = 0;
  for (int i = 0; i < d->count; i++) {
    int64_t first;
    int64_t last;
    if (seq_range(&d->ranks[i], group, &first, &last)) {
      from = first > from ? first : from; /* before, not all have it any more */
      to = last > to ? last : to;
    }
  }
  int64_t at[MAX_RANKS] = {0};
  for (int64_t seq = from; seq <= to; seq = next_seq(d, group, seq, at)) {
    const entry *line[MAX_RANKS] = {NULL};
    align_entries(d, group, seq, at, line);
    if (majority(d, line) != NULL &&
        (find_other_operation(d, group, seq, line, v) || find_late_ranks(d, group, seq, line, v))) {
      return true;
    }
  }
  return false;
}

/* All did the same: the last rank to reach the last collective that all reached, and the error. */
static void report_agreement(const dumps *d, diagnosis *v) {
  const char *error = "";
  int64_t collectives = 0;
  int64_t spread = 0;
  int slowest = 0;
  for (int i = 0; i < d->count; i++) {
    error = error[0] == '\0' ? d->ranks[i].error : error;
  }
  for (size_t g = 0; g < COUNT(groups); g++) {
    int64_t first;
    int64_t last;
    if (!seq_range(&d->ranks[0], groups[g], &first, &last)) {
      continue;
    }
    collectives += last;
    const entry *line[MAX_RANKS] = {NULL};
    int64_t at[MAX_RANKS] = {0};
    align_entries(d, groups[g], last, at, line);
    int64_t earliest = INT64_MAX;
    int64_t latest = 0;
    int slowest_rank = 0;
    for (int i = 0; i < d->count; i++) {
      if (line[i] != NULL) {
        earliest = line[i]->queued < earliest ? line[i]->queued : earliest;
        slowest_rank = line[i]->queued > latest ? d->ranks[i].rank : slowest_rank;
        latest = line[i]->queued > latest ? line[i]->queued : latest;
      }
    }
    if (latest - earliest > spread) {
      spread = latest - earliest;
      slowest = slowest_rank;
    }
  }
  v->kind = error[0] == '\0' ? "same" : "error";
  if (d->world == 1) {
    sentence_append(v->sentence, "the only rank did %" PRId64 " collective%s", collectives, plural_s(collectives));
  } else {
    sentence_append(v->sentence, "all %d ranks did the same %" PRId64 " collective%s", d->world, collectives,
                    plural_s(collectives));
  }
  if (error[0] != '\0') {
    sentence_append(v->sentence, ", and say%s: %s", d->world == 1 ? "s" : "", error);
  } else if (d->world > 1) {
    sentence_append(v->sentence, "; rank %d came last to the last of them, %.3f s after the first", slowest,
                    seconds(spread));
  }
}

static void find_cause(const dumps *d, diagnosis *v) {
  *v = (diagnosis){.kind = "same"};
  for (size_t g = 0; g < COUNT(groups); g++) { /* a difference says more than a file that is not there */
    diagnosis found = {.kind = "same"};
    if (find_difference(d, groups[g], &found) && strcmp(found.kind, "operation") == 0) {
      *v = found;
      return;
    }
  }
  if (find_missing_ranks(d, v)) {
    return;
  }
  for (size_t g = 0; g < COUNT(groups); g++) {
    if (find_difference(d, groups[g], v)) {
      return;
    }
  }
  report_agreement(d, v);
}

/* A rank that is killed leaves no file, and one of an earlier run may be in its place. That rank had failed before all
 * that the latest file has. A rank that gave up before another one began is no different. */
static void note_earlier_runs(const dumps *d, diagnosis *v) {
  const dump *latest = &d->ranks[0];
  bool earlier[MAX_RANKS] = {false};
  bool any = false;
  for (int i = 1; i < d->count; i++) {
    latest = d->ranks[i].time > latest->time ? &d->ranks[i] : latest;
  }
  for (int i = 0; i < d->count && latest->count > 0; i++) {
    const dump *one = &d->ranks[i];
    earlier[one->rank] = strcmp(one->status, "DC_OK") != 0 && one->time < latest->entries[0].queued;
    any = any || earlier[one->rank];
  }
  if (any) {
    sentence_append(v->sentence, "; but ");
    sentence_append_ranks(v->sentence, earlier);
    sentence_append(v->sentence, " failed before all that rank %d has in its dump: the run may be an earlier one",
                    latest->rank);
  }
}

void diagnose(const dumps *d, diagnosis *v) {
  find_cause(d, v);
  note_earlier_runs(d, v);
}
