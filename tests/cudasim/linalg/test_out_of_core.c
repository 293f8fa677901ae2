/* Out-of-core products on the device compared with the CPU's: operands in its memory and in files, types, strides, and
 * blocks larger than a stage. Also budgets from the smallest on, which bound its memory, and failures. On the simulated
 * driver, or on a card (tests/card). */
#include "device_pair.h"
#include "linalg/out_of_core/out_of_core_test.h"

#ifdef CUDASIM_TSAN
enum { ROUNDS = 12, FAILING = 7 };
#else
enum { ROUNDS = 64, FAILING = 1 };
#endif

/* A product whose sums are exact. `files` has a bit for each of a, b and out. */
typedef struct product {
  int64_t m, k, n;
  int32_t type, out, fd[3];
  int files;
  tensor_pair a, b, c;
  int64_t strides[2][2], shape[2][2];
  dc_tensor tensors[3];
  dc_matrix_source from[3];
  double *x, *y, *want;
} product;

static void transpose(dc_tensor *t, int64_t strides[2], int64_t shape[2], int64_t rows, int64_t cols) {
  strides[0] = 1;
  strides[1] = rows;
  shape[0] = rows;
  shape[1] = cols;
  t->strides = strides;
  t->shape = shape;
}

/* x as a [rows, cols] tensor; if turned, its transpose is stored. */
static tensor_pair matrix_of(const double *x, int32_t type, int64_t rows, int64_t cols, bool turned) {
  double *given = calloc((size_t)(rows * cols) + 1, sizeof *given);
  for (int64_t i = 0; i < rows * cols; i++) {
    given[turned ? i % cols * rows + i / cols : i] = x[i];
  }
  const tensor_pair w = matrix_pair(given, type, -1, turned ? cols : rows, turned ? rows : cols);
  free(given);
  return w;
}

static void begin(product *p, int64_t m, int64_t k, int64_t n, int32_t type, int files, int turned, int64_t offset) {
  memset(p, 0, sizeof *p);
  p->m = m, p->k = k, p->n = n;
  p->type = type;
  p->out = type == DC_FLOAT64 ? type : DC_FLOAT32;
  p->files = files;
  p->x = calloc((size_t)(m * k) + 1, sizeof(double));
  p->y = calloc((size_t)(k * n) + 1, sizeof(double));
  p->want = calloc((size_t)(m * n) + 1, sizeof(double));
  uint64_t seed = (uint64_t)(m + 3 * k + 7 * n);
  for (int64_t i = 0; i < m * k; i++) {
    p->x[i] = floor(number(&seed) * 4);
  }
  for (int64_t i = 0; i < k * n; i++) {
    p->y[i] = floor(number(&seed) * 4);
  }
  multiply(p->x, p->y, p->want, m, k, n);
  turned &= ~files;
  p->a = matrix_of(p->x, type, m, k, turned & 1);
  p->b = matrix_of(p->y, type, k, n, turned & 2);
  p->c = matrix_pair(NULL, p->out, -1, m, n);
  tensor_pair *all[] = {&p->a, &p->b, &p->c};
  for (int i = 0; i < 3; i++) {
    p->tensors[i] = all[i]->t[1];
    p->fd[i] = -1;
    if (files >> i & 1) {
      p->fd[i] = file_of(all[i]->data[0], all[i]->bytes, offset);
      p->tensors[i].data = NULL;
    } else if (i < 2 && turned >> i & 1) {
      transpose(&p->tensors[i], p->strides[i], p->shape[i], i == 0 ? m : k, i == 0 ? k : n);
    }
    p->from[i] = source_of(&p->tensors[i], p->fd[i], offset);
  }
}

static void finish(product *p) {
  for (int i = 0; i < 3; i++) {
    if (p->fd[i] >= 0) {
      close(p->fd[i]);
    }
  }
  free_pair(&p->a), free_pair(&p->b), free_pair(&p->c);
  free(p->x), free(p->y), free(p->want);
}

/* Checks that out holds the exact product. */
static void expect_right(product *p) {
  char *got = calloc(1, p->c.bytes + 1);
  if (p->files & 4) {
    assert_true(pread(p->fd[2], got, p->c.bytes, p->from[2].offset) == (ssize_t)p->c.bytes);
  } else {
    copy(got, p->c.data[1], p->c.bytes);
  }
  for (int64_t i = 0; i < p->m * p->n; i++) {
    const double element = p->out == DC_FLOAT64 ? ((double *)(void *)got)[i] : (double)((float *)(void *)got)[i];
    if (element != p->want[i]) {
      fail_msg("[%d, %d] is %g, not %g", (int)(i / p->n), (int)(i % p->n), element, p->want[i]);
    }
  }
  free(got);
}

