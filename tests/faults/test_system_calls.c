/* Every resource that the library asks the system for, and every collective, is refused once: the n-th of its kind for
 * every n. The ranks are one, two threads, or two processes. The call reports it and can be repeated, or every rank's
 * group has failed. No value is wrong, nothing leaks, and the next group works. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "entries.h"
#include "scenario.h"
#include "system_calls.h"

#include "leftovers.h"
#include "sanitized.h"

enum { MOST = 2, FOREVER = 100000, HANG_S = 300 };

/* Sanitizers make a run slow, so only every third request is refused. */
#ifdef SANITIZED
enum { NEXT = 3 };
#else
enum { NEXT = 1 };
#endif

static const int64_t limit_ns = INT64_C(3500000000000); /* no wait reaches it, except for a rank that never comes */
static char folder[] = "/tmp/libdc-refused-XXXXXX";

typedef struct job {
  dc_comm *comm;
  ending end;
} job;

static void *run_thread(void *arg) {
  job *j = arg;
  j->end = scenario_run(j->comm, folder);
  return NULL;
}

/* Waits for the count, since a stream's thread may still be ending. */
static int thread_count(int expected) {
  int count = entries("/proc/self/task");
  for (int i = 0; i < 12000 && count != expected; i++) {
    const struct timespec pause = {0, 5000000};
    nanosleep(&pause, NULL);
    count = entries("/proc/self/task");
  }
  return count;
}

/* Returns "", or how the ranks' endings were wrong. */
static const char *check_endings(const ending *ends, int world, bool refused) {
  static char text[1500];
  for (int i = 0; i < world; i++) {
    if (strncmp(ends[i].text, "wrong: ", 7) == 0 && (ends[i].last != DC_OK || refused)) {
      return ends[i].text;
    }
    if (!refused && ends[i].last != DC_OK) {
      snprintf(text, sizeof text, "nothing was refused: %s", ends[i].text);
      return text;
    }
  }
  /* If a rank has passed the last barrier, the other may still fail there. */
  if (world == 2 && (ends[0].last == DC_OK) != (ends[1].last == DC_OK) &&
      strncmp(ends[ends[0].last == DC_OK].text, "dc_comm_barrier", 15) != 0) {
    snprintf(text, sizeof text, "one rank alone ended: %s / %s", ends[0].text, ends[1].text);
    return text;
  }
  return "";
}

/* Returns whether anything was refused. *failed: ranks ended with an error. */
static bool run_threads(int world, fault_kind kind, long n, bool *failed) {
  dc_comm *comms[MOST] = {NULL};
  job jobs[MOST];
  pthread_t threads[MOST];
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  options.timeout_ns = limit_ns;
  long before = fault_held_resources();
  int tasks = entries("/proc/self/task");
  fault_inject(kind, n);
  dc_status status = dc_comm_create_threads(world, &options, comms);
  if (status != DC_OK) {
    assert_non_null(fault_injected());
    assert_int_not_equal(dc_last_error()[0], '\0');
    status = dc_comm_create_threads(world, &options, comms);
  }
  assert_int_equal(status, DC_OK);
  for (int i = 0; i < world; i++) {
    jobs[i].comm = comms[i];
    while (pthread_create(&threads[i], NULL, run_thread, &jobs[i]) != 0) {
    }
  }
  ending ends[MOST];
  for (int i = 0; i < world; i++) {
    pthread_join(threads[i], NULL);
    ends[i] = jobs[i].end;
  }
  const char *refused = fault_injected();
  fault_inject(kind, -1);
  const char *wrong = check_endings(ends, world, refused != NULL);
  if (wrong[0] != '\0' || thread_count(tasks) != tasks || fault_held_resources() != before) {
    fail_msg("%s %ld of %d ranks (%s): %s; %ld held, %d threads more than before", fault_names[kind], n, world,
             refused == NULL ? "none" : refused, wrong, fault_held_resources() - before,
             entries("/proc/self/task") - tasks);
  }
  *failed = ends[0].last != DC_OK;
  return refused != NULL;
}

static void on_threads(int world, fault_kind kind) {
  long n = 0, failures = 0;
  bool failed = false;
  while (run_threads(world, kind, n, &failed)) {
    failures += failed;
    n += NEXT;
  }
  print_message("%s: %ld refused one by one, %d rank(s): %ld groups failed\n", fault_names[kind], n / NEXT, world,
                failures);
}

static void *nothing(void *arg) {
  return arg;
}

static void test_threads(void **state) {
  (void)state;
  bool failed;
  pthread_t first; /* a sanitizer may start a thread of its own with the first one */
  assert_int_equal(pthread_create(&first, NULL, nothing, NULL), 0);
  pthread_join(first, NULL);
  (void)run_threads(MOST, FAULT_MEMORY, -1, &failed); /* fills the caches of libraries */
  for (int world = 1; world <= MOST; world++) {
    on_threads(world, FAULT_MEMORY);
    on_threads(world, FAULT_THREAD);
    on_threads(world, FAULT_COLLECTIVE);
  }
  on_threads(1, FAULT_FILE); /* files of the dump */
}

