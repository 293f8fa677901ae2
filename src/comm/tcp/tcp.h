/* The transport between machines: every rank has a connection to every other one, of TCP.
 *
 * Rank 0 listens where the caller said and tells all ranks where each of them listens (rendezvous.c). A mesh is one
 * connection between any two ranks, made by the higher one (mesh.c): each communicator of the group has one for its
 * collectives, and the group has one more, by which a rank says that it failed or goes (group.c).
 *
 * In a collective each rank sends everybody its call and, behind it, what that rank is to have. It reads all calls and
 * compares them before it reads any data (move.c), so nothing is written where ranks differ. Data go from the caller's
 * memory to the caller's memory; parts of a reduction go to a rank of their own, which adds them in the order of ranks.
 */
#ifndef DC_COMM_TCP_H
#define DC_COMM_TCP_H

#include <sys/uio.h>

#include "comm/call.h"
#include "comm/tcp/socket.h"

enum {
  DC__TCP_PROTOCOL = 1, /* raise it when a message changes */
  DC__TCP_NAME = 88,    /* of the group, zeros behind it */
  DC__TCP_TEXT = 512,
  DC__TCP_MEETING = -1,  /* the mesh number of who wants rank 0's table */
  DC__TCP_CONTROL = 0,   /* that of the group's own mesh */
  DC__TCP_PENDING = 256, /* connections that have not said who they are */
  DC__TCP_LEAVES = 0,    /* in place of a call's number: the rank destroys this communicator, and maybe no other */
  DC__TCP_GONE = 1,      /* a rank's last communicator went */
  DC__TCP_ENDED = 2      /* its connection ended without a word */
};

/* The first word of every connection. */
typedef struct dc__tcp_hello {
  char magic[8];
  uint32_t order;    /* 1: who reads another number has another order of bytes */
  uint32_t protocol; /* DC__TCP_PROTOCOL, and sizes of structs */
  int32_t rank;
  int32_t world;
  int32_t mesh;
  int32_t port; /* DC__TCP_MEETING: where the rank listens */
  char name[DC__TCP_NAME];
} dc__tcp_hello;

/* Where a rank listens: an address of IPv6, or one of IPv4 mapped into it. */
typedef struct dc__tcp_place {
  unsigned char address[16];
  int32_t port;
  int32_t here; /* 1: on rank 0's machine; the address is that by which rank 0 was reached */
} dc__tcp_place;

/* Rank 0's answer to DC__TCP_MEETING. */
typedef struct dc__tcp_welcome {
  int32_t status;
  int32_t reserved;
  char text[DC__TCP_TEXT];
  dc__tcp_place places[DC__COMM_MAX_WORLD];
} dc__tcp_welcome;

/* What goes over the group's own mesh. */
typedef struct dc__tcp_notice {
  int32_t status; /* DC_OK: the rank's last communicator goes */
  int32_t reserved;
  char text[DC__TCP_TEXT];
} dc__tcp_notice;

/* A connection that said its hello before its mesh was asked for. */
typedef struct dc__tcp_early {
  int fd;
  int32_t mesh;
  int32_t rank;
} dc__tcp_early;

/* Connections that were accepted and have not said all of their hello. */
typedef struct dc__tcp_pending {
  int fds[DC__TCP_PENDING];
  size_t heard[DC__TCP_PENDING];
  dc__tcp_hello hellos[DC__TCP_PENDING];
  int32_t count;
} dc__tcp_pending;

