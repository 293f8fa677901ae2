/* The counting device has the memory and wire bytes of ranks over MPI. This program is both the test and a rank. */
#include "mpi_launchers.h"

#include "../count/compare.h"

enum { MOST_RANKS = 3 };

/* Each rank compares itself. One schedule a stage, or all with COUNT_ALL=1. */
static int compare_as_rank(void) {
  dc_comm *comm = NULL;
  const bool all = getenv("COUNT_ALL") != NULL;
  if (dc_comm_create_mpi(NULL, &comm) != DC_OK) {
    printf("%s\n", dc_last_error());
    return 1;
  }
  const int32_t number = dc_comm_rank(comm), world = dc_comm_size(comm);
  schedule_job *computed = calloc(1, sizeof *computed), *counted = calloc(1, sizeof *counted);
  for (int32_t cell = 0; cell < 4 * world * CHOICES; cell++) {
    const int32_t choice = cell % CHOICES, stage = cell / CHOICES % 4, replicas = cell / CHOICES / 4 + 1;
    const bool chosen = choice == (world * 7 + stage * 5) % CHOICES && replicas == (stage % 2 == 0 ? 1 : world);
    if (world % replicas == 0 && (all || chosen)) {
      computed->s = counted->s = schedule_of(stage, replicas, choice);
      const setup s = setup_of(&computed->s, world, choice);
      rank r = {.rank = number, .world = world, .user = computed};
      dc_status status = dc_comm_dup(comm, &r.comm);
      status = status == DC_OK ? dc_device_open("cpu", NULL, &r.device) : status;
      live(&r, &s, schedule_run, status);
      if (r.failure[0] != '\0') {
        printf("%s\n", r.failure);
        return 1;
      }
      count_rank(counted, s, number, 0);
      if (!compare_stats(computed, counted, world, number, "mpi")) {
        return 1;
      }
    }
  }
  free(computed);
  free(counted);
  dc_comm_destroy(comm);
  printf("rank %d of %d is alike\n", number, world);
  return 0;
}

/* COUNT_RANKS=8 takes as many ranks. */
static void test_statistics_are_those_of_ranks_over_mpi(void **state) {
  char output[OUTPUT], expected[64];
  const int32_t ranks = getenv("COUNT_RANKS") != NULL ? atoi(getenv("COUNT_RANKS")) : MOST_RANKS;
  (void)state;
  skip_without_launchers();
  for (size_t i = 0; i < sizeof launchers / sizeof launchers[0]; i++) {
    int status = is_there(&launchers[i]) ? launch_ranks(&launchers[i], ranks, "rank", false, output) : -1;
    for (int32_t number = 0; number < ranks && status != -1; number++) {
      snprintf(expected, sizeof expected, "rank %d of %d is alike", number, ranks);
      if (status != 0 || strstr(output, expected) == NULL) {
        fail_msg("%s: status %d, said: %s", launchers[i].program, status, output);
      }
    }
    printf("%s", status == 0 && getenv("COUNT_TABLE") != NULL ? output : "");
  }
}

int main(int argc, char **argv) {
  if (argc > 1) {
    return compare_as_rank();
  }
  set_own_path(argv[0]);
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_statistics_are_those_of_ranks_over_mpi)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
