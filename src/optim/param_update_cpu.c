/* Element-wise work on parameters: cut into chunks, on the threads, and for converted values into tiles that fit
 * the first-level cache. */
#include <stdatomic.h>

#include "optim/optim_internal.h"

enum { CHUNK = 16 * DC__OPTIM_TILE }; /* elements per task */

typedef struct param_update_job {
  dc_optimizer *o;
  dc__optim_part_fn fn;
  void *arg;
  const dc__optim_param *param; /* for one parameter; NULL for all */
} param_update_job;

static int64_t chunk_count(const dc_optimizer *o, int64_t i) {
  return o->io[i].grad_dtype == DC_DTYPE_NONE ? 0 : (o->params[i].count + CHUNK - 1) / CHUNK;
}

/* The last parameter with at most `chunk` chunks before it. */
static int64_t param_of(const dc_optimizer *o, int64_t chunk) {
  int64_t low = 0;
  int64_t high = o->count;
  while (high - low > 1) {
    int64_t mid = low + (high - low) / 2;
    if (o->io[mid].first <= chunk) {
      low = mid;
    } else {
      high = mid;
    }
  }
  return low;
}

static void run_param_part(const param_update_job *j, const dc__optim_param *p, int64_t chunk) {
  int64_t begin = chunk * CHUNK;
  j->fn(j->o, p, begin, p->count - begin < CHUNK ? p->count - begin : CHUNK, j->arg);
}

static void run_chunk(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const param_update_job *j = arg;
  int64_t i = param_of(j->o, index);
  run_param_part(j, &j->o->params[i], index - j->o->io[i].first);
}

void dc__optim_each_part(dc_optimizer *o, dc__optim_part_fn fn, void *arg) {
  int64_t total = 0;
  for (int64_t i = 0; i < o->count; i++) {
    o->io[i].first = total;
    total += chunk_count(o, i);
  }
  if (total > 0) {
    param_update_job j = {.o = o, .fn = fn, .arg = arg};
    dc__parallel_for_cost(o->linalg->pool, total, CHUNK, run_chunk, &j);
  }
}

/* Whether the memory can be used as float in place: the caller's may have any alignment. */
static bool is_aligned_f32(const void *data, int32_t dtype) {
  return dtype == DC_FLOAT32 && (uintptr_t)data % sizeof(float) == 0;
}

const float *dc__optim_grad(const dc_optimizer *o, const dc__optim_param *p, int64_t from, int64_t count,
                            float tile[DC__OPTIM_TILE]) {
  const dc__optim_io *io = &o->io[p - o->params];
  const char *grad = (const char *)io->grad + (size_t)from * dc_dtype_size(io->grad_dtype);
  if (o->grad_scale == 1 && is_aligned_f32(grad, io->grad_dtype)) {
    return (const float *)(const void *)grad;
  }
  dc__update_read(tile, grad, io->grad_dtype, count, (float)o->grad_scale);
  return tile;
}

typedef struct tile_list {
  dc__optim_tile_fn fn;
  void *arg;
} tile_list;

static void run_tile(dc_optimizer *o, const dc__optim_param *p, int64_t from, int64_t count, const tile_list *t) {
  float grad[DC__OPTIM_TILE];
  float weight[DC__OPTIM_TILE];
  char *data = (char *)o->io[p - o->params].weight + (size_t)from * dc_dtype_size(p->dtype);
  dc__optim_tile tile = {.param = p,
                         .from = from,
                         .count = count,
                         .weight = (float *)(void *)data,
                         .grad = dc__optim_grad(o, p, from, count, grad)};
  if (is_aligned_f32(data, p->dtype)) {
    t->fn(o, &tile, t->arg);
    return;
  }
  if (p->master != NULL) {
    tile.weight = p->master + from;
    dc__update_sync_master(tile.weight, data, p->dtype, count);
  } else {
    tile.weight = weight;
    dc__cast(weight, DC_FLOAT32, data, p->dtype, count);
  }
  t->fn(o, &tile, t->arg);
  dc__cast(data, p->dtype, tile.weight, DC_FLOAT32, count);
}

static void run_tiles(dc_optimizer *o, const dc__optim_param *p, int64_t from, int64_t count, void *arg) {
  for (int64_t done = 0; done < count; done += DC__OPTIM_TILE) {
    run_tile(o, p, from + done, count - done < DC__OPTIM_TILE ? count - done : DC__OPTIM_TILE, arg);
  }
}

static void run_param_chunk(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const param_update_job *j = arg;
  run_param_part(j, j->param, index);
}

void dc__optim_param_tiles(dc_optimizer *o, const dc__optim_param *p, dc__optim_tile_fn fn, void *arg) {
  tile_list t = {fn, arg};
  param_update_job j = {.o = o, .fn = run_tiles, .arg = &t, .param = p};
  dc__parallel_for_cost(o->linalg->pool, chunk_count(o, p - o->params), CHUNK, run_param_chunk, &j);
}
