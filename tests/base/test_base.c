/* Errors, sized structs, tensor views, maps. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/base.h"

/* ---- errors ---- */

static void test_statuses(void **state) {
  (void)state;
  assert_string_equal(dc_status_name(DC_OK), "DC_OK");
  assert_string_equal(dc_status_name(DC_E_PEER_DEAD), "DC_E_PEER_DEAD");
  assert_string_equal(dc_status_name(12345), "DC_E_UNKNOWN");
  assert_string_equal(dc_status_string(-7), "unknown status");
  assert_int_equal(dc__fail(DC_E_SHAPE, "x = %d", 3), DC_E_SHAPE);
  assert_string_equal(dc_last_error(), "x = 3");
  dc__fail(DC_E_SHAPE, "again: %s", dc_last_error()); /* its own text as an argument */
  assert_string_equal(dc_last_error(), "again: x = 3");
  char copy[13];
  size_t needed = 0;
  assert_int_equal(dc_last_error_copy(copy, 12, &needed), DC_E_BUFFER_TOO_SMALL);
  assert_int_equal(needed, 13);
  assert_int_equal(dc_last_error_copy(copy, sizeof copy, NULL), DC_OK);
  assert_string_equal(copy, "again: x = 3");
  char longer[2000];
  memset(longer, 'a', sizeof longer - 1);
  longer[sizeof longer - 1] = '\0';
  dc__fail(DC_E_SHAPE, "%s", longer); /* cut, not overrun */
  assert_int_equal(strlen(dc_last_error()), 511);
}

/* ---- sized structs ---- */

typedef struct options {
  size_t struct_size;
  int64_t first;
  int64_t second; /* a later version's field */
} options;

enum { FIRST_VERSION = 16 };

