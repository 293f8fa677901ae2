/* Streams of the simulated driver, each a queue and a thread, and graphs of their operations. */
#include <stdlib.h>
#include <string.h>

#include "stream.h"

/* A waiting thread of the host: for a stream or a moment, or if both are NULL for all streams. */
typedef struct waiter {
  struct waiter *next;
  dc__cu_stream stream;
  const moment *moment;
} waiter;

pthread_mutex_t queue_mutex = PTHREAD_MUTEX_INITIALIZER;   /* protects all streams and events */
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER; /* threads in queue_await() wait for it */
static dc__cu_stream streams;
static waiter *waiters;
static bool held; /* streams work only while the host waits for them */
static captured *graphs;
static unsigned long captured_so_far;
static int capturing;
bool queue_spoiled;
_Thread_local int running_device = ANYBODY;

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

/* Otherwise each stream's thread is woken only for its own work. Waking all threads for each operation takes longer
 * than the operations, above all on a busy machine. */
static void wake_all(void) {
  for (dc__cu_stream stream = streams; stream != NULL; stream = stream->next) {
    pthread_cond_signal(&stream->more);
  }
}

void queue_progress(void) {
  if (waiters != NULL) {
    pthread_cond_broadcast(&progress);
  }
}

/* Called with queue_mutex held. Awaited work also runs while streams are held. */
void queue_await(dc__cu_stream stream, const moment *m) {
  waiter w = {waiters, stream, m};
  waiters = &w;
  if (held) {
    wake_all();
  }
  while (stream != NULL ? works(stream) : m != NULL ? m->on != NULL : any_works()) {
    pthread_cond_wait(&progress, &queue_mutex);
  }
  waiter **link = &waiters;
  while (*link != &w) {
    link = &(*link)->next;
  }
  *link = w.next;
}

static void *work(void *arg) {
  dc__cu_stream stream = arg;
  running_device = stream->device;
  pthread_mutex_lock(&queue_mutex);
  while (true) {
    operation *op = stream->head;
    if (op == NULL && stream->ends) {
      break;
    }
    if (op == NULL || (held && !is_wanted(stream))) {
      pthread_cond_wait(&stream->more, &queue_mutex);
      continue;
    }
    stream->head = op->next;
    stream->tail = stream->head == NULL ? &stream->head : stream->tail;
    stream->busy = true;
    pthread_mutex_unlock(&queue_mutex);
    op->run(op->args);
    free(op);
    pthread_mutex_lock(&queue_mutex);
    stream->busy = false;
    queue_progress();
  }
  pthread_mutex_unlock(&queue_mutex);
  return NULL;
}

static void append(operation ***tail, operation *op) {
  op->next = NULL;
  **tail = op;
  *tail = &op->next;
}

static dc__cu_stream open_stream(int device) {
  dc__cu_stream stream = calloc(1, sizeof *stream);
  stream->device = device;
  stream->tail = &stream->head;
  pthread_cond_init(&stream->more, NULL);
  pthread_mutex_lock(&queue_mutex);
  stream->next = streams;
  streams = stream;
  pthread_mutex_unlock(&queue_mutex);
  pthread_create(&stream->thread, NULL, work, stream);
  count_live(1);
  return stream;
}

static void close_stream(dc__cu_stream stream) {
  pthread_mutex_lock(&queue_mutex);
  stream->ends = true;
  pthread_cond_signal(&stream->more);
  pthread_mutex_unlock(&queue_mutex);
  pthread_join(stream->thread, NULL);
  pthread_mutex_lock(&queue_mutex);
  dc__cu_stream *link = &streams;
  while (*link != stream) {
    link = &(*link)->next;
  }
  *link = stream->next;
  pthread_mutex_unlock(&queue_mutex);
  pthread_cond_destroy(&stream->more);
  free(stream);
  count_live(-1);
}

/* ---- the default stream, which is NULL and always there ---- */

static dc__cu_stream default_stream;
static pthread_once_t default_once = PTHREAD_ONCE_INIT;

static void open_default(void) {
  default_stream = open_stream(ANYBODY);
  count_live(-1); /* it does not count as live, since no caller frees it */
}

__attribute__((destructor)) static void close_default(void) {
  if (default_stream != NULL) {
    close_stream(default_stream);
  }
}

dc__cu_stream queue_of(dc__cu_stream stream) {
  const bool is_default = stream == NULL || (uintptr_t)stream == DC__CU_STREAM_LEGACY;
  if (is_default) {
    pthread_once(&default_once, open_default);
  }
  return is_default ? default_stream : stream;
}

bool queue_refuses(dc__cu_stream stream) {
  return stream->captures != NULL && queue_spoiled;
}

int push(dc__cu_stream to, void (*run)(void *args), const void *args, size_t bytes) {
  dc__cu_stream stream = queue_of(to);
  pthread_mutex_lock(&queue_mutex);
  const bool refused = queue_refuses(stream);
  if (!refused) {
    operation *op = calloc(1, sizeof *op);
    op->run = run;
    memcpy(op->args, args, bytes);
    append(stream->captures != NULL ? &stream->captures->tail : &stream->tail, op);
    pthread_cond_signal(&stream->more);
  }
  pthread_mutex_unlock(&queue_mutex);
  return refused ? CAPTURE_INVALIDATED : 0;
}

