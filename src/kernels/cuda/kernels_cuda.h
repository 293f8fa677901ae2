/* CUDA's kernels in stream order. Files named *_cuda include this, and few others (scripts/checks/check_arrows.py). The
 * functions of kernels.h have the same names and meanings. */
#ifndef DC_KERNELS_CUDA_KERNELS_CUDA_H
#define DC_KERNELS_CUDA_KERNELS_CUDA_H

#include "device/device.h"
#include "kernels/cuda/attention/attention_args.h"
#include "kernels/cuda/elementwise/elementwise_args.h"
#include "kernels/cuda/gemm/gemm_epilogue_args.h"
#include "kernels/cuda/matrix/inverse_root_newton_args.h"
#include "kernels/cuda/matrix/kron_args.h"
#include "kernels/cuda/matrix/kron_nearest_args.h"
#include "kernels/cuda/matrix/matrix_args.h"
#include "kernels/cuda/matrix/orthogonal_iteration_args.h"
#include "kernels/cuda/matrix/root_warm_start_args.h"
#include "kernels/cuda/optim/blockwise_args.h"
#include "kernels/cuda/optim/kfac_args.h"
#include "kernels/cuda/per_sample/embedding_args.h"
#include "kernels/cuda/per_sample/per_sample_args.h"
#include "kernels/cuda/rowops/column_sums_args.h"
#include "kernels/cuda/rowops/rowops_args.h"
#include "kernels/elementwise/elementwise.h"

enum { DC__CUDA_MAX_GRID_YZ = 65535 }; /* most blocks on a grid's second axis, or its third */

void dc__cuda_cast(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count);
void dc__cuda_accumulate(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                         int64_t count);
void dc__cuda_combine(dc_stream *stream, const dc__combination *c, dc__nonfinite *nonfinite, uint64_t key);
void dc__cuda_reduce(dc_stream *stream, const dc__reduction *r);

/* Blocks of parameters, and Shampoo's and SOAP's work on their elements. */
void dc__cuda_box_copy(dc_stream *stream, const dc__cuda_box_copy_args *args);
void dc__cuda_stack(dc_stream *stream, const dc__cuda_stack_args *args);
void dc__cuda_graft_update(dc_stream *stream, const dc__cuda_graft_args *args);
void dc__cuda_graft_direction(dc_stream *stream, const dc__cuda_graft_args *args);
void dc__cuda_graft_finish(dc_stream *stream, const dc__cuda_graft_args *args);
void dc__cuda_permute(dc_stream *stream, const dc__cuda_permute_args *args);

/* batch * heads * (longest / 64 + 1) must be below 2^31. */
void dc__cuda_attention_forward(dc_stream *stream, const dc__cuda_attention_args *args, int32_t dtype);
void dc__cuda_attention_backward(dc_stream *stream, const dc__cuda_attention_args *args, int32_t dtype);

/* The layer's rows. */
void dc__cuda_residual(dc_stream *stream, const dc__cuda_residual_args *args);
void dc__cuda_layernorm(dc_stream *stream, const dc__cuda_layernorm_args *args);
void dc__cuda_layernorm_backward(dc_stream *stream, const dc__cuda_layernorm_backward_args *args);
void dc__cuda_dropout_rows(dc_stream *stream, const dc__cuda_dropout_args *args);
void dc__cuda_epilogue(dc_stream *stream, const dc__cuda_epilogue_args *args);
/* Returns the bytes of partial sums for layer norm's backward of `normal` columns and sums of at most `widest`. */
int64_t dc__cuda_sum_parts(int64_t rows, int64_t normal, int64_t widest);
/* The most columns of a sum, since blocks of columns are a grid's second axis, and a thread has 8 columns. */
enum { DC__CUDA_MAX_SUM_COLUMNS = DC__CUDA_MAX_GRID_YZ * 8 * DC__CUDA_SUM_THREADS };
void dc__cuda_column_sums(dc_stream *stream, const dc__cuda_sum_args *args);
void dc__cuda_offsets(dc_stream *stream, int32_t *to, const int32_t *offsets, int64_t count);
/* dc__gemm_run() by the device's library. With an epilogue, batch is 1, and the rows of C and of aux have no gaps. The
 * workspace, `bytes` bytes of device memory, is for this product alone. */
