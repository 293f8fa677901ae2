/* Moves bytes between two ranks in a collective, and waits for them. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/eventfd.h>

#include "comm/escape.h"
#include "comm/tcp/collective.h"

enum { PARENT_CHECK_NS = 20000000 };

void dc__tcp_add_iov(struct iovec *list, int32_t *count, const void *at, int64_t bytes) {
  if (bytes > 0) {
    list[(*count)++] = (struct iovec){(void *)(uintptr_t)at, (size_t)bytes};
  }
}

uint64_t dc__tcp_iov_bytes(const struct iovec *list, int32_t from, int32_t to) {
  uint64_t bytes = 0;
  for (int32_t i = from; i < to; i++) {
    bytes += list[i].iov_len;
  }
  return bytes;
}

dc_status dc__tcp_reserve_scratch(dc__tcp *self, int64_t bytes) {
  if (self->scratch_bytes < (size_t)bytes) {
    dc__free(self->scratch);
    self->scratch_bytes = 0;
    self->scratch = dc__calloc(1, (size_t)bytes);
    if (self->scratch == NULL) {
      return DC_E_NO_MEMORY;
    }
    self->scratch_bytes = (size_t)bytes;
  }
  return DC_OK;
}

/* ---- errors ---- */

bool dc__tcp_has_left(const dc__tcp_transfer *transfer) {
  return transfer->bytes_received >= sizeof transfer->recv_header.seq && transfer->recv_header.seq == DC__TCP_SEQ_LEAVE;
}

/* A leave message may be readable even though the send failed. */
dc_status dc__tcp_fail_transfer(const dc__tcp_plan *p, int32_t r, int error) {
  dc__tcp_transfer *transfer = &p->self->transfers[r];
  if (error == EBADMSG) {
    return dc__fail(DC_E_CORRUPT,
                    "%s: bytes between rank %" PRId32 " and rank %" PRId32 " were changed on the way, as TLS found",
                    p->op_text, p->self->head.rank, r);
  }
  bool progress = false;
  (void)dc__tcp_read_header(transfer, sizeof transfer->recv_header, &progress);
  return dc__tcp_fail_lost(p->self, r, error, dc__tcp_has_left(transfer), p->op_text);
}

dc_status dc__tcp_fail_garbled(const dc__tcp_plan *p, int32_t r) {
  char quoted[64];
  dc__escape(quoted, sizeof quoted, (const char *)&p->self->transfers[r].recv_header, 16);
  return dc__fail(DC_E_CORRUPT, "%s: what came from rank %" PRId32 " is no call of a collective: it begins with \"%s\"",
                  p->op_text, r, quoted);
}

dc_status dc__tcp_fail_size(const dc__tcp_plan *p, int32_t r, uint64_t bytes, uint64_t expected) {
  return dc__fail(DC_E_CORRUPT, "%s: rank %" PRId32 " sends %" PRIu64 " bytes, must be %" PRIu64, p->op_text, r, bytes,
                  expected);
}

/* ---- bytes ---- */

static bool would_block(void) {
  return errno == EAGAIN || errno == EINTR;
}

/* Consumes `bytes` from the front of a list, and adds them to a checksum, unless crc is NULL. */
static void advance_iov(struct iovec *list, int32_t *at, size_t bytes, uint32_t *crc) {
  while (bytes > 0) {
    size_t step = bytes < list[*at].iov_len ? bytes : list[*at].iov_len;
    if (crc != NULL) {
      *crc = dc__crc32c(*crc, list[*at].iov_base, step);
    }
    list[*at].iov_base = (char *)list[*at].iov_base + step;
    list[*at].iov_len -= step;
    bytes -= step;
    *at += list[*at].iov_len == 0;
  }
}

bool dc__tcp_read_header(dc__tcp_transfer *transfer, size_t bytes, bool *progress) {
  while (transfer->bytes_received < bytes) {
    ssize_t got = dc__tcp_read(transfer->fd, (char *)&transfer->recv_header + transfer->bytes_received,
                               bytes - transfer->bytes_received);
    if (got <= 0) {
      errno = got == 0 ? 0 : errno;
      return got < 0 && would_block();
    }
    transfer->bytes_received += (size_t)got;
    *progress = true;
  }
  return true;
}

