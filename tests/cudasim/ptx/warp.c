/* Instructions of a whole warp: shuffles, votes, products of tiles on tensor cores and their operands. */
#include <string.h>

#include "kernels/elementwise/convert.h"
#include "ptx.h"

enum { LANES = CUDASIM_WARP };

/* Returns which threads of the warp take part. All of them must be at this instruction. */
static uint32_t gather_lanes(ptx_run *r, ptx_thread *warp, const ptx_insn *i, uint32_t mask) {
  uint32_t there = 0;
  for (uint32_t lane = 0; lane < LANES; lane++) {
    const bool at = warp[lane].state == PTX_AT_WARP && &r->entry->code[warp[lane].pc] == i;
    there |= (uint32_t)at << lane;
    if (!at && (mask >> lane & 1) != 0) {
      ptx_fault(r, &warp[lane], LAUNCH_FAILED, "a thread of the warp is not where the others are");
    }
  }
  if (there != mask) {
    ptx_fault(r, warp, LAUNCH_FAILED, "a thread of the warp is not in the mask");
  }
  return there;
}

static void shuffle(ptx_run *r, ptx_thread *warp, const ptx_insn *i) {
  uint64_t values[LANES], found[LANES];
  bool valid[LANES];
  for (uint32_t lane = 0; lane < LANES; lane++) {
    values[lane] = (uint32_t)ptx_get(r, &warp[lane], i->at[2]);
  }
  for (uint32_t lane = 0; lane < LANES; lane++) {
    const uint32_t b = (uint32_t)ptx_get(r, &warp[lane], i->at[3]) & 31;
    const uint32_t c = (uint32_t)ptx_get(r, &warp[lane], i->at[4]), segment = c >> 8 & 31;
    const uint32_t least = lane & segment, most = least | ((c & 31) & ~segment);
    const uint32_t from = least | (b & ~segment);
    valid[lane] = from <= most;
    found[lane] = values[valid[lane] ? from : lane];
  }
  for (uint32_t lane = 0; lane < LANES; lane++) {
    warp[lane].registers[i->at[0]] = found[lane];
    warp[lane].registers[i->at[1]] = valid[lane];
  }
}

static void vote(ptx_run *r, ptx_thread *warp, const ptx_insn *i) {
  uint64_t bits = 0;
  for (uint32_t lane = 0; lane < LANES; lane++) {
    bits |= (ptx_get(r, &warp[lane], i->at[1]) & 1) << lane;
  }
  for (uint32_t lane = 0; lane < LANES; lane++) {
    warp[lane].registers[i->at[0]] = bits;
  }
}

/* Lanes 8 n to 8 n + 7 have the addresses of the rows of matrix n. From each matrix a lane gets two neighbours in a
 * row, or with .trans in a column. */
static void load_matrices(ptx_run *r, ptx_thread *warp, const ptx_insn *i) {
  uint16_t tiles[4][8][8];
  for (uint32_t lane = 0; lane < LANES; lane++) {
    const uint64_t address = (uint32_t)(ptx_get(r, &warp[lane], i->at[4]) + (uint64_t)(int64_t)i->offset);
    memcpy(tiles[lane / 8][lane % 8], ptx_shared(r, &warp[lane], address, 16, false), 16);
  }
  for (uint32_t lane = 0; lane < LANES; lane++) {
    const uint32_t row = lane / 4, pair = lane % 4 * 2;
    for (uint32_t n = 0; n < 4; n++) {
      const bool trans = (i->words & PTX_TRANS) != 0;
      const uint32_t low = trans ? tiles[n][pair][row] : tiles[n][row][pair];
      const uint32_t high = trans ? tiles[n][pair + 1][row] : tiles[n][row][pair + 1];
      warp[lane].registers[i->at[n]] = low | high << 16;
    }
  }
}

static float half(const ptx_insn *i, uint64_t word, uint32_t which) {
  const uint16_t bits = (uint16_t)(word >> (16 * which));
  return i->from == PTX_F16 ? dc__f32_of_f16(bits) : dc__f32_of_bf16(bits);
}

/* m16n8k16 with the fragments of PTX's tables. Sums are in the order of k, each rounded; a card may use another order
 * and rounding. */
static void multiply(ptx_run *r, ptx_thread *warp, const ptx_insn *i) {
  float a[16][16], b[16][8];
  for (uint32_t lane = 0; lane < LANES; lane++) {
    const uint32_t row = lane / 4, pair = lane % 4 * 2;
    for (uint32_t which = 0; which < 2; which++) {
      for (uint32_t n = 0; n < 4; n++) {
        a[row + n % 2 * 8][pair + which + n / 2 * 8] = half(i, ptx_get(r, &warp[lane], i->at[4 + n]), which);
      }
      for (uint32_t n = 0; n < 2; n++) {
        b[pair + which + n * 8][row] = half(i, ptx_get(r, &warp[lane], i->at[8 + n]), which);
      }
    }
  }
  for (uint32_t lane = 0; lane < LANES; lane++) {
    float sums[4];
    for (uint32_t n = 0; n < 4; n++) {
      const uint32_t row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
      sums[n] = ptx_f32(ptx_get(r, &warp[lane], i->at[10 + n]));
      for (uint32_t k = 0; k < 16; k++) {
        sums[n] += a[row][k] * b[k][column];
      }
    }
    for (uint32_t n = 0; n < 4; n++) {
      warp[lane].registers[i->at[n]] = ptx_of_f32(sums[n]);
    }
  }
}

/* For shuffles, votes and barriers, the mask is the last operand. In other instructions the whole warp takes part. */
static uint32_t mask_of(const ptx_run *r, const ptx_thread *t, const ptx_insn *i) {
  return i->op == PTX_MMA || i->op == PTX_LDMATRIX ? UINT32_MAX : (uint32_t)ptx_get(r, t, i->at[i->count - 1]);
}

void ptx_warp_step(ptx_run *r, ptx_thread *warp) {
  uint32_t first = 0;
  while (warp[first].state != PTX_AT_WARP) {
    first++;
  }
  const ptx_insn *i = &r->entry->code[warp[first].pc];
  const uint32_t mask = mask_of(r, &warp[first], i);
  if (gather_lanes(r, warp, i, mask) != UINT32_MAX) {
    ptx_fault(r, &warp[first], LAUNCH_FAILED, "only a part of the warp takes part, which is not known here");
  }
  switch (i->op) {
    case PTX_SHFL:
      shuffle(r, warp, i);
      break;
    case PTX_VOTE:
      vote(r, warp, i);
      break;
    case PTX_LDMATRIX:
      load_matrices(r, warp, i);
      break;
    case PTX_MMA:
      multiply(r, warp, i);
      break;
    default:
      break; /* a barrier */
  }
  for (uint32_t lane = 0; lane < LANES; lane++) {
    warp[lane].warp_epoch += i->op == PTX_BAR;
    warp[lane].state = PTX_READY;
    warp[lane].pc++;
  }
}
