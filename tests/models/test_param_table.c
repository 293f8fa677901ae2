/* The models of a parameter's weights (gather.pml, types.pml) and the runtime follow the same tables. In every state
 * that the runtime can reach, every call has the row's result and leads to the row's state. */
#include "harness.h"
#include "runtime/runtime.h"

typedef enum state {
  NONE,
  NONE_KEPT,
  CURRENT,
  CURRENT_USED,
  CURRENT_HALF,
  CURRENT_KEPT,
  CURRENT_KEPT_USED,
  CURRENT_KEPT_HALF,
  STALE,
  STALE_USED,
  STALE_HALF,
  STALE_KEPT,
  STALE_KEPT_USED,
  STALE_KEPT_HALF,
  STATES
} state;

typedef enum call {
  GATHER,
  WAIT,
  RELEASE_OF_2,
  RELEASE_OF_1,
  TAKE,
  UPDATE,
  INVALIDATE,
  CLEAR_ALL,
  KEEP,
  KEEP_NOT,
  ABORT_STEP,
  CALLS
} call;

static const struct {
  state from;
  call made;
  dc_status result;
  state to;
  const char *text;
} rows[] = {
#define DC_E_OK DC_OK
#define ROW(from, made, result, to) {from, made, DC_E_##result, to, #from ", " #made ", " #result ", " #to},
#include "param_table.h"
#undef ROW
};

enum { GRAPHS = 3, PARAM = 1, LENGTH = 7 };

static dc_status make(rank *r, call c, int32_t user) {
  dc_context *ctx = r->ctx;
  dc_tensor full = DC_TENSOR_INIT;
  dc_buffer *buffer = NULL;
  dc_status status;
  int64_t graph = GRAPHS + user; /* the two users are two graphs */
  switch (c) {
    case GATHER:
      return dc_allgather_param(ctx, NULL, graph, PARAM, DC_DTYPE_NONE, &full);
    case WAIT:
      return dc_wait_allgather(ctx, NULL, graph, PARAM);
    case RELEASE_OF_2:
      return dc_release_param(ctx, NULL, graph, PARAM, 2);
    case RELEASE_OF_1:
      return dc_release_param(ctx, NULL, graph, PARAM, 1);
    case TAKE:
      status = dc_take_param(ctx, graph, PARAM, DC_DTYPE_NONE, &buffer);
      dc_buffer_release(buffer);
      return status;
    case UPDATE:
      return dc_context_params_updated(ctx, NULL, 0);
    case INVALIDATE:
      return dc_invalidate_gathered_param(ctx, PARAM);
    case CLEAR_ALL:
      return dc_clear_all_gathered_params(ctx);
    case KEEP:
      return dc_set_persistent(ctx, PARAM);
    case KEEP_NOT:
      return dc_clear_persistent(ctx, PARAM);
    default:
      return dc_context_step_abort(ctx);
  }
}

static state state_of(rank *r) {
  const dc__param *p = dc__map_get(&r->ctx->params, PARAM);
  const dc__gathered_copy *copy = dc__gather_copy((dc__param *)(uintptr_t)p, DC_DTYPE_NONE);
  if (copy == NULL) {
    return p->persistent ? NONE_KEPT : NONE;
  }
  int base = copy->version == p->version ? CURRENT : STALE;
  return (state)(base + (p->users > 0 ? 2 : p->in_use ? 1 : 0) + (p->persistent ? 3 : 0));
}

/* Calls that lead from a new parameter to each state; for one state the parameter is registered persistent. */
static const struct {
  bool persistent;
  int32_t count;
  call calls[4];
} ways[STATES] = {
    [NONE] = {false, 0, {0}},
    [NONE_KEPT] = {true, 0, {0}},
    [CURRENT] = {false, 1, {GATHER}},
    [CURRENT_USED] = {false, 2, {GATHER, WAIT}},
    [CURRENT_HALF] = {false, 2, {GATHER, RELEASE_OF_2}},
    [CURRENT_KEPT] = {false, 1, {KEEP}},
    [CURRENT_KEPT_USED] = {false, 2, {KEEP, WAIT}},
    [CURRENT_KEPT_HALF] = {true, 2, {GATHER, RELEASE_OF_2}},
    [STALE] = {false, 2, {GATHER, UPDATE}},
    [STALE_USED] = {false, 3, {GATHER, WAIT, UPDATE}},
    [STALE_HALF] = {false, 3, {GATHER, RELEASE_OF_2, UPDATE}},
    [STALE_KEPT] = {true, 2, {GATHER, UPDATE}},
    [STALE_KEPT_USED] = {true, 3, {GATHER, UPDATE, WAIT}},
    [STALE_KEPT_HALF] = {false, 3, {KEEP, RELEASE_OF_2, UPDATE}},
};

