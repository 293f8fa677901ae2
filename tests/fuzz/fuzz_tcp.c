/* Data that arrives over TCP from a process that is not libdc, has another version, is broken or hostile. Rank 0 gets
 * hellos, another rank gets a welcome, and a rank in a group of three gets hellos, notices, calls and data. Nothing may
 * crash, hang past the deadline, write out of bounds or leak a descriptor, and a failure says why. Socket pairs stand
 * for the network. Includes the sources that it tests, to reach their static functions. */
#include "comm/tcp/bootstrap/rendezvous.c" /* NOLINT: it looks inside */
#define init init_group                    /* NOLINT: as what it tests does */
#include "comm/tcp/group.c"                /* NOLINT */
#undef init
#include "comm/tcp/tcp.c" /* NOLINT */

#include <dirent.h>
#include <unistd.h>

#include "fuzz.h"

enum { WORLD = 3, GUESTS = 4, MOST = 64, EACH = 2 };

static const int64_t patience = 1000000;

static int32_t open_descriptors(void) {
  DIR *folder = opendir("/proc/self/fd");
  int32_t count = 0;
  while (readdir(folder) != NULL) {
    count++;
  }
  closedir(folder);
  return count;
}

static bool sealed;    /* the group has a secret */
static bool encrypted; /* the group wants TLS */
static bool overlay;   /* the group has an overlay, as with many ranks */

static dc__tcp_group *new_group(int32_t rank) {
  dc__tcp_group *group = calloc(1, sizeof *group);
  PROMISE(group != NULL);
  group->rank = rank;
  group->world = WORLD;
  group->timeout_ns = patience;
  snprintf(group->name, sizeof group->name, "fuzz");
  dc__tcp_set_secret(group, sealed ? "a secret for fuzzing" : NULL);
  group->tls = encrypted;
  group->overlay = overlay;
  PROMISE(!encrypted || dc__tls_load("fuzz") == DC_OK);
  init_group(group);
  group->heartbeat_ns = INT64_C(1000000000);
  group->failure_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  group->wake_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return group;
}

/* Returns this side's end; the other one is the peer's. */
static int connect_pair(int *peer) {
  int pair[2];
  PROMISE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
  *peer = pair[1];
  return pair[0];
}

/* Sends the message unless the peer has ended. */
static void send_to(int peer, const void *message, size_t size) {
  PROMISE(send(peer, message, size, MSG_NOSIGNAL) == (ssize_t)size || errno == EPIPE);
}

/* Sends a message as it should be, changed in a few bytes, cut, or replaced. */
static void send_bytes(bytes *b, int peer, const void *message, size_t size) {
  unsigned char raw[sizeof(dc__tcp_endpoint) * DC__COMM_MAX_WORLD];
  uint8_t how = read_u8(b);
  PROMISE(size <= sizeof raw);
  memcpy(raw, message, size);
  for (int32_t i = 0; i < (how & 3); i++) {
    uint16_t at = (uint16_t)read_i64(b);
    raw[(how & 4 ? at % 64 : at) % size] = read_u8(b);
  }
  if (how & 8) {
    size = (uint16_t)read_i64(b) % (size + 1);
  }
  if (how & 16) {
    take(b, raw, size < MOST ? size : MOST);
  }
  send_to(peer, raw, size);
  if (how & 32) {
    PROMISE(shutdown(peer, SHUT_WR) == 0);
  }
}

/* A connection that this rank has accepted, with its opening. One bit of the input decides whether it has reached the
 * proof, whose code is then right unless the input changes it. */
static void connect_as(bytes *b, dc__tcp_group *group, int32_t rank, int32_t mesh, int *peer) {
  dc__tcp_group theirs = {.rank = rank, .world = WORLD, .sealed = group->sealed, .tls = group->tls};
  dc__tcp_candidate *candidate = &group->pending.candidates[group->pending.count++];
  memcpy(theirs.name, group->name, sizeof theirs.name);
  memcpy(theirs.run, group->run, sizeof theirs.run);
  memcpy(theirs.key, group->key, sizeof theirs.key);
  theirs.endpoints[rank].port = 4000 + rank;
  *candidate =
      (dc__tcp_candidate){.fd = connect_pair(peer), .since_ns = dc__now_ns(), .challenged = (read_u8(b) & 1) != 0};
  PROMISE(dc__tcp_opening_make(&theirs, &candidate->theirs) && dc__tcp_opening_make(group, &candidate->own));
  if (!candidate->challenged) {
    const dc__tcp_opening opening = candidate->theirs;
    memset(&candidate->theirs, 0, sizeof candidate->theirs);
    send_bytes(b, *peer, &opening, sizeof opening);
    return;
  }
  dc__tcp_proof proof = {.hello = dc__tcp_hello_make(&theirs, mesh)};
  dc__tcp_mac(&theirs, &candidate->theirs, &candidate->own, &proof.hello, NULL, proof.mac);
  send_bytes(b, *peer, &proof, sizeof proof);
}

