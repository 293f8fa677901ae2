/* The pool of threads: which threads work, which contexts share a pool, and on which processors the threads run. */
#define _GNU_SOURCE /* sched_getaffinity */
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <time.h>

#include <cmocka.h>

#include "kernels/kernels.h"

static atomic_int counts[1000];

static void count_up(void *arg, int64_t index, void *scratch) {
  atomic_int *array = arg;
  atomic_fetch_add(&array[index], 1);
  ((volatile char *)scratch)[DC__SCRATCH_BYTES - 1] = 1;
}

static void *use_pool_in_thread(void *arg) {
  atomic_int own[50] = {0};
  for (int32_t i = 0; i < 100; i++) {
    dc__parallel_for(arg, 50, count_up, own);
  }
  for (int32_t i = 0; i < 50; i++) {
    assert_int_equal(own[i], 100);
  }
  return NULL;
}

static void test_pool(void **state) {
  (void)state;
  dc__threadpool *pool;
  dc__threadpool *same;
  assert_int_equal(dc__threadpool_open(-1, &pool), DC_E_INVALID);
  assert_int_equal(dc__threadpool_open(DC__THREADS_MAX + 1, &pool), DC_E_INVALID);
  assert_int_equal(dc__threadpool_open(3, &pool), DC_OK);
  assert_int_equal(dc__threadpool_open(3, &same), DC_OK);
  assert_ptr_equal(pool, same);
  dc__threadpool_close(same);
  assert_int_equal(dc__threadpool_threads(pool), 3);
  dc__parallel_for(pool, 0, count_up, counts);
  dc__parallel_for(pool, 1000, count_up, counts);
  for (int32_t i = 0; i < 1000; i++) {
    assert_int_equal(counts[i], 1);
  }
  pthread_t callers[4];
  for (int32_t i = 0; i < 4; i++) {
    assert_int_equal(pthread_create(&callers[i], NULL, use_pool_in_thread, pool), 0);
  }
  for (int32_t i = 0; i < 4; i++) {
    pthread_join(callers[i], NULL);
  }
  dc__threadpool_close(pool);
  dc__threadpool_close(NULL);
  assert_int_equal(dc__threadpool_open(0, &pool), DC_OK);
  assert_true(dc__threadpool_threads(pool) >= 1);
  dc__threadpool_close(pool);
}

static cpu_set_t processors(void) {
  cpu_set_t set;
  assert_int_equal(sched_getaffinity(0, sizeof set, &set), 0);
  return set;
}

static cpu_set_t allowed;

static void check_processors(void *arg, int64_t index, void *scratch) {
  (void)index;
  (void)scratch;
  cpu_set_t mine = processors();
  CPU_AND(&mine, &mine, &allowed);
  cpu_set_t all = processors();
  atomic_fetch_add((atomic_int *)arg, CPU_EQUAL(&mine, &all) && CPU_COUNT(&all) > 0);
}

/* Makes ten calls to workers that have fallen asleep, each long enough to be shared. */
static void call_sleepers(dc__threadpool *pool) {
  const cpu_set_t before = processors();
  for (int32_t i = 0; i < 10; i++) {
    nanosleep(&(struct timespec){0, 3000000}, NULL);
    atomic_int right = 0;
    dc__parallel_for(pool, 1000, check_processors, &right);
    assert_int_equal(right, 1000);
  }
  const cpu_set_t after = processors();
  assert_true(CPU_EQUAL(&before, &after));
}

/* Workers leave their caller's processor, but only for processors on which they may run; the caller stays where it
 * is. */
static void test_processors(void **state) {
  (void)state;
  dc__threadpool *pool;
  assert_int_equal(dc__threadpool_open(4, &pool), DC_OK);
  allowed = processors();
  call_sleepers(pool);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET((size_t)sched_getcpu(), &one);
  assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
  call_sleepers(pool);
  assert_int_equal(sched_setaffinity(0, sizeof allowed, &allowed), 0);
  call_sleepers(pool);
  dc__threadpool_close(pool);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_pool), cmocka_unit_test(test_processors)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