/* Memory that ends where reading faults. */
static char *before_a_guard(size_t bytes, char **page) {
  size_t size = (size_t)sysconf(_SC_PAGESIZE);
  *page = mmap(NULL, 2 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(*page != MAP_FAILED);
  assert_int_equal(mprotect(*page + size, size, PROT_NONE), 0);
  return *page + size - bytes;
}

static dc_status read_as(const void *src, options *dst) {
  *dst = (options){sizeof *dst, 5, 7};
  return dc__read_options("f", "options", dst, sizeof *dst, src, FIRST_VERSION);
}

static void test_reading_structs(void **state) {
  (void)state;
  options got;
  assert_int_equal(read_as(NULL, &got), DC_OK);
  assert_int_equal(got.second, 7); /* NULL: the defaults */
  char *page;
  options *old = (options *)(void *)before_a_guard(FIRST_VERSION, &page);
  old->struct_size = FIRST_VERSION;
  old->first = 42;
  assert_int_equal(read_as(old, &got), DC_OK); /* an older caller's: not a byte past its end */
  assert_int_equal(got.first, 42);
  assert_int_equal(got.second, 0);
  assert_int_equal(got.struct_size, sizeof got);
  for (size_t size = 0; size < FIRST_VERSION; size++) {
    old->struct_size = size;
    assert_int_equal(read_as(old, &got), DC_E_INVALID);
  }
  const size_t wild[] = {SIZE_MAX, 65537, 0xAAAAAAAAAAAAAAAA};
  for (size_t i = 0; i < DC__COUNT(wild); i++) {
    old->struct_size = wild[i];
    assert_int_equal(read_as(old, &got), DC_E_INVALID);
  }
  munmap(page, 2 * (size_t)sysconf(_SC_PAGESIZE));
  unsigned char newer[sizeof(options) + 8] = {0};
  size_t size = sizeof newer;
  memcpy(newer, &size, sizeof size);
  assert_int_equal(read_as(newer, &got), DC_OK); /* from a newer caller that uses nothing new */
  for (size_t i = sizeof(options); i < sizeof newer; i++) {
    newer[i] = 1;
    assert_int_equal(read_as(newer, &got), DC_E_UNSUPPORTED);
    assert_non_null(strstr(dc_last_error(), "this version does not know"));
    newer[i] = 0;
  }
}

static void test_writing_structs(void **state) {
  (void)state;
  const options src = {sizeof src, 1, 2};
  int64_t out[4] = {FIRST_VERSION, -1, -1, -1};
  assert_int_equal(dc__write_sized("f", "out", out, &src, sizeof src, FIRST_VERSION), DC_OK);
  assert_true(out[0] == FIRST_VERSION && out[1] == 1 && out[2] == -1); /* no further than the caller has */
  out[0] = 32;
  assert_int_equal(dc__write_sized("f", "out", out, &src, sizeof src, FIRST_VERSION), DC_OK);
  assert_true(out[0] == 32 && out[2] == 2 && out[3] == -1);
  assert_int_equal(dc__write_sized("f", "out", NULL, &src, sizeof src, FIRST_VERSION), DC_E_INVALID);
  out[0] = 8;
  assert_int_equal(dc__write_sized("f", "out", out, &src, sizeof src, FIRST_VERSION), DC_E_INVALID);
  dc_config config, by_macro = DC_CONFIG_INIT;
  dc_config_init(&config, sizeof config);
  assert_memory_equal(&config, &by_macro, sizeof config);
  dc_config_init(NULL, 8);
}

/* ---- tensors ---- */

static dc_status read_tensor(const dc_tensor *t, int64_t *numel) {
  dc_tensor copy;
  return dc__tensor_read("f", "t", t, false, &copy, numel);
}

static void test_tensors(void **state) {
  (void)state;
  float data[24];
  const int64_t shape[3] = {2, 3, 4}, rows[3] = {12, 4, 1}, columns[3] = {1, 2, 6}, ones[3] = {1, 3, 1},
                odd[3] = {99, 1, 77};
  int64_t numel;
  dc_tensor t = {sizeof t, data, shape, NULL, 3, DC_FLOAT32, NULL};
  assert_int_equal(read_tensor(&t, &numel), DC_OK);
  assert_int_equal(numel, 24);
  t.strides = rows;
  assert_int_equal(read_tensor(&t, &numel), DC_OK);
  t.strides = columns;
  assert_int_equal(read_tensor(&t, &numel), DC_E_SHAPE);
  t.shape = ones;
  t.strides = odd; /* strides of dimensions of length 1 mean nothing */
  assert_int_equal(read_tensor(&t, &numel), DC_OK);
  t = (dc_tensor){sizeof t, data, NULL, NULL, 0, DC_FLOAT32, NULL};
  assert_int_equal(read_tensor(&t, &numel), DC_OK);
  assert_int_equal(numel, 1); /* a scalar */
  const int64_t empty[2] = {0, 5}, huge[3] = {1 << 30, 1 << 30, 1 << 30};
  t = (dc_tensor){sizeof t, NULL, empty, NULL, 2, DC_FLOAT32, NULL};
  assert_int_equal(read_tensor(&t, &numel), DC_OK);
  assert_int_equal(numel, 0);
  t.shape = huge;
  t.ndim = 3;
  assert_int_equal(read_tensor(&t, &numel), DC_E_SHAPE);
  for (int32_t dtype = -1; dtype <= 11; dtype++) {
    bool known = dtype >= DC_FLOAT32 && dtype <= DC_BOOL;
    assert_int_equal(dc_dtype_size(dtype) > 0, known);
    assert_int_equal(strcmp(dc_dtype_name(dtype), "unknown") == 0, !known && dtype != 0);
  }
}

/* ---- maps ---- */

static void test_maps(void **state) {
  (void)state;
  enum { KEYS = 500 };
  static int values[KEYS];
  dc__map map = {0};
  for (int64_t i = 0; i < KEYS; i++) {
    assert_true(dc__map_put(&map, i * 4096 - 1000, &values[i])); /* addresses, say */
  }
  for (int64_t i = 0; i < KEYS; i += 2) {
    dc__map_remove(&map, i * 4096 - 1000);
  }
  dc__map_remove(&map, 12345); /* absent */
  assert_int_equal(map.count, KEYS / 2);
  for (int64_t i = 0; i < KEYS; i++) {
    assert_ptr_equal(dc__map_get(&map, i * 4096 - 1000), i % 2 == 0 ? NULL : &values[i]);
  }
  for (int64_t i = 0; i < map.count; i++) {
    assert_int_equal(map.keys[i], (2 * i + 1) * 4096 - 1000); /* in the order of insertion */
  }
  assert_true(dc__map_put(&map, INT64_MIN, &values[0]));
  assert_true(dc__map_put(&map, INT64_MIN, &values[1])); /* replaces */
  assert_ptr_equal(dc__map_get(&map, INT64_MIN), &values[1]);
  dc__map_clear(&map);
  assert_null(dc__map_get(&map, 4096));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_statuses),
      cmocka_unit_test(test_reading_structs),
      cmocka_unit_test(test_writing_structs),
      cmocka_unit_test(test_tensors),
      cmocka_unit_test(test_maps),
  };
  return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
