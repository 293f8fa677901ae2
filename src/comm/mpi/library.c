/* Finds MPI, detects its ABI, and checks that it fits the launcher. */
#define _GNU_SOURCE /* RTLD_NOLOAD, RTLD_DEFAULT, secure_getenv */
#include "comm/mpi/library.h"

#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "device/device.h"

static const char *const abi_names[] = {"the standard", "MPICH", "Open MPI"};

/* ---- the launcher ---- */

static bool is_set(const char *value) {
  return value != NULL && value[0] != '\0';
}

static bool is_open_mpi_launched(void) {
  return is_set(secure_getenv("OMPI_COMM_WORLD_SIZE"));
}

/* MPICH's launchers offer only PMI; Slurm and PRRTE may offer it beside PMIx. */
static bool is_mpich_launched(void) {
  return is_set(secure_getenv("PMI_RANK")) && !is_set(secure_getenv("PMIX_RANK")) && !is_open_mpi_launched();
}

/* Without PMI or PMIx, Open MPI would abort the process inside MPI_Init, and MPICH would run it as a single rank. */
static bool is_slurm_without_mpi(void) {
  return is_set(secure_getenv("SLURM_PROCID")) && !is_set(secure_getenv("PMI_RANK")) &&
         !is_set(secure_getenv("PMIX_RANK")) && !is_set(secure_getenv("PMI_FD")) && !is_open_mpi_launched();
}

static bool is_launched(void) {
  return is_open_mpi_launched() || is_set(secure_getenv("PMI_RANK")) || is_set(secure_getenv("PMIX_RANK")) ||
         is_set(secure_getenv("PMI_FD")) || is_set(secure_getenv("SLURM_PROCID")) ||
         is_set(secure_getenv("PALS_RANKID")) || is_set(secure_getenv("FLUX_TASK_RANK"));
}

dc_status dc__mpi_check_launcher(const dc__mpi_library *library, int32_t *size) {
  *size = dc__launch_mpi_size();
  if (!is_launched()) {
    return dc__fail(DC_E_UNSUPPORTED,
                    "dc_comm_create_mpi: no launcher of MPI started this process (there is neither "
                    "OMPI_COMM_WORLD_SIZE nor PMI_RANK, PMIX_RANK or SLURM_PROCID): start it with mpirun -n RANKS");
  }
  if (is_slurm_without_mpi()) {
    return dc__fail(DC_E_UNSUPPORTED,
                    "dc_comm_create_mpi: Slurm started this process without MPI (there is neither PMI_RANK nor "
                    "PMIX_RANK): start it with srun --mpi=%s, or inside the job with mpirun",
                    library->abi == DC__MPI_OPEN_MPI ? "pmix" : "pmi2");
  }
  if (is_open_mpi_launched() && library->abi == DC__MPI_MPICH) {
    return dc__fail(DC_E_UNSUPPORTED,
                    "dc_comm_create_mpi: Open MPI's mpirun started this process, but its MPI is %s: start it with "
                    "MPICH's (mpirun.mpich, mpiexec.hydra), or name Open MPI's library in LIBDC_MPI_LIB",
                    library->version);
  }
  if (is_mpich_launched() && library->abi == DC__MPI_OPEN_MPI) {
    return dc__fail(DC_E_UNSUPPORTED,
                    "dc_comm_create_mpi: a launcher of MPICH or Intel MPI (PMI_RANK) started this process, but its MPI "
                    "is %s: start it with Open MPI's mpirun, or name MPICH's library in LIBDC_MPI_LIB",
                    library->version);
  }
  return DC_OK;
}

/* ---- the library ---- */

static void *open_any(const char *const *names, size_t count, int flags, const char **found) {
  for (size_t i = 0; i < count; i++) {
    void *module = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | flags);
    if (module != NULL) {
      *found = names[i];
      return module;
    }
  }
  return NULL;
}

/* In order of preference: the library that the user names, one that the process has, one that fits the launcher. */
static void *open_module(const char **name) {
  static const char *const open_mpi_first[] = {"libmpi.so.40", "libmpi_abi.so.1", "libmpi.so.12", "libmpich.so.12"};
  static const char *const mpich_first[] = {"libmpi_abi.so.1", "libmpi.so.12", "libmpich.so.12", "libmpi.so.40"};
  const char *const *names = is_mpich_launched() || !is_open_mpi_launched() ? mpich_first : open_mpi_first;
  const char *chosen = secure_getenv("LIBDC_MPI_LIB");
  if (is_set(chosen)) {
    return open_any(&chosen, 1, 0, name);
  }
  *name = "the program's own";
  if (dlsym(RTLD_DEFAULT, "MPI_Init_thread") != NULL) {
    return dlopen(NULL, RTLD_NOW);
  }
  void *module = open_any(names, DC__COUNT(open_mpi_first), RTLD_NOLOAD, name);
  return module != NULL ? module : open_any(names, DC__COUNT(open_mpi_first), 0, name);
}

