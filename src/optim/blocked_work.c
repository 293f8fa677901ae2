/* A block and its sides' matrices. A block is seen as [n, rest], its first dimension and all others; turning it round,
 * [rest, n], brings the next dimension to the front. A product with a matrix turns it too, so that after one product
 * for each dimension everything is where it was. */
#include "optim/blocked.h"

void dc__block_learn(const dc__block *b, double keep, double add, const dc__block_place *place) {
  const float *turned = b->data;
  for (int32_t d = 0; d < b->order; d++) {
    const dc__side *side = &b->sides[d];
    int64_t rest = b->count / side->n;
    bool last = d > 0 && d == b->order - 1; /* the last dimension is the columns of what came */
    if (side->factor != NULL) {
      place->work->square(place, last, side->n, rest, last ? b->data : turned, add, keep, side->factor);
    }
    if (d + 2 < b->order) {
      float *next = place->temp + (d % 2) * place->half;
      place->work->turn(place, turned, side->n, rest, next);
      turned = next;
    }
  }
}

/* to [rest, n] = from [n, rest]^T times the side's matrix, or its transpose. */
static void multiply_side(const dc__side *side, int64_t rest, const float *from, bool back,
                          const dc__block_place *place, float *to) {
  const dc__gemm g = dc__gemm_dense(DC_FLOAT32, true, back, rest, side->n, side->n, from, side->matrix, to);
  place->work->multiply(place, &g);
}

void dc__block_multiply(const dc__block *b, float *x, bool back, const dc__block_place *place) {
  float *from = x;
  float *to = place->temp;
  bool some = false;
  for (int32_t d = 0; d < b->order; d++) {
    some = some || b->sides[d].factor != NULL;
  }
  for (int32_t d = 0; d < b->order && some; d++) {
    int64_t rest = b->count / b->sides[d].n;
    if (b->sides[d].factor != NULL) {
      multiply_side(&b->sides[d], rest, from, back, place, to);
    } else {
      place->work->turn(place, from, b->sides[d].n, rest, to);
    }
    float *swap = from;
    from = to;
    to = swap;
  }
  if (from != x) {
    place->work->copy(place, x, from, b->count);
  }
}

bool dc__side_moved(const dc__side *side) {
  bool moves = false;
  for (int64_t j = 0; j < side->n && side->info.status == DC_OK; j++) {
    moves = moves || side->order[j] != j;
  }
  return moves;
}

dc__mat dc__side_mat(void *data, int32_t dtype, int64_t n) {
  return (dc__mat){.data = data, .dtype = dtype, .batch = 1, .rows = n, .cols = n, .row_stride = n, .col_stride = 1};
}
