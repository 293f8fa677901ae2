/* libdc doctor: a self-test that names the broken part, or the diagnosis of the dumps of a run. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tool.h"

/* ---- ranks ---- */

static void run_job_check(finding *f, int ranks, const char *name, bool processes, const char *what) {
  char text[SENTENCE];
  const job *j = find_job(name);
  if (processes ? run_processes(j, ranks, "", text, sizeof text) : run_threads(j, ranks, "", text, sizeof text)) {
    report_finding(f, CHECK_OK, "%d rank%s, %s", ranks, plural_s(ranks), what);
  } else {
    report_finding(f, CHECK_FAILED, "%.900s", text);
  }
}

static const char every_bit[] = "7 types, 4 sizes, 4 collectives: every bit is right";
static const char every_step[] = "3 steps: gathered weights and reduced gradients are right to the bit";

static void collectives_threads(finding *f, int ranks) {
  run_job_check(f, ranks, "collectives", false, every_bit);
}

static void collectives_processes(finding *f, int ranks) {
  run_job_check(f, ranks, "collectives", true, every_bit);
}

static void zero3_threads(finding *f, int ranks) {
  run_job_check(f, ranks, "zero3", false, every_step);
}

static void zero3_processes(finding *f, int ranks) {
  run_job_check(f, ranks, "zero3", true, every_step);
}

/* ---- Python ---- */

enum { NOT_RUN = -1, TOO_LONG = -2, KILLED = -3 };

/* Runs a program and keeps `bytes` of its standard output. Returns the exit status, NOT_RUN, TOO_LONG, or KILLED less
 * the signal's number. */