/* The connecting side of a handshake. The other side sends an opening and an answer, or something else, and a few bytes
 * instead of TLS. */
static void as_caller(bytes *b) {
  dc__tcp_group *group = new_group(1);
  dc__tcp_opening opening;
  dc__tcp_answer answer = {.status = (int32_t)read_count(b)};
  int peer;
  dc__tcp_call call = {.fd = connect_pair(&peer), .hello = dc__tcp_hello_make(group, DC__TCP_CONTROL)};
  PROMISE(dc__tcp_opening_make(group, &opening));
  take(b, answer.text, 8);
  send_bytes(b, peer, &opening, sizeof opening);
  enum dc__tcp_call_result result = dc__tcp_call_open(group, &call, 0);
  result = result == DC__TCP_CALL_OK ? dc__tcp_call_prove(group, &call, 0, "there") : result;
  if (result == DC__TCP_CALL_OK) {
    dc__tcp_mac(group, &call.own, &call.theirs, &call.hello, &answer, answer.mac);
    send_bytes(b, peer, &answer, sizeof answer);
    result = dc__tcp_call_finish(group, &call, 0, "there");
    send_bytes(b, peer, answer.text, sizeof answer.text);
    result = result == DC__TCP_CALL_OK ? dc__tcp_call_encrypt(group, &call, 0, "there") : result;
    PROMISE(result != DC__TCP_CALL_OK || !encrypted);
  }
  PROMISE(result != DC__TCP_CALL_FAILED || call.status != DC_OK);
  PROMISE(call.quoted_bytes <= sizeof call.quoted);
  dc__tcp_close(&call.fd);
  close(peer);
  dc__tcp_group_release(group);
}

static void check_error_text(dc_status status) {
  PROMISE(status == DC_OK || dc_last_error()[0] != '\0');
}

static void as_rank_0(bytes *b) {
  tcp_root h = {.group = new_group(0)};
  int peers[GUESTS], candidates = read_u8(b) % (GUESTS + 1);
  for (int32_t r = 0; r < DC__COMM_MAX_WORLD; r++) {
    h.peers[r] = -1;
  }
  for (int32_t i = 0; i < candidates; i++) {
    connect_as(b, h.group, 1 + i % 2, DC__TCP_RENDEZVOUS, &peers[i]);
  }
  dc_status status = collect_peers(&h, dc__now_ns() + patience);
  check_error_text(status);
  PROMISE(status != DC_OK || h.joined == WORLD - 1);
  for (int32_t r = 1; r < WORLD; r++) {
    PROMISE(status != DC_OK || (h.peers[r] >= 0 && h.group->endpoints[r].port != 0));
    dc__tcp_close(&h.peers[r]);
  }
  for (int32_t r = WORLD; r < DC__COMM_MAX_WORLD; r++) {
    PROMISE(h.peers[r] < 0);
  }
  for (int32_t i = 0; i < candidates; i++) {
    close(peers[i]);
  }
  dc__tcp_group_release(h.group);
}

/* Rank 0's answers: that it got the hello, if it did, and how the rendezvous ended. */
static void as_another(bytes *b) {
  static const dc__tcp_address to = {"somewhere", 4000};
  dc__tcp_group *group = new_group(1);
  dc__tcp_welcome said = {.magic = DC__TCP_MAGIC, .status = (int32_t)read_count(b), .more = read_u8(b) & 1};
  dc__tcp_endpoint endpoints[WORLD] = {{.port = 4000}};
  int peer;
  tcp_peer g = {.group = group, .to = &to, .fd = connect_pair(&peer)};
  take(b, said.text, 8);
  for (int32_t i = 0; i < 2 && !g.answered; i++) {
    send_bytes(b, peer, &said, sizeof said);
    said.more = 0;
  }
  send_bytes(b, peer, endpoints, sizeof endpoints);
  close(peer);
  check_error_text(receive_endpoints(&g, 0));
  close(g.fd);
  dc__tcp_group_release(group);
}

