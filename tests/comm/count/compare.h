/* Compares the statistics of a rank that computes with those of the same rank on the counting device. */
#ifndef TESTS_COMPARE_H
#define TESTS_COMPARE_H

#include "schedule.h"

static const char *const stats_names[] = {
    "gathered_bytes",    "gathered_peak_bytes", "bucket_bytes", "offload_bytes",    "reload_bytes",
    "arena_bytes",       "allocations",         "gathers",      "gather_hits",      "gather_wire_bytes",
    "reductions",        "reduce_wire_bytes",   "flushes",      "copied_d2h_bytes", "copied_h2d_bytes",
    "registered_params", "registered_graphs"};
enum { STATS = sizeof stats_names / sizeof stats_names[0], CHOICES = 24 };

/* One of CHOICES for each stage and number of replicas: offload, prefetch, type and bucket. */
static inline schedule schedule_of(int32_t stage, int32_t replicas, int32_t choice) {
  return (schedule){.stage = stage,
                    .replicas = replicas,
                    .offload = stage == 3 ? choice % 3 : 0,
                    .prefetch = choice / 3 % 2 == 1,
                    .dtype = choice / 6 % 2 == 0 ? DC_BFLOAT16 : DC_FLOAT32};
}

static inline setup setup_of(const schedule *s, int32_t world, int32_t choice) {
  return (setup){.world = world,
                 .config = {.struct_size = sizeof(dc_config), .replicas = s->replicas},
                 .bucket = choice / (CHOICES / 2) == 0 ? 1 << 20 : 1024};
}

/* Runs the schedule on the counting device, as one rank of a group whose other ranks do not exist. heap: 1 if ranks
 * read each other's memory. */
static inline void count_rank(schedule_job *job, setup s, int32_t number, int32_t heap) {
  rank r = {.rank = number, .world = s.world, .user = job};
  assert_int_equal(dc_device_open("count", NULL, &r.device), DC_OK);
  assert_int_equal(dc_count_set(r.device, "ranks_per_node", test_node_ranks()), DC_OK);
  assert_int_equal(dc_comm_create_count(r.device, number, s.world, heap, &r.comm), DC_OK);
  assert_int_equal(dc_context_create(r.device, NULL, &r.ctx), DC_OK);
  assert_int_equal(dc_init(r.ctx, r.comm, &s.config, s.bucket), DC_OK);
  schedule_run(&r);
  assert_string_equal(r.failure, "");
  dc_context_destroy(r.ctx);
  dc_device_memory left = DC_DEVICE_MEMORY_INIT;
  assert_int_equal(dc_device_get_memory(r.device, &left), DC_OK);
  assert_int_equal(left.reserved_bytes, 0);
  dc_comm_destroy(r.comm);
  dc_device_destroy(r.device);
}

/* Prints a line for each rank if COUNT_TABLE is set. */
static inline void compare_print(const schedule *s, int32_t world, int32_t number, const dc_memory_stats *counted,
                                 const char *transport, int64_t difference) {
  if (getenv("COUNT_TABLE") != NULL) {
    printf("| %s | %d | %d of %d | %d | %d | %s | %d | %lld | %lld | %lld | %lld |\n", transport, s->stage, number,
           world, s->replicas, s->offload, dc_dtype_name(s->dtype), s->prefetch,
           (long long)counted->gathered_peak_bytes, (long long)counted->arena_bytes,
           (long long)(counted->gather_wire_bytes + counted->reduce_wire_bytes), (long long)difference);
    fflush(stdout);
  }
}

/* Returns whether both statistics are the same. */
static inline bool compare_stats(const schedule_job *computed, const schedule_job *counted, int32_t world,
                                 int32_t number, const char *transport) {
  const schedule *s = &computed->s;
  const char *first = NULL;
  int64_t difference = 0;
  for (int step = 0; step < SCHEDULE_STEPS; step++) {
    const int64_t *a = &computed->results[number].steps[step].gathered_bytes;
    const int64_t *b = &counted->results[number].steps[step].gathered_bytes;
    for (size_t i = 0; i < STATS; i++) {
      first = first == NULL && a[i] != b[i] ? stats_names[i] : first;
      difference += llabs(a[i] - b[i]);
    }
  }
  compare_print(s, world, number, &counted->results[number].steps[SCHEDULE_STEPS - 1], transport, difference);
  if (first != NULL) {
    printf("%s, stage %d, replicas %d, offload %d, %s, prefetch %d, rank %d of %d: %s and others differ by %lld\n",
           transport, s->stage, s->replicas, s->offload, dc_dtype_name(s->dtype), s->prefetch, number, world, first,
           (long long)difference);
  }
  return first == NULL;
}

#endif
