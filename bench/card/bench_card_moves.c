/* Bytes read and written per second on a card, by the elementwise kernels and by collectives of ranks that are threads.
 * Each is a share of the driver's own copy in the same run. bench_card_moves [KiB of an operand, 512 MiB if not given]
 * prints a line of JSON: GB/s of the copy, and the shares. Kernels are timed by the card's events. Collectives are
 * timed by the hosts' clock, from when all ranks begin until their streams are done. scripts/gpu-check runs it. */
#include <stdio.h>
#include <stdlib.h>

#include "comm/comm.h"
#include "kernels/kernels.h"

enum { SOURCES = 4, OPERANDS = SOURCES + 1, ROUNDS = 9, REPEATS = 10, RANKS = 4 };

static void must(dc_status status) {
  if (status != DC_OK) {
    fprintf(stderr, "%s\n", dc_last_error());
    exit(1);
  }
}

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values) {
  qsort(values, ROUNDS, sizeof values[0], by_value);
  return values[ROUNDS / 2];
}

/* A device with a stream, and memory for operands of as many bytes each. */
typedef struct place {
  dc_device *device;
  dc_stream *stream;
  char *operands[OPERANDS];
  size_t bytes;
} place;

static place operands_create(size_t bytes, int32_t operands) {
  place p = {.bytes = bytes};
  must(dc_device_open("cuda", NULL, &p.device));
  must(dc_stream_create(p.device, &p.stream));
  for (int32_t i = 0; i < operands; i++) {
    must(p.device->ops->alloc(p.device, bytes, DC_MEMORY_DEVICE, (void **)&p.operands[i]));
    dc__stream_zero(p.stream, p.operands[i], bytes);
  }
  must(dc_stream_synchronize(p.stream, 0));
  return p;
}

static void operands_destroy(place *p) {
  must(dc_stream_synchronize(p->stream, 0));
  for (int32_t i = 0; i < OPERANDS; i++) {
    p->device->ops->free(p->device, p->operands[i], p->bytes, DC_MEMORY_DEVICE);
  }
  dc_stream_destroy(p->stream);
  dc_device_destroy(p->device);
}

/* ---- kernels ---- */

typedef enum work { COPY, CAST, ACCUMULATE, COMBINE, REDUCE } work;

static const struct job {
  const char *name;
  work kind;
  int32_t to, from;
} jobs[] = {
    {"copy", COPY, DC_INT8, DC_INT8},
    {"cast f32 <- bf16", CAST, DC_FLOAT32, DC_BFLOAT16},
    {"cast bf16 <- f32", CAST, DC_BFLOAT16, DC_FLOAT32},
    {"accumulate f32 += f32", ACCUMULATE, DC_FLOAT32, DC_FLOAT32},
    {"accumulate f32 += bf16", ACCUMULATE, DC_FLOAT32, DC_BFLOAT16},
    {"copy bf16 <- bf16, finite?", COMBINE, DC_BFLOAT16, DC_BFLOAT16},
    {"cast f32 <- bf16, finite?", COMBINE, DC_FLOAT32, DC_BFLOAT16},
    {"reduce f32 <- 4 f32", REDUCE, DC_FLOAT32, DC_FLOAT32},
    {"reduce bf16 <- 4 bf16", REDUCE, DC_BFLOAT16, DC_BFLOAT16},
};

static int64_t count_of(const struct job *j, size_t bytes) {
  const size_t to = dc_dtype_size(j->to), from = dc_dtype_size(j->from);
  return (int64_t)(bytes / (to > from ? to : from));
}

/* Infinities and NaN would be noted in the second source. */
static void queue(const place *p, const struct job *j) {
  char *to = p->operands[SOURCES], *from = p->operands[0];
  const int64_t count = count_of(j, p->bytes);
  if (j->kind == COPY) {
    dc__stream_copy(p->stream, to, from, p->bytes);
  } else if (j->kind == CAST) {
    dc__stream_cast(p->stream, to, j->to, from, j->from, count);
  } else if (j->kind == ACCUMULATE) {
    dc__stream_accumulate(p->stream, to, j->to, from, j->from, count);
  } else if (j->kind == COMBINE) {
    const dc__combination c = {.dst = to, .src = from, .count = count, .dst_dtype = j->to, .src_dtype = j->from};
    dc__stream_combine(p->stream, &c, (dc__nonfinite *)(void *)p->operands[1], 1);
  } else {
    const dc__reduction r = {.dst = to,
                             .src = (const void *const *)p->operands,
                             .count = count,
                             .dst_dtype = j->to,
                             .src_dtype = j->from,
                             .n = SOURCES,
                             .mean = true};
    dc__internal_reduce(p->stream, &r);
  }
}

static double bytes_moved(const struct job *j, size_t bytes) {
  const size_t to = dc_dtype_size(j->to), from = dc_dtype_size(j->from);
  return (double)count_of(j, bytes) *
         (double)((j->kind == REDUCE ? SOURCES : 1) * from + (j->kind == ACCUMULATE ? 2 : 1) * to);
}

