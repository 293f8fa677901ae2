/* Buffers: reference-counted blocks of an arena, revoked behind events, and shared by many threads. */
#include "arena_test.h"

static dc_buffer *make_buffer(fixture *f, size_t bytes) {
  dc_buffer *buffer = NULL;
  assert_int_equal(dc__buffer_create(f->arena, arena_alloc(f, bytes), bytes, &buffer), DC_OK);
  return buffer;
}

static void test_buffer(void **state) {
  fixture *f = *state;
  dc_buffer *buffer = make_buffer(f, 1000);
  void *data = dc_buffer_data(buffer);
  assert_int_equal(dc_buffer_bytes(buffer), 1000);
  assert_ptr_equal(dc_buffer_retain(buffer), buffer);
  dc_buffer_release(buffer);
  assert_ptr_equal(dc_buffer_data(buffer), data);
  assert_int_equal(stats_of(f).used_bytes, 1024);

  dc__buffer_revoke(buffer, NULL, NULL);
  dc__buffer_revoke(buffer, NULL, NULL);
  assert_null(dc_buffer_data(buffer));
  assert_int_equal(dc_buffer_bytes(buffer), 0);
  assert_int_equal(stats_of(f).used_bytes, 0);
  void *again = arena_alloc(f, 1000);
  assert_ptr_equal(again, data);
  dc_buffer_release(buffer); /* must not free the new owner's block */
  assert_int_equal(stats_of(f).used_bytes, 1024);
  arena_release(f, again);

  dc_buffer *empty = make_buffer(f, 0);
  assert_non_null(dc_buffer_data(empty));
  assert_int_equal(dc_buffer_bytes(empty), 0);
  dc_buffer_release(empty);

  assert_null(dc_buffer_retain(NULL));
  assert_null(dc_buffer_data(NULL));
  assert_int_equal(dc_buffer_bytes(NULL), 0);
  dc_buffer_release(NULL);
}

static void test_revoke_behind_an_event(void **state) {
  fixture *f = *state;
  dc_buffer *buffer = make_buffer(f, 4 * MIB);
  void *data = dc_buffer_data(buffer);
  record_pending(f, f->event);
  dc__buffer_revoke(buffer, f->event, NULL);
  assert_null(dc_buffer_data(buffer));
  dc_buffer_release(buffer);
  assert_ptr_not_equal(arena_alloc(f, 4 * MIB), data);
  atomic_store(&f->open, true);
  assert_int_equal(dc_event_wait(f->event, NULL, 0), DC_OK);
  assert_ptr_equal(arena_alloc(f, 4 * MIB), data);
}

static void test_buffer_outlives_everything(void **state) {
  fixture *f = *state;
  dc__arena *arena = NULL;
  void *ptr = NULL;
  dc_buffer *buffer = NULL;
  assert_int_equal(dc__arena_create(f->device, NULL, &arena), DC_OK);
  assert_int_equal(dc__arena_alloc(arena, NULL, 100, &ptr), DC_OK);
  assert_int_equal(dc__buffer_create(arena, ptr, 100, &buffer), DC_OK);
  dc__arena_release(arena);
  memset(dc_buffer_data(buffer), 5, 100);
  assert_int_equal(f->live, 1);
  dc_buffer_release(buffer);
  assert_int_equal(f->live, 0);
}

typedef struct sharer {
  fixture *f;
  dc_buffer *shared;
  int index;
} sharer;

static void *share(void *arg) {
  sharer *s = arg;
  for (int i = 0; i < 2000; i++) {
    dc_buffer_release(dc_buffer_retain(s->shared));
    dc_buffer *own = NULL;
    void *ptr = NULL;
    size_t bytes = (size_t)(1 + (i * 37 + s->index * 101) % 5000);
    dc__arena_alloc(s->f->arena, NULL, bytes, &ptr);
    dc__buffer_create(s->f->arena, ptr, bytes, &own);
    memset(dc_buffer_data(own), s->index, bytes);
    dc_event_record(s->f->event, s->f->stream);
    if (i % 2 == 0) {
      dc__buffer_revoke(own, s->f->event, NULL);
    }
    if (i == 1000 && s->index == 0) {
      dc__buffer_revoke(s->shared, NULL, NULL);
    }
    dc_buffer_release(own);
  }
  dc_buffer_release(s->shared);
  return NULL;
}

static void test_threads(void **state) {
  fixture *f = *state;
  dc_buffer *shared = make_buffer(f, 100);
  pthread_t threads[4];
  sharer sharers[4];
  for (int i = 0; i < 4; i++) {
    sharers[i] = (sharer){f, dc_buffer_retain(shared), i};
    pthread_create(&threads[i], NULL, share, &sharers[i]);
  }
  dc_buffer_release(shared);
  for (int i = 0; i < 4; i++) {
    pthread_join(threads[i], NULL);
  }
  dc__arena_forget_event(f->arena, f->event);
  assert_int_equal(stats_of(f).used_bytes, 0);
  assert_int_equal(f->device->allocations, 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_buffer),
      TEST(test_revoke_behind_an_event),
      TEST(test_buffer_outlives_everything),
      TEST(test_threads),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
