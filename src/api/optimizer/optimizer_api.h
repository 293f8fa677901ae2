/* Shared by the public functions of optimizers. */
#ifndef DC_API_OPTIMIZER_API_H
#define DC_API_OPTIMIZER_API_H

#include "api/api_internal.h"
#include "optim/optim.h"

/* Locks the optimizer, makes its device current and waits for its last step, until dc__optimizer_leave(), which returns
 * `status`. If entering fails, there is nothing to leave. */
dc_status dc__optimizer_enter(dc_optimizer *optimizer, const char *fn);
dc_status dc__optimizer_leave(dc_optimizer *optimizer, dc_status status);

/* A number above 0. In options, 0 stands for its default, and -1, if allowed, for 0. */
typedef struct dc__number_rule {
  double fallback;
  double high; /* INFINITY: any finite number */
  bool closed; /* high itself is allowed */
  bool none;   /* -1 is allowed */
} dc__number_rule;

/* Replaces a field's value by what it stands for. */
dc_status dc__check_number(const char *fn, const char *field, double *value, const dc__number_rule *rule);

/* The same for an integer from `low` to `high`; 0 stands for `fallback`. */
dc_status dc__check_count(const char *fn, const char *field, int64_t *value, int64_t fallback, int64_t low,
                          int64_t high);
/* Replaces a number of failures by how many are tolerated: 0 stands for 3, -1 for none. */
dc_status dc__check_failures(const char *fn, int32_t *value);

/* Checks a kind's options and writes them, with defaults filled in, to `read`, of the kind's options_size. Sets
 * *finite, false before, if gradients must be finite. */
typedef dc_status (*dc__read_kind_fn)(const char *fn, const void *options, void *read, bool *finite);

/* Shared by the create and set_group functions of all kinds. */
dc_status dc__make_optimizer(const char *fn, const dc__optim_kind *kind, dc__read_kind_fn read, dc_linalg *linalg,
                             dc_comm *comm, const void *options, dc_optimizer **optimizer);
dc_status dc__set_optimizer_group(const char *fn, const dc__optim_kind *kind, dc__read_kind_fn read,
                                  dc_optimizer *optimizer, int32_t group, const void *options);

#endif
