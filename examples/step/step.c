/* Three steps of AdamW on four weights. The programs beside this one do the same in other languages, and print the same
 * bits.
 *
 *     cc step.c $(pkg-config --cflags --libs dc) && ./a.out
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dc_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WEIGHTS = 4, STEPS = 3 };

static void check(dc_status status) {
  if (status != DC_OK) {
    fprintf(stderr, "%s: %s\n", dc_status_name(status), dc_last_error());
    exit(1);
  }
}

int main(void) {
  dc_device *device;
  dc_linalg *linalg;
  dc_optimizer *adamw;
  dc_adamw_options options;
  dc_adamw_options_init(&options, sizeof options);
  options.weight_decay = 0.1;
  check(dc_device_open("cpu", NULL, &device));
  check(dc_linalg_create(device, NULL, &linalg));
  check(dc_adamw_create(linalg, &options, &adamw));
  check(dc_optimizer_set_lr(adamw, 0, 0.01));

  float weights[WEIGHTS] = {1, -2, 3, 0.5f}, grads[WEIGHTS] = {0.5f, 0.25f, -1, 0};
  const int64_t shape = WEIGHTS;
  int64_t index;
  check(dc_optimizer_add_param(adamw, 0, &shape, 1, 0, WEIGHTS, DC_FLOAT32, &index));
  dc_tensor w = DC_TENSOR_INIT, g = DC_TENSOR_INIT;
  w.data = weights, w.shape = &shape, w.ndim = 1, w.dtype = DC_FLOAT32;
  g.data = grads, g.shape = &shape, g.ndim = 1, g.dtype = DC_FLOAT32;
  for (int step = 0; step < STEPS; step++)
    check(dc_optimizer_step(adamw, &w, &g, sizeof(dc_tensor), 1, 1.0));

  for (int i = 0; i < WEIGHTS; i++) {
    uint32_t bits;
    memcpy(&bits, &weights[i], sizeof bits);
    printf("%08x %.6f\n", (unsigned)bits, (double)weights[i]);
  }
  dc_optimizer_destroy(adamw);
  dc_linalg_destroy(linalg);
  dc_device_destroy(device);
  return 0;
}
