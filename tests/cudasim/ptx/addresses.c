/* Loads and stores of parameters, shared memory and the device's memory. Each is checked for alignment, bounds, and
 * unordered accesses of other threads. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/elementwise/convert.h"
#include "ptx.h"

enum { PAGE = 4096, SLOTS = 4096, RANGES = 64, MANY_WARPS = 0xffff };
static const uint32_t many = UINT32_MAX; /* stands for several threads or blocks; for atomics, any block */

/* ---- pages of the device's memory ---- */

typedef struct page {
  struct page *next;
  uint64_t number;
  unsigned char *place; /* where it is on the host */
  size_t bytes;         /* allocated bytes of it */
  unsigned char before[PAGE], plain[PAGE];
  uint32_t writer[PAGE], reader[PAGE]; /* number of the block plus 1; 0: none */
  uint8_t stored[PAGE];                /* the type of the last store (ptx_type); PTX_NONE: none */
} page;

struct ptx_pages {
  page *slots[SLOTS];
  page *last;
  struct {
    const void *ptr;
    size_t bytes;
  } kept[RANGES]; /* recent ranges by address, since threads of a kernel pass the same arrays again and again */
};

ptx_pages *ptx_pages_create(void) {
  ptx_pages *pages = calloc(1, sizeof *pages);
  if (pages == NULL) {
    abort();
  }
  return pages;
}

void ptx_pages_destroy(ptx_pages *pages) {
  for (int i = 0; i < SLOTS; i++) {
    while (pages->slots[i] != NULL) {
      page *next = pages->slots[i]->next;
      free(pages->slots[i]);
      pages->slots[i] = next;
    }
  }
  free(pages);
}

/* Returns NULL if the address is not in the card's memory. */
static page *page_at(ptx_pages *pages, uint64_t address) {
  const uint64_t number = address / PAGE;
  if (pages->last != NULL && pages->last->number == number) {
    return pages->last;
  }
  page **slot = &pages->slots[number % SLOTS];
  page *p = *slot;
  while (p != NULL && p->number != number) {
    p = p->next;
  }
  if (p == NULL) {
    size_t bytes = 0;
    unsigned char *place = resolve_block((const void *)(uintptr_t)(number * PAGE), &bytes);
    p = place == NULL ? NULL : calloc(1, sizeof *p);
    if (p == NULL) {
      return NULL;
    }
    *p = (page){.next = *slot, .number = number, .place = place, .bytes = bytes < PAGE ? bytes : PAGE};
    memcpy(p->before, place, p->bytes);
    memcpy(p->plain, place, p->bytes);
    *slot = p;
  }
  pages->last = p;
  return p;
}

void ptx_pages_keep(ptx_pages *pages, const void *ptr, size_t bytes) {
  const size_t slot = (uintptr_t)ptr / 16 % RANGES;
  if (pages->kept[slot].ptr == ptr && pages->kept[slot].bytes >= bytes) {
    return;
  }
  pages->kept[slot].ptr = ptr;
  pages->kept[slot].bytes = bytes;
  const uint64_t first = (uintptr_t)ptr / PAGE, end = ((uintptr_t)ptr + bytes + PAGE - 1) / PAGE;
  for (uint64_t number = first; number < end; number++) {
    (void)page_at(pages, number * PAGE);
  }
}

void ptx_pages_swap(ptx_pages *pages) {
  for (int i = 0; i < SLOTS; i++) {
    for (page *p = pages->slots[i]; p != NULL; p = p->next) {
      memcpy(p->plain, p->place, p->bytes);
      memcpy(p->place, p->before, p->bytes);
    }
  }
}

static double element(ptx_type type, const unsigned char *at) {
  uint64_t bits = 0;
  memcpy(&bits, at, ptx_type_bits(type) / 8);
  return type == PTX_F16    ? (double)dc__f32_of_f16((uint16_t)bits)
         : type == PTX_BF16 ? (double)dc__f32_of_bf16((uint16_t)bits)
                            : (double)ptx_f32(bits);
}

/* The largest value, and the largest difference, of elements of one type. */
typedef struct gap {
  ptx_type type;
  double most, largest;
} gap;

static void compare_elements(const page *p, bool as_float, gap *g) {
  const size_t size = ptx_type_bits(g->type) / 8;
  for (size_t at = 0; at + size <= p->bytes; at += size) {
    if (p->stored[at] != PTX_NONE && (p->stored[at] == PTX_F32) == as_float) {
      const double a = element(g->type, p->plain + at), b = element(g->type, p->place + at);
      const bool same = memcmp(p->plain + at, p->place + at, size) == 0;
      g->most = isfinite(a) ? fmax(g->most, fabs(a)) : g->most;
      g->largest = same ? g->largest : isfinite(a) && isfinite(b) ? fmax(g->largest, fabs(a - b)) : INFINITY;
    }
  }
}

