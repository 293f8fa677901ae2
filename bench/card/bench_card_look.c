/* A first look at a card: each step on a line of its own, so that the step after the last line is the one that hung.
 * The device opens and loads its kernels; memory is taken, copied both ways, recorded and timed; a kernel gives plain
 * C's bits; a product of cuBLASLt is exact. bench_card_look [rows of the product's matrices, 8192 if not given] ends
 * with a line of JSON. scripts/gpu-check runs it first. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "kernels/kernels.h"

enum { COUNT = 1 << 20, WORKSPACE = 32 << 20, REPEATS = 5 };

static dc_device *device;
static dc_stream *stream;
static int64_t begun;
static char figures[1024]; /* of the line of JSON */

static void must(dc_status status) {
  if (status != DC_OK) {
    fprintf(stderr, "%s\n", dc_last_error());
    exit(1);
  }
}

static void expect(bool holds, const char *what) {
  if (!holds) {
    fprintf(stderr, "error: %s\n", what);
    exit(1);
  }
}

/* The end of a step, with a figure of it. */
static void note(const char *step, double figure, const char *unit) {
  const size_t used = strlen(figures);
  printf("%-8s %10.3f %-8s %8.1f ms\n", step, figure, unit, (double)(dc__now_ns() - begun) / 1e6);
  (void)fflush(stdout);
  snprintf(figures + used, sizeof figures - used, "%s\"%s %s\": %.4g", used == 0 ? "" : ", ", step, unit, figure);
  begun = dc__now_ns();
}

static void *device_memory(size_t bytes) {
  void *ptr = NULL;
  must(device->ops->alloc(device, bytes, DC_MEMORY_DEVICE, &ptr));
  return ptr;
}

static void finish(void) {
  must(dc_stream_synchronize(stream, 0));
  must(device->ops->check(device));
}

/* Nanoseconds of the card between two points of the stream. */
static double between(dc__timestamp *from, dc__timestamp *to) {
  expect(from != NULL && to != NULL, "no time of the card");
  const double ns = (double)(device->ops->timestamp_ns(to) - device->ops->timestamp_ns(from));
  device->ops->timestamp_release(from);
  device->ops->timestamp_release(to);
  return ns;
}

static void look_at_memory(void) {
  int64_t total = 0, unused = 0;
  must(device->ops->memory_info(device, &total, &unused));
  note("memory", (double)total / (1 << 30), "GiB");
  note("free", (double)unused / (1 << 30), "GiB");
  void *pinned = NULL;
  must(device->ops->alloc(device, COUNT, DC_MEMORY_HOST, &pinned));
  memset(pinned, 1, COUNT);
  device->ops->free(device, pinned, COUNT, DC_MEMORY_HOST);
  note("pinned", COUNT / 1048576.0, "MiB");
}

static void look_at_streams(void) {
  dc_event *event = NULL;
  must(device->ops->event_create(device, &event));
  device->ops->event_record(event, stream);
  must(device->ops->event_sync(event, 0));
  expect(device->ops->event_passed(event), "an event that was waited for has not passed");
  device->ops->event_destroy(event);
  note("event", 1, "passed");
  dc__timestamp *from = device->ops->stream_timestamp(stream), *to = device->ops->stream_timestamp(stream);
  finish();
  note("times", between(from, to) / 1e3, "us");
}

static void keep_native(void *native, void *args) {
  **(void ***)args = native;
}

/* As a stream of PyTorch's is. */
static void look_at_wrapped_stream(void) {
  void *native = NULL;
  void **to = &native;
  dc_stream *wrapped = NULL;
  must(device->ops->stream_issue(stream, keep_native, &to, sizeof to, false));
  must(dc_stream_wrap(device, native, &wrapped));
  must(dc_stream_synchronize(wrapped, 0));
  dc_stream_destroy(wrapped);
  note("wrapped", 1, "stream");
}

