/* Incoming connections: accepts them, and keeps those pending that have not proved yet that they belong to the group.
 * Pending ones are bounded in number, time and memory. */
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "comm/escape.h"
#include "comm/tcp/bootstrap/auth.h"
#include "comm/tcp/tls/tls.h"

enum {
  MIN_PENDING = 16,
  LEAST_CAPACITY = 256,
  FILES_SHARE = 4 /* pending connections take at most one in so many of the files that the process may open */
};

/* The longest time until a connection has proved itself. One that has, and begins TLS, belongs to a rank. It may take
 * longer on a busy machine, and its rank could not know that this one closed it. */
static const int64_t handshake_ns = INT64_C(10000000000);

dc__tcp_hello dc__tcp_hello_make(const dc__tcp_group *group, int32_t mesh) {
  dc__tcp_hello hello = {
      .rank = group->rank, .world = group->world, .mesh = mesh, .port = group->endpoints[group->rank].port};
  memcpy(hello.name, group->name, sizeof hello.name);
  memcpy(hello.run, group->run, sizeof hello.run);
  if (group->network[0] != '\0') {
    memcpy(hello.address, group->endpoints[group->rank].address, sizeof hello.address);
  }
  return hello;
}

dc_status dc__tcp_hello_check(const dc__tcp_group *group, const dc__tcp_hello *hello) {
  if (memcmp(hello->name, group->name, sizeof group->name) != 0) {
    return dc__fail(DC_E_EXISTS, "dc_comm_create_tcp: another group meets at this address");
  }
  return DC_OK;
}

/* A rank of another rendezvous may not connect to this one, even with the same secret. */
static dc_status handshake_check_member(const dc__tcp_group *group, const dc__tcp_hello *hello) {
  DC__TRY(dc__tcp_hello_check(group, hello));
  if (memcmp(hello->run, group->run, sizeof group->run) != 0) {
    return dc__fail(DC_E_EXISTS,
                    "group \"%s\": rank %" PRId32 " is of another run than rank %" PRId32
                    ", which listens at this address: its own run was abandoned, or began anew",
                    group->name, hello->rank, group->rank);
  }
  if (hello->rank <= group->rank || hello->rank >= group->world || hello->world != group->world) {
    return dc__fail(DC_E_MISMATCH, "group \"%s\": rank %" PRId32 " of %" PRId32 " has no business with rank %" PRId32,
                    group->name, hello->rank, hello->world, group->rank);
  }
  return DC_OK;
}

void dc__tcp_note_rejected(dc__tcp_pending *p, int fd, const char *what) {
  char peer[DC__TCP_PEER];
  dc__tcp_peer_text(fd, peer);
  p->rejected++;
  snprintf(p->last, sizeof p->last, "%s, %.90s", peer, what);
}

/* ---- pending connections ---- */

static void candidate_remove(dc__tcp_pending *p, int32_t i) {
  p->count--;
  memmove(&p->candidates[i], &p->candidates[i + 1], (size_t)(p->count - i) * sizeof p->candidates[0]);
}

static void candidate_reject(dc__tcp_pending *p, int32_t i, const char *what) {
  dc__tcp_note_rejected(p, p->candidates[i].fd, what);
  dc__tcp_close(&p->candidates[i].fd);
  candidate_remove(p, i);
}

/* Notes what a rejected connection sent. */
static void candidate_reject_garbage(dc__tcp_pending *p, int32_t i) {
  char quoted[64], what[96];
  size_t bytes = p->candidates[i].received;
  dc__escape(quoted, sizeof quoted, (const char *)&p->candidates[i].theirs, bytes < 32 ? bytes : 32);
  snprintf(what, sizeof what, "which sent \"%s\"", quoted);
  candidate_reject(p, i, what);
}

void dc__tcp_pending_close(dc__tcp_pending *p) {
  while (p->count > 0) {
    dc__tcp_close(&p->candidates[p->count - 1].fd);
    p->count--;
  }
}

/* The oldest candidate that has not proved itself; p->count if there is none. */
static int32_t find_unproved(const dc__tcp_pending *p) {
  int32_t i = 0;
  while (i < p->count && p->candidates[i].encrypts) {
    i++;
  }
  return i;
}

