/* Even splits. A model's parameters have few distinct sizes, so one split per size needs less memory than one each. */
#include "runtime/runtime.h"

/* Minimum elements of a piece, so that small buckets do not cut a large gradient into very many pieces. */
enum { MIN_PIECE = 1 << 16 };

/* Kinds of pieces. In all but the last, each full chunk has `width` elements. The short (ragged) chunk also has `width`
 * in PIECE_FULL, ends in PIECE_RAGGED, and has none in PIECE_AFTER. */
enum { PIECE_FULL, PIECE_RAGGED, PIECE_AFTER, PIECE_LAST, PIECES };

struct dc__chunks {
  int64_t users;
  dc__range ranges[]; /* per rank: chunks; the same for gradients; each kind of piece, if there are any */
};

int64_t dc__piece_width(const dc_context *ctx) {
  int64_t elements = ctx->bucket_elements > MIN_PIECE ? ctx->bucket_elements : MIN_PIECE;
  return elements / ctx->world;
}

int64_t dc__piece_count(const dc_context *ctx, int64_t numel) {
  int64_t width = dc__piece_width(ctx);
  return (dc__chunk(numel, ctx->world) + width - 1) / width;
}

/* The length of the short chunk, which is neither full nor empty; if there is none, that of a full chunk. */
static int64_t ragged_length(const dc_context *ctx, int64_t numel) {
  int64_t chunk = dc__chunk(numel, ctx->world);
  return chunk == 0 || numel % chunk == 0 ? chunk : numel % chunk;
}

static void fill_piece(const dc_context *ctx, int64_t numel, int64_t k, dc__range *slices) {
  int64_t width = dc__piece_width(ctx), begin = 0;
  for (int32_t rank = 0; rank < ctx->world; rank++) {
    int64_t left = dc__chunk_range(numel, ctx->world, rank).count - k * width;
    int64_t count = left < 0 ? 0 : left < width ? left : width;
    slices[rank] = (dc__range){begin, count};
    begin += count;
  }
}

const dc__range *dc__chunks_retain(dc_context *ctx, int64_t numel) {
  dc__chunks *chunks = dc__map_get(&ctx->chunks, numel);
  if (chunks == NULL) {
    const int32_t world = ctx->world;
    const int64_t last = dc__piece_count(ctx, numel) - 1;
    const int64_t tables = last > 0 ? 2 + PIECES : 2;
    chunks = dc__calloc(1, sizeof *chunks + (size_t)(tables * world) * sizeof *chunks->ranges);
    if (chunks == NULL || !dc__map_put(&ctx->chunks, numel, chunks)) {
      dc__free(chunks);
      return NULL;
    }
    for (int32_t rank = 0; rank < world; rank++) {
      chunks->ranges[rank] = chunks->ranges[world + rank] = dc__chunk_range(numel, world, rank);
    }
    const int64_t width = dc__piece_width(ctx), ragged = ragged_length(ctx, numel);
    /* No piece is PIECE_RAGGED if the short chunk ends where a piece does. */
    const int64_t first[PIECES] = {0, ragged / width, (ragged + width - 1) / width, last};
    for (int32_t i = 0; i < tables - 2; i++) {
      fill_piece(ctx, numel, first[i], &chunks->ranges[(2 + i) * world]);
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

const dc__range *dc__chunks_piece(const dc_context *ctx, int64_t numel, int64_t k) {
  const dc__chunks *chunks = dc__map_get(&ctx->chunks, numel);
  int64_t width = dc__piece_width(ctx), ragged = ragged_length(ctx, numel);
  int32_t kind = PIECE_LAST;
  if (k < dc__piece_count(ctx, numel) - 1) {
    kind = (k + 1) * width <= ragged ? PIECE_FULL : k * width < ragged ? PIECE_RAGGED : PIECE_AFTER;
  }
  return chunks->ranges + (2 + kind) * ctx->world;
}
