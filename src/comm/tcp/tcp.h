/* The transport between machines: TCP connections between ranks.
 *
 * Rank 0 listens at the caller's address and sends all ranks the table of endpoints (rendezvous.c). A mesh is one
 * connection between any two ranks, made by the higher one (mesh.c). Each communicator has a mesh for its collectives,
 * and the group has one more, the control mesh. A listener is open until the first communicator is made, and again
 * while a further one is made. Each rank's watcher thread reads the control mesh (watcher.c). Over the control mesh
 * ranks find stragglers (stragglers.c), detect deadlocks (deadlock.c) and agree on one failure (failure.c). More than
 * DC__TCP_MAX_MESH ranks have an overlay instead, and make data connections on demand (overlay/).
 *
 * In a collective each rank sends every peer its call, followed by the peer's data. It compares all calls before it
 * reads any data (collective.c), so a mismatch writes nothing. Small ones go in rounds (relay.c). Gathers move data
 * between the callers' buffers without copies; each rank receives its part of a reduction in scratch memory and adds in
 * rank order. */
#ifndef DC_COMM_TCP_H
#define DC_COMM_TCP_H

#include <sys/uio.h>

#include "comm/signature.h"
#include "comm/tcp/bootstrap/wire.h"
#include "comm/tcp/socket.h"

enum {
  DC__TCP_MAX_MESH = 64,      /* ranks with a control connection between any two; more ranks have an overlay */
  DC__TCP_ATTEMPTS = 16,      /* at a handshake that the other side drops before it shows that it is libdc */
  DC__TCP_MAX_PENDING = 1024, /* connections without a complete handshake: all ranks may connect at once */
  DC__TCP_CLOSED = 1,         /* a rank destroyed its last communicator */
  DC__TCP_DISCONNECTED = 2    /* its control connection ended without a goodbye */
};

/* A rank's state with respect to a collective in which others wait for it. */
enum dc__tcp_rank_state {
  DC__TCP_NO_REPLY = 0,    /* no reply */
  DC__TCP_NOT_WAITING,     /* not joined, and not waiting elsewhere */
  DC__TCP_WAITS_ELSEWHERE, /* waits for other ranks in another collective */
  DC__TCP_ARRIVED,         /* joined, or past it */
  DC__TCP_LEFT             /* it destroyed the communicator */
};

typedef struct dc__tcp_reply {
  int32_t state;
  int32_t op;
  int64_t id;
  uint64_t blocked_in; /* the collective of `mesh` that blocks the user, or DC__TCP_FORMING; 0: none */
  int32_t mesh;
  dc__rank_set waits_for;
} dc__tcp_reply;

/* The ranks that a rank waits for, published for its watcher. */
typedef struct dc__tcp_wait {
  atomic_int waits;
  atomic_ullong ranks[DC__RANK_WORDS];
} dc__tcp_wait;

/* A connection that arrived before its communicator wanted it. */
typedef struct dc__tcp_early {
  int fd;
  int32_t mesh;
  int32_t rank;
} dc__tcp_early;

/* An accepted connection whose handshake is not complete. */
typedef struct dc__tcp_candidate {
  int fd;
  bool challenged; /* it sent its opening, and got this rank's */
  bool encrypts;   /* it has proved itself, and TLS's handshake has begun */
  size_t received; /* bytes of the message that is due */
  int64_t since_ns;
  dc__tcp_opening theirs, own;
  dc__tcp_proof proof;
} dc__tcp_candidate;

typedef struct dc__tcp_pending {
  dc__tcp_candidate candidates[DC__TCP_MAX_PENDING]; /* oldest first */
  int32_t count;
  int32_t capacity; /* 0: not known yet */
  atomic_int lacks; /* errno if a connection had to wait for a free descriptor; 0: none did */
  int64_t rejected;
  char last[160]; /* origin and kind of the last rejected one */
} dc__tcp_pending;

