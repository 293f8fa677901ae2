/* Instructions that compute a result from up to three operands, rounded as the PTX manual says. Approximations are
 * correctly rounded float32; a card's may differ by 2 ulp. */
#include <math.h>
#include <string.h>

#include "base/base.h"
#include "kernels/elementwise/convert.h"
#include "ptx.h"

uint32_t ptx_type_bits(ptx_type type) {
  static const uint8_t bits[] = {[PTX_PRED] = 1, [PTX_B8] = 8,   [PTX_U8] = 8,   [PTX_S8] = 8,     [PTX_B16] = 16,
                                 [PTX_U16] = 16, [PTX_S16] = 16, [PTX_F16] = 16, [PTX_BF16] = 16,  [PTX_B32] = 32,
                                 [PTX_U32] = 32, [PTX_S32] = 32, [PTX_F32] = 32, [PTX_F16X2] = 32, [PTX_BF16X2] = 32,
                                 [PTX_B64] = 64, [PTX_U64] = 64, [PTX_S64] = 64, [PTX_F64] = 64};
  return bits[type];
}

static bool is_signed(ptx_type type) {
  return type >= PTX_S8 && type <= PTX_S64;
}

static uint64_t low_bits(uint64_t value, uint32_t bits) {
  return bits == 64 ? value : value & ((UINT64_C(1) << bits) - 1);
}

/* Extends an integer to 64 bits. */
static uint64_t wide(ptx_type type, uint64_t value) {
  const uint32_t bits = ptx_type_bits(type);
  value = low_bits(value, bits);
  return is_signed(type) && bits < 64 && value >> (bits - 1) != 0 ? value | ~UINT64_C(0) << bits : value;
}

