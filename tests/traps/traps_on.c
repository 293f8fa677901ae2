/* Linked into a test, this makes floating-point exceptions trap before main() runs, and checks at the end that they
 * still do. Threads of the test inherit its traps. */
#define _GNU_SOURCE
#include <fenv.h>
#include <stdio.h>
#include <unistd.h>

enum { TRAPS = FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW };

static int trapped; /* 0 if the processor has no traps */

__attribute__((constructor)) static void begin(void) {
  feenableexcept(TRAPS);
  trapped = fegetexcept();
}

__attribute__((destructor)) static void end(void) {
  if (fegetexcept() != trapped) {
    fprintf(stderr, "traps are %#x in the end, were %#x\n", (unsigned)fegetexcept(), (unsigned)trapped);
    _exit(1);
  }
}
