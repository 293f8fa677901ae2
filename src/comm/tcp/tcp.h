/* The transport between machines: every rank has a connection to every other one, of TCP.
 *
 * Rank 0 listens where the caller said and tells all ranks where each of them listens (rendezvous.c). A mesh is one
 * connection between any two ranks, made by the higher one (mesh.c): each communicator of the group has one for its
 * collectives, and the group has one more, its control mesh. A thread of each rank, the watcher, reads the control mesh
 * and answers newcomers (watcher.c). Over it ranks ask each other who is late (stragglers.c) and agree on one failure
 * for all (failure.c).
 *
 * In a collective each rank sends everybody its call and, behind it, what that rank is to have. It reads all calls and
 * compares them before it reads any data (collective.c), so nothing is written where ranks differ. Data go from the
 * caller's memory to the caller's memory; parts of a reduction go to a rank of their own, which adds them in the order
 * of ranks.
 */
#ifndef DC_COMM_TCP_H
#define DC_COMM_TCP_H

#include <sys/uio.h>

#include "comm/rank_set.h"
#include "comm/signature.h"
#include "comm/tcp/socket.h"

enum {
  DC__TCP_PROTOCOL = 3, /* raise it when a message changes */
  DC__TCP_NAME = 88,    /* of the group, zeros behind it */
  DC__TCP_TEXT = 512,
  DC__TCP_RENDEZVOUS = -1,   /* the mesh number of a rank that wants rank 0's table */
  DC__TCP_CONTROL = 0,       /* that of the control mesh */
  DC__TCP_MAX_PENDING = 256, /* connections that have not said who they are */
  DC__TCP_MAX_AHEAD = 1024,  /* communicators that a rank may make before another one begins to */
  DC__TCP_SEQ_LEAVE = 0,     /* in place of a call's number: the rank destroys this communicator, and maybe no other */
  DC__TCP_CLOSED = 1,        /* a rank destroyed its last communicator */
  DC__TCP_DISCONNECTED = 2   /* its control connection ended without a word */
};

#define DC__TCP_MAGIC "libdc/t" /* with its zero byte the first eight bytes of a connection, in both directions */

/* The first message of every connection. */
typedef struct dc__tcp_hello {
  char magic[8];
  uint32_t byte_order; /* 1; a machine with another order of bytes reads another number */
  uint32_t protocol;   /* DC__TCP_PROTOCOL, and sizes of structs */
  int32_t rank;
  int32_t world;
  int32_t mesh;
  int32_t port; /* DC__TCP_RENDEZVOUS: where the rank listens */
  char name[DC__TCP_NAME];
} dc__tcp_hello;

/* Where a rank listens: an address of IPv6, or one of IPv4 mapped into it. */
typedef struct dc__tcp_endpoint {
  unsigned char address[16];
  int32_t port;
  int32_t on_root_machine; /* 1: on rank 0's machine; the address is that by which rank 0 was reached */
} dc__tcp_endpoint;

/* Rank 0's answer to DC__TCP_RENDEZVOUS: at once that it heard the hello, and later how the meeting ended. Behind the
 * last answer of a meeting that succeeded come the places of DC__COMM_MAX_WORLD ranks. */
typedef struct dc__tcp_welcome {
  char magic[8];
  int32_t status;
  int32_t more; /* 1: rank 0 waits for other ranks, and will say more */
  char text[DC__TCP_TEXT];
} dc__tcp_welcome;

/* What goes over the control mesh. */
enum dc__tcp_control_kind {
  DC__TCP_GOODBYE = 1, /* the rank destroys its last communicator */
  DC__TCP_FAILURE,     /* why the group fails, says this rank or one that it heard: its vote */
  DC__TCP_QUERY,       /* has the receiver come to a collective? */
  DC__TCP_REPLY
};

typedef struct dc__tcp_control_msg {
  int32_t kind;
  int32_t status; /* FAILURE: of it; ANSWER: enum dc__tcp_rank_state */
  int32_t rank;   /* FAILURE: whose it was first */
  int32_t mesh;   /* QUESTION: whose collective; ANSWER: where the asked communicator's user is held, see seq */
  int64_t query;  /* QUESTION and ANSWER: its number */
  uint64_t seq;   /* QUESTION: the collective's number; ANSWER: of that in which the user is held; 0: in none */
  int64_t id;     /* ANSWER: the rank's latest collective, or that in which it waits: parameter */
  int32_t op;     /* ... and operator; 0: none yet */
  int32_t reserved;
  dc__rank_set ranks; /* FAILURE: those that answer no question; ANSWER: those that the rank waits for */
  char text[DC__TCP_TEXT];
} dc__tcp_control_msg;