static double f64(uint64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static uint64_t of_f64(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static float flush(float x) {
  return fpclassify(x) == FP_SUBNORMAL ? copysignf(0.0F, x) : x;
}

/* ---- floats ---- */

/* If one operand is NaN, returns the other; -0 is less than 0. */
static double smaller(double a, double b) {
  return isnan(a) ? b : isnan(b) ? a : a == b ? (signbit(a) ? a : b) : a < b ? a : b;
}
static double larger(double a, double b) {
  return isnan(a) ? b : isnan(b) ? a : a == b ? (signbit(a) ? b : a) : a > b ? a : b;
}

static uint64_t compute_f32(const ptx_insn *i, float a, float b, float c) {
  switch (i->op) {
    case PTX_ADD:
      return ptx_of_f32(a + b);
    case PTX_SUB:
      return ptx_of_f32(a - b);
    case PTX_MUL:
      return ptx_of_f32(a * b);
    case PTX_DIV:
      return ptx_of_f32(a / b);
    case PTX_FMA:
      return ptx_of_f32(fmaf(a, b, c));
    case PTX_SQRT:
      return ptx_of_f32(sqrtf(a));
    case PTX_RCP:
      return ptx_of_f32((i->words & PTX_APPROX) != 0 ? flush(1.0F / flush(a)) : 1.0F / a);
    case PTX_EX2:
      return ptx_of_f32(flush(exp2f(flush(a))));
    case PTX_NEG:
      return ptx_of_f32(-a);
    case PTX_ABS:
      return ptx_of_f32(fabsf(a));
    case PTX_COPYSIGN:
      return ptx_of_f32(copysignf(b, a));
    case PTX_MIN:
      return ptx_of_f32((float)smaller(a, b));
    default:
      return ptx_of_f32((float)larger(a, b));
  }
}

static uint64_t compute_f64(const ptx_insn *i, double a, double b, double c) {
  switch (i->op) {
    case PTX_ADD:
      return of_f64(a + b);
    case PTX_SUB:
      return of_f64(a - b);
    case PTX_MUL:
      return of_f64(a * b);
    case PTX_DIV:
      return of_f64(a / b);
    case PTX_FMA:
      return of_f64(fma(a, b, c));
    case PTX_SQRT:
      return of_f64(sqrt(a));
    case PTX_RCP:
      return of_f64(1.0 / a);
    case PTX_NEG:
      return of_f64(-a);
    case PTX_ABS:
      return of_f64(fabs(a));
    case PTX_COPYSIGN:
      return of_f64(copysign(b, a));
    case PTX_MIN:
      return of_f64(smaller(a, b));
    default:
      return of_f64(larger(a, b));
  }
}

static bool compare_floats(ptx_compare how, double a, double b) {
  const bool unordered = isnan(a) || isnan(b);
  switch (how) {
    case PTX_EQ:
      return a == b;
    case PTX_NE:
      return !unordered && a != b;
    case PTX_LT:
      return a < b;
    case PTX_LE:
      return a <= b;
    case PTX_GT:
      return a > b;
    case PTX_GE:
      return a >= b;
    case PTX_EQU:
      return unordered || a == b;
    case PTX_NEU:
      return unordered || a != b;
    case PTX_LTU:
      return unordered || a < b;
    case PTX_LEU:
      return unordered || a <= b;
    case PTX_GTU:
      return unordered || a > b;
    case PTX_GEU:
      return unordered || a >= b;
    default:
      return unordered;
  }
}

/* ---- integers ---- */

static bool compare_integers(ptx_compare how, ptx_type type, uint64_t a, uint64_t b) {
  const uint64_t x = wide(type, a), y = wide(type, b);
  const bool less = is_signed(type) ? (int64_t)x < (int64_t)y : x < y;
  return how == PTX_EQ   ? x == y
         : how == PTX_NE ? x != y
         : how == PTX_LT ? less
         : how == PTX_LE ? less || x == y
         : how == PTX_GT ? !less && x != y
                         : !less;
}

/* Division by 0 sets all bits, as on a card. */
static uint64_t divide(bool is_signed_, bool remainder, uint64_t a, uint64_t b) {
  if (b == 0) {
    return ~UINT64_C(0);
  }
  if (!is_signed_) {
    return remainder ? a % b : a / b;
  }
  if (b == ~UINT64_C(0)) { /* -1: in C the smallest integer cannot be divided by it */
    return remainder ? 0 : 0 - a;
  }
  return (uint64_t)(remainder ? (int64_t)a % (int64_t)b : (int64_t)a / (int64_t)b);
}

static uint64_t shift_right(ptx_type type, uint64_t a, uint64_t by) {
  const bool negative = is_signed(type) && (int64_t)a < 0;
  return by >= 64 ? (negative ? ~UINT64_C(0) : 0) : negative ? ~(~a >> by) : a >> by;
}

/* Byte n of the result is the byte of b:a that nibble n of c selects; its highest bit repeats the sign. */
static uint64_t permute(uint64_t a, uint64_t b, uint64_t c) {
  const uint64_t all = (uint32_t)a | (uint64_t)(uint32_t)b << 32;
  uint64_t result = 0;
  for (uint32_t n = 0; n < 4; n++) {
    const uint64_t nibble = c >> (4 * n) & 15;
    const uint64_t byte = all >> (8 * (nibble & 7)) & 255;
    result |= (nibble < 8 ? byte : (byte & 128) != 0 ? UINT64_C(255) : 0) << (8 * n);
  }
  return result;
}

static uint64_t compute_integer(const ptx_insn *i, uint64_t a, uint64_t b, uint64_t c) {
  const ptx_type type = i->type;
  const uint64_t x = wide(type, a), y = wide(type, b);
  const bool less = is_signed(type) ? (int64_t)x < (int64_t)y : x < y;
  switch (i->op) {
    case PTX_ADD:
      return x + y;
    case PTX_SUB:
      return x - y;
    case PTX_MUL:
      return x * y;
    case PTX_MAD:
      return x * y + c;
    case PTX_DIV:
      return divide(is_signed(type), false, x, y);
    case PTX_REM:
      return divide(is_signed(type), true, x, y);
    case PTX_MIN:
      return less ? x : y;
    case PTX_MAX:
      return less ? y : x;
    case PTX_AND:
      return x & y;
    case PTX_OR:
      return x | y;
    case PTX_XOR:
      return x ^ y;
    case PTX_NOT:
      return ~x;
    case PTX_NEG:
      return 0 - x;
    case PTX_ABS:
      return (int64_t)x < 0 ? 0 - x : x;
    case PTX_SHL:
      return (uint32_t)b >= ptx_type_bits(type) ? 0 : x << (uint32_t)b;
    case PTX_SHR:
      return shift_right(type, x, (uint32_t)b);
    case PTX_POPC:
      return (uint64_t)__builtin_popcountll(x);
    case PTX_CLZ:
      return x == 0 ? ptx_type_bits(type) : (uint64_t)__builtin_clzll(x) - (64 - ptx_type_bits(type));
    default:
      return permute(a, b, c);
  }
}

/* ---- conversions ---- */

/* Rounds towards 0, and saturates. NaN gives 0, or from float64 to 64 bits the smallest integer. */
static uint64_t to_integer(ptx_type to, ptx_type from, double x) {
  const uint32_t bits = ptx_type_bits(to);
  if (isnan(x)) {
    return from == PTX_F64 || bits == 64 ? UINT64_C(1) << (bits - 1) : 0;
  }
  if (!is_signed(to)) {
    return x <= 0 ? 0 : x >= ldexp(1, (int)bits) ? ~UINT64_C(0) : (uint64_t)x;
  }
  const double limit = ldexp(1, (int)bits - 1);
  return x >= limit ? (UINT64_C(1) << (bits - 1)) - 1 : x < -limit ? UINT64_C(1) << (bits - 1) : (uint64_t)(int64_t)x;
}

static uint64_t halves(ptx_type to, float high, float low) {
  const uint64_t nan = 0x7fff;
  const bool is_half = to == PTX_F16X2;
  const uint64_t h = isnan(high) ? nan : is_half ? dc__f16_of_f32(high) : dc__bf16_of_f32(high);
  const uint64_t l = isnan(low) ? nan : is_half ? dc__f16_of_f32(low) : dc__bf16_of_f32(low);
  return h << 16 | l;
}

static uint64_t convert(const ptx_insn *i, uint64_t a, uint64_t b) {
  const ptx_type to = i->type, from = i->from;
  if (to == PTX_F16X2 || to == PTX_BF16X2) {
    return halves(to, ptx_f32(a), ptx_f32(b));
  }
  if (from == PTX_F32 || from == PTX_F64 || from == PTX_F16) {
    const double x = from == PTX_F64   ? f64(a)
                     : from == PTX_F32 ? (double)ptx_f32(a)
                                       : (double)dc__f32_of_f16((uint16_t)a);
    return to == PTX_F32 ? ptx_of_f32((float)x) : to == PTX_F64 ? of_f64(x) : to_integer(to, from, x);
  }
  const uint64_t x = wide(from, a);
  if (to == PTX_F32) {
    return ptx_of_f32(is_signed(from) ? (float)(int64_t)x : (float)x);
  }
  if (to == PTX_F64) {
    return of_f64(is_signed(from) ? (double)(int64_t)x : (double)x);
  }
  return x;
}

/* ---- all ---- */

static uint64_t wide_product(const ptx_insn *i, uint64_t a, uint64_t b) {
  return wide(i->type, a) * wide(i->type, b);
}

static bool is_float(ptx_type type) {
  return type == PTX_F32 || type == PTX_F64;
}

static uint64_t compute_setp(const ptx_insn *i, uint64_t a, uint64_t b) {
  return i->type == PTX_F32   ? compare_floats(i->compare, ptx_f32(a), ptx_f32(b))
         : i->type == PTX_F64 ? compare_floats(i->compare, f64(a), f64(b))
                              : compare_integers(i->compare, i->type, a, b);
}

uint64_t ptx_compute(const ptx_insn *i, uint64_t a, uint64_t b, uint64_t c) {
  const uint32_t bits = ptx_type_bits(i->type);
  switch (i->op) {
    case PTX_MOV:
    case PTX_CVTA:
      return low_bits(a, bits);
    case PTX_SELP:
      return low_bits((c & 1) != 0 ? a : b, bits);
    case PTX_SETP:
      return compute_setp(i, a, b);
    case PTX_CVT:
      return low_bits(convert(i, a, b), bits);
    default:
      break;
  }
  if ((i->words & PTX_WIDE) != 0) {
    return low_bits(wide_product(i, a, b), 2 * bits);
  }
  if (is_float(i->type)) {
    return i->type == PTX_F32 ? compute_f32(i, ptx_f32(a), ptx_f32(b), ptx_f32(c))
                              : compute_f64(i, f64(a), f64(b), f64(c));
  }
  return low_bits(compute_integer(i, a, b, c), i->op == PTX_POPC || i->op == PTX_CLZ ? 32 : bits);
}
