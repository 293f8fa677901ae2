/* Threads of a block that meet, as fibers of the stream's thread. Each runs until it has to wait, in the same order
 * every time. That order is ascending in one block and descending in the next, so a result that depends on it differs.
 * To the thread sanitizer each fiber is a thread of its own. It sees the order that begins, barriers and ends of blocks
 * create, but not switches between fibers or the simulator's own work. So a missing barrier is always a race. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cudasim_internal.h"

#if defined(__has_feature)
#define BUILT_WITH(what) __has_feature(what)
#else
#define BUILT_WITH(what) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || BUILT_WITH(address_sanitizer)
#define WITH_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__) || BUILT_WITH(thread_sanitizer)
#define WITH_TSAN
#include <sanitizer/tsan_interface.h>
#define UNSEEN __attribute__((no_sanitize("thread")))
#define SEEN_BEFORE(place) __tsan_release(place)
#define SEEN_AFTER(place) __tsan_acquire(place)
#else
#define UNSEEN
#define SEEN_BEFORE(place) (void)(place)
#define SEEN_AFTER(place) (void)(place)
#endif

/* ---- switches between fibers ---- */

#ifdef __x86_64__

typedef void *place; /* a stack pointer, with the saved registers above it */

/* Saves the caller's stack pointer, and continues on the other stack. */
void cudasim_switch(place *from, const place *to);
__asm__(
    ".text\n.hidden cudasim_switch\n.globl cudasim_switch\n.type cudasim_switch,@function\ncudasim_switch:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n mov %rsp,(%rdi)\n mov (%rsi),%rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n"
    ".size cudasim_switch,.-cudasim_switch\n");

static void fiber_init(place *p, char *stack, size_t bytes, void (*first)(void)) {
  void **top = (void **)(void *)(stack + bytes) - 1; /* first()'s return address, 8 bytes beyond a multiple of 16 */
  *top = NULL;
  memcpy(top - 1, &first, sizeof first);
  memset(top - 7, 0, 6 * sizeof *top);
  *p = top - 7;
}

#else

#include <ucontext.h>

typedef ucontext_t place;

static void cudasim_switch(place *from, const place *to) {
  (void)swapcontext(from, to);
}

static void fiber_init(place *p, char *stack, size_t bytes, void (*first)(void)) {
  (void)getcontext(p);
  p->uc_stack.ss_sp = stack;
  p->uc_stack.ss_size = bytes;
  p->uc_link = NULL;
  makecontext(p, first, 0);
}

#endif

/* ---- fibers ---- */

enum { STACK = 256 << 10 };
enum { NEW, READY, AT_WARP, AT_BLOCK, ENDED };

typedef struct fiber {
  cudasim_thread me;
  int state;
  place at;
  void *shadow;       /* the address sanitizer's fake stack */
  void *thread;       /* the thread sanitizer's fiber */
  uint32_t rounds[2]; /* number of barriers that it has reached, of its block and of its warp */
} fiber;

/* The fibers of a grid are kept for the next one, since the sanitizers give each a stack and a history, which are
 * costly. */
typedef struct pool {
  struct pool *next;
  fiber fibers[CUDASIM_THREADS];
  char *stacks;
} pool;

typedef struct scheduler {
  const grid *g;
  pool *pool;
  fiber *running;
  place at;
  void *shadow;
  const void *stack; /* the scheduler's own stack */
  size_t stack_bytes;
  void *thread;
  bool over; /* the grid has ended */
  /* The thread sanitizer sees the order through these addresses. Successive rounds of a barrier use different ones, as
   * a fast thread may already be in the next round. */
  char begins, ends, barriers[2], warps[CUDASIM_THREADS / CUDASIM_WARP][2];
} scheduler;

static _Thread_local scheduler *here;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pool *spare;

/* Not inlined, since a fiber may continue on another thread of the system. */
UNSEEN static __attribute__((noinline)) scheduler *my_scheduler(void) {
  __asm__ volatile("" ::: "memory");
  return here;
}

