/* The clocks. */
#include <stdatomic.h>
#include <time.h>

#include "base/base.h"

int64_t dc__now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int dc__poll_timeout_ms(int64_t deadline_ns) {
  int64_t rest = (deadline_ns - dc__now_ns() + 999999) / 1000000;
  return rest < 0 ? 0 : rest > (1 << 30) ? 1 << 30 : (int)rest;
}

#ifdef __x86_64__
#include <cpuid.h>

enum { UNKNOWN, COUNTER, CLOCK };

static atomic_int source = UNKNOWN; /* a property of the processor: racing threads store the same value */

/* Chooses the counter if it runs at one rate in every state of the processor (invariant TSC). */
static int find_source(void) {
  unsigned int a = 0;
  unsigned int b = 0;
  unsigned int c = 0;
  unsigned int d = 0;
  bool even = __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d & 1U << 8) != 0;
  atomic_store_explicit(&source, even ? COUNTER : CLOCK, memory_order_relaxed);
  return even ? COUNTER : CLOCK;
}

int64_t dc__ticks(void) {
  int use = atomic_load_explicit(&source, memory_order_relaxed);
  use = use == UNKNOWN ? find_source() : use;
  return use == COUNTER ? (int64_t)__builtin_ia32_rdtsc() : dc__now_ns();
}
#else
int64_t dc__ticks(void) {
  return dc__now_ns();
}
#endif
