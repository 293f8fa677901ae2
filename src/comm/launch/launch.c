/* Reads launchers' variables in the environment. The first launcher in the table's order whose number of ranks is set
 * counts. But a number of 1 without a rank yields to a later launcher that sets both. */
#define _GNU_SOURCE /* secure_getenv */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "comm/comm.h"

enum { ADDRESS_BYTES = 288, GROUP_BYTES = 65, HOST_BYTES = 256, MOST_RANKS = 1 << 20 };

typedef struct launch_variable {
  const char *name;
  const char *text; /* NULL: not set, or empty */
} launch_variable;

typedef struct launch_source {
  const char *name;
  launch_variable size, rank, local_rank, local_size, node;
} launch_source;

enum { ENVIRONMENT, OPEN_MPI, PMI, SLURM, FLUX, SOURCES };

/* The memory of a dc_launch's texts. */
static _Thread_local char launch_address[ADDRESS_BYTES], launch_group[GROUP_BYTES];

static launch_variable launch_variable_of(const char *name) {
  const char *text = secure_getenv(name);
  return (launch_variable){name, text == NULL || text[0] == '\0' ? NULL : text};
}

static void launch_fill_sources(launch_source sources[SOURCES]) {
  const launch_variable none = {"", NULL};
  sources[ENVIRONMENT] = (launch_source){"environment",
                                         launch_variable_of("WORLD_SIZE"),
                                         launch_variable_of("RANK"),
                                         launch_variable_of("LOCAL_RANK"),
                                         launch_variable_of("LOCAL_WORLD_SIZE"),
                                         launch_variable_of("GROUP_RANK")};
  sources[OPEN_MPI] = (launch_source){"openmpi",
                                      launch_variable_of("OMPI_COMM_WORLD_SIZE"),
                                      launch_variable_of("OMPI_COMM_WORLD_RANK"),
                                      launch_variable_of("OMPI_COMM_WORLD_LOCAL_RANK"),
                                      launch_variable_of("OMPI_COMM_WORLD_LOCAL_SIZE"),
                                      none};
  sources[PMI] = (launch_source){"pmi",
                                 launch_variable_of("PMI_SIZE"),
                                 launch_variable_of("PMI_RANK"),
                                 launch_variable_of("MPI_LOCALRANKID"),
                                 launch_variable_of("MPI_LOCALNRANKS"),
                                 none};
  /* Not SLURM_NTASKS: a batch script has that too, and is one process. */
  sources[SLURM] = (launch_source){"slurm",
                                   launch_variable_of("SLURM_STEP_NUM_TASKS"),
                                   launch_variable_of("SLURM_PROCID"),
                                   launch_variable_of("SLURM_LOCALID"),
                                   none,
                                   launch_variable_of("SLURM_NODEID")};
  sources[FLUX] = (launch_source){"flux",
                                  launch_variable_of("FLUX_JOB_SIZE"),
                                  launch_variable_of("FLUX_TASK_RANK"),
                                  launch_variable_of("FLUX_TASK_LOCAL_ID"),
                                  none,
                                  none};
}

/* ---- numbers ---- */

/* A variable that is not set leaves *number unchanged. */
static dc_status launch_read_number(launch_variable variable, int32_t least, int32_t most, int32_t *number) {
  if (variable.text == NULL) {
    return DC_OK;
  }
  char *end;
  long long value = strtoll(variable.text, &end, 10);
  if (strspn(variable.text, "0123456789") != strlen(variable.text) || value < least || value > most) {
    return dc__fail(DC_E_INVALID,
                    "dc_launch_get: %s=%.40s in the environment: must be a number in %" PRId32 "..%" PRId32,
                    variable.name, variable.text, least, most);
  }
  *number = (int32_t)value;
  return DC_OK;
}

