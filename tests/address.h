/* Where ranks over TCP may meet. */
#ifndef DC_TESTS_ADDRESS_H
#define DC_TESTS_ADDRESS_H

#include <arpa/inet.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

/* An address of this machine at which nobody listens. */
static inline const char *fresh_address(char address[64]) {
  struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof any;
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (bind(fd, (struct sockaddr *)&any, length) != 0 || getsockname(fd, (struct sockaddr *)&any, &length) != 0) {
    perror("fresh_address");
  }
  close(fd);
  snprintf(address, 64, "127.0.0.1:%d", ntohs(any.sin_port));
  return address;
}

#endif
