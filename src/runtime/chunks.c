/* Even splits. A model's parameters have few sizes, so that a split a size is less memory than one a parameter. */
#include "runtime/runtime.h"

struct dc__chunks {
  int64_t users;
  dc__range ranges[]; /* the chunks, one a rank, and once more for gradients */
};

const dc__range *dc__chunks_retain(dc_context *ctx, int64_t numel) {
  dc__chunks *chunks = dc__map_get(&ctx->chunks, numel);
  if (chunks == NULL) {
    const int32_t world = ctx->world;
    chunks = dc__calloc(1, sizeof *chunks + 2 * (size_t)world * sizeof *chunks->ranges);
    if (chunks == NULL || !dc__map_put(&ctx->chunks, numel, chunks)) {
      dc__free(chunks);
      return NULL;
    }
    for (int32_t rank = 0; rank < world; rank++) {
      chunks->ranges[rank] = chunks->ranges[world + rank] = dc__chunk_range(numel, world, rank);
    }
  }
  chunks->users++;
  return chunks->ranges;
}

void dc__chunks_release(dc_context *ctx, int64_t numel) {
  dc__chunks *chunks = dc__map_get(&ctx->chunks, numel);
  if (--chunks->users == 0) {
    dc__map_remove(&ctx->chunks, numel);
    dc__free(chunks);
  }
}

const dc__range *dc__chunks_even_split(const dc_context *ctx, int64_t numel) {
  const dc__chunks *chunks = dc__map_get(&ctx->chunks, numel);
  return chunks->ranges + ctx->world;
}