static dc_status launch_read_numbers(const launch_source *source, dc_launch *launch) {
  DC__TRY(launch_read_number(source->size, 1, MOST_RANKS, &launch->world_size));
  if (source->rank.text == NULL && launch->world_size > 1) {
    return dc__fail(DC_E_INVALID, "dc_launch_get: %s=%" PRId32 " is in the environment, but %s is not",
                    source->size.name, launch->world_size, source->rank.name);
  }
  DC__TRY(launch_read_number(source->rank, 0, launch->world_size - 1, &launch->rank));
  DC__TRY(launch_read_number(source->local_size, 1, launch->world_size, &launch->local_size));
  DC__TRY(launch_read_number(source->local_rank, 0,
                             (launch->local_size > 0 ? launch->local_size : launch->world_size) - 1,
                             &launch->local_rank));
  return launch_read_number(source->node, 0, MOST_RANKS, &launch->node);
}

/* A node's number of tasks in Slurm's list, such as "4(x3),2"; 0 if the list has no such node. */
static int32_t launch_tasks_of_node(const char *list, int32_t node) {
  while (list != NULL && *list != '\0' && node >= 0) {
    int tasks = 0, nodes = 1, read = 0;
    if (sscanf(list, "%d%n(x%d%n", &tasks, &read, &nodes, &read) < 1 || tasks < 1 || nodes < 1) {
      return 0;
    }
    node -= nodes;
    if (node < 0) {
      return tasks;
    }
    list = strchr(list + read, ',');
    list += list != NULL;
  }
  return 0;
}

static bool launch_is_text(launch_variable variable, const char *text) {
  return variable.text != NULL && strcmp(variable.text, text) == 0;
}

/* Whether the text is an address 127.x, and not a name that begins like one. */
static bool launch_is_loopback(const char *text) {
  return strncmp(text, "127.", 4) == 0 && strspn(text, "0123456789.") == strlen(text);
}

/* Whether MASTER_ADDR is this machine, as far as its text shows. */
static bool launch_is_local(launch_variable host) {
  char own[HOST_BYTES] = "";
  (void)gethostname(own, sizeof own - 1);
  return host.text == NULL || launch_is_loopback(host.text) || strcmp(host.text, "::1") == 0 ||
         strcasecmp(host.text, "localhost") == 0 || strcasecmp(host.text, own) == 0;
}

/* The number of ranks on this machine, if no variable of the source has it; 0 if it is unknown. */
static int32_t launch_find_local_size(int32_t source, const dc_launch *launch) {
  bool one_machine = launch->world_size == 1;
  if (source == ENVIRONMENT) {
    one_machine = launch_variable_of("LIBDC_GROUP").text != NULL || launch_is_local(launch_variable_of("MASTER_ADDR"));
  } else if (source == SLURM) {
    int32_t tasks = launch_tasks_of_node(launch_variable_of("SLURM_STEP_TASKS_PER_NODE").text, launch->node);
    if (tasks > 0) {
      return tasks;
    }
    one_machine = launch_is_text(launch_variable_of("SLURM_STEP_NUM_NODES"), "1");
  } else if (source == FLUX) {
    one_machine = launch_is_text(launch_variable_of("FLUX_JOB_NNODES"), "1");
  }
  return one_machine ? launch->world_size : 0;
}

/* Only Slurm's list of tasks can disagree with the other numbers, which are read with their bounds. */
static dc_status launch_check_local(const launch_source *source, const dc_launch *launch) {
  const launch_variable tasks = launch_variable_of("SLURM_STEP_TASKS_PER_NODE");
  if (launch->local_size > launch->world_size) {
    return dc__fail(DC_E_INVALID,
                    "dc_launch_get: %s=%.40s in the environment: %" PRId32 " tasks at %s=%" PRId32
                    ", must be in 1..%" PRId32 " (%s)",
                    tasks.name, tasks.text, launch->local_size, source->node.name, launch->node, launch->world_size,
                    source->size.name);
  }
  if (launch->local_size > 0 && launch->local_rank >= launch->local_size) {
    return dc__fail(DC_E_INVALID,
                    "dc_launch_get: %s=%" PRId32 " in the environment: must be a number in 0..%" PRId32
                    ", since %s=%.40s has %" PRId32 " tasks at %s=%" PRId32,
                    source->local_rank.name, launch->local_rank, launch->local_size - 1, tasks.name, tasks.text,
                    launch->local_size, source->node.name, launch->node);
  }
  return DC_OK;
}

/* ---- where the ranks meet ---- */

