/* Copies of many sizes and alignments, below and above the size from which copies bypass the caches. */
#include "kernels/dispatch.h"
#include "reference.h"

static void check(size_t bytes, size_t src_shift, size_t dst_shift) {
  guarded src = guarded_make(DC_INT8, (int64_t)bytes, src_shift);
  for (size_t i = 0; i < bytes; i++) {
    ((unsigned char *)src.data)[i] = (unsigned char)(i * 7 + i / 251);
  }
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    guarded dst = guarded_make(DC_INT8, (int64_t)bytes, dst_shift);
    dc__copy(dst.data, src.data, bytes);
    assert_memory_equal(dst.data, src.data, bytes);
    guarded_free(&dst);
  }
  guarded_free(&src);
}

static void test_sizes(void **state) {
  (void)state;
  for (size_t bytes = 0; bytes < 300; bytes += 7) {
    check(bytes, bytes % 5, bytes % 3);
  }
  for (size_t shift = 0; shift < 65; shift += 21) {
    check(DC__COPY_STREAM - 1, shift, 1);
    check(DC__COPY_STREAM, shift, 64 - shift);
    check(DC__COPY_STREAM + 255 + shift, 0, shift);
  }
}

static void test_nothing(void **state) {
  (void)state;
  dc__copy(NULL, NULL, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_sizes), cmocka_unit_test(test_nothing)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