typedef struct dc__tcp_group {
  atomic_int refs; /* communicators */
  int32_t rank;
  int32_t world;
  int64_t timeout_ns;
  char name[DC__TCP_NAME];
  int listener;
  dc__tcp_place places[DC__COMM_MAX_WORLD];
  pthread_mutex_t meeting; /* one mesh at a time */
  int32_t meshes;          /* made so far */
  dc__tcp_pending pending; /* from mesh to mesh: who is slow to say his hello may be a rank that is ahead */
  dc__tcp_early *early;    /* of ranks that make several communicators while this one is busy elsewhere */
  int64_t early_room;
  int32_t early_count;
  int control[DC__COMM_MAX_WORLD]; /* -1: none */
  int alarm;                       /* readable from the group's failure on */
  int stop;                        /* ends the watcher */
  bool watched;
  pthread_t watcher;
  atomic_int gone[DC__COMM_MAX_WORLD]; /* DC__TCP_GONE, DC__TCP_ENDED; 0: there */
  pthread_mutex_t mutex;               /* failure, and who writes notices */
  dc__failure failure;
  atomic_int failed;
} dc__tcp_group;

/* What goes to a rank and comes from it in one collective: a call and then data. */
typedef struct dc__tcp_flow {
  int fd;
  int32_t out_count, out_at;
  int32_t in_count, in_at;
  size_t heard; /* bytes of its head */
  struct iovec out[DC__COMM_GROUP + 1];
  struct iovec in[DC__COMM_GROUP];
  struct dc__tcp_head {
    uint64_t seq;   /* from 1, or DC__TCP_LEAVES */
    uint64_t bytes; /* of data behind it */
    dc__call call;
  } theirs, ours;
} dc__tcp_flow;

typedef struct dc__tcp {
  struct dc_comm head;
  dc__tcp_group *group;
  pthread_mutex_t turn; /* one collective at a time */
  uint64_t seq;
  dc__tcp_flow *flows; /* one a rank; this rank's has no connection */
  struct pollfd *polls;
  char *scratch; /* what comes for reductions */
  size_t scratch_bytes;
} dc__tcp;

/* ---- rendezvous.c: opens the listener and fills in places ---- */

dc_status dc__tcp_rendezvous(dc__tcp_group *group, const dc__tcp_address *address, int64_t deadline);

/* ---- mesh.c ---- */

dc__tcp_hello dc__tcp_hello_of(const dc__tcp_group *group, int32_t mesh);
/* Whether a hello is of this group and of a rank of it. */
bool dc__tcp_hello_fits(const dc__tcp_group *group, const dc__tcp_hello *hello);
/* The group's next mesh: fds has one a rank, -1 for this one. Every rank must ask for it. */
dc_status dc__tcp_mesh(dc__tcp_group *group, int64_t deadline, int *fds);

/* Waits, at most to the deadline, for somebody to say who he is: true, and his connection is the caller's. False with
 * *status DC_OK: nobody did. Others than libdc are sent away. extra: more that ends the wait when it is readable. */
bool dc__tcp_next_hello(dc__tcp_group *group, const int *extra, int32_t extra_count, int64_t deadline,
                        dc__tcp_hello *hello, int *fd, dc_status *status);
void dc__tcp_pending_close(dc__tcp_pending *pending);

/* ---- group.c ---- */

dc_status dc__tcp_group_create(const char *address, const char *name, int32_t rank, int32_t world, int64_t timeout_ns,
                               dc__tcp_group **out);
void dc__tcp_group_release(dc__tcp_group *group);
/* Whether what another rank said is why it failed. */
bool dc__tcp_is_failure(int32_t status, const char *text);
/* The group's failure, as this thread's last error. */
dc_status dc__tcp_group_check(dc__tcp_group *group);
/* Makes the group fail with this thread's last error, unless it has; tell: all ranks hear of it. */
void dc__tcp_group_fail(dc__tcp_group *group, dc_status status, bool tell);
/* Why rank r's connection ended, as an error: a failure that it or another one reported, else that it is gone. left: it
 * has said that it destroys this communicator. */
dc_status dc__tcp_group_lost(dc__tcp_group *group, int32_t r, bool left, const char *doing);

/* ---- move.c ---- */

void dc__tcp_run(dc_comm *comm, const dc__coll *coll);
/* Says to all others that this communicator goes, if they can hear it at once. */
void dc__tcp_leave(const dc__tcp *self);
bool dc__tcp_agree(dc_comm *comm, const dc__coll *coll, uint64_t word);

#endif
