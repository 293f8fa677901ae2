/* Chapter 12: a transformer layer's handle, its structs' defaults and the shapes of its weights. */
#include "api/api_internal.h"
#include "transformer/transformer.h"

void dc_layer_config_init(dc_layer_config *config, size_t struct_size) {
  dc__init_sized(config, struct_size, sizeof *config);
}
void dc_layer_call_init(dc_layer_call *call, size_t struct_size) {
  dc__init_sized(call, struct_size, sizeof *call);
}
void dc_layer_cost_init(dc_layer_cost *cost, size_t struct_size) {
  dc__init_sized(cost, struct_size, sizeof *cost);
}

/* ---- life ---- */

dc_status dc_layer_create(dc_device *device, const dc_layer_config *config, dc_layer **layer) {
  DC__WITHOUT_TRAPS;
  if (layer == NULL) {
    return dc__fail(DC_E_INVALID, "%s: layer is NULL", __func__);
  }
  *layer = NULL;
  DC__TRY(dc__handle_check(__func__, "device", device, DC__HANDLE_DEVICE));
  DC__TRY(dc__owner_check(__func__, "device", &device->owner));
  if (config == NULL) {
    return dc__fail(DC_E_INVALID, "%s: config is NULL", __func__);
  }
  dc_layer_config c = DC_LAYER_CONFIG_INIT;
  DC__TRY(dc__read_layer_config(__func__, config, &c));
  if (device->memory_space != 0) {
    DC__TRY(dc__layer_check_cuda(__func__, device, &c));
  }
  return dc__layer_create(__func__, device, &c, layer);
}

void dc_layer_destroy(dc_layer *layer) {
  DC__WITHOUT_TRAPS;
  if (dc__handle_is(layer, DC__HANDLE_LAYER) && !dc__owner_is_forked(&layer->device->owner)) {
    dc__handle_clear(&layer->handle);
    dc__layer_release(layer);
  }
}

dc_status dc_layer_get_weight_shape(const dc_layer *layer, int32_t index, int64_t *shape, int32_t *ndim) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__handle_check(__func__, "layer", layer, DC__HANDLE_LAYER));
  DC__TRY(dc__owner_check(__func__, "layer", &layer->device->owner));
  DC__TRY(dc__check_range(__func__, "index", index, 0, DC_LAYER_WEIGHTS - 1));
  if (shape == NULL || ndim == NULL) {
    return dc__fail(DC_E_INVALID, "%s: %s is NULL", __func__, shape == NULL ? "shape" : "ndim");
  }
  dc__layer_weight_numel(layer, index, &shape[0], &shape[1]);
  *ndim = shape[1] > 0 ? 2 : 1;
  shape[1] = shape[1] > 0 ? shape[1] : 1;
  return DC_OK;
}
