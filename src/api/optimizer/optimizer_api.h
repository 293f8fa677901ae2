/* Shared by the entry points of optimizers. */
#ifndef DC_API_OPTIMIZER_API_H
#define DC_API_OPTIMIZER_API_H

#include "api/api_internal.h"
#include "optim/optim.h"

/* Locks the optimizer, runs `call` and unlocks; the device becomes current once. */
#define DC__WITH_OPTIMIZER(optimizer, call) DC__WITH_OPTIMIZER_OF(__func__, optimizer, call)
#define DC__WITH_OPTIMIZER_OF(fn, optimizer, call)                               \
  do {                                                                           \
    DC__TRY(dc__handle_check(fn, "optimizer", optimizer, DC__HANDLE_OPTIMIZER)); \
    DC__TRY(dc__owner_check(fn, "handle", &(optimizer)->linalg->device->owner)); \
    pthread_mutex_lock(&(optimizer)->linalg->mutex);                             \
    dc__device_begin((optimizer)->linalg->device);                               \
    dc_status dc__optimizer_status = dc__optim_wait_task(optimizer);             \
    if (dc__optimizer_status == DC_OK) {                                         \
      dc__optimizer_status = (call);                                             \
    }                                                                            \
    dc__device_end((optimizer)->linalg->device);                                 \
    pthread_mutex_unlock(&(optimizer)->linalg->mutex);                           \
    return dc__optimizer_status;                                                 \
  } while (0)

/* A number that is above 0: 0 stands for its default, and -1, where it may, for 0. */
typedef struct dc__number_rule {
  double fallback;
  double high; /* INFINITY: any finite number */
  bool closed; /* high itself is allowed */
  bool none;   /* -1 is allowed */
} dc__number_rule;

/* Replaces a field's value by what it stands for. */
dc_status dc__check_number(const char *fn, const char *field, double *value, const dc__number_rule *rule);

/* A whole number; 0 stands for `fallback`. */
dc_status dc__check_count(const char *fn, const char *field, int64_t *value, int64_t fallback, int64_t low,
                          int64_t high);
/* Replaces a number of failures by how many are tolerated: 0 stands for 3, -1 for none. */
dc_status dc__check_failures(const char *fn, int32_t *value);

/* Checks a kind's options and fills in defaults: into memory as large as the kind says. *finite, false before: whether
 * gradients are looked at first. */
typedef dc_status (*dc__read_kind_fn)(const char *fn, const void *options, void *read, bool *finite);

/* Shared by the create and set_group functions of all kinds. */
dc_status dc__make_optimizer(const char *fn, const dc__optim_kind *kind, dc__read_kind_fn read, dc_linalg *linalg,
                             dc_comm *comm, const void *options, dc_optimizer **optimizer);
dc_status dc__set_optimizer_group(const char *fn, const dc__optim_kind *kind, dc__read_kind_fn read,
                                  dc_optimizer *optimizer, int32_t group, const void *options);

#endif
