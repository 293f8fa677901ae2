/* Descriptors where a program has closed its standard streams. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/base.h"

static int run_in_child(bool (*passes)(void)) {
  int status = -1;
  pid_t child = fork();
  if (child == 0) {
    _exit(passes() ? 0 : 1);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  return status;
}

static bool moves(void) {
  bool passes = true;
  for (int closed = STDIN_FILENO; closed <= STDERR_FILENO; closed++) {
    close(closed);
    int fd = dc__above_streams(open("/dev/zero", O_RDONLY));
    passes = passes && fd > STDERR_FILENO && fcntl(closed, F_GETFD) < 0 && (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0;
  }
  return passes;
}

static bool finds_no_other(void) {
  const struct rlimit limit = {1, 1};
  close(STDIN_FILENO);
  int fd = open("/dev/zero", O_RDONLY);
  return fd == STDIN_FILENO && setrlimit(RLIMIT_NOFILE, &limit) == 0 && dc__above_streams(fd) == -1 && errno != 0 &&
         fcntl(STDIN_FILENO, F_GETFD) < 0;
}

static void test_closed_streams(void **state) {
  (void)state;
  assert_int_equal(run_in_child(moves), 0);
  assert_int_equal(run_in_child(finds_no_other), 0);
}

static void test_others_stay(void **state) {
  (void)state;
  assert_int_equal(dc__above_streams(-1), -1);
  assert_int_equal(dc__above_streams(77), 77);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_closed_streams), cmocka_unit_test(test_others_stay)};
  return cmocka_run_group_tests_name("descriptor", tests, NULL, NULL);
}
