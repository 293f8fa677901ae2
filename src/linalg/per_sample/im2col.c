/* A convolution's patches: one row per input channel and kernel element, one column per output position. */
#include <string.h>

#include "linalg/linalg.h"

int64_t dc__im2col_numel(const dc__per_sample *s) {
  const int64_t *k = s->layer.kernel;
  int64_t kernel_size;
  int64_t rows;
  int64_t all;
  bool fits = !__builtin_mul_overflow(k[0] * k[1], k[2], &kernel_size) &&
              !__builtin_mul_overflow(kernel_size, s->in / s->layer.groups, &rows) &&
              !__builtin_mul_overflow(rows, s->positions, &all) && all <= INT64_C(1) << 56;
  return fits ? all : INT64_MAX;
}

/* Copies a line of output positions o of one patch row: in[offset + stride * o], or 0 outside of `in`. */
static void im2col_line(void *to, const void *in, size_t size, int64_t count, int64_t length, int64_t offset,
                        int64_t stride) {
  char *target = to;
  const char *source = in;
  int64_t begin = offset < 0 ? (-offset + stride - 1) / stride : 0;
  int64_t end = offset >= length ? 0 : (length - 1 - offset) / stride + 1;
  end = end < count ? end : count;
  begin = begin < end ? begin : end;
  memset(target, 0, (size_t)begin * size);
  memset(target + (size_t)end * size, 0, (size_t)(count - end) * size);
  if (stride == 1) {
    memcpy(target + (size_t)begin * size, source + (begin + offset) * (int64_t)size, (size_t)(end - begin) * size);
    return;
  }
  for (int64_t o = begin; o < end; o++) {
    memcpy(target + (size_t)o * size, source + (offset + stride * o) * (int64_t)size, size);
  }
}

/* Copies all positions of one patch row. k is the position in the kernel. */
static void im2col_plane(const dc__per_sample *s, const char *channel, const int64_t k[3], char *to, size_t size) {
  const dc_sample_layer *c = &s->layer;
  int64_t width = s->size_out[2];
  for (int64_t z = 0; z < s->size_out[0]; z++) {
    int64_t iz = z * c->stride[0] - c->padding[0] + k[0] * c->dilation[0];
    for (int64_t y = 0; y < s->size_out[1]; y++, to += (size_t)width * size) {
      int64_t iy = y * c->stride[1] - c->padding[1] + k[1] * c->dilation[1];
      if (iz < 0 || iz >= s->size[0] || iy < 0 || iy >= s->size[1]) {
        memset(to, 0, (size_t)width * size);
      } else {
        im2col_line(to, channel + (size_t)((iz * s->size[1] + iy) * s->size[2]) * size, size, width, s->size[2],
                    k[2] * c->dilation[2] - c->padding[2], c->stride[2]);
      }
    }
  }
}

void dc__im2col(const dc__per_sample *s, int64_t sample, int32_t group, void *patches, int64_t row) {
  const int64_t *k = s->layer.kernel;
  size_t size = dc_dtype_size(s->x_dtype);
  int64_t channels = s->in / s->layer.groups;
  int64_t pixels = s->size[0] * s->size[1] * s->size[2];
  char *to = patches;
  for (int64_t channel = 0; channel < channels; channel++) {
    const char *in =
        dc__element_ptr(s->x, s->x_dtype, ((sample * s->layer.groups + group) * channels + channel) * pixels);
    for (int64_t place = 0; place < k[0] * k[1] * k[2]; place++, to += (size_t)row * size) {
      const int64_t at[3] = {place / (k[1] * k[2]), place / k[2] % k[1], place % k[2]};
      im2col_plane(s, in, at, to, size);
    }
  }
}
