/* Bytes read and written per second by each kernel, on one core, at each instruction-set level, beside memcpy on as
 * much memory. One size is for the second-level cache, one beyond all caches unless the machine's are huge. It also
 * measures what the search for infinities costs copies, casts and sums. bench_kernels [MiB of the large size, 64 by
 * default [looks]]: with `looks` only the last. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dispatch.h"

enum { RANKS = 8, LEVELS = 3 };

typedef struct job {
  const char *name;
  void (*run)(const struct job *job, int64_t count);
  int32_t to;
  int32_t from;
  int32_t n; /* sources of a reduction */
  bool accumulate;
} job;

static char *arrays[RANKS + 1]; /* the last one is written */
static int64_t seen;            /* arrays that were not finite */

static void run_cast(const job *j, int64_t count) {
  dc__cast(arrays[RANKS], j->to, arrays[0], j->from, count);
}

static void run_accumulate(const job *j, int64_t count) {
  dc__accumulate(arrays[RANKS], j->to, arrays[0], j->from, count);
}

static void run_combine(const job *j, int64_t count) {
  seen += dc__combine(arrays[RANKS], j->to, arrays[0], j->from, count, j->accumulate) ? 0 : 1;
}

static void run_reduce(const job *j, int64_t count) {
  const void *src[RANKS];
  for (int32_t k = 0; k < RANKS; k++) {
    src[k] = arrays[k];
  }
  dc__reduce(&(dc__reduction){.dst = arrays[RANKS],
                              .src = src,
                              .count = count,
                              .dst_dtype = j->to,
                              .src_dtype = j->from,
                              .n = j->n,
                              .mean = true,
                              .accumulate = j->accumulate});
}

static void run_memcpy(const job *j, int64_t count) {
  (void)j;
  memcpy(arrays[RANKS], arrays[0], (size_t)count);
}

static void run_copy(const job *j, int64_t count) {
  (void)j;
  dc__copy(arrays[RANKS], arrays[0], (size_t)count);
}

static const job memcpy_job = {"memcpy", run_memcpy, DC_INT8, DC_INT8, 1, false};
static const job copy_job = {"copy", run_copy, DC_INT8, DC_INT8, 1, false};

static const job jobs[] = {
    {"cast f32 <- bf16", run_cast, DC_FLOAT32, DC_BFLOAT16, 1, false},
    {"cast f32 <- f16", run_cast, DC_FLOAT32, DC_FLOAT16, 1, false},
    {"cast bf16 <- f32", run_cast, DC_BFLOAT16, DC_FLOAT32, 1, false},
    {"cast f16 <- f32", run_cast, DC_FLOAT16, DC_FLOAT32, 1, false},
    {"cast f16 <- bf16", run_cast, DC_FLOAT16, DC_BFLOAT16, 1, false},
    {"cast bf16 <- f16", run_cast, DC_BFLOAT16, DC_FLOAT16, 1, false},
    {"accumulate f32 += f32", run_accumulate, DC_FLOAT32, DC_FLOAT32, 1, true},
    {"accumulate f32 += bf16", run_accumulate, DC_FLOAT32, DC_BFLOAT16, 1, true},
    {"accumulate bf16 += bf16", run_accumulate, DC_BFLOAT16, DC_BFLOAT16, 1, true},
    {"reduce f32 <- 2 f32", run_reduce, DC_FLOAT32, DC_FLOAT32, 2, false},
    {"reduce f32 <- 4 f32", run_reduce, DC_FLOAT32, DC_FLOAT32, 4, false},
    {"reduce f32 <- 8 f32", run_reduce, DC_FLOAT32, DC_FLOAT32, 8, false},
    {"reduce f32 <- 3 f32 (divides)", run_reduce, DC_FLOAT32, DC_FLOAT32, 3, false},
    {"reduce f32 += 2 f32", run_reduce, DC_FLOAT32, DC_FLOAT32, 2, true},
    {"reduce f32 <- 2 bf16", run_reduce, DC_FLOAT32, DC_BFLOAT16, 2, false},
    {"reduce bf16 <- 2 bf16", run_reduce, DC_BFLOAT16, DC_BFLOAT16, 2, false},
    {"reduce bf16 <- 8 bf16", run_reduce, DC_BFLOAT16, DC_BFLOAT16, 8, false},
    {"reduce bf16 += 2 bf16", run_reduce, DC_BFLOAT16, DC_BFLOAT16, 2, true},
    {"reduce f16 <- 2 f16", run_reduce, DC_FLOAT16, DC_FLOAT16, 2, false},
    {"reduce bf16 <- 2 f32 (tiles)", run_reduce, DC_BFLOAT16, DC_FLOAT32, 2, false},
    {"reduce f64 <- 2 f64 (tiles)", run_reduce, DC_FLOAT64, DC_FLOAT64, 2, false},
};

static int64_t bytes_of(const job *j) {
  int64_t to = (int64_t)dc_dtype_size(j->to);
  return j->n * (int64_t)dc_dtype_size(j->from) + to + (j->accumulate ? to : 0);
}

static int64_t spent(const job *j, int64_t count, int64_t repeats) {
  const int64_t begin = dc__now_ns();
  for (int64_t i = 0; i < repeats; i++) {
    j->run(j, count);
  }
  return dc__now_ns() - begin;
}

/* The time of a by that of b, each the best of 25 turns of at least a millisecond. */
static double compare(const job *a, const job *b, int64_t count) {
  int64_t repeats = 1, min_a = INT64_MAX, min_b = INT64_MAX;
  while (spent(b, count, repeats) < 1000000) {
    repeats *= 2;
  }
  for (int32_t turn = 0; turn < 25; turn++) {
    const int64_t time_a = spent(a, count, repeats), time_b = spent(b, count, repeats);
    min_a = time_a < min_a ? time_a : min_a;
    min_b = time_b < min_b ? time_b : min_b;
  }
  return (double)min_a / (double)min_b;
}