int cuStreamCreate(dc__cu_stream *stream, unsigned flags) {
  ENTER(true);
  *stream = open_stream(cudasim_current());
  return flags == DC__CU_STREAM_NON_BLOCKING ? 0 : INVALID_VALUE;
}

int cuStreamDestroy_v2(dc__cu_stream stream) {
  int error = enter(__func__, true);
  close_stream(stream);
  return error;
}

int cuStreamSynchronize(dc__cu_stream of) {
  ENTER(true);
  dc__cu_stream stream = queue_of(of);
  int error = unsafe();
  pthread_mutex_lock(&queue_mutex);
  if (stream->captures != NULL) {
    queue_spoiled = true;
    error = CAPTURE_UNSUPPORTED;
  }
  if (error == 0) {
    queue_await(stream, NULL);
  }
  pthread_mutex_unlock(&queue_mutex);
  return error != 0 ? error : lost();
}

int cuCtxSynchronize(void) {
  ENTER(true);
  pthread_mutex_lock(&queue_mutex);
  int error = capturing > 0 ? CAPTURE_UNSUPPORTED : 0; /* an error if any stream is being captured, in any mode */
  queue_spoiled = queue_spoiled || error != 0;
  if (error == 0) {
    queue_await(NULL, NULL);
  }
  pthread_mutex_unlock(&queue_mutex);
  return error != 0 ? error : lost();
}

int cuStreamIsCapturing(dc__cu_stream of, int *status) {
  ENTER(true);
  dc__cu_stream stream = queue_of(of);
  if (stream == default_stream) { /* the default stream could be part of any capture */
    return CAPTURE_IMPLICIT;
  }
  pthread_mutex_lock(&queue_mutex);
  *status = queue_refuses(stream) ? DC__CU_STATUS_INVALIDATED : stream->captures != NULL;
  pthread_mutex_unlock(&queue_mutex);
  return 0;
}

/* ---- streams of others, and graphs ---- */

void *cudasim_stream(void) {
  return open_stream(ANYBODY);
}

void cudasim_stream_end(void *stream) {
  close_stream(stream);
}

bool captures(void) {
  pthread_mutex_lock(&queue_mutex);
  bool any = capturing > 0;
  pthread_mutex_unlock(&queue_mutex);
  return any;
}

void cudasim_spoil(void) {
  pthread_mutex_lock(&queue_mutex);
  queue_spoiled = true;
  pthread_mutex_unlock(&queue_mutex);
}

void cudasim_hold(void) {
  pthread_mutex_lock(&queue_mutex);
  held = true;
  pthread_mutex_unlock(&queue_mutex);
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
  pthread_mutex_lock(&queue_mutex);
  captured **before = my_graph();
  if (*before != NULL) {
    free_graph(before);
  }
  captured *graph = calloc(1, sizeof *graph);
  graph->tail = &graph->first;
  graph->by = pthread_self();
  graph->number = ++captured_so_far;
  graph->next = graphs;
  graphs = graph;
  ((dc__cu_stream)stream)->captures = graph;
  capturing++;
  pthread_mutex_unlock(&queue_mutex);
}

int cudasim_capture_end(void *stream) {
  pthread_mutex_lock(&queue_mutex);
  ((dc__cu_stream)stream)->captures->ended = true;
  ((dc__cu_stream)stream)->captures = NULL;
  capturing--;
  int fine = !queue_spoiled;
  queue_spoiled = queue_spoiled && capturing > 0;
  pthread_mutex_unlock(&queue_mutex);
  return fine;
}

void cudasim_graph_end(void) {
  pthread_mutex_lock(&queue_mutex);
  captured **graph = my_graph();
  if (*graph != NULL && (*graph)->ended) { /* not a graph that is still being captured */
    free_graph(graph);
  }
  pthread_mutex_unlock(&queue_mutex);
}

unsigned long cudasim_graph_of(void *stream) {
  pthread_mutex_lock(&queue_mutex);
  const captured *graph = ((dc__cu_stream)stream)->captures;
  unsigned long number = graph == NULL ? 0 : graph->number;
  pthread_mutex_unlock(&queue_mutex);
  return number;
}

bool cudasim_graph_lives(unsigned long number) {
  pthread_mutex_lock(&queue_mutex);
  const captured *graph = graphs;
  while (graph != NULL && graph->number != number) {
    graph = graph->next;
  }
  pthread_mutex_unlock(&queue_mutex);
  return graph != NULL;
}

void cudasim_launch(void *stream) {
  pthread_mutex_lock(&queue_mutex);
  for (const operation *op = (*my_graph())->first; op != NULL; op = op->next) {
    operation *copy = calloc(1, sizeof *copy);
    memcpy(copy, op, sizeof *copy);
    append(&((dc__cu_stream)stream)->tail, copy);
  }
  pthread_cond_signal(&((dc__cu_stream)stream)->more);
  pthread_mutex_unlock(&queue_mutex);
}

void queue_reset(void) {
  pthread_mutex_lock(&queue_mutex);
  while (graphs != NULL) {
    free_graph(&graphs);
  }
  queue_spoiled = held = false;
  wake_all();
  pthread_mutex_unlock(&queue_mutex);
}
