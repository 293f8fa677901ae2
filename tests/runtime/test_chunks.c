/* The pieces of a large gradient contain each element of each rank's chunk exactly once, in worlds of any size. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "runtime/runtime.h"

/* Sizes around those at which a rank's chunk ends with a piece: chunks of 2 to 5 pieces, and an element less or
 * more. */
static int64_t near_edge(int64_t width, int32_t world, int64_t step) {
  const int64_t chunk = (2 + step % 4) * width + (step / 4) % 3 - 1;
  return chunk * world - step * 7 % (world + width);
}

static bool has_all_elements(dc_context *ctx, int64_t numel) {
  const dc__range *chunks = dc__chunks_retain(ctx, numel);
  const int64_t pieces = dc__piece_count(ctx, numel);
  bool right = chunks != NULL;
  for (int32_t rank = 0; rank < ctx->world && right; rank++) {
    int64_t count = 0;
    for (int64_t k = 0; k < pieces; k++) {
      const dc__range slice = dc__chunks_piece(ctx, numel, k)[rank];
      const int64_t left = chunks[rank].count - k * dc__piece_width(ctx);
      right = right && slice.count == (left < 0 ? 0 : left < dc__piece_width(ctx) ? left : dc__piece_width(ctx));
      count += slice.count;
    }
    right = right && count == chunks[rank].count;
  }
  dc__chunks_release(ctx, numel);
  return right;
}

static void test_pieces(void **state) {
  (void)state;
  static const int32_t worlds[] = {2, 3, 64, 255, 256, 257, 300, 384, 512, 768, 1000, DC__COMM_MAX_WORLD};
  for (size_t w = 0; w < DC__COUNT(worlds); w++) {
    dc_context ctx = {.world = worlds[w], .bucket_elements = 1000};
    for (int64_t step = 0; step < 300; step++) {
      assert_true(has_all_elements(&ctx, near_edge(dc__piece_width(&ctx), ctx.world, step)));
    }
    dc__map_clear(&ctx.chunks);
  }
}

/* The last piece but one begins where the chunk that is not full ends. */
static void test_chunk_that_ends_with_a_piece(void **state) {
  (void)state;
  dc_context ctx = {.world = 1024, .bucket_elements = 1000};
  assert_true(has_all_elements(&ctx, 163744));
  dc__map_clear(&ctx.chunks);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_pieces),
                                     cmocka_unit_test(test_chunk_that_ends_with_a_piece)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
