/* Chapter 15: the counting device. */
#include <inttypes.h>

#include "comm/comm.h"

static dc_status count_check_device(const char *fn, const dc_device *device) {
  return dc__device_is_counting(device)
             ? DC_OK
             : dc__fail(DC_E_UNSUPPORTED, "%s: device \"%s\" computes; a device opened as \"count\" counts", fn,
                        device->name);
}

/* Checks that the device is a live counting device, and finds the index of a counter by name. */
static dc_status count_find(const char *fn, const dc_device *device, const char *name, int32_t *which) {
  DC__TRY(dc__handle_check(fn, "device", device, DC__HANDLE_DEVICE));
  DC__TRY(dc__owner_check(fn, "device", &device->owner));
  DC__TRY(count_check_device(fn, device));
  *which = name == NULL ? -1 : dc__count_find(name);
  return *which >= 0 ? DC_OK
                     : dc__fail(DC_E_INVALID, "%s: name = %.64s, must be one that dc_api.h lists", fn,
                                name == NULL ? "NULL" : name);
}

dc_status dc_count_set(dc_device *device, const char *name, int64_t value) {
  DC__WITHOUT_TRAPS;
  int32_t which;
  DC__TRY(count_find(__func__, device, name, &which));
  if (!dc__count_entry_of(which)->is_set) {
    return dc__fail(DC_E_INVALID, "%s: name = %s is counted and cannot be set", __func__, name);
  }
  if (value < 0) {
    return dc__fail(DC_E_INVALID, "%s: value = %" PRId64 ", must be >= 0", __func__, value);
  }
  dc__count_set(device, which, value);
  return DC_OK;
}

dc_status dc_count_get(dc_device *device, const char *name, int64_t *value) {
  DC__WITHOUT_TRAPS;
  int32_t which;
  DC__TRY(count_find(__func__, device, name, &which));
  if (value == NULL) {
    return dc__fail(DC_E_INVALID, "%s: value is NULL", __func__);
  }
  *value = dc__count_get(device, which);
  return DC_OK;
}

dc_status dc_count_work(dc_stream *stream, int64_t duration_ns) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__handle_check(__func__, "stream", stream, DC__HANDLE_STREAM));
  DC__TRY(dc__owner_check(__func__, "stream", &stream->device->owner));
  DC__TRY(count_check_device(__func__, stream->device));
  if (duration_ns < 0) {
    return dc__fail(DC_E_INVALID, "%s: duration_ns = %" PRId64 ", must be >= 0", __func__, duration_ns);
  }
  dc__count_work(stream, duration_ns);
  return DC_OK;
}

dc_status dc_comm_create_count(dc_device *device, int32_t rank, int32_t world_size, int32_t heap, dc_comm **comm) {
  DC__WITHOUT_TRAPS;
  if (comm == NULL) {
    return dc__fail(DC_E_INVALID, "%s: comm is NULL", __func__);
  }
  *comm = NULL;
  DC__TRY(dc__handle_check(__func__, "device", device, DC__HANDLE_DEVICE));
  DC__TRY(dc__owner_check(__func__, "device", &device->owner));
  DC__TRY(count_check_device(__func__, device));
  if (world_size < 1 || world_size > DC__COMM_MAX_WORLD) {
    return dc__fail(DC_E_INVALID, "%s: world_size = %" PRId32 ", must be 1 to %d", __func__, world_size,
                    (int)DC__COMM_MAX_WORLD);
  }
  if (rank < 0 || rank >= world_size) {
    return dc__fail(DC_E_INVALID, "%s: rank = %" PRId32 ", must be 0 to %" PRId32, __func__, rank, world_size - 1);
  }
  if (heap != 0 && heap != 1) {
    return dc__fail(DC_E_INVALID, "%s: heap = %" PRId32 ", must be 0 or 1", __func__, heap);
  }
  return dc__comm_create_count(device, rank, world_size, heap == 1, comm);
}
