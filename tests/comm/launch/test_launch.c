/* Each launcher's variables: how they are read, their precedence, and the values that are refused. The tests set the
 * variables that the real launchers set. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "comm/comm.h"

#define TORCHRUN                                                                                       \
  "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=n0 MASTER_PORT=29500 " \
  "TORCHELASTIC_RUN_ID=a TORCHELASTIC_RESTART_COUNT=0 "
#define OPEN_MPI                                                                            \
  "OMPI_COMM_WORLD_SIZE=6 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_RANK=0 PMIX_RANK=3 " \
  "OMPI_COMM_WORLD_LOCAL_SIZE=3 "
#define HYDRA "PMI_SIZE=4 PMI_RANK=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2 PMI_FD=7 "
#define SLURM                                                                                               \
  "SLURM_JOB_ID=4100 SLURM_STEP_ID=1 SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=7 SLURM_LOCALID=1 SLURM_NODEID=2 " \
  "SLURM_STEP_NUM_NODES=3 SLURM_STEP_TASKS_PER_NODE=3(x2),2 SLURM_STEP_NODELIST=rack1n[07-08,12] SLURM_NTASKS=8 "
#define SLURM_2 "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_NODEID=0 "
#define FLUX "FLUX_JOB_ID=f2Wx FLUX_JOB_SIZE=4 FLUX_TASK_RANK=1 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=1 "

/* Replaces the whole environment by these words. */
static void set_environment(const char *words) {
  char copy[2048], *rest = copy;
  snprintf(copy, sizeof copy, "%s", words);
  assert_int_equal(clearenv(), 0);
  for (char *word = strtok_r(copy, " ", &rest); word != NULL; word = strtok_r(NULL, " ", &rest)) {
    char *value = strchr(word, '=');
    *value = '\0';
    assert_int_equal(setenv(word, value + 1, 1), 0);
  }
}

static dc_launch read_launch(const char *words) {
  dc_launch launch = DC_LAUNCH_INIT;
  set_environment(words);
  dc_status status = dc_launch_get(&launch);
  if (status != DC_OK) {
    fail_msg("%s: %s", words, dc_last_error());
  }
  return launch;
}

typedef struct expectation {
  const char *words, *launcher, *address; /* NULL: none */
  int32_t rank, world, local_rank, local_size, node, uses_mpi;
} expectation;

static void check_launch(const expectation *e) {
  char said[512], expected[512];
  const dc_launch l = read_launch(e->words);
  snprintf(said, sizeof said, "%s at %s: %d of %d, local %d of %d, node %d, MPI %d", l.launcher,
           l.address == NULL ? "none" : l.address, l.rank, l.world_size, l.local_rank, l.local_size, l.node,
           l.uses_mpi);
  snprintf(expected, sizeof expected, "%s at %s: %d of %d, local %d of %d, node %d, MPI %d", e->launcher,
           e->address == NULL ? "none" : e->address, e->rank, e->world, e->local_rank, e->local_size, e->node,
           e->uses_mpi);
  if (strcmp(said, expected) != 0) {
    fail_msg("%s\n said     %s\n expected %s", e->words, said, expected);
  }
}

