/* PTX instructions one by one, and the faults that their execution finds, in texts of a few lines. */
#include "harness.h"

#include <stdio.h>

#include "cudasim.h"
#include "device/cuda/driver.h"

#define X(name, arguments) dc__cu_result name arguments;
DC__CU_FUNCTIONS(X)
#undef X

enum { THREADS = 64, BLOCKS = 3, WORDS = THREADS * BLOCKS };
enum { ILLEGAL = 700, ASKEW = 716, FAILED = 719, REFUSED = 218 };

static dc__cu_context context;
static dc__cu_pool pool;
static dc__cu_stream stream;
static dc__cu_ptr memory;
static uint64_t *words;

static int set_up(void **state) {
  (void)state;
  const dc__cu_pool_props props = {.alloc_type = 1, .location = {.type = 1}};
  cudasim_reset();
  assert_int_equal(cuInit(0), 0);
  assert_int_equal(cuDevicePrimaryCtxRetain(&context, 0), 0);
  assert_int_equal(cuCtxPushCurrent_v2(context), 0);
  assert_int_equal(cuMemPoolCreate(&pool, &props), 0);
  assert_int_equal(cuStreamCreate(&stream, DC__CU_STREAM_NON_BLOCKING), 0);
  assert_int_equal(cuMemAllocFromPoolAsync(&memory, WORDS * sizeof *words, pool, stream), 0);
  words = cudasim_host_ptr((const void *)(uintptr_t)memory);
  for (int i = 0; i < WORDS; i++) {
    words[i] = (uint64_t)i;
  }
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  (void)cuMemFreeAsync(memory, stream);
  (void)cuStreamDestroy_v2(stream);
  (void)cuMemPoolDestroy(pool);
  (void)cuCtxPopCurrent_v2(&context);
  (void)cuDevicePrimaryCtxRelease_v2(0);
  assert_int_equal(cudasim_live(), 0);
  return 0;
}

/* A kernel in which %rd1 is the memory, %r1 the thread's number, %rd2 the address of its word, and %rd9 the value that
 * is stored there at the end. */
static const char *text_of(const char *code) {
  static char text[4096];
  snprintf(
      text, sizeof text,
      "//\n.version 8.0\n.target sm_80\n.address_size 64\n.visible .entry probe(\n"
      "\t.param .align 8 .b8 probe_param_0[16]\n)\n.maxntid %d, 1, 1\n{\n\t.reg .pred \t%%p<9>;\n"
      "\t.reg .b16 \t%%rs<9>;\n\t.reg .f32 \t%%f<9>;\n\t.reg .b32 \t%%r<40>;\n\t.reg .f64 \t%%fd<9>;\n"
      "\t.reg .b64 \t%%rd<10>;\n\t.shared .align 16 .b8 tile[1024];\n"
      "\tld.param.u64 \t%%rd1, [probe_param_0];\n\tmov.u32 \t%%r1, %%tid.x;\n\tmov.u32 \t%%r2, %%ctaid.x;\n"
      "\tmov.u32 \t%%r3, %%ntid.x;\n\tmad.lo.s32 \t%%r4, %%r2, %%r3, %%r1;\n\tmul.wide.u32 \t%%rd3, %%r4, 8;\n"
      "\tadd.s64 \t%%rd2, %%rd1, %%rd3;\n\tmov.u64 \t%%rd9, 0;\n%s\n\tst.global.u64 \t[%%rd2], %%rd9;\n\tret;\n\n}\n",
      THREADS, code);
  return text;
}

/* Returns the error that lost the device, or the error of loading the text. */
static int run(const char *code, unsigned blocks) {
  dc__cu_module module;
  dc__cu_function function;
  uint64_t args[2] = {memory, 0};
  void *params[] = {args};
  const int refused = cuModuleLoadData(&module, text_of(code));
  if (refused != 0) {
    return refused;
  }
  assert_int_equal(cuModuleGetFunction(&function, module, "probe"), 0);
  assert_int_equal(cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, params, NULL), 0);
  (void)cuStreamSynchronize(stream);
  (void)cuModuleUnload(module);
  return cudasim_lost();
}

static uint64_t stored_by(const char *code) {
  assert_int_equal(run(code, 1), 0);
  return words[0];
}

/* ---- instructions ---- */

