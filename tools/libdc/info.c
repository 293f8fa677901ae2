/* libdc info: the library, its back ends on this machine, and the machine's limits. */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "tool.h"

/* Sections of names and values, for people or as JSON. */
typedef struct report {
  json j;
  bool as_json;
} report;

static void begin_section(report *r, const char *name) {
  if (r->as_json) {
    json_open(&r->j, name, '{');
  } else {
    printf("%s\n", name);
  }
}

static void end_section(report *r) {
  if (r->as_json) {
    json_close(&r->j, '}');
  }
}

static void print_field(report *r, const char *name, const char *text) {
  if (r->as_json) {
    json_text(&r->j, name, text);
  } else {
    printf("  %-20s %s\n", name, text);
  }
}

/* -1: without limit. */
static void print_number(report *r, const char *name, int64_t number, const char *unit) {
  if (r->as_json) {
    json_int(&r->j, name, number);
  } else if (number < 0) {
    printf("  %-20s no limit\n", name);
  } else {
    printf("  %-20s %" PRId64 "%s%s\n", name, number, unit[0] == '\0' ? "" : " ", unit);
  }
}

/* A number that may be unknown. */
static void print_known(report *r, const char *name, bool known, int64_t number) {
  if (known) {
    print_number(r, name, number, "");
  } else {
    print_field(r, name, "not said");
  }
}

/* A component, or why it is missing. */
static void print_found(report *r, const char *name, bool found, const char *text) {
  if (r->as_json) {
    json_open(&r->j, name, '{');
    json_bool(&r->j, "found", found);
    json_text(&r->j, "text", text);
    json_close(&r->j, '}');
  } else {
    printf("  %-20s %s%s\n", name, found ? "" : "not here: ", text);
  }
}

/* ---- the library ---- */

static const char *simd_level(void) {
  return dc_has_feature("amx") == 1          ? "amx"
         : dc_has_feature("avx512bf16") == 1 ? "avx512bf16"
         : dc_has_feature("avx512") == 1     ? "avx512"
         : dc_has_feature("avx2") == 1       ? "avx2"
                                             : "plain C";
}

static void print_library(report *r) {
  Dl_info where = {0};
  char path[PATH_MAX];
  char abi[32];
  uint32_t version = dc_api_version();
  (void)dladdr((void *)(uintptr_t)dc_api_version, &where);
  snprintf(abi, sizeof abi, version >= 1000000 ? "libdc.so.%u" : "libdc.so.0.%u",
           version >= 1000000 ? version / 1000000 : version / 1000);
  begin_section(r, "library");
  print_field(r, "version", dc_version_string());
  print_field(r, "abi", abi);
  print_field(r, "path", where.dli_fname == NULL || realpath(where.dli_fname, path) == NULL ? "?" : path);
  print_field(r, "build", DC_TOOL_BUILD);
  print_field(r, "simd", simd_level());
  end_section(r);
}

/* The solver of a device's eigendecompositions, found by one of an empty matrix. */
static void print_solver(report *r, const char *name, dc_device *d) {
  char title[32];
  dc_linalg *linalg = NULL;
  const int64_t shape[2] = {0, 0};
  dc_tensor none = DC_TENSOR_INIT;
  none.dtype = DC_FLOAT64;
  none.shape = shape;
  none.ndim = 2;
  dc_tensor values = none;
  values.ndim = 1;
  dc_status status = dc_linalg_create(d, NULL, &linalg);
  status = status != DC_OK ? status : dc_eigh(linalg, &none, NULL, &values, NULL, NULL, 0);
  snprintf(title, sizeof title, "%s solver", name);
  print_found(r, title, status == DC_OK, status == DC_OK ? dc_linalg_solver(linalg) : dc_last_error());
  dc_linalg_destroy(linalg);
}

static void print_device(report *r, const char *name) {
  dc_device *d = NULL;
  dc_status status = dc_device_open(name, NULL, &d);
  print_found(r, name, status == DC_OK, status == DC_OK ? dc_device_name(d) : dc_last_error());
  if (status == DC_OK) {
    print_solver(r, name, d);
  }
  dc_device_destroy(d);
}

/* Creates a communicator of one rank. */
static void print_communicator(report *r, const char *name, bool processes) {
  dc_comm *comm = NULL;
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  options.timeout_ns = INT64_C(5000000000);
  char group[64];
  snprintf(group, sizeof group, "dc-info.%ld", (long)getpid());
  dc_status status =
      processes ? dc_comm_create_processes(group, 0, 1, &options, &comm) : dc_comm_create_threads(1, &options, &comm);
  print_found(r, name, status == DC_OK,
              status != DC_OK ? dc_last_error()
              : processes     ? "processes of this machine, over shared memory"
                              : "threads of a process");
  dc_comm_destroy(comm);
}

static void print_nccl(report *r) {
  char text[40];
  int32_t version = 0;
  dc_status status = dc_nccl_get_version(&version);
  snprintf(text, sizeof text, "NCCL %d.%d.%d, between cards", version / 10000, version / 100 % 100, version % 100);
  print_found(r, "nccl", status == DC_OK, status == DC_OK ? text : dc_last_error());
}

