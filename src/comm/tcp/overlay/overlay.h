/* Groups of many ranks. A control connection between any two ranks, and a data connection in each communicator, would
 * be N^2 connections, each with heartbeats and keep-alive probes.
 *
 * Ranks form a ring, and a rank's neighbours are 1, 2, 4, 8... places away in both directions: 19 of 1,023. Neighbours
 * have control connections, and pass on messages for others (overlay.c): votes and ends of ranks to all, and queries on
 * their way to one rank. Each step goes to the neighbour nearest to that rank, so there are at most log2(N) / 2 + 1
 * steps. If a neighbour has ended, another one passes messages on.
 *
 * Data connections are made when a collective first needs them, by the higher rank (demand.c). So each rank listens as
 * long as the group lives, and its watcher accepts. They have no keep-alive probes, since those of N^2 connections
 * overflow a busy machine's packet queue, and three lost probes break a connection. The neighbours of a vanished
 * machine's ranks notice its end. A cut between only two ranks is noticed at the deadline. */
#ifndef DC_COMM_TCP_OVERLAY_H
#define DC_COMM_TCP_OVERLAY_H

#include "comm/tcp/collective.h"

enum { DC__TCP_PASS_NS = 10000000 /* between messages of news to neighbours, so that one has news of many ranks */ };

/* ---- overlay.c ---- */

/* Whether this rank has a control connection to rank r: always in a mesh. */
bool dc__tcp_is_neighbour(const dc__tcp_group *group, int32_t r);
/* The neighbour by which a message reaches rank `to`; -1: none is left. came_from: a neighbour to avoid; -1: none. */
int32_t dc__tcp_next_hop(dc__tcp_group *group, int32_t to, int32_t came_from);
/* The next five require the group's mutex. Passes on a message whose from, to and hops are set. */
void dc__tcp_pass_on(dc__tcp_group *group, const dc__tcp_control_msg *message, int32_t came_from);
/* True if the message is not for this rank: it was passed on, or names ranks that do not exist. */
bool dc__tcp_route(dc__tcp_group *group, int32_t came_from, dc__tcp_control_msg *message);
/* The control connection to rank r ended without a goodbye. All ranks are told, and of others that end meanwhile too:
 * at the end of a program all of its ranks may. */
void dc__tcp_add_ended(dc__tcp_group *group, int32_t r, int error);
void dc__tcp_pass_ended(dc__tcp_group *group);
void dc__tcp_handle_ended(dc__tcp_group *group, const dc__tcp_control_msg *message);

/* ---- votes.c: all require the group's mutex, and do nothing in a mesh ---- */

/* Notes the group's first vote, before it is sent to all. */
void dc__tcp_begin_votes(dc__tcp_group *group, const dc__tcp_control_msg *vote);
/* Neighbour r's vote may have news for this rank, or show that r has all that this rank could tell. */
void dc__tcp_merge_votes(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *vote);
/* Tells neighbours of the votes that this rank has learned of since: some of them, or all at once. */
void dc__tcp_pass_votes(dc__tcp_group *group);
void dc__tcp_pass_votes_to_all(dc__tcp_group *group);

/* ---- demand.c ---- */

/* Fills in what the watcher polls for new connections. */
int32_t dc__tcp_serve_polls(const dc__tcp_group *group, struct pollfd *polls);
/* For the watcher: continues handshakes. can_accept: the listener is readable. */
void dc__tcp_serve(dc__tcp_group *group, bool can_accept);
/* Wakes communicators that wait for a rank to connect; requires the group's mutex. */
void dc__tcp_signal_arrival(const dc__tcp_group *group);
/* Forgets connections of a communicator that is destroyed; requires the group's mutex. */
void dc__tcp_drop_early(dc__tcp_group *group, int32_t mesh);
/* Connects to the lower ones of these ranks. Does nothing in a mesh, or if all are connected. */
dc_status dc__tcp_connect_lower(dc__tcp_plan *p, const dc__rank_set *ranks);
/* Takes the connection of a higher rank, if it has arrived: self->fds[r] is -1 until then. An error if it cannot
 * come. */
dc_status dc__tcp_take_connection(const dc__tcp_plan *p, int32_t r, bool *progress);

#endif
