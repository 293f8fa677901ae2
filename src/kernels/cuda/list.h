/* All kernels. A family is one source of that name and one image; X(number, name, most dynamic shared memory). */
#ifndef DC_KERNELS_CUDA_LIST_H
#define DC_KERNELS_CUDA_LIST_H

#define DC__CUDA_FAMILIES(FAMILY) \
  FAMILY(elementwise)             \
  FAMILY(update)                  \
  FAMILY(attention)               \
  FAMILY(attention_back)          \
  FAMILY(rows)                    \
  FAMILY(column_sums)             \
  FAMILY(matrix) FAMILY(nearest) FAMILY(sample) FAMILY(embedding) FAMILY(blocks) FAMILY(curvature)

#define DC__CUDA_elementwise(X)                      \
  X(DC__KERNEL_CAST, dc__cast_kernel, 0)             \
  X(DC__KERNEL_ACCUMULATE, dc__accumulate_kernel, 0) \
  X(DC__KERNEL_REDUCE, dc__reduce_kernel, 0)

/* First those of enum dc__update_kind, in its order. */
#define DC__CUDA_update(X)                               \
  X(DC__KERNEL_ADAMW, dc__adamw_kernel, 0)               \
  X(DC__KERNEL_SGD, dc__sgd_kernel, 0)                   \
  X(DC__KERNEL_BELOW, dc__below_kernel, 0)               \
  X(DC__KERNEL_TAKE, dc__take_kernel, 0)                 \
  X(DC__KERNEL_GIVE, dc__give_kernel, 0)                 \
  X(DC__KERNEL_UPDATE_BEGIN, dc__update_begin_kernel, 0) \
  X(DC__KERNEL_UPDATE_HEED, dc__update_heed_kernel, 0)   \
  X(DC__KERNEL_UPDATE_NUMBER, dc__update_number_kernel, 0)

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
#define DC__CUDA_attention_back(X)                                               \
  DC__CUDA_ATTENTION(X, DC__KERNEL_ATTENTION_QUERIES, back_queries)              \
  DC__CUDA_ATTENTION(X, DC__KERNEL_ATTENTION_KEYS, back_keys)                    \
  X(DC__KERNEL_ATTENTION_BOTH_float16_64, dc__attention_back_both_float16_64, 0) \
  X(DC__KERNEL_ATTENTION_BOTH_bfloat16_64, dc__attention_back_both_bfloat16_64, 0)

#define DC__CUDA_rows(X)                               \
  X(DC__KERNEL_RESIDUAL, dc__residual_kernel, 0)       \
  X(DC__KERNEL_NORMALIZE, dc__normalize_kernel, 0)     \
  X(DC__KERNEL_NORMAL_BACK, dc__normal_back_kernel, 0) \
  X(DC__KERNEL_DROP, dc__drop_kernel, 0)               \
  X(DC__KERNEL_EPILOGUE, dc__epilogue_kernel, 0)       \
  X(DC__KERNEL_OFFSETS, dc__offsets_kernel, 0)

#define DC__CUDA_column_sums(X)                      \
  X(DC__KERNEL_SUM_CHUNKS, dc__sum_chunks_kernel, 0) \
  X(DC__KERNEL_SUM_PARTS, dc__sum_parts_kernel, 0)

#define DC__CUDA_matrix(X)                                     \
  X(DC__KERNEL_MEASURE, dc__measure_kernel, 0)                 \
  X(DC__KERNEL_LOAD, dc__load_kernel, 0)                       \
  X(DC__KERNEL_ROW_SUMS, dc__row_sums_kernel, 0)               \
  X(DC__KERNEL_FOLD, dc__fold_kernel, 0)                       \
  X(DC__KERNEL_AFFINE, dc__affine_kernel, 0)                   \
  X(DC__KERNEL_NEWTON_DISTANCE, dc__newton_distance_kernel, 0) \
  X(DC__KERNEL_NEWTON_JUDGE, dc__newton_judge_kernel, 0)       \
  X(DC__KERNEL_NEWTON_KEEP, dc__newton_keep_kernel, 0)         \
  X(DC__KERNEL_SCALE, dc__scale_kernel, 0)                     \
  X(DC__KERNEL_WARM_REST, dc__warm_rest_kernel, 0)             \
  X(DC__KERNEL_WARM_ROOT, dc__warm_root_kernel, 0)             \
  X(DC__KERNEL_BASIS_VALUES, dc__basis_values_kernel, 0)       \
  X(DC__KERNEL_BASIS_ORDER, dc__basis_order_kernel, 0)         \
  X(DC__KERNEL_BASIS_SORT, dc__basis_sort_kernel, 0)           \
  X(DC__KERNEL_BASIS_GIVE, dc__basis_give_kernel, 0)           \
  X(DC__KERNEL_KRON, dc__kron_kernel, 0)                       \
  X(DC__KERNEL_DAMP, dc__damp_kernel, 0)