int64_t ptx_pages_compare(const ptx_pages *pages, ptx_type type, double *largest) {
  gap gaps[2] = {{type, 0, 0}, {PTX_F32, 0, 0}};
  int64_t differ = 0;
  for (int i = 0; i < SLOTS; i++) {
    for (const page *p = pages->slots[i]; p != NULL; p = p->next) {
      for (size_t at = 0; at < p->bytes; at++) {
        differ += p->plain[at] != p->place[at];
      }
      compare_elements(p, false, &gaps[0]);
      compare_elements(p, true, &gaps[1]);
    }
  }
  *largest = 0;
  for (int k = 0; k < 2; k++) {
    *largest = gaps[k].largest > 0 ? fmax(*largest, gaps[k].largest / gaps[k].most) : *largest;
  }
  return differ;
}

/* ---- the device's memory ---- */

/* Blocks of a launch are unordered, so two of them may not touch a byte that one of them writes. */
static void check_blocks(ptx_run *r, const ptx_thread *t, page *p, size_t at, uint32_t bytes, bool writes) {
  const uint32_t own = r->block + 1;
  for (size_t i = at; i < at + bytes; i++) {
    const bool written = p->writer[i] != 0 && p->writer[i] != own && p->writer[i] != many;
    if (written || (writes && p->reader[i] != 0 && p->reader[i] != own)) {
      ptx_fault(r, t, LAUNCH_FAILED, "another block of the launch touches the same memory");
    }
    if (writes) {
      p->writer[i] = own;
    } else {
      p->reader[i] = p->reader[i] == 0 || p->reader[i] == own ? own : many;
    }
  }
}

static unsigned char *global_at(ptx_run *r, const ptx_thread *t, uint64_t address, uint32_t bytes, bool writes,
                                bool atomic) {
  if (address % bytes != 0) {
    ptx_fault(r, t, MISALIGNED, "a misaligned address");
  }
  page *p = page_at(r->pages, address);
  const size_t at = address % PAGE;
  if (p == NULL || at + bytes > p->bytes) {
    ptx_fault(r, t, ILLEGAL_ADDRESS, "an illegal address");
  }
  if (!atomic) {
    check_blocks(r, t, p, at, bytes, writes);
  }
  for (size_t i = at; i < at + bytes && atomic; i++) {
    p->writer[i] = many;
  }
  return p->place + at;
}

/* ---- shared memory ---- */

static uint32_t warp_of(const ptx_thread *t) {
  return t->number / CUDASIM_WARP;
}

static bool is_ordered(const ptx_run *r, const ptx_thread *t, const ptx_touch *touch) {
  return touch->thread == 0 || touch->thread == t->number + 1 || touch->block_epoch < r->block_epoch ||
         (touch->warp == warp_of(t) && touch->warp_epoch < t->warp_epoch);
}

/* Several readers in an epoch are recorded as `many`. */
static void note_read(const ptx_run *r, const ptx_thread *t, ptx_touch *touch) {
  const bool joins = !is_ordered(r, t, touch);
  const bool same_warp = !joins || touch->warp == warp_of(t);
  *touch = (ptx_touch){.thread = joins ? many : t->number + 1,
                       .warp = same_warp ? (uint16_t)warp_of(t) : MANY_WARPS,
                       .block_epoch = r->block_epoch,
                       .warp_epoch = t->warp_epoch};
}

unsigned char *ptx_shared(ptx_run *r, const ptx_thread *t, uint64_t address, uint32_t bytes, bool writes) {
  if (address % bytes != 0) {
    ptx_fault(r, t, MISALIGNED, "a misaligned address of shared memory");
  }
  if (address + bytes > r->shared_bytes) {
    ptx_fault(r, t, ILLEGAL_ADDRESS, "an address outside of the block's shared memory");
  }
  for (uint64_t i = address; i < address + bytes; i++) {
    if (!is_ordered(r, t, &r->writes[i]) || (writes && !is_ordered(r, t, &r->reads[i]))) {
      ptx_fault(r, t, LAUNCH_FAILED, "a race: no barrier since another thread's access to the same shared memory");
    }
    if (writes) {
      r->writes[i] = (ptx_touch){t->number + 1, r->block_epoch, t->warp_epoch, (uint16_t)warp_of(t)};
    } else {
      note_read(r, t, &r->reads[i]);
    }
  }
  return r->shared + address;
}