static void test_each_launcher_is_read(void **state) {
  (void)state;
  const expectation all[] = {
      {"PATH=/bin", "none", NULL, 0, 1, 0, 1, 0, 0},
      {TORCHRUN, "environment", "n0:29501", 5, 8, 1, 4, 1, 0},
      {"RANK=1 WORLD_SIZE=2", "environment", NULL, 1, 2, -1, 2, -1, 0},
      {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=pod-0 MASTER_PORT=1", "environment", "pod-0:2", 1, 2, -1, 0, -1, 0},
      {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=::1 MASTER_PORT=1", "environment", "[::1]:2", 1, 2, -1, 2, -1, 0},
      {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.2 MASTER_PORT=1", "environment", "127.0.0.2:2", 1, 2, -1, 2, -1, 0},
      {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.a.org MASTER_PORT=1", "environment", "127.a.org:2", 1, 2, -1, 0, -1, 0},
      {"WORLD_SIZE=1", "environment", NULL, 0, 1, -1, 1, -1, 0},
      {OPEN_MPI, "openmpi", NULL, 3, 6, 0, 3, -1, 1},
      {HYDRA, "pmi", NULL, 2, 4, 0, 2, -1, 1},
      {SLURM, "slurm", "rack1n07:61556", 7, 8, 1, 2, 2, 0},
      {FLUX, "flux", NULL, 1, 4, 1, 4, -1, 0},
      {"SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_JOB_ID=1", "none", NULL, 0, 1, 0, 1, 0, 0}, /* a batch script */
  };
  for (size_t i = 0; i < DC__COUNT(all); i++) {
    check_launch(&all[i]);
  }
}

static void test_the_order(void **state) {
  (void)state;
  const expectation all[] = {
      {TORCHRUN OPEN_MPI SLURM, "environment", "n0:29501", 5, 8, 1, 4, 1, 0},
      {OPEN_MPI HYDRA SLURM, "openmpi", NULL, 3, 6, 0, 3, -1, 1},
      {HYDRA SLURM, "pmi", NULL, 2, 4, 0, 2, -1, 1},                                /* mpirun in a job of Slurm */
      {SLURM "PMI_RANK=7 PMI_SIZE=8", "slurm", "rack1n07:61556", 7, 8, 1, 2, 2, 1}, /* srun --mpi=pmi2 */
      {SLURM "PMIX_RANK=7", "slurm", "rack1n07:61556", 7, 8, 1, 2, 2, 1},           /* srun --mpi=pmix */
      {FLUX "PMI_RANK=1 PMI_SIZE=4 PMI_FD=3", "flux", NULL, 1, 4, 1, 4, -1, 1},
      {SLURM "MASTER_ADDR=here MASTER_PORT=7", "slurm", "here:8", 7, 8, 1, 2, 2, 0},
      {TORCHRUN OPEN_MPI "LIBDC_LAUNCHER=openmpi", "openmpi", "n0:29501", 3, 6, 0, 3, -1, 1},
      {SLURM "PMIX_RANK=7 LIBDC_LAUNCHER=slurm", "slurm", "rack1n07:61556", 7, 8, 1, 2, 2, 0},
      {TORCHRUN "LIBDC_LAUNCHER=none", "none", NULL, 0, 1, 0, 1, 0, 0},
      {OPEN_MPI "WORLD_SIZE=1", "openmpi", NULL, 3, 6, 0, 3, -1, 1}, /* a world of 1 without a rank does not count */
      {SLURM "WORLD_SIZE=1 PMI_SIZE=1", "slurm", "rack1n07:61556", 7, 8, 1, 2, 2, 0},
      {OPEN_MPI "WORLD_SIZE=1 RANK=0", "environment", NULL, 0, 1, -1, 1, -1, 0},
      {"WORLD_SIZE=1 OMPI_COMM_WORLD_SIZE=6", "environment", NULL, 0, 1, -1, 1, -1, 0},
      {OPEN_MPI "WORLD_SIZE=1 LIBDC_LAUNCHER=environment", "environment", NULL, 0, 1, -1, 1, -1, 0},
      {"RANK= WORLD_SIZE= " FLUX, "flux", NULL, 1, 4, 1, 4, -1, 0},
  };
  for (size_t i = 0; i < DC__COUNT(all); i++) {
    check_launch(&all[i]);
  }
}

static void test_slurm_s_lists(void **state) {
  (void)state;
  static const char *const lists[][2] = {{"n1", "n1:"},       {"n[1,3]", "n1:"},         {"n[001-100],m1", "n001:"},
                                         {"a-b1,c", "a-b1:"}, {"r[1-2]n[3-9]", "r1n3:"}, {"n[5-7]x,y", "n5x:"}};
  char words[256], list[512];
  for (size_t i = 0; i < DC__COUNT(lists); i++) {
    snprintf(words, sizeof words, "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 SLURM_JOB_ID=1 SLURM_STEP_NODELIST=%s",
             lists[i][0]);
    const dc_launch l = read_launch(words);
    assert_int_equal(strncmp(l.address, lists[i][1], strlen(lists[i][1])), 0);
  }
  memset(list, 'n', sizeof list - 1); /* longer than a name may be */
  list[sizeof list - 1] = '\0';
  setenv("SLURM_STEP_NODELIST", list, 1);
  dc_launch l = DC_LAUNCH_INIT;
  assert_int_equal(dc_launch_get(&l), DC_OK);
  assert_true(strlen(l.address) < 288);
  assert_int_equal(read_launch("SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_STEP_TASKS_PER_NODE=x").local_size, 0);
  assert_int_equal(read_launch(SLURM_2 "SLURM_STEP_TASKS_PER_NODE=-2").local_size, 0);
  assert_int_equal(read_launch(SLURM_2 "SLURM_STEP_TASKS_PER_NODE=1(x-1),2").local_size, 0);
}

/* Ranks of one job get the same group name; other jobs get another one. */
static void test_groups(void **state) {
  (void)state;
  char first[96], second[96];
  snprintf(first, sizeof first, "%s", read_launch(SLURM).group);
  assert_string_equal(read_launch(SLURM "SLURM_PROCID=2 SLURM_LOCALID=0").group, first);
  snprintf(second, sizeof second, "%s", read_launch(SLURM "SLURM_RESTART_COUNT=1").group);
  assert_string_not_equal(first, second);
  assert_string_not_equal(read_launch(SLURM "SLURM_STEP_ID=2").group, first);
  assert_string_not_equal(read_launch(TORCHRUN).group, first);
  assert_string_equal(read_launch(TORCHRUN "LIBDC_GROUP=mine").group, "mine");
  assert_null(read_launch("RANK=0 WORLD_SIZE=2").group);
}

static void test_wrong_values(void **state) {
  (void)state;
  static const char *const wrong[][2] = {
      {"WORLD_SIZE=2", "WORLD_SIZE=2 is in the environment, but RANK is not"},
      {"WORLD_SIZE=x RANK=0", "WORLD_SIZE=x in the environment: must be a number in 1..1048576"},
      {"WORLD_SIZE=0 RANK=0", "WORLD_SIZE=0"},
      {"WORLD_SIZE=2 RANK=2", "RANK=2 in the environment: must be a number in 0..1"},
      {"WORLD_SIZE=2 RANK=-1", "RANK=-1"},
      {"WORLD_SIZE=2 RANK=1.5", "RANK=1.5"},
      {"WORLD_SIZE=99999999999999999999 RANK=0", "WORLD_SIZE=9999"},
      {"WORLD_SIZE=2 RANK=0 LOCAL_WORLD_SIZE=3", "LOCAL_WORLD_SIZE=3 in the environment: must be a number in 1..2"},
      {"WORLD_SIZE=2 RANK=0 LOCAL_RANK=2", "LOCAL_RANK=2"},
      {"WORLD_SIZE=2 RANK=0 MASTER_ADDR=a MASTER_PORT=65535", "MASTER_PORT=65535 in the environment: must be"},
      {SLURM_2 "SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=9",
       "SLURM_STEP_TASKS_PER_NODE=9 in the environment: 9 tasks at SLURM_NODEID=0, must be in 1..2 "
       "(SLURM_STEP_NUM_TASKS)"},
      {SLURM_2 "SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=1(x2)",
       "SLURM_LOCALID=1 in the environment: must be a number in 0..0, since SLURM_STEP_TASKS_PER_NODE=1(x2) has 1 "
       "tasks at SLURM_NODEID=0"},
      {SLURM_2 "SLURM_LOCALID=3 SLURM_STEP_TASKS_PER_NODE=2", "SLURM_LOCALID=3 in the environment: must be a number"},
      {"LIBDC_LAUNCHER=mpi", "LIBDC_LAUNCHER=mpi in the environment: must be environment, openmpi"},
      {"LIBDC_LAUNCHER=slurm", "LIBDC_LAUNCHER=slurm, but SLURM_STEP_NUM_TASKS is not in the environment"},
  };
  for (size_t i = 0; i < DC__COUNT(wrong); i++) {
    dc_launch launch = DC_LAUNCH_INIT;
    set_environment(wrong[i][0]);
    assert_int_equal(dc_launch_get(&launch), DC_E_INVALID);
    if (strstr(dc_last_error(), wrong[i][1]) == NULL) {
      fail_msg("%s said \"%s\", expected \"%s\"", wrong[i][0], dc_last_error(), wrong[i][1]);
    }
    assert_null(launch.launcher);
  }
  char name[100];
  dc_launch launch = {.struct_size = 8};
  memset(name, 'g', sizeof name - 1);
  name[sizeof name - 1] = '\0';
  set_environment(TORCHRUN);
  setenv("LIBDC_GROUP", name, 1);
  assert_int_equal(dc_launch_get(NULL), DC_E_INVALID);
  assert_int_equal(dc_launch_get(&launch), DC_E_INVALID);
  launch.struct_size = sizeof launch;
  assert_int_equal(dc_launch_get(&launch), DC_E_INVALID);
  assert_non_null(strstr(dc_last_error(), "LIBDC_GROUP in the environment has more than 64 bytes"));
}

/* The number of ranks that MPI must report, also in a process with RANK. */
static void test_the_ranks_of_mpi(void **state) {
  (void)state;
  static const struct {
    const char *words;
    int32_t size;
  } all[] = {{TORCHRUN, 0}, {TORCHRUN OPEN_MPI, 6}, {HYDRA, 4}, {SLURM, 8}, {FLUX, 4}, {"PMI_SIZE=x PMI_RANK=0", 0}};
  for (size_t i = 0; i < DC__COUNT(all); i++) {
    set_environment(all[i].words);
    assert_int_equal(dc__launch_mpi_size(), all[i].size);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_each_launcher_is_read), cmocka_unit_test(test_the_order),
      cmocka_unit_test(test_slurm_s_lists),         cmocka_unit_test(test_groups),
      cmocka_unit_test(test_wrong_values),          cmocka_unit_test(test_the_ranks_of_mpi),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
