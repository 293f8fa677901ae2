/* All kernels. A family is one source of that name and one image. X(number, name, maximum bytes of dynamic shared
 * memory). */
#ifndef DC_KERNELS_CUDA_KERNEL_LIST_H
#define DC_KERNELS_CUDA_KERNEL_LIST_H

#define DC__CUDA_FAMILIES(FAMILY) \
  FAMILY(elementwise)             \
  FAMILY(update)                  \
  FAMILY(attention)               \
  FAMILY(attention_backward)      \
  FAMILY(rowops)                  \
  FAMILY(column_sums)             \
  FAMILY(gemm_epilogue)           \
  FAMILY(matrix)                  \
  FAMILY(inverse_root_newton)     \
  FAMILY(root_warm_start)         \
  FAMILY(orthogonal_iteration)    \
  FAMILY(kron)                    \
  FAMILY(kron_nearest)            \
  FAMILY(per_sample)              \
  FAMILY(embedding)               \
  FAMILY(blockwise)               \
  FAMILY(kfac)

#define DC__CUDA_elementwise(X)                      \
  X(DC__KERNEL_CAST, dc__cast_kernel, 0)             \
  X(DC__KERNEL_ACCUMULATE, dc__accumulate_kernel, 0) \
  X(DC__KERNEL_REDUCE, dc__reduce_kernel, 0)

/* The first are in the order of enum dc__update_kind. */
#define DC__CUDA_update(X)                                           \
  X(DC__KERNEL_ADAMW, dc__adamw_kernel, 0)                           \
  X(DC__KERNEL_SGD, dc__sgd_kernel, 0)                               \
  X(DC__KERNEL_SCAN_OVERFLOW, dc__scan_overflow_kernel, 0)           \
  X(DC__KERNEL_LOAD_BLOCK, dc__load_block_kernel, 0)                 \
  X(DC__KERNEL_STORE_BLOCK, dc__store_block_kernel, 0)               \
  X(DC__KERNEL_UPDATE_BEGIN, dc__update_begin_kernel, 0)             \
  X(DC__KERNEL_UPDATE_READ_SCALER, dc__update_read_scaler_kernel, 0) \
  X(DC__KERNEL_UPDATE_SET_SCALAR, dc__update_set_scalar_kernel, 0)

