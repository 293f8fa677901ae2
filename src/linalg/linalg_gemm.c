/* Matrix products on the handle's device, through its table of operations. This file has the CPU's table. */
#include "linalg/linalg.h"

static dc_status check_cpu(dc_linalg *l, const char *fn) {
  (void)l;
  (void)fn;
  return DC_OK;
}

static dc_status synchronize_cpu(dc_linalg *l) {
  (void)l;
  return DC_OK;
}

static void gemm_cpu(dc_linalg *l, const dc__gemm *g, void *workspace) {
  (void)workspace;
  dc__gemm_run(l->pool, g);
}

const dc__linalg_work dc__linalg_work_cpu = {
    .memory_kind = DC_MEMORY_HOST,
    .check_gemm = check_cpu,
    .gemm = gemm_cpu,
    .synchronize = synchronize_cpu,
};

dc_status dc__linalg_check_gemm(dc_linalg *l, const char *fn) {
  return dc__linalg_work_of(l)->check_gemm(l, fn);
}

dc_status dc__linalg_synchronize(dc_linalg *l) {
  return dc__linalg_work_of(l)->synchronize(l);
}

dc_status dc__linalg_copy_to_host(dc_linalg *l, void *to, const void *from, size_t bytes) {
  DC__TRY(dc__device_check(l->device)); /* do not wait for a device that failed */
  dc__stream_copy(l->device->internal_stream, to, from, bytes);
  return dc__linalg_synchronize(l);
}

void *dc__linalg_suballoc_aligned(void *memory, size_t *offset, int64_t bytes) {
  const uintptr_t part = (uintptr_t)dc__linalg_suballoc(memory, offset, bytes + DC__DEVICE_ALIGNMENT, 1);
  return (void *)((part + DC__DEVICE_ALIGNMENT - 1) / DC__DEVICE_ALIGNMENT * DC__DEVICE_ALIGNMENT);
}

bool dc__linalg_add_gemm_workspace(size_t *total, const dc_linalg *l) {
  const int64_t bytes = dc__linalg_work_of(l)->gemm_workspace_bytes;
  return bytes == 0 || dc__linalg_add_bytes(total, bytes + DC__DEVICE_ALIGNMENT, 1);
}

void *dc__linalg_gemm_workspace(const dc_linalg *l, void *memory, size_t *offset) {
  const int64_t bytes = dc__linalg_work_of(l)->gemm_workspace_bytes;
  return bytes > 0 ? dc__linalg_suballoc_aligned(memory, offset, bytes) : NULL;
}

void dc__linalg_gemm(dc_linalg *l, const dc__gemm *gemm, void *workspace) {
  if (gemm->batch > 0 && gemm->m > 0 && gemm->n > 0) {
    dc__linalg_work_of(l)->gemm(l, gemm, workspace);
  }
}

dc_status dc__linalg_check_alignment(const dc_linalg *l, const char *fn, const char *arg, const void *data,
                                     int32_t dtype) {
  return dc__device_check_alignment(fn, arg, l->device, data, 1, dc_dtype_size(dtype)); /* empty tensors too */
}

dc_status dc__batch_matmul(dc_linalg *l, const char *fn, const dc__mat *a, const dc__mat *b, double alpha, double beta,
                           const dc__mat *out) {
  const dc__gemm g = dc__mat_gemm(a, b, alpha, beta, out);
  size_t bytes = 0;
  size_t offset = 0;
  void *memory = NULL;
  if (dc__linalg_work_of(l)->gemm_workspace_bytes > 0) {
    (void)dc__linalg_add_gemm_workspace(&bytes, l);
    DC__TRY(dc__linalg_scratch(l, fn, bytes, &memory));
  }
  if (l->query) {
    return DC_OK;
  }
  dc__linalg_gemm(l, &g, dc__linalg_gemm_workspace(l, memory, &offset));
  return dc__linalg_synchronize(l);
}