typedef struct dc__tcp_group {
  atomic_int refs;      /* communicators */
  atomic_ullong calls;  /* collectives that they started */
  atomic_int checksums; /* dc_comm_set_checksums */
  int32_t rank;
  int32_t world;
  bool overlay; /* more than DC__TCP_MAX_MESH ranks */
  int64_t timeout_ns;
  int64_t formed_ns; /* time of the rendezvous; 0: not yet */
  char name[DC__TCP_NAME];
  bool sealed;                      /* the caller gave a secret */
  bool tls;                         /* connections are encrypted, except for the rendezvous' */
  unsigned char key[DC__MAC_BYTES]; /* derived from the secret; zeros without one */
  unsigned char run[DC__TCP_RUN];
  char network[64]; /* the interface to listen at, by name or addresses; empty: not given */
  int32_t first_port, last_port;
  unsigned char listens_at[16]; /* an address, or zeros: all of the machine */
  int listener;                 /* -1: none */
  dc__tcp_endpoint endpoints[DC__COMM_MAX_WORLD];
  pthread_mutex_t mesh_mutex; /* one mesh at a time; guards the fields up to early_count. In an overlay the watcher owns
                                 `pending`, and `mutex` guards the others. */
  int32_t meshes;             /* made so far */
  dc__tcp_pending pending;
  dc__tcp_early *early; /* from ranks that are ahead of this one */
  int64_t early_capacity;
  int32_t early_count;
  int64_t query_ns;                /* when to query other ranks about the mesh in progress; INT64_MAX: not (again) */
  dc__tcp_wait mesh_wait;          /* the ranks missing in the mesh in progress */
  int control[DC__COMM_MAX_WORLD]; /* -1: none */
  int failure_event;               /* readable once the group has failed */
  int wake_event;                  /* wakes the watcher to stop */
  atomic_int stopping;             /* 1 stops the watcher */
  bool watcher_running;
  pthread_t watcher;
  atomic_int closed[DC__COMM_MAX_WORLD]; /* DC__TCP_CLOSED, DC__TCP_DISCONNECTED; 0: connected */
  int64_t heartbeat_ns;
  int64_t late_ns;                           /* for the watcher: when it last found itself late */
  int64_t asked_ns[DC__COMM_MAX_WORLD];      /* for the watcher: since when the machine owes an answer, or 0 */
  atomic_llong heard_ns[DC__COMM_MAX_WORLD]; /* when the last bytes from its watcher arrived */
  atomic_int error[DC__COMM_MAX_WORLD];      /* errno if disconnected; 0: the peer closed the connection */
  atomic_bool outlived[DC__COMM_MAX_WORLD];  /* a data connection was open after the control connection had ended */
  pthread_mutex_t query_mutex;               /* one query at a time */
  pthread_mutex_t mutex;                     /* guards all below, and writes to control */
  pthread_cond_t changed;                    /* signals a message, a closed connection, the failure */
  bool unreachable[DC__COMM_MAX_WORLD];      /* a message could not be sent */
  struct {
    int32_t count;
    int64_t heard_ns;
  } queries[DC__COMM_MAX_WORLD]; /* in an overlay: sent to a neighbour since it was last heard */
  int32_t listens_for[DC__COMM_MAX_WORLD], listens_on[DC__COMM_MAX_WORLD]; /* a lower rank's mesh, and its port */
  struct dc__tcp *members;                                                 /* communicators */
  struct dc__tcp *forming;   /* the one in creation, by its only user; NULL: none */
  int32_t joined;            /* 1 + the last mesh that got a communicator */
  int64_t query;             /* the last query's number */
  dc__tcp_reply *replies;    /* of the query in progress, by rank; NULL if none */
  bool voted;                /* this rank has voted */
  dc__tcp_control_msg vote;  /* the best vote so far */
  dc__rank_set votes;        /* ranks whose vote has arrived; in an overlay also through others, and ended ranks */
  bool votes_grew;           /* in an overlay: neighbours may not know all of them */
  dc__rank_set told;         /* in an overlay: neighbours that know all of them */
  int32_t next_told;         /* the rank at which to continue */
  dc__rank_set ended;        /* in an overlay: ranks that ended without a goodbye */
  bool ended_grew;           /* likewise */
  int32_t ended_error;       /* errno of the latest one */
  int64_t pass_ns;           /* when neighbours may be told of news again */
  dc__rank_set unresponsive; /* ranks that did not answer the last query */
  int64_t vote_deadline;     /* end of the wait for votes */
  dc__failure failure;
  atomic_int failed;
  atomic_bool calls_differed; /* a comparison has ended on all ranks and found it */
} dc__tcp_group;

/* An exchange of messages with two ranks, which may be one. */
typedef struct dc__tcp_swap {
  int32_t to, from;
  const void *out; /* copied before it is sent */
  void *in;
  size_t bytes; /* of either, at most DC__TCP_SWAP_BYTES */
  /* Called every few milliseconds of the wait, which ends with its error. */
  dc_status (*check)(void *arg);
  void *arg;
} dc__tcp_swap;