int64_t dc__tcp_pending_expiry(const dc__tcp_pending *p) {
  const int32_t oldest = find_unproved(p);
  return oldest == p->count ? INT64_MAX : p->candidates[oldest].since_ns + handshake_ns;
}

/* ---- the accepting side of a handshake ---- */

/* Sends at once or not at all: the messages are smaller than an empty socket's buffer. */
static bool candidate_send(int fd, const void *message, size_t bytes) {
  return send(fd, message, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes;
}

/* Reads more of a message. False if the connection ended. */
static bool candidate_receive(dc__tcp_candidate *candidate, void *message, size_t bytes) {
  ssize_t got = recv(candidate->fd, (char *)message + candidate->received, bytes - candidate->received, MSG_DONTWAIT);
  candidate->received += got > 0 ? (size_t)got : 0;
  return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
}

/* Reads the opening and answers it. False if the candidate was rejected. */
static bool candidate_challenge(dc__tcp_group *group, int32_t i) {
  static const char magic[8] = DC__TCP_MAGIC;
  dc__tcp_pending *p = &group->pending;
  dc__tcp_candidate *candidate = &p->candidates[i];
  bool alive = candidate_receive(candidate, &candidate->theirs, sizeof candidate->theirs);
  size_t known = candidate->received < sizeof magic ? candidate->received : sizeof magic;
  if (!alive || memcmp(candidate->theirs.magic, magic, known) != 0) {
    candidate_reject_garbage(p, i);
    return false;
  }
  if (candidate->received >= offsetof(dc__tcp_opening, sealed) && !dc__tcp_opening_is_known(&candidate->theirs)) {
    dc__tcp_reject(candidate->fd, dc__fail(DC_E_MISMATCH,
                                           "dc_comm_create_tcp: the ranks have different versions of libdc, "
                                           "or machine types"));
    candidate_reject(p, i, "a rank of another version of libdc");
    return false;
  }
  if (candidate->received < sizeof candidate->theirs) {
    return true;
  }
  if (!dc__tcp_opening_make(group, &candidate->own) ||
      !candidate_send(candidate->fd, &candidate->own, sizeof candidate->own)) {
    candidate_reject(p, i, "which did not read");
    return false;
  }
  if ((candidate->theirs.tls != 0) != group->tls) { /* the peer reports this itself */
    candidate_reject(p, i, group->tls ? "a rank without TLS, which this group wants" : "a rank that wants TLS");
    return false;
  }
  candidate->challenged = true;
  candidate->received = 0;
  return true;
}

/* Answers a complete proof. False if the candidate was rejected. */
static bool candidate_answer(dc__tcp_group *group, int32_t i) {
  dc__tcp_pending *p = &group->pending;
  dc__tcp_candidate *candidate = &p->candidates[i];
  const dc__tcp_hello *hello = &candidate->proof.hello;
  dc__tcp_answer answer = {.status = DC__TCP_DENIED};
  unsigned char mac[DC__MAC_BYTES];
  dc__tcp_mac(group, &candidate->theirs, &candidate->own, hello, NULL, mac);
  if ((candidate->theirs.sealed != 0) != group->sealed || !dc__mac_equal(mac, candidate->proof.mac)) {
    (void)candidate_send(candidate->fd, &answer, sizeof answer);
    candidate_reject(p, i, "which does not have the group's secret");
    return false;
  }
  answer.rank = group->rank;
  answer.status = hello->mesh == DC__TCP_RENDEZVOUS ? DC_OK : handshake_check_member(group, hello);
  if (answer.status != DC_OK) {
    snprintf(answer.text, sizeof answer.text, "%s", dc_last_error());
  }
  dc__tcp_mac(group, &candidate->theirs, &candidate->own, hello, &answer, answer.mac);
  bool sent = candidate_send(candidate->fd, &answer, sizeof answer);
  if (!sent || answer.status != DC_OK) {
    candidate_reject(p, i, sent ? "a rank of another run" : "which did not read");
    return false;
  }
  return true;
}

/* Continues TLS's handshake. True once it is complete. */
static bool candidate_encrypt(dc__tcp_group *group, int32_t i) {
  const int result = dc__tls_handshake(dc__tls_of(group->pending.candidates[i].fd));
  if (result != 1 && (result == 0 || errno != EAGAIN)) {
    candidate_reject(&group->pending, i, "whose TLS did not begin");
  }
  return result == 1;
}

/* The last step of a handshake. True if the handshake is complete, as it is without TLS. */
static bool candidate_begin_tls(dc__tcp_group *group, int32_t i) {
  dc__tcp_candidate *candidate = &group->pending.candidates[i];
  unsigned char key[DC__MAC_BYTES];
  if (!group->tls || candidate->proof.hello.mesh == DC__TCP_RENDEZVOUS) {
    return true;
  }
  dc__tcp_tls_key(group, &candidate->theirs, &candidate->own, &candidate->proof.hello, key);
  candidate->encrypts = dc__tls_begin(candidate->fd, false, key);
  explicit_bzero(key, sizeof key);
  if (!candidate->encrypts) {
    candidate_reject(&group->pending, i, "for whose TLS there is no memory");
    return false;
  }
  return candidate_encrypt(group, i);
}

/* ---- room for new connections ---- */

/* Reads the unread bytes of silent connections first, so that of two connections the one that sent something stays. */
bool dc__tcp_drop_pending(dc__tcp_group *group) {
  dc__tcp_pending *p = &group->pending;
  for (int32_t i = 0; i < p->count; i++) {
    if (p->candidates[i].challenged) {
      continue;
    }
    if (!candidate_challenge(group, i)) {
      return true;
    }
    if (!p->candidates[i].challenged) {
      candidate_reject(p, i, "which said nothing");
      return true;
    }
  }
  const int32_t oldest = find_unproved(p);
  if (oldest < p->count) {
    candidate_reject(p, oldest, "which did not prove itself");
    return true;
  }
  return false;
}

/* All ranks may connect to rank 0 at once. */
static int32_t pending_capacity(dc__tcp_group *group) {
  dc__tcp_pending *p = &group->pending;
  struct rlimit files;
  if (p->capacity == 0) {
    const bool many = group->rank == 0 && group->world > LEAST_CAPACITY;
    p->capacity = many ? DC__TCP_MAX_PENDING : LEAST_CAPACITY;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur / FILES_SHARE < (rlim_t)p->capacity) {
      p->capacity = (int32_t)(files.rlim_cur / FILES_SHARE);
    }
    p->capacity = p->capacity < MIN_PENDING ? MIN_PENDING : p->capacity;
  }
  return p->capacity;
}

