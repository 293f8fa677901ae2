/* Opens a BLAS and LAPACK at run time. The library stays open: some start threads of their own when they are loaded. */
#define _GNU_SOURCE /* dladdr */
#include "kernels/gemm/blas.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static dc__blas opened;

/* OpenBLAS is built with and without a prefix. */
static void *blas_symbol(void *library, const char *name) {
  char prefixed[64];
  snprintf(prefixed, sizeof prefixed, "scipy_%s", name);
  void *found = dlsym(library, prefixed);
  return found != NULL ? found : dlsym(library, name);
}

static dc_status blas_find(void *library, const char *path, char type, const char *name, void *entry) {
  char full[32];
  snprintf(full, sizeof full, "%c%s_", type, name);
  void *found = blas_symbol(library, full);
  if (found == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "%s has no %s", path, full);
  }
  memcpy(entry, &found, sizeof found); /* ISO C has no cast from an object's address to a function's */
  return DC_OK;
}

static dc_status blas_fill(void *library, const char *path, dc__blas *blas) {
#define FIND(name)                                                       \
  DC__TRY(blas_find(library, path, 's', #name, (void *)&blas->s##name)); \
  DC__TRY(blas_find(library, path, 'd', #name, (void *)&blas->d##name));
  DC__BLAS_EACH(FIND)
#undef FIND
  /* OpenBLAS alone: keeps it from using threads of its own. */
  void *found = blas_symbol(library, "openblas_set_num_threads");
  if (found != NULL) {
    void (*set_threads)(int);
    memcpy(&set_threads, &found, sizeof found);
    set_threads(1);
  }
  snprintf(blas->path, sizeof blas->path, "%s", path);
  return DC_OK;
}

static dc_status blas_load(const char *path, dc__blas *blas) {
  if (strlen(path) >= sizeof blas->path) {
    return dc__fail(DC_E_UNSUPPORTED, "the path of a BLAS has %zu bytes, at most %zu are allowed", strlen(path),
                    sizeof blas->path - 1);
  }
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    const char *why = dlerror();
    return dc__fail(DC_E_UNSUPPORTED, "no BLAS: %s", why != NULL ? why : path);
  }
  dc__blas fresh;
  memset(&fresh, 0, sizeof fresh);
  dc_status status = blas_fill(library, path, &fresh);
  if (status != DC_OK) {
    dlclose(library);
    return status;
  }
  *blas = fresh;
  return DC_OK;
}

/* SITE/libdc/libdc.so has SITE/scipy_openblas32/lib/libscipy_openblas.so beside it. */
static dc_status blas_search(dc__blas *blas) {
  Dl_info info;
  char path[256];
  if (dladdr(&opened, &info) != 0 && info.dli_fname != NULL && strlen(info.dli_fname) < sizeof path - 64) {
    snprintf(path, sizeof path, "%s", info.dli_fname);
    for (int32_t up = 0; up < 2; up++) {
      char *slash = strrchr(path, '/');
      *(slash != NULL ? slash : path) = 0;
    }
    size_t length = strlen(path);
    snprintf(path + length, sizeof path - length, "/scipy_openblas32/lib/libscipy_openblas.so");
    if (blas_load(path, blas) == DC_OK) {
      return DC_OK;
    }
  }
  return blas_load("libopenblas.so.0", blas);
}

dc_status dc__blas_open(const char *path, const dc__blas **blas) {
  *blas = NULL;
  dc_status status = DC_OK;
  pthread_mutex_lock(&mutex);
  if (opened.path[0] == 0) {
    status = path != NULL ? blas_load(path, &opened) : blas_search(&opened);
  } else if (path != NULL && strcmp(path, opened.path) != 0) {
    status = dc__fail(DC_E_STATE, "the BLAS %s is in use, %s cannot be opened as well", opened.path, path);
  }
  pthread_mutex_unlock(&mutex);
  if (status == DC_OK) {
    *blas = &opened;
  }
  return status;
}
