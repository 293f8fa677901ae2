/* Which process an object belongs to, with fork(). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/base.h"

/* Forks a child. Returns 0 if the child sees that the owner is another process, and its error says so. */
static int seen_in_child(const dc__owner *owner) {
  const pid_t child = fork();
  if (child == 0) {
    const bool refused = dc__owner_check("dc_f", "context", owner) == DC_E_STATE &&
                         strstr(dc_last_error(), "dc_f: the context belongs to process") != NULL;
    _exit(dc__owner_is_forked(owner) && refused ? 0 : 1);
  }
  int status = -1;
  assert_int_equal(waitpid(child, &status, 0), child);
  return status;
}

static void test_children(void **state) {
  (void)state;
  dc__owner owner;
  dc__owner_init(&owner);
  assert_false(dc__owner_is_forked(&owner));
  assert_int_equal(dc__owner_check("dc_f", "context", &owner), DC_OK);
  assert_int_equal(seen_in_child(&owner), 0);
  assert_false(dc__owner_is_forked(&owner)); /* in the parent nothing has changed */
  dc__owner_destroy(&owner);
  const dc__owner by_number = {.pid = getpid()}; /* for kernels that cannot empty a page in the child */
  assert_int_equal(seen_in_child(&by_number), 0);
  const dc__owner none = {0};
  assert_false(dc__owner_is_forked(&none));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_children),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
