/* One collective: all ranks exchange and compare their calls, and then move the data. Small ones take fewer messages
 * (relay.c). */
#include "comm/tcp/collective.h"
#include "comm/tcp/overlay/overlay.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "comm/windows.h"

/* A range of an item in the tensor that begins at `base`, which may be NULL if it has no elements. */
static void add_range(struct iovec *list, int32_t *count, const void *base, const dc__coll_item *item, int32_t range) {
  if (item->ranges[range].count > 0) {
    dc__tcp_add_iov(list, count, dc__bytes_at(base, item->ranges[range].begin, item->dtype),
                    dc__item_bytes(item, range));
  }
}

/* Fills in the buffers to send to rank r, and to receive from it. */
static void fill_transfer(const dc__tcp_plan *p, int32_t r, dc__tcp_transfer *transfer) {
  int32_t me = p->self->head.rank;
  const dc__coll *coll = p->coll;
  if (p->scatters) {
    dc__tcp_fill_scatter(p, r, transfer);
    return;
  }
  char *from = coll->kind == DC__COLL_REDUCE ? p->self->scratch + r * dc__tcp_part_bytes(coll, me) : NULL;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    if (coll->kind == DC__COLL_BROADCAST) {
      dc__tcp_add_iov(transfer->out, &transfer->out_count, item->send, coll->root == me ? item->total : 0);
      dc__tcp_add_iov(transfer->in, &transfer->in_count, item->recv, coll->root == r ? item->total : 0);
    } else if (coll->kind == DC__COLL_REDUCE) {
      add_range(transfer->out, &transfer->out_count, item->send, item, r);
      dc__tcp_add_iov(transfer->in, &transfer->in_count, from, dc__item_bytes(item, me));
      from += dc__item_stride(item, me);
    } else if (coll->kind == DC__COLL_GATHER) {
      dc__tcp_add_iov(transfer->out, &transfer->out_count, item->send, dc__item_bytes(item, me));
      add_range(transfer->in, &transfer->in_count, item->recv, item, r);
    } else if (coll->kind == DC__COLL_ALL_TO_ALL) {
      add_range(transfer->out, &transfer->out_count, item->send, item, r);
      add_range(transfer->in, &transfer->in_count, item->recv, item, p->self->head.world + r);
    }
  }
}

/* Numbers the collective, and publishes it to the watcher. */
static void tcp_begin_collective(dc__tcp_plan *p) {
  dc__tcp *self = p->self;
  self->seq++;
  atomic_store_explicit(&self->op, p->coll->tag.op, memory_order_relaxed);
  atomic_store_explicit(&self->id, p->coll->tag.id, memory_order_relaxed);
  atomic_store_explicit(&self->number, atomic_fetch_add(&self->group->calls, 1) + 1, memory_order_relaxed);
  atomic_store_explicit(&self->reached, self->seq, memory_order_relaxed);
  p->has_checksums = atomic_load_explicit(&self->group->checksums, memory_order_relaxed) != 0;
}

static dc_status prepare_transfers(dc__tcp_plan *p) {
  dc__tcp *self = p->self;
  p->scatters = dc__tcp_scatters(p);
  if (p->has_data && p->coll->kind == DC__COLL_REDUCE) {
    DC__TRY(dc__tcp_reserve_scratch(self, dc__tcp_part_bytes(p->coll, self->head.rank) * self->head.world + 1));
  }
  for (int32_t r = 0; r < self->head.world; r++) {
    dc__tcp_transfer *transfer = &self->transfers[r];
    transfer->out_count = transfer->in_count = transfer->out_pos = transfer->in_pos = 0;
    dc__tcp_add_iov(transfer->out, &transfer->out_count, &transfer->send_header, sizeof transfer->send_header);
    if (p->has_data && r != self->head.rank) {
      fill_transfer(p, r, transfer);
    }
    transfer->send_header = (struct dc__tcp_header){.seq = self->seq,
                                                    .bytes = dc__tcp_iov_bytes(transfer->out, 1, transfer->out_count),
                                                    .has_checksum = p->has_checksums ? DC__TCP_CHECKSUM : 0,
                                                    .call = p->call};
    transfer->sent_crc = transfer->received_crc = 0;
    if (p->has_checksums) {
      dc__tcp_add_iov(transfer->out, &transfer->out_count, &transfer->sent_crc, sizeof transfer->sent_crc);
    }
  }
  self->transfers[self->head.rank].recv_header = self->transfers[self->head.rank].send_header;
  return DC_OK;
}

/* ---- the exchange ---- */

static bool has_header(const dc__tcp_transfer *transfer) {
  return transfer->bytes_received == sizeof transfer->recv_header;
}

