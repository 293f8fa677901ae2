/* The operators: their schemas, and what a kernel gets. */
#ifndef DCT_OPERATORS_H
#define DCT_OPERATORS_H

#include "shim.h"

typedef struct dct_op {
  const char *ns;        /* "dc", the seed's operators, or "dc_rt", libdc's own */
  const char *name;      /* "allgather_param" */
  const char *schema;    /* arguments and results, without the name */
  bool any_device;       /* may be called without a tensor: then no argument tells the device */
  dct_kernel real, meta; /* meta NULL: the fake is in Python (registrations.py), where it may change the device */
} dct_op;

extern const dct_op dct_ops[];
extern const size_t dct_op_count;

#endif