dc_status dc__tcp_add_lack(const dc__tcp_group *group, dc_status status) {
  const int error = atomic_load(&group->pending.lacks);
  dc__failure failure = {DC_OK, ""};
  char lack[160];
  if (status == DC_OK || error == 0) {
    return status;
  }
  snprintf(lack, sizeof lack, "; rank %" PRId32 " could not keep all connections: %s%s", group->rank, strerror(error),
           error == EMFILE ? ", its process has no descriptors left (ulimit -n)" : "");
  dc__failure_keep(&failure, status);
  return strstr(failure.text, lack) != NULL ? dc__failure_raise(&failure)
                                            : dc__fail(status, "%.300s%s", failure.text, lack);
}

static bool listener_has_more(const dc__tcp_group *group) {
  struct pollfd more = {.fd = group->listener, .events = POLLIN};
  return poll(&more, 1, 0) > 0;
}

/* If the list is full, or the process may open no more files, a new connection takes the place of an old one. In the
 * latter case accept() fails even if no connection waits, and then none needs a place. */
static dc_status accept_pending(dc__tcp_group *group) {
  dc__tcp_pending *p = &group->pending;
  for (int32_t i = 0; i < pending_capacity(group) / 2; i++) { /* proofs are read between two such rounds */
    int fd = dc__tcp_accept(group->listener);
    if (fd >= 0) {
      if (p->count >= pending_capacity(group) && !dc__tcp_drop_pending(group) && p->count == DC__TCP_MAX_PENDING) {
        candidate_reject(p, 0, "for which there is no room");
      }
      p->candidates[p->count++] = (dc__tcp_candidate){.fd = fd, .since_ns = dc__now_ns()};
      continue;
    }
    const int error = errno;
    if (!dc__tcp_is_resource_error(error) || !listener_has_more(group)) {
      return DC_OK;
    }
    atomic_store(&p->lacks, error);
    dc_status status = dc__fail(DC_E_SYSTEM, "group \"%s\": rank %" PRId32 " cannot accept a connection: %s",
                                group->name, group->rank, strerror(error));
    if (!dc__tcp_drop_pending(group)) {
      return status;
    }
  }
  return DC_OK;
}

