/* The scheduler, the queues from which it draws, and the world's memory.
 *
 * A rank's host thread runs to the next point where a real machine might run something else first. Such points are the
 * calls of the device, of the communicator and of the checker's test helpers. There the scheduler draws the next
 * action. Either this thread continues, or another rank's does, or the first work in some stream's queue is done on
 * this thread. Weights are drawn for threads and streams too, so in one world a stream lags far behind, and in another
 * the host. All choices come from one seed. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <inttypes.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim.h"

typedef struct host {
  sem_t go; /* the baton */
  pthread_t thread;
  bool done;
  bool (*ready)(void *args); /* NULL: it can continue */
  void *args;
  const char *waits_for;
  uint64_t weight;
  int32_t streams; /* number of streams made so far */
} host;

typedef struct entry {
  struct entry *next;
  sim_work work;
  sim_clock from; /* the clock of the thread that queued it */
  bool begun;
  _Alignas(max_align_t) unsigned char args[];
} entry;

typedef struct sim_stream {
  struct dc_stream head;
  struct sim_stream *next; /* in the list of all streams */
  entry *first, **last;
  uint64_t weight;
  int32_t agent;
} sim_stream;

typedef struct mapping {
  struct mapping *next;
  unsigned char *ptr;
  size_t bytes, used;
} mapping;

static struct {
  sim_options options;
  uint64_t state; /* of the random numbers */
  host hosts[SIM_RANKS];
  sim_agent agents[SIM_AGENTS];
  int32_t agent_count;
  int32_t turn; /* the rank whose host thread runs */
  int32_t me;   /* the running agent: that host thread, or the stream whose work it does */
  bool dead;
  sim_stream *streams;
  mapping *mappings;
  mapping *bump; /* memory from which sim_new allocates */
  sem_t finished;
  void (*body)(int32_t rank, void *user);
  void *user;
} world;

/* ---- small things ---- */

static uint64_t draw(void) { /* splitmix64 */
  uint64_t z = (world.state += UINT64_C(0x9e3779b97f4a7c15));
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

uint64_t sim_random(uint64_t below) {
  return draw() % below;
}

sim_agent *sim_me(void) {
  return &world.agents[world.me];
}

sim_agent *sim_agent_of(int32_t agent) {
  return &world.agents[agent];
}

int32_t sim_agent_number(const sim_agent *agent) {
  return (int32_t)(agent - world.agents);
}

sim_clock sim_publish(void) {
  sim_agent *me = sim_me();
  sim_clock known = me->now;
  me->now.at[world.me]++;
  return known;
}

const sim_options *sim_world(void) {
  return &world.options;
}

int32_t sim_rank(void) {
  return world.turn;
}

bool sim_dead(void) {
  return world.dead;
}

static int32_t new_agent(const dc_stream *stream, int32_t rank, int32_t number) {
  if (world.agent_count == SIM_AGENTS) {
    abort(); /* a test with this many streams needs a larger clock */
  }
  sim_agent *agent = &world.agents[world.agent_count];
  *agent = (sim_agent){.op = {"host", NULL, -1}, .stream = stream, .rank = rank, .number = number};
  agent->now.at[world.agent_count] = 1;
  return world.agent_count++;
}

static uint64_t new_weight(void) {
  return UINT64_C(1) << (2 * sim_random(5)); /* 1 to 256 */
}

/* ---- memory ---- */

void *sim_map(size_t bytes) {
  mapping *m = calloc(1, sizeof *m);
  m->bytes = bytes;
  m->ptr = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m->ptr == MAP_FAILED) {
    abort();
  }
  m->next = world.mappings;
  world.mappings = m;
  sim_forget(m->ptr, bytes);
  return m->ptr;
}

