/* All-gather and reduce-scatter of libdc over MPI, beside MPI's own Iallgatherv and Ialltoallv of the same bytes, which
 * are tested without a pause until they are done. After the Ialltoallv the same sum is made as in libdc, since a
 * reduction needs it. Rounds alternate between the two, so that both have the same machine.
 *
 *   mpirun -n RANKS mpi_collectives [ROUNDS]      medians of rank 0; the ratio is the median of MPI's / libdc's time */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/mpi/mpi.h"
#include "kernels/kernels.h"

enum { MOST_ROUNDS = 1000, ALONE = 0, LIBDC = 1 };

typedef struct bench {
  dc_comm *comm;
  const dc__mpi *own;
  int64_t shard; /* float32 elements of a rank */
  float *part, *whole, *received;
  int counts[DC__COMM_MAX_WORLD], at[DC__COMM_MAX_WORLD];
} bench;

typedef void (*bench_fn)(const bench *b);

static void must(dc_status status) {
  if (status != DC_OK) {
    fprintf(stderr, "%s\n", dc_last_error());
    exit(1);
  }
}

static dc_tensor flat(void *data, const int64_t *count) {
  return (dc_tensor){.struct_size = sizeof(dc_tensor), .data = data, .shape = count, .ndim = 1, .dtype = DC_FLOAT32};
}

/* ---- MPI alone ---- */

static void finish(const bench *b, dc__mpi_handle request, int error) {
  int done = 0;
  while (error == 0 && done == 0) {
    error = b->own->mpi->calls->test(b->own->mpi, &request, &done);
  }
  if (error != 0) {
    fprintf(stderr, "MPI fails (%d)\n", error);
    exit(1);
  }
}

static void alone_gather(const bench *b) {
  dc__mpi_handle request = {.pointer = NULL};
  memcpy((char *)b->whole + b->at[b->comm->rank], b->part, (size_t)b->counts[0]);
  int error = b->own->mpi->calls->iallgatherv(b->own->mpi, b->whole, b->counts, b->at, b->own->comm, &request);
  finish(b, request, error);
}

static void alone_reduce(const bench *b) {
  dc__mpi_handle request = {.pointer = NULL};
  const void *sources[DC__COMM_MAX_WORLD];
  int error = b->own->mpi->calls->ialltoallv(b->own->mpi, b->whole, b->counts, b->at, b->received, b->counts, b->at,
                                             b->own->comm, &request);
  finish(b, request, error);
  for (int32_t r = 0; r < b->comm->world; r++) {
    sources[r] = b->received + r * b->shard;
  }
  dc__reduce(&(dc__reduction){.dst = b->part,
                              .src = sources,
                              .count = b->shard,
                              .dst_dtype = DC_FLOAT32,
                              .src_dtype = DC_FLOAT32,
                              .n = b->comm->world});
}

/* ---- libdc ---- */

static void libdc_gather(const bench *b) {
  int64_t total = b->shard * b->comm->world;
  const dc_tensor from = flat(b->part, &b->shard);
  dc_tensor to = flat(b->whole, &total);
  must(dc_comm_all_gather(b->comm, &from, &to, NULL, NULL));
}

static void libdc_reduce(const bench *b) {
  int64_t total = b->shard * b->comm->world;
  const dc_tensor from = flat(b->whole, &total);
  dc_tensor to = flat(b->part, &b->shard);
  must(dc_comm_reduce_scatter(b->comm, &from, &to, NULL, DC_SUM, NULL));
}

/* ---- measurement ---- */

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values, int count) {
  qsort(values, (size_t)count, sizeof *values, by_value);
  return values[count / 2];
}

static double time_once(const bench *b, bench_fn fn) {
  must(dc_comm_barrier(b->comm));
  int64_t begun = dc__now_ns();
  fn(b);
  return (double)(dc__now_ns() - begun) / 1e3;
}

static void compare(const bench *b, const char *name, bench_fn alone, bench_fn libdc, int rounds) {
  static double us[2][MOST_ROUNDS], ratios[MOST_ROUNDS];
  for (int i = -2; i < rounds; i++) {
    bool libdc_first = i % 2 != 0;
    double first = time_once(b, libdc_first ? libdc : alone), second = time_once(b, libdc_first ? alone : libdc);
    if (i >= 0) {
      us[LIBDC][i] = libdc_first ? first : second;
      us[ALONE][i] = libdc_first ? second : first;
      ratios[i] = us[ALONE][i] / us[LIBDC][i];
    }
  }
  if (b->comm->rank == 0) {
    double ratio = median(ratios, rounds), mpi_us = median(us[ALONE], rounds), libdc_us = median(us[LIBDC], rounds);
    printf("| %s | %" PRId64 " KiB | %.1f | %.1f | %.2f |\n", name, b->shard * b->comm->world * 4 / 1024, mpi_us,
           libdc_us, ratio);
    fflush(stdout);
  }
}

static float *alloc_floats(int64_t count) {
  float *values = malloc((size_t)count * sizeof *values);
  for (int64_t i = 0; values != NULL && i < count; i++) {
    values[i] = (float)i;
  }
  return values != NULL ? values : (exit(1), NULL);
}

static void bench_size(dc_comm *comm, int64_t kib, int rounds) {
  bench b = {.comm = comm, .own = (dc__mpi *)comm, .shard = kib * 256 / comm->world};
  int64_t total = b.shard * comm->world;
  b.part = alloc_floats(b.shard);
  b.whole = alloc_floats(total);
  b.received = alloc_floats(total);
  for (int32_t r = 0; r < comm->world; r++) {
    b.counts[r] = (int)(b.shard * 4);
    b.at[r] = (int)(r * b.shard * 4);
  }
  compare(&b, "all-gather", alone_gather, libdc_gather, rounds);
  compare(&b, "reduce-scatter", alone_reduce, libdc_reduce, rounds);
  free(b.part);
  free(b.whole);
  free(b.received);
}

int main(int argc, char **argv) {
  int rounds = argc > 1 ? atoi(argv[1]) : 20;
  const char *version;
  dc_comm *comm;
  rounds = rounds < 1 ? 1 : rounds > MOST_ROUNDS ? MOST_ROUNDS : rounds;
  must(dc_comm_create_mpi(NULL, &comm));
  must(dc_mpi_get_version(&version));
  if (comm->rank == 0) {
    printf(
        "%s, %d ranks, %d rounds\n\n| collective | tensor | MPI alone, us | libdc, us | ratio "
        "|\n|---|---|---|---|---|\n",
        version, comm->world, rounds);
  }
  for (int64_t kib = 16; kib <= 4096; kib *= 16) {
    bench_size(comm, kib, rounds);
  }
  bench_size(comm, 65536, rounds);
  dc_comm_destroy(comm);
  return 0;
}
