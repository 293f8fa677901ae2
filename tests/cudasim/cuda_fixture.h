/* A device and a stream for the tests of a program, on the simulated driver or on a card. */
#ifndef TESTS_CUDA_FIXTURE_H
#define TESTS_CUDA_FIXTURE_H

#include "harness.h"

#ifndef ON_CARD
#include "cudasim.h"
#endif

static dc_device *device;
static dc_stream *stream;

static inline int open_stream(void **state) {
  (void)state;
  if (dc_device_open("cuda", NULL, &device) != DC_OK || dc_stream_create(device, &stream) != DC_OK) {
    fail_msg("%s", dc_last_error());
  }
  return 0;
}

static inline int close_stream(void **state) {
  (void)state;
  dc_stream_destroy(stream);
  dc_device_destroy(device);
#ifndef ON_CARD
  assert_int_equal(cudasim_live(), 0);
#endif
  return 0;
}

#endif