/* What a rank says of a collective that others wait for it at. */
enum dc__tcp_rank_state {
  DC__TCP_NO_REPLY = 0,    /* no answer */
  DC__TCP_NOT_WAITING,     /* not there, and does not wait elsewhere */
  DC__TCP_WAITS_ELSEWHERE, /* waits for other ranks in another collective */
  DC__TCP_ARRIVED,         /* there, or past it */
  DC__TCP_LEFT             /* it destroyed the communicator */
};

typedef struct dc__tcp_reply {
  int32_t state;
  int32_t op;
  int64_t id;
  uint64_t blocked_in; /* the number of the collective of `mesh` in which the user is held; 0: in none */
  int32_t mesh;
  dc__rank_set waits_for;
} dc__tcp_reply;

/* For whom a rank waits, for its watcher to tell. */
typedef struct dc__tcp_wait {
  atomic_int waits;
  atomic_ullong ranks[DC__RANK_WORDS];
} dc__tcp_wait;

/* A connection that said its hello before its mesh was asked for. */
typedef struct dc__tcp_early {
  int fd;
  int32_t mesh;
  int32_t rank;
} dc__tcp_early;

/* Connections that were accepted and have not said all of their hello. */
typedef struct dc__tcp_pending {
  int fds[DC__TCP_MAX_PENDING];
  size_t bytes_received[DC__TCP_MAX_PENDING];
  dc__tcp_hello hellos[DC__TCP_MAX_PENDING];
  int32_t count;
  int64_t rejected; /* sent away so far */
  char last[160];   /* where the last of them came from, and what it was */
} dc__tcp_pending;

typedef struct dc__tcp_group {
  atomic_int refs;     /* communicators */
  atomic_ullong calls; /* collectives that they started */
  int32_t rank;
  int32_t world;
  int64_t timeout_ns;
  int64_t formed_ns; /* when; 0: not yet */
  char name[DC__TCP_NAME];
  int listener;
  dc__tcp_endpoint endpoints[DC__COMM_MAX_WORLD];
  pthread_mutex_t mesh_mutex; /* one mesh at a time; guards what follows, to early_count */
  int32_t meshes;             /* made so far */
  dc__tcp_pending pending;    /* from mesh to mesh: one that is slow to say its hello may be a rank that is ahead */
  dc__tcp_early *early;       /* of ranks that make several communicators while this one is busy elsewhere */
  int64_t early_capacity;
  int32_t early_count;
  dc__tcp_wait mesh_wait;          /* for whom this rank waits in a mesh that it makes */
  int control[DC__COMM_MAX_WORLD]; /* -1: none */
  int failure_event;               /* readable from the group's failure on */
  int wake_event;                  /* tells the watcher that a mesh was made, or that it ends */
  atomic_int stopping;             /* 1: the watcher */
  bool watcher_running;
  pthread_t watcher;
  atomic_int closed[DC__COMM_MAX_WORLD]; /* DC__TCP_CLOSED, DC__TCP_DISCONNECTED; 0: there */
  atomic_int error[DC__COMM_MAX_WORLD];  /* DC__TCP_DISCONNECTED: errno; 0: the other side closed the connection */
  pthread_mutex_t query_mutex;           /* one question at a time */
  pthread_mutex_t mutex;                 /* all below, and who writes notices */
  pthread_cond_t changed;                /* a notice, the end of a connection, the failure */
  bool unreachable[DC__COMM_MAX_WORLD];  /* a notice could not be sent to it */
  struct dc__tcp *members;               /* communicators */
  int32_t joined;                        /* the number of the next mesh that gets one */
  int64_t query;                         /* the number of the last one */
  dc__tcp_reply *answers;                /* of the one that is asked now, by rank; NULL: none is */
  bool voted;                            /* this rank has said how the group fails */
  dc__tcp_control_msg vote;              /* the best that this rank heard or said */
  dc__rank_set votes;                    /* of whom it has heard one */
  dc__rank_set unresponsive;             /* who did not answer the last question */
  int64_t vote_deadline;                 /* when it waits for no more votes */
  dc__failure failure;
  atomic_int failed;
} dc__tcp_group;

