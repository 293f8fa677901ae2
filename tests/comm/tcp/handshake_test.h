/* The connecting side of a handshake over TCP, played by a test. */
#ifndef DC_TESTS_HANDSHAKE_TEST_H
#define DC_TESTS_HANDSHAKE_TEST_H

#include "comm/tcp/bootstrap/auth.h"
#include "comm_ranks.h"

static const int64_t limit = INT64_C(60000000000);

static inline int connect_to(const char *address) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  to.sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
  for (int64_t end = dc__now_ns() + limit; dc__now_ns() < end;) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) == 0) {
      return fd;
    }
    close(fd);
    sleep_ms(1);
  }
  return -1;
}

/* Plays rank 1's side of the handshake in a group of two without a secret. */
static inline bool prove(int fd, const dc__tcp_group *group, const dc__tcp_hello *hello) {
  dc__tcp_call call = {.fd = fd, .hello = *hello};
  int64_t deadline = dc__now_ns() + limit;
  return dc__tcp_call_open(group, &call, deadline) == DC__TCP_CALL_OK &&
         dc__tcp_call_prove(group, &call, deadline, "here") == DC__TCP_CALL_OK &&
         dc__tcp_call_finish(group, &call, deadline, "here") == DC__TCP_CALL_OK;
}

#endif
