/* TCP sockets: addresses, and calls that raise no SIGPIPE and resume after signals. */
#ifndef DC_COMM_TCP_SOCKET_H
#define DC_COMM_TCP_SOCKET_H

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include "base/base.h"

/* An address of the form "host:port" or "[address]:port". */
typedef struct dc__tcp_address {
  char host[256];
  int32_t port;
} dc__tcp_address;
dc_status dc__tcp_parse_address(const char *fn, const char *address, dc__tcp_address *out);

/* Listens at the IPv6 or IPv4-mapped address `at`, or at all of the machine's if it is NULL. If *port is 0, picks a
 * free port and stores it. */
dc_status dc__tcp_listen(const unsigned char *at, int32_t *port, int *fd);
/* Tries once, at most until the deadline; -1 with errno. ends: a descriptor that ends the wait with ECANCELED when it
 * becomes readable; -1: none. */
int dc__tcp_connect(const struct sockaddr *address, socklen_t length, int ends, int64_t deadline);
/* The next connection, ready to use; -1 with errno. */
int dc__tcp_accept(int listener);
/* Starts keep-alive probes on a complete connection. A handshake has a deadline and needs none, and a busy machine
 * loses some of many probes at once. */
void dc__tcp_start_probes(int fd);
/* Whether an error is a lack of local descriptors or memory, not the peer's. */
bool dc__tcp_is_resource_error(int error);
void dc__tcp_close(int *fd); /* -1: not open */

enum { DC__TCP_PEER = 64, DC__TCP_ERROR = 96 };
/* The peer's address: "127.0.0.1:4000", "[::1]:4000". */
void dc__tcp_peer_text(int fd, char text[DC__TCP_PEER]);
void dc__tcp_address_text(const struct sockaddr *address, char text[DC__TCP_PEER]);
/* "ECONNRESET (Connection reset by peer)". */
void dc__tcp_error_text(int error, char text[DC__TCP_ERROR]);

/* As send(), sendmsg(), recv() and recvmsg(), through TLS if the connection has it. They neither wait nor raise a
 * signal. EBADMSG: received bytes are not those that the peer sent. */
ssize_t dc__tcp_write(int fd, const void *data, size_t bytes);
ssize_t dc__tcp_write_list(int fd, struct iovec *list, size_t count);
ssize_t dc__tcp_read(int fd, void *data, size_t bytes);
ssize_t dc__tcp_read_list(int fd, struct iovec *list, size_t count);
/* As dc__tcp_read(), and leaves the bytes for the next read. */
ssize_t dc__tcp_peek(int fd, void *data, size_t bytes);
/* Send or receive all bytes, at most until the deadline. False with errno, which is 0 if the peer closed the
 * connection. */
bool dc__tcp_send_all(int fd, const void *data, size_t bytes, int64_t deadline);
/* *got is set on failure too. */
bool dc__tcp_receive_all(int fd, void *data, size_t bytes, int64_t deadline, size_t *got);

#endif