/* What goes to a rank and comes from it in one collective: a call and then data. */
typedef struct dc__tcp_transfer {
  int fd;
  int32_t out_count, out_pos;
  int32_t in_count, in_pos;
  size_t bytes_received; /* bytes of its head */
  struct iovec out[DC__COMM_GROUP + 1];
  struct iovec in[DC__COMM_GROUP];
  struct dc__tcp_header {
    uint64_t seq;   /* from 1, or DC__TCP_SEQ_LEAVE */
    uint64_t bytes; /* of data behind it */
    dc__signature call;
  } recv_header, send_header;
} dc__tcp_transfer;

typedef struct dc__tcp {
  struct dc_comm head;
  dc__tcp_group *group;
  struct dc__tcp *next; /* of the group's */
  int32_t mesh;
  pthread_mutex_t collective_mutex; /* one collective at a time */
  uint64_t seq;                     /* of the latest collective */
  atomic_ullong reached; /* the same, for the watcher; its number in the group's order; its operator and parameter */
  atomic_ullong number;
  atomic_int op;
  atomic_llong id;
  dc__tcp_wait wait;
  dc__comm_usage use;
  dc__tcp_transfer *flows; /* one a rank; this rank's has no connection */
  struct pollfd *polls;
  dc__tcp_reply *answers;    /* to this communicator's question, by rank */
  dc__rank_set unresponsive; /* who did not answer it */
  char *scratch;             /* what comes for reductions */
  size_t scratch_bytes;
} dc__tcp;

/* ---- rendezvous.c: opens the listener and fills in places ---- */

dc_status dc__tcp_rendezvous(dc__tcp_group *group, const dc__tcp_address *address, int64_t deadline);
/* Says this thread's last error to one that wants to meet. */
void dc__tcp_reject(int fd, dc_status status);

/* ---- handshake.c: who comes to the listener ---- */

dc__tcp_hello dc__tcp_hello_make(const dc__tcp_group *group, int32_t mesh);
/* Whether a hello is of this group and of a rank of it. */
bool dc__tcp_hello_matches(const dc__tcp_group *group, const dc__tcp_hello *hello);
/* Whether a hello is of another group or another version of libdc: an error. */
dc_status dc__tcp_hello_check(const dc__tcp_group *group, const dc__tcp_hello *hello);
/* Notes where a connection came from that is sent away, and what it was. */
void dc__tcp_note_rejected(dc__tcp_pending *pending, int fd, const char *what);
/* Waits, at most to the deadline, for a hello: true, and the connection is the caller's. False with *status DC_OK: none
 * came. Others than libdc are sent away. extra: more that ends the wait when it is readable. */
bool dc__tcp_wait_hello(dc__tcp_group *group, const int *extra, int32_t extra_count, int64_t deadline,
                        dc__tcp_hello *hello, int *fd, dc_status *status);
/* As dc__tcp_wait_hello(), of what is there already. newcomers: poll() says that there are connections to accept. */
bool dc__tcp_poll_hello(dc__tcp_group *group, bool can_accept, dc__tcp_hello *hello, int *fd, dc_status *status);
void dc__tcp_pending_close(dc__tcp_pending *pending);

/* ---- mesh.c ---- */

/* The group's next mesh: fds has one a rank, -1 for this one. Every rank must ask for it. *mesh: its number. When the
 * control mesh fails, fds keeps the connections that were made, so that the reason can be told. */
dc_status dc__tcp_mesh_connect(dc__tcp_group *group, int64_t deadline, int *fds, int32_t *mesh);
/* For the watcher, which holds the mutex `meeting`: takes in who said hello. newcomers: as above. *retry: nothing can
 * be accepted for want of descriptors or memory. */
void dc__tcp_serve_listener(dc__tcp_group *group, bool can_accept, bool *retry);

/* ---- failure.c: one failure for the whole group ---- */

