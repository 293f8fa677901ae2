/* The checker. For ranges of bytes it keeps the last writer and the readers since then, each with that agent's own
 * count of its actions. A vector clock says how many of every agent's actions are ordered before the present one, by
 * the order of a queue, an event or a collective. So
 *
 *   an earlier access (agent a, count t) is ordered before the present one  if and only if  clock[a] >= t, where clock
 *   is the present agent's.
 *
 * Two accesses of the same bytes are a race if one is a write and they are not ordered, whatever order the schedule
 * happened to take. Allocating and freeing memory are accesses too:
 *
 *   SIM_ALLOC   a write that leaves the bytes undefined: a read of them is an error even in order
 *   SIM_RETIRE  freed, while work queued earlier may use it: an error for every agent ordered after it
 *   SIM_FREE    the arena may reuse it from now on: all uses must be ordered before, and any later one is an error
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum { FILL_LIMIT = 1 << 16, ALLOCATED = 0xa5, FREED = 0xdb, PAGE = 1 << 14, PAGES = 1024 };

typedef struct access {
  uintptr_t lo, hi;
  sim_kind kind;
  int32_t agent;
  uint32_t time;
  sim_op op;
} access;

/* The records for a page's bytes; no record crosses a page's end. Pages may share a list. */
typedef struct page {
  access *all;
  int64_t count, capacity;
} page;

static struct {
  page pages[PAGES];
  bool muted;
  char report[1024];
} checker;

void sim_checker_begin(void) {
  checker.report[0] = '\0';
  checker.muted = false;
}

void sim_checker_mute(void) {
  checker.muted = true;
}

void sim_checker_end(void) {
  for (int i = 0; i < PAGES; i++) {
    free(checker.pages[i].all);
  }
  memset(checker.pages, 0, sizeof checker.pages);
}

const char *sim_report(void) {
  return checker.report;
}

void sim_reportf(const char *format, ...) {
  if (checker.muted || checker.report[0] != '\0') {
    return; /* only the first fault is the cause */
  }
  int used = snprintf(checker.report, sizeof checker.report, "seed %" PRIu64 ", %" PRId32 " ranks: ", sim_world()->seed,
                      sim_world()->world);
  va_list args;
  va_start(args, format);
  vsnprintf(checker.report + used, sizeof checker.report - (size_t)used, format, args);
  va_end(args);
}

void sim_join(sim_clock *to, const sim_clock *from) {
  for (int i = 0; i < SIM_AGENTS; i++) {
    to->at[i] = to->at[i] > from->at[i] ? to->at[i] : from->at[i];
  }
}

/* Writes, for instance, "read by cast in dc_allgather_param of parameter 3 (rank 1, stream 2)". */
static void describe(char text[256], sim_kind kind, int32_t agent, const sim_op *op) {
  static const char *const kinds[] = {"read", "write", "allocation", "release", "return to the arena"};
  const sim_agent *a = sim_agent_of(agent);
  char id[48] = "", where[32] = "host";
  if (op->id >= 0) {
    snprintf(id, sizeof id, " of parameter %" PRId64, op->id);
  }
  if (a->stream != NULL) {
    snprintf(where, sizeof where, "stream %" PRId32, a->number);
  }
  snprintf(text, 256, "%s by %s in %s%s (rank %" PRId32 ", %s)", kinds[kind], op->what, op->fn == NULL ? "-" : op->fn,
           id, a->rank, where);
}

/* Returns the fault of an access of `kind` after `old`; NULL: none. */
static const char *fault(const access *old, sim_kind kind, bool ordered) {
  if (kind == SIM_RETIRE) {
    return old->kind == SIM_FREE ? "freed twice" : NULL;
  }
  if (old->kind == SIM_FREE) {
    return kind == SIM_ALLOC || kind == SIM_FREE ? NULL : "use after free";
  }
  if (old->kind == SIM_RETIRE) {
    return ordered && (kind == SIM_READ || kind == SIM_WRITE) ? "use after free" : NULL;
  }
  if (kind == SIM_ALLOC || kind == SIM_FREE) {
    return ordered ? NULL : "memory given back before its last use";
  }
  if (!ordered && (kind == SIM_WRITE || old->kind != SIM_READ)) {
    return "race";
  }
  return kind == SIM_READ && old->kind == SIM_ALLOC ? "read of memory that was never written" : NULL;
}

