/* TCP sockets. */
#define _GNU_SOURCE /* accept4 */
#include "comm/tcp/socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/tcp/tls/tls.h"

dc_status dc__tcp_parse_address(const char *fn, const char *address, dc__tcp_address *out) {
  const char *end = address == NULL ? NULL : strrchr(address, ':');
  bool bracket = address != NULL && address[0] == '[';
  const char *begin = bracket ? address + 1 : address;
  const char *stop = bracket && end != NULL && end > begin && end[-1] == ']' ? end - 1 : end;
  char *rest = NULL;
  long port = end == NULL ? 0 : strtol(end + 1, &rest, 10);
  size_t length = stop == NULL ? 0 : (size_t)(stop - begin);
  bool whole = end != NULL && end[1] >= '0' && end[1] <= '9' && *rest == '\0' && (bracket == (stop != end));
  bool plain = whole && (bracket || memchr(begin, ':', length) == NULL);
  if (!plain || length < 1 || length >= sizeof out->host || port < 1 || port > 65535) {
    return dc__fail(
        DC_E_INVALID,
        "%s: address = \"%.300s\", must be HOST:PORT or [ADDRESS]:PORT, with a host of 1 to %zu bytes and a "
        "port of 1 to 65535",
        fn, address == NULL ? "(NULL)" : address, sizeof out->host - 1);
  }
  memcpy(out->host, begin, length);
  out->host[length] = '\0';
  out->port = (int32_t)port;
  return DC_OK;
}

bool dc__tcp_is_resource_error(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

/* The sockets of this process, by descriptor. A child of fork() closes its copies, which would keep a dead parent's
 * connections open. */
enum { SOCKETS = DC__TLS_SOCKETS, SOCKET_BITS = 64 };
static atomic_ullong sockets[SOCKETS / SOCKET_BITS];

static void close_in_child(void) {
  for (int i = 0; i < SOCKETS / SOCKET_BITS; i++) {
    unsigned long long word = atomic_exchange_explicit(&sockets[i], 0, memory_order_relaxed);
    for (int bit = 0; word != 0; bit++, word >>= 1) {
      if (word & 1) {
        dc__tls_forget(i * SOCKET_BITS + bit);
        close(i * SOCKET_BITS + bit);
      }
    }
  }
}

static void install_fork_handler(void) {
  (void)pthread_atfork(NULL, NULL, close_in_child);
}

static void note_socket(int fd, bool is_open) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (fd < SOCKETS) {
    unsigned long long bit = 1ULL << (fd % SOCKET_BITS);
    pthread_once(&once, install_fork_handler);
    if (is_open) {
      atomic_fetch_or_explicit(&sockets[fd / SOCKET_BITS], bit, memory_order_relaxed);
    } else {
      atomic_fetch_and_explicit(&sockets[fd / SOCKET_BITS], ~bit, memory_order_relaxed);
    }
  }
}

void dc__tcp_close(int *fd) {
  if (*fd >= 0) {
    dc__tls_end(*fd);
    note_socket(*fd, false);
    close(*fd);
    *fd = -1;
  }
}

/* Probes find a vanished machine a second later than heartbeats do (liveness.c), whose error says more. */
void dc__tcp_start_probes(int fd) {
  const int on = 1, idle_s = 2, interval_s = 1, probes = 3;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

/* Disables Nagle's algorithm. */
static void set_options(int fd) {
  const int on = 1;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

dc_status dc__tcp_listen(const unsigned char *at, int32_t *port, int *fd) {
  const int on = 1, off = 0;
  struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)*port)};
  struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)*port)};
  struct sockaddr *address = (struct sockaddr *)&six;
  socklen_t length = sizeof six;
  if (at != NULL) {
    memcpy(&six.sin6_addr, at, 16);
    memcpy(&four.sin_addr, at + 12, 4);
  }
  bool is_four = at != NULL && IN6_IS_ADDR_V4MAPPED(&six.sin6_addr);
  *fd = is_four ? -1 : dc__above_streams(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (*fd >= 0) {
    (void)setsockopt(*fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off); /* IPv4 too */
  } else if (at == NULL || is_four) {
    address = (struct sockaddr *)&four;
    length = sizeof four;
    *fd = dc__above_streams(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  }
  if (*fd < 0) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: no socket: %s", strerror(errno));
  }
  (void)setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on); /* allows the port of a run that just ended */
  if (bind(*fd, address, length) != 0 || listen(*fd, SOMAXCONN) != 0 || getsockname(*fd, address, &length) != 0) {
    int error = errno;
    char where[DC__TCP_PEER];
    dc__tcp_address_text(address, where);
    dc__tcp_close(fd);
    return dc__fail(error == EADDRINUSE ? DC_E_EXISTS : DC_E_SYSTEM, "dc_comm_create_tcp: can't listen at %s: %s",
                    where, strerror(error));
  }
  note_socket(*fd, true);
  *port = ntohs(address->sa_family == AF_INET6 ? six.sin6_port : four.sin_port);
  return DC_OK;
}