/* The first node in Slurm's list, such as "n[001-004,7],m1" and "rack[1-2]n[3,5]". */
static void launch_first_host(const char *list, char host[HOST_BYTES]) {
  size_t used = 0;
  bool skips = false, in_brackets = false;
  for (const char *c = list; *c != '\0' && (in_brackets || *c != ',') && used < HOST_BYTES - 1; c++) {
    if (*c == '[') {
      in_brackets = true;
    } else if (*c == ']') {
      in_brackets = skips = false;
    } else if (in_brackets && (*c == '-' || *c == ',')) {
      skips = true;
    } else if (!skips) {
      host[used++] = *c;
    }
  }
  host[used] = '\0';
}

static void launch_set_address(dc_launch *launch, const char *host, int32_t port) {
  bool six = strchr(host, ':') != NULL;
  snprintf(launch_address, sizeof launch_address, six ? "[%.255s]:%" PRId32 : "%.255s:%" PRId32, host, port);
  launch->address = launch_address;
}

/* Slurm gives its steps no port. By default Linux assigns no ports from 61440 on to outgoing connections. */
static int32_t launch_slurm_port(const char *job, const char *step) {
  enum { FIRST_PORT = 61440, PORTS = 4000, STEP_PORTS = 16 };
  unsigned long long number = strtoull(job, NULL, 10) + STEP_PORTS * strtoull(step, NULL, 10);
  return (int32_t)(FIRST_PORT + number % PORTS);
}

static dc_status launch_find_address(int32_t source, dc_launch *launch) {
  launch_variable host = launch_variable_of("MASTER_ADDR"), port = launch_variable_of("MASTER_PORT");
  launch_variable nodes = launch_variable_of("SLURM_STEP_NODELIST"), job = launch_variable_of("SLURM_JOB_ID");
  launch_variable step = launch_variable_of("SLURM_STEP_ID");
  int32_t number = 0;
  if (host.text != NULL && port.text != NULL) {
    DC__TRY(launch_read_number(port, 1, 65534, &number));
    launch_set_address(launch, host.text, number + 1);
  } else if (source == SLURM && nodes.text != NULL && job.text != NULL) {
    char first[HOST_BYTES];
    launch_first_host(nodes.text, first);
    launch_set_address(launch, first, launch_slurm_port(job.text, step.text == NULL ? "0" : step.text));
  }
  return DC_OK;
}

/* FNV-1a over the texts, each with its terminating zero. */
static void launch_hash_group(const char *prefix, const launch_variable *variables, size_t count) {
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  for (size_t i = 0; i < count; i++) {
    const char *c = variables[i].text == NULL ? "" : variables[i].text;
    do {
      hash = (hash ^ (unsigned char)*c) * UINT64_C(0x100000001b3);
    } while (*c++ != '\0');
  }
  snprintf(launch_group, sizeof launch_group, "libdc-%s-%016" PRIx64, prefix, hash);
}

/* Finds a group name that no other group has at the same time. */
static dc_status launch_find_group(int32_t source, dc_launch *launch) {
  const launch_variable group = launch_variable_of("LIBDC_GROUP");
  const launch_variable meeting[] = {launch_variable_of("MASTER_PORT"), launch_variable_of("MASTER_ADDR"),
                                     launch_variable_of("TORCHELASTIC_RUN_ID"),
                                     launch_variable_of("TORCHELASTIC_RESTART_COUNT")};
  const launch_variable slurm[] = {launch_variable_of("SLURM_JOB_ID"), launch_variable_of("SLURM_STEP_ID"),
                                   launch_variable_of("SLURM_RESTART_COUNT")};
  const launch_variable flux[] = {launch_variable_of("FLUX_JOB_ID")};
  launch->group = launch_group;
  if (group.text != NULL) {
    snprintf(launch_group, sizeof launch_group, "%s", group.text);
    return strlen(group.text) < sizeof launch_group
               ? DC_OK
               : dc__fail(DC_E_INVALID, "dc_launch_get: LIBDC_GROUP in the environment has more than %d bytes",
                          GROUP_BYTES - 1);
  }
  if (source == SLURM && slurm[0].text != NULL) {
    launch_hash_group("slurm", slurm, DC__COUNT(slurm));
  } else if (source == FLUX && flux[0].text != NULL) {
    launch_hash_group("flux", flux, DC__COUNT(flux));
  } else if (meeting[0].text != NULL) {
    launch_hash_group("port", meeting, DC__COUNT(meeting));
  } else {
    launch->group = NULL;
  }
  return DC_OK;
}

