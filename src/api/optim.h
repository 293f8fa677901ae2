/* What the entry points of optimizers share. */
#ifndef DC_API_OPTIM_H
#define DC_API_OPTIM_H

#include "api/api.h"
#include "optim/optim.h"

/* Locks the optimizer, runs `call` and unlocks. */
#define DC__WITH_OPTIMIZER(optimizer, call)                                            \
  do {                                                                                 \
    if ((optimizer) == NULL) {                                                         \
      return dc__fail(DC_E_INVALID, "%s: optimizer is NULL", __func__);                \
    }                                                                                  \
    DC__TRY(dc__owner_check(__func__, "handle", &(optimizer)->linalg->device->owner)); \
    pthread_mutex_lock(&(optimizer)->linalg->mutex);                                   \
    dc_status dc__optimizer_status = (call);                                           \
    pthread_mutex_unlock(&(optimizer)->linalg->mutex);                                 \
    return dc__optimizer_status;                                                       \
  } while (0)

/* What a create function does first. */
#define DC__NEW_OPTIMIZER(optimizer)                                    \
  do {                                                                  \
    if ((optimizer) == NULL) {                                          \
      return dc__fail(DC_E_INVALID, "%s: optimizer is NULL", __func__); \
    }                                                                   \
    *(optimizer) = NULL;                                                \
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

/* Makes an optimizer from options that were read: checks the handles. options: as dc__optim_create() wants them. */
dc_status dc__make_optimizer(const char *fn, const dc__optim_kind *kind, dc_linalg *linalg, dc_comm *comm,
                             const void *options, bool check_finite, dc_optimizer **optimizer);
/* Sets a group's options that were read. The optimizer is locked. */
dc_status dc__set_optimizer_group(dc_optimizer *o, const char *fn, const dc__optim_kind *kind, int32_t group,
                                  const void *options, bool check_finite);

#endif
