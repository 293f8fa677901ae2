/* Ranks that each have a part of every parameter, on devices some of which are shared, must have the bits of one rank.
 * Included after optim_pair.h or kfac_pair.h; on the simulated driver only. */
#ifndef TESTS_DEVICE_RANKS_H
#define TESTS_DEVICE_RANKS_H

typedef struct rank_of rank_of;
struct rank_of {
  pthread_t thread;
  dc_comm *comm;
  dc_status (*train)(rank_of *self); /* makes the optimizer and takes STEPS steps */
  const void *job;                   /* data for train() */
  device_optimizer s;
  char *failed;
};

static inline void *run_one(void *arg) {
  rank_of *r = arg;
  if (r->train(r) != DC_OK) {
    r->failed = strdup(dc_last_error());
    dc_comm_abort(r->comm, "failed");
  }
  dc_optimizer_destroy(r->s.optimizer);
  r->s.optimizer = NULL;
  dc_comm_destroy(r->comm);
  return NULL;
}

/* Compares a rank's part of the weights with those of a single rank, which stores them in `one`. */
static inline void compare_part(const device_optimizer *s, int32_t world, int32_t at, char one[PARAMS][4 * MOST]) {
  char part[4 * MOST];
  for (int p = 0; p < PARAMS; p++) {
    const size_t size = dc_dtype_size(shapes[p].dtype), bytes = (size_t)s->count[p] * size;
    move(s, world == 1 ? one[p] : part, s->weights[p], bytes);
    if (world > 1 && memcmp(one[p] + (size_t)s->offset[p] * size, part, bytes) != 0) {
      fail_msg("parameter %d of rank %d of %d has other bits", p, at, world);
    }
  }
}

static inline void ranks_agree(dc_status (*train)(rank_of *self), const void *job) {
  static rank_of ranks[3];
  static char one[PARAMS][4 * MOST];
  for (int32_t world = 1; world <= 3; world++) {
    dc_comm *comms[3];
    assert_int_equal(dc_comm_create_threads(world, NULL, comms), DC_OK);
    for (int32_t r = 0; r < world; r++) {
      ranks[r] = (rank_of){.comm = comms[r], .train = train, .job = job};
      open_optimizer(&ranks[r].s, "cuda");
      if (r == 2) { /* shares the first rank's device */
        dc_linalg_destroy(ranks[r].s.linalg);
        assert_int_equal(dc_linalg_create(ranks[0].s.device, NULL, &ranks[r].s.linalg), DC_OK);
      }
    }
    for (int32_t r = 0; r < world; r++) {
      assert_int_equal(pthread_create(&ranks[r].thread, NULL, run_one, &ranks[r]), 0);
    }
    for (int32_t r = 0; r < world; r++) {
      pthread_join(ranks[r].thread, NULL);
    }
    for (int32_t r = 0; r < world; r++) {
      if (ranks[r].failed != NULL) {
        fail_msg("rank %d of %d: %s", r, world, ranks[r].failed);
      }
      compare_part(&ranks[r].s, world, r, one);
    }
    for (int32_t r = world - 1; r >= 0; r--) {
      close_optimizer(&ranks[r].s);
    }
  }
}

#endif
