/* Messages of a rendezvous: rank 0 gets a greeting of any bytes with any number of descriptors, and another rank gets
 * any welcome. Neither may crash, hang, accept a rank twice, or leak a descriptor. Includes the sources of both sides,
 * to reach their static functions. */
#include "comm/shm/rendezvous.c"      /* NOLINT: it looks inside */
#include "comm/shm/rendezvous_root.c" /* NOLINT */

#include <dirent.h>

#include "fuzz.h"

enum { WORLD = 3, SPARE = 8 };

static int32_t open_descriptors(void) {
  DIR *folder = opendir("/proc/self/fd");
  int32_t count = 0;
  while (readdir(folder) != NULL) {
    count++;
  }
  closedir(folder);
  return count;
}

/* Sends a message with some small memory files. */
static void send_bytes(int fd, const void *message, size_t size, int32_t files) {
  int fds[SPARE];
  for (int32_t i = 0; i < files; i++) {
    PROMISE(dc__shm_file_create("fuzz", DC__SHM_PAGE_BYTES, &fds[i]) == DC_OK);
  }
  PROMISE(dc__shm_send_fds(fd, message, size, fds, files) >= 0);
  dc__shm_close_fds(fds, files);
}

static dc__shm_group *new_group(int32_t rank) {
  dc__shm_group *group = NULL;
  PROMISE(dc__shm_group_create(rank, WORLD, DC__SHM_PAGE_BYTES, 1, &group) == DC_OK);
  group->bases[rank] = (uintptr_t)group->heap.base;
  group->reserves[rank] = group->heap.reserve;
  return group;
}

/* Up to four peers, which each send one or two messages in turn. */
static void as_host(bytes *b) {
  shm_root h = {.name = "fuzz", .group = new_group(0), .listener = -1};
  for (int32_t r = 0; r < DC__COMM_MAX_LOCAL; r++) {
    h.heaps[r] = r == 0 ? h.group->heap.fd : -1;
  }
  int peers[4], guests = 1 + read_u8(b) % 4;
  for (int32_t i = 0; i < guests; i++) {
    int pair[2];
    PROMISE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    h.peers[h.peer_count++] = (shm_peer){pair[0], -1};
    peers[i] = pair[1];
  }
  for (int32_t i = 0; i < guests; i++) {
    uint8_t how = read_u8(b);
    dc__shm_hello word = {.magic = "libdc\0\0",
                          .protocol = DC__SHM_PROTOCOL,
                          .rank = (int32_t)read_count(b),
                          .world = how & 1 ? (int32_t)read_count(b) : WORLD,
                          .has_pidfd = how & 2 ? (int32_t)read_count(b) : 0,
                          .reserve = how & 4 ? (uint64_t)read_i64(b) : DC__SHM_PAGE_BYTES};
    size_t size = how & 8 ? read_u8(b) % (sizeof word + 8) : sizeof word;
    unsigned char raw[sizeof word + 8] = {0};
    memcpy(raw, &word, sizeof word);
    if (how & 16) {
      take(b, raw, size);
    }
    send_bytes(peers[i], raw, size, read_u8(b) % SPARE);
  }
  for (int32_t i = h.peer_count - 1; i >= 0; i--) {
    (void)shm_receive_hello(&h, i);
  }
  int32_t joined = 0;
  for (int32_t r = 1; r < WORLD; r++) {
    joined += h.heaps[r] >= 0;
  }
  PROMISE(joined == h.joined);
  if (h.joined == WORLD - 1) {
    (void)dc__shm_map_peers(h.group, h.heaps);
  }
  dc__shm_close_fds(h.heaps + 1, DC__COMM_MAX_LOCAL - 1);
  for (int32_t i = 0; i < h.peer_count; i++) {
    close(h.peers[i].fd);
  }
  dc__shm_close_fds(peers, guests);
  dc__shm_group_release(h.group);
}

static void as_peer(bytes *b) {
  dc__shm_group *group = new_group(1);
  int pair[2], fds[DC__SHM_MAX_FDS];
  int32_t count = 0;
  uint8_t how = read_u8(b);
  dc__shm_welcome said = {.status = how & 1 ? (int32_t)read_count(b) : DC_OK}, message;
  for (int32_t r = 0; r < WORLD; r++) {
    said.has_pidfd[r] = how & 2 ? (int32_t)read_count(b) : 0;
    said.reserves[r] = how & 4 ? (uint64_t)read_i64(b) : DC__SHM_PAGE_BYTES;
  }
  take(b, said.text, how & 8 ? sizeof said.text : 8);
  PROMISE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
  if (how & 16) {
    send_bytes(pair[1], &said, (size_t)(1 + read_u8(b) % 255) * 8 % sizeof said + 1, read_u8(b) % SPARE);
  } else if ((how & 32) == 0) {
    send_bytes(pair[1], &said, sizeof said, read_u8(b) % SPARE);
  }
  close(pair[1]);
  dc_status status = shm_receive_welcome("fuzz", group, pair[0], 0, &message, fds, &count);
  if (status == DC_OK) {
    status = unpack_fds(group, &message, fds, count);
  }
  PROMISE(status == DC_OK || dc_last_error()[0] != '\0');
  dc__shm_close_fds(fds, count);
  close(pair[0]);
  dc__shm_group_release(group);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length) {
  bytes b = {data, length};
  int32_t before = open_descriptors();
  if (read_u8(&b) & 1) {
    as_host(&b);
  } else {
    as_peer(&b);
  }
  PROMISE(open_descriptors() == before);
  return 0;
}
