/* Waits for MPI's requests. MPI reports neither a missing rank nor a timeout, and a started collective cannot be
 * cancelled. So requests are tested, with pauses that grow, and between tests the control communicator and the deadline
 * are checked. */
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "comm/mpi/mpi.h"

enum {
  SPINS = 200,            /* tests without a pause */
  YIELDS = 2000,          /* tests that yield the processor; then they sleep */
  LONGEST_NS = 200000,    /* the longest sleep, unless */
  SHARE = 1000,           /* a late rank's message is waited for: then a sleep may take this share of the wait so far */
  CHECK_NS = 5000000,     /* between checks of the control communicator */
  VERDICT_NS = 2000000000 /* how long an error of MPI waits for the control communicator to report its cause */
};

static dc_status check_control(const dc__mpi_wait *wait) {
  if (wait->control == NULL) {
    return DC_OK;
  }
  if (wait->control->ops->check_peers != NULL) {
    wait->control->ops->check_peers(wait->control);
  }
  return dc__comm_check(wait->control);
}

/* MPICH's text is a stack of lines: the first one names the error's class, and the last one the reason. */
static void keep_class_and_reason(char *text) {
  for (size_t length = strlen(text); length > 0 && text[length - 1] == '\n'; length--) {
    text[length - 1] = '\0';
  }
  char *first = strchr(text, '\n'), *last = strrchr(text, '\n');
  if (last != NULL) {
    memmove(first, last, strlen(last) + 1);
    *first = ' ';
  }
}

static dc_status fail_call(const dc__mpi_wait *wait, const char *call, int error) {
  char text[8192] = "";
  int length = 0;
  int64_t until = dc__now_ns() + VERDICT_NS;
  while (wait->control != NULL && wait->control->world > 1 && dc__now_ns() < until) {
    DC__TRY(check_control(wait));
    nanosleep(&(struct timespec){0, CHECK_NS}, NULL);
  }
  (void)wait->mpi->MPI_Error_string(error, text, &length);
  keep_class_and_reason(text);
  return dc__fail(DC_E_SYSTEM, "MPI on rank %" PRId32 ": %s: %s: %.300s (%d)", wait->rank, wait->what, call, text,
                  error);
}

dc_status dc__mpi_check_result(const dc__mpi_wait *wait, const char *call, int error) {
  return error == 0 ? DC_OK : fail_call(wait, call, error);
}

/* Sets *left to the number of requests that are not done. */
static dc_status test_all(dc__mpi_wait *wait, int32_t *left) {
  if (wait->call != NULL) {
    *left = wait->count = atomic_load(wait->call) ? 0 : 1;
    return DC_OK;
  }
  for (int32_t i = 0; i < wait->count;) {
    int done = 0;
    DC__TRY(dc__mpi_check_result(wait, "MPI_Test", wait->mpi->calls->test(wait->mpi, &wait->requests[i], &done)));
    if (done != 0) {
      wait->requests[i] = wait->requests[--wait->count];
    } else {
      i++;
    }
  }
  *left = wait->count;
  return DC_OK;
}

/* Data moves only while MPI is called, and a message that comes late does not. */
static int64_t longest_sleep(const dc__mpi_wait *wait, int64_t begun) {
  const int64_t share = wait->check != NULL ? (dc__now_ns() - begun) / SHARE : 0;
  return share < LONGEST_NS ? LONGEST_NS : share < CHECK_NS ? share : CHECK_NS;
}

static void pause_before_test(const dc__mpi_wait *wait, int64_t tests, int64_t begun) {
  if (tests >= YIELDS) {
    const int64_t ns = (tests - YIELDS) * 1000, longest = longest_sleep(wait, begun);
    nanosleep(&(struct timespec){0, ns < longest ? ns : longest}, NULL);
  } else if (tests >= SPINS) {
    sched_yield();
  }
}

/* The ranks whose watchers do not answer: they are stopped, or cut off. */
static dc__rank_list find_silent(const dc__mpi_wait *wait) {
  dc__rank_set silent = {{0}};
  dc__tcp *control = (dc__tcp *)wait->control;
  dc__tcp_query_all(control);
  for (int32_t r = 0; r < control->head.world; r++) {
    if (r != wait->rank && control->replies[r].state == DC__TCP_NO_REPLY) {
      dc__rank_set_add(&silent, r);
    }
  }
  return dc__rank_list_of(&silent, control->head.world);
}

/* Before there is a control communicator, only MPI knows which ranks are missing, and does not tell. */
static dc_status fail_early(const dc__mpi_wait *wait) {
  return dc__fail(DC_E_TIMEOUT,
                  "rank %" PRId32
                  " waited %.1f s at %s for the first messages of all ranks over MPI, which does not tell which ranks "
                  "are missing",
                  wait->rank, (double)wait->timeout_ns / 1e9, wait->what);
}

static dc_status fail_late(const dc__mpi_wait *wait) {
  if (wait->control == NULL) {
    return fail_early(wait);
  }
  const dc__rank_list silent = find_silent(wait);
  DC__TRY(check_control(wait)); /* another rank may have reached its deadline first */
  double seconds = (double)wait->timeout_ns / 1e9;
  if (silent.count == 0) {
    return dc__fail(DC_E_TIMEOUT,
                    "rank %" PRId32
                    " waited %.1f s at %s for MPI to move the data, and all ranks answer: the network is "
                    "slow, or MPI stands still",
                    wait->rank, seconds, wait->what);
  }
  return dc__fail(DC_E_TIMEOUT,
                  "rank %" PRId32
                  " waited %.1f s at %s for MPI to move the data; rank%s %s %s not answer: stopped, or "
                  "cut off",
                  wait->rank, seconds, wait->what, DC__PLURAL_S(silent.count), silent.text,
                  silent.count == 1 ? "does" : "do");
}

/* *failed_ns: when the group's failure was first seen. */
static dc_status check_deadline(const dc__mpi_wait *wait, int64_t begun, int64_t *failed_ns) {
  const dc_status status = check_control(wait);
  const int64_t now = dc__now_ns();
  if (status != DC_OK) {
    *failed_ns = *failed_ns == 0 ? now : *failed_ns;
    return now - *failed_ns < wait->grace_ns ? DC_OK : status;
  }
  return now - begun < wait->timeout_ns ? DC_OK : fail_late(wait);
}

dc_status dc__mpi_wait_requests(dc__mpi_wait *wait) {
  int64_t begun = dc__now_ns(), checked = begun, failed = 0;
  int32_t left;
  for (int64_t tests = 0;; tests++) {
    DC__TRY(test_all(wait, &left));
    if (left == 0) {
      return DC_OK;
    }
    if (dc__now_ns() - checked > CHECK_NS) {
      DC__TRY(wait->check != NULL ? wait->check(wait->arg) : check_deadline(wait, begun, &failed));
      checked = dc__now_ns();
    }
    pause_before_test(wait, tests, begun);
  }
}

void dc__mpi_abandon(const dc__mpi_wait *wait) {
  atomic_fetch_add(&dc__mpi_runtime_state.abandoned, wait->count);
}

dc_status dc__mpi_wait_all(dc__mpi_wait *wait) {
  dc_status status = dc__mpi_wait_requests(wait);
  if (status != DC_OK) {
    dc__mpi_abandon(wait);
  }
  return status;
}
