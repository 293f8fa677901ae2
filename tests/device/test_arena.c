/* The arena: reuse, merging, blocks that retire behind events, and no growth in a steady state. */
#include "arena_test.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

/* ---- blocks ---- */

static void test_reuse_and_sizes(void **state) {
  fixture *f = *state;
  assert_int_equal(stats_of(f).chunk_bytes, 0);
  void *a = arena_alloc(f, 1000);
  void *b = arena_alloc(f, 0);
  void *c = arena_alloc(f, 256);
  assert_ptr_not_equal(a, b);
  assert_ptr_not_equal(b, c);
  assert_int_equal(stats_of(f).used_bytes, 1024 + 256 + 256);
  assert_int_equal(stats_of(f).chunk_bytes, 4 * MIB);
  arena_release(f, a);
  assert_ptr_equal(arena_alloc(f, 1024), a);
  void *large = arena_alloc(f, 5 * MIB + 1); /* has a chunk of its own, of whole huge pages */
  assert_int_equal(stats_of(f).chunk_bytes, 10 * MIB);
  assert_int_equal(stats_of(f).chunk_allocations, 2);
  arena_release(f, large);
  arena_release(f, a);
  arena_release(f, b);
  arena_release(f, c);
  assert_int_equal(stats_of(f).used_bytes, 0);
  assert_ptr_equal(arena_alloc(f, 6 * MIB), large);
  arena_release(f, large);
  assert_int_equal(f->device->allocations, 2);
}

static void test_best_fit(void **state) {
  fixture *f = *state;
  const size_t sizes[] = {48 * KIB, 256, 40 * KIB, 256, 44 * KIB, 256};
  void *ptr[DC__COUNT(sizes)];
  for (size_t i = 0; i < DC__COUNT(sizes); i++) {
    ptr[i] = arena_alloc(f, sizes[i]);
  }
  arena_release(f, ptr[0]);
  arena_release(f, ptr[2]);
  arena_release(f, ptr[4]);
  assert_ptr_equal(arena_alloc(f, 41 * KIB), ptr[4]); /* best fit among 48, 40 and 44 KiB */
  assert_ptr_equal(arena_alloc(f, 40 * KIB), ptr[2]);
  assert_ptr_equal(arena_alloc(f, 41 * KIB), ptr[0]);
}

static void test_neighbours_merge(void **state) {
  fixture *f = *state;
  static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (size_t i = 0; i < DC__COUNT(orders); i++) {
    void *ptr[4];
    for (int j = 0; j < 4; j++) {
      ptr[j] = arena_alloc(f, MIB);
    }
    for (int j = 0; j < 3; j++) {
      arena_release(f, ptr[orders[i][j]]);
    }
    void *whole = arena_alloc(f, 3 * MIB);
    assert_ptr_equal(whole, ptr[0]);
    arena_release(f, whole);
    arena_release(f, ptr[3]);
  }
  assert_int_equal(stats_of(f).chunk_allocations, 1);
}

static void test_unknown_pointers_are_ignored(void **state) {
  fixture *f = *state;
  void *a = arena_alloc(f, 256);
  arena_release(f, NULL);
  arena_release(f, &f);
  arena_release(f, a);
  arena_release(f, a);
  assert_int_equal(stats_of(f).used_bytes, 0);
  void *none = NULL;
  assert_int_equal(dc__arena_alloc(f->arena, NULL, SIZE_MAX, &none), DC_E_NO_MEMORY);
  assert_null(none);
}

