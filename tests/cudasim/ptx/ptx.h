/* PTX as nvcc emits it, executed thread by thread: inline assembly, contracted products, parameter layouts and races by
 * address are those of a card. Only what the kernels of src/kernels/cuda need is known; anything else is refused when
 * the text is loaded. It is strict where a card is lax or silent:
 *
 *   shared memory   is poisoned before a block begins. Two threads' accesses to a byte, one of them a write, need a
 *                   barrier between them: of the block, or bar.warp.sync within a warp
 *   cp.async        writes at cp.async.wait_all, and poisons its destination until then
 *   warps           a collective instruction finds all threads of its mask at the same place
 *   blocks          run in random order. No two of a launch may touch a byte, one of them by a write, except by atomics
 *   addresses       are aligned to what is moved, in memory that the card may access
 *
 * add.f32 and mul.f32 without .rn may become one fma in ptxas; here they are two operations. */
#ifndef TESTS_CUDASIM_PTX_H
#define TESTS_CUDASIM_PTX_H

#include <setjmp.h>

#include "cudasim_internal.h"

/* ---- the text as a program: parse.c ---- */

typedef enum ptx_type {
  PTX_NONE,
  PTX_PRED,
  PTX_B8,
  PTX_B16,
  PTX_B32,
  PTX_B64,
  PTX_U8,
  PTX_U16,
  PTX_U32,
  PTX_U64,
  PTX_S8,
  PTX_S16,
  PTX_S32,
  PTX_S64,
  PTX_F16,
  PTX_F32,
  PTX_F64,
  PTX_F16X2,
  PTX_BF16,
  PTX_BF16X2
} ptx_type;

#define PTX_OPS(X)        \
  X(ABS, "abs")           \
  X(ADD, "add")           \
  X(AND, "and")           \
  X(ATOM, "atom")         \
  X(BAR, "bar")           \
  X(BFI, "bfi")           \
  X(BRA, "bra")           \
  X(CLZ, "clz")           \
  X(COPYSIGN, "copysign") \
  X(CP, "cp")             \
  X(CVT, "cvt")           \
  X(CVTA, "cvta")         \
  X(DIV, "div")           \
  X(EX2, "ex2")           \
  X(FMA, "fma")           \
  X(LD, "ld")             \
  X(LDMATRIX, "ldmatrix") \
  X(MAD, "mad")           \
  X(MAX, "max")           \
  X(MIN, "min")           \
  X(MMA, "mma")           \
  X(MOV, "mov")           \
  X(MUL, "mul")           \
  X(NEG, "neg")           \
  X(NOT, "not")           \
  X(OR, "or")             \
  X(POPC, "popc")         \
  X(PRMT, "prmt")         \
  X(RCP, "rcp")           \
  X(REM, "rem")           \
  X(RET, "ret")           \
  X(SELP, "selp")         \
  X(SETP, "setp")         \
  X(SHFL, "shfl")         \
  X(SHL, "shl")           \
  X(SHR, "shr")           \
  X(SQRT, "sqrt")         \
  X(ST, "st")             \
  X(SUB, "sub")           \
  X(VOTE, "vote")         \
  X(XOR, "xor")

typedef enum ptx_op {
#define X(name, text) PTX_##name,
  PTX_OPS(X)
#undef X
      PTX_OP_COUNT
} ptx_op;

/* Words of an opcode that change what it does. */
enum {
  PTX_WIDE = 1,
  PTX_SHARED = 2,
  PTX_PARAM = 4,
  PTX_TRANS = 8,
  PTX_APPROX = 16,
  PTX_RZI = 32,
  PTX_WARP_BARRIER = 64,
  PTX_WAIT = 128 /* cp.async.wait_all */,
  PTX_SPECIAL = 256 /* mov of %tid.x and the like */
};
typedef enum ptx_compare {
  PTX_EQ,
  PTX_NE,
  PTX_LT,
  PTX_LE,
  PTX_GT,
  PTX_GE,
  PTX_EQU,
  PTX_NEU,
  PTX_LTU,
  PTX_LEU,
  PTX_GTU,
  PTX_GEU,
  PTX_NAN
} ptx_compare;

enum { PTX_OPERANDS = 14, PTX_ALWAYS = -1, PTX_LINE = 120 };

typedef struct ptx_insn {
  uint8_t op, type, from /* cvt's and mma's second type */, compare;
  uint8_t width;   /* elements of a vector that is moved */
  uint8_t results; /* number of operands that are written, which come first */
  uint8_t count;   /* number of all operands */
  bool negated;    /* whether the guard is negated */
  uint16_t words;
  int32_t guard;  /* a register, or PTX_ALWAYS */
  int32_t target; /* index of a branch's target */
  int32_t offset; /* of an address; its base is the last operand, but the first one of a store or cp */
  int32_t line;
  int32_t at[PTX_OPERANDS]; /* a register; or ~i: constant i */
} ptx_insn;

typedef struct ptx_entry {
  struct ptx_entry *next;
  char *name;
  ptx_insn *code;
  int32_t count, capacity;
  uint64_t *constants;
  int32_t constant_count, constant_capacity;
  int32_t registers;
  uint32_t param_bytes, shared_bytes, threads;
  bool collective;       /* its threads meet */
  cudasim_kernel kernel; /* as the driver sees it */
} ptx_entry;