/* The best of five measurements of at least 20 ms each, in GB/s; count elements. */
static double measure(const job *j, int64_t count) {
  double best = 0;
  int64_t repeats = 1;
  for (int32_t round = 0; round < 5;) {
    int64_t begin = dc__now_ns();
    for (int64_t i = 0; i < repeats; i++) {
      j->run(j, count);
    }
    int64_t ns = dc__now_ns() - begin;
    if (ns < 20000000) {
      repeats *= 2;
      continue;
    }
    double rate = (double)(bytes_of(j) * count * repeats) / (double)ns;
    best = rate > best ? rate : best;
    round++;
  }
  return best;
}

/* The cost of a scan of stored values (combine.c): the nanoseconds of both, in turns, the best of many. */
static void looks(size_t total) {
  static const job with[] = {
      {"f32 = f32", run_combine, DC_FLOAT32, DC_FLOAT32, 1, false},
      {"bf16 = bf16", run_combine, DC_BFLOAT16, DC_BFLOAT16, 1, false},
      {"f16 = f16", run_combine, DC_FLOAT16, DC_FLOAT16, 1, false},
      {"f64 = f64", run_combine, DC_FLOAT64, DC_FLOAT64, 1, false},
      {"f16 = f32", run_combine, DC_FLOAT16, DC_FLOAT32, 1, false},
      {"bf16 = f32", run_combine, DC_BFLOAT16, DC_FLOAT32, 1, false},
      {"f32 = bf16", run_combine, DC_FLOAT32, DC_BFLOAT16, 1, false},
      {"f32 += f32", run_combine, DC_FLOAT32, DC_FLOAT32, 1, true},
      {"f16 += f16", run_combine, DC_FLOAT16, DC_FLOAT16, 1, true},
      {"bf16 += bf16", run_combine, DC_BFLOAT16, DC_BFLOAT16, 1, true},
      {"f32 += bf16", run_combine, DC_FLOAT32, DC_BFLOAT16, 1, true},
  };
  printf("\n%zu KiB read and written; time with a look for infinities and NaN, by that without\n%-32s", total >> 10,
         "");
  printf("%10s%10s%10s\n", "plain", "AVX2", "AVX-512");
  for (size_t k = 0; k < DC__COUNT(with); k++) {
    job without = with[k];
    without.run = without.accumulate ? run_accumulate : run_cast;
    const int64_t count = (int64_t)total / bytes_of(&without);
    printf("%-32s", with[k].name);
    for (int32_t level = 0; level < LEVELS; level++) {
      if (dc__kernels_limit(level) < level) {
        printf("%10s", "-");
        continue;
      }
      printf("%10.2f", compare(&with[k], &without, count));
      fflush(stdout);
    }
    printf("\n");
  }
}

/* `total` bytes are touched by each job. */
static void table(size_t total) {
  double reference = measure(&memcpy_job, (int64_t)total / 2);
  printf("\n%zu KiB read and written; memcpy %.1f GB/s\n%-32s", total >> 10, reference, "GB/s");
  printf("%10s%10s%10s%14s\n", "plain", "AVX2", "AVX-512", "best/memcpy");
  for (size_t k = 0; k < DC__COUNT(jobs); k++) {
    printf("%-32s", jobs[k].name);
    double best = 0;
    for (int32_t level = 0; level < LEVELS; level++) {
      if (dc__kernels_limit(level) < level) {
        printf("%10s", "-");
        continue;
      }
      double rate = measure(&jobs[k], (int64_t)total / bytes_of(&jobs[k]));
      best = rate > best ? rate : best;
      printf("%10.1f", rate);
      fflush(stdout);
    }
    printf("%14.2f\n", best / reference);
  }
}

static void copies(size_t most) {
  printf("\ncopies, GB/s read and written\n%12s%10s%10s%10s%10s\n", "KiB", "memcpy", "plain", "AVX2", "AVX-512");
  for (size_t bytes = (size_t)128 << 10; bytes <= most; bytes *= 2) {
    printf("%12zu%10.1f", bytes >> 10, measure(&memcpy_job, (int64_t)bytes));
    for (int32_t level = 0; level < LEVELS; level++) {
      if (dc__kernels_limit(level) < level) {
        printf("%10s", "-");
      } else {
        printf("%10.1f", measure(&copy_job, (int64_t)bytes));
      }
    }
    printf("\n");
  }
}

int main(int argc, char **argv) {
  long mib = argc > 1 ? strtol(argv[1], NULL, 10) : 64;
  if (mib < 8 || mib > 4096) { /* looks() needs 8 */
    fprintf(stderr, "bench_kernels: %s MiB, must be 8 to 4096\n", argv[1]);
    return 2;
  }
  size_t large = (size_t)mib << 20;
  for (int32_t k = 0; k <= RANKS; k++) {
    arrays[k] = aligned_alloc(4096, large);
    if (arrays[k] == NULL) {
      fprintf(stderr, "bench_kernels: no memory\n");
      return 1;
    }
    memset(arrays[k], 0, large);
  }
  if (argc < 3 || strcmp(argv[2], "looks") != 0) {
    copies(large);
    table((size_t)512 << 10);
    table(large);
  }
  looks((size_t)64 << 10);
  looks((size_t)512 << 10);
  looks((size_t)8 << 20);
  looks(large);
  for (int32_t k = 0; k <= RANKS; k++) {
    free(arrays[k]);
  }
  return 0;
}
