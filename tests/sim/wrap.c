/* Reports the runtime's accesses to the checker. The linker redirects calls of these functions between object files to
 * this file (--wrap, in tests/meson.build). arena.c and block_list.c are compiled again for the simulator. Their
 * poisoning, which marks where a block's life begins and ends, is redirected too. */
#include "kernels/kernels.h"
#include "runtime/runtime.h"
#include "sim.h"

/* ---- kernels ---- */

/* Casts and sums that a kernel makes in its own scratch memory are not reported. */
static bool inside;

static void note_access(sim_kind kind, const void *ptr, int64_t count, int32_t dtype, const char *what) {
  if (!inside) {
    sim_note(kind, ptr, (size_t)count * dc_dtype_size(dtype), what);
  }
}

void __real_dc__cast(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count);
void __wrap_dc__cast(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count);
void __wrap_dc__cast(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count) {
  note_access(SIM_READ, src, count, src_dtype, "cast");
  note_access(SIM_WRITE, dst, count, dst_dtype, "cast");
  const bool was = inside; /* some linkers also redirect its recursive calls */
  inside = true;
  __real_dc__cast(dst, dst_dtype, src, src_dtype, count);
  inside = was;
}

void __real_dc__accumulate(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count);
void __wrap_dc__accumulate(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count);
void __wrap_dc__accumulate(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count) {
  bool was = inside; /* a reduction calls accumulate too */
  note_access(SIM_READ, src, count, src_dtype, "accumulation");
  note_access(SIM_READ, dst, count, dst_dtype, "accumulation");
  note_access(SIM_WRITE, dst, count, dst_dtype, "accumulation");
  inside = true;
  __real_dc__accumulate(dst, dst_dtype, src, src_dtype, count);
  inside = was;
}

bool __real_dc__combine(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count, bool add);
bool __wrap_dc__combine(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count, bool add);
bool __wrap_dc__combine(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count, bool add) {
  note_access(SIM_READ, src, count, src_dtype, "combination");
  if (add) {
    note_access(SIM_READ, dst, count, dst_dtype, "combination");
  }
  note_access(SIM_WRITE, dst, count, dst_dtype, "combination");
  inside = true;
  const bool finite = __real_dc__combine(dst, dst_dtype, src, src_dtype, count, add);
  inside = false;
  return finite;
}

void __real_dc__reduce(const dc__reduction *r);
void __wrap_dc__reduce(const dc__reduction *r);
void __wrap_dc__reduce(const dc__reduction *r) {
  for (int32_t i = 0; i < r->n; i++) {
    note_access(SIM_READ, r->src[i], r->count, r->src_dtype, "reduction");
  }
  if (r->accumulate) {
    note_access(SIM_READ, r->dst, r->count, r->dst_dtype, "reduction");
  }
  note_access(SIM_WRITE, r->dst, r->count, r->dst_dtype, "reduction");
  inside = true;
  __real_dc__reduce(r);
  inside = false;
}

/* ---- copies of the calling thread; the device reports those of a stream ---- */

void __real_dc__stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes);
void __wrap_dc__stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes);
void __wrap_dc__stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes) {
  if (stream == NULL) {
    sim_note(SIM_READ, src, bytes, "copy");
    sim_note(SIM_WRITE, dst, bytes, "copy");
  }
  __real_dc__stream_copy(stream, dst, src, bytes);
}

void __real_dc__stream_zero(dc_stream *stream, void *dst, size_t bytes);
void __wrap_dc__stream_zero(dc_stream *stream, void *dst, size_t bytes);
void __wrap_dc__stream_zero(dc_stream *stream, void *dst, size_t bytes) {
  if (stream == NULL) {
    sim_note(SIM_WRITE, dst, bytes, "zeroing");
  }
  __real_dc__stream_zero(stream, dst, bytes);
}

/* ---- blocks of the arena ---- */

/* Sizes of the blocks in use, since dc__arena_free() does not get them. */
enum { BLOCKS = 4096 };
static struct {
  const void *ptr;
  size_t bytes;
} blocks[BLOCKS];
static int32_t block_count;

static size_t forget_block(const void *ptr) {
  for (int32_t i = 0; i < block_count; i++) {
    if (blocks[i].ptr == ptr) {
      size_t bytes = blocks[i].bytes;
      blocks[i] = blocks[--block_count];
      return bytes;
    }
  }
  return 0;
}

void __real_dc__arena_free(dc__arena *arena, void *ptr, dc_event *after_a, dc_event *after_b);
void __wrap_dc__arena_free(dc__arena *arena, void *ptr, dc_event *after_a, dc_event *after_b);
void __wrap_dc__arena_free(dc__arena *arena, void *ptr, dc_event *after_a, dc_event *after_b) {
  sim_note(SIM_RETIRE, ptr, forget_block(ptr), "release");
  __real_dc__arena_free(arena, ptr, after_a, after_b);
}

void dc__arena_poison(const void *ptr, size_t bytes) {
  sim_note(SIM_FREE, ptr, bytes, "arena");
}

static void keep_block(const void *ptr, size_t bytes) {
  (void)forget_block(ptr);
  if (block_count < BLOCKS) {
    blocks[block_count].ptr = ptr;
    blocks[block_count++].bytes = bytes;
  }
}

void dc__arena_unpoison(const void *ptr, size_t bytes) {
  keep_block(ptr, bytes);
  sim_note(SIM_ALLOC, ptr, bytes, "arena");
}

typedef struct life {
  const void *ptr;
  size_t bytes;
} life;

static void note_block(void *args) {
  const life *l = args;
  sim_note(SIM_ALLOC, l->ptr, l->bytes, "arena");
}

void dc__arena_unpoison_on(dc_stream *stream, const void *ptr, size_t bytes) {
  const life l = {ptr, bytes};
  keep_block(ptr, bytes);
  sim_forget_freed(ptr, bytes); /* earlier blocks here may have been shorter; the host may now free all of it */
  dc__stream_call(stream, note_block, &l, sizeof l);
}

/* ---- the host's heap ---- */

/* The heap may pass memory from one rank to another without an order that the checker sees. */
void *__real_dc__calloc(size_t count, size_t bytes);
void *__wrap_dc__calloc(size_t count, size_t bytes);
void *__wrap_dc__calloc(size_t count, size_t bytes) {
  void *ptr = __real_dc__calloc(count, bytes);
  if (ptr != NULL && count > 0 && bytes > 0) {
    sim_forget(ptr, count * bytes);
  }
  return ptr;
}

/* ---- names for reports ---- */

dc_status __real_dc__context_enter(dc_context *ctx, const char *fn);
dc_status __wrap_dc__context_enter(dc_context *ctx, const char *fn);
dc_status __wrap_dc__context_enter(dc_context *ctx, const char *fn) {
  sim_me()->op = (sim_op){"host", fn, -1};
  return __real_dc__context_enter(ctx, fn);
}

dc_status __real_dc__graph_find_param(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id, bool stage3,
                                      dc__graph **graph, dc__param **param);
dc_status __wrap_dc__graph_find_param(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id, bool stage3,
                                      dc__graph **graph, dc__param **param);
dc_status __wrap_dc__graph_find_param(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id, bool stage3,
                                      dc__graph **graph, dc__param **param) {
  sim_me()->op.id = id;
  return __real_dc__graph_find_param(ctx, fn, graph_id, id, stage3, graph, param);
}