/* ---- in a group ---- */

static void send_notices(bytes *b, dc__tcp_group *group, int32_t r, int *peer) {
  group->control[r] = connect_pair(peer);
  for (int32_t i = read_u8(b) % 4; i > 0; i--) {
    dc__tcp_control_msg notice = {.kind = read_u8(b) % 8,
                                  .status = (int32_t)read_count(b),
                                  .rank = (int32_t)read_count(b),
                                  .mesh = read_u8(b) % 3,
                                  .query = read_u8(b) % 3,
                                  .seq = read_u8(b) % 3,
                                  .op = (int32_t)read_count(b),
                                  .ranks = {{read_u8(b)}}};
    if (overlay) {
      notice.from = (int32_t)read_count(b);
      notice.to = (int32_t)read_count(b);
      notice.hops = (int32_t)read_count(b);
      notice.votes.words[0] = read_u8(b);
    }
    take(b, notice.text, 8);
    send_bytes(b, *peer, &notice, sizeof notice);
  }
}

static void call(bytes *b, const dc__coll *coll, int peer, int32_t r) {
  struct dc__tcp_header head = {.seq = 1, .bytes = EACH * sizeof(float)};
  const float data[EACH] = {(float)r, (float)r};
  const dc_comm comm = {.world = WORLD};
  dc__signature_fill(&head.call, &comm, coll, 0);
  send_bytes(b, peer, &head, sizeof head);
  send_to(peer, data, sizeof data);
}

/* The other two ranks send all their messages, and then this rank reads them. */
static void as_member(bytes *b) {
  static const dc__range ranges[WORLD] = {{0, EACH}, {EACH, EACH}, {2 * EACH, EACH}};
  const float own[EACH] = {7, 7};
  float *whole = calloc(WORLD * EACH, sizeof *whole);
  const dc__coll coll = {.kind = DC__COLL_GATHER,
                         .tag = {.op = DC_OP_ALLGATHER_PARAM},
                         .count = 1,
                         .items = {{.send = own,
                                    .recv = whole,
                                    .ranges = ranges,
                                    .total = WORLD * EACH,
                                    .dtype = DC_FLOAT32,
                                    .recv_dtype = DC_FLOAT32}}};
  dc__tcp_group *group = new_group(0);
  dc_comm *comm = NULL;
  int peers[WORLD], controls[WORLD];
  group->meshes = group->joined = 1; /* the control mesh exists */
  for (int32_t r = 1; r < WORLD; r++) {
    send_notices(b, group, r, &controls[r]);
    connect_as(b, group, r, DC__TCP_CONTROL + 1, &peers[r]);
    call(b, &coll, peers[r], r);
  }
  PROMISE(dc__tcp_start_watcher(group) == DC_OK);
  for (int32_t r = 1; r < WORLD; r++) {
    close(controls[r]); /* so that the reason of an end is known at once */
  }
  dc_status status = open_mesh(group, &comm);
  check_error_text(status);
  if (status == DC_OK) {
    dc__tcp_run(comm, &coll);
    status = dc__comm_check(comm);
    check_error_text(status);
    PROMISE(status != DC_OK || (whole[0] == 7 && whole[1] == 7));
    dc_comm_destroy(comm);
  }
  dc__tcp_group_release(group);
  for (int32_t r = 1; r < WORLD; r++) {
    close(peers[r]);
  }
  free(whole);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length) {
  static void (*const roles[])(bytes *) = {as_rank_0, as_another, as_member, as_caller};
  bytes b = {data, length};
  int32_t before = open_descriptors();
  uint8_t role = read_u8(&b);
  sealed = (role & 128) != 0;
  encrypted = sealed && (role & 64) != 0;
  overlay = (role & 32) != 0;
  roles[role % DC__COUNT(roles)](&b);
  PROMISE(open_descriptors() == before);
  return 0;
}
