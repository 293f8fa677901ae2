/* Streams of the simulated driver: each a queue and a thread. Events, copies, host functions and graphs on them. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "inside.h"

struct CUstream_st {
  dc__cu_stream next; /* all */
  operation *head, **tail;
  bool busy, ends;
  struct captured *captures; /* into this graph; NULL: not */
  pthread_t thread;
};

/* A thread's latest graph. */
typedef struct captured {
  struct captured *next;
  pthread_t by;
  operation *first, **tail;
} captured;

/* A record: where it is, until it is done. */
typedef struct moment {
  int refs;
  dc__cu_stream on;     /* NULL: done */
  struct timespec time; /* then */
} moment;

struct CUevent_st {
  moment *latest; /* NULL: none */
  bool captured, timed;
};

/* Somebody waits for a stream or a moment, or with neither for all streams. */
typedef struct waiter {
  struct waiter *next;
  dc__cu_stream stream;
  const moment *moment;
} waiter;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* all of all streams and events */
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static dc__cu_stream streams;
static waiter *waiters;
static bool held; /* streams work only for who waits */
static captured *graphs;
static int capturing;
static bool spoiled;

/* ---- streams ---- */

static bool is_wanted(dc__cu_stream stream) {
  bool wanted = stream->ends;
  for (const waiter *w = waiters; w != NULL; w = w->next) {
    wanted = wanted || w->stream == stream || (w->stream == NULL && (w->moment == NULL || w->moment->on == stream));
  }
  return wanted;
}

static bool works(dc__cu_stream stream) {
  return stream->head != NULL || stream->busy;
}

static bool any_works(void) {
  dc__cu_stream stream = streams;
  while (stream != NULL && !works(stream)) {
    stream = stream->next;
  }
  return stream != NULL;
}

/* With the mutex held. What is waited for runs also while streams are held. */
static void await(dc__cu_stream stream, const moment *m) {
  waiter w = {waiters, stream, m};
  waiters = &w;
  pthread_cond_broadcast(&progress);
  while (stream != NULL ? works(stream) : m != NULL ? m->on != NULL : any_works()) {
    pthread_cond_wait(&progress, &mutex);
  }
  waiter **link = &waiters;
  while (*link != &w) {
    link = &(*link)->next;
  }
  *link = w.next;
}

static void *work(void *arg) {
  dc__cu_stream stream = arg;
  pthread_mutex_lock(&mutex);
  while (true) {
    operation *op = stream->head;
    if (op == NULL && stream->ends) {
      break;
    }
    if (op == NULL || (held && !is_wanted(stream))) {
      pthread_cond_wait(&progress, &mutex);
      continue;
    }
    stream->head = op->next;
    stream->tail = stream->head == NULL ? &stream->head : stream->tail;
    stream->busy = true;
    pthread_mutex_unlock(&mutex);
    op->run(op->args);
    free(op);
    pthread_mutex_lock(&mutex);
    stream->busy = false;
    pthread_cond_broadcast(&progress);
  }
  pthread_mutex_unlock(&mutex);
  return NULL;
}

static void append(operation ***tail, operation *op) {
  op->next = NULL;
  **tail = op;
  *tail = &op->next;
}

static dc__cu_stream open_stream(void) {
  dc__cu_stream stream = calloc(1, sizeof *stream);
  stream->tail = &stream->head;
  pthread_mutex_lock(&mutex);
  stream->next = streams;
  streams = stream;
  pthread_mutex_unlock(&mutex);
  pthread_create(&stream->thread, NULL, work, stream);
  count_live(1);
  return stream;
}

static void close_stream(dc__cu_stream stream) {
  pthread_mutex_lock(&mutex);
  stream->ends = true;
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&mutex);
  pthread_join(stream->thread, NULL);
  pthread_mutex_lock(&mutex);
  dc__cu_stream *link = &streams;
  while (*link != stream) {
    link = &(*link)->next;
  }
  *link = stream->next;
  pthread_mutex_unlock(&mutex);
  free(stream);
  count_live(-1);
}

/* ---- the default stream, which is NULL and always there ---- */

static dc__cu_stream default_stream;
static pthread_once_t default_once = PTHREAD_ONCE_INIT;

static void open_default(void) {
  default_stream = open_stream();
  count_live(-1); /* nobody has to give it back */
}

__attribute__((destructor)) static void close_default(void) {
  if (default_stream != NULL) {
    close_stream(default_stream);
  }
}

static dc__cu_stream true_stream(dc__cu_stream stream) {
  if (stream == NULL) {
    pthread_once(&default_once, open_default);
  }
  return stream == NULL ? default_stream : stream;
}

void push(dc__cu_stream to, void (*run)(void *args), const void *args, size_t bytes) {
  dc__cu_stream stream = true_stream(to);
  operation *op = calloc(1, sizeof *op);
  op->run = run;
  memcpy(op->args, args, bytes);
  pthread_mutex_lock(&mutex);
  append(stream->captures != NULL ? &stream->captures->tail : &stream->tail, op);
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&mutex);
}