#define DC__CUDA_nearest(X)                                        \
  X(DC__KERNEL_NEAREST_GUESS, dc__nearest_guess_kernel, 0)         \
  X(DC__KERNEL_NEAREST_INNER, dc__nearest_inner_kernel, 0)         \
  X(DC__KERNEL_NEAREST_OUTER, dc__nearest_outer_kernel, 0)         \
  X(DC__KERNEL_NEAREST_FOLD, dc__nearest_fold_kernel, 0)           \
  X(DC__KERNEL_NEAREST_NORMALISE, dc__nearest_normalise_kernel, 0) \
  X(DC__KERNEL_NEAREST_JUDGE, dc__nearest_judge_kernel, 0)         \
  X(DC__KERNEL_NEAREST_APART, dc__nearest_apart_kernel, 0)

#define DC__CUDA_sample(X)                           \
  X(DC__KERNEL_STATISTICS, dc__statistics_kernel, 0) \
  X(DC__KERNEL_COLUMNS, dc__columns_kernel, 0)       \
  X(DC__KERNEL_CHANNELS, dc__channels_kernel, 0)     \
  X(DC__KERNEL_DOTS, dc__dots_kernel, 0)             \
  X(DC__KERNEL_TOTALS, dc__totals_kernel, 0)         \
  X(DC__KERNEL_SQUARES, dc__squares_kernel, 0)       \
  X(DC__KERNEL_WEIGH, dc__weigh_kernel, 0)           \
  X(DC__KERNEL_CLIP, dc__clip_kernel, 0)             \
  X(DC__KERNEL_PATCHES, dc__patches_kernel, 0)

#define DC__CUDA_embedding(X)                  \
  X(DC__KERNEL_SHARES, dc__shares_kernel, 0)   \
  X(DC__KERNEL_SCATTER, dc__scatter_kernel, 0) \
  X(DC__KERNEL_ROWS_SQUARED, dc__rows_squared_kernel, 0)

#define DC__CUDA_blocks(X)                               \
  X(DC__KERNEL_BOX, dc__box_kernel, 0)                   \
  X(DC__KERNEL_STACK, dc__stack_kernel, 0)               \
  X(DC__KERNEL_GRAFT_LEARN, dc__graft_learn_kernel, 0)   \
  X(DC__KERNEL_GRAFT_TAKE, dc__graft_take_kernel, 0)     \
  X(DC__KERNEL_GRAFT_FINISH, dc__graft_finish_kernel, 0) \
  X(DC__KERNEL_SORT, dc__sort_kernel, 0)

#define DC__CUDA_curvature(X)                  \
  X(DC__KERNEL_SCAN, dc__scan_kernel, 0)       \
  X(DC__KERNEL_ONES, dc__ones_kernel, 0)       \
  X(DC__KERNEL_PACK, dc__pack_kernel, 0)       \
  X(DC__KERNEL_AVERAGE, dc__average_kernel, 0) \
  X(DC__KERNEL_RECTIFY, dc__rectify_kernel, 0) \
  X(DC__KERNEL_SHIFT, dc__shift_kernel, 0)     \
  X(DC__KERNEL_DIRECT, dc__direct_kernel, 0)

/* The numbers, in the order of the images and of their kernels. */
enum dc__cuda_kernel {
#define X(number, name, shared) number,
#define FAMILY(family) DC__CUDA_##family(X)
  DC__CUDA_FAMILIES(FAMILY)
#undef FAMILY
#undef X
};

#endif