/* ---- processes ---- */

typedef struct report {
  ending end;
  bool refused;
  char function[32];
} report;

/* Shared by the two processes of a group. */
typedef struct group_reports {
  report ranks[2];
  atomic_bool peer_is_missing; /* one of them could not make its group, so the other waits in vain */
} group_reports;

static void run_child(group_reports *shared, const char *name, int rank, bool refuses, fault_kind kind, long n) {
  report *r = &shared->ranks[rank];
  alarm(HANG_S);
  long before = fault_held_resources();
  int descriptors = entries("/proc/self/fd");
  fault_hurry_clock(&shared->peer_is_missing);
  fault_inject(kind, refuses ? n : -1);
  r->end = scenario_run_process(name, rank, 2, limit_ns);
  if (!r->end.made) {
    atomic_store(&shared->peer_is_missing, true);
  }
  r->refused = fault_injected() != NULL;
  snprintf(r->function, sizeof r->function, "%s", r->refused ? fault_injected() : "none");
  fault_inject(kind, -1);
  if (fault_held_resources() != before || entries("/proc/self/fd") != descriptors) {
    snprintf(r->end.text, sizeof r->end.text, "wrong: %ld held, %d descriptors more", fault_held_resources() - before,
             entries("/proc/self/fd") - descriptors);
    r->end.last = DC_E_INTERNAL;
  }
  exit(0); /* runs the leak sanitizer */
}

/* A group in which one rank has a request refused. */
typedef struct group {
  fault_kind kind;
  long n;
  int culprit;
  pid_t children[2];
  group_reports *shared;
} group;

static void start_group(group *g, fault_kind kind, long n, int culprit, group_reports *shared) {
  static int groups;
  char name[64];
  *g = (group){.kind = kind, .n = n, .culprit = culprit, .shared = shared};
  snprintf(name, sizeof name, "libdc-refused-%d-%d", (int)getpid(), groups++);
  memset(shared, 0, sizeof *shared);
  fflush(NULL);
  for (int i = 0; i < 2; i++) {
    g->children[i] = fork();
    assert_true(g->children[i] >= 0);
    if (g->children[i] == 0) {
      run_child(shared, name, i, i == culprit, kind, n);
    }
  }
}

/* Returns whether anything was refused. */
static bool end_group(const group *g, long *failures) {
  const report *r = &g->shared->ranks[g->culprit];
  for (int i = 0; i < 2; i++) {
    int status;
    assert_int_equal(waitpid(g->children[i], &status, 0), g->children[i]);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      fail_msg("%s %ld of rank %d (%s): rank %d ended with %#x", fault_names[g->kind], g->n, g->culprit, r->function, i,
               (unsigned)status);
    }
  }
  const ending ends[2] = {g->shared->ranks[0].end, g->shared->ranks[1].end};
  const char *wrong = check_endings(ends, 2, r->refused);
  if (wrong[0] != '\0') {
    fail_msg("%s %ld of rank %d (%s): %s", fault_names[g->kind], g->n, g->culprit, r->function, wrong);
  }
  *failures += ends[0].last != DC_OK;
  return r->refused;
}

static void on_processes(fault_kind kind, long most) {
  group_reports *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(shared != MAP_FAILED);
  for (int culprit = 0; culprit < 2; culprit++) {
    long n = 0, failures = 0;
    for (bool more = true; more && n < most; n += more ? NEXT : 0) {
      group g;
      start_group(&g, kind, n, culprit, shared);
      more = end_group(&g, &failures);
    }
    print_message("%s: %ld refused one by one, rank %d of 2 processes: %ld groups failed\n", fault_names[kind],
                  n / NEXT, culprit, failures);
  }
  munmap(shared, sizeof *shared);
}

static void test_processes(void **state) {
  (void)state;
  on_processes(FAULT_FILE, FOREVER);
  on_processes(FAULT_SOCKET, 32);  /* later calls check whether the other rank lives, as often as it waits */
  on_processes(FAULT_SYSCALL, 16); /* only the first of the sleeps and wakes */
  on_processes(FAULT_COLLECTIVE, FOREVER);
  on_processes(FAULT_MEMORY, 40); /* later requests are those of the test with threads */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_threads),
      cmocka_unit_test(test_processes),
  };
  if (mkdtemp(folder) == NULL) {
    return 1;
  }
  int failed = cmocka_run_group_tests_name("system_calls", tests, leftovers_note, leftovers_compare);
  char file[64];
  for (int i = 0; i < MOST; i++) {
    snprintf(file, sizeof file, "%s/rank-%d.json", folder, i);
    (void)unlink(file);
  }
  return rmdir(folder) == 0 || errno == ENOENT ? failed : 1;
}