static void print_mpi(report *r) {
  const char *version = NULL;
  dc_status status = dc_mpi_get_version(&version);
  print_found(r, "mpi", status == DC_OK, status == DC_OK ? version : dc_last_error());
}

static void print_backends(report *r) {
  begin_section(r, "devices");
  print_device(r, "cpu");
  print_device(r, "cuda");
  end_section(r);
  begin_section(r, "communicators");
  print_communicator(r, "threads", false);
  print_communicator(r, "processes", true);
  bool tcp = dc_has_feature("comm.tcp") == 1;
  print_found(r, "tcp", tcp, tcp ? "ranks of several machines" : "this build has none");
  bool external = dc_has_feature("comm.external") == 1;
  print_found(r, "external", external, external ? "the caller's own collectives" : "this build has none");
  print_nccl(r);
  print_mpi(r);
  end_section(r);
}

/* ---- the launcher ---- */

/* How init_comm of the Python package lets the ranks meet. Ranks of Slurm and Flux need no MPI. */
static const char *meeting_of(const dc_launch *l) {
  const char *version;
  bool one_machine = l->local_size == l->world_size;
  bool mpi_loads = l->uses_mpi == 1 && dc_mpi_get_version(&version) == DC_OK;
  bool needs_mpi = l->uses_mpi == 1 && strcmp(l->launcher, "slurm") != 0 && strcmp(l->launcher, "flux") != 0;
  return l->world_size == 1                   ? "one rank alone"
         : mpi_loads                          ? "over MPI"
         : needs_mpi                          ? "over MPI, which is not here"
         : l->address == NULL && !one_machine ? "the launcher does not say where: set MASTER_ADDR and MASTER_PORT"
         : l->group == NULL ? "the launcher does not say as what: set LIBDC_GROUP, or MASTER_ADDR and MASTER_PORT"
         : one_machine      ? "over shared memory"
                            : "over TCP";
}

static void print_launcher(report *r) {
  dc_launch l = DC_LAUNCH_INIT;
  dc_status status = dc_launch_get(&l);
  begin_section(r, "launcher");
  print_found(r, "variables", status == DC_OK, status == DC_OK ? l.launcher : dc_last_error());
  if (status == DC_OK) {
    print_number(r, "rank", l.rank, "");
    print_number(r, "ranks", l.world_size, "");
    print_known(r, "rank of machine", l.local_rank >= 0, l.local_rank);
    print_known(r, "ranks of machine", l.local_size > 0, l.local_size);
    print_known(r, "machine", l.node >= 0, l.node);
    print_field(r, "address", l.address == NULL ? "not said" : l.address);
    print_field(r, "ranks meet", meeting_of(&l));
  }
  end_section(r);
}

/* ---- the machine ---- */

static int64_t resource_limit(int resource) {
  struct rlimit limit;
  return getrlimit((__rlimit_resource_t)resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY
             ? -1
             : (int64_t)limit.rlim_cur;
}

/* A number out of /proc/meminfo, in MiB. */
static int64_t read_meminfo(const char *name) {
  FILE *file = fopen("/proc/meminfo", "r");
  char line[128];
  int64_t kib = 0;
  while (file != NULL && fgets(line, sizeof line, file) != NULL) {
    size_t length = strlen(name);
    if (strncmp(line, name, length) == 0 && line[length] == ':') {
      (void)sscanf(line + length + 1, "%" SCNd64, &kib);
    }
  }
  if (file != NULL) {
    fclose(file);
  }
  return kib / 1024;
}

static void print_machine(report *r) {
  struct utsname system;
  struct statvfs shm = {0};
  cpu_set_t cpus;
  char text[300];
  CPU_ZERO(&cpus);
  (void)uname(&system);
  snprintf(text, sizeof text, "%.80s %.80s, %.80s", system.sysname, system.release, system.machine);
  begin_section(r, "machine");
  print_field(r, "system", text);
  print_number(r, "processors", sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 0, "");
  print_number(r, "memory", read_meminfo("MemTotal"), "MiB");
  print_number(r, "memory available", read_meminfo("MemAvailable"), "MiB");
  print_number(r, "/dev/shm free", statvfs("/dev/shm", &shm) == 0 ? (int64_t)(shm.f_bavail * shm.f_frsize >> 20) : 0,
               "MiB");
  end_section(r);
  begin_section(r, "limits");
  print_number(r, "open files", resource_limit(RLIMIT_NOFILE), "");
  print_number(r, "processes", resource_limit(RLIMIT_NPROC), "");
  print_number(r, "locked memory", resource_limit(RLIMIT_MEMLOCK), "bytes");
  print_number(r, "address space", resource_limit(RLIMIT_AS), "bytes");
  print_number(r, "ranks of a machine", 64, "");
  print_number(r, "ranks over TCP", 1024, "");
  end_section(r);
}

int run_info(const args *a) {
  report r = {.j = {.file = stdout}, .as_json = has_option(a, "--json")};
  if (r.as_json) {
    json_open(&r.j, NULL, '{');
  }
  print_library(&r);
  print_backends(&r);
  print_launcher(&r);
  print_machine(&r);
  if (r.as_json) {
    json_close(&r.j, '}');
  }
  return EXIT_OK;
}