typedef struct ptx_module {
  ptx_entry *first;
  const cudasim_kernel **kernels; /* as in an image */
  cudasim_image image;
} ptx_module;

/* Returns NULL if the text is not understood; `why` then says where. */
ptx_module *ptx_parse(const char *text, char *why, size_t why_bytes);
void ptx_free(ptx_module *module);
const char *ptx_op_name(int op);
/* Takes apart an opcode like "setp.eq.s32". Returns the first unknown word, or NULL. */
const char *ptx_take_opcode(ptx_insn *i, char *text);

/* ---- execution of a grid: run.c ---- */

enum { PTX_READY, PTX_AT_WARP, PTX_AT_BLOCK, PTX_ENDED };

/* A copy that is done at cp.async.wait_all. */
typedef struct ptx_copy {
  uint32_t to, bytes;
  uint64_t from;
} ptx_copy;

typedef struct ptx_thread {
  uint64_t *registers;
  int32_t pc;
  int state;
  uint32_t number, warp_epoch;
  ptx_copy *copies;
  uint32_t copy_count, copy_capacity;
} ptx_thread;

typedef struct ptx_touch { /* of one byte of shared memory */
  uint32_t thread;         /* number plus 1; 0: none; UINT32_MAX: several */
  uint32_t block_epoch, warp_epoch;
  uint16_t warp; /* 0xffff: several */
} ptx_touch;

typedef struct ptx_run {
  const ptx_entry *entry;
  const grid *g;
  ptx_thread *threads;
  uint32_t block, block_epoch;
  cudasim_thread me; /* block and sizes for all threads; its thread is unused */
  unsigned char *shared;
  uint32_t shared_bytes;
  ptx_touch *writes, *reads; /* one for each byte of it */
  struct ptx_pages *pages;
  uint64_t *executed; /* number of executions by opcode; NULL: not counted */
  jmp_buf leave;
} ptx_run;

_Noreturn void ptx_fault(ptx_run *r, const ptx_thread *t, int error, const char *text);
void ptx_execute(const grid *g, const ptx_entry *entry, struct ptx_pages *pages, uint64_t *executed);

static inline uint64_t ptx_get(const ptx_run *r, const ptx_thread *t, int32_t operand) {
  return operand >= 0 ? t->registers[operand] : r->entry->constants[~operand];
}
static inline float ptx_f32(uint64_t bits) {
  const uint32_t low = (uint32_t)bits;
  float x;
  __builtin_memcpy(&x, &low, sizeof x);
  return x;
}
static inline uint64_t ptx_of_f32(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

/* ---- arithmetic.c ---- */

uint32_t ptx_type_bits(ptx_type type);
/* Returns the result of an instruction that has one and does not access memory. */
uint64_t ptx_compute(const ptx_insn *i, uint64_t a, uint64_t b, uint64_t c);

/* ---- addresses.c ---- */

/* The pages of the device's memory that a launch touches. */
typedef struct ptx_pages ptx_pages;
ptx_pages *ptx_pages_create(void);
void ptx_pages_destroy(ptx_pages *pages);
/* Keeps a copy of the contents, unless one exists. */
void ptx_pages_keep(ptx_pages *pages, const void *ptr, size_t bytes);
/* Takes the present contents as the plain result, and restores the kept ones. */
void ptx_pages_swap(ptx_pages *pages);
/* Returns the number of bytes that differ from the plain result; *largest is the largest difference of elements of the
 * type, relative to the largest value. */
int64_t ptx_pages_compare(const ptx_pages *pages, ptx_type type, double *largest);

void ptx_load(ptx_run *r, ptx_thread *t, const ptx_insn *i);
void ptx_store(ptx_run *r, ptx_thread *t, const ptx_insn *i);
void ptx_atomic_max(ptx_run *r, ptx_thread *t, const ptx_insn *i);
void ptx_copy_begin(ptx_run *r, ptx_thread *t, const ptx_insn *i);
void ptx_copies_end(ptx_run *r, ptx_thread *t);
/* Returns bytes of shared memory, after checking this thread's access. */
unsigned char *ptx_shared(ptx_run *r, const ptx_thread *t, uint64_t address, uint32_t bytes, bool writes);

/* ---- warp.c ---- */

/* Executes the instruction at which all threads of the warp are that have not ended. */
void ptx_warp_step(ptx_run *r, ptx_thread *warp);

/* ---- compare.c: what the driver calls ---- */

/* If the image is PTX text, returns the image of its kernels, otherwise the image itself. NULL: it cannot be
 * compiled. */
const cudasim_image *ptx_image(const void *image);
void ptx_image_free(const cudasim_image *image);
/* Runs a grid whose kernel is PTX's own, or is in the files that the environment's CUDASIM_PTX names, separated by
 * colons. The latter runs as C++ first, on the same memory, and what differs is noted. False: run as C++ alone.
 * CUDASIM_PTX_EVERY=8: of a kernel's launches after the first ones only each eighth runs as PTX. */
bool ptx_run_grid(const grid *g, void (*plain)(const grid *g));
/* Records the memory of a kernel, before the plain kernel changes it. */
void ptx_note_memory(const void *ptr, size_t bytes);

#endif