/* ---- which launcher ---- */

static bool launch_is_same(const launch_source *a, const launch_source *b) {
  return a->size.text != NULL && b->size.text != NULL && a->rank.text != NULL && b->rank.text != NULL &&
         strcmp(a->size.text, b->size.text) == 0 && strcmp(a->rank.text, b->rank.text) == 0;
}

/* A size of 1 without a rank may be left from elsewhere. It counts unless a later launcher has a size and a rank. */
static bool launch_yields(const launch_source sources[SOURCES], int32_t source) {
  bool later = false;
  for (int32_t i = source + 1; i < SOURCES; i++) {
    later = later || (sources[i].size.text != NULL && sources[i].rank.text != NULL);
  }
  return later && launch_is_text(sources[source].size, "1") && sources[source].rank.text == NULL;
}

/* The first source from `first` on; SOURCES if there is none. Slurm and Flux may also set PMI's variables, but their
 * own say more. Ranks of another launcher inside their job see their variables too, with other numbers. */
static int32_t launch_find(const launch_source sources[SOURCES], int32_t first) {
  int32_t found = first;
  while (found < SOURCES && (sources[found].size.text == NULL || launch_yields(sources, found))) {
    found++;
  }
  if (found == PMI && launch_is_same(&sources[PMI], &sources[SLURM])) {
    return SLURM;
  }
  return found == PMI && launch_is_same(&sources[PMI], &sources[FLUX]) ? FLUX : found;
}

static dc_status launch_choose(const launch_source sources[SOURCES], const char *chosen, int32_t *found) {
  *found = strcmp(chosen, "none") == 0 ? SOURCES : -1;
  for (int32_t i = 0; i < SOURCES; i++) {
    *found = strcmp(chosen, sources[i].name) == 0 ? i : *found;
  }
  if (*found < 0) {
    return dc__fail(DC_E_INVALID,
                    "dc_launch_get: LIBDC_LAUNCHER=%.40s in the environment: must be environment, openmpi, pmi, "
                    "slurm, flux or none",
                    chosen);
  }
  if (*found < SOURCES && sources[*found].size.text == NULL) {
    return dc__fail(DC_E_INVALID, "dc_launch_get: LIBDC_LAUNCHER=%s, but %s is not in the environment", chosen,
                    sources[*found].size.name);
  }
  return DC_OK;
}

dc_status dc__launch_read(dc_launch *launch) {
  launch_source sources[SOURCES];
  const char *chosen = launch_variable_of("LIBDC_LAUNCHER").text;
  int32_t found;
  launch_fill_sources(sources);
  *launch = (dc_launch){.struct_size = sizeof *launch, .launcher = "none", .world_size = 1, .local_size = 1};
  if (chosen != NULL) {
    DC__TRY(launch_choose(sources, chosen, &found));
  } else {
    found = launch_find(sources, ENVIRONMENT);
  }
  if (found == SOURCES) {
    return DC_OK;
  }
  bool speaks_pmi = launch_variable_of("PMI_RANK").text != NULL || launch_variable_of("PMIX_RANK").text != NULL;
  launch->launcher = sources[found].name;
  launch->uses_mpi = found == OPEN_MPI || found == PMI || (found > PMI && chosen == NULL && speaks_pmi);
  launch->local_rank = launch->node = -1;
  launch->local_size = 0;
  DC__TRY(launch_read_numbers(&sources[found], launch));
  if (launch->local_size == 0) {
    launch->local_size = launch_find_local_size(found, launch);
    DC__TRY(launch_check_local(&sources[found], launch));
  }
  DC__TRY(launch_find_address(found, launch));
  return launch_find_group(found, launch);
}

int32_t dc__launch_mpi_size(void) {
  launch_source sources[SOURCES];
  int32_t size = 0;
  launch_fill_sources(sources);
  int32_t found = launch_find(sources, OPEN_MPI);
  return found < SOURCES && launch_read_number(sources[found].size, 1, MOST_RANKS, &size) == DC_OK ? size : 0;
}
