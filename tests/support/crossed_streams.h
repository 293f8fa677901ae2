/* Two calls of one communicator that a rank executes in another order than it made them. */
#ifndef DC_TESTS_CROSSED_STREAMS_H
#define DC_TESTS_CROSSED_STREAMS_H

#include "comm_ranks.h"

static inline void wait_for_flag(void *args) {
  atomic_int *flag;
  memcpy(&flag, args, sizeof flag);
  while (atomic_load(flag) == 0) {
    sleep_ms(1);
  }
}

/* Rank 1's stream is busy, so it executes the call without a stream first. */
static inline int cross_streams(dc_comm *comm, void *arg) {
  (void)arg;
  dc_device *device;
  dc_stream *stream;
  atomic_int flag = comm->rank != 1, *at = &flag;
  int64_t count = 12;
  float data[2][12] = {{0}};
  dc_tensor tensors[2];
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  CHECK_OK(dc_stream_create(device, &stream));
  dc__stream_call(stream, wait_for_flag, &at, sizeof at);
  for (int i = 0; i < 2; i++) {
    tensors[i] = flat(data[i], &count, DC_FLOAT32);
  }
  CHECK_OK(dc_comm_all_reduce(comm, &tensors[0], DC_SUM, stream));
  if (comm->rank != 1) {
    CHECK_OK(dc_stream_synchronize(stream, 0));
  }
  CHECK(dc_comm_all_reduce(comm, &tensors[1], DC_SUM, NULL) == DC_E_MISMATCH);
  CHECK_SAYS("all_reduce (12 elements, float32, sum): rank 1 runs a later call of this communicator than rank ");
  atomic_store(&flag, 1);
  CHECK_OK(dc_stream_synchronize(stream, 0));
  dc_stream_destroy(stream);
  dc_device_destroy(device);
  return 0;
}

#endif
