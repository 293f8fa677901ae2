/* SANITIZED is defined in builds with a sanitizer, which need more time and memory. */
#ifndef DC_TESTS_SANITIZED_H
#define DC_TESTS_SANITIZED_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif

#endif