static int capture_output(const char *const *argv, int64_t job_timeout_ns, char *text, size_t bytes) {
  int fds[2];
  pid_t pid;
  size_t used = 0;
  int status = 0;
  bool late = false;
  text[0] = '\0';
  if (pipe2(fds, O_CLOEXEC) != 0) {
    return NOT_RUN;
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fds[1], STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  int error = posix_spawnp(&pid, argv[0], &actions, NULL, (char *const *)(uintptr_t)argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(fds[1]);
  int64_t end = now_ns() + job_timeout_ns;
  for (bool more = error == 0; more;) {
    struct pollfd p = {.fd = fds[0], .events = POLLIN};
    int64_t left = end - now_ns();
    int ready = left <= 0 ? 0 : poll(&p, 1, (int)(left / 1000000) + 1);
    ssize_t n = ready > 0 && used + 1 < bytes ? read(fds[0], text + used, bytes - 1 - used) : 0;
    used += n > 0 ? (size_t)n : 0;
    more = n > 0 || (ready < 0 && errno == EINTR);
    if (ready == 0) {
      late = true;
      kill(pid, SIGKILL);
    }
  }
  text[used] = '\0';
  close(fds[0]);
  if (error != 0) {
    return NOT_RUN;
  }
  waitpid(pid, &status, 0);
  return late ? TOO_LONG : WIFEXITED(status) ? WEXITSTATUS(status) : KILLED - WTERMSIG(status);
}

/* The program's output is the finding; exit status 2 means that the package is not installed. */
static void check_python(finding *f, const char *what, const char *program) {
  char text[SENTENCE];
  const char *python = getenv("LIBDC_PYTHON");
  const char *argv[] = {python == NULL ? "python3" : python, "-c", program, NULL};
  enum { LIMIT_S = 100 }; /* PyTorch is large: on a busy machine with a cold disk its import takes a minute */
  int status = capture_output(argv, INT64_C(1000000000) * LIMIT_S, text, sizeof text);
  text[strcspn(text, "\n")] = '\0';
  if (status == 0) {
    report_finding(f, CHECK_OK, "%s", text);
  } else if (status == 2 && text[0] != '\0') {
    report_finding(f, CHECK_ABSENT, "%s", text);
  } else if (status == TOO_LONG) {
    report_finding(f, CHECK_FAILED, "%s: %s does not end in %d s", what, argv[0], LIMIT_S);
  } else if (status == 127 || status == NOT_RUN) {
    report_finding(f, CHECK_ABSENT, "%s can't be run", argv[0]);
  } else if (status < KILLED) {
    report_finding(f, CHECK_FAILED, "%s: %s was killed by signal %d (%s)", what, argv[0], KILLED - status,
                   strsignal(KILLED - status));
  } else {
    report_finding(f, CHECK_FAILED, "%s: %.900s", what, text[0] == '\0' ? "no word" : text);
  }
}

static void python_package(finding *f, int ranks) {
  (void)ranks;
  check_python(f, "import libdc",
               "import sys\n"
               "try:\n"
               "  import libdc\n"
               "except ModuleNotFoundError as e:\n"
               "  print(f'{sys.executable} has no package {e.name}'); sys.exit(2)\n"
               "except BaseException as e:\n"
               "  print(f'{type(e).__name__}: {e}'); sys.exit(1)\n"
               "print(f'libdc {libdc.__version__} in {sys.executable}')\n");
}

static void torch_adapter(finding *f, int ranks) {
  (void)ranks;
  check_python(f, "import libdc.torch",
               "import sys\n"
               "try:\n"
               "  import libdc, torch\n"
               "except ModuleNotFoundError as e:\n"
               "  print(f'{sys.executable} has no package {e.name}'); sys.exit(2)\n"
               "except BaseException as e:\n"
               "  print(f'{type(e).__name__}: {e}'); sys.exit(1)\n"
               "try:\n"
               "  import libdc.torch\n"
               "except BaseException as e:\n"
               "  print(f'{type(e).__name__}: {e}'); sys.exit(1)\n"
               "print(f'the adapter works with PyTorch {torch.__version__}')\n");
}

/* ---- the self-test ---- */

static const check rank_checks[] = {{"collectives, ranks as threads", collectives_threads},
                                    {"collectives, ranks as processes", collectives_processes},
                                    {"ZeRO-3 step, ranks as threads", zero3_threads},
                                    {"ZeRO-3 step, ranks as processes", zero3_processes},
                                    {"Python package", python_package},
                                    {"PyTorch adapter", torch_adapter},
                                    {NULL, NULL}};

static const char *const states[] = {[CHECK_OK] = "ok", [CHECK_FAILED] = "BROKEN", [CHECK_ABSENT] = "absent"};

typedef struct tally {
  json j;
  bool as_json, live; /* live: a terminal shows the running check */
  int count[COUNT(states)];
} tally;

static void run_check(tally *t, const check *c, int ranks) {
  finding f = {CHECK_OK, ""};
  if (t->live) {
    fprintf(stderr, "\r\033[K... %s", c->name);
    fflush(stderr);
  }
  int64_t begin = now_ns();
  c->run(&f, ranks);
  double seconds = (double)(now_ns() - begin) / 1e9;
  if (t->live) {
    fputs("\r\033[K", stderr);
  }
  t->count[f.state]++;
  if (t->as_json) {
    json_open(&t->j, NULL, '{');
    json_text(&t->j, "check", c->name);
    json_text(&t->j, "state", states[f.state]);
    json_text(&t->j, "text", f.text);
    json_number(&t->j, "seconds", seconds);
    json_close(&t->j, '}');
  } else {
    printf("%-7s %-32s %s\n", states[f.state], c->name, f.text);
    (void)fflush(stdout); /* main() checks that it was written */
  }
}

static int self_test(const args *a) {
  int64_t ranks = number_of(a, "--ranks", 2);
  tally t = {.j = {.file = stdout}, .as_json = has_option(a, "--json"), .live = isatty(STDERR_FILENO) == 1};
  if (t.as_json) {
    json_open(&t.j, NULL, '{');
    json_open(&t.j, "checks", '[');
  }
  for (const check *c = machine_checks; c->name != NULL; c++) {
    run_check(&t, c, (int)ranks);
  }
  for (const check *c = rank_checks; c->name != NULL; c++) {
    run_check(&t, c, (int)ranks);
  }
  if (t.as_json) {
    json_close(&t.j, ']');
    for (size_t i = 0; i < COUNT(states); i++) {
      json_int(&t.j, states[i], t.count[i]);
    }
    json_close(&t.j, '}');
  } else {
    printf("%d ok, %d broken, %d absent\n", t.count[CHECK_OK], t.count[CHECK_FAILED], t.count[CHECK_ABSENT]);
  }
  return t.count[CHECK_FAILED] > 0 ? EXIT_FAILED : EXIT_OK;
}

/* ---- the diagnosis ---- */

/* Names and errors out of files, which must not move a terminal's cursor or add lines. */
static void print_sentence(const char *sentence) {
  for (; *sentence != '\0'; sentence++) {
    unsigned char c = (unsigned char)*sentence;
    putchar(c < 0x20 || c == 0x7f ? '?' : c);
  }
  putchar('\n');
}

static int print_diagnosis(const args *a, const char *folder) {
  dumps d;
  diagnosis v;
  if (!dumps_read(a, "--dump", folder, &d)) {
    return EXIT_UNAVAILABLE;
  }
  diagnose(&d, &v);
  if (has_option(a, "--json")) {
    json j = {.file = stdout};
    json_open(&j, NULL, '{');
    json_text(&j, "diagnosis", v.kind);
    json_text(&j, "text", v.sentence);
    json_open(&j, "ranks", '[');
    for (int r = 0; r < d.world; r++) {
      if (v.culprits[r]) {
        json_int(&j, NULL, r);
      }
    }
    json_close(&j, ']');
    json_int(&j, "world", d.world);
    json_int(&j, "dumps", d.count);
    json_close(&j, '}');
  } else {
    print_sentence(v.sentence);
  }
  dumps_free(&d);
  return strcmp(v.kind, "same") == 0 ? EXIT_OK : EXIT_FAILED;
}

int run_doctor(const args *a) {
  const char *folder = value_of(a, "--dump");
  if (folder != NULL && has_option(a, "--ranks")) {
    return report_error(a, EXIT_USAGE, "--ranks = %s is for the tests; --dump = %s takes its ranks from the files",
                        value_of(a, "--ranks"), folder);
  }
  return folder == NULL ? self_test(a) : print_diagnosis(a, folder);
}
