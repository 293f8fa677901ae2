/* The kinds of public handles. A destroyed handle, or one of another kind, is reported as an error, unless its memory
 * has been reused. */
#include "base/base.h"

static const char *const handle_names[] = {
    "device", "stream", "event", "buffer", "communicator", "context", "layer", "linear algebra handle", "optimizer"};

_Static_assert(DC__COUNT(handle_names) == DC__HANDLE_END - DC__HANDLE_DEVICE, "each kind has a name");

dc_status dc__handle_refuse(const char *fn, const char *argument, const void *handle, int32_t kind) {
  if (handle == NULL) {
    return dc__fail(DC_E_INVALID, "%s: %s is NULL", fn, argument);
  }
  return dc__fail(DC_E_INVALID, "%s: %s = %p is no %s: it was destroyed, or it is a handle of another kind", fn,
                  argument, handle, handle_names[kind - DC__HANDLE_DEVICE]);
}