/* Skips a relayed message, which a rank sends before its call if it takes this collective for a small one. The calls
 * will differ, so its data does not matter. False if the connection ended, as dc__tcp_read_header(). */
static bool skip_relayed(dc__tcp_transfer *transfer, bool *progress) {
  const dc__tcp_relayed *message = &transfer->recv_relayed;
  uint64_t behind = message->bytes + (message->has_checksum != 0 ? sizeof transfer->peer_crc : 0);
  while (transfer->bytes_skipped < behind) {
    char skipped[4096];
    uint64_t left = behind - transfer->bytes_skipped;
    ssize_t got = dc__tcp_read(transfer->fd, skipped, left < sizeof skipped ? left : sizeof skipped);
    if (got <= 0) {
      errno = got == 0 ? 0 : errno;
      return got < 0 && (errno == EAGAIN || errno == EINTR);
    }
    transfer->bytes_skipped += (uint64_t)got;
    *progress = true;
  }
  transfer->bytes_received = transfer->bytes_skipped = 0;
  return true;
}

static bool read_call(const dc__tcp_plan *p, dc__tcp_transfer *transfer, bool *progress) {
  const dc__tcp_relayed *message = &transfer->recv_relayed;
  if (!dc__tcp_relays(p->self)) { /* then all messages are calls, read in one piece */
    return dc__tcp_read_header(transfer, sizeof transfer->recv_header, progress);
  }
  bool reads = dc__tcp_read_header(transfer, sizeof *message, progress);
  while (reads && transfer->bytes_received == sizeof *message && message->kind == DC__TCP_RELAYED &&
         message->seq == p->self->seq && message->bytes <= DC__TCP_MAX_RELAYED) {
    if (!skip_relayed(transfer, progress)) {
      return false;
    }
    if (transfer->bytes_received > 0) {
      return true; /* more of it will come */
    }
    reads = dc__tcp_read_header(transfer, sizeof *message, progress);
  }
  return reads && (transfer->bytes_received < sizeof *message ||
                   dc__tcp_read_header(transfer, sizeof transfer->recv_header, progress));
}

static dc_status receive_header(const dc__tcp_plan *p, int32_t r, bool *progress) {
  dc__tcp_transfer *transfer = &p->self->transfers[r];
  bool reads = has_header(transfer) || read_call(p, transfer, progress);
  return reads && !dc__tcp_has_left(transfer) ? DC_OK : dc__tcp_fail_transfer(p, r, errno);
}

static bool is_received(const dc__tcp_transfer *transfer) {
  return has_header(transfer) && transfer->in_pos == transfer->in_count;
}

static bool is_complete(const dc__tcp_transfer *transfer) {
  return is_received(transfer) && transfer->out_pos == transfer->out_count;
}

/* Checks that rank r, which may be this one, sends as much as this rank expects from it. */
static dc_status compare_bytes(const dc__tcp_plan *p, int32_t r) {
  const dc__tcp_transfer *transfer = &p->self->transfers[r];
  const dc__coll_item *item = &p->coll->items[0];
  const int32_t rank = p->self->head.rank;
  const uint64_t bytes = transfer->recv_header.bytes;
  if (p->has_data && p->coll->kind == DC__COLL_ALL_TO_ALL) {
    const int64_t sent = r == rank ? item->ranges[rank].count : (int64_t)(bytes / dc_dtype_size(item->dtype));
    const int64_t expected = item->ranges[p->self->head.world + r].count;
    DC__TRY(sent == expected ? DC_OK : dc__coll_fail_counts(p->coll, r, sent, rank, expected));
  }
  const uint64_t expected_bytes = dc__tcp_iov_bytes(transfer->in, 0, transfer->in_count);
  return r == rank || bytes == expected_bytes ? DC_OK : dc__tcp_fail_size(p, r, bytes, expected_bytes);
}

static dc_status tcp_compare_signatures(const dc__tcp_plan *p) {
  const dc__tcp *self = p->self;
  const dc__signature *calls[DC__COMM_MAX_WORLD];
  for (int32_t r = 0; r < self->head.world; r++) {
    const struct dc__tcp_header *head = &self->transfers[r].recv_header;
    if (head->seq != self->seq || head->kind != 0 || head->call.count < 0 || head->call.count > DC__COMM_GROUP ||
        (head->has_checksum != 0 && head->has_checksum != DC__TCP_CHECKSUM)) {
      return dc__tcp_fail_garbled(p, r);
    }
    calls[r] = &head->call;
  }
  DC__TRY(dc__signature_compare(self->head.rank, self->head.world, calls));
  for (int32_t r = 0; r < self->head.world; r++) {
    dc__tcp_transfer *transfer = &self->transfers[r];
    DC__TRY(compare_bytes(p, r));
    if (r != self->head.rank && transfer->recv_header.has_checksum != 0) {
      transfer->received_crc = dc__crc32c(0, &transfer->recv_header, sizeof transfer->recv_header);
      dc__tcp_add_iov(transfer->in, &transfer->in_count, &transfer->peer_crc, sizeof transfer->peer_crc);
    }
  }
  return DC_OK;
}