void *sim_new(size_t bytes) {
  size_t size = (bytes + 63) / 64 * 64 + 64; /* with a gap, so that an access past the end is noticed */
  if (world.bump == NULL || world.bump->bytes - world.bump->used < size) {
    (void)sim_map(size > (1 << 20) ? size : 1 << 20);
    world.bump = world.mappings;
  }
  unsigned char *ptr = world.bump->ptr + world.bump->used;
  world.bump->used += size;
  sim_note(SIM_FREE, ptr + bytes, size - bytes, "the gap after a test's array");
  sim_note(SIM_ALLOC, ptr, bytes, "the test");
  return ptr;
}

/* ---- the scheduler ---- */

static bool host_ready(const host *h) {
  return !h->done && (h->ready == NULL || world.dead || h->ready(h->args));
}

static bool stream_ready(const sim_stream *stream) {
  const entry *e = stream->first;
  return e != NULL && world.me != stream->agent &&
         (e->work.ready == NULL || world.dead || e->work.ready((void *)(uintptr_t)e->args));
}

/* Runs one step of a stream's first work. */
static void run(sim_stream *stream) {
  entry *e = stream->first;
  int32_t before = world.me;
  sim_agent *agent = &world.agents[stream->agent];
  world.me = stream->agent;
  agent->op = e->work.op;
  if (!e->begun) {
    e->begun = true;
    sim_join(&agent->now, &e->from);
  }
  bool finished = e->work.step(e->args);
  world.me = before;
  if (finished) {
    stream->first = e->next;
    if (stream->first == NULL) {
      stream->last = &stream->first;
    }
    free(e);
  }
}

static void hand_over(int32_t to) {
  world.turn = to;
  world.me = to;
  sem_post(&world.hosts[to].go);
}

static void report_deadlock(void) {
  char text[512] = "";
  for (int32_t r = 0; r < world.options.world; r++) {
    const host *h = &world.hosts[r];
    size_t used = strlen(text);
    snprintf(text + used, sizeof text - used, " rank %" PRId32 " waits for %s in %s;", r,
             h->done ? "nothing" : h->waits_for, world.agents[r].op.fn == NULL ? "-" : world.agents[r].op.fn);
  }
  sim_reportf("deadlock:%s", text);
}

static bool all_done(void) {
  for (int32_t r = 0; r < world.options.world; r++) {
    if (!world.hosts[r].done) {
      return false;
    }
  }
  return true;
}

/* Draws until this thread may continue. A thread that has ended returns false when another one continues, or true when
 * all have ended. */
static bool schedule(void) {
  int32_t turn = world.turn;
  host *me = &world.hosts[turn];
  for (;;) {
    uint64_t total = 0;
    for (int32_t r = 0; r < world.options.world; r++) {
      total += host_ready(&world.hosts[r]) ? world.hosts[r].weight : 0;
    }
    for (const sim_stream *s = world.streams; s != NULL; s = s->next) {
      total += stream_ready(s) ? s->weight : 0;
    }
    if (total == 0) {
      if (all_done()) {
        return true;
      }
      report_deadlock();
      world.dead = true;
      continue;
    }
    uint64_t at = sim_random(total);
    int32_t chosen = -1;
    for (int32_t r = 0; r < world.options.world && chosen < 0; r++) {
      uint64_t weight = host_ready(&world.hosts[r]) ? world.hosts[r].weight : 0;
      chosen = at < weight ? r : -1;
      at -= chosen < 0 ? weight : 0;
    }
    if (chosen == turn) {
      return true;
    }
    if (chosen >= 0) {
      bool done = me->done;
      hand_over(chosen);
      if (!done) {
        sem_wait(&me->go); /* the thread that woke it checked that this one can continue */
      }
      return !done;
    }
    sim_stream *s = world.streams;
    while (!stream_ready(s) || at >= s->weight) {
      at -= stream_ready(s) ? s->weight : 0;
      s = s->next;
    }
    if (sim_random(16) == 0) {
      s->weight = new_weight();
    }
    run(s);
  }
}

