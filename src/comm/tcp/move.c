/* One collective: everybody's call to everybody, the comparison, and the data. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "comm/escape.h"
#include "comm/parts.h"
#include "comm/tcp/tcp.h"
#include "kernels/kernels.h"

typedef struct plan {
  dc__tcp *self;
  const dc__coll *coll;
  bool moves;       /* data follow the calls */
  bool agreed;      /* all calls came, and are the same */
  bool asked;       /* the deadline is over, and the others have said what they do */
  uint64_t word;    /* that may differ from other ranks' */
  int64_t deadline; /* runs while nothing moves; 0: from the next pause on */
  int64_t look_at;  /* whether ranks are crossed; likewise */
  char doing[DC__COLL_TEXT];
} plan;

static void add(struct iovec *list, int32_t *count, const void *at, int64_t bytes) {
  if (bytes > 0) {
    list[(*count)++] = (struct iovec){(void *)(uintptr_t)at, (size_t)bytes};
  }
}

static uint64_t sum_of(const struct iovec *list, int32_t from, int32_t to) {
  uint64_t bytes = 0;
  for (int32_t i = from; i < to; i++) {
    bytes += list[i].iov_len;
  }
  return bytes;
}

/* ---- before: what goes where ---- */

static dc_status need_scratch(dc__tcp *self, int64_t bytes) {
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

static int64_t part_bytes(const dc__coll *coll, int32_t rank) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    bytes += dc__item_step(&coll->items[i], rank);
  }
  return bytes;
}

/* What this rank sends to r, and where what r sends goes. */
static void route(const plan *p, int32_t r, dc__tcp_flow *flow) {
  int32_t me = p->self->head.rank;
  const dc__coll *coll = p->coll;
  char *from = coll->kind == DC__COLL_REDUCE ? p->self->scratch + r * part_bytes(coll, me) : NULL;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    int64_t size = (int64_t)dc_dtype_size(item->dtype);
    if (coll->kind == DC__COLL_BROADCAST) {
      add(flow->out, &flow->out_count, item->send, coll->root == me ? item->total : 0);
      add(flow->in, &flow->in_count, item->recv, coll->root == r ? item->total : 0);
    } else if (coll->kind == DC__COLL_REDUCE) {
      add(flow->out, &flow->out_count, dc__bytes_at(item->send, item->ranges[r].begin, item->dtype),
          dc__item_bytes(item, r));
      add(flow->in, &flow->in_count, from, dc__item_bytes(item, me));
      from += dc__item_step(item, me);
    } else if (coll->kind == DC__COLL_GATHER) {
      add(flow->out, &flow->out_count, item->send, dc__item_bytes(item, me));
      add(flow->in, &flow->in_count, (char *)item->recv + item->ranges[r].begin * size, dc__item_bytes(item, r));
    }
  }
}

static dc_status prepare(const plan *p) {
  dc__tcp *self = p->self;
  dc__call call = {.word = 0}; /* without what a stack leaves between the fields */
  dc__call_fill(&call, p->coll, self->head.rank, self->head.world, p->word);
  if (p->moves && p->coll->kind == DC__COLL_REDUCE) {
    DC__TRY(need_scratch(self, part_bytes(p->coll, self->head.rank) * self->head.world + 1));
  }
  self->seq++;
  atomic_store_explicit(&self->op, p->coll->tag.op, memory_order_relaxed);
  atomic_store_explicit(&self->id, p->coll->tag.id, memory_order_relaxed);
  atomic_store_explicit(&self->number, atomic_fetch_add(&self->group->calls, 1) + 1, memory_order_relaxed);
  atomic_store_explicit(&self->reached, self->seq, memory_order_relaxed);
  for (int32_t r = 0; r < self->head.world; r++) {
    dc__tcp_flow *flow = &self->flows[r];
    flow->out_count = flow->in_count = flow->out_at = flow->in_at = 0;
    flow->heard = 0;
    add(flow->out, &flow->out_count, &flow->ours, sizeof flow->ours);
    if (p->moves && r != self->head.rank) {
      route(p, r, flow);
    }
    flow->ours = (struct dc__tcp_head){self->seq, sum_of(flow->out, 1, flow->out_count), call};
  }
  self->flows[self->head.rank].theirs = self->flows[self->head.rank].ours;
  return DC_OK;
}