int cuStreamCreate(dc__cu_stream *stream, unsigned flags) {
  ENTER(true);
  *stream = open_stream();
  return flags == DC__CU_STREAM_NON_BLOCKING ? 0 : INVALID_VALUE;
}

int cuStreamDestroy_v2(dc__cu_stream stream) {
  int error = enter(__func__, true);
  close_stream(stream);
  return error;
}

int cuStreamSynchronize(dc__cu_stream of) {
  ENTER(true);
  dc__cu_stream stream = true_stream(of);
  int error = unsafe();
  pthread_mutex_lock(&mutex);
  if (stream->captures != NULL) {
    spoiled = true;
    error = CAPTURE_UNSUPPORTED;
  }
  if (error == 0) {
    await(stream, NULL);
  }
  pthread_mutex_unlock(&mutex);
  return error != 0 ? error : lost();
}

int cuCtxSynchronize(void) {
  ENTER(true);
  int error = unsafe();
  pthread_mutex_lock(&mutex);
  if (error == 0) {
    await(NULL, NULL);
  }
  pthread_mutex_unlock(&mutex);
  return error != 0 ? error : lost();
}

int cuStreamIsCapturing(dc__cu_stream of, int *status) {
  ENTER(true);
  dc__cu_stream stream = true_stream(of);
  pthread_mutex_lock(&mutex);
  *status = stream->captures != NULL;
  pthread_mutex_unlock(&mutex);
  return 0;
}

/* ---- events ---- */

static void drop(moment *m) {
  if (m != NULL && --m->refs == 0) {
    free(m);
  }
}

int cuEventCreate(dc__cu_event *event, unsigned flags) {
  ENTER(true);
  *event = calloc(1, sizeof **event);
  (*event)->timed = (flags & DC__CU_EVENT_NO_TIMING) == 0;
  count_live(1);
  return 0;
}

int cuEventDestroy_v2(dc__cu_event event) {
  int error = enter(__func__, true);
  pthread_mutex_lock(&mutex);
  drop(event->latest);
  free(event);
  pthread_mutex_unlock(&mutex);
  count_live(-1);
  return error;
}

static void run_record(void *args) {
  moment *m = *(moment **)args;
  pthread_mutex_lock(&mutex);
  m->on = NULL;
  clock_gettime(CLOCK_MONOTONIC, &m->time);
  drop(m);
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&mutex);
}

int cuEventRecord(dc__cu_event event, dc__cu_stream on) {
  ENTER(true);
  dc__cu_stream stream = true_stream(on);
  pthread_mutex_lock(&mutex);
  drop(event->latest);
  event->latest = NULL;
  event->captured = stream->captures != NULL;
  moment *m = event->captured ? NULL : calloc(1, sizeof *m);
  if (m != NULL) {
    *m = (moment){.refs = 2, .on = stream}; /* the event's and the record's */
    event->latest = m;
  }
  pthread_mutex_unlock(&mutex);
  if (m != NULL) {
    push(stream, run_record, &m, sizeof m);
  }
  return 0;
}

static void run_wait(void *args) {
  moment *m = *(moment **)args;
  pthread_mutex_lock(&mutex);
  await(NULL, m);
  drop(m);
  pthread_mutex_unlock(&mutex);
}

int cuStreamWaitEvent(dc__cu_stream of, dc__cu_event event, unsigned flags) {
  ENTER(true);
  dc__cu_stream stream = true_stream(of);
  (void)flags;
  pthread_mutex_lock(&mutex);
  moment *m = event->latest;
  bool outside =
      event->captured != (stream->captures != NULL); /* what is captured knows nothing of the rest, and is one stream */
  bool waits = m != NULL && stream->captures == NULL;
  spoiled = spoiled || outside;
  if (waits) {
    m->refs++;
  }
  pthread_mutex_unlock(&mutex);
  if (waits) {
    push(stream, run_wait, &m, sizeof m);
  }
  return outside ? CAPTURE_ISOLATION : 0;
}

static int look_at(dc__cu_event event, bool wait) {
  int error = unsafe();
  pthread_mutex_lock(&mutex);
  if (event->captured) {
    spoiled = true;
    error = CAPTURE_UNSUPPORTED;
  }
  moment *m = event->latest;
  if (m != NULL && error == 0) {
    m->refs++;
    if (wait) {
      await(NULL, m);
    }
    error = m->on != NULL ? DC__CU_NOT_READY : 0;
    drop(m);
  }
  pthread_mutex_unlock(&mutex);
  return error != 0 ? error : lost();
}

int cuEventQuery(dc__cu_event event) {
  ENTER(true);
  return look_at(event, false);
}

int cuEventSynchronize(dc__cu_event event) {
  ENTER(true);
  return look_at(event, true);
}

