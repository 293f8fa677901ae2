/* The driver's side: images that are PTX, and kernels that run both as PTX and as C++. At the process's end a table of
 * these kernels is printed: the opcodes that they executed, launches, and by how much results differ. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ptx.h"

enum { MODULES = 64, KERNELS = 256, ALWAYS = 8 };

/* Statistics of a kernel that ran both ways. */
typedef struct row {
  const ptx_entry *entry;
  uint64_t executed[PTX_OP_COUNT];
  int64_t asked, launches, differing; /* launches: those also run as PTX; differing: those of them that differ */
  double largest;
} row;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects all below */
static ptx_module *modules[MODULES];                      /* from CUDASIM_PTX; kept until the process ends */
static int module_count;
static row rows[KERNELS];
static int row_count;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static _Thread_local ptx_pages *noted; /* memory used by the C++ kernel that this thread runs; NULL: not recorded */

static ptx_module *parse(const char *text) {
  char why[256];
  ptx_module *m = ptx_parse(text, why, sizeof why);
  if (m == NULL) {
    (void)fprintf(stderr, "cudasim: %s\n", why);
  }
  return m;
}

static void load_file(const char *path) {
  FILE *file = fopen(path, "rb");
  char *text = NULL;
  size_t bytes = 0, capacity = 0;
  while (file != NULL && !feof(file) && !ferror(file)) {
    capacity = 2 * capacity + 65536;
    text = realloc(text, capacity + 1);
    bytes += text == NULL ? 0 : fread(text + bytes, 1, capacity - bytes, file);
  }
  if (text == NULL || ferror(file)) {
    (void)fprintf(stderr, "cudasim: %s cannot be read\n", path);
    exit(1); /* otherwise nothing would be compared */
  }
  (void)fclose(file);
  text[bytes] = '\0';
  ptx_module *m = module_count == MODULES ? NULL : parse(text);
  if (m == NULL) {
    (void)fprintf(stderr, "cudasim: %s is not taken; there may be %d files\n", path, MODULES);
    exit(1);
  }
  modules[module_count++] = m;
  free(text);
}

static void print_table(void) {
  printf("%-42s %8s %9s %10s  %s\n", "kernel as PTX", "launches", "differing", "largest", "opcodes");
  for (int k = 0; k < row_count; k++) {
    const row *w = &rows[k];
    printf("%-42s %8" PRId64 " %9" PRId64 " %10.3g ", w->entry->name, w->launches, w->differing, w->largest);
    for (int op = 0; op < PTX_OP_COUNT; op++) {
      if (w->executed[op] > 0) {
        printf(" %s", ptx_op_name(op));
      }
    }
    printf("\n");
  }
}

static void load_files(void) {
  const char *paths = getenv("CUDASIM_PTX");
  char *copy = paths == NULL ? NULL : strdup(paths), *rest = NULL;
  if (copy == NULL) {
    return;
  }
  for (const char *path = strtok_r(copy, ":", &rest); path != NULL; path = strtok_r(NULL, ":", &rest)) {
    load_file(path);
  }
  free(copy);
  (void)atexit(print_table);
}

const cudasim_image *ptx_image(const void *image) {
  if (memcmp(image, "//", 2) != 0 && memcmp(image, ".version", 8) != 0) {
    return image;
  }
  const ptx_module *m = parse(image);
  return m == NULL ? NULL : &m->image;
}

void ptx_image_free(const cudasim_image *image) {
  if (image->kernels != NULL && image->kernels[0] != NULL && image->kernels[0]->run == NULL) {
    const char *module = (const char *)image - offsetof(ptx_module, image);
    ptx_free((ptx_module *)(uintptr_t)module);
  }
}

static const ptx_entry *find_entry(const char *name) {
  for (int i = 0; i < module_count; i++) {
    for (const ptx_entry *e = modules[i]->first; e != NULL; e = e->next) {
      if (strcmp(e->name, name) == 0) {
        return e;
      }
    }
  }
  return NULL;
}

/* Results are compared as elements of the type in the kernel's name, by default float32. */
static ptx_type type_of(const char *name) {
  return strstr(name, "bfloat16") != NULL ? PTX_BF16 : strstr(name, "float16") != NULL ? PTX_F16 : PTX_F32;
}

/* Attention's products are contracted, so results differ in the last bits of float32 or of a 16-bit type. */
static bool is_right(const ptx_entry *entry, int64_t differ, double largest) {
  const double most = type_of(entry->name) == PTX_F32 ? 0x1p-20 : 0x1p-8;
  return differ == 0 || (strstr(entry->name, "attention") != NULL && largest < most);
}

/* Called with the mutex held. */
static row *row_of(const ptx_entry *entry) {
  int k = 0;
  while (k < row_count && rows[k].entry != entry) {
    k++;
  }
  if (k == KERNELS) {
    abort();
  }
  row_count = k == row_count ? k + 1 : row_count;
  rows[k].entry = entry;
  return &rows[k];
}

static void note_row(const ptx_entry *entry, const uint64_t *executed, int64_t differ, double largest) {
  pthread_mutex_lock(&mutex);
  row *w = row_of(entry);
  w->launches++;
  w->differing += differ > 0;
  w->largest = largest > w->largest ? largest : w->largest;
  for (int op = 0; op < PTX_OP_COUNT; op++) {
    w->executed[op] += executed[op];
  }
  pthread_mutex_unlock(&mutex);
}

/* The first launches of each kernel run as PTX, and then only every nth if the environment asks for that. */
static bool is_due(const ptx_entry *entry) {
  const int every = from_environment("CUDASIM_PTX_EVERY", 1);
  pthread_mutex_lock(&mutex);
  const int64_t asked = row_of(entry)->asked++;
  pthread_mutex_unlock(&mutex);
  return asked < ALWAYS || every < 2 || asked % every == 0;
}

void ptx_note_memory(const void *ptr, size_t bytes) {
  if (noted != NULL) {
    ptx_pages_keep(noted, ptr, bytes);
  }
}

static void run_both(const grid *g, const ptx_entry *entry, void (*plain)(const grid *g)) {
  uint64_t executed[PTX_OP_COUNT] = {0};
  ptx_pages *pages = ptx_pages_create();
  noted = pages;
  plain(g);
  noted = NULL;
  if (lost() == 0) {
    double largest = 0;
    ptx_pages_swap(pages);
    ptx_execute(g, entry, pages, executed);
    const int64_t differ = ptx_pages_compare(pages, type_of(entry->name), &largest);
    note_row(entry, executed, differ, largest);
    if (lost() == 0 && !is_right(entry, differ, largest)) {
      (void)fprintf(stderr,
                    "cudasim: %s: %" PRId64 " bytes of the PTX's results differ from those of C++, at most %g\n",
                    entry->name, differ, largest);
      lose_device(LAUNCH_FAILED);
    }
  }
  ptx_pages_destroy(pages);
}

bool ptx_run_grid(const grid *g, void (*plain)(const grid *g)) {
  (void)pthread_once(&once, load_files);
  if (g->kernel->run == NULL) {
    const void *entry = (const char *)g->kernel - offsetof(ptx_entry, kernel);
    ptx_pages *pages = ptx_pages_create();
    ptx_execute(g, entry, pages, NULL);
    ptx_pages_destroy(pages);
    return true;
  }
  const ptx_entry *entry = find_entry(g->kernel->name);
  if (entry == NULL || !is_due(entry)) {
    return false;
  }
  run_both(g, entry, plain);
  return true;
}
