/* Ranks as threads of this process, or as processes that run this very program again. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tool.h"

static const int64_t rank_timeout_ns = INT64_C(20000000000); /* a rank that does not join is a fault */
static const int64_t job_timeout_ns = INT64_C(100000000000); /* all of a job that does not last as long as it is told */

int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

bool rank_fail(rank *r, const char *format, ...) {
  va_list list;
  size_t used = (size_t)snprintf(r->text, sizeof r->text, "rank %d of %d: ", r->rank, r->world);
  va_start(list, format);
  vsnprintf(r->text + used, sizeof r->text - used, format, list);
  va_end(list);
  return false;
}

static dc_comm_options timeout_options(void) {
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  options.timeout_ns = rank_timeout_ns;
  return options;
}

const job *find_job(const char *name) {
  static const job jobs[] = {
      {"collectives", check_collectives, false}, {"zero3", check_zero3, false}, {"bench", bench_rank, true}};
  for (size_t i = 0; i < COUNT(jobs); i++) {
    if (strcmp(jobs[i].name, name) == 0) {
      return &jobs[i];
    }
  }
  return NULL;
}

/* ---- threads ---- */

typedef struct rank_thread {
  rank r;
  const job *j;
  pthread_t id;
  bool ok;
} rank_thread;

static void *run_thread(void *arg) {
  rank_thread *t = arg;
  t->ok = t->j->run(&t->r);
  if (!t->ok) {
    dc_comm_abort(t->r.comm, t->r.text); /* the other ranks need not wait for this one */
  }
  return NULL;
}

/* A failure that another rank caused is not reported. */
static bool is_secondary_failure(const char *text) {
  return strstr(text, "aborted the group") != NULL;
}

bool run_threads(const job *j, int world, const char *argument, char *text, size_t bytes) {
  dc_comm *comms[64];
  dc_comm_options options = timeout_options();
  if (dc_comm_create_threads(world, &options, comms) != DC_OK) {
    snprintf(text, bytes, "%s", dc_last_error());
    return false;
  }
  rank_thread *threads = calloc((size_t)world, sizeof *threads);
  int started = 0;
  for (; threads != NULL && started < world; started++) {
    threads[started] =
        (rank_thread){.r = {.rank = started, .world = world, .comm = comms[started], .argument = argument}, .j = j};
    if (pthread_create(&threads[started].id, NULL, run_thread, &threads[started]) != 0) {
      break;
    }
  }
  if (started < world) {
    snprintf(text, bytes, "no memory or no thread to be had for rank %d", started);
    dc_comm_abort(comms[0], text);
  }
  bool ok = started == world;
  for (int i = 0; i < started; i++) {
    pthread_join(threads[i].id, NULL);
    bool first = !threads[i].ok && (ok || is_secondary_failure(text));
    if (first || (ok && i == 0)) {
      snprintf(text, bytes, "%s", threads[i].r.text);
    }
    ok = ok && threads[i].ok;
  }
  for (int i = 0; i < world; i++) {
    dc_comm_destroy(comms[i]);
  }
  free(threads);
  return ok;
}

/* ---- processes ---- */

typedef struct rank_process {
  pid_t pid; /* 0: not there */
  int out;   /* the pipe of its output; -1: closed */
  size_t used;
  char text[4096];
  int status;
} rank_process;

/* A rank ends with the process that started it, which the group's name has the number of. */
static void rank_end_with_starter(const char *group) {
  long starter;
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (sscanf(group, "dc.%ld.", &starter) == 1 && starter != (long)getppid()) { /* it ended before that counted */
    _exit(EXIT_FAILED);
  }
}

int run_as_rank(int argc, char **argv) {
  if (argc != 5) {
    return EXIT_USAGE;
  }
  rank_end_with_starter(argv[1]);
  rank r = {.rank = atoi(argv[2]), .world = atoi(argv[3]), .argument = argv[4]};
  const job *j = find_job(argv[0]);
  dc_comm_options options = timeout_options();
  bool ok = j != NULL;
  if (ok && dc_comm_create_processes(argv[1], r.rank, r.world, &options, &r.comm) != DC_OK) {
    ok = rank_fail(&r, "%s", dc_last_error());
  }
  if (ok && !j->run(&r)) {
    ok = false;
    dc_comm_abort(r.comm, r.text);
  }
  dc_comm_destroy(r.comm);
  fputs(r.text, stdout);
  return fflush(stdout) == 0 && ok ? EXIT_OK : EXIT_FAILED;
}