void sim_wait(bool (*ready)(void *args), void *args, const char *what) {
  host *h = &world.hosts[world.turn];
  if (world.me != world.turn) {
    abort(); /* work of a stream waits by its ready(), never inside */
  }
  h->ready = ready;
  h->args = args;
  h->waits_for = what;
  (void)schedule();
  h->ready = NULL;
  if (sim_random(16) == 0) {
    h->weight = new_weight();
  }
}

/* A point where others may run first, except within the work of a stream. */
static void point(void) {
  if (world.me == world.turn) {
    sim_wait(NULL, NULL, "its turn");
  }
}

static void *run_host(void *arg) {
  int32_t rank = (int32_t)((host *)arg - world.hosts);
  sem_wait(&world.hosts[rank].go);
  world.body(rank, world.user);
  world.hosts[rank].done = true;
  if (schedule()) {
    sem_post(&world.finished);
  }
  return NULL;
}

/* On a crash, prints the seed and calls the previous handler. */
static struct sigaction before[NSIG];

static void crashed(int signal) {
  char text[80];
  int length = snprintf(text, sizeof text, "seed %" PRIu64 ": killed by signal %d\n", world.options.seed, signal);
  (void)!write(STDERR_FILENO, text, (size_t)length);
  sigaction(signal, &before[signal], NULL);
}

static void watch_crashes(bool on) {
  static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGABRT};
  struct sigaction action = {.sa_handler = crashed};
  for (size_t i = 0; i < DC__COUNT(signals); i++) {
    sigaction(signals[i], on ? &action : &before[signals[i]], on ? &before[signals[i]] : NULL);
  }
}

static void end_world(void) {
  for (mapping *m = world.mappings, *next; m != NULL; m = next) {
    next = m->next;
    munmap(m->ptr, m->bytes);
    free(m);
  }
  sim_comm_end();
  sim_checker_end();
}

bool sim_run(const sim_options *options, void (*body)(int32_t rank, void *user), void *user) {
  memset(&world, 0, sizeof world);
  world.options = *options;
  world.state = options->seed;
  world.body = body;
  world.user = user;
  sem_init(&world.finished, 0, 0);
  sim_checker_begin();
  watch_crashes(true);
  for (int32_t r = 0; r < options->world; r++) {
    (void)new_agent(NULL, r, 0);
    world.hosts[r].weight = new_weight();
    sem_init(&world.hosts[r].go, 0, 0);
    pthread_create(&world.hosts[r].thread, NULL, run_host, &world.hosts[r]);
  }
  hand_over(0);
  sem_wait(&world.finished);
  for (int32_t r = 0; r < options->world; r++) {
    pthread_join(world.hosts[r].thread, NULL);
    sem_destroy(&world.hosts[r].go);
  }
  sem_destroy(&world.finished);
  watch_crashes(false);
  end_world();
  return sim_report()[0] == '\0';
}

/* ---- streams ---- */

void sim_push(dc_stream *stream, const sim_work *work, const void *args, size_t bytes) {
  sim_stream *self = (sim_stream *)stream;
  entry *e = calloc(1, sizeof *e + bytes);
  e->work = *work;
  e->work.op.fn = work->op.fn != NULL ? work->op.fn : sim_me()->op.fn;
  e->work.op.id = work->op.id >= 0 ? work->op.id : sim_me()->op.id;
  e->from = sim_publish();
  if (bytes > 0) {
    memcpy(e->args, args, bytes);
  }
  *self->last = e;
  self->last = &e->next;
  point();
}

dc_stream *sim_stream_open(dc_device *device, int32_t rank) {
  sim_stream *self = calloc(1, sizeof *self);
  dc__stream_head_init(&self->head, dc__device_retain(device));
  self->last = &self->first;
  self->weight = new_weight();
  self->agent = new_agent(&self->head, rank, ++world.hosts[rank].streams);
  self->next = world.streams;
  world.streams = self;
  return &self->head;
}

void sim_stream_close(dc_stream *stream) {
  sim_stream **link = &world.streams;
  while (&(*link)->head != stream) {
    link = &(*link)->next;
  }
  *link = (*link)->next;
  dc__device_release(stream->device);
  free(stream);
}
