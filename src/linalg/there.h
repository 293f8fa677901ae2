/* The operators on a device whose memory the host cannot touch, inside the room. Work is queued on the device's own
 * stream by the calling thread; what the host wants to know comes back in one copy of a few hundred bytes a matrix. */
#ifndef DC_LINALG_THERE_H
#define DC_LINALG_THERE_H

#include "linalg/linalg.h"

enum { DC__FLIGHT_BYTES = 256 << 20 }; /* beyond that one matrix or sample more hides no launch */

/* A few matrices of a batch that go through an operator together, in memory of the device. */
typedef struct dc__flight {
  dc_linalg *l;
  dc_stream *stream;
  void *product; /* what products may use */
  dc__cuda_report *reports;
  dc__cuda_report seen[DC__CUDA_FLIGHT]; /* reports, as they came last */
  double *sums;                          /* [count, rows] */
  char *squares;                         /* the operator's own, 256-byte aligned */
  int64_t first;                         /* matrix of the batch */
  int32_t count, most;                   /* matrices now; in any flight of the batch */
} dc__flight;

/* Takes scratch for flights through a batch: `bytes` of squares and `rows` sums a matrix, and `more` behind all of the
 * squares. most 0: nothing to compute. */
dc_status dc__flight_open(dc__flight *f, dc_linalg *l, const char *fn, int64_t batch, int64_t rows, size_t bytes,
                          size_t more);
/* `count` matrices of the flight, from its matrix `begin` on, as a flight. */
dc__flight dc__flight_some(const dc__flight *f, int32_t begin, int32_t count);
/* On to the matrices from `first`; false: there are none. Reports become zeros. */
bool dc__flight_next(dc__flight *f, int64_t first, int64_t batch);
/* Waits, and brings the reports here. */
void dc__flight_look(dc__flight *f);
void dc__flight_forget(dc__flight *f); /* reports become zeros */

/* One matrix as kernels take it; the flight's alone, and dense ones of the flight's own. */
dc__cuda_matrices dc__matrices_of(const dc__mat *mat);
dc__cuda_matrices dc__flight_part(const dc__flight *f, const dc__mat *mat);
dc__cuda_matrices dc__flight_dense(const dc__flight *f, void *data, int32_t dtype, int64_t rows, int64_t cols);

/* reports: the largest entry of each matrix and, where `mirrored`, how far it is from symmetric. */
void dc__flight_measure(dc__flight *f, const dc__cuda_matrices *from, bool mirrored);
/* reports: the largest sum of a row, or the sum of squares. */
void dc__flight_fold(dc__flight *f, const dc__cuda_matrices *from, bool squares);
/* Matrix i of the flight into memory here, dense, which is the caller's to free, by way of as much of the device's at
 * `through`; false: there is no memory. */
bool dc__flight_bring(dc__flight *f, const dc__mat *mat, int32_t i, void *through, dc__mat *here);
/* The bits of a magnitude, as a number. */
double dc__flight_number(uint64_t bits);

#endif
