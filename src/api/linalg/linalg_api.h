/* Shared by the entry points of second-order operators. */
#ifndef DC_API_LINALG_API_H
#define DC_API_LINALG_API_H

#include "linalg/linalg.h"

/* Locks the handle, runs `call` and unlocks, if `ready` is DC_OK; the device becomes current once. */
#define DC__WITH_READY_LINALG(linalg, ready, call)                            \
  do {                                                                        \
    DC__TRY(dc__handle_check(__func__, "linalg", linalg, DC__HANDLE_LINALG)); \
    DC__TRY(dc__owner_check(__func__, "handle", &(linalg)->device->owner));   \
    DC__TRY(ready);                                                           \
    pthread_mutex_lock(&(linalg)->mutex);                                     \
    dc__device_begin((linalg)->device);                                       \
    dc_status dc__linalg_status = (call);                                     \
    dc__device_end((linalg)->device);                                         \
    pthread_mutex_unlock(&(linalg)->mutex);                                   \
    return dc__linalg_status;                                                 \
  } while (0)

/* The same for what is computed, by the host or by a device that can. */
#define DC__WITH_LINALG(linalg, call) DC__WITH_READY_LINALG(linalg, dc__linalg_check_gemm(linalg, __func__), call)

/* DC_E_SHAPE unless the length is what it must be. */
dc_status dc__check_length(const char *fn, const char *arg, const char *what, int64_t length, int64_t wanted);
/* DC_E_SHAPE unless the matrix is as large, and in as large a batch, as wanted. batch -1: none at all. */
dc_status dc__check_matrix(const char *fn, const char *arg, const dc__mat *mat, int64_t batch, int64_t rows,
                           int64_t cols);
/* dc__mat_read(), which also refuses what the handle's device cannot read. */
dc_status dc__read_matrix(const dc_linalg *l, const char *fn, const char *arg, const dc_tensor *tensor, int32_t layout,
                          dc__mat *mat);
/* dc__mat_read_as() for the data alone, with the same refusal. */
dc_status dc__read_vector(const dc_linalg *l, const char *fn, const char *arg, const dc_tensor *tensor, int32_t dtype,
                          const int64_t *shape, int32_t ndim, void **data);
/* Reads a contiguous output of two or three dimensions. */
dc_status dc__read_output(const dc_linalg *l, const char *fn, const char *arg, const dc_tensor *tensor, int32_t dtype,
                          const dc__mat *like, dc__mat *out);

#endif
