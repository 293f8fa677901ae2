/* Structs that grow: a caller may be older than the library and pass a shorter struct, or newer and pass a longer one
 * whose tail is zero where it asks for nothing new. Each sized struct of the header has one row (abi-check/abi.py
 * counts them). Each struct ends at an inaccessible page, so reading one byte too many is a fault. */
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "growth.h"

enum { TAIL = 8, CANARY = 0x5a };

static unsigned char *page; /* writable; the page after it is not mapped */
static size_t page_bytes;

/* ---- the table ---- */

typedef enum direction { IN, IN_OR_NULL, OUT, STRIDED } direction;

typedef struct row {
  const char *name;
  size_t size, first; /* the size today, and in the version that introduced it */
  direction direction;
  dc_status (*call)(void *at);
  dc_status (*call_sized)(void *at, size_t size);
  void (*fill)(void *at);
} row;

#define ROW(type, first, ...) \
  { #type, sizeof(type), first, __VA_ARGS__ }

static const row rows[] = {
    ROW(dc_tensor, 48, IN, call_tensor, NULL, fill_tensor),
    ROW(dc_tensor, 48, OUT, call_tensor_out, NULL, NULL),
    ROW(dc_tensor, 48, STRIDED, NULL, call_tensor_strided, fill_tensor),
    ROW(dc_allocator, 40, IN_OR_NULL, call_allocator, NULL, fill_allocator),
    ROW(dc_device_options, 24, IN_OR_NULL, call_device_options, NULL, NULL),
    ROW(dc_comm_options, 24, IN_OR_NULL, call_comm_options, NULL, NULL),
    ROW(dc_comm_callbacks, 72, IN, call_callbacks, NULL, fill_callbacks),
    ROW(dc_launch, 56, OUT, call_launch, NULL, NULL),
    ROW(dc_context_options, 24, IN_OR_NULL, call_context_options, NULL, NULL),
    ROW(dc_config, 48, IN_OR_NULL, call_config, NULL, NULL),
    ROW(dc_memory_stats, 144, OUT, call_stats, NULL, NULL),
    ROW(dc_op_info, 48, OUT, call_op_info, NULL, NULL),
    ROW(dc_trace_event, 48, STRIDED, NULL, call_trace, NULL),
    ROW(dc_layer_config, 160, IN, call_layer_config, NULL, fill_layer_config),
    ROW(dc_layer_call, 96, IN, call_layer_call, NULL, fill_layer_call),
    ROW(dc_layer_cost, 80, OUT, call_layer_cost, NULL, NULL),
    ROW(dc_layer_plan_options, 72, IN, call_plan_options, NULL, fill_plan_options),
    ROW(dc_layer_plan, 80, OUT, call_plan, NULL, NULL),
    ROW(dc_linalg_options, 16, IN_OR_NULL, call_linalg_options, NULL, NULL),
    ROW(dc_spectral_options, 56, IN_OR_NULL, call_spectral_options, NULL, NULL),
    ROW(dc_spectral_info, 48, STRIDED, NULL, call_spectral_info, NULL),
    ROW(dc_iteration_options, 48, IN, call_iteration_options, NULL, fill_iteration),
    ROW(dc_iteration_info, 40, STRIDED, NULL, call_iteration_info, NULL),
    ROW(dc_matrix_source, 32, IN, call_source, NULL, fill_source),
    ROW(dc_sample_layer, 152, IN, call_layer, NULL, fill_layer),
    ROW(dc_device_memory, 40, OUT, call_device_memory, NULL, NULL),
    ROW(dc_adamw_options, 56, IN_OR_NULL, call_adamw_options, NULL, NULL),
    ROW(dc_sgd_options, 48, IN_OR_NULL, call_sgd_options, NULL, NULL),
    ROW(dc_shampoo_options, 136, IN_OR_NULL, call_shampoo_options, NULL, NULL),
    ROW(dc_soap_options, 88, IN_OR_NULL, call_soap_options, NULL, NULL),
    ROW(dc_muon_options, 64, IN_OR_NULL, call_muon_options, NULL, NULL),
    ROW(dc_kfac_options, 80, IN_OR_NULL, call_kfac_options, NULL, NULL),
    ROW(dc_optimizer_stats, 104, OUT, call_optimizer_stats, NULL, NULL),
};
enum { ROWS = sizeof rows / sizeof rows[0] };

/* The last address in the page at which a struct of `size` bytes fits. */
static unsigned char *last(size_t size) {
  return page + page_bytes - (size + sizeof(void *) - 1) / sizeof(void *) * sizeof(void *);
}

/* A valid struct as a caller with `size` bytes would pass it, at the very end of the page. */
static unsigned char *place(const row *r, size_t size, size_t says) {
  unsigned char whole[512] = {0}, *at = last(size);
  if (r->fill != NULL) {
    r->fill(whole);
  }
  memset(page, CANARY, page_bytes);
  memcpy(at, whole, size < sizeof whole ? size : sizeof whole);
  if (r->call_sized == NULL || r->fill != NULL) { /* trace events and reports have no struct_size */
    memcpy(at, &says, size < sizeof says ? size : sizeof says);
  }
  return at;
}

static dc_status call(const row *r, void *at, size_t size) {
  return r->call != NULL ? r->call(at) : r->call_sized(at, size);
}

static void expect(const row *r, size_t size, dc_status got, dc_status want) {
  if (got != want) {
    fail_msg("%s of %zu bytes: %s, must be %s (%s)", r->name, size, dc_status_name(got), dc_status_name(want),
             dc_last_error());
  }
}

/* second-order: 55; layer: 30 */
static void test_callers_of_every_size(void **state) {
  (void)state;
  for (const row *r = rows; r < rows + ROWS; r++) {
    assert_true(r->size >= r->first);
    for (size_t size = r->first; size <= r->size + 3 * TAIL; size += TAIL) {
      unsigned char *at = place(r, size, size);
      expect(r, size, call(r, at, size), DC_OK);
      assert_int_equal(at[-1], CANARY);
    }
  }
}

static void test_shorter_than_the_first(void **state) {
  (void)state;
  for (const row *r = rows; r < rows + ROWS; r++) {
    for (size_t size = 0; size < r->first; size++) {
      /* The size field itself must be readable, even where its value is smaller than the field. */
      unsigned char *at = place(r, size < sizeof size ? sizeof size : size, size);
      expect(r, size, call(r, at, size), DC_E_INVALID);
    }
  }
}

static void test_sizes_that_are_garbage(void **state) {
  (void)state;
  const size_t sizes[] = {SIZE_MAX, 65537, (size_t)0xaaaaaaaaaaaaaaaa};
  for (const row *r = rows; r < rows + ROWS; r++) {
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0] && r->direction != STRIDED; i++) {
      expect(r, sizes[i], call(r, place(r, r->first, sizes[i]), sizes[i]), DC_E_INVALID);
    }
  }
}