/* Whether a list's next bytes are covered by a checksum, which is the list's last entry. They move before it does. */
static bool sums_next(uint64_t has_checksum, int32_t pos, int32_t count) {
  return has_checksum != 0 && pos < count - 1;
}

/* Bytes of transfer->out that may be sent now, without data that this rank passes on but has not received yet. */
static uint64_t sendable_bytes(const dc__tcp_plan *p, int32_t r) {
  const dc__tcp_transfer *transfer = &p->self->transfers[r];
  const uint64_t missing = r != p->coll->root ? dc__tcp_missing_part(p) : 0;
  const bool without_sum = missing > 0 || sums_next(p->has_checksums, transfer->out_pos, transfer->out_count);
  const int32_t end = transfer->out_count - (p->has_checksums && without_sum ? 1 : 0);
  return dc__tcp_iov_bytes(transfer->out, transfer->out_pos, end) - missing;
}

bool dc__tcp_can_send(const dc__tcp_plan *p, int32_t r) {
  return sendable_bytes(p, r) > 0;
}

/* The next entries of transfer->out that may be sent now. Returns their number. */
static int32_t list_sendable(const dc__tcp_plan *p, int32_t r, struct iovec list[DC__COMM_GROUP + 2]) {
  const struct iovec *next = p->self->transfers[r].out + p->self->transfers[r].out_pos;
  int32_t count = 0;
  for (uint64_t left = sendable_bytes(p, r); left > 0; count++) {
    list[count] = next[count];
    list[count].iov_len = left < list[count].iov_len ? (size_t)left : list[count].iov_len;
    left -= list[count].iov_len;
  }
  return count;
}

dc_status dc__tcp_send_some(const dc__tcp_plan *p, int32_t r, bool *progress) {
  dc__tcp_transfer *transfer = &p->self->transfers[r];
  struct iovec list[DC__COMM_GROUP + 2];
  for (int32_t count = list_sendable(p, r, list); count > 0; count = list_sendable(p, r, list)) {
    bool sums = sums_next(p->has_checksums, transfer->out_pos, transfer->out_count);
    ssize_t sent = dc__tcp_write_list(transfer->fd, list, (size_t)count);
    if (sent < 0) {
      return would_block() ? DC_OK : dc__tcp_fail_transfer(p, r, errno);
    }
    advance_iov(transfer->out, &transfer->out_pos, (size_t)sent, sums ? &transfer->sent_crc : NULL);
    *progress = true;
  }
  return DC_OK;
}

dc_status dc__tcp_receive_some(const dc__tcp_plan *p, int32_t r, bool *progress) {
  dc__tcp_transfer *transfer = &p->self->transfers[r];
  while (transfer->in_pos < transfer->in_count) {
    bool sums = sums_next(transfer->recv_header.has_checksum, transfer->in_pos, transfer->in_count);
    ssize_t got = dc__tcp_read_list(transfer->fd, transfer->in + transfer->in_pos,
                                    (size_t)(transfer->in_count - transfer->in_pos - (sums ? 1 : 0)));
    if (got <= 0) {
      return got < 0 && would_block() ? DC_OK : dc__tcp_fail_transfer(p, r, got == 0 ? 0 : errno);
    }
    advance_iov(transfer->in, &transfer->in_pos, (size_t)got, sums ? &transfer->received_crc : NULL);
    *progress = true;
  }
  return DC_OK;
}

dc_status dc__tcp_compare_checksum(const dc__tcp_plan *p, int32_t r) {
  const dc__tcp_transfer *transfer = &p->self->transfers[r];
  if (transfer->recv_header.has_checksum == 0 || transfer->received_crc == transfer->peer_crc) {
    return DC_OK;
  }
  return dc__fail(DC_E_CORRUPT,
                  "%s: what came to rank %" PRId32 " from rank %" PRId32 " is not what that rank sent: %" PRIu64
                  " bytes have the checksum %08" PRIx32 ", must be %08" PRIx32,
                  p->op_text, p->self->head.rank, r, transfer->recv_header.bytes, transfer->received_crc,
                  transfer->peer_crc);
}