/* The ranks whose call is missing. If all calls have arrived, the ranks with data still to send or receive. */
static dc__rank_set tcp_find_missing(const dc__tcp *self, bool *all_headers) {
  dc__rank_set no_header = {{0}}, open = {{0}};
  *all_headers = true;
  for (int32_t r = 0; r < self->head.world; r++) {
    if (r != self->head.rank && !has_header(&self->transfers[r])) {
      dc__rank_set_add(&no_header, r);
      *all_headers = false;
    }
    if (r != self->head.rank && !is_complete(&self->transfers[r])) {
      dc__rank_set_add(&open, r);
    }
  }
  return *all_headers ? open : no_header;
}

static dc_status wait_for_io(dc__tcp_plan *p) {
  dc__tcp *self = p->self;
  int32_t count = 0;
  for (int32_t r = 0; r < self->head.world; r++) {
    if (r == self->head.rank) {
      continue;
    }
    const dc__tcp_transfer *transfer = &self->transfers[r];
    bool reads = !has_header(transfer) || (p->signatures_match && transfer->in_pos < transfer->in_count);
    short events = (short)((reads ? POLLIN : 0) | (dc__tcp_can_send(p, r) ? POLLOUT : 0));
    if (events != 0) {
      self->polls[count++] = (struct pollfd){.fd = self->fds[r], .events = events};
    }
  }
  bool all_headers;
  const dc__rank_set missing = tcp_find_missing(self, &all_headers);
  return dc__tcp_wait_ready(p, count, &missing, all_headers);
}

static dc_status exchange_some(dc__tcp_plan *p, int32_t r, bool *sent_some, bool *received_some) {
  DC__TRY(dc__tcp_take_connection(p, r, sent_some));
  if (p->self->fds[r] < 0) {
    return DC_OK;
  }
  DC__TRY(dc__tcp_send_some(p, r, sent_some));
  DC__TRY(receive_header(p, r, received_some));
  if (!p->signatures_match) {
    return DC_OK;
  }
  DC__TRY(dc__tcp_receive_some(p, r, received_some));
  return is_received(&p->self->transfers[r]) ? dc__tcp_compare_checksum(p, r) : DC_OK;
}

/* Sends and receives until everything is done. No partial header is left over then. */
static dc_status exchange_all(dc__tcp_plan *p) {
  dc__tcp *self = p->self;
  dc__rank_set all_ranks;
  memset(&all_ranks, 0xff, sizeof all_ranks);
  DC__TRY(dc__tcp_connect_lower(p, &all_ranks));
  for (;;) {
    bool sent_some = false, received_some = false, all = true, ended = true;
    for (int32_t i = 1; i < self->head.world; i++) { /* starts at the next rank, so that traffic spreads */
      int32_t r = (self->head.rank + i) % self->head.world;
      DC__TRY(exchange_some(p, r, &sent_some, &received_some));
      all = all && has_header(&self->transfers[r]);
      ended = ended && is_complete(&self->transfers[r]);
    }
    if (all && !p->signatures_match) {
      DC__TRY(tcp_compare_signatures(p));
      p->signatures_match = received_some = true;
    } else if (p->signatures_match && ended) {
      break;
    }
    if (sent_some || received_some) {
      dc__tcp_note_progress(p);
    }
    if (!received_some) { /* sending alone brings no input, so it waits before it reads again */
      DC__TRY(wait_for_io(p));
    }
  }
  for (int32_t r = 0; r < self->head.world; r++) {
    self->transfers[r].bytes_received = 0;
    p->same_words = p->same_words && self->transfers[r].recv_header.call.word == p->call.word;
  }
  return DC_OK;
}

static dc_status exchange_with_data(dc__tcp_plan *p) {
  DC__TRY(prepare_transfers(p));
  DC__TRY(exchange_all(p));
  if (p->has_data && (p->coll->kind == DC__COLL_GATHER || p->coll->kind == DC__COLL_ALL_TO_ALL)) {
    dc__tcp_copy_own(p->self, p->coll);
  } else if (p->has_data && p->coll->kind == DC__COLL_REDUCE) {
    dc__tcp_reduce_own(p->self, p->coll);
  }
  return DC_OK;
}

