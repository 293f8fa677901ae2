/* Modules and kernels of the simulated driver. */
#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include "ptx/ptx.h"
#include "stream.h"

enum { USUAL_SHARED = 48 << 10, FUNCTIONS = 64 };

_Thread_local const cudasim_thread *current;
_Thread_local const grid *meeting;
static _Thread_local jmp_buf leave;

/* Kernels that were allowed more shared memory than the default. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
  const cudasim_kernel *kernel;
  uint32_t shared_bytes;
} allowed[FUNCTIONS];

const cudasim_thread *cudasim_me(void) {
  return current;
}

static void report(const char *text) {
  (void)fprintf(stderr, "cudasim: block (%u, %u, %u), thread %u: %s\n", current->block[0], current->block[1],
                current->block[2], current->thread, text);
  lose_device(LAUNCH_FAILED);
}

void report_stuck(void) {
  report("threads wait for others that will not come");
}

_Noreturn void fault(int error, const char *text) {
  if (text != NULL) {
    report(text);
  }
  lose_device(error);
  if (meeting != NULL) {
    leave_meeting();
  }
  longjmp(leave, 1);
}

void *cudasim_memory(const void *ptr, size_t bytes, size_t alignment) {
  if (meeting != NULL) {
    tsan_ignore(true);
  }
  void *place = resolve_pointer(ptr, bytes, false);
  if (place != NULL) {
    ptx_note_memory(ptr, bytes);
  }
  if (meeting != NULL) {
    tsan_ignore(false);
  }
  if (place == NULL || (uintptr_t)ptr % alignment != 0) {
    fault(place == NULL ? ILLEGAL_ADDRESS : MISALIGNED, NULL);
  }
  return place;
}

int cuModuleLoadData(dc__cu_module *module, const void *image) {
  ENTER(true);
  const int error = unsafe(); /* a capture does not allow loading code */
  if (error != 0) {
    return error;
  }
  if (memcmp(image,
             "\x7f"
             "ELF",
             4) == 0) { /* machine code, which needs a card */
    return DC__CU_NO_BINARY;
  }
  const cudasim_image *code = ptx_image(image);
  const int refused = code == NULL ? INVALID_PTX : refuse_code(code->major);
  if (refused != 0) {
    return refused;
  }
  *module = (dc__cu_module)(uintptr_t)code;
  count_live(1);
  return 0;
}

int cuModuleUnload(dc__cu_module module) {
  int error = enter(__func__, true);
  ptx_image_free((const void *)module);
  count_live(-1);
  return error;
}

int cuModuleGetFunction(dc__cu_function *function, dc__cu_module module, const char *name) {
  ENTER(true);
  const cudasim_image *image = (const void *)module;
  for (const cudasim_kernel *const *kernel = image->kernels; *kernel != NULL; kernel++) {
    if (strcmp((*kernel)->name, name) == 0) {
      *function = (dc__cu_function)(uintptr_t)*kernel;
      return 0;
    }
  }
  return 500; /* CUDA_ERROR_NOT_FOUND */
}

int cuFuncSetAttribute(dc__cu_function function, int attribute, int value) {
  ENTER(true);
  const cudasim_kernel *kernel = (const void *)function;
  int i = 0;
  if (attribute != DC__CU_FUNCTION_SHARED_BYTES || value < 0 || value > CUDASIM_SHARED) {
    return INVALID_VALUE;
  }
  pthread_mutex_lock(&mutex);
  while (allowed[i].kernel != NULL && allowed[i].kernel != kernel) {
    i++;
  }
  allowed[i].kernel = kernel;
  allowed[i].shared_bytes = (uint32_t)value;
  pthread_mutex_unlock(&mutex);
  return 0;
}

static uint32_t shared_allowed(const cudasim_kernel *kernel) {
  uint32_t most = USUAL_SHARED;
  pthread_mutex_lock(&mutex);
  for (int i = 0; allowed[i].kernel != NULL; i++) {
    most = allowed[i].kernel == kernel && allowed[i].shared_bytes > most ? allowed[i].shared_bytes : most;
  }
  pthread_mutex_unlock(&mutex);
  return most;
}

cudasim_thread thread_of(const grid *g, uint32_t block, uint32_t thread) {
  cudasim_thread t = {.thread = thread, .threads = g->threads};
  for (int axis = 0; axis < 3; axis++) {
    t.blocks[axis] = g->blocks[axis];
    t.block[axis] = block % g->blocks[axis];
    block /= g->blocks[axis];
  }
  return t;
}

static void run_plain(const grid *g) {
  if (g->kernel->wait_at_barrier) {
    run_meeting(g);
    return;
  }
  cudasim_thread me;
  current = &me;
  if (setjmp(leave) != 0) {
    return;
  }
  for (uint32_t block = 0; block < blocks_of(g); block++) {
    for (uint32_t thread = 0; thread < g->threads; thread++) {
      me = thread_of(g, block, thread);
      g->kernel->run(g->args);
    }
  }
}

static void run_grid(void *args) {
  const grid *g = args;
  if (lost() == 0 && !ptx_run_grid(g, run_plain)) {
    run_plain(g);
  }
}

int cuLaunchKernel(dc__cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, dc__cu_stream stream, void **args,
                   void **extra) {
  ENTER(true);
  const cudasim_kernel *kernel = (const void *)function;
  grid g = {kernel, {grid_x, grid_y, grid_z}, block_x, shared_bytes, {0}};
  if (blocks_of(&g) == 0 || grid_y > 65535 || grid_z > 65535 || block_x == 0 || block_x > kernel->threads ||
      block_y * block_z != 1 || (kernel->wait_at_barrier && block_x % CUDASIM_WARP != 0) ||
      shared_bytes > shared_allowed(kernel) || kernel->bytes > sizeof g.args || extra != NULL) {
    return INVALID_VALUE;
  }
  const int of = queue_of(stream)->device;
  if (of != ANYBODY && of != cudasim_current()) {
    return INVALID_HANDLE;
  }
  memcpy(g.args, args[0], kernel->bytes);
  return push(stream, run_grid, &g, sizeof g);
}