/* Runs on a handle of its own, which must take no more of the device's memory than the budget. */
static void run(product *p, int64_t budget) {
  dc_linalg *own;
  OK(dc_linalg_create(card, NULL, &own));
  atomic_store(&card->peak_bytes, atomic_load(&card->bytes));
  const long long before = atomic_load(&card->bytes);
  int64_t used = 0;
  OK(dc_linalg_begin_query(own));
  OK(dc_matmul_bounded(own, &p->from[0], &p->from[1], &p->from[2], budget, NULL));
  OK(dc_linalg_end_query(own, &used));
  assert_true(used <= budget);
  OK(dc_matmul_bounded(own, &p->from[0], &p->from[1], &p->from[2], budget, NULL));
  assert_true(atomic_load(&card->peak_bytes) - before <= budget);
  expect_right(p);
  dc_linalg_destroy(own);
}

static int64_t min_budget(product *p) {
  int64_t needed = 0;
  FAILS(dc_matmul_bounded(cuda_linalg, &p->from[0], &p->from[1], &p->from[2], 1, &needed), DC_E_BUFFER_TOO_SMALL,
        "dc_matmul_bounded: budget_bytes = 1, must be >= ");
  FAILS(dc_matmul_bounded(cuda_linalg, &p->from[0], &p->from[1], &p->from[2], needed - 1, NULL), DC_E_BUFFER_TOO_SMALL,
        "must be");
  return needed;
}

static void test_shapes_and_budgets(void **state) {
  (void)state;
  static const int64_t LENGTHS[] = {1, 2, 17, 64, 90};
  static const int32_t TYPES[] = {DC_FLOAT32, DC_FLOAT64, DC_BFLOAT16, DC_FLOAT16};
  uint64_t seed = 28;
  for (int round = 0; round < ROUNDS; round++) {
    int64_t s[3];
    for (int i = 0; i < 3; i++) {
      s[i] = LENGTHS[(int)((number(&seed) + 1) * 2.5)];
    }
    s[round % 3] = 130 + (int64_t)((number(&seed) + 1) * 60);
    product p;
    begin(&p, s[0], s[1], s[2], TYPES[round % 4], round % 8, round / 8 % 4, round % 5);
    const int64_t needed = p.files != 0 ? min_budget(&p) : 1;
    for (int64_t budget = needed; budget < 4000000; budget = budget * 6 + 1000) {
      run(&p, budget);
    }
    finish(&p);
  }
}

/* Rows larger than a stage; more rows than a stage holds; and both, whole and in pieces. */
static void test_large_blocks(void **state) {
  (void)state;
  enum { LONG = 600000 };
  static const int64_t shapes[][3] = {{2, LONG, 1}, {1, 2, LONG}, {LONG, 1, 2}};
  for (size_t i = 0; i < DC__COUNT(shapes); i++) {
    product p;
    begin(&p, shapes[i][0], shapes[i][1], shapes[i][2], DC_FLOAT64, 7, 0, 0);
    run(&p, 100000000);
    run(&p, 3000000);
    finish(&p);
  }
}

static void test_nothing_to_sum(void **state) {
  (void)state;
  for (int files = 0; files < 8; files += 4) {
    product p;
    begin(&p, 70, 0, 80, DC_FLOAT32, 3 | files, 0, 0);
    run(&p, 100000);
    finish(&p);
    begin(&p, 0, 4, 3, DC_FLOAT32, 3 | files, 0, 0);
    run(&p, 1);
    finish(&p);
  }
}

/* On each side the tensors are in that side's memory. */
static void test_refusals_are_the_same(void **state) {
  (void)state;
  product p;
  begin(&p, 70, 80, 90, DC_FLOAT32, 1, 0, 24);
  dc_matrix_source a[2] = {p.from[0], p.from[0]}, b[2] = {source_of(&p.b.t[0], -1, 0), p.from[1]},
                   out[2] = {source_of(&p.c.t[0], -1, 0), p.from[2]};
#define ALL(budget) BOTH(dc_matmul_bounded(linalg_of(k), &a[k], &b[k], &out[k], budget, NULL))
  ALL(0);
  assert_non_null(strstr(cpu_text, "budget_bytes = 0"));
  a[0].offset = a[1].offset = 1000;
  ALL(100000);
  assert_non_null(strstr(cpu_text, "a's file has"));
  a[0].fd = a[1].fd = 1000;
  ALL(100000);
  assert_non_null(strstr(cpu_text, "no open file"));
  a[0] = a[1] = p.from[0];
  a[0].fd = a[1].fd = open("/dev/null", O_RDONLY);
  a[0].offset = a[1].offset = 0;
  ALL(100000);
  assert_non_null(strstr(cpu_text, "a's file, byte 0: the file ends"));
  out[0] = out[1] = a[0];
  dc_tensor files[2] = {p.c.t[0], p.c.t[0]};
  files[0].data = files[1].data = NULL;
  out[0].tensor = out[1].tensor = files;
  a[0] = a[1] = p.from[0];
  for (int k = 0; k < 2; k++) { /* the CPU's threads write at once, so either may fail first */
    FAILS(dc_matmul_bounded(linalg_of(k), &a[k], &b[k], &out[k], 100000, NULL), DC_E_SYSTEM, "out's file, byte ");
    assert_non_null(strstr(dc_last_error(), ": Bad file descriptor"));
  }
  close(out[0].fd);
  b[0].tensor = b[1].tensor = &p.c.t[0];
  ALL(100000);
  assert_non_null(strstr(cpu_text, "b has 70 rows, must have 80"));
  dc_tensor askew = p.b.t[1];
  askew.data = (char *)askew.data + 2;
  b[1].tensor = &askew;
  FAILS(dc_matmul_bounded(cuda_linalg, &a[1], &b[1], &p.from[2], 100000, NULL), DC_E_INVALID, "b.data = ");
  run(&p, 100000); /* the failures left nothing queued */
  finish(&p);
}

