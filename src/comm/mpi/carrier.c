/* The ranks' comparison of calls over MPI's network, in messages between two ranks. Unlike a collective, a receive can
 * be cancelled where the other rank does not come, so that MPI can still be used and finalized. */
#include <sched.h>
#include <string.h>

#include "comm/mpi/mpi.h"
#include "comm/signature.h"

enum { END_TESTS = 1000 };

/* Ends a request, if there is one, that is done soon: its message was sent, or its receive was cancelled. Otherwise MPI
 * may still use its memory. */
static void end_request(dc__mpi_wait *wait) {
  int done = 0;
  for (int i = 0; i < END_TESTS && wait->count > 0; i++) {
    if (wait->mpi->calls->test(wait->mpi, &wait->requests[0], &done) != 0) {
      break;
    }
    wait->count = done != 0 ? 0 : 1;
    sched_yield();
  }
  dc__mpi_abandon(wait);
}

static dc_status start_receive(dc__mpi *self, const dc__tcp_swap *swap, dc__mpi_wait *receive) {
  DC__TRY(dc__mpi_check_result(receive, "MPI_Irecv",
                               self->mpi->calls->irecv(self->mpi, &self->received, sizeof self->received, swap->from,
                                                       DC__MPI_TAG_CALL, self->comm, &receive->requests[0])));
  receive->count = 1;
  return DC_OK;
}

/* A message as short as this is sent at once, whether the other rank receives it or not. A message of another
 * communicator is dropped: a rank may have freed one to which another rank still sent (can_free_mpi_comms() keeps the
 * others). */
static dc_status send_and_receive(dc__mpi *self, const dc__tcp_swap *swap, dc__mpi_wait *receive, dc__mpi_wait *send) {
  DC__TRY(start_receive(self, swap, receive));
  DC__TRY(dc__mpi_check_result(send, "MPI_Isend",
                               self->mpi->calls->isend(self->mpi, &self->sent, sizeof self->sent, swap->to,
                                                       DC__MPI_TAG_CALL, self->comm, &send->requests[0])));
  send->count = 1;
  DC__TRY(dc__mpi_wait_requests(receive));
  while (self->received.run != self->sent.run) {
    DC__TRY(start_receive(self, swap, receive));
    DC__TRY(dc__mpi_wait_requests(receive));
  }
  return dc__mpi_wait_requests(send);
}

static dc_status mpi_swap(void *context, const dc__tcp_swap *swap) {
  dc__mpi *self = context;
  dc__mpi_wait receive = {.mpi = self->mpi,
                          .control = self->control,
                          .rank = self->head.rank,
                          .what = "the comparison of calls",
                          .check = swap->check,
                          .arg = swap->arg};
  dc__mpi_wait send = receive;
  memcpy(self->sent.data, swap->out, swap->bytes);
  dc_status status = send_and_receive(self, swap, &receive, &send);
  if (status != DC_OK) {
    dc__failure failure = {DC_OK, ""};
    dc__failure_keep(&failure, status);
    if (receive.count > 0) {
      (void)self->mpi->calls->cancel(self->mpi, &receive.requests[0]);
    }
    end_request(&receive);
    end_request(&send);
    self->unmatched = true;
    self->message_abandoned = receive.count + send.count > 0;
    return dc__failure_raise(&failure);
  }
  memcpy(swap->in, self->received.data, swap->bytes);
  return DC_OK;
}

void dc__mpi_carry(dc__mpi *self) {
  const dc__tcp *control = (const dc__tcp *)self->control;
  self->sent.run = dc__digest_add(0, (uint64_t)control->mesh);
  for (size_t i = 0; i < sizeof control->group->run; i++) {
    self->sent.run = dc__digest_add(self->sent.run, control->group->run[i]);
  }
  self->carrier = (dc__tcp_carrier){.context = self, .swap = mpi_swap};
  ((dc__tcp *)self->control)->carrier = &self->carrier;
}

void dc__mpi_stop_carrying(dc__mpi *self) {
  ((dc__tcp *)self->control)->carrier = NULL;
}