#if defined(__SANITIZE_ADDRESS__) /* other builds poison nothing */
static void test_freed_blocks_are_poisoned(void **state) {
  fixture *f = *state;
  unsigned char *a = arena_alloc(f, 1000);
  unsigned char *b = arena_alloc(f, 1000);
  assert_false(__asan_address_is_poisoned(a + 999));
  assert_true(__asan_address_is_poisoned(a + 1000)); /* the gap between two blocks */
  record_pending(f, f->event);
  dc__arena_free(f->arena, a, f->event, NULL);
  arena_release(f, b);
  assert_false(__asan_address_is_poisoned(a)); /* queued work still uses it */
  assert_true(__asan_address_is_poisoned(b));
  atomic_store(&f->open, true);
  dc__arena_forget_event(f->arena, f->event);
  assert_true(__asan_address_is_poisoned(a));
}
#endif

static void test_no_growth(void **state) {
  fixture *f = *state;
  enum { LIVE = 64, LIMIT = 8 * MIB };
  void *ptr[LIVE] = {NULL};
  size_t bytes[LIVE] = {0};
  size_t live = 0;
  uint32_t seed = 12345;
  int64_t chunks_after_warm_up = 0;
  for (int i = 0; i < 20000; i++) {
    seed = seed * 1664525u + 1013904223u;
    size_t slot = seed >> 26;
    if (ptr[slot] != NULL) {
      unsigned char *p = ptr[slot];
      assert_true(p[0] == slot && p[bytes[slot] - 1] == slot); /* no other user wrote to the block */
      arena_release(f, p);
      live -= bytes[slot];
      ptr[slot] = NULL;
    } else {
      size_t want = 1 + (seed >> 4) % (256u * KIB);
      if (live + want > LIMIT) {
        continue;
      }
      assert_int_equal(dc__arena_alloc(f->arena, NULL, want, &ptr[slot]), DC_OK);
      memset(ptr[slot], 0, 1);
      ((unsigned char *)ptr[slot])[0] = (unsigned char)slot;
      ((unsigned char *)ptr[slot])[want - 1] = (unsigned char)slot;
      bytes[slot] = want;
      live += want;
    }
    if (i == 10000) {
      chunks_after_warm_up = stats_of(f).chunk_allocations;
    }
  }
  assert_int_equal(stats_of(f).chunk_allocations, chunks_after_warm_up);
  assert_true(stats_of(f).chunk_bytes <= 2 * LIMIT);
  for (int i = 0; i < LIVE; i++) {
    arena_release(f, ptr[i]);
  }
  assert_int_equal(stats_of(f).used_bytes, 0);
}

static void test_many_blocks(void **state) {
  fixture *f = *state;
  enum { COUNT = 5000 };
  void **ptr = calloc(COUNT, sizeof(*ptr));
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < COUNT; i++) {
      ptr[i] = arena_alloc(f, 256);
    }
    for (int i = 0; i < COUNT; i++) {
      arena_release(f, ptr[(i * 7) % COUNT]);
    }
  }
  assert_int_equal(stats_of(f).used_bytes, 0);
  assert_int_equal(stats_of(f).chunk_allocations, 1);
  free(ptr);
}

static void test_trim(void **state) {
  fixture *f = *state;
  void *keep = arena_alloc(f, 3 * MIB);
  void *a = arena_alloc(f, 6 * MIB);
  void *b = arena_alloc(f, 6 * MIB);
  arena_release(f, a);
  arena_release(f, b);
  dc__arena_trim(f->arena);
  assert_int_equal(stats_of(f).chunk_bytes, 4 * MIB);
  assert_int_equal(f->live, 1);
  arena_release(f, keep);
  dc__arena_trim(f->arena);
  assert_int_equal(stats_of(f).chunk_bytes, 0);
  assert_int_equal(f->live, 0);
  arena_release(f, arena_alloc(f, MIB));
}

/* ---- retirement ---- */

