/* Sockets of TCP: addresses, and calls that neither raise signals nor stop at one that comes. */
#ifndef DC_COMM_TCP_SOCKET_H
#define DC_COMM_TCP_SOCKET_H

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include "base/base.h"

/* "host:port", "[address]:port". */
typedef struct dc__tcp_address {
  char host[256];
  int32_t port;
} dc__tcp_address;
dc_status dc__tcp_parse_address(const char *fn, const char *address, dc__tcp_address *out);

/* A socket that listens on all of the machine's addresses; port 0: any, and *port says which. */
dc_status dc__tcp_listen(int32_t *port, int *fd);
/* Tries once, until the deadline at most: -1 with errno. */
int dc__tcp_connect(const struct sockaddr *address, socklen_t length, int64_t deadline);
/* The next connection, ready to use: -1 with errno. */
int dc__tcp_accept(int listener);
/* Whether an error is this process' or machine's, and not the other side's: what is lacking here. */
bool dc__tcp_is_resource_error(int error);
void dc__tcp_close(int *fd); /* -1: not open */

enum { DC__TCP_PEER = 64, DC__TCP_ERROR = 96 };
/* "127.0.0.1:4000", "[::1]:4000": where the other side of a connection is. */
void dc__tcp_peer_text(int fd, char text[DC__TCP_PEER]);
void dc__tcp_address_text(const struct sockaddr *address, char text[DC__TCP_PEER]);
/* "ECONNRESET (Connection reset by peer)". */
void dc__tcp_error_text(int error, char text[DC__TCP_ERROR]);

/* All of it, at most until the deadline: false with errno, which is 0 where the other side ended. */
bool dc__tcp_send_all(int fd, const void *data, size_t bytes, int64_t deadline);
/* *got: how much came, also when it fails. */
bool dc__tcp_receive_all(int fd, void *data, size_t bytes, int64_t deadline, size_t *got);

#endif