static void test_instructions(void **state) {
  (void)state;
  static const struct {
    const char *code;
    uint64_t expected;
  } cases[] = {
      {"mov.u32 %r5, 7; shl.b32 %r6, %r5, 33; cvt.u64.u32 %rd9, %r6;", 0},
      {"mov.u32 %r5, -8; shr.s32 %r6, %r5, 1; cvt.s64.s32 %rd9, %r6;", (uint64_t)-4},
      {"mov.u32 %r5, -8; shr.u32 %r6, %r5, 1; cvt.u64.u32 %rd9, %r6;", 0x7ffffffc},
      {"mov.u32 %r5, -8; shr.s32 %r6, %r5, 40; cvt.u64.u32 %rd9, %r6;", 0xffffffff},
      {"mov.u32 %r5, -7; rem.s32 %r6, %r5, 3; cvt.s64.s32 %rd9, %r6;", (uint64_t)-1},
      {"mov.u32 %r5, -7; div.u32 %r6, %r5, 2; cvt.u64.u32 %rd9, %r6;", 0x7ffffffc},
      {"mov.u32 %r5, -7; abs.s32 %r6, %r5; neg.s32 %r7, %r6; cvt.s64.s32 %rd9, %r7;", (uint64_t)-7},
      {"mov.u32 %r5, -7; mul.wide.s32 %rd9, %r5, 3;", (uint64_t)-21},
      {"mov.u32 %r5, -1; mul.wide.u32 %rd9, %r5, 2;", 0x1fffffffe},
      {"mov.u32 %r5, -1; mul.lo.s32 %r6, %r5, 5; cvt.u64.u32 %rd9, %r6;", 0xfffffffb},
      {"mov.u32 %r5, 0; mov.u32 %r6, -1; max.s32 %r7, %r5, %r6; max.u32 %r8, %r5, %r6; mov.b64 %rd9, {%r7, %r8};",
       0xffffffff00000000},
      {"mov.u32 %r5, 5; bfi.b32 %r6, %r5, -1, 3, 29; cvt.u64.u32 %rd9, %r6;", 0x2f},
      {"mov.u32 %r5, 287454020; prmt.b32 %r6, %r5, 0, 291; cvt.u64.u32 %rd9, %r6;", 0x44332211},
      {"mov.u32 %r5, 61680; popc.b32 %r6, %r5; cvt.u64.u32 %rd9, %r6;", 8},
      {"mov.u64 %rd4, 1; clz.b64 %r6, %rd4; cvt.u64.u32 %rd9, %r6;", 63},
      {"mov.u32 %r5, 200; cvt.u16.u32 %rs1, %r5; cvt.s16.s8 %rs2, %rs1; mov.u16 %rs3, 1; "
       "mov.b32 %r6, {%rs2, %rs3}; cvt.u64.u32 %rd9, %r6;",
       0x1ffc8},
      {"mov.u64 %rd4, 1311768467463790320; mov.b64 {%r5, %r6}, %rd4; cvt.u64.u32 %rd9, %r6;", 0x12345678},
      {"setp.gt.u32 %p1, %r1, 4; selp.b64 %rd9, 1, 2, %p1;", 2},
      {"mov.f32 %f1, 0f7FC00000; setp.lt.f32 %p1, %f1, %f1; setp.ltu.f32 %p2, %f1, %f1; xor.pred %p3, %p1, %p2; "
       "selp.b64 %rd9, 1, 0, %p3;",
       1},
      {"mov.f32 %f1, 0f7FC00000; max.f32 %f2, %f1, 0fBF800000; mov.b32 %r5, %f2; cvt.u64.u32 %rd9, %r5;", 0xbf800000},
      {"mov.f32 %f1, 0f00000000; mov.f32 %f2, 0f80000000; min.f32 %f3, %f1, %f2; mov.b32 %r5, %f3; "
       "cvt.u64.u32 %rd9, %r5;",
       0x80000000},
      {"mov.f32 %f1, 0f3F800001; fma.rn.f32 %f2, %f1, %f1, 0fBF800002; mov.b32 %r5, %f2; cvt.u64.u32 %rd9, %r5;",
       0x28800000},
      {"mov.f32 %f1, 0f3F800001; mul.rn.f32 %f2, %f1, %f1; add.rn.f32 %f3, %f2, 0fBF800002; mov.b32 %r5, %f3; "
       "cvt.u64.u32 %rd9, %r5;",
       0},
      {"mov.f32 %f1, 0f00000001; ex2.approx.ftz.f32 %f2, %f1; mov.b32 %r5, %f2; cvt.u64.u32 %rd9, %r5;", 0x3f800000},
      {"mov.f32 %f1, 0f00000001; rcp.approx.ftz.f32 %f2, %f1; mov.b32 %r5, %f2; cvt.u64.u32 %rd9, %r5;", 0x7f800000},
      {"mov.f32 %f1, 0f3F800000; copysign.f32 %f2, 0f80000000, %f1; mov.b32 %r5, %f2; cvt.u64.u32 %rd9, %r5;",
       0xbf800000},
      {"mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0fC0000000; cvt.rn.f16x2.f32 %r5, %f1, %f2; cvt.u64.u32 %rd9, %r5;",
       0x3c00c000},
      {"mov.f32 %f1, 0f7F800001; cvt.rn.bf16x2.f32 %r5, %f1, 0f3F800000; cvt.u64.u32 %rd9, %r5;", 0x7fff3f80},
      {"mov.f64 %fd1, 0d43F0000000000000; cvt.rzi.s64.f64 %rd9, %fd1;", INT64_MAX},
      {"mov.f64 %fd1, 0d7FF8000000000000; cvt.rzi.s64.f64 %rd9, %fd1;", UINT64_C(1) << 63},
      {"mov.f64 %fd1, 0dC004000000000000; cvt.rzi.s64.f64 %rd9, %fd1;", (uint64_t)-2},
      {"mov.u64 %rd4, -1; cvt.rn.f64.u64 %fd1, %rd4; mov.b64 %rd9, %fd1;", 0x43f0000000000000},
      {"mov.u64 %rd4, -1; cvt.rn.f64.s64 %fd1, %rd4; mov.b64 %rd9, %fd1;", 0xbff0000000000000},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const uint64_t found = stored_by(cases[i].code);
    if (found != cases[i].expected) {
      fail_msg("%s: %llx, must be %llx", cases[i].code, (unsigned long long)found,
               (unsigned long long)cases[i].expected);
    }
  }
}

