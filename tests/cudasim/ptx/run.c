/* Executes a grid of a program: its blocks one after the other, in random order, and a block's threads in turn, each
 * until it has to wait. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ptx.h"

_Noreturn void ptx_fault(ptx_run *r, const ptx_thread *t, int error, const char *text) {
  const ptx_insn *i = &r->entry->code[t->pc];
  (void)fprintf(stderr, "cudasim: %s, line %" PRId32 " of the PTX (%s), block (%u, %u, %u), thread %u: %s\n",
                r->entry->name, i->line, ptx_op_name(i->op), r->me.block[0], r->me.block[1], r->me.block[2], t->number,
                text);
  lose_device(error);
  longjmp(r->leave, 1);
}

/* ---- a thread ---- */

static uint64_t special_value(const ptx_run *r, const ptx_thread *t, uint64_t which) {
  const cudasim_thread *me = &r->me;
  return which == 0 ? t->number : which == 1 ? me->threads : which < 5 ? me->block[which - 2] : me->blocks[which - 5];
}

/* Combines several registers into one, or splits one into several. */
static void move_parts(const ptx_run *r, ptx_thread *t, const ptx_insn *i) {
  const uint32_t parts = i->results > 1 ? i->results : i->count - 1U, bits = ptx_type_bits(i->type) / parts;
  const uint64_t mask = (UINT64_C(1) << bits) - 1;
  uint64_t whole = 0;
  for (uint32_t n = 0; n < parts; n++) {
    if (i->results > 1) {
      t->registers[i->at[n]] = ptx_get(r, t, i->at[parts]) >> (n * bits) & mask;
    } else {
      whole |= (ptx_get(r, t, i->at[1 + n]) & mask) << (n * bits);
    }
  }
  if (i->results == 1) {
    t->registers[i->at[0]] = whole;
  }
}

/* bfi: replaces some bits of a number by the low bits of another. */
static void insert_bits(const ptx_run *r, ptx_thread *t, const ptx_insn *i) {
  const uint64_t from = ptx_get(r, t, i->at[1]), into = ptx_get(r, t, i->at[2]);
  const uint64_t start = ptx_get(r, t, i->at[3]) & 255, count = ptx_get(r, t, i->at[4]) & 255;
  const uint64_t ones = count >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << count) - 1, mask = start >= 64 ? 0 : ones << start;
  const uint64_t all = (into & ~mask) | (start >= 64 ? 0 : from << start & mask);
  t->registers[i->at[0]] = i->type == PTX_B32 ? (uint32_t)all : all;
}

static void compute(const ptx_run *r, ptx_thread *t, const ptx_insn *i) {
  const uint64_t a = ptx_get(r, t, i->at[1]);
  if ((i->words & PTX_SPECIAL) != 0) {
    t->registers[i->at[0]] = special_value(r, t, a);
  } else if (i->op == PTX_MOV && i->count > 2) {
    move_parts(r, t, i);
  } else if (i->op == PTX_BFI) {
    insert_bits(r, t, i);
  } else {
    const uint64_t b = i->count > 2 ? ptx_get(r, t, i->at[2]) : 0, c = i->count > 3 ? ptx_get(r, t, i->at[3]) : 0;
    t->registers[i->at[0]] = ptx_compute(i, a, b, c);
  }
}

/* Executes an instruction of one thread. Returns false if the thread waits for others, or ends. */
static bool step(ptx_run *r, ptx_thread *t, const ptx_insn *i) {
  switch (i->op) {
    case PTX_RET:
      t->state = PTX_ENDED;
      return false;
    case PTX_BAR:
      t->state = (i->words & PTX_WARP_BARRIER) != 0 ? PTX_AT_WARP : PTX_AT_BLOCK;
      return false;
    case PTX_SHFL:
    case PTX_VOTE:
    case PTX_LDMATRIX:
    case PTX_MMA:
      t->state = PTX_AT_WARP;
      return false;
    case PTX_BRA:
      t->pc = i->target;
      return true;
    case PTX_LD:
      ptx_load(r, t, i);
      break;
    case PTX_ST:
      ptx_store(r, t, i);
      break;
    case PTX_ATOM:
      ptx_atomic_max(r, t, i);
      break;
    case PTX_CP:
      if ((i->words & PTX_WAIT) != 0) {
        ptx_copies_end(r, t);
      } else {
        ptx_copy_begin(r, t, i);
      }
      break;
    default:
      compute(r, t, i);
      break;
  }
  t->pc++;
  return true;
}

static void run_thread(ptx_run *r, ptx_thread *t) {
  bool goes_on = true;
  while (goes_on) {
    const ptx_insn *i = &r->entry->code[t->pc];
    if (i->guard != PTX_ALWAYS && (t->registers[i->guard] & 1) == i->negated) {
      t->pc++;
    } else {
      if (r->executed != NULL) {
        r->executed[i->op]++;
      }
      goes_on = step(r, t, i);
    }
  }
}