/* Polls for events. False with errno: ETIMEDOUT after the deadline, ECANCELED once `ends` is readable (-1: none). */
static bool wait_socket(int fd, short events, int ends, int64_t deadline) {
  struct pollfd waits[] = {{.fd = fd, .events = events}, {.fd = ends, .events = POLLIN}};
  for (;;) {
    int ready = poll(waits, 2, dc__poll_timeout_ms(deadline));
    if (ready > 0 && waits[1].revents != 0) {
      errno = ECANCELED;
      return false;
    }
    if (ready > 0) {
      return true;
    }
    if (ready == 0 && dc__now_ns() >= deadline) {
      errno = ETIMEDOUT;
      return false;
    }
    if (ready < 0 && errno != EINTR) {
      return false;
    }
  }
}

/* TCP self-connect: if no socket listens at a local port, the system may give that very port to the connecting
 * socket. */
static bool is_self_connected(int fd) {
  struct sockaddr_storage own = {0}, peer = {0};
  socklen_t own_length = sizeof own, peer_length = sizeof peer;
  return getsockname(fd, (struct sockaddr *)&own, &own_length) == 0 &&
         getpeername(fd, (struct sockaddr *)&peer, &peer_length) == 0 && own_length == peer_length &&
         memcmp(&own, &peer, own_length) == 0;
}

