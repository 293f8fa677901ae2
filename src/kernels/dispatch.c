/* Chooses the kernels by the processor, the operating system and the environment's LIBDC_CPU. The tables are filled
 * once, each from the one below, and are only read from then on. */
#define _GNU_SOURCE /* secure_getenv */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dispatch.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

const char *const dc__kernels_names[DC__KERNELS_LEVELS] = {"generic", "avx2", "avx512", "avx512bf16", "amx"};

static dc__kernel_table tables[DC__KERNELS_LEVELS]; /* [0]: plain C, no functions */
static int32_t highest;                             /* the highest level that has a table */
static atomic_int level = -1;                       /* -1 until the tables are filled */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static char unknown[32]; /* LIBDC_CPU's value, if it is no level's name */

/* The highest level that LIBDC_CPU allows. */
static int32_t dispatch_max_level(void) {
  const char *value = secure_getenv("LIBDC_CPU");
  if (value == NULL || value[0] == '\0') {
    return DC__KERNELS_LEVELS - 1;
  }
  for (int32_t i = 0; i < DC__KERNELS_LEVELS; i++) {
    if (strcmp(value, dc__kernels_names[i]) == 0) {
      return i;
    }
  }
  snprintf(unknown, sizeof unknown, "%s", value);
  return DC__KERNELS_LEVELS - 1;
}

#ifdef __x86_64__
/* AMX with bfloat16 tiles. The operating system grants the tiles' registers only on request. */
static bool has_amx(void) {
  enum { BF16 = 1 << 22, TILE = 1 << 24, REQUEST_STATE = 0x1023, TILE_DATA = 18 };
  unsigned int a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & BF16) != 0 && (d & TILE) != 0 &&
         syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
}
#endif

static void dispatch_fill_tables(void) {
  const int32_t max_level = dispatch_max_level();
#ifdef __x86_64__
  unsigned int a = 0;
  unsigned int b = 0;
  unsigned int c = 0;
  unsigned int d = 0;
  __builtin_cpu_init();
  /* Some compilers' __builtin_cpu_supports does not know f16c. */
  bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c) {
    highest = 1;
    dc__cast_avx2(&tables[1]);
    dc__accumulate_avx2(&tables[1]);
    dc__combine_avx2(&tables[1]);
    dc__reduce_avx2(&tables[1]);
    dc__copy_avx2(&tables[1]);
    dc__gemm_avx2(&tables[1]);
    tables[1].rowops = &dc__rowops_avx2;
    tables[1].update = &dc__update_avx2;
    tables[1].tridiagonal = &dc__tridiagonal_avx2;
  }
  if (highest == 1 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    highest = 2;
    tables[2] = tables[1];
    dc__cast_avx512(&tables[2]);
    dc__accumulate_avx512(&tables[2]);
    dc__combine_avx512(&tables[2]);
    dc__reduce_avx512(&tables[2]);
    dc__copy_avx512(&tables[2]);
    dc__gemm_avx512(&tables[2]);
    tables[2].rowops = &dc__rowops_avx512;
    tables[2].update = &dc__update_avx512;
    tables[2].tridiagonal = &dc__tridiagonal_avx512;
  }
  if (highest == 2 && __builtin_cpu_supports("avx512bf16")) {
    highest = 3;
    tables[3] = tables[2];
    dc__gemm_avx512bf16(&tables[3]);
  }
  if (highest == 3 && max_level > 3 && has_amx()) {
    highest = 4;
    tables[4] = tables[3];
    dc__gemm_amx(&tables[4]);
  }
#endif
  atomic_store_explicit(&level, highest < max_level ? highest : max_level, memory_order_release);
}

const dc__kernel_table *dc__active_kernels(void) {
  int32_t use = atomic_load_explicit(&level, memory_order_acquire);
  return &tables[use >= 0 ? use : dc__kernels_level()];
}

int32_t dc__kernels_limit(int32_t limit) {
  pthread_once(&once, dispatch_fill_tables);
  int32_t use = limit < 0 ? 0 : limit > highest ? highest : limit;
  atomic_store_explicit(&level, use, memory_order_release);
  return use;
}

int32_t dc__kernels_level(void) {
  pthread_once(&once, dispatch_fill_tables);
  return (int32_t)atomic_load_explicit(&level, memory_order_acquire);
}

dc_status dc__kernels_check(const char *fn) {
  pthread_once(&once, dispatch_fill_tables);
  return unknown[0] == '\0' ? DC_OK
                            : dc__fail(DC_E_INVALID,
                                       "%s: the environment's LIBDC_CPU = \"%s\", must be generic, avx2, avx512, "
                                       "avx512bf16 or amx",
                                       fn, unknown);
}