/* ---- the exchange ---- */

static bool may_try_again(void) {
  return errno == EAGAIN || errno == EINTR;
}

/* Takes `bytes` off the front of a list. */
static void advance(struct iovec *list, int32_t *at, size_t bytes) {
  while (bytes > 0) {
    size_t step = bytes < list[*at].iov_len ? bytes : list[*at].iov_len;
    list[*at].iov_base = (char *)list[*at].iov_base + step;
    list[*at].iov_len -= step;
    bytes -= step;
    *at += list[*at].iov_len == 0;
  }
}

static bool has_called(const dc__tcp_flow *flow) {
  return flow->heard == sizeof flow->theirs;
}

/* What is there of its head; false: the connection ended, errno says why, 0: it was closed. */
static bool read_head(dc__tcp_flow *flow, bool *progress) {
  while (!has_called(flow)) {
    ssize_t got = recv(flow->fd, (char *)&flow->theirs + flow->heard, sizeof flow->theirs - flow->heard, MSG_DONTWAIT);
    if (got <= 0) {
      errno = got == 0 ? 0 : errno;
      return got < 0 && may_try_again();
    }
    flow->heard += (size_t)got;
    *progress = true;
  }
  return true;
}

static bool has_left(const dc__tcp_flow *flow) {
  return has_called(flow) && flow->theirs.seq == DC__TCP_LEAVES;
}

/* Its last words may be there although nothing can be sent to it. */
static dc_status lost(const plan *p, int32_t r, int error) {
  dc__tcp_flow *flow = &p->self->flows[r];
  bool progress = false;
  (void)read_head(flow, &progress);
  return dc__tcp_fail_lost(p->self, r, error, has_left(flow), p->doing);
}

static dc_status send_some(const plan *p, int32_t r, bool *progress) {
  dc__tcp_flow *flow = &p->self->flows[r];
  while (flow->out_at < flow->out_count) {
    struct msghdr message = {.msg_iov = flow->out + flow->out_at,
                             .msg_iovlen = (size_t)(flow->out_count - flow->out_at)};
    ssize_t sent = sendmsg(flow->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      return may_try_again() ? DC_OK : lost(p, r, errno);
    }
    advance(flow->out, &flow->out_at, (size_t)sent);
    *progress = true;
  }
  return DC_OK;
}

static dc_status hear_head(const plan *p, int32_t r, bool *progress) {
  dc__tcp_flow *flow = &p->self->flows[r];
  bool reads = read_head(flow, progress);
  return reads && !has_left(flow) ? DC_OK : lost(p, r, errno);
}

static dc_status receive_some(const plan *p, int32_t r, bool *progress) {
  dc__tcp_flow *flow = &p->self->flows[r];
  while (flow->in_at < flow->in_count) {
    struct msghdr message = {.msg_iov = flow->in + flow->in_at, .msg_iovlen = (size_t)(flow->in_count - flow->in_at)};
    ssize_t got = recvmsg(flow->fd, &message, MSG_DONTWAIT);
    if (got <= 0) {
      return got < 0 && may_try_again() ? DC_OK : lost(p, r, got == 0 ? 0 : errno);
    }
    advance(flow->in, &flow->in_at, (size_t)got);
    *progress = true;
  }
  return DC_OK;
}

static bool has_ended(const dc__tcp_flow *flow) {
  return has_called(flow) && flow->in_at == flow->in_count && flow->out_at == flow->out_count;
}

static dc_status compare(const plan *p) {
  const dc__tcp *self = p->self;
  const dc__call *calls[DC__COMM_MAX_WORLD];
  for (int32_t r = 0; r < self->head.world; r++) {
    const struct dc__tcp_head *head = &self->flows[r].theirs;
    if (head->seq != self->seq || head->call.count < 0 || head->call.count > DC__COMM_GROUP) {
      char said[64];
      dc__escape(said, sizeof said, (const char *)head, 16);
      return dc__fail(DC_E_CORRUPT,
                      "%s: what came from rank %" PRId32 " is no call of a collective: it begins with \"%s\"", p->doing,
                      r, said);
    }
    calls[r] = &head->call;
  }
  DC__TRY(dc__call_compare(self->head.rank, self->head.world, calls));
  for (int32_t r = 0; r < self->head.world; r++) {
    const dc__tcp_flow *flow = &self->flows[r];
    uint64_t expected = sum_of(flow->in, 0, flow->in_count);
    if (r != self->head.rank && flow->theirs.bytes != expected) {
      return dc__fail(DC_E_CORRUPT, "%s: rank %" PRId32 " sends %" PRIu64 " bytes, must be %" PRIu64, p->doing, r,
                      flow->theirs.bytes, expected);
    }
  }
  return DC_OK;
}

