/* Files of the flight recorder, read by the command line: any contents are read, or refused with a text, and what was
 * read is diagnosed. The bytes up to the first NUL are one file, the others a second one. */
#include <sys/stat.h>
#include <unistd.h>

#include "../../tools/libdc/tool.h"
#include "fuzz.h"

static char folder[64];
static int complaints;

/* Replaces dc's own in options.c, which prints. */
int report_error(const args *a, int code, const char *format, ...) {
  PROMISE(a == NULL && code == EXIT_UNAVAILABLE && format[0] != '\0');
  complaints++;
  return code;
}

static void write_file(int rank, const uint8_t *data, size_t size) {
  char path[128];
  snprintf(path, sizeof path, "%s/rank-%d.json", folder, rank);
  FILE *file = fopen(path, "wb");
  PROMISE(file != NULL && fwrite(data, 1, size, file) == size);
  PROMISE(fclose(file) == 0);
}

static void remove_folder(void) {
  for (int rank = 0; rank < 2; rank++) {
    char path[128];
    snprintf(path, sizeof path, "%s/rank-%d.json", folder, rank);
    unlink(path);
  }
  rmdir(folder);
}

static void make_folder(void) {
  snprintf(folder, sizeof folder, "/tmp/fuzz_dumps.XXXXXX");
  PROMISE(mkdtemp(folder) != NULL);
  atexit(remove_folder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (folder[0] == '\0') {
    make_folder();
  }
  const uint8_t *end = size > 0 ? memchr(data, 0, size) : NULL;
  size_t first = end != NULL ? (size_t)(end - data) : size;
  write_file(0, data, first);
  write_file(1, data + first + (end != NULL ? 1 : 0), end != NULL ? size - first - 1 : 0);
  dumps d;
  complaints = 0;
  if (!dumps_read(NULL, "FOLDER", folder, &d)) {
    PROMISE(complaints == 1);
    return 0;
  }
  diagnosis v;
  diagnose(&d, &v);
  PROMISE(v.kind != NULL && v.sentence[0] != '\0' && strlen(v.sentence) < sizeof v.sentence);
  dumps_free(&d);
  return 0;
}
