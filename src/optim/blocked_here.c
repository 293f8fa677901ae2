/* What a block's work is made of, on the host. */
#include "optim/blocked.h"

static void square(const dc__block_place *place, bool trans, int64_t n, int64_t k, const float *a, double add,
                   double keep, float *c) {
  dc__syrk(place->pool, place->scratch, trans, n, k, a, add, keep, c);
}

static void multiply(const dc__block_place *place, const dc__gemm *g) {
  dc__gemm_on(place->pool, g, place->scratch);
}

/* In tiles that fit the first-level cache. */
static void turn(const dc__block_place *place, const float *from, int64_t rows, int64_t cols, float *to) {
  enum { TILE = 32 };
  (void)place;
  for (int64_t i0 = 0; i0 < rows; i0 += TILE) {
    for (int64_t j0 = 0; j0 < cols; j0 += TILE) {
      for (int64_t i = i0; i < rows && i < i0 + TILE; i++) {
        for (int64_t j = j0; j < cols && j < j0 + TILE; j++) {
          to[j * rows + i] = from[i * cols + j];
        }
      }
    }
  }
}

static void copy(const dc__block_place *place, float *to, const float *from, int64_t count) {
  (void)place;
  memcpy(to, from, (size_t)count * sizeof *to);
}

static void scale(const dc__block_place *place, const dc__block *b, int32_t d, float factor) {
  const dc__side *side = &b->sides[d];
  (void)place;
  for (int64_t i = 0; i < side->n * side->n && side->info.status == DC_OK; i++) {
    side->matrix[i] *= factor;
  }
}

static void adam(const dc__block_place *place, const dc__block *b, const dc__adamw_factors *factors) {
  float tile[DC__OPTIM_TILE];
  (void)place;
  for (int64_t from = 0; from < b->count; from += DC__OPTIM_TILE) {
    int64_t count = b->count - from < DC__OPTIM_TILE ? b->count - from : DC__OPTIM_TILE;
    const dc__update_span span = {.weight = tile,
                                  .grad = b->data + from,
                                  .state = {b->exp_avg + from, b->squares + from},
                                  .dtype = DC_FLOAT32,
                                  .grad_dtype = DC_FLOAT32,
                                  .factors = {.adamw = *factors}};
    memset(tile, 0, sizeof tile);
    dc__update_here(DC__UPDATE_ADAMW, &span, 0, count, 1);
    memcpy(b->data + from, tile, (size_t)count * sizeof *tile);
  }
}

static void sort(const dc__block_place *place, const dc__block *b, int32_t d, int64_t inner) {
  const dc__side *side = &b->sides[d];
  float *temp = place->temp, *x = b->squares;
  size_t bytes = (size_t)inner * sizeof *x;
  for (int64_t from = 0; from < b->count && dc__side_moved(side); from += side->n * inner) {
    for (int64_t j = 0; j < side->n; j++) {
      memcpy(temp + j * inner, x + from + side->order[j] * inner, bytes);
    }
    memcpy(x + from, temp, (size_t)side->n * bytes);
  }
}

static void polar(const dc__block_place *place, const dc__block *b, const dc__polar *p) {
  dc__polar one = *p;
  one.x = b->data;
  one.count = 1;
  dc__polar_here(place->pool, place->scratch, &one, place->temp);
}

const dc__block_work dc__block_here = {.square = square,
                                       .multiply = multiply,
                                       .turn = turn,
                                       .copy = copy,
                                       .scale = scale,
                                       .graft_learn = dc__graft_learn,
                                       .graft_take = dc__graft_take,
                                       .graft_measure = dc__graft_measure,
                                       .graft_finish = dc__graft_finish,
                                       .adam = adam,
                                       .sort = sort,
                                       .polar = polar};
