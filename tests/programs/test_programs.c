/* Random programs, legal and illegal, on the platform that this is linked with (program.h).
 *
 *   programs_sim, programs_threads                    as many as 9 s and 5 s are enough for, legal and illegal
 *   SIM_PROGRAMS=100000 SIM_SEED=1 programs_sim           so many legal ones, from a seed on
 *   SIM_ILLEGAL=100000 SIM_SEED=1 programs_threads        so many illegal ones */
#include "comm/comm.h"
#include "program.h"

static uint64_t setting(const char *name, uint64_t usual) {
  const char *text = getenv(name);
  return text == NULL || text[0] == '\0' ? usual : strtoull(text, NULL, 10);
}

static bool given(const char *name) {
  return setting(name, 0) > 0;
}

/* By default runs as many programs as the time allows, since they are slow under sanitizers and valgrind. */
static void run(const char *name, bool illegal, uint64_t usual, int64_t limit_ns) {
  if (!given(name) && (given("SIM_PROGRAMS") || given("SIM_ILLEGAL"))) {
    return; /* the other kind was requested */
  }
  uint64_t first = setting("SIM_SEED", 1), count = setting(name, usual);
  int64_t end = given(name) ? INT64_MAX : dc__now_ns() + limit_ns;
  program_spec spec = {.seed = first, .illegal = illegal};
  for (; spec.seed < first + count && (dc__now_ns() < end || spec.seed < first + 10); spec.seed++) {
    const char *failure = run_seed(&spec);
    if (failure[0] != '\0') {
      fail_msg("%s", failure);
    }
  }
  print_message("%" PRIu64 " %s programs on %s\n", spec.seed - first, illegal ? "illegal" : "legal", ground_name);
}

/* conformance: 122 */
static void test_legal_programs(void **state) {
  (void)state;
  run("SIM_PROGRAMS", false, 3000, INT64_C(9000000000));
}

static void test_illegal_programs(void **state) {
  (void)state;
  run("SIM_ILLEGAL", true, 1000, INT64_C(5000000000));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_legal_programs),
      cmocka_unit_test(test_illegal_programs),
  };
  return cmocka_run_group_tests_name("programs", tests, NULL, NULL);
}