static pool *pool_acquire(void) {
  pthread_mutex_lock(&mutex);
  pool *p = spare;
  spare = p == NULL ? NULL : p->next;
  pthread_mutex_unlock(&mutex);
  if (p == NULL) {
    p = calloc(1, sizeof *p);
    p->stacks = mmap(NULL, CUDASIM_THREADS * (size_t)STACK, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  return p;
}

/* left: all fibers have returned. Otherwise another grid cannot use their stacks. */
static void pool_release(pool *p, bool left) {
  if (!left) {
#ifdef WITH_TSAN
    for (int i = 0; i < CUDASIM_THREADS && p->fibers[i].thread != NULL; i++) {
      __tsan_destroy_fiber(p->fibers[i].thread);
    }
#endif
#ifdef WITH_ASAN
    __asan_unpoison_memory_region(p->stacks, CUDASIM_THREADS * (size_t)STACK);
#endif
    (void)munmap(p->stacks, CUDASIM_THREADS * (size_t)STACK);
    free(p);
    return;
  }
  pthread_mutex_lock(&mutex);
  p->next = spare;
  spare = p;
  pthread_mutex_unlock(&mutex);
}

UNSEEN static void to_scheduler(int state) {
  scheduler *s = my_scheduler();
  fiber *self = s->running;
  self->state = state;
#ifdef WITH_ASAN
  __sanitizer_start_switch_fiber(&self->shadow, s->stack, s->stack_bytes);
#endif
#ifdef WITH_TSAN
  __tsan_switch_to_fiber(s->thread, __tsan_switch_to_fiber_no_sync);
#endif
  cudasim_switch(&self->at, &s->at);
#ifdef WITH_ASAN
  s = my_scheduler();
  __sanitizer_finish_switch_fiber(self->shadow, &s->stack, &s->stack_bytes);
#endif
}

/* A fiber's loop over the blocks of its grids. */
UNSEEN static void begin(void) {
#ifdef WITH_ASAN
  __sanitizer_finish_switch_fiber(NULL, &here->stack, &here->stack_bytes);
#endif
  for (;;) {
    const grid *g = my_scheduler()->g;
    SEEN_AFTER(&my_scheduler()->begins);
    g->kernel->run(g->args);
    SEEN_BEFORE(&my_scheduler()->ends);
    to_scheduler(ENDED);
  }
}

UNSEEN static void run_fiber(scheduler *s, uint32_t number) {
  fiber *f = &s->pool->fibers[number];
  s->running = f;
  current = &f->me;
#ifdef WITH_ASAN
  __sanitizer_start_switch_fiber(&s->shadow, s->pool->stacks + (size_t)number * STACK, STACK);
#endif
#ifdef WITH_TSAN
  __tsan_switch_to_fiber(f->thread, __tsan_switch_to_fiber_no_sync);
#endif
  cudasim_switch(&s->at, &f->at);
#ifdef WITH_ASAN
  __sanitizer_finish_switch_fiber(s->shadow, NULL, NULL);
#endif
}

UNSEEN void wait_at_barrier(bool warp, bool orders) {
  scheduler *s = my_scheduler();
  fiber *self = s->running;
  const uint32_t round = self->rounds[warp]++ % 2;
  char *barrier = warp ? &s->warps[self->me.thread / CUDASIM_WARP][round] : &s->barriers[round];
  if (orders) {
    SEEN_BEFORE(barrier);
  }
  to_scheduler(warp ? AT_WARP : AT_BLOCK);
  if (orders) {
    SEEN_AFTER(barrier);
  }
}

_Noreturn void leave_meeting(void) {
  here->over = true;
  to_scheduler(ENDED);
  abort();
}

#ifdef WITH_TSAN
/* The sanitizer's functions, which no header declares. */
void AnnotateIgnoreSyncBegin(const char *file, int line);
void AnnotateIgnoreSyncEnd(const char *file, int line);
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);

void tsan_ignore(bool on) {
  if (on) {
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  } else {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  }
}
#else
void tsan_ignore(bool on) {
  (void)on;
}
#endif

/* Lets the threads from `first` on continue, if all of them have reached their barrier. */
static bool release(scheduler *s, uint32_t first, uint32_t count, int state) {
  for (uint32_t i = first; i < first + count; i++) {
    if (s->pool->fibers[i].state != state) {
      return false;
    }
  }
  for (uint32_t i = first; i < first + count; i++) {
    s->pool->fibers[i].state = READY;
  }
  return true;
}

static bool release_some(scheduler *s) {
  bool any = release(s, 0, s->g->threads, AT_BLOCK);
  for (uint32_t first = 0; first < s->g->threads; first += CUDASIM_WARP) {
    any = release(s, first, CUDASIM_WARP, AT_WARP) || any;
  }
  return any;
}

static void run_block(scheduler *s, uint32_t number) {
  const uint32_t threads = s->g->threads;
  fiber *fibers = s->pool->fibers;
  uint32_t ended = 0;
  for (uint32_t i = 0; i < threads; i++) {
    fibers[i].me = thread_of(s->g, number, i);
    if (fibers[i].state == NEW) {
      fiber_init(&fibers[i].at, s->pool->stacks + (size_t)i * STACK, STACK, begin);
#ifdef WITH_TSAN
      fibers[i].thread = __tsan_create_fiber(0);
#endif
    }
    fibers[i].state = READY;
    fibers[i].rounds[0] = fibers[i].rounds[1] = 0; /* the previous block may have had fewer threads */
  }
  SEEN_BEFORE(&s->begins);
  while (ended < threads && !s->over) {
    for (uint32_t i = 0; i < threads && !s->over; i++) {
      const uint32_t next = number % 2 == 0 ? i : threads - 1 - i;
      if (fibers[next].state == READY) {
        run_fiber(s, next);
        ended += fibers[next].state == ENDED;
      }
    }
    if (ended < threads && !s->over && !release_some(s)) {
      s->over = true;
      report_stuck();
    }
  }
  SEEN_AFTER(&s->ends);
#ifdef WITH_TSAN
  for (uint32_t i = 0; i < threads && s->over; i++) { /* fibers that were abandoned will do no more */
    __tsan_switch_to_fiber(fibers[i].thread, __tsan_switch_to_fiber_no_sync);
    __tsan_switch_to_fiber(s->thread, 0);
  }
#endif
}

void run_meeting(const grid *g) {
  scheduler s = {.g = g, .pool = pool_acquire()};
#ifdef WITH_TSAN
  s.thread = __tsan_get_current_fiber();
#endif
  here = &s;
  meeting = g;
  block_memory = shared_create(g);
  for (uint32_t i = 0; i < blocks_of(g) && !s.over; i++) {
    run_block(&s, i);
    shared_clear(block_memory);
  }
  shared_destroy(block_memory);
  meeting = NULL;
  pool_release(s.pool, !s.over);
}
