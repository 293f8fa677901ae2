/* Statuses, their names, and the thread's last error. */
#include <inttypes.h>
#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"

/* The one list of statuses: value, sentence. */
#define STATUS_MAP(X)                                                                     \
  X(DC_OK, "success")                                                                     \
  X(DC_E_INVALID, "an argument's value is not allowed")                                   \
  X(DC_E_NOT_FOUND, "no such graph, parameter or tensor id")                              \
  X(DC_E_EXISTS, "the id is registered already")                                          \
  X(DC_E_STATE, "the object is not in a state in which this call is legal")               \
  X(DC_E_STAGE, "the operator does not exist for the graph's ZeRO stage")                 \
  X(DC_E_DTYPE, "this data type is not supported here, or types disagree")                \
  X(DC_E_SHAPE, "shapes or element counts disagree, or a tensor is not contiguous")       \
  X(DC_E_BUSY, "work is pending that this call would lose")                               \
  X(DC_E_NO_MEMORY, "memory could not be allocated")                                      \
  X(DC_E_NO_DEVICE, "no such device on this machine or in this build")                    \
  X(DC_E_UNSUPPORTED, "legal, but not offered by this build, device or communicator")     \
  X(DC_E_BUFFER_TOO_SMALL, "the output array is too short; the needed length was stored") \
  X(DC_E_NOT_FINITE, "a value is NaN or infinite")                                        \
  X(DC_E_NOT_SYMMETRIC, "a matrix that must be symmetric is not")                         \
  X(DC_E_NOT_POSITIVE, "a matrix that must be positive (semi)definite is not")            \
  X(DC_E_NOT_CONVERGED, "an iteration did not converge")                                  \
  X(DC_E_MISMATCH, "ranks called different collectives, or with different sizes")         \
  X(DC_E_TIMEOUT, "a rank, or a stream, was not done before the deadline")                \
  X(DC_E_PEER_DEAD, "a rank's process ended while others waited for it")                  \
  X(DC_E_ABORTED, "the group was aborted, here or on another rank")                       \
  X(DC_E_CALLBACK, "a function of the caller's table returned an error")                  \
  X(DC_E_SYSTEM, "the operating system refused something")                                \
  X(DC_E_CORRUPT, "what arrived from a rank is not what it sent")                         \
  X(DC_E_DEVICE, "the device failed")                                                     \
  X(DC_E_INTERNAL, "a defect of libdc")

static _Thread_local char last_error[512];

const char *dc_status_name(dc_status status) {
  switch (status) {
#define X(name, text) \
  case name:          \
    return #name;
    STATUS_MAP(X)
#undef X
    default:
      return "DC_E_UNKNOWN";
  }
}

const char *dc_status_string(dc_status status) {
  switch (status) {
#define X(name, text) \
  case name:          \
    return text;
    STATUS_MAP(X)
#undef X
    default:
      return "unknown status";
  }
}

const char *dc_last_error(void) {
  return last_error;
}

dc_status dc_last_error_copy(char *buf, int64_t cap, int64_t *needed) {
  const int64_t length = (int64_t)strlen(last_error) + 1;
  if (buf == NULL && cap >= length) {
    return dc__fail(DC_E_INVALID, "dc_last_error_copy: buf is NULL, but cap = %" PRId64, cap);
  }
  if (needed != NULL) {
    *needed = length;
  }
  if (cap < length) {
    return DC_E_BUFFER_TOO_SMALL; /* without dc__fail(), which would overwrite the requested text */
  }
  memcpy(buf, last_error, (size_t)length);
  return DC_OK;
}

/* The program's locale may have a decimal comma, but programs and logs look for one form of a text. */
static void print_in_c_locale(char *text, size_t cap, const char *format, va_list args) {
  locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0); /* 0: no memory, then the program's stays */
  locale_t own = uselocale(plain);
  vsnprintf(text, cap, format, args);
  uselocale(own);
  if (plain != (locale_t)0) {
    freelocale(plain);
  }
}

void dc__print(char *text, size_t cap, const char *format, ...) {
  va_list args;
  va_start(args, format);
  print_in_c_locale(text, cap, format, args);
  va_end(args);
}

dc_status dc__fail(dc_status status, const char *format, ...) {
  char text[sizeof last_error]; /* the arguments may point into last_error */
  va_list args;
  va_start(args, format);
  print_in_c_locale(text, sizeof text, format, args);
  va_end(args);
  memcpy(last_error, text, sizeof text);
  return status;
}

void dc__failure_keep(dc__failure *failure, dc_status status) {
  if (failure->status == DC_OK) {
    failure->status = status;
    memcpy(failure->text, last_error, sizeof failure->text);
  }
}

dc_status dc__failure_raise(const dc__failure *failure) {
  return failure->status == DC_OK ? DC_OK : dc__fail(failure->status, "%s", failure->text);
}