/* ---- a block ---- */

/* If all threads of a warp wait or have ended, the warp continues. */
static bool release_warps(ptx_run *r) {
  bool any = false;
  for (uint32_t first = 0; first < r->g->threads; first += CUDASIM_WARP) {
    bool waits = false, held = false;
    for (uint32_t n = first; n < first + CUDASIM_WARP && n < r->g->threads; n++) {
      waits = waits || r->threads[n].state == PTX_AT_WARP;
      held = held || r->threads[n].state == PTX_AT_BLOCK;
    }
    if (waits && !held) {
      ptx_warp_step(r, &r->threads[first]);
      any = true;
    }
  }
  return any;
}

static bool release_block(ptx_run *r) {
  const uint32_t threads = r->g->threads;
  for (uint32_t n = 0; n < threads; n++) {
    if (r->threads[n].state != PTX_AT_BLOCK) {
      return false;
    }
  }
  for (uint32_t n = 0; n < threads; n++) {
    r->threads[n].state = PTX_READY;
    r->threads[n].pc++;
  }
  r->block_epoch++;
  return true;
}

static const ptx_thread *first_alive(const ptx_run *r) {
  for (uint32_t n = 0; n < r->g->threads; n++) {
    if (r->threads[n].state != PTX_ENDED) {
      return &r->threads[n];
    }
  }
  return NULL;
}

static void run_block(ptx_run *r, uint32_t number, bool downwards) {
  const uint32_t threads = r->g->threads;
  r->block = number;
  r->me = thread_of(r->g, number, 0);
  r->block_epoch++;
  memset(r->shared, 0xff, r->shared_bytes);
  for (uint32_t n = 0; n < threads; n++) {
    r->threads[n].state = PTX_READY;
    r->threads[n].pc = 0;
    r->threads[n].copy_count = 0;
  }
  do {
    for (uint32_t n = 0; n < threads; n++) {
      ptx_thread *t = &r->threads[downwards ? threads - 1 - n : n];
      if (t->state == PTX_READY) {
        run_thread(r, t);
      }
    }
    const ptx_thread *alive = first_alive(r);
    if (alive != NULL && !release_warps(r) && !release_block(r)) {
      ptx_fault(r, alive, LAUNCH_FAILED, "threads wait for others that will not come");
    }
  } while (first_alive(r) != NULL);
}

/* ---- a grid ---- */

static uint32_t next_random(uint64_t *state) {
  *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)(*state >> 33);
}

/* A random order, the same in every run. */
static uint32_t *random_order(uint32_t count) {
  uint32_t *order = malloc(count * sizeof *order);
  uint64_t state = count;
  for (uint32_t i = 0; order != NULL && i < count; i++) {
    const uint32_t with = next_random(&state) % (i + 1);
    order[i] = order[with];
    order[with] = i;
  }
  return order;
}

/* If threads do not meet, they run one after the other and share registers. */
static void allocate(ptx_run *r) {
  const uint32_t threads = r->g->threads, files = r->entry->collective ? threads : 1;
  const size_t registers = (size_t)r->entry->registers;
  uint64_t *all = calloc(files * registers + 1, sizeof *all);
  r->threads = calloc(threads, sizeof *r->threads);
  r->shared_bytes = r->entry->shared_bytes + r->g->shared_bytes;
  r->shared = malloc(r->shared_bytes + 1U);
  r->writes = calloc(r->shared_bytes + 1U, sizeof *r->writes);
  r->reads = calloc(r->shared_bytes + 1U, sizeof *r->reads);
  if (all == NULL || r->threads == NULL || r->shared == NULL || r->writes == NULL || r->reads == NULL) {
    abort();
  }
  for (uint32_t n = 0; n < threads; n++) {
    r->threads[n].number = n;
    r->threads[n].registers = all + (files == 1 ? 0 : n * registers);
  }
}

static void release(ptx_run *r) {
  free(r->threads[0].registers);
  for (uint32_t n = 0; n < r->g->threads; n++) {
    free(r->threads[n].copies);
  }
  free(r->threads);
  free(r->shared);
  free(r->writes);
  free(r->reads);
}

void ptx_execute(const grid *g, const ptx_entry *entry, ptx_pages *pages, uint64_t *executed) {
  ptx_run *r = calloc(1, sizeof *r);
  uint32_t *order = random_order(blocks_of(g));
  if (r == NULL || order == NULL) {
    abort();
  }
  *r = (ptx_run){.entry = entry, .g = g, .pages = pages, .executed = executed};
  allocate(r);
  if (setjmp(r->leave) == 0) {
    for (uint32_t i = 0; i < blocks_of(g); i++) {
      run_block(r, order[i], (order[i] & 1) != 0);
    }
  }
  release(r);
  free(order);
  free(r);
}
