/* D: parameters and graphs. */
#include "conformance.h"

/* ---- parameters ---- */

static void zeroes_at_offset(rank *r) {
  param p = {.id = 1, .shape = {30}, .stage = 2};
  OK(r, register_param(r, &p));
  CHECK(r, is_all(r, &p.buffer, 0)); /* it was poisoned before */
  OK(r, register_graph(r, GRAPH, 2, &p.id, 1));
  OK(r, backward(r, &p, 1, 0));
  CHECK(r, has_grad(r, &p, 0, 0)); /* this rank's part begins where the rank said */
}

static void check_24_register_param_zeroes_the_buffer_and_keeps_the_offset(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, zeroes_at_offset, NULL);
  on_ranks((setup){.world = 3}, zeroes_at_offset, NULL);
}

static void registered_twice(rank *r) {
  param p = {.id = 1, .shape = {30}, .stage = 3}, again;
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  again = p;
  OK(r, new_array(r, &again.weights, p.padded, DC_FLOAT32));
  OK(r, new_array(r, &again.buffer, p.padded, DC_FLOAT32));
  OK(r, set_all(r, &again.buffer, 5));
  dc_tensor shard = tensor_of(&again.weights), grad = tensor_of(&again.buffer);
  FAILS(r, dc_register_z3_param(r->ctx, 1, p.shape, 1, &shard, &grad, 1, 0), DC_E_EXISTS, "id = 1 is registered");
  FAILS(r, dc_register_param(r->ctx, 1, p.shape, 1, NULL, NULL, 0), DC_E_EXISTS, "id = 1 is registered");
  CHECK(r, is_all(r, &again.buffer, 5)); /* the refused call did not even zero it */
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
  CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, 0));
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1));
  CHECK(r, stats_of(r).gathered_bytes == 0); /* nor is it persistent */
  OK(r, backward(r, &p, 1, 0));
  CHECK(r, has_grad(r, &p, 0, 0) && is_all(r, &again.buffer, 5));
}

static void check_25_an_id_cannot_be_registered_twice(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, registered_twice, NULL);
}

static void another_buffer(rank *r) {
  int32_t stage = *(const int32_t *)r->user;
  param p = {.id = 1, .shape = {30}, .stage = stage};
  OK(r, register_one(r, &p));
  OK(r, backward(r, &p, 1, 0));
  param old = p;
  OK(r, new_array(r, &p.buffer, p.padded, DC_FLOAT32));
  OK(r, set_all(r, &p.buffer, 5));
  dc_tensor grad = tensor_of(&p.buffer);
  OK(r, dc_context_update_param_grad_buffer(r->ctx, 1, &grad, stage == 3 ? 0 : p.begin));
  CHECK(r, is_all(r, &p.buffer, 0));
  OK(r, backward(r, &p, 1, 1));
  CHECK(r, has_grad(r, &p, 1, 1) && has_grad(r, &old, 0, 0));
}

static void check_26_a_gradient_can_be_sent_to_another_buffer(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    on_ranks((setup){.world = 2}, another_buffer, &stage);
  }
}

/* The buffer is taken away on every rank that owns a part, and given back. Meanwhile stage 1 may go on adding. */
static void without_a_buffer(rank *r) {
  int32_t stage = *(const int32_t *)r->user;
  param p = {.id = 1, .shape = {30}, .stage = stage};
  OK(r, register_one(r, &p));
  OK(r, dc_context_update_param_grad_buffer(r->ctx, 1, NULL, 0));
  if (stage == 1) {
    OK(r, backward(r, &p, 0, 0));
  }
  OK(r, dc_start_backward(r->ctx, 1));
  dc_tensor source = tensor_of(&p.source);
  FAILS(r, dc_reduce_grad(r->ctx, &source, GRAPH, 1), DC_E_STATE, "the gradient buffer of parameter 1 was taken away");
  dc_tensor grad = tensor_of(&p.buffer);
  OK(r, dc_context_update_param_grad_buffer(r->ctx, 1, &grad, stage == 3 ? 0 : p.begin));
  OK(r, reduce(r, GRAPH, &p, 1));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, has_grad(r, &p, stage == 1 ? 0 : 1, 1));
}