static access *add(page *p) {
  if (p->count == p->capacity) {
    p->capacity = p->capacity == 0 ? 16 : p->capacity * 2;
    p->all = realloc(p->all, (size_t)p->capacity * sizeof *p->all);
  }
  return &p->all[p->count++];
}

/* Whether an access of this kind and agent makes an older one redundant: later accesses that are ordered after the new
 * one are ordered after both. */
static bool supersedes(sim_kind kind, int32_t agent, const access *old) {
  switch (kind) {
    case SIM_READ:
      return old->kind == SIM_READ && old->agent == agent;
    case SIM_WRITE:
      return old->kind != SIM_RETIRE;
    case SIM_RETIRE:
      return false;
    default:
      return true;
  }
}

/* Removes [lo, hi) from a record's range, and keeps the rest of the record. */
static void cut(page *p, int64_t i, uintptr_t lo, uintptr_t hi) {
  access old = p->all[i];
  p->all[i] = p->all[--p->count];
  if (old.lo < lo) {
    access *left = add(p);
    *left = old;
    left->hi = lo;
  }
  if (old.hi > hi) {
    access *right = add(p);
    *right = old;
    right->lo = hi;
  }
}

/* Fills memory so that a wrong read differs from all expected values. */
static void fill(sim_kind kind, const void *ptr, size_t bytes) {
  if (bytes <= FILL_LIMIT && (kind == SIM_ALLOC || kind == SIM_FREE)) {
    memset((void *)(uintptr_t)ptr, kind == SIM_ALLOC ? ALLOCATED : FREED, bytes);
  }
}

static void report_fault(const access *now, const access *old, const char *wrong) {
  char text[256], before[256];
  describe(text, now->kind, now->agent, &now->op);
  describe(before, old->kind, old->agent, &old->op);
  uintptr_t lo = old->lo > now->lo ? old->lo : now->lo, hi = old->hi < now->hi ? old->hi : now->hi;
  sim_reportf("%s: %s, after %s; %zu bytes", wrong, text, before, (size_t)(hi - lo));
}

static void note_in_page(const access *now, const sim_clock *known) {
  page *p = &checker.pages[now->lo / PAGE % PAGES];
  for (int64_t i = p->count - 1; i >= 0; i--) {
    const access *old = &p->all[i];
    if (old->lo >= now->hi || old->hi <= now->lo) {
      continue;
    }
    const char *wrong = fault(old, now->kind, known->at[old->agent] >= old->time);
    if (wrong != NULL) {
      report_fault(now, old, wrong);
    }
    if (supersedes(now->kind, now->agent, old)) {
      cut(p, i, now->lo, now->hi);
    }
  }
  *add(p) = *now;
}

void sim_note(sim_kind kind, const void *ptr, size_t bytes, const char *what) {
  const sim_agent *me = sim_me();
  int32_t agent = sim_agent_number(me);
  access now = {.kind = kind, .agent = agent, .time = me->now.at[agent], .op = me->op};
  now.op.what = what != NULL ? what : me->op.what;
  uintptr_t end = (uintptr_t)ptr + bytes;
  for (now.lo = (uintptr_t)ptr; now.lo < end; now.lo = now.hi) {
    uintptr_t page_end = (now.lo / PAGE + 1) * PAGE;
    now.hi = page_end < end ? page_end : end;
    note_in_page(&now, &me->now);
  }
  fill(kind, ptr, bytes);
}

static void forget(const void *ptr, size_t bytes, bool freed_alone) {
  uintptr_t lo = (uintptr_t)ptr, hi = lo + bytes;
  for (uintptr_t at = lo / PAGE; at <= (hi - 1) / PAGE; at++) {
    page *p = &checker.pages[at % PAGES];
    for (int64_t i = p->count - 1; i >= 0; i--) {
      if (p->all[i].lo < hi && p->all[i].hi > lo && (!freed_alone || p->all[i].kind == SIM_FREE)) {
        cut(p, i, lo, hi);
      }
    }
  }
}

void sim_forget(const void *ptr, size_t bytes) {
  forget(ptr, bytes, false);
}

void sim_forget_freed(const void *ptr, size_t bytes) {
  forget(ptr, bytes, true);
}

void sim_reads(const void *ptr, size_t bytes, const char *what) {
  sim_note(SIM_READ, ptr, bytes, what);
}

void sim_writes(const void *ptr, size_t bytes, const char *what) {
  sim_note(SIM_WRITE, ptr, bytes, what);
}