/* Nanoseconds of one, between two points of the stream. */
static double time_of(const place *p, const struct job *j) {
  const dc__device_ops *ops = p->device->ops;
  dc__timestamp *begin = ops->stream_timestamp(p->stream);
  for (int i = 0; i < REPEATS; i++) {
    queue(p, j);
  }
  dc__timestamp *end = ops->stream_timestamp(p->stream);
  must(dc_stream_synchronize(p->stream, 0));
  if (begin == NULL || end == NULL) {
    exit(1);
  }
  const double ns = (double)(ops->timestamp_ns(end) - ops->timestamp_ns(begin));
  ops->timestamp_release(begin);
  ops->timestamp_release(end);
  return ns / REPEATS;
}

/* Prints the shares, and returns the copy's bytes a nanosecond. */
static double measure_kernels(size_t bytes) {
  place p = operands_create(bytes, OPERANDS);
  double copy = 0;
  for (size_t i = 0; i < DC__COUNT(jobs); i++) {
    double ns[ROUNDS];
    (void)time_of(&p, &jobs[i]);
    for (int round = 0; round < ROUNDS; round++) {
      ns[round] = time_of(&p, &jobs[i]);
    }
    const double rate = bytes_moved(&jobs[i], bytes) / median(ns);
    copy = i == 0 ? rate : copy;
    printf(i == 0 ? "\"%s\": %.1f" : ", \"%s\": %.3f", jobs[i].name, i == 0 ? rate : rate / copy);
  }
  operands_destroy(&p);
  return copy;
}

/* ---- collectives of ranks that are threads ---- */

typedef struct rank_state {
  dc_comm *comm;
  int32_t rank, ranks;
  size_t bytes; /* of the whole tensor */
  double *ns;   /* of a gather and of a reduction; rank 0's */
} rank_state;

static double collective(const rank_state *s, const place *p, bool reduces) {
  const int64_t total = (int64_t)(s->bytes / sizeof(float)), shard = total / s->ranks;
  dc_tensor part = {
      .struct_size = sizeof part, .data = p->operands[0], .shape = &shard, .ndim = 1, .dtype = DC_FLOAT32};
  dc_tensor whole = {
      .struct_size = sizeof whole, .data = p->operands[1], .shape = &total, .ndim = 1, .dtype = DC_FLOAT32};
  must(dc_comm_barrier(s->comm));
  const int64_t begin = dc__now_ns();
  for (int i = 0; i < REPEATS; i++) {
    must(reduces ? dc_comm_reduce_scatter(s->comm, &whole, &part, NULL, DC_SUM, p->stream)
                 : dc_comm_all_gather(s->comm, &part, &whole, NULL, p->stream));
  }
  must(dc_stream_synchronize(p->stream, 0));
  must(dc_comm_barrier(s->comm));
  return (double)(dc__now_ns() - begin) / REPEATS;
}

static void *run_rank(void *arg) {
  const rank_state *s = arg;
  place p = operands_create(s->bytes, 2);
  for (int reduces = 0; reduces < 2; reduces++) {
    double ns[ROUNDS];
    (void)collective(s, &p, reduces != 0);
    for (int round = 0; round < ROUNDS; round++) {
      ns[round] = collective(s, &p, reduces != 0);
    }
    if (s->rank == 0) {
      s->ns[reduces] = median(ns);
    }
  }
  operands_destroy(&p);
  dc_comm_destroy(s->comm);
  return NULL;
}

/* All ranks write a whole tensor in a gather, and read one in a reduction. */
static void measure_collectives(int32_t ranks, size_t bytes, double copy) {
  dc_comm *comms[RANKS];
  pthread_t threads[RANKS];
  rank_state states[RANKS];
  double ns[2];
  must(dc_comm_create_threads(ranks, NULL, comms));
  for (int32_t r = 0; r < ranks; r++) {
    states[r] = (rank_state){comms[r], r, ranks, bytes, ns};
    if (pthread_create(&threads[r], NULL, run_rank, &states[r]) != 0) {
      exit(1);
    }
  }
  for (int32_t r = 0; r < ranks; r++) {
    pthread_join(threads[r], NULL);
  }
  printf(", \"all-gather of %d threads\": %.3f, \"reduce-scatter of %d threads\": %.3f", ranks,
         2.0 * ranks * (double)bytes / ns[0] / copy, ranks, (ranks + 1.0) * (double)bytes / ns[1] / copy);
}

int main(int argc, char **argv) {
  const long kib = argc > 1 ? strtol(argv[1], NULL, 10) : 512 << 10;
  if (kib < 1 || kib > 8 << 20) {
    fprintf(stderr, "%s: must be 1 to %d KiB\n", argv[1], 8 << 20);
    return 1;
  }
  const size_t bytes = (size_t)kib << 10;
  printf("{\"kib\": %ld, ", kib);
  const double copy = measure_kernels(bytes);
  for (int32_t ranks = 2; ranks <= RANKS; ranks *= 2) {
    measure_collectives(ranks, bytes / 4, copy);
  }
  printf("}\n");
  return 0;
}