/* ---- instructions ---- */

/* Returns the address of an operand. */
static uint64_t address_of(const ptx_run *r, const ptx_thread *t, const ptx_insn *i, int operand) {
  const uint64_t base = ptx_get(r, t, i->at[operand]) + (uint64_t)(int64_t)i->offset;
  return (i->words & (PTX_SHARED | PTX_PARAM)) != 0 ? (uint32_t)base : base;
}

static uint64_t extended(ptx_type type, uint64_t value) {
  const uint32_t bits = ptx_type_bits(type);
  const bool negative = type >= PTX_S8 && type <= PTX_S64 && bits < 64 && value >> (bits - 1) != 0;
  return negative ? value | ~UINT64_C(0) << bits : value;
}

static const unsigned char *place_to_read(ptx_run *r, const ptx_thread *t, const ptx_insn *i, uint32_t bytes) {
  const uint64_t address = address_of(r, t, i, i->width);
  if ((i->words & PTX_SHARED) != 0) {
    return ptx_shared(r, t, address, bytes, false);
  }
  if ((i->words & PTX_PARAM) == 0) {
    return global_at(r, t, address, bytes, false, false);
  }
  if (address % bytes != 0 || address + bytes > r->entry->param_bytes) {
    ptx_fault(r, t, LAUNCH_FAILED, "an address outside of the kernel's argument");
  }
  return r->g->args + address;
}

void ptx_load(ptx_run *r, ptx_thread *t, const ptx_insn *i) {
  const uint32_t size = ptx_type_bits(i->type) / 8;
  const unsigned char *place = place_to_read(r, t, i, size * i->width);
  for (uint32_t n = 0; n < i->width; n++) {
    uint64_t value = 0;
    memcpy(&value, place + (size_t)n * size, size);
    t->registers[i->at[n]] = extended(i->type, value);
  }
}

void ptx_store(ptx_run *r, ptx_thread *t, const ptx_insn *i) {
  const uint32_t size = ptx_type_bits(i->type) / 8, bytes = size * i->width;
  const uint64_t address = address_of(r, t, i, 0);
  unsigned char *place = (i->words & PTX_SHARED) != 0 ? ptx_shared(r, t, address, bytes, true)
                                                      : global_at(r, t, address, bytes, true, false);
  for (uint32_t n = 0; n < i->width; n++) {
    const uint64_t value = ptx_get(r, t, i->at[1 + n]);
    memcpy(place + (size_t)n * size, &value, size);
  }
  if ((i->words & PTX_SHARED) == 0) {
    memset(page_at(r->pages, address)->stored + address % PAGE, i->type, bytes);
  }
}

/* Other streams and the host may read the word meanwhile. */
void ptx_atomic_max(ptx_run *r, ptx_thread *t, const ptx_insn *i) {
  uint64_t *place = (void *)global_at(r, t, address_of(r, t, i, 1), sizeof *place, true, true);
  const uint64_t value = ptx_get(r, t, i->at[2]);
  uint64_t old = __atomic_load_n(place, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(place, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  t->registers[i->at[0]] = old;
}

/* cp.async.cg copies 16 bytes, and fills those beyond its source size with zeros. */
enum { COPY = 16 };

void ptx_copy_begin(ptx_run *r, ptx_thread *t, const ptx_insn *i) {
  const ptx_copy c = {.to = (uint32_t)ptx_get(r, t, i->at[0]),
                      .bytes = (uint32_t)ptx_get(r, t, i->at[3]),
                      .from = ptx_get(r, t, i->at[1])};
  if (ptx_get(r, t, i->at[2]) != COPY || c.bytes > COPY) {
    ptx_fault(r, t, LAUNCH_FAILED, "a copy that is not of 16 bytes");
  }
  memset(ptx_shared(r, t, c.to, COPY, true), 0xff, COPY);
  if (t->copy_count == t->copy_capacity) {
    t->copy_capacity = 2 * t->copy_capacity + 16;
    t->copies = realloc(t->copies, t->copy_capacity * sizeof *t->copies);
    if (t->copies == NULL) {
      abort();
    }
  }
  t->copies[t->copy_count++] = c;
}

void ptx_copies_end(ptx_run *r, ptx_thread *t) {
  for (uint32_t n = 0; n < t->copy_count; n++) {
    const ptx_copy *c = &t->copies[n];
    unsigned char *to = ptx_shared(r, t, c->to, COPY, true);
    memset(to, 0, COPY);
    if (c->bytes > 0) {
      memcpy(to, global_at(r, t, c->from, COPY, false, false), c->bytes);
    }
  }
  t->copy_count = 0;
}
