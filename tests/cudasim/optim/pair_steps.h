/* Steps for the tests of optimizers on the device, on one side, for any parameters. Included by optim_pair.h and
 * kfac_pair.h, which define PARAMS, MOST and device_optimizer. */
#ifndef TESTS_PAIR_STEPS_H
#define TESTS_PAIR_STEPS_H

static inline void move(const device_optimizer *s, void *to, const void *from, size_t bytes) {
  dc__stream_copy(s->device->internal_stream, to, from, bytes);
  dc__device_sync_internal(s->device, NULL);
}

static inline char *saved(const device_optimizer *s, size_t *bytes) {
  int64_t size;
  assert_int_equal(dc_optimizer_get_save_bytes(s->optimizer, &size), DC_OK);
  *bytes = (size_t)size;
  char *memory = test_malloc(*bytes);
  assert_int_equal(dc_optimizer_save(s->optimizer, memory, size), DC_OK);
  return memory;
}

/* Checks that the state is byte for byte as before, and frees `before`. */
static inline void unchanged(const device_optimizer *s, char *before, size_t bytes) {
  size_t again;
  char *after = saved(s, &again);
  assert_int_equal(again, bytes);
  assert_memory_equal(before, after, bytes);
  test_free(before);
  test_free(after);
}

/* Each side continues with the other's state. */
static inline void swap_states(device_optimizer *pair) {
  size_t bytes[2];
  char *states[2] = {saved(&pair[0], &bytes[0]), saved(&pair[1], &bytes[1])};
  assert_int_equal(bytes[0], bytes[1]);
  for (int k = 0; k < 2; k++) {
    size_t again;
    assert_int_equal(dc_optimizer_load(pair[k].optimizer, states[1 - k], (int64_t)bytes[0]), DC_OK);
    char *memory = saved(&pair[k], &again);
    assert_memory_equal(memory, states[1 - k], bytes[0]);
    test_free(memory);
  }
  test_free(states[0]);
  test_free(states[1]);
}

/* gate: tolerance relative to the largest value; 0: the bits must be the same. */
static inline void same(const char *what, int p, const void *cpu, const void *cuda, int64_t count, int32_t dtype,
                        double gate) {
  double a[MOST], b[MOST], largest = 0, gap = 0;
  assert_true(count <= MOST);
  if (gate == 0) {
    if (count > 0 && memcmp(cpu, cuda, (size_t)count * dc_dtype_size(dtype)) != 0) {
      fail_msg("%s of parameter %d has other bits", what, p);
    }
    return;
  }
  dc__cast(a, DC_FLOAT64, cpu, dtype, count);
  dc__cast(b, DC_FLOAT64, cuda, dtype, count);
  for (int64_t i = 0; i < count; i++) {
    largest = a[i] > largest ? a[i] : -a[i] > largest ? -a[i] : largest;
    gap = a[i] - b[i] > gap ? a[i] - b[i] : b[i] - a[i] > gap ? b[i] - a[i] : gap;
  }
  if (!(gap <= gate * largest)) {
    fail_msg("%s of parameter %d is %g off, of %g", what, p, gap, largest);
  }
}

static inline int nothing_is_left(void **state) {
  (void)state;
#ifndef ON_CARD
  assert_int_equal(cudasim_live(), 0);
#endif
  return 0;
}

#define TEST(name) cmocka_unit_test_teardown(name, nothing_is_left)

#endif