static void check_26_without_a_buffer_a_gradient_is_refused(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    on_ranks((setup){.world = 2}, without_a_buffer, &stage);
  }
}

static void wrong_shard(rank *r) {
  param p = {.id = 1, .shape = {10}, .stage = 3};
  array six;
  OK(r, new_array(r, &six, 6, DC_FLOAT32));
  if (r->rank == 1) { /* rank 1 alone: nothing communicates, so the others need not call */
    dc_tensor shard = tensor_of(&six);
    FAILS(r, dc_register_z3_param(r->ctx, 1, p.shape, 1, &shard, NULL, 0, 0), DC_E_SHAPE,
          r->world == 2 ? "shard of parameter 1 on rank 1 has 6 elements, must have 5"
                        : "shard of parameter 1 on rank 1 has 6 elements, must have 4");
  }
  OK(r, register_one(r, &p));
}

static void check_27_a_shard_of_the_wrong_length_is_refused_by_rank(void **state) {
  (void)state;
  on_ranks((setup){.world = 3}, wrong_shard, NULL);
}

static void register_alone(rank *r) {
  if (r->rank == 0) {
    for (int64_t id = 0; id < 20; id++) {
      param p = {.id = id, .shape = {10 + id}, .stage = 3};
      OK(r, register_param(r, &p)); /* without asking the other ranks */
    }
    CHECK(r, stats_of(r).registered_params == 20);
  }
  OK(r, dc_comm_barrier(r->comm));
}

static void check_28_registering_does_not_wait_for_anybody(void **state) {
  (void)state;
  on_ranks((setup){.world = 3}, register_alone, NULL);
}

#ifndef ON_SIM
static void count_collectives(rank *r) {
  echo e = {0};
  dc_comm *comm;
  rank two = *r;
  two.world = 2;
  if (echo_is_without_cards(r)) {
    return;
  }
  OK(r, echo_comm(&e, &comm));
  OK(r, dc_context_create(r->device, NULL, &two.ctx));
  OK(r, dc_init(two.ctx, comm, NULL, 10));
  int before = atomic_load(&e.gathers) + atomic_load(&e.reductions) + atomic_load(&e.broadcasts);
  int64_t ids[20];
  for (int64_t id = 0; id < 20; id++) {
    param p = {.id = id, .shape = {10 + id}, .stage = 3};
    OK(r, register_param(&two, &p));
    ids[id] = id;
  }
  CHECK(r, atomic_load(&e.gathers) + atomic_load(&e.reductions) + atomic_load(&e.broadcasts) == before);
  CHECK(r, atomic_load(&e.barriers) == 0);
  OK(r, register_graph(&two, GRAPH, 3, ids, 20));
  int graph = atomic_load(&e.gathers) - before;
  CHECK(r, graph > 0 && graph <= 2); /* one comparison for all twenty; an external group makes it with two calls */
  dc_context_destroy(two.ctx);
  dc_comm_destroy(comm);
}

static void check_28_registering_calls_no_collective(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, count_collectives, NULL);
}
#endif

static void persistent_from_the_start(rank *r) {
  param p = {.id = 1, .shape = {10}, .stage = 3, .persistent = 1};
  dc_tensor first = DC_TENSOR_INIT, second = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &first));
  CHECK(r, is_whole(r, &first, &p, DC_DTYPE_NONE, 0));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &second));
  CHECK(r, is_whole(r, &second, &p, DC_DTYPE_NONE, 0) && first.data == second.data);
}

static void check_29_persistent_at_registration_gathers_twice(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, persistent_from_the_start, NULL);
  on_ranks((setup){.world = 3}, persistent_from_the_start, NULL);
}

/* ---- graphs ---- */

