/* The handshake's codes, and its connecting side. */
#ifndef DC_COMM_TCP_AUTH_H
#define DC_COMM_TCP_AUTH_H

#include "comm/tcp/tcp.h"

/* Sets the group's key. NULL: no secret. */
void dc__tcp_set_secret(dc__tcp_group *group, const char *secret);
/* False if the system has no random bytes. */
bool dc__tcp_opening_make(const dc__tcp_group *group, dc__tcp_opening *opening);
bool dc__tcp_opening_is_known(const dc__tcp_opening *opening);
/* The code of a hello (answer NULL) or of an answer to it. */
void dc__tcp_mac(const dc__tcp_group *group, const dc__tcp_opening *connects, const dc__tcp_opening *accepts,
                 const dc__tcp_hello *hello, const dc__tcp_answer *answer, unsigned char mac[DC__MAC_BYTES]);
/* The key of a connection's TLS, which differs for each connection. */
void dc__tcp_tls_key(const dc__tcp_group *group, const dc__tcp_opening *connects, const dc__tcp_opening *accepts,
                     const dc__tcp_hello *hello, unsigned char key[DC__MAC_BYTES]);

enum dc__tcp_call_result {
  DC__TCP_CALL_OK = 0,
  DC__TCP_CALL_LOST,    /* error is errno, or 0 if the peer closed the connection */
  DC__TCP_CALL_FOREIGN, /* the peer is not libdc; quoted has its bytes */
  DC__TCP_CALL_FAILED   /* this thread's last error says why; status is its status */
};

/* An outgoing connection in its handshake. */
typedef struct dc__tcp_call {
  int fd;
  int32_t to; /* the rank that is to answer */
  dc__tcp_opening own, theirs;
  dc__tcp_hello hello;
  bool challenged; /* libdc listens there */
  bool accepted;   /* the peer has proved itself */
  int error;
  dc_status status;
  size_t quoted_bytes;
  char quoted[48];
} dc__tcp_call;

/* The four steps of a call, of which dc__tcp_call_encrypt() is the last. Steps of several calls may interleave, so that
 * round trips overlap. `where` names the peer in errors. A failure of the group ends the waits. */
enum dc__tcp_call_result dc__tcp_call_open(const dc__tcp_group *group, dc__tcp_call *call, int64_t deadline);
enum dc__tcp_call_result dc__tcp_call_prove(const dc__tcp_group *group, dc__tcp_call *call, int64_t deadline,
                                            const char *where);
enum dc__tcp_call_result dc__tcp_call_finish(const dc__tcp_group *group, dc__tcp_call *call, int64_t deadline,
                                             const char *where);
/* Whether to connect again: the peer may have dropped this connection because it had too many. If the peer is libdc,
 * until the deadline; else only a few times, since it may be another service. */
bool dc__tcp_may_return(const dc__tcp_call *call, int32_t attempt);
/* Pauses before another attempt, since a rank that dropped this one had too many connections. The pause grows, and
 * differs between ranks. It ends early at the deadline, or if the group fails. */
void dc__tcp_back_off(const dc__tcp_group *group, int32_t attempt, int64_t deadline);
/* Completes TLS, which the step before began. Does nothing if the connection has no TLS. */
enum dc__tcp_call_result dc__tcp_call_encrypt(const dc__tcp_group *group, dc__tcp_call *call, int64_t deadline,
                                              const char *where);

#endif