enum { DC__CUDA_GEMM_WORKSPACE_BYTES = 32 << 20 }; /* the library's own default on Hopper */
struct dc__gemm;
void dc__cuda_gemm(dc_stream *stream, const struct dc__gemm *gemm, void *workspace, size_t bytes);
/* The same without an epilogue. Also computes the sums of op(A)'s rows, in C's type, if the library supports that, and
 * returns whether it does. */
bool dc__cuda_gemm_sums(dc_stream *stream, const struct dc__gemm *gemm, void *sums, void *workspace, size_t bytes);

/* Slices of at most DC__CUDA_BATCH_SLICE matrices, none of them empty. */
void dc__cuda_measure(dc_stream *stream, const dc__cuda_measure_args *args);
void dc__cuda_load(dc_stream *stream, const dc__cuda_load_args *args);
/* to = factor * from for the matrices with a bit in mask, without symmetrization. */
void dc__cuda_load_uniform(dc_stream *stream, dc__cuda_matrices from, dc__cuda_matrices to, uint32_t mask,
                           double factor);
void dc__cuda_matrix_norm(dc_stream *stream, const dc__cuda_matrix_norm_args *args);
void dc__cuda_affine(dc_stream *stream, const dc__cuda_affine_args *args);
void dc__cuda_newton_distance(dc_stream *stream, const dc__cuda_newton_args *args);
void dc__cuda_newton_check_convergence(dc_stream *stream, const dc__cuda_newton_args *args);
void dc__cuda_scale(dc_stream *stream, const dc__cuda_scale_args *args);
void dc__cuda_warm_start_residual(dc_stream *stream, const dc__cuda_warm_start_args *args);
void dc__cuda_warm_start_root(dc_stream *stream, const dc__cuda_warm_start_args *args);
void dc__cuda_basis_begin(dc_stream *stream, const dc__cuda_basis_args *args); /* the part before QR */
void dc__cuda_basis_store(dc_stream *stream, const dc__cuda_basis_args *args);
void dc__cuda_kron(dc_stream *stream, const dc__cuda_kron_args *args);
void dc__cuda_damp(dc_stream *stream, const dc__cuda_damp_args *args);

/* The nearest Kronecker product of matrices that are not empty: the initial u, a step, and the squares of the residual
 * and of x by rows. */
void dc__cuda_nearest_begin(dc_stream *stream, const dc__cuda_nearest_args *args);
void dc__cuda_nearest_step(dc_stream *stream, const dc__cuda_nearest_args *args);
void dc__cuda_nearest_residual(dc_stream *stream, const dc__cuda_nearest_args *args);

/* Gradients per sample. Without elements there is no launch. */
void dc__cuda_statistics(dc_stream *stream, const dc__cuda_statistics_args *args);
void dc__cuda_columns(dc_stream *stream, const dc__cuda_columns_args *args);
void dc__cuda_dots(dc_stream *stream, const dc__cuda_dots_args *args);
void dc__cuda_totals(dc_stream *stream, const dc__cuda_totals_args *args);
void dc__cuda_squares(dc_stream *stream, const dc__cuda_squares_args *args);
void dc__cuda_weighted_sum(dc_stream *stream, const dc__cuda_weighted_sum_args *args);
void dc__cuda_clip(dc_stream *stream, const dc__cuda_clip_args *args);
void dc__cuda_im2col(dc_stream *stream, const dc__cuda_im2col_args *args);
void dc__cuda_sample_weights(dc_stream *stream, const dc__cuda_sample_weights_args *args);
void dc__cuda_scatter(dc_stream *stream, const dc__cuda_scatter_args *args);
void dc__cuda_rows_squared(dc_stream *stream, const dc__cuda_rows_squared_args *args);

/* K-FAC. */
void dc__cuda_max_abs(dc_stream *stream, const dc__cuda_max_abs_args *args);
void dc__cuda_fill_ones(dc_stream *stream, const dc__cuda_fill_ones_args *args);
void dc__cuda_pack_triangles(dc_stream *stream, const dc__cuda_triangles_args *args);
void dc__cuda_average_triangles(dc_stream *stream, const dc__cuda_triangles_args *args);
void dc__cuda_clamp_min_zero(dc_stream *stream, const dc__cuda_clamp_min_zero_args *args);
void dc__cuda_damp_eigenvalues(dc_stream *stream, const dc__cuda_damp_eigenvalues_args *args);
void dc__cuda_store_direction(dc_stream *stream, const dc__cuda_store_direction_args *args);

#endif
