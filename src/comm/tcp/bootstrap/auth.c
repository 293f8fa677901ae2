/* Proofs that both ends of a connection have the group's secret. Each end sends a random opening. The connecting end
 * sends its hello with a code over both openings and the hello, and the accepting end answers with a code of its own.
 * So a recorded handshake cannot be replayed. Without a secret the key is zero: the handshake is the same, and keeps
 * out stray connections but no attacker. */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "comm/tcp/bootstrap/auth.h"
#include "comm/tcp/collective.h"
#include "comm/tcp/tls/tls.h"

static const char key_label[16] = "libdc tcp secret";
static const char hello_label[16] = "libdc tcp hello";
static const char answer_label[16] = "libdc tcp answer";
static const char tls_label[16] = "libdc tcp tls";

void dc__tcp_set_secret(dc__tcp_group *group, const char *secret) {
  group->sealed = secret != NULL;
  if (secret != NULL) {
    dc__hmac_sha256(key_label, sizeof key_label, secret, strlen(secret), group->key);
  }
}

bool dc__tcp_opening_make(const dc__tcp_group *group, dc__tcp_opening *opening) {
  *opening = (dc__tcp_opening){.magic = DC__TCP_MAGIC,
                               .byte_order = 1,
                               .protocol = DC__TCP_PROTOCOL << 24 | sizeof(struct dc__tcp_header),
                               .sealed = group->sealed,
                               .tls = group->tls};
  return dc__random_bytes(opening->nonce, sizeof opening->nonce);
}

bool dc__tcp_opening_is_known(const dc__tcp_opening *opening) {
  return opening->byte_order == 1 && opening->protocol == (DC__TCP_PROTOCOL << 24 | sizeof(struct dc__tcp_header));
}

static void auth_code(const dc__tcp_group *group, const char label[16], const dc__tcp_opening *connects,
                      const dc__tcp_opening *accepts, const dc__tcp_hello *hello, const dc__tcp_answer *answer,
                      unsigned char mac[DC__MAC_BYTES]) {
  struct {
    char label[16];
    dc__tcp_opening connects, accepts;
    dc__tcp_hello hello;
    dc__tcp_answer answer;
  } text = {.connects = *connects, .accepts = *accepts, .hello = *hello};
  memcpy(text.label, label, sizeof text.label);
  if (answer != NULL) {
    text.answer = *answer;
    memset(text.answer.mac, 0, sizeof text.answer.mac);
  }
  dc__hmac_sha256(group->key, sizeof group->key, &text, sizeof text, mac);
}

void dc__tcp_mac(const dc__tcp_group *group, const dc__tcp_opening *connects, const dc__tcp_opening *accepts,
                 const dc__tcp_hello *hello, const dc__tcp_answer *answer, unsigned char mac[DC__MAC_BYTES]) {
  auth_code(group, answer == NULL ? hello_label : answer_label, connects, accepts, hello, answer, mac);
}

void dc__tcp_tls_key(const dc__tcp_group *group, const dc__tcp_opening *connects, const dc__tcp_opening *accepts,
                     const dc__tcp_hello *hello, unsigned char key[DC__MAC_BYTES]) {
  auth_code(group, tls_label, connects, accepts, hello, NULL, key);
}

/* ---- the connecting side ---- */

/* Waits until a connection is readable. False with errno: ETIMEDOUT, or ECANCELED after a failure of the group. */
static bool call_wait(const dc__tcp_group *group, int fd, int64_t deadline) {
  struct pollfd polls[] = {{.fd = fd, .events = POLLIN}, {.fd = group->failure_event, .events = POLLIN}};
  int ready = poll(polls, 2, dc__poll_timeout_ms(deadline));
  if ((ready == 0 && dc__now_ns() >= deadline) || (ready > 0 && polls[1].revents != 0)) {
    errno = ready == 0 ? ETIMEDOUT : ECANCELED;
    return false;
  }
  return true;
}

