/* The device's kernels compared with the plain C ones, bit for bit: every pair of types, special values, lengths around
 * a block. On the simulated driver, or on a card (tests/card). */
#include "harness.h"

#include "cuda_fixture.h"
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/kernels.h"

enum { COUNT = 700, SOURCES = 256 };

static const int32_t dtypes[] = {DC_FLOAT32, DC_FLOAT64, DC_FLOAT16, DC_BFLOAT16, DC_INT8, DC_INT32, DC_INT64};
static char *blocks[SOURCES + 1]; /* on the device, 8 * COUNT bytes each */

static int set_up(void **state) {
  void *ptr;
  (void)open_stream(state);
  for (int i = 0; i <= SOURCES; i++) {
    assert_int_equal(device->ops->alloc(device, 8 * COUNT, DC_MEMORY_DEVICE, &ptr), DC_OK);
    blocks[i] = ptr;
  }
  return 0;
}

static int tear_down(void **state) {
  for (int i = 0; i <= SOURCES; i++) {
    device->ops->free(device, blocks[i], 8 * COUNT, DC_MEMORY_DEVICE);
  }
  return close_stream(state);
}

/* Values of every kind, the same for the same seed. Sums get no NaNs, since it is unspecified which of several NaNs
 * results. */
static void fill(void *data, int32_t dtype, uint64_t seed, bool nans) {
  static const double special[] = {0.0,  -0.0,  1.0,           -1.5,   65504.0,   65520.0, 1e-8,  6e-8,      3.4e38,
                                   1e39, 127.6, -2147483649.0, 9.3e18, 1.0 / 3.0, -1e300,  1e-45, 16777217.0};
  double values[COUNT];
  for (int i = 0; i < COUNT; i++) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    bool is_special = (seed >> 60) == 0 && nans;
    values[i] = is_special ? special[(seed >> 33) % DC__COUNT(special)] : (double)(int32_t)(seed >> 32) / 65536.0;
    if (nans && (seed >> 56) == 17) {
      values[i] = __builtin_nan("");
    }
  }
  if (dtype == DC_FLOAT64) {
    memcpy(data, values, sizeof values);
  } else {
    dc__cast(data, dtype, values, DC_FLOAT64, COUNT);
  }
}

static void to_device(int block, const void *data) {
  dc__stream_copy(stream, blocks[block], data, 8 * COUNT);
  assert_int_equal(dc_stream_synchronize(stream, 0), DC_OK);
}

static void expect(int block, const void *expected, const char *what, int32_t dst, int32_t src) {
  static _Alignas(64) char found[8 * COUNT];
  dc__stream_copy(stream, found, blocks[block], sizeof found);
  if (dc_stream_synchronize(stream, 0) != DC_OK) {
    fail_msg("%s", dc_last_error());
  }
  if (memcmp(found, expected, sizeof found) != 0) {
    fail_msg("%s: %s of %s differs from plain C", what, dc_dtype_name(dst), dc_dtype_name(src));
  }
}

static char *from(char *block, int32_t dtype, int64_t element) {
  return block + (size_t)element * dc_dtype_size(dtype);
}

static void test_pairs(void **state) {
  (void)state;
  static _Alignas(64) char dst[8 * COUNT], src[8 * COUNT];
  static const int64_t counts[] = {COUNT, 257, 1, 0, 699};
  for (size_t d = 0; d < DC__COUNT(dtypes); d++) {
    for (size_t s = 0; s < DC__COUNT(dtypes); s++) {
      int64_t count = counts[(d + s) % DC__COUNT(counts)];
      memset(dst, 0x11, sizeof dst);
      fill(src, dtypes[s], d * 7 + s, true);
      to_device(0, dst);
      to_device(1, src);
      /* Some cases start at the second element, where accesses to several elements at once are misaligned. */
      int64_t at = (d + 2 * s) % 3 == 0 && count > 1;
      dc__stream_cast(stream, from(blocks[0], dtypes[d], at), dtypes[d], from(blocks[1], dtypes[s], at), dtypes[s],
                      count - at);
      dc__cast(from(dst, dtypes[d], at), dtypes[d], from(src, dtypes[s], at), dtypes[s], count - at);
      expect(0, dst, "cast", dtypes[d], dtypes[s]);
      fill(dst, dtypes[d], 99 + d, false);
      fill(src, dtypes[s], d * 7 + s, false);
      to_device(0, dst);
      to_device(1, src);
      dc__stream_accumulate(stream, from(blocks[0], dtypes[d], at), dtypes[d], from(blocks[1], dtypes[s], at),
                            dtypes[s], count - at);
      dc__accumulate(from(dst, dtypes[d], at), dtypes[d], from(src, dtypes[s], at), dtypes[s], count - at);
      expect(0, dst, "accumulate", dtypes[d], dtypes[s]);
    }
  }
}