static enum dc__mpi_abi abi_of(void *module) {
  int (*abi_version)(int *, int *);
  int major = -1, minor = -1;
  *(void **)&abi_version = dlsym(module, "MPI_Abi_get_version");
  if (abi_version != NULL && abi_version(&major, &minor) == 0 && major > 0) {
    return DC__MPI_STANDARD;
  }
  return dlsym(module, "ompi_mpi_comm_self") != NULL ? DC__MPI_OPEN_MPI : DC__MPI_MPICH;
}

/* Sets the constants of the three mpi.h. Open MPI's handles are addresses of its variables. */
static void set_constants(dc__mpi_library *mpi) {
  mpi->thread_multiple = 3;
  mpi->in_place = (void *)(uintptr_t)1;
  if (mpi->abi == DC__MPI_STANDARD) {
    mpi->thread_multiple = 4096;
    mpi->world.pointer = (void *)(uintptr_t)0x101;
    mpi->byte.pointer = (void *)(uintptr_t)0x247;
    mpi->errors_return.pointer = (void *)(uintptr_t)0x143;
  } else if (mpi->abi == DC__MPI_OPEN_MPI) {
    mpi->world.pointer = dlsym(mpi->module, "ompi_mpi_comm_world");
    mpi->byte.pointer = dlsym(mpi->module, "ompi_mpi_byte");
    mpi->errors_return.pointer = dlsym(mpi->module, "ompi_mpi_errors_return");
  } else {
    mpi->in_place = (void *)(intptr_t)-1;
    mpi->status_ignore = (void *)(uintptr_t)1;
    mpi->world.number = 0x44000000;
    mpi->byte.number = 0x4c00010d;
    mpi->errors_return.number = 0x54000001;
  }
}

/* "MPICH Version:      4.0.2\n…" and "Open MPI v4.1.4, package: …" end at the first line, or comma. */
static void describe_library(dc__mpi_library *mpi) {
  char text[8192] = "", name[128];
  int length = 0;
  size_t used = 0;
  (void)mpi->MPI_Get_library_version(text, &length);
  for (const char *c = text; *c != '\0' && *c != '\n' && *c != ',' && used < sizeof name - 1; c++) {
    if (!isspace((unsigned char)*c)) {
      name[used++] = *c;
    } else if (used > 0 && name[used - 1] != ' ') {
      name[used++] = ' ';
    }
  }
  name[used] = '\0';
  snprintf(mpi->version, sizeof mpi->version, "%s, by the ABI of %s, %s", name, abi_names[mpi->abi], mpi->name);
}

static dc_status load_mpi(dc__mpi_library *mpi) {
  const char *name = NULL;
  mpi->module = open_module(&name);
  if (mpi->module == NULL) {
    const char *reason = dlerror();
    return dc__fail(DC_E_UNSUPPORTED, "MPI: there is none: %s%.300s",
                    is_set(secure_getenv("LIBDC_MPI_LIB"))
                        ? "LIBDC_MPI_LIB: "
                        : "neither libmpi.so.40 nor libmpi_abi.so.1, libmpi.so.12 or "
                          "libmpich.so.12 loads; the last says: ",
                    reason == NULL ? "" : reason);
  }
  snprintf(mpi->name, sizeof mpi->name, "%s", name);
  const char *missing = NULL;
#define X(name, result, arguments) DC__DLSYM(mpi->module, mpi, name, missing)
  DC__MPI_PLAIN_FUNCTIONS(X)
#undef X
  mpi->abi = abi_of(mpi->module);
  const char *other = dc__mpi_load_calls(mpi);
  missing = missing == NULL ? other : missing;
  if (missing != NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "MPI: %s has no %s; MPI 3 or later is needed", mpi->name, missing);
  }
  set_constants(mpi);
  describe_library(mpi);
  return DC_OK;
}

/* A loaded library stays: MPI's libraries keep threads and handlers of their own. */
dc_status dc__mpi_open(dc__mpi_library **library) {
  static dc__mpi_library mpi;
  static bool loaded;
  if (!loaded) {
    mpi = (dc__mpi_library){.module = NULL};
    DC__TRY(load_mpi(&mpi));
    loaded = true;
  }
  *library = &mpi;
  return DC_OK;
}