/* As dc__tcp_receive_all(), but a failure of the group ends the wait, with ECANCELED. */
static bool call_receive(const dc__tcp_group *group, int fd, void *data, size_t bytes, int64_t deadline, size_t *got) {
  for (*got = 0; *got < bytes;) {
    ssize_t part = recv(fd, (char *)data + *got, bytes - *got, MSG_DONTWAIT);
    if (part > 0) {
      *got += (size_t)part;
      continue;
    }
    if (part == 0 || (errno != EAGAIN && errno != EINTR)) {
      errno = part == 0 ? 0 : errno;
      return false;
    }
    if (!call_wait(group, fd, deadline)) {
      return false;
    }
  }
  return true;
}

bool dc__tcp_may_return(const dc__tcp_call *call, int32_t attempt) {
  return call->fd >= 0 && call->error != ETIMEDOUT && (call->challenged || attempt < DC__TCP_ATTEMPTS);
}

void dc__tcp_back_off(const dc__tcp_group *group, int32_t attempt, int64_t deadline) {
  const int64_t most_ms = INT64_C(1) << (attempt < 8 ? attempt : 8);
  const int64_t end = dc__now_ns() + most_ms * 500000 * (1 + group->rank % 8) / 4;
  struct pollfd failure = {.fd = group->failure_event, .events = POLLIN};
  (void)poll(&failure, 1, dc__poll_timeout_ms(end < deadline ? end : deadline));
}

static enum dc__tcp_call_result call_lost(dc__tcp_call *call, int error) {
  call->error = error;
  return DC__TCP_CALL_LOST;
}

static enum dc__tcp_call_result call_failed(dc__tcp_call *call, dc_status status) {
  call->status = status;
  return DC__TCP_CALL_FAILED;
}

