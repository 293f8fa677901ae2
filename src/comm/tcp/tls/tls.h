/* TLS 1.3 on a connection whose ends have proved themselves (bootstrap/auth.c), by OpenSSL's libssl.so.3, opened at run
 * time. Each connection has a pre-shared key of its own, derived from the group's secret and its handshake. A
 * Diffie-Hellman exchange is added, so that a secret that leaks later decrypts no recorded connection. There are no
 * certificates. An end without the key cannot complete the handshake.
 *
 * OpenSSL's objects serve one thread at a time, and a control connection is read and written by several: each has a
 * lock. A record is at most 16 KiB, and never has parts of two messages. So a rank that has read a message finds
 * nothing of the next one in OpenSSL's memory, where poll() does not see it.
 *
 * The kernel's TLS is not used: a key may encrypt at most 2^24 records, and the kernel cannot change keys before Linux
 * 6.14, or if OpenSSL drives it. docs/security.md says what it would save. */
#ifndef DC_COMM_TCP_TLS_H
#define DC_COMM_TCP_TLS_H

#include <sys/uio.h>

#include "base/base.h"

enum { DC__TLS_KEY = 32, DC__TLS_SOCKETS = 65536 /* descriptors below can have TLS */ };

/* Records after which an end sends with a new key. RFC 8446, 5.5 allows 2^24.5; tests take less. */
extern _Atomic uint64_t dc__tls_records_per_key;

typedef struct dc__tls dc__tls;

/* Opens the library, once per process. fn: the public function, for the error. */
dc_status dc__tls_load(const char *fn);
/* Puts TLS on a connection, until dc__tls_end(). False with errno. connects: this end began the connection. */
bool dc__tls_begin(int fd, bool connects, const unsigned char key[DC__TLS_KEY]);
/* Call before the descriptor is closed. Sends nothing to the peer: libdc's own messages tell why a connection ends. */
void dc__tls_end(int fd);
/* Only forgets the connection: for a child of fork(), whose parent's other threads may have held its lock. */
void dc__tls_forget(int fd);
/* NULL: the connection has no TLS. */
dc__tls *dc__tls_of(int fd);

/* The functions that follow do not wait. As those of the system they return -1 with errno, which is EAGAIN where they
 * would wait. EBADMSG: received bytes are not those that the peer sent, or the peer says so about this rank's. */

/* 1 once the handshake is complete; 0 if the peer closed the connection. */
int dc__tls_handshake(dc__tls *tls);
/* Sends one record. After EAGAIN the next call must have the same bytes. */
ssize_t dc__tls_write(dc__tls *tls, const struct iovec *list, size_t count);
ssize_t dc__tls_read(dc__tls *tls, void *data, size_t bytes, bool peeks);

#endif