/* Copies up and down, and a kernel beside plain C. */
static void look_at_kernel(void) {
  float *plain = malloc(COUNT * sizeof *plain);
  uint16_t *expected = malloc(COUNT * sizeof *expected), *found = malloc(COUNT * sizeof *found);
  void *wide = device_memory(COUNT * sizeof *plain), *narrow = device_memory(COUNT * sizeof *found);
  for (int i = 0; i < COUNT; i++) {
    plain[i] = (float)(i % 10007 - 5003) / 7.0F;
  }
  dc__cast(expected, DC_BFLOAT16, plain, DC_FLOAT32, COUNT);
  dc__stream_copy(stream, wide, plain, COUNT * sizeof *plain);
  finish();
  note("copy up", COUNT * sizeof *plain / 1048576.0, "MiB");
  dc__stream_cast(stream, narrow, DC_BFLOAT16, wide, DC_FLOAT32, COUNT);
  dc__stream_copy(stream, found, narrow, COUNT * sizeof *found);
  finish();
  expect(memcmp(found, expected, COUNT * sizeof *found) == 0, "a kernel's bits are not those of plain C");
  note("kernel", COUNT, "bits");
  device->ops->free(device, wide, COUNT * sizeof *plain, DC_MEMORY_DEVICE);
  device->ops->free(device, narrow, COUNT * sizeof *found, DC_MEMORY_DEVICE);
  free(plain);
  free(expected);
  free(found);
}

/* Of matrices of ones: each sum is the number of rows, which float32 holds exactly. */
static void look_at_product(int64_t rows) {
  const size_t count = (size_t)(rows * rows), bytes = count * sizeof(float);
  float *sums = malloc(bytes);
  uint16_t *ones = malloc(count * sizeof *ones);
  void *a = device_memory(count * sizeof *ones), *d = device_memory(bytes), *workspace = device_memory(WORKSPACE);
  for (size_t i = 0; i < count; i++) {
    ones[i] = 0x3f80; /* 1 in bfloat16 */
  }
  dc__stream_copy(stream, a, ones, count * sizeof *ones);
  const dc__matmul product = {.dtype = DC_BFLOAT16,
                              .out_dtype = DC_FLOAT32,
                              .m = rows,
                              .n = rows,
                              .k = rows,
                              .lda = rows,
                              .ldb = rows,
                              .ldd = rows,
                              .a = a,
                              .b = a,
                              .d = d,
                              .alpha = 1,
                              .workspace = workspace,
                              .workspace_bytes = WORKSPACE};
  must(device->ops->matmul_init(device));
  note("cublaslt", 1, "opened");
  double best = 0;
  for (int i = 0; i < REPEATS; i++) {
    dc__timestamp *from = device->ops->stream_timestamp(stream);
    expect(device->ops->stream_matmul(stream, &product), "cuBLASLt has no such product");
    dc__timestamp *to = device->ops->stream_timestamp(stream);
    finish();
    const double rate = 2.0 * (double)rows * (double)rows * (double)rows / between(from, to) / 1e3;
    best = rate > best ? rate : best;
  }
  dc__stream_copy(stream, sums, d, bytes);
  finish();
  for (size_t i = 0; i < count; i++) {
    expect(sums[i] == (float)rows, "a product of ones is not exact");
  }
  note("product", best, "TFLOP/s");
  device->ops->free(device, a, count * sizeof *ones, DC_MEMORY_DEVICE);
  device->ops->free(device, d, bytes, DC_MEMORY_DEVICE);
  device->ops->free(device, workspace, WORKSPACE, DC_MEMORY_DEVICE);
  free(sums);
  free(ones);
}

int main(int argc, char **argv) {
  const int64_t rows = argc > 1 ? strtoll(argv[1], NULL, 10) : 8192;
  if (rows < 16 || rows > 16384 || rows % 16 != 0) {
    fprintf(stderr, "%s: must be a multiple of 16 from 16 to 16384\n", argv[1]);
    return 1;
  }
  begun = dc__now_ns();
  must(dc_device_open("cuda", NULL, &device)); /* which loads all kernels */
  must(dc_stream_create(device, &stream));
  note("open", 1, "device");
  look_at_memory();
  look_at_streams();
  look_at_wrapped_stream();
  look_at_kernel();
  look_at_product(rows);
  dc_stream_destroy(stream);
  dc_device_destroy(device);
  printf("{%s}\n", figures);
  return 0;
}
