/* Addresses at which ranks over TCP can meet. */
#ifndef DC_TESTS_ADDRESS_H
#define DC_TESTS_ADDRESS_H

#include <arpa/inet.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

enum { HELD_ADDRESSES = 64 };

static _Atomic int held_addresses[HELD_ADDRESSES]; /* 0: none */

/* Returns an address of this machine without a listener. A bound socket reserves it, so that no other process gets it
 * until HELD_ADDRESSES further addresses were requested. */
static inline const char *fresh_address(char address[64]) {
  static atomic_uint next;
  const int on = 1;
  struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof any;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 || bind(fd, (struct sockaddr *)&any, length) != 0 ||
      getsockname(fd, (struct sockaddr *)&any, &length) != 0) {
    perror("fresh_address");
  }
  int before = atomic_exchange(&held_addresses[atomic_fetch_add(&next, 1) % HELD_ADDRESSES], fd);
  if (before > 0) {
    close(before);
  }
  snprintf(address, 64, "127.0.0.1:%d", ntohs(any.sin_port));
  return address;
}

/* Listens at a port of this machine that the kernel chooses; *at receives the address. */
static inline int listen_on_loopback(struct sockaddr_in *at) {
  socklen_t length = sizeof *at;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  *at = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  if (bind(fd, (struct sockaddr *)at, length) != 0 || listen(fd, 1) != 0 ||
      getsockname(fd, (struct sockaddr *)at, &length) != 0) {
    perror("listen_on_loopback");
  }
  return fd;
}

#endif
