/* SANITIZED is defined if a sanitizer watches, which takes more time and memory, and sees what others do not. */
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