int cuEventElapsedTime(float *milliseconds, dc__cu_event from, dc__cu_event to) {
  ENTER(true);
  pthread_mutex_lock(&mutex);
  const moment *a = from->latest, *b = to->latest;
  int error = DC__CU_NOT_READY;
  if (!from->timed || !to->timed || a == NULL || b == NULL) {
    error = INVALID_HANDLE;
  } else if (a->on == NULL && b->on == NULL) {
    *milliseconds =
        (float)((double)(b->time.tv_sec - a->time.tv_sec) * 1e3 + (double)(b->time.tv_nsec - a->time.tv_nsec) / 1e6);
    error = 0;
  }
  pthread_mutex_unlock(&mutex);
  return error != 0 ? error : lost();
}

/* ---- copies and host functions ---- */

typedef struct move {
  void *dst;
  const void *src; /* NULL: `value` */
  size_t bytes;
  unsigned char value;
} move;

static void run_move(void *args) {
  const move *m = args;
  void *dst = place_of(m->dst, m->bytes, true);
  const void *src = m->src == NULL ? dst : place_of(m->src, m->bytes, true);
  if (dst == NULL || src == NULL) {
    lose_device(ILLEGAL_ADDRESS);
  }
  if (lost() != 0) {
    return;
  }
  if (m->src != NULL) {
    memmove(dst, src, m->bytes);
  } else {
    memset(dst, m->value, m->bytes);
  }
}

int cuMemcpyAsync(dc__cu_ptr dst, dc__cu_ptr src, size_t bytes, dc__cu_stream stream) {
  ENTER(true);
  const move m = {(void *)(uintptr_t)dst, (const void *)(uintptr_t)src, bytes, 0};
  push(stream, run_move, &m, sizeof m);
  return 0;
}

int cuMemsetD8Async(dc__cu_ptr dst, unsigned char value, size_t bytes, dc__cu_stream stream) {
  ENTER(true);
  const move m = {(void *)(uintptr_t)dst, NULL, bytes, value};
  push(stream, run_move, &m, sizeof m);
  return 0;
}

typedef struct host_call {
  void (*fn)(void *user);
  void *user;
} host_call;

/* The driver calls nothing any more once the device is lost. */
static void run_host_call(void *args) {
  const host_call *call = args;
  if (lost() == 0) {
    call->fn(call->user);
  }
}

int cuLaunchHostFunc(dc__cu_stream stream, void (*fn)(void *user), void *user) {
  ENTER(true);
  const host_call call = {fn, user};
  push(stream, run_host_call, &call, sizeof call);
  return 0;
}

/* ---- streams of others, and graphs ---- */

void *cudasim_stream(void) {
  return open_stream();
}

void cudasim_stream_call(void *stream, void (*fn)(void *user), void *user) {
  const host_call call = {fn, user};
  push(stream, run_host_call, &call, sizeof call);
}

void cudasim_stream_end(void *stream) {
  close_stream(stream);
}

bool captures(void) {
  pthread_mutex_lock(&mutex);
  bool any = capturing > 0;
  pthread_mutex_unlock(&mutex);
  return any;
}

void spoil_capture(void) {
  pthread_mutex_lock(&mutex);
  spoiled = true;
  pthread_mutex_unlock(&mutex);
}

void cudasim_hold(void) {
  pthread_mutex_lock(&mutex);
  held = true;
  pthread_mutex_unlock(&mutex);
}

static void free_graph(captured **link) {
  captured *graph = *link;
  *link = graph->next;
  while (graph->first != NULL) {
    operation *next = graph->first->next;
    free(graph->first);
    graph->first = next;
  }
  free(graph);
}

static captured **my_graph(void) {
  captured **link = &graphs;
  while (*link != NULL && !pthread_equal((*link)->by, pthread_self())) {
    link = &(*link)->next;
  }
  return link;
}

void cudasim_capture(void *stream) {
  pthread_mutex_lock(&mutex);
  captured **before = my_graph();
  if (*before != NULL) {
    free_graph(before);
  }
  captured *graph = calloc(1, sizeof *graph);
  graph->tail = &graph->first;
  graph->by = pthread_self();
  graph->next = graphs;
  graphs = graph;
  ((dc__cu_stream)stream)->captures = graph;
  capturing++;
  pthread_mutex_unlock(&mutex);
}

int cudasim_capture_end(void *stream) {
  pthread_mutex_lock(&mutex);
  ((dc__cu_stream)stream)->captures = NULL;
  capturing--;
  int fine = !spoiled;
  pthread_mutex_unlock(&mutex);
  return fine;
}

void cudasim_launch(void *stream) {
  pthread_mutex_lock(&mutex);
  for (const operation *op = (*my_graph())->first; op != NULL; op = op->next) {
    operation *copy = calloc(1, sizeof *copy);
    memcpy(copy, op, sizeof *copy);
    append(&((dc__cu_stream)stream)->tail, copy);
  }
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&mutex);
}

void queue_reset(void) {
  pthread_mutex_lock(&mutex);
  while (graphs != NULL) {
    free_graph(&graphs);
  }
  spoiled = held = false;
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&mutex);
}