static void test_retired_blocks_wait(void **state) {
  fixture *f = *state;
  void *a = arena_alloc(f, 4 * MIB);
  record_pending(f, f->event);
  dc__arena_free(f->arena, a, f->other, f->event); /* the event on other has passed */
  assert_int_equal(stats_of(f).used_bytes, 4 * MIB);
  void *b = arena_alloc(f, 4 * MIB); /* does not wait, but takes more memory */
  assert_ptr_not_equal(a, b);
  atomic_store(&f->open, true);
  assert_int_equal(dc_event_wait(f->event, NULL, 0), DC_OK);
  assert_ptr_equal(arena_alloc(f, 4 * MIB), a);
  assert_int_equal(stats_of(f).chunk_allocations, 2);
}

/* A stream gets memory that is still in use, and waits for it. Before the arena grows, the stream gets all such memory,
 * including the rest of a block, and the best fit first. */
static void test_a_stream_waits_for_memory(void **state) {
  fixture *f = *state;
  dc_stream *stream;
  void *b, *rest, *more;
  int32_t passed = 1;
  assert_int_equal(dc_stream_create(f->device, &stream), DC_OK);
  void *large = arena_alloc(f, 3 * MIB);
  void *small = arena_alloc(f, MIB);
  record_pending(f, f->event);
  dc__arena_free(f->arena, large, f->event, NULL);
  dc__arena_free(f->arena, small, f->event, NULL);
  assert_int_equal(dc__arena_alloc(f->arena, stream, MIB, &b), DC_OK);
  assert_ptr_equal(b, small);
  assert_int_equal(dc__arena_alloc(f->arena, stream, 2 * MIB, &b), DC_OK);
  assert_ptr_equal(b, large);
  assert_int_equal(dc__arena_alloc(f->arena, stream, MIB, &rest), DC_OK);
  assert_ptr_equal(rest, (char *)large + 2 * MIB);
  assert_int_equal(stats_of(f).used_bytes, 4 * MIB);
  assert_int_equal(stats_of(f).peak_bytes, 4 * MIB);
  assert_int_equal(stats_of(f).chunk_allocations, 1);
  assert_int_equal(dc_event_record(f->other, stream), DC_OK);
  assert_int_equal(dc_event_query(f->other, &passed), DC_OK);
  assert_int_equal(passed, 0);
  assert_int_equal(dc__arena_alloc(f->arena, stream, MIB, &more), DC_OK);
  assert_int_equal(stats_of(f).chunk_allocations, 2);
  atomic_store(&f->open, true);
  assert_int_equal(dc_event_wait(f->other, NULL, 0), DC_OK);
  arena_release(f, small);
  arena_release(f, large);
  arena_release(f, rest);
  arena_release(f, more);
  dc__arena_reset_peak(f->arena);
  assert_int_equal(stats_of(f).peak_bytes, 0);
  arena_alloc(f, 4 * MIB);
  arena_alloc(f, 4 * MIB);
  assert_int_equal(stats_of(f).chunk_allocations, 2); /* the blocks were merged */
  assert_int_equal(stats_of(f).peak_bytes, 8 * MIB);
  dc_stream_destroy(stream);
}

static void test_retired_blocks_merge(void **state) {
  fixture *f = *state;
  void *a = arena_alloc(f, 2 * MIB);
  void *b = arena_alloc(f, 2 * MIB);
  record_pending(f, f->event);
  dc__arena_free(f->arena, a, f->event, NULL);
  arena_release(f, b); /* its neighbour is not free yet, so they are not merged */
  atomic_store(&f->open, true);
  assert_int_equal(dc_event_wait(f->event, NULL, 0), DC_OK);
  assert_ptr_equal(arena_alloc(f, 4 * MIB), a);
  assert_int_equal(stats_of(f).chunk_allocations, 1);
}

static void *open_soon(void *user) {
  sleep_ms(10);
  atomic_store(&((fixture *)user)->open, true);
  return NULL;
}

