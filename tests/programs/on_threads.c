/* The real platform: the CPU device, and ranks as threads over shared memory, checked by sanitizers. */
#include "kernels/kernels.h"
#include "program.h"

const char *const ground_name = "ranks as threads";
const int64_t ground_large = 70001; /* with few ranks a part is larger than the staging memory */

typedef struct block {
  struct block *next;
} block;

static struct {
  pthread_mutex_t mutex;
  block *blocks;
} memory = {.mutex = PTHREAD_MUTEX_INITIALIZER};

void *ground_new(size_t bytes) {
  size_t head = 64;
  block *b = malloc(head + bytes);
  pthread_mutex_lock(&memory.mutex);
  b->next = memory.blocks;
  memory.blocks = b;
  pthread_mutex_unlock(&memory.mutex);
  return memset((char *)b + head, 0xa5, bytes);
}

static void free_memory(void) {
  for (block *b = memory.blocks, *next; b != NULL; b = next) {
    next = b->next;
    free(b);
  }
  memory.blocks = NULL;
}

void ground_reads(const void *ptr, size_t bytes, const char *what) {
  (void)ptr;
  (void)bytes;
  (void)what;
}

void ground_writes(const void *ptr, size_t bytes, const char *what) {
  (void)ptr;
  (void)bytes;
  (void)what;
}

void ground_cast(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count) {
  dc__cast(dst, dst_dtype, src, src_dtype, count);
}

const char *ground_run(const ground *g, setup s, void (*body)(rank *r), const void *user) {
  static char failure[1200];
  dc_comm *comms[RANKS];
  rank ranks[RANKS];
  rank_job jobs[RANKS];
  pthread_t threads[RANKS];
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  options.timeout_ns = INT64_C(60000000000);
  s.config.struct_size = sizeof s.config;
  memset(ranks, 0, sizeof ranks);
  failure[0] = '\0';
  if (dc_comm_create_threads(g->world, &options, comms) != DC_OK ||
      dc_comm_set_checksums(comms[0], g->checksums) != DC_OK) {
    return dc_last_error();
  }
  for (int32_t i = 0; i < g->world; i++) {
    (void)dc_comm_set_checksums(comms[i], g->checksums);
    ranks[i] = (rank){.rank = i, .world = g->world, .comm = comms[i], .user = user};
    jobs[i] = (rank_job){&ranks[i], &s, body};
    if (pthread_create(&threads[i], NULL, run_rank, &jobs[i]) != 0) {
      abort();
    }
  }
  for (int32_t i = 0; i < g->world; i++) {
    pthread_join(threads[i], NULL);
  }
  for (int pass = 0; pass < 2; pass++) { /* first looks for a rank that failed by itself */
    for (int32_t i = 0; i < g->world && failure[0] == '\0'; i++) {
      const char *text = ranks[i].failure;
      if (text[0] != '\0' && (pass == 1 || strstr(text, "abort") == NULL)) {
        snprintf(failure, sizeof failure, "seed %" PRIu64 ", %" PRId32 " ranks: %s", g->seed, g->world, text);
      }
    }
  }
  free_memory();
  return failure;
}