int dc__tcp_connect(const struct sockaddr *address, socklen_t length, int ends, int64_t deadline) {
  int fd = dc__above_streams(socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd < 0) {
    return -1;
  }
  const int on = 1; /* its local port stays usable for listeners */
  (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  int error = connect(fd, address, length) == 0 ? 0 : errno;
  if (error == EINPROGRESS || error == EINTR) {
    socklen_t size = sizeof error;
    const bool waited = wait_socket(fd, POLLOUT, ends, deadline);
    error = !waited || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0 ? errno : error;
  }
  if (error == 0 && is_self_connected(fd)) {
    error = ECONNREFUSED;
  }
  if (error != 0) {
    close(fd);
    errno = error;
    return -1;
  }
  set_options(fd);
  note_socket(fd, true);
  return fd;
}

int dc__tcp_accept(int listener) {
  /* SOCK_CLOEXEC at once: another thread may fork. */
  int fd = dc__above_streams(accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd >= 0) {
    set_options(fd);
    note_socket(fd, true);
  }
  return fd;
}

ssize_t dc__tcp_write(int fd, const void *data, size_t bytes) {
  dc__tls *tls = dc__tls_of(fd);
  const struct iovec all = {(void *)(uintptr_t)data, bytes};
  return tls != NULL ? dc__tls_write(tls, &all, 1) : send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
}

ssize_t dc__tcp_write_list(int fd, struct iovec *list, size_t count) {
  dc__tls *tls = dc__tls_of(fd);
  const struct msghdr message = {.msg_iov = list, .msg_iovlen = count};
  return tls != NULL ? dc__tls_write(tls, list, count) : sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

ssize_t dc__tcp_read(int fd, void *data, size_t bytes) {
  dc__tls *tls = dc__tls_of(fd);
  return tls != NULL ? dc__tls_read(tls, data, bytes, false) : recv(fd, data, bytes, MSG_DONTWAIT);
}

ssize_t dc__tcp_read_list(int fd, struct iovec *list, size_t count) {
  dc__tls *tls = dc__tls_of(fd);
  struct msghdr message = {.msg_iov = list, .msg_iovlen = count};
  return tls != NULL ? dc__tls_read(tls, list[0].iov_base, list[0].iov_len, false)
                     : recvmsg(fd, &message, MSG_DONTWAIT);
}

ssize_t dc__tcp_peek(int fd, void *data, size_t bytes) {
  dc__tls *tls = dc__tls_of(fd);
  return tls != NULL ? dc__tls_read(tls, data, bytes, true) : recv(fd, data, bytes, MSG_PEEK | MSG_DONTWAIT);
}

bool dc__tcp_send_all(int fd, const void *data, size_t bytes, int64_t deadline) {
  const char *at = data;
  while (bytes > 0) {
    ssize_t sent = dc__tcp_write(fd, at, bytes);
    if (sent > 0) {
      at += sent;
      bytes -= (size_t)sent;
    } else if (errno != EINTR && (errno != EAGAIN || !wait_socket(fd, POLLOUT, -1, deadline))) {
      return false;
    }
  }
  return true;
}

bool dc__tcp_receive_all(int fd, void *data, size_t bytes, int64_t deadline, size_t *got) {
  *got = 0;
  while (*got < bytes) {
    ssize_t part = dc__tcp_read(fd, (char *)data + *got, bytes - *got);
    if (part == 0) {
      errno = 0;
      return false;
    }
    if (part > 0) {
      *got += (size_t)part;
    } else if (errno != EINTR && (errno != EAGAIN || !wait_socket(fd, POLLIN, -1, deadline))) {
      return false;
    }
  }
  return true;
}

/* ---- for error texts ---- */

void dc__tcp_address_text(const struct sockaddr *address, char text[DC__TCP_PEER]) {
  char host[INET6_ADDRSTRLEN];
  struct sockaddr_in6 six;
  struct sockaddr_in four;
  snprintf(text, DC__TCP_PEER, "an unknown address");
  if (address->sa_family == AF_INET) {
    memcpy(&four, address, sizeof four);
  } else if (address->sa_family == AF_INET6) {
    memcpy(&six, address, sizeof six);
    if (!IN6_IS_ADDR_V4MAPPED(&six.sin6_addr)) {
      if (inet_ntop(AF_INET6, &six.sin6_addr, host, sizeof host) != NULL) {
        snprintf(text, DC__TCP_PEER, "[%s]:%d", host, ntohs(six.sin6_port));
      }
      return;
    }
    four.sin_port = six.sin6_port;
    memcpy(&four.sin_addr, six.sin6_addr.s6_addr + 12, 4);
  } else {
    return;
  }
  if (inet_ntop(AF_INET, &four.sin_addr, host, sizeof host) != NULL) {
    snprintf(text, DC__TCP_PEER, "%s:%d", host, ntohs(four.sin_port));
  }
}

void dc__tcp_peer_text(int fd, char text[DC__TCP_PEER]) {
  struct sockaddr_storage address = {0};
  socklen_t length = sizeof address;
  (void)getpeername(fd, (struct sockaddr *)&address, &length); /* fails if the peer is gone */
  dc__tcp_address_text((const struct sockaddr *)&address, text);
}

void dc__tcp_error_text(int error, char text[DC__TCP_ERROR]) {
  static const struct {
    int error;
    const char *name;
  } names[] = {{ECONNRESET, "ECONNRESET"},
               {EPIPE, "EPIPE"},
               {ETIMEDOUT, "ETIMEDOUT"},
               {ECONNABORTED, "ECONNABORTED"},
               {EHOSTUNREACH, "EHOSTUNREACH"},
               {ENETUNREACH, "ENETUNREACH"},
               {ENETDOWN, "ENETDOWN"},
               {EHOSTDOWN, "EHOSTDOWN"},
               {ENETRESET, "ENETRESET"},
               {ECONNREFUSED, "ECONNREFUSED"},
               {ENOTCONN, "ENOTCONN"},
               {EPROTO, "EPROTO"},
               {EBADMSG, "EBADMSG"}};
  for (size_t i = 0; i < DC__COUNT(names); i++) {
    if (names[i].error == error) {
      snprintf(text, DC__TCP_ERROR, "%s (%s)", names[i].name, strerror(error));
      return;
    }
  }
  snprintf(text, DC__TCP_ERROR, "errno %d (%s)", error, strerror(error));
}
