/* Modules and kernels of the simulated driver: a grid's threads, one after the other. */
#include <setjmp.h>
#include <string.h>

#include "inside.h"

static _Thread_local cudasim_thread me;
static _Thread_local jmp_buf leave;

const cudasim_thread *cudasim_me(void) {
  return &me;
}

void *cudasim_memory(const void *ptr, size_t bytes, size_t alignment) {
  void *place = place_of(ptr, bytes, false);
  if (place == NULL || (uintptr_t)ptr % alignment != 0) {
    lose_device(place == NULL ? ILLEGAL_ADDRESS : MISALIGNED);
    longjmp(leave, 1);
  }
  return place;
}

int cuModuleLoadData(dc__cu_module *module, const void *image) {
  ENTER(true);
  *module = (dc__cu_module)(uintptr_t)image;
  count_live(1);
  return 0;
}

int cuModuleUnload(dc__cu_module module) {
  int error = enter(__func__, true);
  (void)module;
  count_live(-1);
  return error;
}

int cuModuleGetFunction(dc__cu_function *function, dc__cu_module module, const char *name) {
  ENTER(true);
  const cudasim_image *image = (const cudasim_image *)module;
  for (int i = 0; i < CUDASIM_KERNELS; i++) {
    if (strcmp(image->kernels[i].name, name) == 0) {
      *function = (dc__cu_function)(uintptr_t)&image->kernels[i];
      return 0;
    }
  }
  return 500; /* not found */
}

typedef struct grid {
  void (*run)(const void *args);
  unsigned blocks, threads;
  _Alignas(16) unsigned char args[900];
} grid;

static void run_grid(void *args) {
  const grid *g = args;
  if (lost() != 0 || setjmp(leave) != 0) {
    return;
  }
  for (unsigned i = 0; i < g->blocks * g->threads; i++) {
    me = (cudasim_thread){i / g->threads, g->blocks, i % g->threads, g->threads};
    g->run(g->args);
  }
}

int cuLaunchKernel(dc__cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, dc__cu_stream stream, void **args,
                   void **extra) {
  ENTER(true);
  if (grid_x == 0 || block_x == 0 || block_x > 1024 || grid_y * grid_z * block_y * block_z != 1 || shared_bytes != 0 ||
      extra != NULL) {
    return INVALID_VALUE;
  }
  const cudasim_image *any = NULL;
  __typeof__(&any->kernels[0]) kernel = (const void *)function;
  grid g = {.run = kernel->run, .blocks = grid_x, .threads = block_x};
  memcpy(g.args, args[0], kernel->bytes);
  push(stream, run_grid, &g, sizeof g);
  return 0;
}