/* In an overlay, differing calls are relayed too, since a full exchange would need a connection between any two
 * ranks. */
static dc_status relay_calls(dc__tcp_plan *p) {
  const int32_t world = p->self->head.world;
  dc__signature *calls = dc__calloc((size_t)world, sizeof *calls);
  const dc__signature **list = dc__calloc((size_t)world, sizeof *list);
  dc_status status = calls != NULL && list != NULL ? dc__tcp_gather_calls(p, calls) : DC_E_NO_MEMORY;
  for (int32_t r = 0; r < world && status == DC_OK; r++) {
    list[r] = &calls[r];
    status = calls[r].count >= 0 && calls[r].count <= DC__COMM_GROUP ? DC_OK : dc__tcp_fail_garbled(p, r);
  }
  status = status == DC_OK ? dc__signature_compare(p->self->head.rank, world, list) : status;
  dc__free(list);
  dc__free(calls);
  return status;
}

/* If calls differ, all ranks send theirs in full, so that all find the same error. */
static dc_status find_difference(dc__tcp_plan *p) {
  atomic_store(&p->self->group->calls_differed, true);
  p->has_data = false;
  if (p->self->group->overlay) {
    DC__TRY(relay_calls(p));
  } else {
    DC__TRY(prepare_transfers(p));
    DC__TRY(exchange_all(p));
  }
  return dc__fail(DC_E_CORRUPT, "%s: the ranks' calls are alike, but what was relayed of them is not", p->op_text);
}

/* In an overlay, ranks compare all calls in rounds, which need few connections. */
static dc_status exchange(dc__tcp_plan *p) {
  const bool small = dc__tcp_is_small(p);
  bool alike = true;
  if (p->self->carrier != NULL) {
    DC__TRY(dc__tcp_compare_carried(p, &alike));
    if (alike && !p->has_data) {
      return DC_OK;
    }
  }
  if (alike && (small || p->self->group->overlay)) {
    DC__TRY(dc__tcp_run_small(p, small, &alike));
  }
  if (!alike) {
    return find_difference(p);
  }
  return small ? DC_OK : exchange_with_data(p);
}

static dc_status tcp_run_collective(dc__tcp_plan *p) {
  dc__tcp *self = p->self;
  dc__coll_describe_op(p->op_text, p->coll->tag.op, p->coll->tag.id);
  DC__TRY(dc__tcp_group_check(self->group));
  tcp_begin_collective(p);
  dc__signature_fill(&p->call, &self->head, p->coll, p->call.word);
  int64_t bytes = p->has_data ? dc__received_bytes(p->coll, self->head.rank, self->head.world) : 0;
  dc_status status = exchange(p);
  dc__tcp_wait_end(&self->wait);
  atomic_store_explicit(&self->usage.blocked_in, 0, memory_order_relaxed);
  DC__TRY(status);
  atomic_fetch_add_explicit(&self->head.wire_bytes, bytes, memory_order_relaxed);
  return DC_OK;
}

void dc__tcp_leave(const dc__tcp *self) {
  const struct dc__tcp_header leave = {.seq = DC__TCP_SEQ_LEAVE, .bytes = self->seq};
  for (int32_t r = 0; r < self->head.world; r++) {
    if (self->fds[r] >= 0) {
      (void)dc__tcp_write(self->fds[r], &leave, sizeof leave);
    }
  }
}

static void tcp_finish_collective(dc__tcp *self, dc_status status) {
  if (status != DC_OK) {
    dc__tcp_group_fail(self->group, status);
    dc__comm_fail(&self->head, dc__tcp_group_check(self->group));
  }
  pthread_mutex_unlock(&self->collective_mutex);
}

void dc__tcp_run(dc_comm *comm, const dc__coll *coll) {
  dc__tcp *self = (dc__tcp *)comm;
  dc__tcp_plan p = {.self = self, .coll = coll, .has_data = true, .same_words = true};
  pthread_mutex_lock(&self->collective_mutex);
  tcp_finish_collective(self, tcp_run_collective(&p));
}

bool dc__tcp_agree(dc_comm *comm, const dc__coll *coll, uint64_t word) {
  dc__tcp *self = (dc__tcp *)comm;
  dc__coll alike = *coll;
  alike.device = NULL; /* each rank's data lies on its own card */
  dc__tcp_plan p = {.self = self, .coll = &alike, .has_data = false, .same_words = true, .call.word = word};
  pthread_mutex_lock(&self->collective_mutex);
  dc_status status = tcp_run_collective(&p);
  tcp_finish_collective(self, status);
  return status == DC_OK && p.same_words;
}