/* second-order: 55 */
static void test_tails_that_ask_for_more(void **state) {
  (void)state;
  for (const row *r = rows; r < rows + ROWS; r++) {
    for (size_t byte = 0; byte < TAIL && (r->direction == IN || r->direction == IN_OR_NULL); byte++) {
      unsigned char *at = place(r, r->size + TAIL, r->size + TAIL);
      at[r->size + byte] = 1;
      expect(r, r->size + TAIL, call(r, at, r->size + TAIL), DC_E_UNSUPPORTED);
    }
  }
}

/* The library writes no further than the caller's struct reaches, and leaves the bytes behind it unchanged. */
static void test_outputs(void **state) {
  (void)state;
  for (const row *r = rows; r < rows + ROWS; r++) {
    if (r->direction == OUT) {
      unsigned char after[1024];
      memset(after, CANARY, sizeof after);
      memcpy(after, &r->first, sizeof r->first);
      expect(r, r->first, call(r, after, r->first), DC_OK);
      for (size_t i = r->first; i < sizeof after; i++) {
        assert_int_equal(after[i], CANARY);
      }
    }
  }
}

static void test_null(void **state) {
  (void)state;
  for (const row *r = rows; r < rows + ROWS; r++) {
    if (r->direction != STRIDED) {
      expect(r, 0, call(r, NULL, 0), r->direction == IN_OR_NULL ? DC_OK : DC_E_INVALID);
    }
  }
}

#define INIT(type)                                 \
  static void init_##type(void *at, size_t size) { \
    type##_init(at, size);                         \
  }