static int start_process(rank_process *p, const job *j, const char *group, int number, int world,
                         const char *argument) {
  int pipe_fds[2];
  char rank_text[12];
  char world_text[12];
  snprintf(rank_text, sizeof rank_text, "%d", number);
  snprintf(world_text, sizeof world_text, "%d", world);
  const char *argv[] = {"libdc", "@rank", j->name, group, rank_text, world_text, argument, NULL};
  if (pipe2(pipe_fds, O_CLOEXEC) != 0) { /* a later rank must not hold it open */
    return errno;
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], STDOUT_FILENO);
  int error = posix_spawn(&p->pid, "/proc/self/exe", &actions, NULL, (char *const *)(uintptr_t)argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(pipe_fds[1]);
  if (error != 0) {
    p->pid = 0;
    close(pipe_fds[0]);
    return error;
  }
  p->out = pipe_fds[0];
  return 0;
}

/* Reads the output of the processes until all have ended, or the deadline has passed. That of a job which lasts as long
 * as it is told begins when the first one ends: before, the ranks' collectives find one that hangs. */
static bool read_outputs(rank_process *all, int world, bool lasts) {
  int64_t end = lasts ? INT64_MAX : now_ns() + job_timeout_ns;
  for (;;) {
    struct pollfd polls[64];
    int count = 0;
    int ready[64];
    for (int i = 0; i < world; i++) {
      if (all[i].out >= 0) {
        ready[count] = i;
        polls[count++] = (struct pollfd){.fd = all[i].out, .events = POLLIN};
      }
    }
    int64_t left = end - now_ns();
    if (count == 0 || left <= 0) {
      return count == 0;
    }
    left = left > job_timeout_ns ? job_timeout_ns : left;
    if (poll(polls, (nfds_t)count, (int)(left / 1000000) + 1) < 0 && errno != EINTR) {
      return false;
    }
    for (int k = 0; k < count; k++) {
      rank_process *p = &all[ready[k]];
      ssize_t n = polls[k].revents == 0 ? 1 : read(p->out, p->text + p->used, sizeof p->text - 1 - p->used);
      if (polls[k].revents != 0 && n > 0) {
        p->used += (size_t)n;
      } else if (n <= 0) {
        close(p->out);
        p->out = -1;
        end = end == INT64_MAX ? now_ns() + job_timeout_ns : end;
      }
    }
  }
}

bool run_processes(const job *j, int world, const char *argument, char *text, size_t bytes) {
  static int made;
  char group[64];
  snprintf(group, sizeof group, "dc.%ld.%d", (long)getpid(), made++);
  rank_process *all = calloc((size_t)world, sizeof *all);
  if (all == NULL) {
    snprintf(text, bytes, "out of memory");
    return false;
  }
  int error = 0;
  for (int i = 0; i < world; i++) {
    all[i].out = -1;
    error = error != 0 ? error : start_process(&all[i], j, group, i, world, argument);
  }
  bool in_time = error == 0 && read_outputs(all, world, j->lasts);
  bool ok = in_time;
  snprintf(text, bytes, "%s", error != 0 ? strerror(error) : in_time ? all[0].text : "the ranks' processes do not end");
  for (int i = 0; i < world; i++) {
    if (all[i].pid != 0) {
      if (!in_time) {
        kill(all[i].pid, SIGKILL);
      }
      waitpid(all[i].pid, &all[i].status, 0);
      if (all[i].out >= 0) {
        close(all[i].out);
      }
    }
    bool fine = all[i].pid != 0 && WIFEXITED(all[i].status) && WEXITSTATUS(all[i].status) == EXIT_OK;
    if (in_time && !fine && (ok || is_secondary_failure(text))) {
      snprintf(text, bytes, all[i].text[0] != '\0' ? "%s" : "the process of a rank ended without a word%s",
               all[i].text);
    }
    ok = ok && fine;
  }
  free(all);
  return ok;
}
