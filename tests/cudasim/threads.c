/* Threads of a block that meet, as threads of the system, for the thread sanitizer: it is told what a barrier orders,
 * and nothing else of what the simulator does, so a barrier that is missing is a race. */
#include <sanitizer/tsan_interface.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "inside.h"

/* The sanitizer's, which has no header for them. */
void AnnotateIgnoreSyncBegin(const char *file, int line);
void AnnotateIgnoreSyncEnd(const char *file, int line);
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);

void quiet(bool on) {
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

/* Where threads of a warp or a block meet. What one round orders is not mixed with the next one's, at which a fast
 * thread may be already. */
typedef struct place {
  uint32_t arrived;
  uint64_t round;
  char order[2];
  pthread_cond_t moved; /* wakes those that wait here alone */
} place;

typedef struct team {
  const grid *g;
  shared *memory;
  pthread_barrier_t between; /* blocks */
  pthread_mutex_t mutex;     /* all below, quietly */
  place warps[CUDASIM_THREADS / CUDASIM_WARP], whole;
  uint32_t waiting, ended; /* threads */
  bool over;
} team;

typedef struct member {
  team *team;
  pthread_t thread;
  uint32_t number;
} member;

static _Thread_local team *here;
static _Thread_local uint64_t rounds[2]; /* that this thread was at, of its block and its warp */
static _Thread_local jmp_buf leave;

static void lock(team *t) {
  quiet(true);
  pthread_mutex_lock(&t->mutex);
}

static void unlock(team *t) {
  pthread_mutex_unlock(&t->mutex);
  quiet(false);
}

/* Whoever waits need not any more. */
static void end_all(team *t) {
  t->over = true;
  pthread_cond_broadcast(&t->whole.moved);
  for (int i = 0; i < CUDASIM_THREADS / CUDASIM_WARP; i++) {
    pthread_cond_broadcast(&t->warps[i].moved);
  }
}

/* Nobody is left that could come to where the others wait. */
static void look_for_stuck(team *t) {
  if (!t->over && t->waiting > 0 && t->waiting + t->ended == t->g->threads) {
    report_stuck();
    end_all(t);
  }
}

static void wait_at(team *t, place *p, uint32_t expected) {
  const uint64_t round = p->round;
  p->arrived++;
  if (p->arrived == expected) {
    t->waiting -= expected - 1;
    p->arrived = 0;
    p->round++;
    pthread_cond_broadcast(&p->moved);
  } else {
    t->waiting++;
    look_for_stuck(t);
  }
  while (p->round == round && !t->over) {
    pthread_cond_wait(&p->moved, &t->mutex);
  }
}

void meet(bool warp, bool orders) {
  team *t = here;
  place *p = warp ? &t->warps[current->thread / CUDASIM_WARP] : &t->whole;
  char *order = &p->order[rounds[warp]++ % 2];
  if (orders) {
    __tsan_release(order);
  }
  lock(t);
  wait_at(t, p, warp ? CUDASIM_WARP : t->g->threads);
  const bool over = t->over;
  unlock(t);
  if (over) {
    longjmp(leave, 1);
  }
  if (orders) {
    __tsan_acquire(order);
  }
}

_Noreturn void leave_meeting(void) {
  lock(here);
  end_all(here);
  unlock(here);
  longjmp(leave, 1);
}

static void run_thread(const grid *g) {
  if (setjmp(leave) == 0) {
    g->kernel->run(g->args);
  }
}

/* Shared memory and the places are the next block's. */
static void begin_block(team *t) {
  shared_clear(t->memory);
  for (int i = 0; i < CUDASIM_THREADS / CUDASIM_WARP; i++) {
    t->warps[i] = (place){.moved = PTHREAD_COND_INITIALIZER};
  }
  t->whole = (place){.moved = PTHREAD_COND_INITIALIZER};
  t->waiting = t->ended = 0;
}

static void *run_member(void *arg) {
  const member *self = arg;
  team *t = self->team;
  cudasim_thread me;
  here = t;
  meeting = t->g;
  block_memory = t->memory;
  current = &me;
  for (uint32_t number = 0; number < blocks_of(t->g); number++) {
    if (pthread_barrier_wait(&t->between) == PTHREAD_BARRIER_SERIAL_THREAD) {
      begin_block(t);
    }
    (void)pthread_barrier_wait(&t->between);
    me = thread_of(t->g, number, self->number);
    rounds[0] = rounds[1] = 0;
    if (!t->over) { /* as it was before the barrier */
      run_thread(t->g);
    }
    lock(t);
    t->ended++;
    look_for_stuck(t);
    unlock(t);
  }
  return NULL;
}

void run_meeting(const grid *g) {
  team *t = calloc(1, sizeof *t);
  member *members = calloc(g->threads, sizeof *members);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 256 << 10);
  pthread_mutex_init(&t->mutex, NULL);
  pthread_barrier_init(&t->between, NULL, g->threads);
  t->g = g;
  t->memory = shared_create(g);
  for (uint32_t i = 0; i < g->threads; i++) {
    members[i] = (member){.team = t, .number = i};
    if (pthread_create(&members[i].thread, &attributes, run_member, &members[i]) != 0) {
      abort(); /* the others would wait for it */
    }
  }
  for (uint32_t i = 0; i < g->threads; i++) {
    pthread_join(members[i].thread, NULL);
  }
  shared_destroy(t->memory);
  pthread_barrier_destroy(&t->between);
  pthread_mutex_destroy(&t->mutex);
  pthread_attr_destroy(&attributes);
  free(members);
  free(t);
}