INIT(dc_tensor)
INIT(dc_allocator)
INIT(dc_device_options)
INIT(dc_comm_options)
INIT(dc_comm_callbacks)
INIT(dc_launch)
INIT(dc_context_options)
INIT(dc_config)
INIT(dc_memory_stats)
INIT(dc_op_info)
INIT(dc_layer_config)
INIT(dc_layer_call)
INIT(dc_layer_cost)
INIT(dc_layer_plan_options)
INIT(dc_layer_plan)
INIT(dc_linalg_options)
INIT(dc_spectral_options)
INIT(dc_iteration_options)
INIT(dc_matrix_source)
INIT(dc_sample_layer)
INIT(dc_device_memory)
INIT(dc_adamw_options)
INIT(dc_sgd_options)
INIT(dc_shampoo_options)
INIT(dc_soap_options)
INIT(dc_muon_options)
INIT(dc_kfac_options)
INIT(dc_optimizer_stats)

/* dc_x_init() clears the caller's struct and nothing beyond, also where caller and library disagree on the size. */
static void test_initialisers(void **state) {
  (void)state;
  const struct {
    void (*init)(void *at, size_t size);
    size_t first;
  } all[] = {{init_dc_tensor, 48},         {init_dc_allocator, 40},          {init_dc_device_options, 24},
             {init_dc_comm_options, 24},   {init_dc_comm_callbacks, 72},     {init_dc_context_options, 24},
             {init_dc_config, 48},         {init_dc_memory_stats, 144},      {init_dc_op_info, 48},
             {init_dc_layer_config, 160},  {init_dc_layer_call, 96},         {init_dc_layer_cost, 80},
             {init_dc_linalg_options, 16}, {init_dc_spectral_options, 56},   {init_dc_matrix_source, 32},
             {init_dc_sample_layer, 152},  {init_dc_layer_plan_options, 72}, {init_dc_layer_plan, 80},
             {init_dc_device_memory, 40},  {init_dc_iteration_options, 48},  {init_dc_adamw_options, 56},
             {init_dc_sgd_options, 48},    {init_dc_shampoo_options, 136},   {init_dc_soap_options, 88},
             {init_dc_muon_options, 64},   {init_dc_kfac_options, 80},       {init_dc_optimizer_stats, 104},
             {init_dc_launch, 56}};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    all[i].init(NULL, all[i].first);
    for (size_t size = sizeof size; size <= all[i].first + TAIL; size++) {
      unsigned char *at = last(size);
      memset(page, CANARY, page_bytes);
      all[i].init(at, size);
      assert_memory_equal(at, &size, sizeof size);
      for (unsigned char *after = at + size; after < page + page_bytes; after++) {
        assert_int_equal(*after, CANARY);
      }
      for (size_t byte = sizeof size; byte < size; byte++) {
        assert_int_equal(at[byte], 0);
      }
      assert_int_equal(at[-1], CANARY);
    }
  }
}

static int set_up(void **state) {
  (void)state;
  page_bytes = (size_t)sysconf(_SC_PAGESIZE);
  page = mmap(NULL, 2 * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED || mprotect(page + page_bytes, page_bytes, PROT_NONE) != 0) {
    return -1;
  }
  dc_tensor shard = DC_TENSOR_INIT, grad = DC_TENSOR_INIT;
  fill_tensor(&shard);
  fill_tensor(&grad);
  grad.data = gradient;
  const int64_t id = ID;
  dc_layer_config config = DC_LAYER_CONFIG_INIT;
  fill_layer_config(&config);
  return dc_device_open("cpu", NULL, &device) || dc_layer_create(device, &config, &layer) ||
         dc_linalg_create(device, NULL, &linalg) || dc_context_create(device, NULL, &context) ||
         dc_init(context, NULL, NULL, 64) || dc_register_z3_param(context, ID, &four, 1, &shard, &grad, 0, 0) ||
         dc_register_graph_z3(context, GRAPH, &id, 1) || dc_context_trace_start(context, 64);
}

static int tear_down(void **state) {
  (void)state;
  dc_layer_destroy(layer);
  dc_context_destroy(context);
  dc_linalg_destroy(linalg);
  dc_device_destroy(device);
  return munmap(page, 2 * page_bytes);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_callers_of_every_size),
      cmocka_unit_test(test_shorter_than_the_first),
      cmocka_unit_test(test_sizes_that_are_garbage),
      cmocka_unit_test(test_tails_that_ask_for_more),
      cmocka_unit_test(test_outputs),
      cmocka_unit_test(test_null),
      cmocka_unit_test(test_initialisers),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