static void test_workspace_of_the_callers(void **state) {
  (void)state;
  enum { BYTES = 100000 };
  product p;
  void *lent;
  begin(&p, 70, 300, 90, DC_FLOAT32, 7, 0, 0);
  assert_int_equal(card->ops->alloc(card, BYTES + 64, DC_MEMORY_DEVICE, &lent), DC_OK);
  OK(dc_linalg_set_workspace(cuda_linalg, (char *)lent + 64, BYTES));
  const long long before = atomic_load(&card->bytes);
  OK(dc_matmul_bounded(cuda_linalg, &p.from[0], &p.from[1], &p.from[2], BYTES, NULL));
  expect_right(&p);
  assert_true(atomic_load(&card->bytes) == before);
  FAILS(dc_matmul_bounded(cuda_linalg, &p.from[0], &p.from[1], &p.from[2], 100 * BYTES, NULL), DC_E_BUFFER_TOO_SMALL,
        "the workspace has 100000 bytes");
  OK(dc_linalg_set_workspace(cuda_linalg, NULL, 0));
  card->ops->free(card, lent, BYTES + 64, DC_MEMORY_DEVICE);
  finish(&p);
}

#ifndef ON_CARD
/* Streams that run only while the host waits for them reveal missing waits. */
static void test_held_streams(void **state) {
  (void)state;
  cudasim_hold();
  for (int files = 1; files < 8; files++) {
    product p;
    begin(&p, 200, 150, 170, DC_FLOAT32, files, 0, 0);
    const int64_t needed = min_budget(&p);
    run(&p, needed);
    run(&p, 2 * needed);
    run(&p, 1000000);
    finish(&p);
  }
}

/* Every call of the driver and of cuBLASLt fails in turn: whichever call reports the error, nothing leaks. */
static int use_all(void **state, const char *counted, const char *failing, int before) {
  assert_int_equal(open_both(state), 0);
  product p, q;
  begin(&p, 70, 33, 66, DC_FLOAT32, 7, 0, 0);
  begin(&q, 3, 0, 2, DC_FLOAT32, 3, 0, 0);
  if (failing != NULL) {
    cudasim_fail(failing, before, strncmp(failing, "cublas", 6) == 0 ? DC__LT_ALLOC_FAILED : 2);
  }
  const int begun = cudasim_calls(counted);
  const dc_status status[] = {dc_matmul_bounded(cuda_linalg, &p.from[0], &p.from[1], &p.from[2], 100000, NULL),
                              dc_matmul_bounded(cuda_linalg, &q.from[0], &q.from[1], &q.from[2], 100000, NULL)};
  const int calls = cudasim_calls(counted) - begun;
  const bool told = status[0] != DC_OK || status[1] != DC_OK;
  if (told != (failing != NULL)) {
    fail_msg("%s, call %d: %s", failing == NULL ? "nothing" : failing, before, dc_last_error());
  }
  finish(&p), finish(&q);
  assert_int_equal(close_both(state), 0);
  return calls;
}

static void test_every_call_fails(void **state) {
  static const char *const functions[] = {
      "cuMemcpyAsync",     "cuMemsetD8Async",           "cuMemHostAlloc", "cuMemAllocFromPoolAsync",
      "cuStreamCreate",    "cuStreamSynchronize",       "cuEventCreate",  "cuEventRecord",
      "cuStreamWaitEvent", "cuEventSynchronize",        "cublasLtCreate", "cublasLtMatmulAlgoGetHeuristic",
      "cublasLtMatmul",    "cublasLtMatrixLayoutCreate"};
  fail_each_call(state, use_all, functions, DC__COUNT(functions), FAILING);
}
#endif

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_shapes_and_budgets),
      TEST(test_large_blocks),
      TEST(test_nothing_to_sum),
      TEST(test_refusals_are_the_same),
      TEST(test_workspace_of_the_callers),
#ifndef ON_CARD
      TEST(test_held_streams),
      TEST(test_every_call_fails),
#endif
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