/* Those whose call has not come; *called: all calls came, and those to whom or from whom data are still to go. */
static dc__rank_set find_lacking(const dc__tcp *self, bool *called) {
  dc__rank_set uncalled = {{0}}, open = {{0}};
  *called = true;
  for (int32_t r = 0; r < self->head.world; r++) {
    if (r != self->head.rank && !has_called(&self->flows[r])) {
      dc__rank_set_add(&uncalled, r);
      *called = false;
    }
    if (r != self->head.rank && !has_ended(&self->flows[r])) {
      dc__rank_set_add(&open, r);
    }
  }
  return *called ? open : uncalled;
}

/* At the deadline the others say what they do, and then this rank looks once more at what has come. */
static dc_status at_deadline(plan *p, const dc__rank_set *lacking, bool called) {
  if (p->asked) {
    DC__TRY(dc__tcp_fail_crossed(p->self, p->doing));
    return dc__tcp_fail_late(p->self, lacking, called, p->doing);
  }
  dc__tcp_ask_all(p->self);
  p->asked = true;
  return DC_OK;
}

/* Until a connection has what this rank waits for, or the group fails: then what is there already is taken first, since
 * others may have failed in a later collective. */
static dc_status pause_for(plan *p) {
  dc__tcp *self = p->self;
  bool called;
  DC__TRY(dc__tcp_group_check(self->group));
  int32_t world = self->head.world;
  for (int32_t r = 0; r < world; r++) {
    const dc__tcp_flow *flow = &self->flows[r];
    bool reads = !has_called(flow) || (p->agreed && flow->in_at < flow->in_count);
    short events = (short)((reads ? POLLIN : 0) | (flow->out_at < flow->out_count ? POLLOUT : 0));
    self->polls[r] = (struct pollfd){.fd = r == self->head.rank || events == 0 ? -1 : flow->fd, .events = events};
  }
  self->polls[world] = (struct pollfd){.fd = self->group->alarm, .events = POLLIN};
  const dc__rank_set lacking = find_lacking(self, &called);
  dc__tcp_wait_begin(&self->wait, &lacking);
  int64_t now = dc__now_ns();
  p->deadline = p->deadline != 0 ? p->deadline : now + self->head.timeout_ns;
  p->look_at = p->look_at > now ? p->look_at : now + DC__COMM_CROSSED_NS;
  int64_t until = p->look_at < p->deadline ? p->look_at : p->deadline;
  int ready = p->asked ? 0 : poll(self->polls, (nfds_t)world + 1, dc__milliseconds_to(until));
  if (ready < 0 && errno != EINTR) {
    return dc__fail(DC_E_SYSTEM, "%s: poll: %s", p->doing, strerror(errno));
  }
  if (ready != 0 || dc__now_ns() < until || (until < p->deadline && called)) {
    return DC_OK;
  }
  return until < p->deadline ? dc__tcp_look_crossed(self, p->doing) : at_deadline(p, &lacking, called);
}

static dc_status exchange(plan *p) {
  dc__tcp *self = p->self;
  for (;;) {
    bool progress = false, all = true, ended = true;
    for (int32_t i = 1; i < self->head.world; i++) { /* every rank begins with its neighbour */
      int32_t r = (self->head.rank + i) % self->head.world;
      DC__TRY(send_some(p, r, &progress));
      DC__TRY(hear_head(p, r, &progress));
      if (p->agreed) {
        DC__TRY(receive_some(p, r, &progress));
      }
      all = all && has_called(&self->flows[r]);
      ended = ended && has_ended(&self->flows[r]);
    }
    if (all && !p->agreed) {
      DC__TRY(compare(p));
      p->agreed = progress = true;
    } else if (p->agreed && ended) {
      return DC_OK;
    }
    if (progress) {
      p->deadline = p->look_at = 0;
      p->asked = false;
    } else {
      DC__TRY(pause_for(p));
    }
  }
}

