/* A test program starts itself as the ranks of the MPIs that are here. */
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

enum { OUTPUT = 1 << 16 };

static const char *own_path;

static inline void set_own_path(const char *path) {
  own_path = path;
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
}

typedef struct launcher {
  const char *program, *options, *keeps_running; /* the last: though a rank dies */
  bool survives_death; /* MPICH over UCX may end a rank whose peer dies, before libdc says anything */
} launcher;

static const launcher launchers[] = {
    {"mpirun.mpich", "", "-disable-auto-cleanup", false},
    {"mpirun.openmpi",
     "--oversubscribe --mca btl_vader_single_copy_mechanism none --mca btl_base_warn_component_unused 0",
     "--enable-recovery", true},
};

static inline bool is_there(const launcher *l) {
  char command[128];
  snprintf(command, sizeof command, "command -v %s >/dev/null", l->program);
  return system(command) == 0;
}

/* Runs this program as ranks; its exit status, and what it says. */
static inline int launch(const char *command, char output[OUTPUT]) {
  FILE *pipe = popen(command, "r");
  size_t used = 0, got;
  while (used < OUTPUT - 1 && (got = fread(output + used, 1, OUTPUT - 1 - used, pipe)) > 0) {
    used += got;
  }
  output[used] = '\0';
  return pclose(pipe);
}

static inline int launch_ranks(const launcher *l, int32_t ranks, const char *role, const char *options,
                               char output[OUTPUT]) {
  char command[1024];
  snprintf(command, sizeof command, "timeout -k 5 120 %s %s %s -n %d %s %s 2>&1", l->program, l->options, options,
           ranks, own_path, role);
  return launch(command, output);
}

static inline void skip_without_launchers(void) {
  if (!is_there(&launchers[0]) && !is_there(&launchers[1])) {
    printf("SKIP: neither mpirun.mpich nor mpirun.openmpi is here\n");
    skip();
  }
}

#endif
