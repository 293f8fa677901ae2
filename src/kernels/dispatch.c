/* Chooses the kernels by what the processor and the operating system have. The tables are filled once, each from the
 * one below, and only read from then on. */
#include <pthread.h>
#include <stdatomic.h>

#include "kernels/table.h"

enum { LEVELS = 3 };

static dc__kernels tables[LEVELS]; /* [0]: plain C, no functions */
static int32_t highest;
static atomic_int level;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void fill(void) {
  atomic_store_explicit(&level, highest, memory_order_release);
}

const dc__kernels *dc__kernels_table(void) {
  pthread_once(&once, fill);
  return &tables[atomic_load_explicit(&level, memory_order_acquire)];
}

int32_t dc__kernels_limit(int32_t limit) {
  pthread_once(&once, fill);
  int32_t use = limit < 0 ? 0 : limit > highest ? highest : limit;
  atomic_store_explicit(&level, use, memory_order_release);
  return use;
}

int32_t dc__kernels_level(void) {
  pthread_once(&once, fill);
  return (int32_t)atomic_load_explicit(&level, memory_order_acquire);
}