static void unknown_member(rank *r) {
  param p = {.id = 1, .shape = {10}, .stage = 3};
  int64_t ids[2] = {1, 99};
  OK(r, register_param(r, &p));
  if (r->rank == 0) { /* rank 0 alone: refused before anything in which the others would have to join */
    FAILS(r, register_graph(r, GRAPH, 3, ids, 2), DC_E_NOT_FOUND, "id = 99 is not a registered parameter");
    CHECK(r, stats_of(r).registered_graphs == 0);
    FAILS(r, dc_end_backward(r->ctx, GRAPH, 0), DC_E_NOT_FOUND, "is not a registered graph");
    OK(r, dc_unregister_param(r->ctx, 1)); /* the parameter keeps no trace of the graph either */
    p = (param){.id = 1, .shape = {10}, .stage = 3};
    OK(r, register_param(r, &p));
  }
  OK(r, register_graph(r, GRAPH, 3, ids, 1));
  OK(r, backward(r, &p, 1, 0));
  CHECK(r, has_grad(r, &p, 0, 0));
}

static void check_30_a_graph_with_an_unknown_parameter_is_not_made(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, unknown_member, NULL);
}

static void graph_again(rank *r) {
  param p = {.id = 1, .shape = {10}, .stage = 3}, q = {.id = 2, .shape = {7}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, register_param(r, &q));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, reduce(r, GRAPH, &p, 0));
  FAILS(r, register_graph(r, GRAPH, 3, &q.id, 1), DC_E_BUSY, "reductions of graph 7 are pending");
  FAILS(r, dc_unregister_graph(r->ctx, GRAPH), DC_E_BUSY, "reductions of graph 7 are pending");
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, has_grad(r, &p, 0, 0)); /* nothing was lost */
  OK(r, register_graph(r, GRAPH, 3, &q.id, 1));
  CHECK(r, stats_of(r).registered_graphs == 1);
  OK(r, gather(r, GRAPH, &q, DC_DTYPE_NONE, &full));
  CHECK(r, is_whole(r, &full, &q, DC_DTYPE_NONE, 0));
  CHECK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, 0, &full) == DC_E_NOT_FOUND);
}

static void check_31_a_graph_is_replaced_unless_work_is_pending(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, graph_again, NULL);
}

static void frozen(rank *r) {
  for (int32_t stage = 0; stage <= 3; stage++) {
    param p = {.id = 10 + stage, .shape = {13}, .stage = stage, .frozen = true};
    param q = {.id = 20 + stage, .shape = {13}, .stage = stage};
    int64_t ids[2] = {p.id, q.id};
    OK(r, register_param(r, &p));
    OK(r, register_param(r, &q));
    OK(r, register_graph(r, GRAPH, stage, ids, 2));
    int64_t reductions = stats_of(r).reductions;
    OK(r, dc_start_backward(r->ctx, 1));
    OK(r, reduce(r, GRAPH, &p, 0));
    OK(r, reduce(r, GRAPH, &q, 1));
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    CHECK(r, stats_of(r).reductions == reductions + 1 && has_grad(r, &q, 1, 1));
  }
}

static void check_32_frozen_parameters_are_never_reduced(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, frozen, NULL);
  on_ranks((setup){.world = 2}, frozen, NULL);
}

