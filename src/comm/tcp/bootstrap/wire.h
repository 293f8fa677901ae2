/* The messages between two ranks over TCP. */
#ifndef DC_COMM_TCP_WIRE_H
#define DC_COMM_TCP_WIRE_H

#include "comm/rank_set.h"
#include "comm/tcp/hmac/hmac.h"

enum {
  DC__TCP_PROTOCOL = 11, /* raise it when a message changes */
  DC__TCP_NAME = 88,     /* of the group, zero-padded */
  DC__TCP_TEXT = 512,
  DC__TCP_RUN = 16, /* random bytes of one rendezvous, which differ from an earlier one's */
  DC__TCP_DENIED = -1,
  DC__TCP_RENDEZVOUS = -1, /* mesh number of a hello that asks for rank 0's table */
  DC__TCP_CONTROL = 0,     /* that of the control mesh */
  DC__TCP_FIRST = 1,       /* that of the first communicator, the last one that uses the rendezvous' listeners */
  DC__TCP_SEQ_LEAVE = 0,   /* instead of a call's number: the rank destroys this communicator, and maybe no other */
};

#define DC__TCP_FORMING UINT64_MAX /* instead of a call's number: the communicator is in creation */
#define DC__TCP_MAGIC "libdc/t"    /* with its zero byte the first eight bytes of a connection, in both directions */

/* The first message of every connection, in both directions. It tells nothing about the group. */
typedef struct dc__tcp_opening {
  char magic[8];
  uint32_t byte_order; /* 1, which reads differently with another byte order */
  uint32_t protocol;   /* DC__TCP_PROTOCOL, and sizes of structs */
  uint32_t sealed;     /* 1 if the sender has a secret */
  uint32_t tls;        /* 1 if it wants TLS after the handshake, except for the rendezvous' connection */
  unsigned char nonce[32];
} dc__tcp_opening;

/* The connecting rank's second message is its hello, and a code (HMAC) over both openings and the hello. */
typedef struct dc__tcp_hello {
  int32_t rank;
  int32_t world;
  int32_t mesh;
  int32_t port; /* of the rank's listener, with DC__TCP_RENDEZVOUS */
  unsigned char run[DC__TCP_RUN];
  unsigned char address[16]; /* where it listens; zeros: at the address where its connection comes from */
  char name[DC__TCP_NAME];
} dc__tcp_hello;

typedef struct dc__tcp_proof {
  dc__tcp_hello hello;
  unsigned char mac[DC__MAC_BYTES];
} dc__tcp_proof;

/* The accepting rank's second message. If the proof is wrong, it is DC__TCP_DENIED without a valid code. */
typedef struct dc__tcp_answer {
  unsigned char mac[DC__MAC_BYTES]; /* over both openings, the hello and what follows */
  int32_t status;
  int32_t rank; /* the sender's */
  char text[DC__TCP_TEXT];
} dc__tcp_answer;

/* Where a rank listens: an IPv6 or IPv4-mapped address. */
typedef struct dc__tcp_endpoint {
  unsigned char address[16];
  int32_t port;
  int32_t on_root_machine; /* 1 if on rank 0's machine: its address is the one by which rank 0 was reached */
} dc__tcp_endpoint;

/* Rank 0's answers to DC__TCP_RENDEZVOUS: an acknowledgement of the hello, and later the result. On success the
 * endpoints of all ranks follow. */
typedef struct dc__tcp_welcome {
  char magic[8];
  int32_t status;
  int32_t more; /* 1 if rank 0 waits for other ranks and will answer again */
  unsigned char run[DC__TCP_RUN];
  char text[DC__TCP_TEXT];
} dc__tcp_welcome;

/* Messages of the control mesh. */
enum dc__tcp_control_kind {
  DC__TCP_GOODBYE = 1, /* the rank destroys its last communicator */
  DC__TCP_FAILURE,     /* the sender's vote: why the group fails */
  DC__TCP_QUERY,       /* has the receiver joined a collective? */
  DC__TCP_REPLY,
  DC__TCP_HEARTBEAT, /* the sender's watcher runs */
  DC__TCP_LISTENING, /* the sender waits for higher ranks to connect */
  DC__TCP_ENDED      /* in an overlay: `ranks` ended without a goodbye, the last one known with errno `status` */
};

typedef struct dc__tcp_control_msg {
  int32_t kind;
  int32_t status;   /* FAILURE: dc_status; REPLY: enum dc__tcp_rank_state; LISTENING: the port */
  int32_t rank;     /* FAILURE: the rank that reported it first */
  int32_t mesh;     /* QUERY, LISTENING: its mesh; REPLY: where the queried communicator's user is blocked (seq) */
  int64_t query;    /* QUERY, REPLY: the query's number */
  uint64_t seq;     /* QUERY: the collective's number, 0 for a communicator in creation; REPLY: the one that blocks the
                       user, or DC__TCP_FORMING; 0: none */
  int64_t id;       /* REPLY: parameter of the rank's latest collective, or of the one it waits in */
  int32_t op;       /* REPLY: its operator; 0: none yet */
  int32_t hops;     /* in an overlay: how often it was passed on */
  int32_t from, to; /* the sender, and the receiver of a message to one rank */
  dc__rank_set votes; /* FAILURE in an overlay: ranks whose vote the sender knows, or which have ended */
  dc__rank_set ranks; /* FAILURE: unresponsive ranks; REPLY: the ranks that it waits for; ENDED */
  char text[DC__TCP_TEXT];
} dc__tcp_control_msg;

#endif