/* The same with a scan for numbers that are not finite: the notes must agree too, and keep the largest key. */
static void combine_both(int32_t d, int32_t s, int64_t count, bool add, bool calm) {
  static _Alignas(64) char dst[8 * COUNT], src[8 * COUNT];
  dc__nonfinite note = {0, 0}, found;
  dc__nonfinite *on_device = (dc__nonfinite *)(void *)blocks[2];
  dc__stream_zero(stream, on_device, sizeof *on_device);
  fill(dst, d, 3, false);
  fill(src, s, (uint64_t)count, !calm && !add);
  if (!calm) {
    const double odd = -__builtin_inf();
    dc__cast(from(src, s, count / 2), s, &odd, DC_FLOAT64, 1);
  }
  to_device(0, dst);
  to_device(1, src);
  for (uint64_t key = 7; key < 10; key += 2) {
    dc__combination c = {
        .dst = blocks[0], .src = blocks[1], .count = count, .dst_dtype = d, .src_dtype = s, .add = add};
    dc__stream_combine(stream, &c, on_device, key % 9);
    c.dst = dst;
    c.src = src;
    dc__stream_combine(NULL, &c, &note, key % 9);
    expect(0, dst, "combine", d, s);
  }
  dc__stream_copy(stream, &found, on_device, sizeof found);
  assert_int_equal(dc_stream_synchronize(stream, 0), DC_OK);
  assert_memory_equal(&found, &note, sizeof note);
  assert_int_equal(note.key, calm ? 0 : 7);
}

static void test_nonfinite(void **state) {
  (void)state;
  for (size_t k = 0; k < 4 * 4 * 4; k++) { /* the first four types */
    combine_both(dtypes[k / 16], dtypes[k / 4 % 4], k % 3 == 0 ? COUNT : 257 + (int64_t)k, k % 2 == 1, k % 4 / 2 == 1);
  }
}

static void reduce_both(int32_t d, int32_t s, int32_t n, int64_t count) {
  static _Alignas(64) char dst[8 * COUNT], src[SOURCES][8 * COUNT];
  const void *host[SOURCES], *on_device[SOURCES];
  bool mean = dc__dtype_is_float(s) && n % 2 == 0;
  fill(dst, d, 5, false);
  to_device(SOURCES, dst);
  for (int32_t r = 0; r < n; r++) {
    memset(src[r], 0, sizeof src[r]);
    fill(src[r], s, (uint64_t)(r + n), false);
    to_device(r, src[r]);
    host[r] = src[r];
    on_device[r] = blocks[r];
  }
  dc__reduction r = {.dst = blocks[SOURCES],
                     .src = on_device,
                     .count = count,
                     .dst_dtype = d,
                     .src_dtype = s,
                     .n = n,
                     .mean = mean,
                     .accumulate = n % 3 == 0};
  dc__internal_reduce(stream, &r);
  r.dst = dst;
  r.src = host;
  dc__internal_reduce(NULL, &r);
  expect(SOURCES, dst, "reduce", d, s);
}

static void test_reductions(void **state) {
  (void)state;
  for (size_t d = 0; d < DC__COUNT(dtypes); d++) {
    for (size_t s = 0; s < DC__COUNT(dtypes); s++) {
      reduce_both(dtypes[d], dtypes[s], (int32_t)(d * 7 + s) % 8 + 1, 300);
    }
  }
  for (int32_t n = 1; n <= SOURCES; n += n < 66 || n == 255 ? 1 : 21) {
    reduce_both(DC_FLOAT32, DC_FLOAT32, n, n == 64 ? COUNT : 65);
    reduce_both(DC_FLOAT32, DC_BFLOAT16, n, 33);
    reduce_both(DC_BFLOAT16, DC_FLOAT16, n, 64 + n % 8);
  }
}

/* The launch has fewer blocks than groups, as if there were more groups than a grid has blocks: a block handles several
 * groups with the same tile. Halves of whole numbers are exact. */
static void test_triangles_of_many_groups(void **state) {
  (void)state;
  enum { GROUPS = 5, N = 9, PACKED = N * (N + 1) / 2 };
  float mean[8 * COUNT / 4] = {0}, found[8 * COUNT / 4];
  double packed[COUNT] = {0};
  for (int i = 0; i < GROUPS * N * N; i++) {
    mean[i] = (float)(i * 37 % 211);
  }
  for (int i = 0; i < GROUPS * PACKED; i++) {
    packed[i] = i * 53 % 307;
  }
  to_device(0, mean);
  to_device(1, packed);
  to_device(2, mean);
  const dc__cuda_triangles_args args = {.sum = (float *)(void *)blocks[2],
                                        .mean = (const float *)(const void *)blocks[0],
                                        .packed = (double *)(void *)blocks[1],
                                        .groups = GROUPS,
                                        .n = N,
                                        .decay = 0.5,
                                        .count = 1};
  device->ops->stream_launch(stream, &(dc__launch){.kernel = DC__KERNEL_AVERAGE_TRIANGLES,
                                                   .blocks = 1,
                                                   .blocks_z = 2,
                                                   .threads = DC__CUDA_KFAC_TILE_THREADS,
                                                   .args = &args,
                                                   .bytes = sizeof args});
  dc__stream_copy(stream, found, blocks[2], sizeof found);
  assert_int_equal(dc_stream_synchronize(stream, 0), DC_OK);
  const double *triangle = packed;
  for (const float *m = mean; m < mean + GROUPS * N * N; m += N * N) {
    for (int i = 0; i < N; i++) {
      for (int j = i; j < N; j++) {
        assert_true(found[m - mean + j * N + i] == 0.5f * m[i * N + j] + 0.5f * (float)*triangle++);
      }
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_pairs), cmocka_unit_test(test_nonfinite),
                                     cmocka_unit_test(test_reductions),
                                     cmocka_unit_test(test_triangles_of_many_groups)};
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
