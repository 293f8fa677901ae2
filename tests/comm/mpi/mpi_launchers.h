/* A test program starts itself as the ranks, under each MPI that is installed. */
#ifndef DC_TESTS_MPI_LAUNCHERS_H
#define DC_TESTS_MPI_LAUNCHERS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
/* cmocka wants some of the above first */
#include <cmocka.h>

#include "dc_api.h"

enum { OUTPUT = 1 << 16 };

static const char *own_path;

static inline void set_own_path(const char *path) {
  own_path = path;
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
}

typedef struct launcher {
  const char *program, *options;
  const char *keeps_running; /* options that keep the others running when a rank dies, and avoid cross-memory copies */
  const char *keeper;        /* prefix of a command that starts a rank and outlives it */
} launcher;

/* UCX (transport cma) and vader of Open MPI end a process that copies from the memory of a dead one. MPICH's launcher
 * kills all ranks when a rank that it has started itself is killed, and sends SIGUSR1 when a rank exits without
 * MPI_Finalize. */
static const launcher launchers[] = {
    {"mpirun.mpich", "", "-disable-auto-cleanup -genv UCX_TLS '^cma'", "sh -c 'trap \"\" USR1; \"$@\"; exit 0' sh"},
    {"mpirun.openmpi",
     "--oversubscribe --mca btl_vader_single_copy_mechanism none --mca btl_base_warn_component_unused 0",
     "--enable-recovery", ""},
};

static inline bool succeeds(const char *command) {
  return system(command) == 0;
}

static inline bool is_there(const launcher *l) {
  char command[128];
  snprintf(command, sizeof command, "command -v %s >/dev/null", l->program);
  return succeeds(command);
}

/* Runs this program as ranks. Returns its exit status, and its output. */
static inline int launch(const char *command, char output[OUTPUT]) {
  FILE *pipe = popen(command, "r");
  size_t used = 0, got;
  while (used < OUTPUT - 1 && (got = fread(output + used, 1, OUTPUT - 1 - used, pipe)) > 0) {
    used += got;
  }
  output[used] = '\0';
  return pclose(pipe);
}

static inline int launch_ranks(const launcher *l, int32_t ranks, const char *role, bool keeps_running,
                               char output[OUTPUT]) {
  char command[1024];
  snprintf(command, sizeof command, "timeout -k 5 120 %s %s %s -n %d %s %s %s 2>&1", l->program, l->options,
           keeps_running ? l->keeps_running : "", ranks, keeps_running ? l->keeper : "", own_path, role);
  return launch(command, output);
}

static inline dc_comm *open_comm(int64_t timeout_ns) {
  dc_comm *comm = NULL;
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = timeout_ns};
  dc_status status = dc_comm_create_mpi(&options, &comm);
  if (status != DC_OK) {
    printf("create: %d %s\n", status, dc_last_error());
  }
  return comm;
}

static inline void skip_without_launchers(void) {
  if (!is_there(&launchers[0]) && !is_there(&launchers[1])) {
    printf("SKIP: neither mpirun.mpich nor mpirun.openmpi is here\n");
    skip();
  }
}

#endif