enum { DC__TCP_SWAP_BYTES = 64 };

/* Another network, over which the ranks compare their calls. */
typedef struct dc__tcp_carrier {
  void *context;
  dc_status (*swap)(void *context, const dc__tcp_swap *swap);
} dc__tcp_carrier;

typedef struct dc__tcp {
  struct dc_comm head;
  dc__tcp_group *group;
  struct dc__tcp *next; /* in group->members */
  int32_t mesh;
  pthread_mutex_t collective_mutex; /* one collective at a time */
  uint64_t seq;                     /* of the latest collective */
  atomic_ullong reached; /* for the watcher: seq, its number in the group's order, its operator, its parameter */
  atomic_ullong number;
  atomic_int op;
  atomic_llong id;
  dc__tcp_wait wait;
  dc__comm_usage usage;
  struct dc__tcp_transfer *transfers; /* one per rank; this rank's has no connection */
  int *fds;                           /* of the connections, by rank; -1: none. The group's mutex guards changes. */
  int arrival_event;                  /* in an overlay: readable when a rank connected or ended; -1: none */
  struct pollfd *polls;
  dc__tcp_reply *replies;    /* to this communicator's query, by rank */
  dc__rank_set unresponsive; /* ranks that did not answer it */
  char *scratch;             /* received parts of reductions */
  size_t scratch_bytes;
  const dc__tcp_carrier *carrier; /* NULL: calls are compared over the connections. The same on all ranks. */
} dc__tcp;

/* ---- rendezvous.c: opens the listener and fills in endpoints ---- */

dc_status dc__tcp_rendezvous(dc__tcp_group *group, const dc__tcp_address *address, int64_t deadline);
/* Sends this thread's last error to a connection that asked for a rendezvous. */
void dc__tcp_reject(int fd, dc_status status);

/* ---- listen.c: opens the listener ---- */

bool dc__tcp_is_loopback(const unsigned char address[16]);
/* Whether it is an IPv4-mapped address. */
bool dc__tcp_is_mapped(const unsigned char address[16]);
/* Opens the group's listener. `near` is an address of this machine. */
dc_status dc__tcp_listen_near(dc__tcp_group *group, const struct sockaddr *near, int32_t port);
/* Does nothing if the caller listens already. */
dc_status dc__tcp_listen_root(dc__tcp_group *group, const dc__tcp_address *address);
/* An address of the interface that options.network means. */
dc_status dc__tcp_find_address(const char *fn, const char *network, unsigned char found[16]);
/* fd: the connection to rank 0. */
dc_status dc__tcp_listen_peer(dc__tcp_group *group, int fd);
/* Opens a listener at the address where the group listened before, at a new port. */
dc_status dc__tcp_listen_new(const dc__tcp_group *group, int32_t *port, int *fd);
/* Reopen and close the group's own listener. Both require mesh_mutex. */
dc_status dc__tcp_listen_again(dc__tcp_group *group);
void dc__tcp_stop_listening(dc__tcp_group *group);

/* ---- handshake.c: incoming connections ---- */

dc__tcp_hello dc__tcp_hello_make(const dc__tcp_group *group, int32_t mesh);
/* An error if a hello is of another group. */
dc_status dc__tcp_hello_check(const dc__tcp_group *group, const dc__tcp_hello *hello);
/* Notes a rejected connection for error texts. */
void dc__tcp_note_rejected(dc__tcp_pending *pending, int fd, const char *what);
/* Returns `status`. If this process lacked descriptors, adds that to the error, which may blame another rank. */
dc_status dc__tcp_add_lack(const dc__tcp_group *group, dc_status status);
/* Frees a descriptor: closes the pending connection that has sent the least, and of these the oldest. False if all have
 * proved that they belong to the group. */
bool dc__tcp_drop_pending(dc__tcp_group *group);
/* Waits for a handshake until the deadline. True if one is complete; the caller owns the connection. False with *status
 * DC_OK if none is. Rejects connections of other processes. A readable descriptor of extra ends the wait. */
bool dc__tcp_wait_hello(dc__tcp_group *group, const int *extra, int32_t extra_count, int64_t deadline,
                        dc__tcp_hello *hello, int *fd, dc_status *status);