/* ---- this rank's own part ---- */

static void copy_own(const plan *p) {
  int32_t me = p->self->head.rank;
  for (int32_t i = 0; i < p->coll->count; i++) {
    const dc__coll_item *item = &p->coll->items[i];
    int64_t bytes = dc__item_bytes(item, me);
    char *to = (char *)item->recv + item->ranges[me].begin * (int64_t)dc_dtype_size(item->dtype);
    if (bytes > 0 && to != item->send) {
      memcpy(to, item->send, (size_t)bytes);
    }
  }
}

static void reduce_own(const plan *p) {
  const dc__tcp *self = p->self;
  int32_t me = self->head.rank;
  int64_t part = part_bytes(p->coll, me);
  int64_t pos = 0;
  for (int32_t i = 0; i < p->coll->count; i++) {
    const dc__coll_item *item = &p->coll->items[i];
    const void *src[DC__COMM_MAX_WORLD];
    for (int32_t r = 0; r < self->head.world; r++) {
      src[r] = r == me ? dc__bytes_at(item->send, item->ranges[me].begin, item->dtype) : self->scratch + r * part + pos;
    }
    if (item->ranges[me].count > 0) {
      dc__reduce(item->recv, item->recv_dtype, src, self->head.world, item->dtype, item->ranges[me].count,
                 item->reduce_op == DC_MEAN, item->accumulate != 0);
    }
    pos += dc__item_step(item, me);
  }
}

static dc_status run(plan *p) {
  dc__tcp *self = p->self;
  int64_t bytes = 0;
  dc__coll_describe_tag(p->doing, p->coll->tag.op, p->coll->tag.id);
  DC__TRY(dc__tcp_group_check(self->group));
  DC__TRY(prepare(p));
  for (int32_t r = 0; r < self->head.world; r++) {
    bytes += r == self->head.rank ? 0 : (int64_t)sum_of(self->flows[r].in, 0, self->flows[r].in_count);
  }
  dc_status status = exchange(p);
  dc__tcp_wait_end(&self->wait);
  atomic_store_explicit(&self->use.held, 0, memory_order_relaxed);
  DC__TRY(status);
  if (p->moves && p->coll->kind == DC__COLL_GATHER) {
    copy_own(p);
  } else if (p->moves && p->coll->kind == DC__COLL_REDUCE) {
    reduce_own(p);
  }
  atomic_fetch_add_explicit(&self->head.wire_bytes, bytes, memory_order_relaxed);
  return DC_OK;
}

void dc__tcp_leave(const dc__tcp *self) {
  const struct dc__tcp_head leaves = {.seq = DC__TCP_LEAVES};
  for (int32_t r = 0; r < self->head.world; r++) {
    if (r != self->head.rank) {
      (void)send(self->flows[r].fd, &leaves, sizeof leaves, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  }
}

static void end_turn(dc__tcp *self, dc_status status) {
  if (status != DC_OK) {
    dc__tcp_group_fail(self->group, status);
    dc__comm_fail(&self->head, dc__tcp_group_check(self->group));
  }
  pthread_mutex_unlock(&self->turn);
}

void dc__tcp_run(dc_comm *comm, const dc__coll *coll) {
  dc__tcp *self = (dc__tcp *)comm;
  plan p = {.self = self, .coll = coll, .moves = true};
  pthread_mutex_lock(&self->turn);
  end_turn(self, run(&p));
}

bool dc__tcp_agree(dc_comm *comm, const dc__coll *coll, uint64_t word) {
  dc__tcp *self = (dc__tcp *)comm;
  dc__coll alike = *coll;
  alike.device = NULL; /* each rank's data lies on a card of its own */
  plan p = {.self = self, .coll = &alike, .moves = false, .word = word};
  pthread_mutex_lock(&self->turn);
  dc_status status = run(&p);
  bool same = status == DC_OK;
  for (int32_t r = 0; r < comm->world; r++) {
    same = same && self->flows[r].theirs.call.word == word;
  }
  end_turn(self, status);
  return same;
}