static void test_forget_event(void **state) {
  fixture *f = *state;
  dc_event *event = NULL;
  assert_int_equal(dc_event_create(f->device, &event), DC_OK);
  record_pending(f, event);
  void *a = arena_alloc(f, MIB);
  dc__arena_free(f->arena, a, event, event);
  pthread_t thread;
  pthread_create(&thread, NULL, open_soon, f);
  dc__arena_forget_event(f->arena, event);
  assert_true(atomic_load(&f->open));
  dc_event_destroy(event);
  assert_int_equal(stats_of(f).used_bytes, 0);
  assert_ptr_equal(arena_alloc(f, MIB), a);
  pthread_join(thread, NULL);
}

static void test_release_waits_for_retired(void **state) {
  fixture *f = *state;
  dc__arena *arena = NULL;
  void *ptr = NULL;
  assert_int_equal(dc__arena_create(f->device, NULL, &arena), DC_OK);
  assert_int_equal(dc__arena_alloc(arena, NULL, 10, &ptr), DC_OK);
  record_pending(f, f->event);
  dc__stream_zero(f->stream, ptr, 10);
  dc_event_record(f->event, f->stream);
  dc__arena_free(arena, ptr, f->event, NULL);
  pthread_t thread;
  pthread_create(&thread, NULL, open_soon, f);
  dc__arena_release(arena);
  assert_true(atomic_load(&f->open));
  pthread_join(thread, NULL);
}

/* ---- another source ---- */

typedef struct pool {
  int64_t left;
  int chunks;
  bool done;
} pool;

static dc_status pool_alloc(void *user, size_t bytes, void **ptr) {
  pool *p = user;
  if ((int64_t)bytes > p->left) {
    return dc__fail(DC_E_NO_MEMORY, "pool: %zu bytes asked for", bytes);
  }
  p->left -= (int64_t)bytes;
  p->chunks++;
  *ptr = aligned_alloc(256, bytes);
  return DC_OK;
}

static void pool_free(void *user, void *ptr, size_t bytes) {
  pool *p = user;
  assert_false(p->done);
  p->left += (int64_t)bytes;
  p->chunks--;
  free(ptr);
}

static void pool_done(void *user) {
  ((pool *)user)->done = true;
}

static void test_source(void **state) {
  fixture *f = *state;
  pool p = {.left = 10 * MIB};
  dc__arena_source source = {.alloc = pool_alloc, .free = pool_free, .done = pool_done, .user = &p};
  dc__arena *arena = NULL;
  assert_int_equal(dc__arena_create(f->device, &source, &arena), DC_OK);
  void *a = NULL;
  void *b = NULL;
  void *none = NULL;
  assert_int_equal(dc__arena_alloc(arena, NULL, 4 * MIB, &a), DC_OK);
  assert_int_equal(dc__arena_alloc(arena, NULL, 4 * MIB, &b), DC_OK);
  assert_int_equal(dc__arena_alloc(arena, NULL, MIB, &none), DC_E_NO_MEMORY);
  assert_string_equal(dc_last_error(), "pool: 4194304 bytes asked for");
  assert_null(none);
  dc__arena_free(arena, a, NULL, NULL);
  assert_int_equal(dc__arena_alloc(arena, NULL, 6 * MIB, &a), DC_OK); /* idle chunks are freed to make space */
  assert_int_equal(p.chunks, 2);
  assert_int_equal(f->device->allocations, 0);
  dc__arena_release(arena);
  assert_true(p.done);
  assert_int_equal(p.chunks, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    TEST(test_reuse_and_sizes),
    TEST(test_best_fit),
    TEST(test_neighbours_merge),
    TEST(test_unknown_pointers_are_ignored),
#if defined(__SANITIZE_ADDRESS__)
    TEST(test_freed_blocks_are_poisoned),
#endif
    TEST(test_no_growth),
    TEST(test_many_blocks),
    TEST(test_trim),
    TEST(test_retired_blocks_wait),
    TEST(test_a_stream_waits_for_memory),
    TEST(test_retired_blocks_merge),
    TEST(test_forget_event),
    TEST(test_release_waits_for_retired),
    TEST(test_source),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