/* One step of dc__tcp_wait_hello(), without waiting. can_accept: the listener is readable. */
bool dc__tcp_poll_hello(dc__tcp_group *group, bool can_accept, dc__tcp_hello *hello, int *fd, dc_status *status);
/* When the oldest pending connection has had its time to prove itself; INT64_MAX if there is none. */
int64_t dc__tcp_pending_expiry(const dc__tcp_pending *pending);
void dc__tcp_pending_close(dc__tcp_pending *pending);

/* ---- mesh_calls.c ---- */

/* Connects to lower ranks that listen. fds gets the connections that are complete. */
dc_status dc__tcp_connect_ranks(dc__tcp_group *group, int32_t mesh, int64_t deadline, const dc__rank_set *ranks,
                                int *fds);

/* ---- mesh.c ---- */

/* A rank's connection that arrived early for a mesh; NULL if there is none. Taking it returns its descriptor, or -1. */
dc__tcp_early *dc__tcp_find_early(const dc__tcp_group *group, int32_t mesh, int32_t rank);
int dc__tcp_take_early(dc__tcp_group *group, int32_t mesh, int32_t rank);
/* Keeps an early connection. `other` is one that the same rank has already, which makes it an error; -1: none. The
 * caller closes fd after an error. */
dc_status dc__tcp_keep_early(dc__tcp_group *group, const dc__tcp_hello *hello, int fd, int other);
/* A rank asks for a rendezvous, but none is in progress. */
dc_status dc__tcp_fail_no_rendezvous(const dc__tcp_group *group, const dc__tcp_hello *hello);

/* Collective. Makes the group's next mesh: fds has one connection per rank, -1 for this one. comm gets the mesh's
 * number; NULL for the control mesh. If the control mesh fails, fds keeps the connections made so far, over which the
 * failure is reported. If any mesh fails, the rank listens until the group has failed: a refused rank would report the
 * refusal instead. */
dc_status dc__tcp_mesh_connect(dc__tcp_group *group, dc__tcp *comm, int64_t deadline, int *fds);
/* For the watcher, under the mutex: a lower rank listens for a mesh. */
void dc__tcp_handle_listening(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *message);

/* ---- failure.c: one failure for the whole group ---- */

/* The group's failure, as this thread's last error. */
dc_status dc__tcp_group_check(dc__tcp_group *group);
/* Fails the group on all ranks with one error: this thread's last one, or another rank's. Returns once the ranks have
 * agreed, or after a timeout. */
void dc__tcp_group_fail(dc__tcp_group *group, dc_status status);
/* The same without waiting, for the watcher. */
void dc__tcp_group_fail_async(dc__tcp_group *group, dc_status status);
/* For the watcher, under the mutex: a vote arrived; a connection ended, or time passed. */
void dc__tcp_handle_vote(dc__tcp_group *group, int32_t r, dc__tcp_control_msg *vote);
void dc__tcp_decide_failure(dc__tcp_group *group);
/* Whether the group fails with vote a rather than with b. */
bool dc__tcp_vote_outranks(const dc__tcp_control_msg *a, const dc__tcp_control_msg *b);
/* Whether a received status and text are a failure; escapes the text. */
bool dc__tcp_is_failure(int32_t status, char text[DC__TCP_TEXT]);
/* Waits for dc__tcp_group.changed, under the mutex; may return early. */
void dc__tcp_wait_change(dc__tcp_group *group, int64_t until);
/* Send to one rank (in an overlay through others), to a connected rank, or to all connected ranks. They require the
 * mutex, so that messages do not interleave. */
void dc__tcp_send_control(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *message);
void dc__tcp_send_directly(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *message);
void dc__tcp_broadcast_control(dc__tcp_group *group, const dc__tcp_control_msg *message);

/* ---- watcher.c ---- */

dc_status dc__tcp_start_watcher(dc__tcp_group *group);

/* ---- liveness.c ---- */

/* Prepares the control connections. */
void dc__tcp_start_heartbeats(dc__tcp_group *group);
/* For the watcher, each heartbeat_ns: sends a heartbeat to all ranks, and fails the group if a machine has not answered
 * for three. was_late: this watcher did not run in time, so silence proves nothing. */
void dc__tcp_send_heartbeats(dc__tcp_group *group, bool was_late);
/* For the watcher, twice after a control connection ended without a goodbye. The second call fails the group if a data
 * connection to that rank is open. If none is, the rank died, and a rank that waits for it reports that. False if it
 * need not be called again. */