/* ---- waiting ---- */

/* The first time, queries the peers' state, and the caller reads once more what has arrived. The second time, fails. */
static dc_status handle_deadline(dc__tcp_plan *p, const dc__rank_set *missing, bool all_headers) {
  if (p->queried) {
    DC__TRY(dc__tcp_fail_deadlock(p->self, p->op_text));
    return dc__tcp_fail_timeout(p->self, missing, all_headers, p->op_text);
  }
  dc__tcp_query_missing(p->self, missing);
  p->queried = true;
  return DC_OK;
}

void dc__tcp_note_progress(dc__tcp_plan *p) {
  p->deadline = p->deadlock_check_ns = 0;
  p->queried = false;
}

/* With a parent, polls in slices, and checks between them whether the parent has failed. */
static dc_status poll_until(const dc__tcp *self, nfds_t count, int64_t until, int *ready) {
  do {
    DC__TRY(dc__comm_check_parents(&self->head));
    const int64_t slice = dc__now_ns() + PARENT_CHECK_NS;
    *ready = poll(self->polls, count, dc__poll_timeout_ms(self->head.parent == NULL || until < slice ? until : slice));
  } while (*ready == 0 && dc__now_ns() < until);
  return DC_OK;
}

/* Publishes the wait. Returns the time of its next check for deadlocks, or of its deadline. */
static int64_t begin_wait(dc__tcp_plan *p, const dc__rank_set *missing) {
  const int64_t now = dc__now_ns();
  dc__tcp_wait_begin(&p->self->wait, missing);
  p->deadline = p->deadline != 0 ? p->deadline : now + p->self->head.timeout_ns;
  p->deadlock_check_ns = p->deadlock_check_ns != 0 ? p->deadlock_check_ns : now + DC__COMM_DEADLOCK_NS;
  return p->deadlock_check_ns < p->deadline ? p->deadlock_check_ns : p->deadline;
}

/* Called at the time that begin_wait() returned. */
static dc_status check_late_ranks(dc__tcp_plan *p, int64_t until, const dc__rank_set *missing, bool all_headers) {
  if (until >= p->deadline) {
    return handle_deadline(p, missing, all_headers);
  }
  p->deadlock_check_ns = 0;
  return all_headers ? DC_OK : dc__tcp_check_deadlock(p->self, missing, p->op_text);
}

dc_status dc__tcp_check_wait(dc__tcp_plan *p, const dc__rank_set *missing) {
  DC__TRY(dc__tcp_group_check(p->self->group));
  DC__TRY(dc__comm_check_parents(&p->self->head));
  const int64_t until = begin_wait(p, missing);
  return dc__now_ns() < until ? DC_OK : check_late_ranks(p, until, missing, false);
}

dc_status dc__tcp_wait_ready(dc__tcp_plan *p, int32_t count, const dc__rank_set *missing, bool all_headers) {
  dc__tcp *self = p->self;
  DC__TRY(dc__tcp_group_check(self->group));
  self->polls[count] = (struct pollfd){.fd = self->group->failure_event, .events = POLLIN};
  self->polls[count + 1] = (struct pollfd){.fd = self->arrival_event, .events = POLLIN};
  const int64_t until = begin_wait(p, missing);
  int ready = 0;
  DC__TRY(p->queried ? DC_OK : poll_until(self, (nfds_t)count + 2, until, &ready));
  if (ready < 0 && errno != EINTR) {
    return dc__fail(DC_E_SYSTEM, "%s: poll: %s", p->op_text, strerror(errno));
  }
  if (ready > 0 && self->polls[count + 1].revents != 0) {
    eventfd_t any;
    (void)eventfd_read(self->arrival_event, &any);
  }
  return ready != 0 || dc__now_ns() < until ? DC_OK : check_late_ranks(p, until, missing, all_headers);
}