/* The group's failure, as this thread's last error. */
dc_status dc__tcp_group_check(dc__tcp_group *group);
/* Makes the group fail, on all ranks with the same error: this thread's last one, or another rank's. Returns when the
 * ranks have agreed, or do not answer. */
void dc__tcp_group_fail(dc__tcp_group *group, dc_status status);
/* The same for the watcher, which must not wait: without the last sentence. */
void dc__tcp_group_fail_async(dc__tcp_group *group, dc_status status);
/* For the watcher: a vote came from a rank; or its connection ended, or time passed. The mutex is the caller's. */
void dc__tcp_handle_vote(dc__tcp_group *group, int32_t r, dc__tcp_control_msg *vote);
void dc__tcp_decide_failure(dc__tcp_group *group);
/* Whether what another rank said is why it failed; the text is made fit to be shown. */
bool dc__tcp_is_failure(int32_t status, char text[DC__TCP_TEXT]);
/* Waits for dc__tcp_group.news; may return sooner. The mutex is the caller's. */
void dc__tcp_wait_change(dc__tcp_group *group, int64_t until);
/* To one rank, or to all. The mutex is the caller's, so that notices do not mix. */
void dc__tcp_send_control(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *notice);
void dc__tcp_broadcast_control(dc__tcp_group *group, const dc__tcp_control_msg *notice);

/* ---- watcher.c ---- */

dc_status dc__tcp_start_watcher(dc__tcp_group *group);

/* ---- stragglers.c: which rank is the reason ---- */

void dc__tcp_wait_begin(dc__tcp_wait *wait, const dc__rank_set *ranks);
void dc__tcp_wait_end(dc__tcp_wait *wait);
/* Asks ranks, at most for a second, whether they have come to this communicator's present collective. Ends at once when
 * the group fails. */
void dc__tcp_query_ranks(dc__tcp *self, const dc__rank_set *ranks);
void dc__tcp_ask_all(dc__tcp *self);
/* For the watcher, under the mutex. */
void dc__tcp_handle_query(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *query);
void dc__tcp_handle_reply(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *answer);
/* At a deadline, after dc__tcp_query_ranks(): DC_E_TIMEOUT that names who is late, which may be others than those that
 * this rank lacks; called: of these the calls came, and not all data. */
dc_status dc__tcp_fail_timeout(const dc__tcp *self, const dc__rank_set *missing, bool has_header, const char *doing);
/* Why the connection to rank r ended, as an error: a failure that it or another rank reported, else what became of it.
 * error: errno, 0: it was closed; left: the rank said before that it destroys this communicator. */
dc_status dc__tcp_fail_lost(dc__tcp *self, int32_t r, int error, bool left, const char *doing);
/* Why a rank is gone, which dc__tcp_group.gone says that it is. */
dc_status dc__tcp_fail_closed(dc__tcp_group *group, int32_t r, const char *doing);

/* ---- crossed.c ---- */

/* For the watcher, under the mutex: where the user of the communicator that was asked about is held, if that has not
 * asked for the question's collective. */
void dc__tcp_add_blocked(const dc__tcp_group *group, const dc__tcp *asked, const dc__tcp_control_msg *query,
                         dc__tcp_control_msg *answer);
/* While calls of the present collective are missing: says whether this rank's user is held there and, the first time
 * that it is, asks whether others are held in collectives that it has not come to: an error for all. */
dc_status dc__tcp_check_deadlock(dc__tcp *self, const char *doing);
/* The same, after dc__tcp_query_ranks(). */
dc_status dc__tcp_fail_deadlock(dc__tcp *self, const char *doing);

/* ---- group.c ---- */

dc_status dc__tcp_group_create(const char *address, const char *name, int32_t rank, int32_t world, int64_t timeout_ns,
                               dc__tcp_group **out);
void dc__tcp_group_release(dc__tcp_group *group);
void dc__tcp_group_add(dc__tcp_group *group, dc__tcp *member);
void dc__tcp_group_remove(dc__tcp_group *group, const dc__tcp *member);

/* ---- collective.c ---- */

void dc__tcp_run(dc_comm *comm, const dc__coll *coll);
/* Says to all others that this communicator goes, if they can hear it at once. */
void dc__tcp_leave(const dc__tcp *self);
bool dc__tcp_agree(dc_comm *comm, const dc__coll *coll, uint64_t word);

#endif