bool dc__tcp_check_ended(dc__tcp_group *group, int32_t r);
/* Whether heartbeats are missing from a rank that has a control connection. */
bool dc__tcp_is_silent(dc__tcp_group *group, int32_t r);
/* A rank's address, without its port. */
void dc__tcp_host_text(const dc__tcp_group *group, int32_t r, char text[DC__TCP_PEER]);
/* If a rank is silent although its machine answers, adds for how long to the text. */
void dc__tcp_describe_silence(dc__tcp_group *group, int32_t r, char *text, size_t cap);

/* ---- stragglers.c: the ranks that delay others ---- */

void dc__tcp_wait_begin(dc__tcp_wait *wait, const dc__rank_set *ranks);
void dc__tcp_wait_end(dc__tcp_wait *wait);
/* Asks ranks whether they have joined this communicator's present collective. Waits at most a second, or until the
 * group fails. */
void dc__tcp_query_ranks(dc__tcp *self, const dc__rank_set *ranks);
void dc__tcp_query_all(dc__tcp *self);
/* Queries all ranks; in an overlay those that this rank waits for, and the ones that they wait for in turn. */
void dc__tcp_query_missing(dc__tcp *self, const dc__rank_set *missing);
/* For the watcher, under the mutex. */
void dc__tcp_handle_query(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *query);
void dc__tcp_handle_reply(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *reply);
/* At a deadline, after dc__tcp_query_ranks(): DC_E_TIMEOUT that names the stragglers, which may be other ranks than
 * `missing`. has_header: the calls of `missing` have arrived, but not all data. */
dc_status dc__tcp_fail_timeout(const dc__tcp *self, const dc__rank_set *missing, bool has_header, const char *op_text);
/* The reason why the connection to rank r ended, as an error: a reported failure, else the state of the rank. error is
 * errno, or 0 if it was closed; left: the rank announced that it destroys this communicator. */
dc_status dc__tcp_fail_lost(dc__tcp *self, int32_t r, int error, bool left, const char *op_text);
/* The rank destroyed this communicator. */
dc_status dc__tcp_fail_left(const dc__tcp_group *group, int32_t r, const char *op_text);
/* The reason why a rank is gone, once dc__tcp_group.closed is set. */
dc_status dc__tcp_fail_closed(dc__tcp_group *group, int32_t r, const char *op_text);

/* ---- deadlock.c ---- */

/* For the watcher, under the mutex: adds to the reply what blocks the queried communicator's user, unless the user has
 * requested the query's collective. queried: NULL if this rank does not have it yet. */
void dc__tcp_add_blocked(const dc__tcp_group *group, const dc__tcp *queried, const dc__tcp_control_msg *query,
                         dc__tcp_control_msg *reply);
/* Called while calls of the present collective are missing: publishes whether it blocks this rank's user. The first
 * time, queries whether peers are blocked in collectives that the user has not requested, which is an error for all. */
dc_status dc__tcp_check_deadlock(dc__tcp *self, const dc__rank_set *missing, const char *op_text);
/* Only checks for the error, after dc__tcp_query_ranks(). */
dc_status dc__tcp_fail_deadlock(dc__tcp *self, const char *op_text);
/* Called once while ranks are missing in the creation of this communicator: the same query. */
dc_status dc__tcp_check_forming(dc__tcp *self);

/* ---- group.c ---- */

/* listener: rank 0's, at the address's port, which it takes over even if it fails; -1: none yet. */
dc_status dc__tcp_group_create(int listener, const char *address, const char *name, int32_t rank, int32_t world,
                               const dc_comm_options *options, dc__tcp_group **out);
void dc__tcp_group_release(dc__tcp_group *group);
void dc__tcp_group_add(dc__tcp_group *group, dc__tcp *member);
void dc__tcp_group_remove(dc__tcp_group *group, const dc__tcp *member);

/* ---- collective.c ---- */

void dc__tcp_run(dc_comm *comm, const dc__coll *coll);
/* Announces to all peers that this communicator is destroyed, without waiting. */
void dc__tcp_leave(const dc__tcp *self);
bool dc__tcp_agree(dc_comm *comm, const dc__coll *coll, uint64_t word);

/* split.c */
dc_status dc__tcp_split(dc_comm *comm, const dc__split *split, dc_comm **part);

#endif