enum dc__tcp_call_result dc__tcp_call_open(const dc__tcp_group *group, dc__tcp_call *call, int64_t deadline) {
  if (!dc__tcp_opening_make(group, &call->own)) {
    return call_failed(call, dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: no random bytes: %s", strerror(errno)));
  }
  return dc__tcp_send_all(call->fd, &call->own, sizeof call->own, deadline) ? DC__TCP_CALL_OK : call_lost(call, errno);
}

enum dc__tcp_call_result dc__tcp_call_prove(const dc__tcp_group *group, dc__tcp_call *call, int64_t deadline,
                                            const char *where) {
  static const char magic[8] = DC__TCP_MAGIC;
  dc__tcp_opening *theirs = &call->theirs;
  size_t got, rest;
  bool whole = call_receive(group, call->fd, theirs, sizeof magic, deadline, &got);
  int error = errno;
  if (memcmp(theirs->magic, magic, got) != 0) {
    /* The bytes that follow help to identify the service. */
    ssize_t more = whole ? recv(call->fd, (char *)theirs + got, sizeof call->quoted - got, MSG_DONTWAIT) : 0;
    call->quoted_bytes = got + (more > 0 ? (size_t)more : 0);
    memcpy(call->quoted, theirs, call->quoted_bytes);
    return DC__TCP_CALL_FOREIGN;
  }
  size_t version = sizeof magic + sizeof theirs->byte_order + sizeof theirs->protocol;
  if (!whole || !call_receive(group, call->fd, &theirs->byte_order, version - sizeof magic, deadline, &rest)) {
    return call_lost(call, whole ? errno : error);
  }
  if (!dc__tcp_opening_is_known(theirs)) {
    return call_failed(call, dc__fail(DC_E_MISMATCH,
                                      "dc_comm_create_tcp: rank %" PRId32 ": at %s listens another version of libdc, "
                                      "or one on another machine type",
                                      group->rank, where));
  }
  if (!call_receive(group, call->fd, &theirs->sealed, sizeof *theirs - version, deadline, &rest)) {
    return call_lost(call, errno);
  }
  call->challenged = true;
  if ((theirs->sealed != 0) != group->sealed) {
    return call_failed(
        call, dc__fail(DC_E_MISMATCH, "dc_comm_create_tcp: rank %" PRId32 " has %s secret, but the group at %s has %s",
                       group->rank, group->sealed ? "a" : "no", where, group->sealed ? "none" : "one"));
  }
  if ((theirs->tls != 0) != group->tls) {
    return call_failed(
        call,
        dc__fail(DC_E_MISMATCH, "dc_comm_create_tcp: rank %" PRId32 " %s TLS, but the group at %s %s it", group->rank,
                 group->tls ? "wants" : "does not want", where, group->tls ? "does not want" : "wants"));
  }
  dc__tcp_proof proof = {.hello = call->hello};
  dc__tcp_mac(group, &call->own, theirs, &call->hello, NULL, proof.mac);
  return dc__tcp_send_all(call->fd, &proof, sizeof proof, deadline) ? DC__TCP_CALL_OK : call_lost(call, errno);
}

/* One step of TLS's handshake. If it waits for the peer, returns OK with *complete false. */
static enum dc__tcp_call_result call_step_tls(const dc__tcp_group *group, dc__tcp_call *call, const char *where,
                                              bool *complete) {
  const int result = dc__tls_handshake(dc__tls_of(call->fd));
  *complete = result == 1;
  if (result == 1 || (result < 0 && errno == EAGAIN)) {
    return DC__TCP_CALL_OK;
  }
  return result < 0 && errno == EBADMSG
             ? call_failed(call, dc__fail(DC_E_CORRUPT,
                                          "dc_comm_create_tcp: rank %" PRId32 " has no TLS with %s: what comes from "
                                          "there was changed on the way",
                                          group->rank, where))
             : call_lost(call, result == 0 ? 0 : errno);
}

/* Sends TLS's first message. */
static enum dc__tcp_call_result call_begin_tls(const dc__tcp_group *group, dc__tcp_call *call, const char *where) {
  unsigned char key[DC__MAC_BYTES];
  bool complete;
  if (!group->tls || call->hello.mesh == DC__TCP_RENDEZVOUS) {
    return DC__TCP_CALL_OK;
  }
  dc__tcp_tls_key(group, &call->own, &call->theirs, &call->hello, key);
  const bool begun = dc__tls_begin(call->fd, true, key);
  explicit_bzero(key, sizeof key);
  return begun ? call_step_tls(group, call, where, &complete) : call_lost(call, errno);
}

enum dc__tcp_call_result dc__tcp_call_encrypt(const dc__tcp_group *group, dc__tcp_call *call, int64_t deadline,
                                              const char *where) {
  if (dc__tls_of(call->fd) == NULL) {
    return DC__TCP_CALL_OK;
  }
  for (;;) {
    bool complete;
    const enum dc__tcp_call_result result = call_step_tls(group, call, where, &complete);
    if (result != DC__TCP_CALL_OK || complete) {
      return result;
    }
    if (!call_wait(group, call->fd, deadline)) {
      return call_lost(call, errno);
    }
  }
}

enum dc__tcp_call_result dc__tcp_call_finish(const dc__tcp_group *group, dc__tcp_call *call, int64_t deadline,
                                             const char *where) {
  dc__tcp_answer answer;
  unsigned char mac[DC__MAC_BYTES];
  size_t got;
  if (!call_receive(group, call->fd, &answer, sizeof answer, deadline, &got)) {
    return call_lost(call, errno);
  }
  dc__tcp_mac(group, &call->own, &call->theirs, &call->hello, &answer, mac);
  if (!dc__mac_equal(mac, answer.mac)) {
    return call_failed(call, dc__fail(DC_E_EXISTS,
                                      "dc_comm_create_tcp: rank %" PRId32 " and rank 0's group at %s have different "
                                      "secrets: another run is there, or a process of none",
                                      group->rank, where));
  }
  if (answer.rank != call->to) {
    return call_failed(call,
                       dc__fail(DC_E_CORRUPT,
                                "dc_comm_create_tcp: rank %" PRId32 " wants rank %" PRId32 " at %s, but rank %" PRId32
                                " is there: the table of addresses was changed on the way",
                                group->rank, call->to, where, answer.rank));
  }
  if (answer.status == DC_OK) {
    call->accepted = true;
    return call_begin_tls(group, call, where);
  }
  return dc__tcp_is_failure(answer.status, answer.text)
             ? call_failed(call, dc__fail(answer.status, "%s", answer.text))
             : call_failed(call, dc__fail(DC_E_CORRUPT, "dc_comm_create_tcp: an answer of %s has no reason", where));
}
