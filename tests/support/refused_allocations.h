/* For programs that request more memory than there is. Sanitizers end such a program, unless they are told to return
 * NULL. */
#ifndef DC_TESTS_REFUSED_ALLOCATIONS_H
#define DC_TESTS_REFUSED_ALLOCATIONS_H

const char *__asan_default_options(void);
const char *__asan_default_options(void) {
  return "allocator_may_return_null=1";
}
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) {
  return "allocator_may_return_null=1";
}

#endif