/* True once the handshake is complete. */
static bool candidate_step(dc__tcp_group *group, int32_t i) {
  dc__tcp_candidate *candidate = &group->pending.candidates[i];
  if (candidate->encrypts) {
    return candidate_encrypt(group, i);
  }
  if (!candidate->challenged && (!candidate_challenge(group, i) || !candidate->challenged)) {
    return false;
  }
  if (!candidate_receive(candidate, &candidate->proof, sizeof candidate->proof)) {
    candidate_reject(&group->pending, i, "which did not prove itself");
    return false;
  }
  return candidate->received == sizeof candidate->proof && candidate_answer(group, i) && candidate_begin_tls(group, i);
}

static bool step_candidates(dc__tcp_group *group, dc__tcp_hello *hello, int *fd) {
  dc__tcp_pending *p = &group->pending;
  for (int32_t i = p->count - 1; i >= 0; i--) {
    if (candidate_step(group, i)) {
      *hello = p->candidates[i].proof.hello;
      *fd = p->candidates[i].fd;
      candidate_remove(p, i);
      return true;
    }
  }
  while (dc__now_ns() >= dc__tcp_pending_expiry(p)) {
    candidate_reject(p, find_unproved(p), "which took too long");
  }
  return false;
}

/* Serves pending connections before it accepts new ones, which may evict them. */
bool dc__tcp_poll_hello(dc__tcp_group *group, bool can_accept, dc__tcp_hello *hello, int *fd, dc_status *status) {
  *status = DC_OK;
  if (step_candidates(group, hello, fd)) {
    return true;
  }
  *status = can_accept ? accept_pending(group) : DC_OK;
  if (step_candidates(group, hello, fd)) {
    *status = DC_OK;
    return true;
  }
  return false;
}

bool dc__tcp_wait_hello(dc__tcp_group *group, const int *extra, int32_t extra_count, int64_t deadline,
                        dc__tcp_hello *hello, int *fd, dc_status *status) {
  dc__tcp_pending *p = &group->pending;
  bool ended = false;
  *status = DC_OK;
  while (!ended) {
    struct pollfd polls[DC__TCP_MAX_PENDING + 2 * DC__COMM_MAX_WORLD + 2];
    int32_t count = 0;
    polls[count++] = (struct pollfd){.fd = group->listener, .events = POLLIN};
    for (int32_t i = 0; i < extra_count; i++) {
      polls[count++] = (struct pollfd){.fd = extra[i], .events = POLLIN};
    }
    for (int32_t i = 0; i < p->count; i++) {
      polls[count++] = (struct pollfd){.fd = p->candidates[i].fd, .events = POLLIN};
    }
    int64_t expiry = dc__tcp_pending_expiry(p);
    if (poll(polls, (nfds_t)count, dc__poll_timeout_ms(expiry < deadline ? expiry : deadline)) < 0) {
      if (errno != EINTR) {
        *status = dc__fail(DC_E_SYSTEM, "group \"%s\": poll: %s", group->name, strerror(errno));
        return false;
      }
      continue;
    }
    ended = dc__now_ns() >= deadline; /* even under a flood of connections */
    for (int32_t i = 0; i < extra_count; i++) {
      ended = ended || polls[1 + i].revents != 0;
    }
    if (dc__tcp_poll_hello(group, polls[0].revents != 0, hello, fd, status)) {
      return true;
    }
    ended = ended || *status != DC_OK;
  }
  return false;
}