static void test_threads_meet(void **state) {
  (void)state;
  /* each thread reads its neighbour's word of the block */
  assert_int_equal(run("mul.lo.s32 %r5, %r1, 4; mov.u32 %r6, tile; add.s32 %r7, %r6, %r5; st.shared.u32 [%r7], %r1; "
                       "bar.sync 0; xor.b32 %r8, %r5, 4; add.s32 %r9, %r6, %r8; ld.shared.u32 %r10, [%r9]; "
                       "cvt.u64.u32 %rd9, %r10;",
                       BLOCKS),
                   0);
  for (int i = 0; i < WORDS; i++) {
    assert_int_equal(words[i], (i ^ 1) % THREADS);
  }
  assert_int_equal(run("setp.lt.u32 %p1, %r1, 40; vote.sync.ballot.b32 %r5, %p1, -1; "
                       "shfl.sync.idx.b32 %r6|%p2, %r1, 5, 31, -1; mov.b64 %rd9, {%r5, %r6};",
                       1),
                   0);
  assert_int_equal(words[3], UINT64_C(5) << 32 | 0xffffffff);
  assert_int_equal(words[40], UINT64_C(37) << 32 | 0xff);
}

/* A copy takes effect at its wait, and fills with zeros beyond its source size. */
static void test_copies(void **state) {
  (void)state;
  static const char *const code =
      "shl.b32 %r5, %r1, 4; mov.u32 %r6, tile; add.s32 %r7, %r6, %r5; cp.async.cg.shared.global [%r7], [%rd1], 16, 4; "
      "ld.shared.u64 %rd4, [%r7]; cp.async.wait_all; ld.shared.u64 %rd5, [%r7]; add.s64 %rd9, %rd4, %rd5;";
  words[0] = 0x700000009;
  assert_int_equal(stored_by(code), 8); /* poison (-1) before the wait, and 9 */
}

/* ---- faults ---- */

static void expect_fault(const char *code, int error) {
  void *state = NULL;
  const int found = run(code, BLOCKS);
  if (found != error) {
    fail_msg("%s: error %d, must be %d", code, found, error);
  }
  (void)tear_down(&state);
  (void)set_up(&state);
}

static void test_faults(void **state) {
  (void)state;
  expect_fault("ld.global.u64 %rd9, [%rd1+4];", ASKEW);
  expect_fault("ld.global.u64 %rd9, [%rd1+4096];", ILLEGAL);
  expect_fault("mov.u32 %r5, 1024; ld.shared.u32 %r6, [%r5];", ILLEGAL);
  expect_fault("ld.param.u64 %rd9, [probe_param_0+16];", FAILED);
  expect_fault("mov.u32 %r5, tile; st.shared.u32 [%r5], %r1;", FAILED); /* a race */
  expect_fault(
      "mov.u32 %r5, tile; shl.b32 %r6, %r1, 2; add.s32 %r7, %r5, %r6; st.shared.u32 [%r7], %r1; "
      "bar.warp.sync -1; xor.b32 %r8, %r6, 128; add.s32 %r9, %r5, %r8; ld.shared.u32 %r10, [%r9];",
      FAILED);                                         /* a warp's barrier does not order other warps */
  expect_fault("st.global.u64 [%rd1], %rd9;", FAILED); /* several blocks write to it */
  expect_fault("setp.lt.u32 %p1, %r1, 9; @%p1 bra $out; bar.sync 0;\n$out:\n", FAILED);
  expect_fault("setp.lt.u32 %p1, %r1, 9; @%p1 bra $out; bar.warp.sync -1;\n$out:\n", FAILED);
  expect_fault("mov.u32 %r5, 8; cp.async.cg.shared.global [%r5], [%rd1], 16, 16;", ASKEW);
}

static void test_unknown_text_is_refused(void **state) {
  (void)state;
  static const char *const texts[] = {
      "wgmma.fence.sync.aligned;", "add.rz.f32 %f1, %f2, %f3;", "bra $nowhere;",
      "mov.u32 %r99, 1;",          "mov.u32 %r5, nothing;",     ".local .align 8 .b8 frame[8];"};
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
    assert_int_equal(run(texts[i], 1), REFUSED);
  }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_instructions),
      TEST(test_threads_meet),
      TEST(test_copies),
      TEST(test_faults),
      TEST(test_unknown_text_is_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