static void strided(rank *r) {
  int64_t shape[2] = {4, 3}, numel = 12 * r->world, whole[2] = {4, 3}, strides[2] = {1, 4}, twos = 2, twelve = 12;
  array weights, grads;
  OK(r, new_array(r, &weights, 24, DC_FLOAT32));
  OK(r, new_array(r, &grads, 24, DC_FLOAT32));
  OK(r, set_all(r, &grads, 5));
  dc_tensor shard = flat(weights.data, &twelve, DC_FLOAT32), grad = flat(grads.data, shape, DC_FLOAT32);
  grad.ndim = 2;
  grad.strides = strides;
  FAILS(r, dc_register_z3_param(r->ctx, 1, &numel, 1, &shard, &grad, 0, 0), DC_E_SHAPE, "not contiguous");
  FAILS(r, dc_register_param(r->ctx, 1, whole, 2, NULL, &grad, 0), DC_E_SHAPE, "not contiguous");
  grad = flat(grads.data, &twelve, DC_FLOAT32);
  grad.strides = &twos;
  FAILS(r, dc_register_z3_param(r->ctx, 1, &numel, 1, &shard, &grad, 0, 0), DC_E_SHAPE, "not contiguous");
  OK(r, dc_register_z3_param(r->ctx, 1, &numel, 1, &shard, NULL, 0, 0));
  FAILS(r, dc_context_update_param_grad_buffer(r->ctx, 1, &grad, 0), DC_E_SHAPE, "not contiguous");
  CHECK(r, is_all(r, &grads, 5));
}

static void check_33_a_strided_gradient_buffer_is_refused(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, strided, NULL);
}

/* Scalars, fewer elements than ranks, lengths that divide evenly and lengths that do not. */
static void every_shape(rank *r) {
  param p[] = {{.id = 0, .stage = 3},
               {.id = 1, .shape = {1}, .stage = 3},
               {.id = 2, .shape = {r->world - 1}, .ndim = 1, .stage = 3},
               {.id = 3, .shape = {r->world * 5}, .stage = 3},
               {.id = 4, .shape = {r->world * 5 + 1}, .stage = 3},
               {.id = 5, .shape = {3, r->world, 7}, .ndim = 3, .stage = 3},
               {.id = 6, .shape = {2, 0, 3}, .ndim = 3, .stage = 3},
               {.id = 7, .shape = {1, 1, 11}, .ndim = 3, .stage = 3}};
  enum { COUNT = sizeof p / sizeof p[0] };
  int64_t ids[COUNT];
  dc_tensor full = DC_TENSOR_INIT;
  for (int64_t i = 0; i < COUNT; i++) {
    OK(r, register_param(r, &p[i]));
    ids[i] = i;
  }
  OK(r, register_graph(r, GRAPH, 3, ids, COUNT));
  for (int64_t i = 0; i < COUNT; i++) {
    OK(r, gather(r, GRAPH, &p[i], DC_DTYPE_NONE, &full));
    CHECK(r, is_whole(r, &full, &p[i], DC_DTYPE_NONE, 0));
    OK(r, dc_release_param(r->ctx, NULL, GRAPH, i, 1));
  }
  CHECK(r, stats_of(r).gathered_bytes == 0);
}

static void check_34_every_shape_on_every_number_of_ranks(void **state) {
  (void)state;
  const int32_t worlds[] = {1, 2, 3, 4, 8};
  for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
    on_ranks((setup){.world = worlds[i]}, every_shape, NULL);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_24_register_param_zeroes_the_buffer_and_keeps_the_offset),
      cmocka_unit_test(check_25_an_id_cannot_be_registered_twice),
      cmocka_unit_test(check_26_a_gradient_can_be_sent_to_another_buffer),
      cmocka_unit_test(check_26_without_a_buffer_a_gradient_is_refused),
      cmocka_unit_test(check_27_a_shard_of_the_wrong_length_is_refused_by_rank),
      cmocka_unit_test(check_28_registering_does_not_wait_for_anybody),
#ifndef ON_SIM
      cmocka_unit_test(check_28_registering_calls_no_collective),
#endif
      cmocka_unit_test(check_29_persistent_at_registration_gathers_twice),
      cmocka_unit_test(check_30_a_graph_with_an_unknown_parameter_is_not_made),
      cmocka_unit_test(check_31_a_graph_is_replaced_unless_work_is_pending),
      cmocka_unit_test(check_32_frozen_parameters_are_never_reduced),
      cmocka_unit_test(check_33_a_strided_gradient_buffer_is_refused),
      cmocka_unit_test(check_34_every_shape_on_every_number_of_ranks),
  };
  return cmocka_run_group_tests_name("conformance: registration", tests, NULL, NULL);
}