static void every_row(rank *r) {
  int64_t id = PARAM;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    sharded p;
    OK(r, register_sharded(r, &p, PARAM, LENGTH, ways[rows[i].from].persistent));
    OK(r, dc_register_graph_z3(r->ctx, GRAPHS, &id, 1));
    OK(r, dc_register_graph_z3(r->ctx, GRAPHS + 1, &id, 1));
    for (int32_t k = 0; k < ways[rows[i].from].count; k++) {
      OK(r, make(r, ways[rows[i].from].calls[k], 0));
    }
    bool right = state_of(r) == rows[i].from && make(r, rows[i].made, 1) == rows[i].result && state_of(r) == rows[i].to;
    if (!right) {
      snprintf(r->failure, sizeof r->failure, "row \"%s\" is not what the runtime does: it is in state %d, %s",
               rows[i].text, (int)state_of(r), dc_last_error());
      return;
    }
    OK(r, dc_context_step_abort(r->ctx));
    OK(r, dc_reset(r->ctx));
    OK(r, dc_unregister_param(r->ctx, PARAM));
    free_sharded(&p);
  }
}

static void test_every_row(void **unused) {
  (void)unused;
  for (int32_t world = 1; world <= 3; world++) {
    run_ranks((setup){.world = world}, every_row, NULL);
  }
}

static void test_a_row_for_every_call_in_every_state(void **unused) {
  (void)unused;
  int32_t count[STATES][CALLS] = {{0}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    count[rows[i].from][rows[i].made]++;
  }
  for (int32_t s = 0; s < STATES; s++) {
    for (int32_t c = 0; c < CALLS; c++) {
      assert_int_equal(count[s][c], 1);
    }
  }
}

/* ---- the types of copies ---- */

enum { NARROW = 1, OWN = 2, WIDE = 4, SETS = 8 }; /* a set of copies is a sum */
enum {
  NOTHING = 0,
  NARROW_OWN = NARROW + OWN,
  NARROW_WIDE = NARROW + WIDE,
  OWN_WIDE = OWN + WIDE,
  ALL_THREE = NARROW + OWN + WIDE
};
enum { GATHER_NARROW = NARROW, GATHER_OWN = OWN, GATHER_WIDE = WIDE };
typedef enum source { FOUND, CAST, WIRE } source;

static const int32_t types[] = {[NARROW] = DC_FLOAT16, [OWN] = DC_FLOAT32, [WIDE] = DC_FLOAT64};

static const struct {
  int from, asked;
  source result;
  int to;
  const char *text;
} type_rows[] = {
#define ROW(from, made, result, to) {from, made, result, to, #from ", " #made ", " #result ", " #to},
#include "type_table.h"
#undef ROW
};

static int copies_of(rank *r) {
  dc__param *p = dc__map_get(&r->ctx->params, PARAM);
  int there = 0;
  for (int type = NARROW; type <= WIDE; type *= 2) {
    there += dc__gather_copy(p, types[type]) != NULL ? type : 0;
  }
  return there;
}

static source source_of(rank *r, int asked) {
  dc_memory_stats before = DC_MEMORY_STATS_INIT, after = DC_MEMORY_STATS_INIT;
  dc_tensor full = DC_TENSOR_INIT;
  (void)dc_context_get_memory_stats(r->ctx, &before);
  (void)dc_allgather_param(r->ctx, NULL, GRAPHS, PARAM, types[asked], &full);
  (void)dc_context_get_memory_stats(r->ctx, &after);
  return after.gather_hits > before.gather_hits ? FOUND : after.gathers > before.gathers ? WIRE : CAST;
}

static void every_type_row(rank *r) {
  int64_t id = PARAM;
  sharded p;
  OK(r, register_sharded(r, &p, PARAM, LENGTH, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPHS, &id, 1));
  for (size_t i = 0; i < sizeof type_rows / sizeof type_rows[0]; i++) {
    for (int type = NARROW; type <= WIDE; type *= 2) {
      if ((type_rows[i].from & type) != 0) {
        (void)source_of(r, type);
      }
    }
    bool right = copies_of(r) == type_rows[i].from && source_of(r, type_rows[i].asked) == type_rows[i].result &&
                 copies_of(r) == type_rows[i].to;
    if (!right) {
      snprintf(r->failure, sizeof r->failure, "row \"%s\" is not what the runtime does", type_rows[i].text);
      return;
    }
    OK(r, dc_invalidate_gathered_param(r->ctx, PARAM));
  }
  OK(r, dc_unregister_graph(r->ctx, GRAPHS));
  OK(r, dc_unregister_param(r->ctx, PARAM)); /* waits for the work that reads the shard */
  free_sharded(&p);
}

static void test_every_type_row(void **unused) {
  (void)unused;
  int count[SETS][SETS] = {{0}};
  for (size_t i = 0; i < sizeof type_rows / sizeof type_rows[0]; i++) {
    count[type_rows[i].from][type_rows[i].asked]++;
  }
  for (int from = 0; from < SETS; from++) {
    for (int type = NARROW; type <= WIDE; type *= 2) {
      assert_int_equal(count[from][type], 1);
    }
  }
  run_ranks((setup){.world = 2}, every_type_row, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_row),
      cmocka_unit_test(test_a_row_for_every_call_in_every_state),
      cmocka_unit_test(test_every_type_row),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
