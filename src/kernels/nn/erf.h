/* Eigen's rational approximation of erf, within 2 ulp: x P(x^2) / Q(x^2) up to DC__ERF_END, and 1 beyond it. The CPU's
 * kernels and a device's have the same coefficients, but multiply and add in different ways. */
#ifndef DC_KERNELS_ERF_H
#define DC_KERNELS_ERF_H

#define DC__ERF_END 3.8325069f

/* p = P(s) */
#define DC__ERF_P(p, s, MULTIPLY_ADD)               \
  (p) = -2.72614225801306e-10f;                     \
  (p) = MULTIPLY_ADD(p, s, 2.77068142495902e-08f);  \
  (p) = MULTIPLY_ADD(p, s, -2.10102402082508e-06f); \
  (p) = MULTIPLY_ADD(p, s, -5.69250639462346e-05f); \
  (p) = MULTIPLY_ADD(p, s, -7.34990630326855e-04f); \
  (p) = MULTIPLY_ADD(p, s, -2.95459980854025e-03f); \
  (p) = MULTIPLY_ADD(p, s, -1.60960333262415e-02f)

/* q = Q(s) */
#define DC__ERF_Q(q, s, MULTIPLY_ADD)               \
  (q) = -1.45660718464996e-05f;                     \
  (q) = MULTIPLY_ADD(q, s, -2.13374055278905e-04f); \
  (q) = MULTIPLY_ADD(q, s, -1.68282697438203e-03f); \
  (q) = MULTIPLY_ADD(q, s, -7.37332916720468e-03f); \
  (q) = MULTIPLY_ADD(q, s, -1.42647390514189e-02f)

#endif
