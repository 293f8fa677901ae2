/* The two sums of outer products of a layer: of its inputs, and of its outputs' gradients. Products are summed in
 * float32, whatever the vectors' type: in 16 bits the small eigenvalues would be noise. */
#include <float.h>
#include <inttypes.h>
#include <math.h>

#include "optim/kfac/kfac.h"

static dc_status factor_check_length(const dc__per_sample *s, const char *arg, const char *what, int64_t length,
                                     int64_t wanted) {
  return length == wanted ? DC_OK
                          : dc__fail(DC_E_SHAPE, "%s: %s has %" PRId64 " %s, the layer has %" PRId64, s->fn, arg,
                                     length, what, wanted);
}

static dc_status factor_check_layer(const dc__kfac_layer *layer, const dc__per_sample *s) {
  bool conv = s->layer.kind == DC_SAMPLE_CONV;
  if (conv && s->spatial != layer->ndim - 2) {
    return factor_check_length(s, "x", "spatial dimensions", s->spatial, layer->ndim - 2);
  }
  DC__TRY(factor_check_length(s, "x", conv ? "channels" : "features", s->in, layer->shape[1] * layer->groups));
  return factor_check_length(s, "delta", conv ? "channels" : "features", s->out, layer->shape[0]);
}

/* Checks a bound on sums of products, which must fit float32. */
static dc_status check_bound(const dc__per_sample *s, const char *arg, double bound) {
  return bound <= (double)FLT_MAX
             ? DC_OK
             : dc__fail(DC_E_NOT_FINITE, "%s: products of %s may be as large as %g, which no float32 holds", s->fn, arg,
                        bound);
}

dc_status dc__kfac_not_finite(const dc__per_sample *s, int32_t which, int64_t at) {
  return dc__fail(DC_E_NOT_FINITE, "%s: %s has a NaN or an infinity at element %" PRId64, s->fn,
                  which == DC__FACTOR_A ? "x" : "delta", at);
}

int64_t dc__kfac_first_nonfinite(const void *data, int32_t dtype, int64_t count) {
  float x = 0;
  int64_t i = 0;
  while (i < count && isfinite(x)) {
    dc__cast(&x, DC_FLOAT32, dc__element_ptr(data, dtype, i++), dtype, 1);
  }
  return isfinite(x) ? count : i - 1;
}

int64_t dc__kfac_elements(const dc__per_sample *s, int32_t which) {
  if (which == DC__FACTOR_G) {
    return s->samples * s->out * s->positions;
  }
  return s->samples * s->in * (s->layer.kind == DC_SAMPLE_CONV ? s->size[0] * s->size[1] * s->size[2] : s->positions);
}

dc_status dc__kfac_accumulate(dc_linalg *l, dc__kfac_layer *layer, const dc__per_sample *s, double scale, bool wanted) {
  const dc__kfac_work *work = dc__kfac_work_of(l);
  dc__factor *a = &layer->factors[DC__FACTOR_A];
  dc__factor *g = &layer->factors[DC__FACTOR_G];
  bool reduce = layer->approximation == DC_KFAC_REDUCE;
  int64_t rows = s->samples * (reduce ? 1 : s->positions);
  double largest[DC__FACTORS];
  DC__TRY(factor_check_layer(layer, s));
  DC__TRY(work->scan(l, s, largest));
  largest[DC__FACTOR_G] *= fabs(scale) * (reduce ? (double)s->positions : 1);
  double bound_a = a->bound + largest[DC__FACTOR_A] * largest[DC__FACTOR_A] * (double)rows;
  double bound_g = g->bound + largest[DC__FACTOR_G] * largest[DC__FACTOR_G] * (double)rows;
  DC__TRY(check_bound(s, "x", bound_a));
  DC__TRY(check_bound(s, "delta", bound_g));
  if (!wanted || s->samples == 0 || s->positions == 0) {
    return DC_OK;
  }
  DC__TRY(work->accumulate(l, layer, s, scale));
  a->count += rows;
  a->bound = bound_a;
  g->count += s->samples;
  g->bound = bound_g;
  return DC_OK;
}