/* A pass for all types and widths of a head; its first number is PASS_float32_64. */
#define DC__CUDA_ATTENTION(X, PASS, pass)                        \
  X(PASS##_float32_64, dc__attention_##pass##_float32_64, 0)     \
  X(PASS##_float32_128, dc__attention_##pass##_float32_128, 0)   \
  X(PASS##_float32_wide, dc__attention_##pass##_float32_wide, 0) \
  X(PASS##_float16_64, dc__attention_##pass##_float16_64, 0)     \
  X(PASS##_float16_128, dc__attention_##pass##_float16_128, 0)   \
  X(PASS##_float16_wide, dc__attention_##pass##_float16_wide, 0) \
  X(PASS##_bfloat16_64, dc__attention_##pass##_bfloat16_64, 0)   \
  X(PASS##_bfloat16_128, dc__attention_##pass##_bfloat16_128, 0) \
  X(PASS##_bfloat16_wide, dc__attention_##pass##_bfloat16_wide, 0)
#define DC__CUDA_attention(X) DC__CUDA_ATTENTION(X, DC__KERNEL_ATTENTION, forward)
#define DC__CUDA_attention_backward(X)                                               \
  DC__CUDA_ATTENTION(X, DC__KERNEL_ATTENTION_DQ, backward_dq)                        \
  DC__CUDA_ATTENTION(X, DC__KERNEL_ATTENTION_DK_DV, backward_dk_dv)                  \
  X(DC__KERNEL_ATTENTION_DQKV_float16_64, dc__attention_backward_dqkv_float16_64, 0) \
  X(DC__KERNEL_ATTENTION_DQKV_bfloat16_64, dc__attention_backward_dqkv_bfloat16_64, 0)

#define DC__CUDA_rowops(X)                                           \
  X(DC__KERNEL_RESIDUAL, dc__residual_kernel, 0)                     \
  X(DC__KERNEL_LAYERNORM, dc__layernorm_kernel, 0)                   \
  X(DC__KERNEL_LAYERNORM_BACKWARD, dc__layernorm_backward_kernel, 0) \
  X(DC__KERNEL_DROPOUT, dc__dropout_kernel, 0)                       \
  X(DC__KERNEL_OFFSETS, dc__offsets_kernel, 0)

#define DC__CUDA_column_sums(X)                      \
  X(DC__KERNEL_SUM_CHUNKS, dc__sum_chunks_kernel, 0) \
  X(DC__KERNEL_SUM_PARTS, dc__sum_parts_kernel, 0)

#define DC__CUDA_gemm_epilogue(X) X(DC__KERNEL_EPILOGUE, dc__epilogue_kernel, 0)

#define DC__CUDA_matrix(X)                             \
  X(DC__KERNEL_MEASURE, dc__measure_kernel, 0)         \
  X(DC__KERNEL_LOAD, dc__load_kernel, 0)               \
  X(DC__KERNEL_ROW_SUMS, dc__row_sums_kernel, 0)       \
  X(DC__KERNEL_MATRIX_NORM, dc__matrix_norm_kernel, 0) \
  X(DC__KERNEL_AFFINE, dc__affine_kernel, 0)           \
  X(DC__KERNEL_SCALE, dc__scale_kernel, 0)

#define DC__CUDA_inverse_root_newton(X)                        \
  X(DC__KERNEL_NEWTON_DISTANCE, dc__newton_distance_kernel, 0) \
  X(DC__KERNEL_NEWTON_CHECK, dc__newton_check_kernel, 0)       \
  X(DC__KERNEL_NEWTON_RESTORE, dc__newton_restore_kernel, 0)

#define DC__CUDA_root_warm_start(X)                                    \
  X(DC__KERNEL_WARM_START_RESIDUAL, dc__warm_start_residual_kernel, 0) \
  X(DC__KERNEL_WARM_START_ROOT, dc__warm_start_root_kernel, 0)

#define DC__CUDA_orthogonal_iteration(X)                 \
  X(DC__KERNEL_BASIS_VALUES, dc__basis_values_kernel, 0) \
  X(DC__KERNEL_BASIS_ORDER, dc__basis_order_kernel, 0)   \
  X(DC__KERNEL_BASIS_SORT, dc__basis_sort_kernel, 0)     \
  X(DC__KERNEL_BASIS_STORE, dc__basis_store_kernel, 0)

#define DC__CUDA_kron(X)                 \
  X(DC__KERNEL_KRON, dc__kron_kernel, 0) \
  X(DC__KERNEL_DAMP, dc__damp_kernel, 0)

#define DC__CUDA_kron_nearest(X)                                   \
  X(DC__KERNEL_NEAREST_GUESS, dc__nearest_guess_kernel, 0)         \
  X(DC__KERNEL_NEAREST_INNER, dc__nearest_inner_kernel, 0)         \
  X(DC__KERNEL_NEAREST_OUTER, dc__nearest_outer_kernel, 0)         \
  X(DC__KERNEL_NEAREST_REDUCE, dc__nearest_reduce_kernel, 0)       \
  X(DC__KERNEL_NEAREST_NORMALISE, dc__nearest_normalise_kernel, 0) \
  X(DC__KERNEL_NEAREST_CHECK, dc__nearest_check_kernel, 0)         \
  X(DC__KERNEL_NEAREST_RESIDUAL, dc__nearest_residual_kernel, 0)

#define DC__CUDA_per_sample(X)                           \
  X(DC__KERNEL_STATISTICS, dc__statistics_kernel, 0)     \
  X(DC__KERNEL_COLUMNS, dc__columns_kernel, 0)           \
  X(DC__KERNEL_CHANNELS, dc__channels_kernel, 0)         \
  X(DC__KERNEL_DOTS, dc__dots_kernel, 0)                 \
  X(DC__KERNEL_TOTALS, dc__totals_kernel, 0)             \
  X(DC__KERNEL_SQUARES, dc__squares_kernel, 0)           \
  X(DC__KERNEL_WEIGHTED_SUM, dc__weighted_sum_kernel, 0) \
  X(DC__KERNEL_CLIP, dc__clip_kernel, 0)                 \
  X(DC__KERNEL_IM2COL, dc__im2col_kernel, 0)

#define DC__CUDA_embedding(X)                                \
  X(DC__KERNEL_SAMPLE_WEIGHTS, dc__sample_weights_kernel, 0) \
  X(DC__KERNEL_SCATTER, dc__scatter_kernel, 0)               \
  X(DC__KERNEL_ROWS_SQUARED, dc__rows_squared_kernel, 0)

#define DC__CUDA_blockwise(X)                                  \
  X(DC__KERNEL_BOX_COPY, dc__box_copy_kernel, 0)               \
  X(DC__KERNEL_STACK, dc__stack_kernel, 0)                     \
  X(DC__KERNEL_GRAFT_UPDATE, dc__graft_update_kernel, 0)       \
  X(DC__KERNEL_GRAFT_DIRECTION, dc__graft_direction_kernel, 0) \
  X(DC__KERNEL_GRAFT_FINISH, dc__graft_finish_kernel, 0)       \
  X(DC__KERNEL_PERMUTE, dc__permute_kernel, 0)

#define DC__CUDA_kfac(X)                                           \
  X(DC__KERNEL_MAX_ABS, dc__max_abs_kernel, 0)                     \
  X(DC__KERNEL_FILL_ONES, dc__fill_ones_kernel, 0)                 \
  X(DC__KERNEL_PACK_TRIANGLES, dc__pack_triangles_kernel, 0)       \
  X(DC__KERNEL_AVERAGE_TRIANGLES, dc__average_triangles_kernel, 0) \
  X(DC__KERNEL_CLAMP_MIN_ZERO, dc__clamp_min_zero_kernel, 0)       \
  X(DC__KERNEL_DAMP_EIGENVALUES, dc__damp_eigenvalues_kernel, 0)   \
  X(DC__KERNEL_STORE_DIRECTION, dc__store_direction_kernel, 0)

/* The kernels' numbers, in the order of the images and of the kernels in each. */
enum dc__cuda_kernel {
#define X(number, name, shared) number,
#define FAMILY(family) DC__CUDA_##family(X)
  DC__CUDA_FAMILIES(FAMILY)
#undef FAMILY
#undef X
};

#endif
